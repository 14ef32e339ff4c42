"""Statistics of a layer's activations: sums over calibration samples, computed in one pass.

A layer computes y = x W with W [in, out].  A sample is a sequence of tokens, x_s [tokens, in].  Every statistic is a
sum over samples, so chunks, batches and devices merge by addition:

    stats = add(stats, of(x, y))        x [..., tokens, in]: every leading index is one whole sample

Invariance.  The numbers of a sample are computed from that sample alone, by the same program for every batch.  Sums
over samples are kept as unevaluated pairs hi + lo (twice the digits of the dtype).  The split of the samples into
batches, chunks and devices, and their order, change the sums by about 1e-14 of the sum of magnitudes in float32.  After
rounding to float32 the sums are almost always the same bit for bit.  The same split in the same order gives the same
bits.  A sample is never split, because the variance is taken within samples.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from commjax.core.tree import varying_like

Vector = Float[Array, "d"]


class Sum(NamedTuple):
    """An unevaluated sum hi + lo.

    Attributes:
        hi: The sum, rounded to the dtype.
        lo: The rest; |lo| is at most half an ulp of hi.
    """

    hi: Float[Array, "*d"]
    lo: Float[Array, "*d"]


class Statistics(NamedTuple):
    """Sums over samples s and tokens t; read them with the functions of this module.

    Attributes:
        samples: Number of samples.
        tokens: Number of tokens of all samples.
        x: [in], sum_st x_stj.
        squares: [in], sum_st x_stj^2.
        spread: [in], sum_st (x_stj - mean_t x_stj)^2, within samples.
        outputs: [out], sum_st y_stk^2; None if the outputs were not given.
        gram: [in, in], sum_st x_sti x_stj, a plain sum; None unless it was asked for.  Only the reconstruction error
            needs it.
    """

    samples: Int[Array, "*n"]
    tokens: Int[Array, "*n"]
    x: Sum
    squares: Sum
    spread: Sum
    outputs: Sum | None
    gram: Float[Array, "*n i i"] | None


def wide(*dtypes: Any) -> Any:
    """Return the dtype to compute in.

    Args:
        *dtypes: Dtypes of the operands.

    Returns:
        float64 if one of the dtypes is float64, else float32.
    """
    return jnp.float64 if any(dtype == jnp.float64 for dtype in dtypes) else jnp.float32


def _plus(a: Sum, b: Sum) -> Sum:
    """a + b with twice the digits (Knuth's two-sum)."""
    total = a.hi + b.hi
    back = total - a.hi
    rest = (a.hi - (total - back)) + (b.hi - back) + (a.lo + b.lo)
    hi = total + rest
    return Sum(hi, rest - (hi - total))


@jax.jit
def add(a: Statistics, b: Statistics) -> Statistics:
    """Merge the statistics of two sets of samples of one layer.

    Args:
        a: Statistics of some samples.
        b: Statistics of other samples of the same layer.

    Returns:
        Statistics of all samples.  `outputs` and `gram` are None unless both have them.
    """
    sums = {name: _plus(getattr(a, name), getattr(b, name)) for name in ("x", "squares", "spread")}
    outputs = None if a.outputs is None or b.outputs is None else _plus(a.outputs, b.outputs)
    gram = None if a.gram is None or b.gram is None else a.gram + b.gram
    return Statistics(a.samples + b.samples, a.tokens + b.tokens, outputs=outputs, gram=gram, **sums)


def _zero(dtype: DTypeLike, d: int) -> Sum:
    return Sum(jnp.zeros(d, dtype), jnp.zeros(d, dtype))


def of(x: Float[Array, "..."], y: Float[Array, "..."] | None = None, *, gram: bool = False) -> Statistics:
    """Compute the statistics of one batch, in float32 or better.

    >>> stats = of(jnp.array([[3.0, 1.0, 0.0], [4.0, 0.0, 2.0]]))
    >>> input_norm(stats).tolist(), mean(stats).tolist(), variance(stats).tolist()
    ([5.0, 1.0, 2.0], [3.5, 0.5, 1.0], [0.25, 0.25, 1.0])

    Args:
        x: Inputs of a linear layer, [..., tokens, in].
        y: Its outputs x W, [..., tokens, out], if output norms are needed.
        gram: Also compute x^T x, which costs a matrix product.

    Returns:
        The statistics of the samples of the batch.
    """
    if x.ndim < 2 or 0 in x.shape:
        raise ValueError(f"x has shape {x.shape}; allowed: [..., tokens, in] with at least one token")
    if y is not None and y.shape[:-1] != x.shape[:-1]:
        raise ValueError(f"y has shape {y.shape}; allowed: {x.shape[:-1]} and the outputs, as x has {x.shape}")
    return _of(x, y, gram)


@partial(jax.jit, static_argnames="gram")
def _of(x: Float[Array, "*samples tokens i"], y: Float[Array, "*samples tokens o"] | None, gram: bool) -> Statistics:
    tokens, d = x.shape[-2:]
    dtype = wide(x.dtype)
    x = x.reshape(-1, tokens, d)
    y = None if y is None else y.reshape(-1, tokens, y.shape[-1])

    def add_sample(total: Statistics, sample: tuple[Array, Array | None]) -> tuple[Statistics, None]:
        x, y = sample[0].astype(dtype), None if sample[1] is None else sample[1].astype(dtype)
        sums = jnp.sum(x, axis=0)
        deviation = x - (sums / tokens)[None]
        new = Statistics(
            samples=jnp.ones((), jnp.int32),
            tokens=jnp.full((), tokens, jnp.int32),
            x=Sum(sums, jnp.zeros_like(sums)),
            squares=Sum(jnp.sum(x * x, axis=0), jnp.zeros_like(sums)),
            spread=Sum(jnp.sum(deviation * deviation, axis=0), jnp.zeros_like(sums)),
            outputs=None if y is None else Sum(jnp.sum(y * y, axis=0), jnp.zeros_like(y[0])),
            gram=jnp.matmul(x.T, x, precision="highest") if gram else None,
        )
        return add(total, new), None

    start = Statistics(
        samples=jnp.zeros((), jnp.int32),
        tokens=jnp.zeros((), jnp.int32),
        x=_zero(dtype, d),
        squares=_zero(dtype, d),
        spread=_zero(dtype, d),
        outputs=None if y is None else _zero(dtype, y.shape[-1]),
        gram=jnp.zeros((d, d), dtype) if gram else None,
    )
    return jax.lax.scan(add_sample, varying_like(start, x), (x, y))[0]


def over_devices(stats: Statistics, axis_name: str) -> Statistics:
    """Sum statistics over a mapped axis, with the precision of `add` (a psum of hi would lose digits).

    Args:
        stats: Statistics of this device.
        axis_name: Name of the mapped axis.

    Returns:
        The statistics of all devices, the same on every device.
    """
    gram = None if stats.gram is None else jax.lax.psum(stats.gram, axis_name)
    rows = jax.lax.all_gather(stats._replace(gram=None), axis_name)
    n = rows.samples.shape[0]
    total = jax.tree.map(lambda leaf: leaf[0], rows)
    for i in range(1, n):
        total = add(total, jax.tree.map(lambda leaf, i=i: leaf[i], rows))
    return total._replace(gram=gram)


def _per(total: Sum, count: Int[Array, ""]) -> Vector:
    return (total.hi + total.lo) / count.astype(total.hi.dtype)


def input_norm(stats: Statistics) -> Vector:
    """Return the norm of each input, |X_:j|_2 / sqrt(samples): the square root of Wanda's `scaler_row`.

    Args:
        stats: Statistics of the layer.

    Returns:
        The norms [in].
    """
    return jnp.sqrt(_per(stats.squares, stats.samples))


def output_norm(stats: Statistics) -> Vector:
    """Return the norm of each output, |Y_:k|_2 / sqrt(samples).

    Args:
        stats: Statistics with outputs, made by of(x, y).

    Returns:
        The norms [out].
    """
    if stats.outputs is None:
        raise ValueError("stats has no outputs; allowed: statistics made by of(x, y)")
    return jnp.sqrt(_per(stats.outputs, stats.samples))


def input_sum(stats: Statistics) -> Vector:
    """Return the sum of each input over the tokens of a sample, as the mean over samples.

    DSnoT measures its expected error in these units.

    Args:
        stats: Statistics of the layer.

    Returns:
        The sums [in].
    """
    return _per(stats.x, stats.samples)


def mean(stats: Statistics) -> Vector:
    """Return the mean of each input over all tokens.

    Args:
        stats: Statistics of the layer.

    Returns:
        The means [in].
    """
    return _per(stats.x, stats.tokens)


def variance(stats: Statistics) -> Vector:
    """Return the variance of each input: the mean over tokens of the biased variance within samples.

    This is not the pooled variance; the released code does the same.

    Args:
        stats: Statistics of the layer.

    Returns:
        The variances [in].
    """
    return _per(stats.spread, stats.tokens)
