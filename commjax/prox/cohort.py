"""The cohort of one round: its rows, its two-level sum, and the objective of its prox."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PyTree, Shaped

from commjax.core import rounds
from commjax.core.base import Key, Params, State
from commjax.prox.solvers.base import LocalOracle, Oracle
from commjax.sampling.samplings import Draw, Sampling


def draw_of(key: Key, sampling: Sampling, state: State, axis_name: str | None) -> tuple[Draw, int]:
    """Who takes part in this round, and the number n of all clients."""
    n = rounds.count(state.clients.id, axis_name)
    if sampling.n != n:
        raise ValueError(f"sampling is over {sampling.n} clients, the state has {n}")
    return sampling.sample(jax.random.fold_in(key, state.server.round)), n


class Cohort(NamedTuple):
    """Rows of the cohort's clients, their weights 1/(n p_i) (0 for rows that take no part), and their hubs."""

    data: PyTree
    weights: Shaped[Array, "m"]
    hub: Int[Array, "m"] | None = None


class Hubs(NamedTuple):
    """Server-hub-client topology: client i talks to hub `of[i]` only, hubs add up what they hear and pass one vector on.

    Thesis: Fig. L2318.
    """

    of: np.ndarray  # [n], from 0 to count - 1
    count: int

    @staticmethod
    def make(of: Any) -> "Hubs":
        """Hubs are numbered 0, 1, 2, ... and none is empty.

        >>> Hubs.make([0, 0, 1]).count
        2
        """
        found = np.asarray(of)
        used = np.unique(found)
        if found.ndim != 1 or not np.array_equal(used, np.arange(len(used))):
            raise ValueError(f"hubs={found}; allowed: one number a client, every number from 0 on used")
        return Hubs(found, len(used))


def gather(draw: Draw, ids, batch, axis_name, hubs: Hubs | None = None) -> Cohort:
    """Off a mesh the m drawn rows; on a mesh all rows of the device, because who is where is not known at compile time."""
    of = (lambda at: None) if hubs is None else (lambda at: jnp.asarray(hubs.of)[at])
    if axis_name is None:
        place = jnp.argsort(ids)[draw.ids]  # ids may stand in any order
        return Cohort(jax.tree.map(lambda leaf: leaf[place], batch), draw.weights, of(draw.ids))
    n = rounds.count(ids, axis_name)
    weights = jnp.zeros(n, draw.weights.dtype).at[draw.ids].add(jnp.where(draw.mask, draw.weights, 0))
    return Cohort(batch, jnp.where(rounds.real(len(ids), axis_name), weights[ids], 0), of(ids))


def add_up(rows: PyTree, cohort: Cohort, weights: Array, axis_name: str | None, hubs: int = 1) -> PyTree:
    """sum_i weights_i row_i over all devices; with hubs in two levels, each hub's clients first"""
    hub = cohort.hub
    if hub is None:
        return rounds.mean(rows, axis_name, weights * rounds.count(weights, axis_name))

    def one(leaf):
        weighted = leaf * weights.reshape(-1, *(1,) * (leaf.ndim - 1))
        at_hubs = jax.ops.segment_sum(weighted, hub, hubs)
        return jnp.sum(at_hubs if axis_name is None else jax.lax.psum(at_hubs, axis_name), axis=0)

    return jax.tree.map(one, rows)


def largest(rows: Array, cohort: Cohort, axis_name: str | None) -> Array:
    """The largest of the members' numbers, over all devices"""
    found = jnp.max(jnp.where(cohort.weights > 0, rows, jnp.zeros_like(rows)))
    return found if axis_name is None else jax.lax.pmax(found, axis_name)


def prox_oracle(
    loss: Callable,
    unravel: Callable,
    cohort: Cohort,
    center: Array,
    gamma: Any,
    axis_name: str | None = None,
    hubs: int = 1,
    pool: Callable | None = None,
) -> Oracle:
    """F(x) = sum_i w_i f_i(x) + |x - center|^2 / (2 gamma), its derivatives, and the same client by client."""
    gamma = jnp.asarray(gamma, center.dtype)
    weights = cohort.weights.astype(center.dtype)

    def one(x, data):
        return loss(unravel(x), data)

    def summed(function):
        """One aggregation: each client's part at the same x, weighted and summed."""

        def at(x):
            x = rounds.broadcast(x, axis_name)
            return add_up(jax.vmap(function, in_axes=(None, 0))(x, cohort.data), cohort, weights, axis_name, hubs)

        return at

    total = jnp.sum(weights)
    pooled = None if pool is None or axis_name is not None else pool(cohort.data, weights / total)

    def together(x):
        if pooled is not None:
            return total * one(x, pooled)
        return weights @ jax.vmap(one, in_axes=(None, 0))(x, cohort.data)

    def fit_together(x):
        """The same where nobody asks for one client's part: the gradient of the sum is one matrix product."""
        found = jax.value_and_grad(together)(rounds.broadcast(x, axis_name))
        return found if axis_name is None else jax.lax.psum(found, axis_name)

    fit = fit_together if cohort.hub is None else summed(jax.value_and_grad(one))
    fit_hessian = summed(jax.hessian(one))

    def value_and_grad(x):
        value, grad = fit(x)
        away = x - center
        return value + jnp.vdot(away, away) / (2 * gamma), grad + away / gamma

    def hessian(x):
        return fit_hessian(x) + jnp.eye(x.shape[0], dtype=x.dtype) / gamma

    def own(x, data):
        away = x - center
        return total * one(x, data) + jnp.vdot(away, away) / (2 * gamma)

    local = LocalOracle(
        lambda rows: jax.vmap(jax.value_and_grad(own))(rows, cohort.data),
        lambda rows: jax.vmap(jax.hessian(own))(rows, cohort.data),
        weights / total,
    )
    return Oracle(value_and_grad, hessian, local if axis_name is None else None)


def shares(draw: Draw) -> Array:
    """1/|S| on the members"""
    return draw.mask.astype(draw.weights.dtype) / jnp.sum(draw.mask, dtype=draw.weights.dtype)


def price(draw: Draw, n: int, params: Params) -> Array:
    """Bits of one vector from each member, mean over all n clients"""
    dense = rounds.bits_of(params)
    return jnp.sum(draw.mask, dtype=dense.dtype) / n * dense


def hubs_met(draw: Draw, hubs: Hubs) -> Array:
    """How many hubs have a client in the cohort"""
    at = jnp.where(draw.mask, jnp.asarray(hubs.of)[draw.ids], hubs.count)
    return jnp.sum(jnp.zeros(hubs.count + 1, jnp.int32).at[at].set(1)[:-1], dtype=jnp.int32)
