"""The client axis: one verb down, one verb up, and the round made of them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree, Shaped

from commjax.base import Algorithm, InitFn, Message, Metrics, Round, State


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
            leaf = leaf * jnp.reshape(weights, (-1,) + (1,) * (leaf.ndim - 1)).astype(leaf.dtype)
        local = jnp.mean(leaf, axis=0)
        return local if axis_name is None else jax.lax.pmean(local, axis_name)

    return jax.tree.map(one, rows)


def count(ids: Shaped[Array, "n"], axis_name: str | None = None) -> int:
    """n over all devices, a static number"""
    return ids.shape[0] * (1 if axis_name is None else jax.lax.axis_size(axis_name))


def dense_bits(params: PyTree) -> int:
    """Price of params sent as they are"""
    return sum(8 * leaf.dtype.itemsize * leaf.size for leaf in jax.tree.leaves(params))


def federated(
    init: InitFn,
    client_step: Callable[[Round, Any, Any, Any, PyTree], tuple[Any, Message, Array]],
    server_step: Callable[[Any, Any, PyTree], Any],
    bits_down: Callable[[Any], float],
) -> Algorithm:
    """A method that exchanges once a round.

        client_step(round, hparams, server, client, data) -> (client, message, loss)      in parallel
        server_step(hparams, server, mean of the messages) -> server
        bits_down(server) -> price of what every client receives

    The client axis is a `vmap`; devices are an `axis_name`.
    """

    def step(key, hparams, state, batch, *, axis_name=None):
        key_round = jax.random.fold_in(key, state.server.round)
        n = count(state.clients.id, axis_name)
        received = broadcast(state.server, axis_name)

        def one(client, data):
            return client_step(Round(key_round, client.id, n), hparams, received, client, data)

        rows, message, loss = jax.vmap(one)(state.clients, batch)
        value, bits, loss = mean((*message, loss), axis_name)
        server = server_step(hparams, state.server, value)
        return State(server, rows), Metrics(loss, bits, jnp.asarray(bits_down(state.server), bits.dtype))

    return Algorithm(init, step)
