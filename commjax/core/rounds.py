"""The client axis: one verb down, one verb up, and the round made of them."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PyTree, Shaped

from commjax.core.base import (
    Algorithm,
    Codec,
    Compressor,
    Exchange,
    InitFn,
    Key,
    Message,
    Metrics,
    Reducer,
    Round,
    Spec,
    State,
)
from commjax.core.checks import checked_init


class PaddedAxis(str):
    """The name of a device axis whose last rows are no clients: n of them are (`parallel.padded_axis`)."""

    n: int


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
        if isinstance(axis_name, PaddedAxis):
            kept = jnp.where(_column(real(len(leaf), axis_name), leaf), leaf, jnp.zeros((), leaf.dtype))
            return jax.lax.psum(jnp.sum(kept, axis=0), axis_name) / jnp.asarray(axis_name.n, leaf.dtype)
        local = jnp.mean(leaf, axis=0)
        return local if axis_name is None else jax.lax.pmean(local, axis_name)

    return jax.tree.map(one, rows)


def acceptable(row: PyTree) -> Bool[Array, ""]:
    """Whether a server may use a message: its numbers are finite, and so are their squares (in float32 at least).

    The bound on a number is the square root of the largest one: 1.8e19 for float32 and bfloat16 messages, 1.3e154 for float64; a
    float16 message only has to be finite.  Sums and squares of accepted messages therefore stay finite.

    >>> bool(acceptable(jnp.array([1.0, -1e18]))), bool(acceptable(jnp.array([1e300]))), bool(acceptable(jnp.array(jnp.nan)))
    (True, False, False)
    """

    def one(leaf: Array) -> Array:
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            return jnp.ones((), bool)
        return jnp.all(jnp.abs(leaf) <= jnp.asarray(largest(leaf.dtype), leaf.dtype))  # NaN is not

    return jnp.all(jnp.stack([one(leaf) for leaf in jax.tree.leaves(row)] or [jnp.ones((), bool)]))


def largest(dtype: Any) -> float:
    """The largest magnitude that `acceptable` allows in a message of this dtype."""
    wide = dtype if jnp.finfo(dtype).bits > 32 else jnp.float32
    return min(float(jnp.finfo(dtype).max), float(jnp.finfo(wide).max) ** 0.5)


def gathered(rows: PyTree, axis_name: str | None = None) -> PyTree:
    """The rows of all devices, on every device.  A sum of rows in their places: `shard_map` knows that it is the same everywhere."""
    if axis_name is None:
        return rows
    devices, at = jax.lax.axis_size(axis_name), jax.lax.axis_index(axis_name)

    def one(leaf: Array) -> Array:
        wide = leaf.astype(jnp.int32) if leaf.dtype == bool else leaf
        mine = (jnp.arange(devices, dtype=jnp.int32) == at).reshape(-1, *[1] * leaf.ndim)
        placed = jnp.where(mine, wide[None], jnp.zeros((), wide.dtype))
        return jax.lax.psum(placed, axis_name).reshape(-1, *leaf.shape[1:]).astype(leaf.dtype)

    return jax.tree.map(one, rows)


def reduced(
    reducer: Reducer | None,
    rows: PyTree,
    losses: Shaped[Array, "n"],
    axis_name: str | None = None,
    weights: Shaped[Array, "n"] | None = None,
) -> tuple[PyTree, Array]:
    """Up: one message of all, and the mean loss.

    Args:
        reducer: None is the mean.  With another one, messages that are not `acceptable` are left out, and so are their losses.
        rows: the messages, with a leading axis of clients.
        losses: one for each message.
        axis_name: the device axis; a reducer gets the rows of all devices, which costs n messages of traffic instead of one.
        weights: of `mean`; a message of weight 0 is that of a client that takes no part.

    Returns:
        The message and the loss, the same on all devices.
    """
    if reducer is None:
        return mean((rows, losses), axis_name, weights)
    counts = real(len(losses), axis_name) & jax.vmap(acceptable)(rows)
    counts = counts if weights is None else counts & (weights > 0)
    clean = jax.tree.map(lambda leaf: jnp.where(_column(counts, leaf), leaf, jnp.zeros((), leaf.dtype)), (rows, losses))
    (values, losses), counts = gathered((clean, counts), axis_name)
    number = jnp.sum(counts).astype(losses.dtype)
    return reducer.reduce(values, counts), jnp.sum(losses) / number


def next_round(before: Any, after: Any) -> Any:
    """`after` in the round that follows that of `before`, whatever a method's `server_step` makes of it.

    The core counts rounds, since every key of a round comes from that number.
    """
    return after._replace(round=before.round + 1)


def mean_price(
    bits: Shaped[Array, "n"], axis_name: str | None = None, weights: Shaped[Array, "n"] | None = None
) -> Array:
    """`mean` of prices, exact where they are equal: in float32, n times a price need not be a number.

    >>> mean_price(jnp.full(1000, 674_720, jnp.float32)).item()
    674720.0
    """
    if weights is not None or isinstance(axis_name, PaddedAxis):
        return mean(bits, axis_name, weights)
    local = bits[0] + jnp.mean(bits - bits[0])
    return local if axis_name is None else jax.lax.pmean(local, axis_name)


def count(ids: Shaped[Array, "n"], axis_name: str | None = None) -> int:
    """n over all devices, a static number"""
    if isinstance(axis_name, PaddedAxis):
        return axis_name.n
    return ids.shape[0] * (1 if axis_name is None else jax.lax.axis_size(axis_name))


def real(local: int, axis_name: str | None = None) -> Bool[Array, "m"]:
    """Which of this device's `local` rows are clients"""
    if not isinstance(axis_name, PaddedAxis):
        return jnp.ones(local, bool)
    return jax.lax.axis_index(axis_name) * local + jnp.arange(local, dtype=jnp.int32) < axis_name.n


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


def evaluated(value_and_grad: Callable, params: PyTree, data: PyTree) -> tuple[Array, PyTree]:
    """One client's loss and gradient, or an error that says what was meant.

    >>> evaluated(jax.grad(lambda x, data: x**2), jnp.ones(()), ())
    Traceback (most recent call last):
    TypeError: value_and_grad(params, data) must return (loss, gradients like params): pass jax.value_and_grad(loss), not loss or jax.grad(loss)
    """
    found = value_and_grad(params, data)
    pair = isinstance(found, tuple) and len(found) == 2 and jax.tree.structure(found[0]) == jax.tree.structure(0)
    if not pair or jnp.ndim(found[0]) or jax.tree.structure(found[1]) != jax.tree.structure(params):
        raise TypeError(
            "value_and_grad(params, data) must return (loss, gradients like params): pass jax.value_and_grad(loss), not loss or "
            "jax.grad(loss)"
        )
    return found


def check_rows(data: PyTree, n: int) -> None:
    """Every leaf of the clients' data has a row for each of them."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(data):
        if jnp.shape(leaf)[:1] != (n,):
            raise ValueError(
                f"data{jax.tree_util.keystr(path)} has shape {jnp.shape(leaf)}; allowed: a leading axis of {n}, one row for each client"
            )


def message_of(exchange: Exchange, key: Key, x: PyTree, id: Any, n: int) -> Message:
    """What the server sees of x, and its price; `key` is the round's"""
    if exchange.compressor is None:
        return Message(x, bits_of(x))
    return exchange.compressor.compress(key, x, id, n)


def federated(
    init: InitFn,
    client_step: Callable[[Round, Any, Any, Any, PyTree], tuple[Any, Message, Array]],
    server_step: Callable[[Any, Any, PyTree], Any],
    bits_down: Callable[[Any], float],
    cohort_size: int | None = None,
    over: Callable[[Callable], Callable] = jax.vmap,
    *,
    compressor: Compressor | None = None,
    down: tuple[str, ...] = ("params",),
    private: bool = False,
    letter: Codec | None = None,
    reply: Codec | None = None,
    reduce: Reducer | None = None,
    spec: Spec | None = None,
) -> Algorithm:
    """A method that exchanges once a round.

        client_step(round, hparams, server, client, data) -> (client, message, loss)      in parallel
        server_step(hparams, server, mean of the messages) -> server
        bits_down(server) -> price of what every client receives

    The message is `round.send(x)`: C(x), or x itself without a `compressor`.  `down` names the fields of `server` that a
    client may read, besides `round`; a method that keeps to both can leave the simulation (`commjax.federation.flower`).  `private`: its
    noise comes from `round.own_key`, which is then a secret of the client.  `letter`: what each client is sent, where that is not all of
    `down`; `reply`: what it sends, where that is neither the compressor's encoding nor like `down`.  `reduce`: a robust reducer instead of
    the mean (`commjax.core.robust`).  `spec`: what the method takes, for `commjax.core.checks`.

    `server_step` need not touch `server.round`: the core sets it to the next one.

    The client axis is a `vmap` (or `over`, see `one_by_one`); devices are an `axis_name`.  With `cohort_size` m, m clients
    drawn at random take part in a round; the messages and the loss are averaged over them, bits over all n clients.
    """
    check_cohort(cohort_size)
    if reduce is not None and compressor is not None and compressor.absence:
        raise ValueError(
            f"reduce={reduce.name}: under {compressor.name} clients that are not drawn send 0, and {reduce.name} would take these for "
            "messages; allowed: a compressor with which every client sends, or reduce=None"
        )
    exchange = Exchange(
        client_step, server_step, bits_down, down, compressor, cohort_size, private, letter, reply, reduce=reduce
    )

    def step(key, hparams, state, batch, *, axis_name=None):
        check_rows(batch, len(state.clients.id))
        key_round = jax.random.fold_in(key, state.server.round)
        n = count(state.clients.id, axis_name)
        here = cohort(jax.random.fold_in(key_round, n), state.clients.id, cohort_size, axis_name)
        received = broadcast(state.server, axis_name)

        def one(client, data):
            send = partial(message_of, exchange, key_round, id=client.id, n=n)
            round = Round(key_round, client.id, n, send, run=key)
            return client_step(round, hparams, received, client, data)

        rows, message, loss = over(one)(here.take(state.clients), here.take(batch))
        value, loss = reduced(reduce, message.value, loss, axis_name, here.weights)
        bits = mean_price(message.bits, axis_name, here.weights)
        server = next_round(state.server, server_step(hparams, state.server, value))
        share = (n if cohort_size is None else cohort_size) / n
        down = jnp.asarray(share * bits_down(state.server), bits.dtype)
        return State(server, here.put(state.clients, rows)), Metrics(loss, share * bits, down)

    return Algorithm(checked_init(init), step, exchange, spec)
