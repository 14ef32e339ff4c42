"""Convex regularizers R with a closed prox, leaf by leaf on pytrees.

prox_{gamma R}(x) = argmin_y  R(y) + |y - x|^2 / (2 gamma)
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, PyTree

from commjax.core.base import Params


class Regularizer(NamedTuple):
    """A convex function R and its proximal operator.

    Attributes:
        value: (params) -> R(params), infinite outside the domain of R.
        prox: (gamma, params) -> prox_{gamma R}(params), a pytree of the same shapes and dtypes.
    """

    value: Callable[[Params], Array]
    prox: Callable[[Array | float, Params], Params]


def _separable(value: Callable[[Array], Array], prox: Callable[[Array, Array], Array]) -> Regularizer:
    """Build R(x) = sum_j value(x_j); `prox` receives gamma in the leaf's dtype."""

    def total(params: PyTree) -> Array:
        # The sum is in the default dtype.  Each value is in the leaf's dtype, as prox is, so both agree on the domain.
        start = jnp.zeros(())
        return sum((jnp.sum(value(leaf), dtype=start.dtype) for leaf in jax.tree.leaves(params)), start=start)

    def each(gamma: ArrayLike, params: Params) -> Params:
        return jax.tree.map(lambda leaf: prox(jnp.asarray(gamma).astype(leaf.dtype), leaf), params)

    return Regularizer(total, each)


def _weight(name: str, argument: str, value: float) -> None:
    if not 0 <= value < math.inf:
        raise ValueError(f"{name}: {argument} must be finite and at least 0, got {value}")


def zero() -> Regularizer:
    """R = 0, whose prox is the identity."""
    return Regularizer(lambda params: jnp.zeros(()), lambda gamma, params: params)


def l1(weight: float) -> Regularizer:
    """R = weight |x|_1, whose prox is soft thresholding.

        prox(x) = sign(x) max(|x| - gamma weight, 0)

    Args:
        weight: finite, at least 0.

    Returns:
        The regularizer.

    >>> l1(1.0).prox(0.5, jnp.array([2.0, 0.2])).tolist()
    [1.5, 0.0]
    """
    _weight("l1", "weight", weight)
    return elastic_net(weight, 0.0)


def l2_squared(weight: float) -> Regularizer:
    """R = (weight/2) |x|^2, whose prox shrinks x.

        prox(x) = x / (1 + gamma weight)

    Args:
        weight: finite, at least 0.

    Returns:
        The regularizer.
    """
    _weight("l2_squared", "weight", weight)
    return elastic_net(0.0, weight)


def elastic_net(weight_l1: float, weight_l2: float) -> Regularizer:
    """R = weight_l1 |x|_1 + (weight_l2/2) |x|^2, whose prox thresholds, then shrinks.

        prox(x) = sign(x) max(|x| - gamma weight_l1, 0) / (1 + gamma weight_l2)

    Args:
        weight_l1: finite, at least 0.
        weight_l2: finite, at least 0.

    Returns:
        The regularizer.
    """
    _weight("elastic_net", "weight_l1", weight_l1)
    _weight("elastic_net", "weight_l2", weight_l2)

    def value(x: Array) -> Array:
        return weight_l1 * jnp.abs(x) + weight_l2 / 2 * x**2

    def prox(gamma: Array, x: Array) -> Array:
        shrunk = jnp.maximum(jnp.abs(x) - gamma * weight_l1, 0)
        return jnp.sign(x) * shrunk / (1 + gamma * weight_l2)

    return _separable(value, prox)


def box(low: float, high: float) -> Regularizer:
    """R = 0 on [low, high]^d and infinite outside; its prox is the projection onto the box.

    Args:
        low: lower bound of every entry.
        high: upper bound of every entry, at least `low`.

    Returns:
        The regularizer.

    >>> box(-1.0, 1.0).prox(0.1, jnp.array([3.0, 0.5])).tolist()
    [1.0, 0.5]
    """
    if not low <= high:
        raise ValueError(f"box: low must be at most high, got [{low}, {high}]")

    def value(x: Array) -> Array:
        return jnp.where((x >= low) & (x <= high), 0.0, jnp.inf)

    return _separable(value, lambda gamma, x: jnp.clip(x, low, high))


def nonnegative() -> Regularizer:
    """R = 0 where x >= 0 and infinite outside; its prox is the projection max(x, 0)."""
    return box(0.0, math.inf)
