"""The cohort of one round: the data of its clients, weighted sums over it, and the objective of its prox."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree, Shaped

from commjax.core import rounds
from commjax.core.base import AxisName, Key, Params, State
from commjax.prox.solvers.base import LocalOracle, Oracle, Vector
from commjax.sampling.samplings import Draw, Sampling


def draw_of(key: Key, sampling: Sampling, state: State, axis_name: AxisName) -> tuple[Draw, int]:
    """Draw the cohort of this round.

    Args:
        key: key of the run; the round number is folded into it.
        sampling: the sampling of clients.
        state: state of the algorithm.
        axis_name: name of the mesh axis of the clients, or None.

    Returns:
        The draw, and n, the number of all clients.
    """
    n = rounds.count(state.clients.id, axis_name)
    if sampling.n != n:
        raise ValueError(f"sampling is over {sampling.n} clients, the state has {n}")
    return sampling.sample(jax.random.fold_in(key, state.server.round)), n


class Cohort(NamedTuple):
    """The data and weights of the cohort's clients.

    Attributes:
        data: data of the clients, leaves [m, ...].
        weights: 1/(n p_i) with p_i the probability that client i is drawn, [m]; 0 for rows that take no part.
        hub: the hub of each client, or None without hubs.
    """

    data: PyTree
    weights: Shaped[Array, "m"]
    hub: Int[Array, "m"] | None = None


class Hubs(NamedTuple):
    """A server-hub-client topology: each client exchanges with one hub, and each hub sends one sum to the server.

    Thesis: Fig. 5.4.

    Attributes:
        of: hub of each client, [n], from 0 to count - 1.
        count: number of hubs.
    """

    of: np.ndarray
    count: int

    @staticmethod
    def make(of: Any) -> "Hubs":
        """Validate the hub of each client: hubs are numbered 0, 1, 2, ... and none is empty.

        Args:
            of: hub of each client, [n].

        Returns:
            The topology.

        >>> Hubs.make([0, 0, 1]).count
        2
        """
        hubs = np.asarray(of)
        used = np.unique(hubs)
        if hubs.ndim != 1 or not np.array_equal(used, np.arange(len(used))):
            raise ValueError(f"hubs={hubs}; allowed: one number a client, every number from 0 on used")
        return Hubs(hubs, len(used))


def gather(draw: Draw, ids: Int[Array, "n"], batch: PyTree, axis_name: AxisName, hubs: Hubs | None = None) -> Cohort:
    """Return the rows of the cohort's clients.

    Without a mesh these are the m drawn rows.  On a mesh these are all rows of the device, with weight 0 for the
    clients that were not drawn, because it is not known at compile time which device has which drawn client.

    Args:
        draw: the cohort of the round.
        ids: client numbers of the rows of `batch`, in any order.
        batch: data of the clients, one row each.
        axis_name: name of the mesh axis of the clients, or None.
        hubs: the topology, or None.

    Returns:
        The cohort.
    """

    def hub_of(clients: Array) -> Array | None:
        return None if hubs is None else jnp.asarray(hubs.of)[clients]

    if axis_name is None:
        place = jnp.argsort(ids)[draw.ids]  # because ids may be in any order
        return Cohort(jax.tree.map(lambda leaf: leaf[place], batch), draw.weights, hub_of(draw.ids))
    n = rounds.count(ids, axis_name)
    weights = jnp.zeros(n, draw.weights.dtype).at[draw.ids].add(jnp.where(draw.mask, draw.weights, 0))
    return Cohort(batch, jnp.where(rounds.real(len(ids), axis_name), weights[ids], 0), hub_of(ids))


def add_up(rows: PyTree, cohort: Cohort, weights: Array, axis_name: AxisName, hubs: int = 1) -> PyTree:
    """Return sum_i weights_i row_i over all devices; with hubs, the clients of each hub are summed first.

    Args:
        rows: pytree, leaves [m, ...].
        cohort: the cohort; only its `hub` is used.
        weights: weights [m].
        axis_name: name of the mesh axis of the clients, or None.
        hubs: number of hubs.

    Returns:
        The pytree without the leading axis.
    """
    hub = cohort.hub
    if hub is None:
        return rounds.mean(rows, axis_name, weights * rounds.count(weights, axis_name))

    def leaf_sum(leaf: Array) -> Array:
        weighted = leaf * weights.reshape(-1, *(1,) * (leaf.ndim - 1))
        at_hubs = jax.ops.segment_sum(weighted, hub, hubs)
        return jnp.sum(at_hubs if axis_name is None else jax.lax.psum(at_hubs, rounds.plain_name(axis_name)), axis=0)

    return jax.tree.map(leaf_sum, rows)


def largest(rows: Array, cohort: Cohort, axis_name: AxisName) -> Array:
    """Return the largest of the members' numbers, over all devices; other rows count as 0.

    Args:
        rows: numbers [m].
        cohort: the cohort; members have a positive weight.
        axis_name: name of the mesh axis of the clients, or None.

    Returns:
        One number.
    """
    local = jnp.max(jnp.where(cohort.weights > 0, rows, jnp.zeros_like(rows)))
    return local if axis_name is None else jax.lax.pmax(local, rounds.plain_name(axis_name))


def prox_oracle(
    loss: Callable[[Params, PyTree], Array],
    unravel: Callable[[Vector], Params],
    cohort: Cohort,
    center: Vector,
    gamma: Any,
    *,
    axis_name: AxisName = None,
    hubs: int = 1,
    pool: Callable[[PyTree, Array], PyTree] | None = None,
) -> Oracle:
    """Build the oracle of the cohort's prox objective, of its derivatives, and of each client's part.

        F(x) = sum_i w_i f_i(x) + |x - center|^2 / (2 gamma)

    Args:
        loss: (params, data of one client) -> f_i(params).
        unravel: flat vector [d] -> params.
        cohort: data and weights w_i of the clients.
        center: center of the prox, a flat vector [d].
        gamma: stepsize of the prox.
        axis_name: name of the mesh axis of the clients, or None.
        hubs: number of hubs.
        pool: (data, shares [m]) -> data of one client whose loss is sum_i shares_i f_i, or None.  It changes the speed
            only, and is not used on a mesh.

    Returns:
        The oracle.  On a mesh it has no `local` part.
    """
    gamma = jnp.asarray(gamma, center.dtype)
    weights = cohort.weights.astype(center.dtype)

    def client_loss(x: Vector, data: PyTree) -> Array:
        return loss(unravel(x), data)

    def summed(function: Callable[[Vector, PyTree], PyTree], x: Vector) -> PyTree:
        """Return the weighted sum of function(x, data) over the clients: one aggregation."""
        x = rounds.broadcast(x, axis_name)
        return add_up(jax.vmap(function, in_axes=(None, 0))(x, cohort.data), cohort, weights, axis_name, hubs)

    total = jnp.sum(weights)
    pooled = None if pool is None or axis_name is not None else pool(cohort.data, weights / total)

    def together(x: Vector) -> Array:
        if pooled is not None:
            return total * client_loss(x, pooled)
        return weights @ jax.vmap(client_loss, in_axes=(None, 0))(x, cohort.data)

    def fit(x: Vector) -> tuple[Array, Vector]:
        if cohort.hub is not None:
            return summed(jax.value_and_grad(client_loss), x)
        # Differentiate the sum instead of each client's part: this is one matrix product.
        local = jax.value_and_grad(together)(rounds.broadcast(x, axis_name))
        return local if axis_name is None else jax.lax.psum(local, rounds.plain_name(axis_name))

    def value_and_grad(x: Vector) -> tuple[Array, Vector]:
        value, grad = fit(x)
        away = x - center
        return value + jnp.vdot(away, away) / (2 * gamma), grad + away / gamma

    def hessian(x: Vector) -> Float[Array, "d d"]:
        return summed(jax.hessian(client_loss), x) + jnp.eye(x.shape[0], dtype=x.dtype) / gamma

    def client_objective(x: Vector, data: PyTree) -> Array:
        away = x - center
        return total * client_loss(x, data) + jnp.vdot(away, away) / (2 * gamma)

    local = LocalOracle(
        lambda rows: jax.vmap(jax.value_and_grad(client_objective))(rows, cohort.data),
        lambda rows: jax.vmap(jax.hessian(client_objective))(rows, cohort.data),
        weights / total,
    )
    return Oracle(value_and_grad, hessian, local if axis_name is None else None)


def shares(draw: Draw) -> Array:
    """Return 1/|S| for the members of the cohort, 0 for unused slots.

    Args:
        draw: the cohort of the round.

    Returns:
        Weights [m] that add up to 1.
    """
    return draw.mask.astype(draw.weights.dtype) / jnp.sum(draw.mask, dtype=draw.weights.dtype)


def upload_bits(draw: Draw, n: int, params: Params) -> Array:
    """Return the bits of one vector from each member, as a mean over all n clients.

    Args:
        draw: the cohort of the round.
        n: number of all clients.
        params: pytree with the shapes and dtypes of the vector.

    Returns:
        The number of bits.
    """
    dense = rounds.bits_of(params)
    return jnp.sum(draw.mask, dtype=dense.dtype) / n * dense


def hubs_met(draw: Draw, hubs: Hubs) -> Array:
    """Return the number of hubs that have a client in the cohort.

    Args:
        draw: the cohort of the round.
        hubs: the topology.

    Returns:
        One integer.
    """
    at = jnp.where(draw.mask, jnp.asarray(hubs.of)[draw.ids], hubs.count)
    return jnp.sum(jnp.zeros(hubs.count + 1, jnp.int32).at[at].set(1)[:-1], dtype=jnp.int32)
