"""Robust reducers, which a few wrong messages cannot move far: coordinate-wise median, trimmed mean, clipped mean.

    algorithm = fedavg.fedavg(value_and_grad, steps=5, reduce=robust.median())

The server first drops messages that are not finite or too large (`rounds.acceptable`), in a simulation and in a
federation.  It reduces the others.

With a reducer of this module no convergence theorem of this library holds, because all of them assume that the server
gets the mean of the messages.  EF-BV, EF21 and DIANA (Thm 2.4.1, 2.4.2 and 2.5.1) need h = mean_i h_i, Scaffold needs
c = mean_i c_i, and Scafflix needs a sum over clients that vanishes.  The theorems fail even if all clients are honest,
unless they all send the same message.  The stepsizes of `theoretical` are then only a rule of thumb.

Use dense or quantized messages.  A sparse message is mostly zeros, and the median of a coordinate that fewer than half
of the clients send is 0.
"""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree, Shaped

from commjax.core.base import Reducer
from commjax.core.communication import column

__all__ = ["Reducer", "clipped_mean", "median", "trimmed_mean"]


def _sorted(leaf: Array, present: Array) -> Array:
    """Sort the messages that count in each coordinate; the others are last."""
    return jnp.sort(jnp.where(column(present, leaf), leaf, jnp.asarray(jnp.inf, leaf.dtype)), axis=0)


def median() -> Reducer:
    """The median of each coordinate; for an even number of messages, the mean of the two in the middle.

    Returns:
        A reducer that fewer than half of the messages cannot move beyond the values of the others.

    >>> float(median().reduce(jnp.array([1.0, 2.0, 99.0]), jnp.ones(3, bool)))
    2.0
    """

    def reduce(rows: PyTree, present: Bool[Array, "n"]) -> PyTree:
        number = jnp.sum(present)

        def leaf_median(leaf: Shaped[Array, "n ..."]) -> Array:
            ordered = _sorted(leaf, present)
            low, high = (jnp.take(ordered, at, axis=0, mode="clip") for at in ((number - 1) // 2, number // 2))
            return low + (high - low) * jnp.asarray(0.5, leaf.dtype)

        return jax.tree.map(leaf_median, rows)

    return Reducer("median", reduce)


def trimmed_mean(trim: float) -> Reducer:
    """The mean of each coordinate over c messages, without its floor(trim c) smallest and floor(trim c) largest values.

    Args:
        trim: fraction of the messages that is dropped at each end, 0 <= trim < 0.5; 0 is the mean.

    Returns:
        A reducer that floor(trim c) wrong messages cannot move beyond the values of the others.

    >>> float(trimmed_mean(0.25).reduce(jnp.array([-50.0, 1.0, 3.0, 99.0]), jnp.ones(4, bool)))
    2.0
    """
    if not 0 <= trim < 0.5:
        raise ValueError(f"trim={trim}; allowed: 0 <= trim < 0.5")

    def reduce(rows: PyTree, present: Bool[Array, "n"]) -> PyTree:
        number = jnp.sum(present)
        # Without 1e-6, 0.3 * 10 could be rounded to a number below 3.
        dropped = jnp.floor(trim * number.astype(jnp.float32) + 1e-6).astype(number.dtype)
        at = jnp.arange(len(present), dtype=number.dtype)
        stays = (at >= dropped) & (at < number - dropped)

        def leaf_trimmed(leaf: Shaped[Array, "n ..."]) -> Array:
            kept = jnp.where(column(stays, leaf), _sorted(leaf, present), jnp.zeros((), leaf.dtype))
            return jnp.sum(kept, axis=0) / (number - 2 * dropped).astype(leaf.dtype)

        return jax.tree.map(leaf_trimmed, rows)

    return Reducer(f"trimmed-mean({trim:g})", reduce)


def clipped_mean(norm: float) -> Reducer:
    """The mean of the messages after clipping each to Euclidean norm `norm`, taken over all leaves.

        (1/c) sum_i min(1, norm / |m_i|) m_i

    Args:
        norm: the largest norm of a message, positive and finite.

    Returns:
        A reducer that one of c messages moves by at most `norm` / c.

    >>> clipped_mean(5.0).reduce(jnp.array([[30.0, 40.0], [3.0, 4.0]]), jnp.ones(2, bool)).tolist()
    [3.0, 4.0]
    """
    if not 0 < norm < float("inf"):
        raise ValueError(f"norm={norm}; allowed: positive and finite")

    def reduce(rows: PyTree, present: Bool[Array, "n"]) -> PyTree:
        wide = jnp.zeros(()).dtype
        leaves = [leaf.astype(wide).reshape(len(leaf), -1) for leaf in jax.tree.leaves(rows)]
        # Divide by the largest magnitude first: squares of accepted numbers are finite, but their sum need not be.
        most = jnp.max(jnp.stack([jnp.max(jnp.abs(leaf), axis=1, initial=0) for leaf in leaves]), axis=0)
        unit = jnp.where(most > 0, most, 1)
        sums = jnp.stack([jnp.sum((leaf / unit[:, None]) ** 2, axis=1) for leaf in leaves])
        shorter = jnp.minimum(1, norm / jnp.where(most > 0, most * jnp.sqrt(jnp.sum(sums, axis=0)), norm))
        weight = jnp.where(present, shorter, 0) / jnp.sum(present).astype(wide)

        def leaf_sum(leaf: Shaped[Array, "n ..."]) -> Array:
            return jnp.sum(leaf * column(weight, leaf).astype(leaf.dtype), axis=0)

        return jax.tree.map(leaf_sum, rows)

    return Reducer(f"clipped-mean({norm:g})", reduce)
