"""Training-free fine-tuning: swap pruned and kept weights until the expected error of every output is near zero.

For every output, let eps = x W - x W~, and let M_j = W_j E[x_j] be the contributions of the dense weights.  E eps is
the sum of M over the pruned inputs.  One swap grows the input g and prunes the input p, E eps <- E eps + M_p - M_g:

    g = argmax_{pruned, sign(E eps) G_g > 0}  |G_g|          G = the grow score, signed
    p = argmin_{kept,   sign(E eps) M_p < 0}  P_p            P = the prune score

`dsnot` is DSnoT as released.  `r2_dsnot` is R^2-DSnoT: the same swaps with other scores (`commjax.pruning.swaps`).

Thesis: Sec. 6.3.6, settings Sec. E.3.1.
Differs (docs/errata.md): W2 (statistics of the input, not of the output), W3 (dense weights over the pruned set).  When
the released code has no candidates left, it reads beyond its lists and loses count; in commjax such an output is done.
"""

import math
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from commjax.pruning import statistics
from commjax.pruning.masks import Mask, check_pattern
from commjax.pruning.scores import Vector, norm
from commjax.pruning.statistics import Statistics
from commjax.pruning.swaps import in_blocks, swaps

Matrix = Float[Array, "i o"]
Regularizer = Literal["out", "in", "toggled"]
Column = Float[Array, "i 1"]


def dsnot(
    W: Matrix,
    mask: Bool[Array, "_ _"],
    stats: Statistics,
    *,
    pattern: tuple[int, int] | None = None,
    prune: Float[Array, "_ _"] | None = None,
    cycles: int = 50,
    threshold: float = 0.1,
    power: float = 1.0,
    same_sign: bool | None = None,
) -> tuple[Matrix, Bool[Array, "i o"]]:
    """DSnoT: swap pruned and kept weights of any mask, with grow scores G = M / Var^power and Wanda's prune scores.

    M_jk = W_jk E[x_j] is the mean contribution of input j to output k, and Var is the variance of x_j.  An input with
    neither mean nor variance is no candidate.  An input with a mean but no variance grows first.

    Thesis: Sec. 6.3.6.
    Differs (docs/errata.md): W2 (statistics of the input, not of the output), W3 (dense weights over the pruned set).

    Args:
        W: Dense weights [in, out].
        mask: Mask before the swaps [in, out].
        stats: Statistics of the layer's inputs.
        pattern: (n, m) of a mask that keeps n of every m inputs.  A swap then prunes the input of least prune score in
            the group of m of the grown input, whatever its sign.
        prune: Prune score P [in, out]; None: Wanda's score.  With a pattern, the released code takes the scores that
            made the mask, so give those.
        cycles: Largest number of swaps of an output.
        threshold: An output is done when |E eps| times the tokens of a sample is at most this.
        power: Power of the variance in the grow score.
        same_sign: An output is also done when the next swap would change the sign of E eps.  None: as released, True
            with a pattern and False without.

    Returns:
        The pruned weights W~ [in, out] and the mask after the swaps [in, out].
    """
    same_sign = _checked(
        W, mask, stats, pattern=pattern, cycles=cycles, threshold=threshold, power=power, same_sign=same_sign
    )
    if prune is not None and prune.shape != W.shape:
        raise ValueError(f"prune has shape {prune.shape}; allowed: that of W, {W.shape}")
    m = pattern and pattern[1]
    return _dsnot(W, mask, stats, prune, threshold=threshold, power=power, cycles=cycles, m=m, same_sign=same_sign)


@partial(jax.jit, static_argnames=("power", "m", "same_sign"))
def _dsnot(
    W: Matrix,
    mask: Mask,
    stats: Statistics,
    prune: Matrix | None,
    *,
    threshold: Array | float,
    power: float,
    cycles: Array | int,
    m: int | None,
    same_sign: bool,
) -> tuple[Matrix, Mask]:
    sums, _, variance, norms = _columns(W, stats)
    divisor, threshold, cycles = variance**power, jnp.asarray(threshold, sums.dtype), jnp.asarray(cycles, jnp.int32)

    # The block computes its scores as well, so that the whole score matrix is never written to memory.
    def block(W: Matrix, mask: Mask, *given: Matrix) -> Mask:
        w = W.astype(sums.dtype)
        grow = _quotient(w * sums, divisor)
        prune = given[0].astype(w.dtype) if given else jnp.abs(w) * norms
        return swaps(mask, w, sums[:, 0], grow, prune, threshold=threshold, cycles=cycles, m=m, same_sign=same_sign)

    mask = in_blocks(block, W, mask, *(() if prune is None else (prune,)))
    return jnp.where(mask, W, 0), mask


def r2_dsnot(
    W: Matrix,
    mask: Bool[Array, "_ _"],
    stats: Statistics,
    *,
    relative_grow: bool = True,
    relative_prune: bool = False,
    alpha: float = 0.5,
    gamma_grow: float = 0.0,
    gamma_prune: float = 0.0,
    p: float = 2.0,
    regularizer: Regularizer = "out",
    literal: bool = False,
    pattern: tuple[int, int] | None = None,
    cycles: int = 50,
    threshold: float = 0.1,
    power: float = 1.0,
    same_sign: bool | None = None,
) -> tuple[Matrix, Bool[Array, "i o"]]:
    """R^2-DSnoT: DSnoT with relative importance D and a regulariser R, both computed from the given mask.

        |G| = |W D E[x]| / Var^power + gamma_grow R         G has the sign of W E[x]
         P  = |W| D |X_:j|_2^alpha + gamma_prune R          D_jk = 1/|W~_:k|_1 + 1/|W~_j:|_1

    G is the grow score, P the prune score, and W~ the masked weights.  D is 1 in a score without relative importance.
    The best settings of the ablation are relative_grow for RIA's mask, and relative_prune alone with gamma_prune=1e-3
    for Wanda's mask.

    Thesis: Sec. 6.3.6, ablation Table E.4.
    Differs (docs/errata.md): W4 (W kept in the grow rule; zero norms are left out of D), W5 (the printed R changes
    nothing), W15 (the ablation swaps the names of the two masks).

    Args:
        W: Dense weights [in, out].
        mask: Mask before the swaps [in, out].
        stats: Statistics of the layer's inputs.
        relative_grow: Use D in the grow score.
        relative_prune: Use D in the prune score.
        alpha: Power of the input norms in the prune score.
        gamma_grow: Weight of R in the grow score.
        gamma_prune: Weight of R in the prune score.
        p: Norm of the regulariser, at least 1 (math.inf included).
        regularizer: "out": |W~_:k|_p as printed; it is constant for an output, so gamma changes nothing.  "in":
            |W~_j:|_p, which fits the printed ablation.  "toggled": |W~_:k|_p after the weight was grown or pruned.
        literal: Use the printed grow rule D E[x] / Var, without W.
        pattern: (n, m) of a mask that keeps n of every m inputs, as in `dsnot`.
        cycles: Largest number of swaps of an output.
        threshold: An output is done when |E eps| times the tokens of a sample is at most this.
        power: Power of the variance in the grow score.
        same_sign: An output is also done when the next swap would change the sign of E eps.  None: True with a pattern
            and False without.

    Returns:
        The pruned weights W~ [in, out] and the mask after the swaps [in, out].
    """
    same_sign = _checked(
        W, mask, stats, pattern=pattern, cycles=cycles, threshold=threshold, power=power, same_sign=same_sign
    )
    for name, value in (("alpha", alpha), ("gamma_grow", gamma_grow), ("gamma_prune", gamma_prune)):
        if not 0 <= value < math.inf:
            raise ValueError(f"{name}={value}; allowed: finite, at least 0")
    if not p >= 1:
        raise ValueError(f"p={p}; allowed: at least 1 (math.inf included)")
    if regularizer not in ("out", "in", "toggled"):
        raise ValueError(f"regularizer={regularizer!r}; allowed: 'out', 'in', 'toggled'")
    rule = (relative_grow, relative_prune, alpha, p, regularizer, literal, power)
    sums, grow, prune = _r2_scores(W, mask, stats, gamma_grow, gamma_prune, rule)
    m = pattern and pattern[1]
    return _swapped(W, mask, sums, grow, prune, threshold=threshold, cycles=cycles, m=m, same_sign=same_sign)


@partial(jax.jit, static_argnames="rule")
def _r2_scores(
    W: Matrix,
    mask: Mask,
    stats: Statistics,
    gamma_grow: Array | float,
    gamma_prune: Array | float,
    rule: tuple[bool, bool, float, float, Regularizer, bool, float],
) -> tuple[Column, Matrix, Matrix]:
    """Returns (sum_t x, G, P).  The swaps are another program, which is thus compiled once for all rules."""
    relative_grow, relative_prune, alpha, p, regularizer, literal, power = rule
    sums, mean, variance, norms = _columns(W, stats)
    w = W.astype(sums.dtype)
    kept = jnp.where(mask, w, 0)
    D = _inverse(norm(kept, 1.0, "out"))[None, :] + _inverse(norm(kept, 1.0, "in"))[:, None]
    R = _regularizer(w, mask, kept, p, regularizer)
    grow = _quotient(mean if literal else w * mean, variance**power) * (D if relative_grow else jnp.ones_like(w))
    grow = grow + jnp.sign(grow) * jnp.asarray(gamma_grow, w.dtype) * R
    prune = jnp.abs(w) * norms**alpha * (D if relative_prune else jnp.ones_like(w))
    return sums, grow, prune + jnp.asarray(gamma_prune, w.dtype) * R


def _regularizer(w: Matrix, mask: Mask, kept: Matrix, p: float, regularizer: Regularizer) -> Matrix:
    """Return the regulariser R [in, out]."""
    out, size = norm(kept, p, "out")[None, :], jnp.abs(w)
    if regularizer == "out":
        return jnp.broadcast_to(out, w.shape)
    if regularizer == "in":
        return jnp.broadcast_to(norm(kept, p, "in")[:, None], w.shape)
    if math.isinf(p):
        largest = mask & (size == out)
        alone = jnp.sum(largest, axis=0, keepdims=True) == 1
        second = jnp.max(jnp.where(mask & ~largest, size, 0), axis=0, keepdims=True)
        return jnp.where(mask, jnp.where(largest & alone, second, out), jnp.maximum(out, size))
    scale = jnp.maximum(out, jnp.max(size, axis=0, keepdims=True))  # otherwise small weights would underflow
    scale = jnp.where(scale == 0, 1, scale)
    share = jnp.where(mask, -1, 1) * (size / scale) ** p
    return scale * jnp.maximum((out / scale) ** p + share, 0) ** (1 / p)


def _inverse(a: Vector) -> Vector:
    """Return 1 / a, and 0 where a is 0."""
    return jnp.where(a == 0, 0, 1 / a)


def _quotient(a: Array, b: Array) -> Array:
    """Return a / b, and 0 where a is 0, because an input that is always 0 would give 0 / 0."""
    return jnp.where(a == 0, 0, a / b)


def _columns(W: Matrix, stats: Statistics) -> list[Column]:
    """Return sum_t x, E x, Var x and |X_:j|_2 as columns [in, 1], in W's dtype but at least float32."""
    vectors = (statistics.input_sum, statistics.mean, statistics.variance, statistics.input_norm)
    return [f(stats).astype(statistics.wide(W.dtype))[:, None] for f in vectors]


@partial(jax.jit, static_argnames=("m", "same_sign"))
def _swapped(
    W: Matrix,
    mask: Mask,
    sums: Column,
    grow: Matrix,
    prune: Matrix,
    *,
    threshold: Array | float,
    cycles: Array | int,
    m: int | None,
    same_sign: bool,
) -> tuple[Matrix, Mask]:
    threshold, cycles = jnp.asarray(threshold, grow.dtype), jnp.asarray(cycles, jnp.int32)

    def block(W: Matrix, mask: Mask, grow: Matrix, prune: Matrix) -> Mask:
        w = W.astype(grow.dtype)
        return swaps(mask, w, sums[:, 0], grow, prune, threshold=threshold, cycles=cycles, m=m, same_sign=same_sign)

    mask = in_blocks(block, W, mask, grow, prune)
    return jnp.where(mask, W, 0), mask


def _checked(
    W: Matrix,
    mask: Bool[Array, "_ _"],
    stats: Statistics,
    *,
    pattern: tuple[int, int] | None,
    cycles: int,
    threshold: float,
    power: float,
    same_sign: bool | None,
) -> bool:
    """Validate the arguments; returns `same_sign` with its default filled in."""
    if mask.shape != W.shape:
        raise ValueError(f"mask has shape {mask.shape}; allowed: that of W, {W.shape}")
    if stats.x.hi.shape != W.shape[:1]:
        raise ValueError(f"stats has {stats.x.hi.shape[-1]} inputs; allowed: the {W.shape[0]} of W")
    if pattern is not None:
        check_pattern(W.shape[0], *pattern)
    if not 1 <= cycles <= 2**30:
        raise ValueError(f"cycles={cycles}; allowed: 1 to {2**30}")
    for name, value in (("threshold", threshold), ("power", power)):
        if not 0 <= value < math.inf:
            raise ValueError(f"{name}={value}; allowed: finite, at least 0")
    return pattern is not None if same_sign is None else same_sign
