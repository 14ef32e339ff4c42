"""Random choices that several samplings share."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int

from commjax.core.base import Key
from commjax.sampling.draws import Vector

# (ids [m], mask [m]): the client in each slot, and whether the slot is used
Slots = tuple[Int[Array, "m"], Bool[Array, "m"]]


def choose(key: Key, p: Vector) -> Int[Array, ""]:
    """Draw one index with probabilities p, resolved to about 1e-7 in float32."""
    steps = jnp.asarray(np.cumsum(p)[:-1], float)
    return jnp.searchsorted(steps, jax.random.uniform(key, dtype=steps.dtype), side="right").astype(jnp.int32)


def subset(key: Key, n: int, size: int) -> Int[Array, "m"]:
    """Draw `size` of n clients, all subsets equally likely."""
    return jax.random.permutation(key, jnp.arange(n, dtype=jnp.int32))[:size]


def everyone(ids: Int[Array, "m"]) -> Slots:
    """Return the ids and a mask that is True everywhere: no slot is unused."""
    return ids, jnp.ones(ids.shape, bool)


def with_others(L: Vector, total: float, tau: int, n: int) -> Vector:
    """Return E [sum_{j in S} L_j | i in S] for nice sampling of tau of n clients, for each client i.

        L_i + (tau - 1)/(n - 1) sum_{j != i} L_j

    `total` is the sum of all n entries of L.
    """
    return L + (total - L) * ((tau - 1) / (n - 1) if n > 1 else 0)


def sorted_cohort(ids: Any) -> tuple[int, ...]:
    """Return the client numbers as a sorted tuple of ints."""
    return tuple(sorted(int(i) for i in ids))
