"""The client's part of a round as bytes: `answer` a download with an upload."""

import math
import os
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree

from commjax.compressors import wire
from commjax.core import rounds
from commjax.core.base import CommitFn, Exchange, Key, Message, Round
from commjax.core.runner import BatchFn
from commjax.federation.contract import (
    Contract,
    download_bits,
    exchange_of,
    fingerprint,
    key_round,
    keys_of,
    start,
)
from commjax.federation.envelope import Header, RefusedError, seal, unseal
from commjax.federation.payload import read_download, refuse_numbers, write_upload

_LAST_ROUND = 2**31 - 1  # `server.round` is an int32


class Memory(NamedTuple):
    """What a client keeps between two rounds.

    Attributes:
        row: the encoded client state after the last round that the server counted.
        last: number of that round; -1 if there is none.
        pending: the encoded client state after `pending_round`, valid if the server counts that upload.
        pending_round: round of the last upload; -1 if none is pending.
    """

    row: bytes
    last: int
    pending: bytes
    pending_round: int


class ClientKeys(NamedTuple):
    """The keys that a client uses.

    Attributes:
        step: key of the run's steps, shared by all parties.
        batch: key of the run's batches, shared by all parties.
        secret: key that only this client knows; None if the method is not private.
    """

    step: Key
    batch: Key
    secret: Key | None


@cache
def _programs(exchange: Exchange, n: int, batch_fn: BatchFn) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Compile two functions: the client step up to `round.send`, and the client step after it."""

    def round_of(keys: ClientKeys, server: Any, row: Any) -> Round:
        shared = rounds.keys(keys.step, server.round, n).shared
        return rounds.round_of(exchange, shared, row.id, n, run=keys.step, secret=keys.secret)

    def client_round(
        round: Round, key: Key, hparams: Any, server: Any, row: Any, data: PyTree
    ) -> tuple[Any, Message, Array]:
        key_batch = jax.random.fold_in(key, server.round)
        rows = batch_fn(key_batch, row.id[None], jax.tree.map(lambda leaf: leaf[None], data))
        return exchange.client_step(round, hparams, server, row, jax.tree.map(lambda leaf: leaf[0], rows))

    @jax.jit
    def before(keys: ClientKeys, hparams: Any, server: Any, row: Any, data: PyTree) -> tuple[PyTree, Array, Any]:
        sent: list[tuple[PyTree, Message]] = []
        round = round_of(keys, server, row)

        def send(x: PyTree) -> Message:
            sent.append((x, round.send(x)))
            return sent[-1][1]

        row, returned, loss = client_round(round._replace(send=send), keys.batch, hparams, server, row, data)
        if len(sent) != 1 or returned is not sent[0][1]:
            raise ValueError(f"client_step must return what one round.send gave it, it called it {len(sent)} times")
        # An uncompressed message needs no second program: the server decodes exactly x.
        return sent[0][0], loss, row if exchange.compressor is None else None

    @jax.jit
    def after(keys: ClientKeys, hparams: Any, server: Any, row: Any, data: PyTree, value: PyTree) -> Any:
        # The compiler removes the gradient: the result depends on `value` only.
        round = round_of(keys, server, row)._replace(send=lambda x: Message(value, jnp.zeros(())))
        return client_round(round, keys.batch, hparams, server, row, data)[0]

    return before, after


def first_memory(contract: Contract, id: int) -> Memory:
    """Return the memory of client `id` before its first round."""
    row = jax.tree.map(lambda leaf: leaf[0], start(contract, jnp.asarray([id])).clients)
    return Memory(wire.encode_tree(row), -1, b"", -1)


def _committed(memory: Memory, id: int, counted: int) -> Memory:
    if counted == memory.last:
        return memory
    if counted == memory.pending_round:
        return Memory(memory.pending, counted, b"", -1)
    known = [round for round in (memory.last, memory.pending_round) if round >= 0]
    raise RefusedError(
        f"client {id} was counted in round {counted}, but remembers {known or 'none'}: its state is lost"
    )


@cache
def _commit(exchange: Exchange) -> CommitFn:
    assert exchange.commit is not None
    return jax.jit(exchange.commit)


def _new_secret() -> Key:
    return jax.random.wrap_key_data(jnp.asarray(np.frombuffer(os.urandom(8), np.uint32)), impl="threefry2x32")


def answer(
    contract: Contract, id: int, data: PyTree, memory: Memory, download: bytes, secret: Key | None = None
) -> tuple[Memory, bytes]:
    """Run the client's part of a round: open the download, take the client step, seal the upload.

    With a private method, store the new memory before you send the upload.

    Args:
        contract: the contract of the run.
        id: the client's number.
        data: the client's data, without a client axis.
        memory: the client's memory after its last round, or `first_memory`.
        download: the sealed download.
        secret: secret key of a private method, for tests; None draws one.

    Returns:
        The new memory, and the sealed upload.  Raises a RefusedError if the download is not valid; the old memory
        remains valid in that case.
    """
    exchange, run = exchange_of(contract), fingerprint(contract)
    first = start(contract, jnp.asarray([id]))
    header, payload = unseal(download, kind="down", run=run, limit=int(download_bits(exchange, first.server, id)) // 8)
    if header.client != id:
        raise RefusedError(f"of another client: a download to client {header.client}, this is client {id}")
    if header.round > _LAST_ROUND:
        raise RefusedError(f"malformed: client {id} was asked for round {header.round}; allowed: 0 to {_LAST_ROUND}")
    secret = _secret_of(contract, id, memory, header.round, secret)
    server = _received(contract, first.server, header.round, id, payload)

    known, memory = memory.last, _committed(memory, id, header.counted)
    row = jax.tree.map(jnp.asarray, wire.decode_tree(memory.row, jax.tree.map(lambda leaf: leaf[0], first.clients)))
    if exchange.commit is not None and memory.last != known:
        row = _commit(exchange)(contract.hparams, server, row)
        memory = memory._replace(row=wire.encode_tree(row))

    key = key_round(contract, header.round)
    before, after = _programs(exchange, contract.n, contract.batch_fn)
    arguments = (ClientKeys(*keys_of(contract), secret), contract.hparams, server, row, data)
    x, loss, new = before(*arguments)
    sent = write_upload(exchange, key, x, id, contract.n)
    if exchange.upload is None and exchange.compressor is not None:
        new = after(*arguments, exchange.compressor.decode(key, sent, x, id, contract.n))
    pending = wire.encode_tree(new)
    reported_loss = math.nan if exchange.private else float(loss)
    upload = seal(Header("up", run, header.round, id, loss=reported_loss), sent)
    return memory._replace(pending=pending, pending_round=header.round), upload


def _secret_of(contract: Contract, id: int, memory: Memory, round: int, secret: Key | None) -> Key | None:
    """Return the secret key of this answer; None if the method is not private.

    Raises a RefusedError if the client of a private method has already answered this round, or the last round of the
    contract.
    """
    if not exchange_of(contract).private:
        if secret is not None:
            raise ValueError("secret: this method is not private; allowed: None")
        return None
    if not max(memory.last, memory.pending_round) < round < (contract.rounds or 0):
        raise RefusedError(
            f"client {id} answers each of {contract.rounds} rounds of a private method once, in order, not "
            f"{round} after {max(memory.last, memory.pending_round)}"
        )
    return _new_secret() if secret is None else secret


def _received(contract: Contract, first: Any, round: int, id: int, payload: bytes) -> Any:
    """Return the server state as client `id` sees it.  Fields that are not sent are None, so a method cannot read them.

    `first` is the server state before the first round.
    """
    exchange = exchange_of(contract)
    received = read_download(exchange, key_round(contract, round), payload, first, id, contract.n)
    refuse_numbers(f"the download of round {round} to client {id}", received)
    fields = dict(zip(exchange.down, (received,) if len(exchange.down) == 1 else received))
    blank = type(first)(*(None for _ in first))
    return blank._replace(round=jnp.asarray(round, first.round.dtype), **fields)
