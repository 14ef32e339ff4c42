"""The client axis: one verb down, one verb up, and the round made of them."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PyTree, Shaped

from commjax.base import Algorithm, InitFn, Key, Message, Metrics, Round, State


def broadcast(server: PyTree, axis_name: str | None = None) -> PyTree:
    """Down: what the server knows, as each device's own copy.

    Under `shard_map` the gradient at a *replicated* value would silently be summed over devices; a value that varies over
    the axis has a gradient of its own on each.
    """
    if axis_name is None:
        return server
    return jax.tree.map(lambda leaf: jax.lax.pcast(leaf, axis_name, to="varying"), server)


def mean(rows: PyTree, axis_name: str | None = None, weights: Shaped[Array, "n"] | None = None) -> PyTree:
    """Up: the mean over all clients on all devices, in the dtypes of `rows`; with `weights`, sum(w * row) / n.

    >>> mean(jnp.arange(4.0)).item(), mean(jnp.arange(4.0), weights=jnp.array([0.0, 0.0, 0.0, 4.0])).item()
    (1.5, 3.0)
    """

    def one(leaf: Array) -> Array:
        if weights is not None:
            if len(weights) != len(leaf):
                raise ValueError(f"weights must have one entry per row, got {len(weights)} for {len(leaf)} rows")
            leaf = leaf * _column(weights, leaf).astype(leaf.dtype)
        local = jnp.mean(leaf, axis=0)
        return local if axis_name is None else jax.lax.pmean(local, axis_name)

    return jax.tree.map(one, rows)


def count(ids: Shaped[Array, "n"], axis_name: str | None = None) -> int:
    """n over all devices, a static number"""
    return ids.shape[0] * (1 if axis_name is None else jax.lax.axis_size(axis_name))


def dense_bits(params: PyTree) -> int:
    """Price of params sent as they are"""
    return sum(8 * leaf.dtype.itemsize * leaf.size for leaf in jax.tree.leaves(params))


def bits_of(params: PyTree) -> Array:
    """`dense_bits` as a message's price"""
    return jnp.asarray(dense_bits(params), jnp.zeros(()).dtype)


def one_by_one(one: Callable) -> Callable:
    """`jax.vmap(one)` in meaning, one client after another in time: for networks whose step fills the machine by itself.

    >>> one_by_one(lambda x, y: x + y)(jnp.arange(3), jnp.ones(3, int)).tolist()
    [1, 2, 3]
    """
    return lambda *rows: jax.lax.map(lambda row: one(*row), rows)


class Cohort(NamedTuple):
    """Who takes part in a round: `size` of n clients, drawn without replacement from a key that all parties share.

    Off a device mesh only the rows of the cohort are read and written; under an `axis_name` every device works on all of its
    rows, because how many of them take part is not known when the program is compiled.
    """

    member: Bool[Array, "n"] | None  # of the rows on this device; None: all take part
    at: Int[Array, "m"] | None  # positions of the members, off a mesh
    weights: Shaped[Array, "n"] | None  # for `mean`: the members' mean

    def take(self, rows: PyTree) -> PyTree:
        """The rows that are worked on"""
        return rows if self.at is None else jax.tree.map(lambda leaf: leaf[self.at], rows)

    def put(self, rows: PyTree, new: PyTree) -> PyTree:
        """`rows` with those of the members replaced by `new`"""
        if self.member is None:
            return new
        if self.at is not None:
            return jax.tree.map(lambda leaf, value: leaf.at[self.at].set(value), rows, new)
        member = self.member
        return jax.tree.map(lambda old, value: jnp.where(_column(member, old), value, old), rows, new)


def _column(values: Array, leaf: Array) -> Array:
    return jnp.reshape(values, (-1,) + (1,) * (leaf.ndim - 1))


def check_cohort(size: int | None) -> None:
    """A cohort has at least one member"""
    if size is not None and size < 1:
        raise ValueError(f"cohort must be at least 1 client (or None for all), got {size}")


def cohort_members(key: Key, ids: Shaped[Array, "m"], n: int, size: int) -> Bool[Array, "m"]:
    """Which of the clients `ids` (of 0 to n-1) belong to the cohort that `key` draws

    >>> int(cohort_members(jax.random.key(0), jnp.arange(10), 10, 3).sum())
    3
    """
    if not 1 <= size <= n:
        raise ValueError(f"cohort must be between 1 and the number of clients, got {size} of {n}")
    return jax.random.permutation(key, n)[ids] < size


def cohort(key: Key, ids: Shaped[Array, "n"], size: int | None, axis_name: str | None = None) -> Cohort:
    """`size` of all clients (None: all)."""
    n = count(ids, axis_name)
    if size is None or size == n:
        return Cohort(None, None, None)
    member = cohort_members(key, ids, n, size)
    if axis_name is None:
        return Cohort(member, jnp.nonzero(member, size=size)[0], None)
    return Cohort(member, None, jnp.where(member, n / size, 0.0))


def federated(
    init: InitFn,
    client_step: Callable[[Round, Any, Any, Any, PyTree], tuple[Any, Message, Array]],
    server_step: Callable[[Any, Any, PyTree], Any],
    bits_down: Callable[[Any], float],
    cohort_size: int | None = None,
    over: Callable[[Callable], Callable] = jax.vmap,
) -> Algorithm:
    """A method that exchanges once a round.

        client_step(round, hparams, server, client, data) -> (client, message, loss)      in parallel
        server_step(hparams, server, mean of the messages) -> server
        bits_down(server) -> price of what every client receives

    The client axis is a `vmap` (or `over`, see `one_by_one`); devices are an `axis_name`.  With `cohort_size` m, m clients
    drawn at random take part in a round; the messages and the loss are averaged over them, bits over all n clients.
    """
    check_cohort(cohort_size)

    def step(key, hparams, state, batch, *, axis_name=None):
        key_round = jax.random.fold_in(key, state.server.round)
        n = count(state.clients.id, axis_name)
        here = cohort(jax.random.fold_in(key_round, n), state.clients.id, cohort_size, axis_name)
        received = broadcast(state.server, axis_name)

        def one(client, data):
            return client_step(Round(key_round, client.id, n), hparams, received, client, data)

        rows, message, loss = over(one)(here.take(state.clients), here.take(batch))
        value, bits, loss = mean((*message, loss), axis_name, here.weights)
        server = server_step(hparams, state.server, value)
        share = (n if cohort_size is None else cohort_size) / n
        down = jnp.asarray(share * bits_down(state.server), bits.dtype)
        return State(server, here.put(state.clients, rows)), Metrics(loss, share * bits, down)

    return Algorithm(init, step)
