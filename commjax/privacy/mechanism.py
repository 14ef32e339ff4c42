"""The private gradient of a client: Poisson sampling of rows, clipping of each row's gradient, Gaussian noise.

    release = (sum_{j in B} g_j min(1, C / |g_j|) + z C N(0, I)) / (q m)

g_j is the gradient of row j, C the clipping norm and z the noise multiplier.  The batch B contains each of the m rows
with probability q, and m is public.  `commjax.privacy.accounting` computes the privacy loss over all rounds, and the
multiplier z for a target.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int, PyTree, Shaped

from commjax.core import random_words
from commjax.core.base import Key, Params
from commjax.core.local import _weights, _with_weights

# (params, rows of one client) -> the mean over rows; see `check_per_example`.
Loss = Callable[[Params, Any], Array]


def num_rows(data: PyTree) -> int:
    """Return the number of rows of a client's data, including padding.

    Args:
        data: pytree of one client, leaves [rows, ...].

    Returns:
        The number of rows.  A ValueError is raised if the leaves disagree.
    """
    counts = {leaf.shape[0] if leaf.ndim else 0 for leaf in jax.tree.leaves(data)}
    if len(counts) != 1 or 0 in counts:
        shapes = [leaf.shape for leaf in jax.tree.leaves(data)]
        raise ValueError(f"private rows: every leaf of a client's data must be [rows, ...], got shapes {shapes}")
    return counts.pop()


def present(data: PyTree) -> Bool[Array, "m"]:
    """Return the mask of the rows that are not padding (padding has weight 0).

    Args:
        data: pytree of one client, leaves [m, ...].

    Returns:
        Mask [m].
    """
    weights = _weights(data)
    return jnp.ones(num_rows(data), bool) if weights is None else weights > 0


def single(data: PyTree, row: Int[Array, ""]) -> PyTree:
    """Return one row as a data set of one row with weight 1.

    Args:
        data: pytree of one client, leaves [m, ...].
        row: number of the row.

    Returns:
        A pytree with leaves [1, ...].
    """
    alone = jax.tree.map(lambda leaf: leaf[row][None], data)
    weights = _weights(alone)
    return alone if weights is None else _with_weights(alone, jnp.ones_like(weights))


def poisson(key: Key, rate: Shaped[Array, ""] | float, rows: Bool[Array, "m"]) -> Bool[Array, "m"]:
    """Sample each of `rows` independently, with probability at most `rate`.

    The probability is 2^-32 floor(2^32 (1 - 2^-22) rate), or 1 if `rate` is 1.  A float32 uniform has steps of 2^-23,
    which would turn a rate of 2e-7 into 2.4e-7.  The result does not depend on the precision of the run.

    Args:
        key: random key.
        rate: q, the probability of each row.
        rows: mask [m] of the rows that may be sampled.

    Returns:
        Mask [m] of the sampled rows.

    >>> poisson(jax.random.key(0), 1.0, jnp.array([True, False])).tolist()
    [True, False]
    """
    rate = jnp.asarray(rate, jnp.float32)
    limit = (rate * jnp.float32(2**32 - 2**10)).astype(jnp.uint32)
    return ((random_words.bits(key, rows.shape, jnp.uint32) < limit) | (rate >= 1)) & rows


def clip_factor(squared_norm: Float[Array, "..."], C: Shaped[Array, ""] | float) -> Float[Array, "..."]:
    """Return the clipping factor min(1, C / |g|), or 0 where |g|^2 is not finite, so that g does not enter the sum.

    Args:
        squared_norm: |g|^2, of any shape.
        C: the clipping norm.

    Returns:
        The factors, of the same shape.

    >>> clip_factor(jnp.array([4.0, 0.25, 0.0, jnp.nan, jnp.inf]), 1.0).tolist()
    [0.5, 1.0, 1.0, 0.0, 0.0]
    """
    factor = jnp.minimum(1, jnp.asarray(C, squared_norm.dtype) / jnp.sqrt(squared_norm))
    return jnp.where(jnp.isfinite(squared_norm), factor, 0)


def _wide(leaf: Array) -> np.dtype:
    return np.dtype(np.float64 if leaf.dtype == np.float64 else np.float32)


def clipped_sum(
    grads: PyTree, C: Shaped[Array, ""] | float, rows: Bool[Array, "m"]
) -> tuple[PyTree, Float[Array, "m"]]:
    """Return the sum of clipped gradients, sum over `rows` of g_j min(1, C / |g_j|), in float32 at least.

    Args:
        grads: pytree of the gradients of m rows, leaves [m, ...].
        C: the clipping norm.
        rows: mask [m] of the rows in the sum.

    Returns:
        The sum, leaves [...], and the squared norms |g_j|^2 [m] before clipping.

    >>> total, _ = clipped_sum(jnp.array([[3.0, 4.0], [0.1, 0.0]]), 1.0, jnp.array([True, True]))
    >>> [round(float(x), 6) for x in total]
    [0.7, 0.8]
    """
    wide = jax.tree.map(lambda leaf: leaf.astype(_wide(leaf)), grads)
    dtype = max((leaf.dtype for leaf in jax.tree.leaves(wide)), key=lambda dtype: dtype.itemsize)
    parts = [jnp.sum(jnp.square(leaf.reshape(len(rows), -1)), axis=1).astype(dtype) for leaf in jax.tree.leaves(wide)]
    squared = sum(parts[1:], parts[0])
    factor = jnp.where(rows, clip_factor(squared, C), 0)

    def total(leaf: Array) -> Array:
        flat = leaf.reshape(len(rows), -1)
        # A factor of 0 alone would not do: 0 * nan is nan.
        safe = jnp.where((factor > 0)[:, None], flat, 0)
        # In full precision, because a product of truncated factors may be longer than C.
        return jnp.matmul(factor.astype(leaf.dtype), safe, precision=jax.lax.Precision.HIGHEST).reshape(leaf.shape[1:])

    return jax.tree.map(total, wide), squared


def gaussian_like(key: Key, like: PyTree) -> PyTree:
    """Draw independent N(0, 1) with the shapes and dtypes of `like`.

    Args:
        key: random key.
        like: pytree of arrays.

    Returns:
        A pytree of the same structure.
    """
    leaves, treedef = jax.tree.flatten(like)
    keys = [jax.random.fold_in(key, 2 + number) for number in range(len(leaves))]
    return treedef.unflatten([random_words.normal(k, leaf.shape, leaf.dtype) for k, leaf in zip(keys, leaves)])


def check_per_example(loss: Loss, params: Params, data: PyTree, rtol: float = 1e-3) -> None:
    """Raise a ValueError unless the loss is the mean over rows of the losses of single rows, and so is its gradient.

    A loss that mixes rows (batch normalisation, contrastive losses, unequal weights) has no gradient of a single row,
    so that clipping rows would not bound their influence.  The check is made at `params` and at a point nearby, because
    at a single point, such as all zeros, the two may agree by chance.

    Args:
        loss: (params, rows of one client) -> one number, the mean over rows.
        params: pytree of parameters.
        data: pytree of one client, leaves [rows, ...].
        rtol: relative tolerance.
    """
    shape = jax.eval_shape(loss, params, data).shape
    if shape != ():
        raise ValueError(f"loss returns an array of shape {shape}; allowed: one number, the mean over a client's rows")
    _check_at(loss, params, data, rtol)
    moves = gaussian_like(jax.random.key(0), jax.tree.map(jnp.asarray, params))
    _check_at(loss, jax.tree.map(lambda leaf, by: leaf + jnp.asarray(0.1, by.dtype) * by, params, moves), data, rtol)


def _check_at(loss: Loss, params: Params, data: PyTree, rtol: float) -> None:
    keep = np.asarray(present(data), np.float64)
    value_and_grad = jax.value_and_grad(loss)
    together = value_and_grad(params, data)
    by_row = jax.vmap(lambda row: value_and_grad(params, single(data, row)))(jnp.arange(num_rows(data)))
    for whole, parts in zip(jax.tree.leaves(together), jax.tree.leaves(by_row), strict=True):
        mean = np.tensordot(keep, np.asarray(parts, np.float64), 1) / keep.sum()
        gap = np.abs(mean - np.asarray(whole, np.float64)).max()
        if not gap <= rtol * (1e-3 + np.abs(mean).max()):
            raise ValueError(
                f"loss is not a mean over rows: it or its gradient differs by {gap:.2g} from the mean of those of "
                "single rows; allowed: a loss per example, averaged with equal weights, or clipping means nothing"
            )


def largest(data: PyTree) -> PyTree:
    """Return the data of the client with the most rows.

    Args:
        data: pytree of all clients, leaves [n, rows, ...].

    Returns:
        The pytree of one client, leaves [rows, ...].
    """
    counts = jax.vmap(lambda client: jnp.sum(present(client)))(data)
    return jax.tree.map(lambda leaf: jnp.asarray(leaf[int(jnp.argmax(counts))]), data)
