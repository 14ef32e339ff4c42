"""Communication over the client axis: `broadcast` down, `mean` up, and the round that uses both."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, PyTree, Shaped

from commjax.core.base import (
    Algorithm,
    ClientId,
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
    """The name of a device axis whose last rows are padding (`devices.parallel.padded_axis`).

    Attributes:
        n: number of clients; the rows from n on are padding.
    """

    n: int


class RoundKeys(NamedTuple):
    """The keys of one round.  All parties can compute them from the key of the run.

    Attributes:
        shared: key of the round.  Compressors draw from it.
        cohort: key of the draw of the clients that take part.
        server: key of what the server draws.
    """

    shared: Key
    cohort: Key
    server: Key

    def client(self, id: ClientId) -> Key:
        """Key of one client in this round.

        Args:
            id: the client's number, from 0 to n - 1.

        Returns:
            A key that differs from those of the other clients and from `cohort` and `server`.
        """
        return jax.random.fold_in(self.shared, id)


def keys(key: Key, round: int | Int[Array, ""], n: int) -> RoundKeys:
    """Derive the keys of a round.

        shared = fold_in(key, round),  client i: fold_in(shared, i),  cohort: fold_in(shared, n),
        server: fold_in(shared, n + 1)

    Args:
        key: key of the run.
        round: number of the round.
        n: number of clients.

    Returns:
        The keys.

    >>> derived = keys(jax.random.key(0), 3, 10)
    >>> bool(derived.cohort == derived.client(10)), bool(derived.server == derived.client(11))
    (True, True)
    """
    shared = jax.random.fold_in(key, round)
    return RoundKeys(shared, jax.random.fold_in(shared, n), jax.random.fold_in(shared, n + 1))


def broadcast(server: PyTree, axis_name: str | None = None) -> PyTree:
    """Give every device its own copy of the server's values.

    Under `shard_map` the gradient at a *replicated* value would silently be summed over devices.  At a value that
    varies over the axis, each device gets the gradient of its own clients.

    Args:
        server: a pytree that is the same on all devices.
        axis_name: the device axis; None if there is none.

    Returns:
        The same values, marked as varying over `axis_name`.
    """
    if axis_name is None:
        return server
    return jax.tree.map(lambda leaf: jax.lax.pcast(leaf, axis_name, to="varying"), server)


def mean(rows: PyTree, axis_name: str | None = None, weights: Shaped[Array, "n"] | None = None) -> PyTree:
    """Average the rows of all clients on all devices.

        (1/n) sum_i row_i,  or with weights  (1/n) sum_i w_i row_i

    Args:
        rows: a pytree whose leaves have a leading axis, one row for each client of this device.
        axis_name: the device axis; None if there is none.
        weights: one number for each client of this device; None is 1 for each.

    Returns:
        A pytree without the leading axis, in the dtypes of `rows`, the same on all devices.

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
    """Whether a server may use a message: its numbers and their squares are finite.

    The bound on a magnitude is `largest` of the dtype: 1.8e19 for float32 and bfloat16 messages, 1.3e154 for float64.
    A float16 message only has to be finite.  Sums and squares of accepted messages therefore stay finite.

    Args:
        row: one message.

    Returns:
        A bool.

    >>> bool(acceptable(jnp.array([1.0, -1e18]))), bool(acceptable(jnp.array([1e300])))
    (True, False)
    >>> bool(acceptable(jnp.array(jnp.nan)))
    False
    """

    def one(leaf: Array) -> Array:
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            return jnp.ones((), bool)
        return jnp.all(jnp.abs(leaf) <= jnp.asarray(largest(leaf.dtype), leaf.dtype))  # False for NaN

    return jnp.all(jnp.stack([one(leaf) for leaf in jax.tree.leaves(row)] or [jnp.ones((), bool)]))


def largest(dtype: Any) -> float:
    """The largest magnitude that `acceptable` allows in a message of this dtype.

    It is the square root of the largest number of the dtype, or of float32 if the dtype has fewer bits.

    Args:
        dtype: a floating-point dtype.

    Returns:
        A number of at most the largest number of the dtype.
    """
    wide = dtype if jnp.finfo(dtype).bits > 32 else jnp.float32
    return min(float(jnp.finfo(dtype).max), float(jnp.finfo(wide).max) ** 0.5)


def gathered(rows: PyTree, axis_name: str | None = None) -> PyTree:
    """Collect the rows of all devices on every device.

    The rows are placed in an array of zeros and summed over the devices, because `shard_map` knows that a sum is the
    same on all devices.

    Args:
        rows: a pytree whose leaves have a leading axis, one row for each client of this device.
        axis_name: the device axis; None if there is none.

    Returns:
        The pytree with the rows of all devices, in the order of the devices.
    """
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
    """Reduce the messages of all clients to one message, and their losses to the mean loss.

    Args:
        reducer: None is the mean.  A reducer ignores messages that are not `acceptable`, and their losses.
        rows: the messages, with a leading axis of clients.
        losses: one for each message.
        axis_name: the device axis; a reducer gets the rows of all devices, which costs n messages of traffic instead of
            one.
        weights: weights of `mean`; weight 0 marks a client that takes no part in the round.

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
    """Set the round number of a new server state.

    Every key of a round comes from the round number.  The core therefore counts rounds itself and overwrites what a
    method's `server_step` did to the number.

    Args:
        before: server state at the beginning of the round.
        after: server state at its end.

    Returns:
        `after` with `round = before.round + 1`.
    """
    return after._replace(round=before.round + 1)


def mean_bits(
    bits: Shaped[Array, "n"], axis_name: str | None = None, weights: Shaped[Array, "n"] | None = None
) -> Array:
    """Average the bits of the clients' messages, exactly if they are equal.

    The plain `mean` is not exact: n times the bits need not be a float32 number.

    Args:
        bits: one number for each client of this device.
        axis_name: the device axis; None if there is none.
        weights: weights of `mean`.

    Returns:
        The mean over the clients of all devices.

    >>> mean_bits(jnp.full(1000, 674_720, jnp.float32)).item()
    674720.0
    """
    if weights is not None or isinstance(axis_name, PaddedAxis):
        return mean(bits, axis_name, weights)
    local = bits[0] + jnp.mean(bits - bits[0])
    return local if axis_name is None else jax.lax.pmean(local, axis_name)


def count(ids: Shaped[Array, "n"], axis_name: str | None = None) -> int:
    """The number of clients on all devices, as a Python int.

    Args:
        ids: the ids on this device.
        axis_name: the device axis; None if there is none.

    Returns:
        n, without padding rows.
    """
    if isinstance(axis_name, PaddedAxis):
        return axis_name.n
    return ids.shape[0] * (1 if axis_name is None else jax.lax.axis_size(axis_name))


def real(local: int, axis_name: str | None = None) -> Bool[Array, "m"]:
    """Which rows of this device are clients, not padding.

    Args:
        local: number of rows on this device.
        axis_name: the device axis; None if there is none.

    Returns:
        A bool for each row.
    """
    if not isinstance(axis_name, PaddedAxis):
        return jnp.ones(local, bool)
    return jax.lax.axis_index(axis_name) * local + jnp.arange(local, dtype=jnp.int32) < axis_name.n


def dense_bits(params: PyTree) -> int:
    """Bits of a pytree that is sent uncompressed, as an exact int."""
    return sum(8 * leaf.dtype.itemsize * leaf.size for leaf in jax.tree.leaves(params))


def bits_of(params: PyTree) -> Array:
    """`dense_bits` as an array of the default float dtype, for `Message.bits`."""
    return jnp.asarray(dense_bits(params), jnp.zeros(()).dtype)


def one_by_one(one: Callable) -> Callable:
    """Like `jax.vmap(one)`, but the clients are computed one after another.

    This saves memory, and costs no time for networks whose step uses the whole machine.

    Args:
        one: function of one client's rows.

    Returns:
        The function of rows with a leading client axis.

    >>> one_by_one(lambda x, y: x + y)(jnp.arange(3), jnp.ones(3, int)).tolist()
    [1, 2, 3]
    """
    return lambda *rows: jax.lax.map(lambda row: one(*row), rows)


class Cohort(NamedTuple):
    """The clients that take part in a round.

    `cohort` draws them without replacement from a key that all parties share.  Without a device axis only the rows of
    the members are read and written.  With one, every device works on all of its rows, because the number of members on
    it is not known when the program is compiled.

    Attributes:
        member: for each row on this device, whether the client takes part; None if all do.
        at: positions of the members, without a device axis; else None.
        weights: weights with which `mean` is the mean over the members; None is 1 for each row.
    """

    member: Bool[Array, "n"] | None
    at: Int[Array, "m"] | None
    weights: Shaped[Array, "n"] | None

    def take(self, rows: PyTree) -> PyTree:
        """Select the rows that this device works on."""
        return rows if self.at is None else jax.tree.map(lambda leaf: leaf[self.at], rows)

    def put(self, rows: PyTree, new: PyTree) -> PyTree:
        """Replace the rows of the members by `new`."""
        if self.member is None:
            return new
        if self.at is not None:
            return jax.tree.map(lambda leaf, value: leaf.at[self.at].set(value), rows, new)
        member = self.member
        return jax.tree.map(lambda old, value: jnp.where(_column(member, old), value, old), rows, new)


def _column(values: Array, leaf: Array) -> Array:
    return jnp.reshape(values, (-1,) + (1,) * (leaf.ndim - 1))


def check_cohort(size: int | None) -> None:
    """ValueError unless `size` is None or at least 1."""
    if size is not None and size < 1:
        raise ValueError(f"cohort must be at least 1 client (or None for all), got {size}")


def cohort_members(key: Key, ids: Shaped[Array, "m"], n: int, size: int) -> Bool[Array, "m"]:
    """Which of the given clients belong to the cohort that `key` draws.

    Args:
        key: key of the draw, the same for all parties.
        ids: numbers of the clients in question, from 0 to n - 1.
        n: number of clients.
        size: number of members of the cohort, drawn uniformly without replacement.

    Returns:
        A bool for each of `ids`.

    >>> int(cohort_members(jax.random.key(0), jnp.arange(10), 10, 3).sum())
    3
    """
    if not 1 <= size <= n:
        raise ValueError(f"cohort must be between 1 and the number of clients, got {size} of {n}")
    return jax.random.permutation(key, n)[ids] < size


def cohort(key: Key, ids: Shaped[Array, "n"], size: int | None, axis_name: str | None = None) -> Cohort:
    """Draw the cohort of a round.

    Args:
        key: key of the draw, the same for all parties.
        ids: ids on this device.
        size: number of members; None is all clients.
        axis_name: the device axis; None if there is none.

    Returns:
        The cohort, as far as this device needs it.
    """
    n = count(ids, axis_name)
    if size is None or size == n:
        return Cohort(None, None, None)
    member = cohort_members(key, ids, n, size)
    if axis_name is None:
        return Cohort(member, jnp.nonzero(member, size=size)[0], None)
    return Cohort(member, None, jnp.where(member, n / size, 0.0))


def evaluated(value_and_grad: Callable, params: PyTree, data: PyTree) -> tuple[Array, PyTree]:
    """Compute one client's loss and gradient, and check that the function returns both.

    Args:
        value_and_grad: (params, data) -> (loss, gradient like params).
        params: the model.
        data: one client's data.

    Returns:
        (loss, gradient).  TypeError if `value_and_grad` returns something else.

    >>> evaluated(jax.grad(lambda x, data: x**2), jnp.ones(()), ())  # doctest: +ELLIPSIS
    Traceback (most recent call last):
    TypeError: value_and_grad(params, data) must return (loss, gradients like params): pass ...
    """
    found = value_and_grad(params, data)
    pair = isinstance(found, tuple) and len(found) == 2 and jax.tree.structure(found[0]) == jax.tree.structure(0)
    if not pair or jnp.ndim(found[0]) or jax.tree.structure(found[1]) != jax.tree.structure(params):
        raise TypeError(
            "value_and_grad(params, data) must return (loss, gradients like params): pass jax.value_and_grad(loss), "
            "not loss or jax.grad(loss)"
        )
    return found


def check_rows(data: PyTree, n: int) -> None:
    """ValueError unless every leaf of `data` has a leading axis of length n."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(data):
        if jnp.shape(leaf)[:1] != (n,):
            raise ValueError(
                f"data{jax.tree_util.keystr(path)} has shape {jnp.shape(leaf)}; allowed: a leading axis of {n}, one "
                "row for each client"
            )


def message_of(exchange: Exchange, key: Key, x: PyTree, id: Any, n: int) -> Message:
    """Compress x as client `id` does in a round.

    Args:
        exchange: of the method.
        key: key of the round.
        x: what the client sends.
        id: the client's number.
        n: number of clients.

    Returns:
        The message as the server sees it: C(x), or x itself without a compressor.
    """
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
    download: Codec | None = None,
    upload: Codec | None = None,
    reduce: Reducer | None = None,
    spec: Spec | None = None,
) -> Algorithm:
    """Make an `Algorithm` of a client step and a server step that communicate once a round.

        client_i, m_i, loss_i  <-  client_step(round, hparams, server, client_i, data_i)     for all i in parallel
        server                 <-  server_step(hparams, server, mean_i m_i)

    With `cohort_size` m, m clients drawn at random take part in a round.  The messages and the loss are averaged over
    them, bits over all n clients.  A method whose clients read only the fields `down` and send only by `round.send`
    also runs with remote clients (`commjax.federation.flower`).

    Args:
        init: (params, ids, **per_client) -> State.
        client_step: (round, hparams, server, client, data) -> (client, message, loss) for one client, without a client
            axis.  `round` is a `Round`; the message must be the result of `round.send(x)`, which is C(x), or x itself
            without a `compressor`.
        server_step: (hparams, server, mean of the messages) -> server.  It need not change `server.round`: the core
            sets it to the next one.
        bits_down: (server) -> number of bits that a client receives.
        cohort_size: number of clients in a round; None is all of them.
        over: maps a function of one client over the client axis: `jax.vmap` or `one_by_one`.
        compressor: compressor of the uploads; None sends them uncompressed.
        down: names of the fields of `server` that a client may read, besides `round`.
        private: whether the method draws its noise from `round.own_key`, which must then be a secret of the client.
        download: codec of the downloads, if they are not all fields of `down` for every client.
        upload: codec of the uploads, if they have neither the compressor's encoding nor the structure of `down`.
        reduce: a robust reducer (`commjax.core.robust`); None is the mean.
        spec: the types and values that the method accepts, for `commjax.core.checks`.

    Returns:
        The algorithm.  Its `step` has the clients of one device on a leading axis, and devices on the axis `axis_name`.
    """
    check_cohort(cohort_size)
    if reduce is not None and compressor is not None and compressor.absence:
        raise ValueError(
            f"reduce={reduce.name}: under {compressor.name} clients that are not drawn send 0, and {reduce.name} would "
            "take these for messages; allowed: a compressor with which every client sends, or reduce=None"
        )
    exchange = Exchange(
        client_step, server_step, bits_down, down, compressor, cohort_size, private, download, upload, reduce=reduce
    )

    def step(key, hparams, state, batch, *, axis_name=None):
        check_rows(batch, len(state.clients.id))
        n = count(state.clients.id, axis_name)
        derived = keys(key, state.server.round, n)
        here = cohort(derived.cohort, state.clients.id, cohort_size, axis_name)
        received = broadcast(state.server, axis_name)

        def one(client, data):
            send = partial(message_of, exchange, derived.shared, id=client.id, n=n)
            round = Round(derived.shared, client.id, n, send, run=key)
            return client_step(round, hparams, received, client, data)

        rows, message, loss = over(one)(here.take(state.clients), here.take(batch))
        value, loss = reduced(reduce, message.value, loss, axis_name, here.weights)
        bits = mean_bits(message.bits, axis_name, here.weights)
        server = next_round(state.server, server_step(hparams, state.server, value))
        share = (n if cohort_size is None else cohort_size) / n
        down = jnp.asarray(share * bits_down(state.server), bits.dtype)
        return State(server, here.put(state.clients, rows)), Metrics(loss, share * bits, down)

    return Algorithm(checked_init(init), step, exchange, spec)
