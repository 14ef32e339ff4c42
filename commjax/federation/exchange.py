"""A round with remote clients: what the server and a client do with bytes.  The network is not part of this module.

    server   downloads(contract, server, counted)         ->  one sealed download for each client that takes part
    client   answer(contract, id, data, memory, download) ->  the client's new memory, and its sealed upload
    server   close(contract, server, uploads)             ->  the next server state, and a report

See `commjax.federation.flower` for a network.

The payload of an upload is `compressor.encode`.  The payload of a download is the raw leaves of the fields
`Exchange.down`.  A method may replace both by codecs (`Exchange.download` and `Exchange.upload`).  Both have exactly
the bits that the simulation counts.  Client and server add the same decoded message, so h = mean_i h_i holds bit for
bit.  A client commits a round only when the next download says that its upload was counted.  An upload that comes too
late therefore changes nothing on either side.

A message with numbers that are not finite or too large (`rounds.acceptable`) is refused.  A refused upload counts as
absent.  If a server step gives params that are not finite, `close` raises a `DivergedError`, and the server state that
was given to it is the last good one.  With a reducer of `commjax.core.robust` the server reduces the messages that it
accepted, however many clients are absent.

Privacy.  All parties know the contract's key, so a method that hides data behind noise (`Exchange.private`: LDP-FedP3)
must not draw the noise from it.  For every answer a client draws a new secret key from the operating system and then
forgets it.  Nobody can compute the rows and the noise of a round afterwards, not even the client.  A client answers
each of `Contract.rounds` rounds once, so a server that asks again, or for more rounds, learns nothing beyond
`accounting.guarantee(noise, rate, rounds, delta)`.  The client sends nan instead of its loss.  The limits: the count of
rounds is in the client's `Memory` and is of one run; the secret has 64 bits; JAX's generator (threefry) and
floating-point noise are good statistics, but no cryptography.
"""

import math
import os
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from commjax.compressors import wire
from commjax.compressors.vectors import payload_bytes
from commjax.core import checks, rounds
from commjax.core.base import Exchange, Key, Message, Round
from commjax.core.runner import BatchFn, DivergedError
from commjax.federation.contract import (
    Contract,
    download_bits,
    fingerprint,
    halves,
    key_round,
    keys_of,
    members,
    received_fields,
    start,
)
from commjax.federation.envelope import HEADER_BYTES, Header, RefusedError, seal, unseal

__all__ = [
    "AbsentError",
    "Contract",
    "Memory",
    "Report",
    "answer",
    "close",
    "downloads",
    "fingerprint",
    "first_memory",
    "halves",
    "members",
    "start",
]


_LAST_ROUND = 2**31 - 1  # `server.round` is an int32


class AbsentError(RuntimeError):
    """A client did not answer, and the method does not allow absent clients."""


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


class Report(NamedTuple):
    """One round as the server saw it.

    If no client was absent, the first three fields are the `Metrics` of a simulation.

    Attributes:
        loss: mean loss of the clients that answered; nan for a private method.
        bits_up: bits of the payload that one client sent, as the mean over all n clients.
        bits_down: bits of the payload that one client was sent, as the mean over all n clients.
        header_bytes: bytes of all headers of downloads and uploads; they are not in the bits above.
        absent: by id of an absent client, the reason.
    """

    loss: float
    bits_up: float
    bits_down: float
    header_bytes: int
    absent: dict[int, str]


@cache
def _programs(exchange: Exchange, n: int, batch_fn: BatchFn):
    """Three compiled functions: the client step before and after it sends, and the server step."""

    def client_side(send, keys, hparams, server, row, data):
        key_step, key_batch = (jax.random.fold_in(key, server.round) for key in keys[:2])
        batch = batch_fn(key_batch, row.id[None], jax.tree.map(lambda leaf: leaf[None], data))
        own = jax.tree.map(lambda leaf: leaf[0], batch)
        return exchange.client_step(Round(key_step, row.id, n, send, keys[2], keys[0]), hparams, server, row, own)

    @jax.jit
    def before(keys, hparams, server, row, data):
        sent: list[PyTree] = []
        message = Message(None, jnp.zeros(()))

        def send(x):
            nonlocal message
            sent.append(x)
            message = rounds.message_of(exchange, jax.random.fold_in(keys[0], server.round), x, row.id, n)
            return message

        row, returned, loss = client_side(send, keys, hparams, server, row, data)
        if len(sent) != 1 or returned is not message:
            raise ValueError(f"client_step must return what one round.send gave it, it called it {len(sent)} times")
        # An uncompressed message needs no second program: the server decodes exactly x.
        return sent[0], loss, row if exchange.compressor is None else None

    @jax.jit
    def after(keys, hparams, server, row, data, value):
        # The compiler removes the gradient: the result depends on `value` only.
        return client_side(lambda x: Message(value, jnp.zeros(())), keys, hparams, server, row, data)[0]

    @jax.jit
    def step(key, hparams, server, ids, values):
        if exchange.joined is not None:
            return rounds.next_round(server, exchange.joined(key, hparams, server, ids, values))
        assert exchange.server_step is not None
        value, _ = rounds.reduced(exchange.reduce, values, jnp.zeros(len(ids)))
        return rounds.next_round(server, exchange.server_step(hparams, server, value))

    return before, after, step


def downloads(contract: Contract, server: Any, counted: Mapping[int, int]) -> dict[int, bytes]:
    """Make the downloads of a round.

    Args:
        contract: of the run.
        server: server state at the beginning of the round.
        counted: by id, the last round in which an upload of this client was counted; clients without one may be
            missing.

    Returns:
        The sealed download of each client that takes part, by id.
    """
    exchange, round, run = halves(contract), int(server.round), fingerprint(contract)
    asked = members(contract, round)
    if exchange.download is None:
        payloads = [wire.encode_tree(received_fields(exchange, server))] * len(asked)
    else:
        payloads = exchange.download.write(key_round(contract, round), server, asked, contract.n)
    for i, payload in zip(asked, payloads, strict=True):
        if 8 * len(payload) != download_bits(exchange, server, i):
            price = download_bits(exchange, server, i)
            raise ValueError(f"the download to client {i} has {8 * len(payload)} bits, but the ledger says {price:g}")
    return {i: seal(Header("down", run, round, i, counted.get(i, -1)), one) for i, one in zip(asked, payloads)}


def first_memory(contract: Contract, id: int) -> Memory:
    """The memory of client `id` before its first round."""
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
def _commit(exchange: Exchange) -> Any:
    assert exchange.commit is not None
    return jax.jit(exchange.commit)


def _new_secret() -> Key:
    return jax.random.wrap_key_data(jnp.asarray(np.frombuffer(os.urandom(8), np.uint32)), impl="threefry2x32")


def answer(
    contract: Contract, id: int, data: PyTree, memory: Memory, download: bytes, secret: Key | None = None
) -> tuple[Memory, bytes]:
    """Run the client's part of a round.

    With a private method, store the new memory before the upload is sent.

    Args:
        contract: of the run.
        id: the client's number.
        data: the client's data, without a client axis.
        memory: the client's memory after its last round, or `first_memory`.
        download: the sealed download.
        secret: secret key of a private method, for tests; None draws one.

    Returns:
        The new memory, and the sealed upload.  RefusedError if the download is not valid; keep the old memory then.
    """
    exchange, run = halves(contract), fingerprint(contract)
    first = start(contract, jnp.asarray([id]))
    header, payload = unseal(download, kind="down", run=run, limit=int(download_bits(exchange, first.server, id)) // 8)
    if header.client != id:
        raise RefusedError(f"foreign: a download to client {header.client}, this is client {id}")
    if header.round > _LAST_ROUND:
        raise RefusedError(f"malformed: client {id} was asked for round {header.round}; allowed: 0 to {_LAST_ROUND}")
    if exchange.private:
        secret = _new_secret() if secret is None else secret
        if not max(memory.last, memory.pending_round) < header.round < (contract.rounds or 0):
            raise RefusedError(
                f"client {id} answers each of {contract.rounds} rounds of a private method once, in order, not "
                f"{header.round} after {max(memory.last, memory.pending_round)}"
            )
    elif secret is not None:
        raise ValueError("secret: this method is not private; allowed: None")
    # Fields that are not sent are None, so that a method cannot read them.
    key = key_round(contract, header.round)
    try:
        if exchange.download is None:
            received = wire.decode_tree(payload, received_fields(exchange, first.server))
        else:
            received = exchange.download.read(key, payload, first.server, id, contract.n)
    except ValueError as error:
        raise RefusedError(f"malformed: {error}") from error
    _refuse_numbers(f"the download of round {header.round} to client {id}", received)
    fields = dict(zip(exchange.down, (received,) if len(exchange.down) == 1 else received))
    blank = type(first.server)(*(None for _ in first.server))
    server = blank._replace(round=jnp.asarray(header.round, first.server.round.dtype), **fields)

    known, memory = memory.last, _committed(memory, id, header.counted)
    row = jax.tree.map(jnp.asarray, wire.decode_tree(memory.row, jax.tree.map(lambda leaf: leaf[0], first.clients)))
    if exchange.commit is not None and memory.last != known:
        row = _commit(exchange)(contract.hparams, server, row)
        memory = memory._replace(row=wire.encode_tree(row))

    before, after, _ = _programs(exchange, contract.n, contract.batch_fn)
    everything = ((*keys_of(contract), secret), contract.hparams, server, row, data)
    x, loss, new = before(*everything)
    if exchange.upload is not None:
        sent = exchange.upload.write(key, x, id, contract.n)
    elif exchange.compressor is None:
        sent = wire.encode_tree(x)
    else:
        sent = exchange.compressor.encode(key, x, id, contract.n)
        new = after(*everything, exchange.compressor.decode(key, sent, x, id, contract.n))
    pending = wire.encode_tree(new)
    told = math.nan if exchange.private else float(loss)
    upload = seal(Header("up", run, header.round, id, loss=told), sent)
    return memory._replace(pending=pending, pending_round=header.round), upload


def _refuse_numbers(what: str, received: PyTree) -> None:
    """RefusedError for numbers that are not finite or above `rounds.largest` of their dtype."""
    for leaf in map(np.asarray, jax.tree.leaves(received)):
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            continue
        most = rounds.largest(leaf.dtype)
        wrong = ~(np.abs(leaf.astype(np.float64)) <= most)
        if wrong.any():
            raise RefusedError(
                f"{what} has {int(wrong.sum())} of {leaf.size} numbers that are not finite or too large, such as "
                f"{float(leaf[wrong][0])}; allowed: magnitudes up to {most:.3g}"
            )


def longest_upload(contract: Contract, server: Any, id: int) -> int:
    """Number of bytes of the payload that a client sends in this round, as an exact integer.

    Args:
        contract: of the run.
        server: server state at the beginning of the round; shapes and dtypes of the fields that it sends are enough.
        id: the client's number.

    Returns:
        The number of bytes; for a compressor without `length`, an upper bound.
    """
    exchange, like = halves(contract), received_fields(halves(contract), server)
    if exchange.upload is not None:
        return int(exchange.upload.bits(server, id)) // 8
    if exchange.compressor is None:
        return rounds.dense_bits(like) // 8
    return payload_bytes(exchange.compressor, key_round(contract, int(server.round)), like, id, contract.n)


def _open(contract: Contract, run: int, server: Any, id: int, upload: bytes) -> tuple[PyTree, float, int]:
    """The value, the loss and the number of payload bytes of an upload.  ValueError if it is not valid."""
    exchange, round = halves(contract), int(server.round)
    like, key = received_fields(exchange, server), key_round(contract, round)
    header, payload = unseal(upload, kind="up", run=run, limit=longest_upload(contract, server, id))
    if (header.client, header.round) != (id, round):
        raise RefusedError(f"foreign: from client {header.client} in round {header.round}, not {id} in {round}")
    if exchange.upload is not None:
        value = exchange.upload.read(key, payload, server, id, contract.n)
    elif exchange.compressor is None:
        value = wire.decode_tree(payload, like)
    else:
        value = exchange.compressor.decode(key, payload, like, id, contract.n)
    _refuse_numbers("the message", value)
    if not (exchange.private or math.isfinite(header.loss)):
        raise RefusedError(f"the loss it reports is {header.loss}; allowed: finite")
    return value, header.loss, len(payload)


def close(
    contract: Contract, server: Any, uploads: Mapping[int, bytes], reasons: Mapping[int, str] | None = None
) -> tuple[Any, Report]:
    """Run the server's part of a round: open the uploads, reduce them, take the server step.

    A client whose upload is refused counts as absent.  If the compressor allows absence (`m_nice`), its message is 0,
    as for a client that was not drawn, and h = mean_i h_i still holds.  A robust reducer (`Exchange.reduce`) ignores
    absent clients.  In all other cases an absent client raises an `AbsentError`.

    Args:
        contract: of the run.
        server: server state at the beginning of the round.
        uploads: the sealed upload of each client that answered, by id.
        reasons: by id, why the other clients sent nothing.

    Returns:
        The next server state, and a report.  `DivergedError` if its params are not finite; `server` is then the last
        good one.
    """
    exchange, round, run = halves(contract), int(server.round), fingerprint(contract)
    asked = members(contract, round)
    absent = {i: (reasons or {}).get(i, "no answer") for i in asked if i not in uploads}
    opened: dict[int, tuple[PyTree, float, int]] = {}
    for i in asked:
        if i in uploads:
            try:
                opened[i] = _open(contract, run, server, i, uploads[i])
            except ValueError as error:
                absent[i] = str(error)
    robust = exchange.reduce is not None
    if absent and not (opened and (robust or (exchange.compressor and exchange.compressor.absence))):
        who = "; ".join(f"client {i}: {why}" for i, why in sorted(absent.items()))
        name = exchange.compressor.name if exchange.compressor else "an uncompressed message"
        raise AbsentError(f"round {round}: {who}.  {name} has no theory for an absent client; compressors.m_nice has")
    nothing = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), received_fields(exchange, server))
    counted = [i for i in asked if i in opened] if robust else asked
    values = [opened[i][0] if i in opened else nothing for i in counted]
    stacked = jax.tree.map(lambda *leaves: jnp.stack([jnp.asarray(leaf) for leaf in leaves]), *values)
    step = _programs(exchange, contract.n, contract.batch_fn)[2]
    down = sum(download_bits(exchange, server, i) for i in asked) / contract.n
    after = step(keys_of(contract)[0], contract.hparams, server, jnp.asarray(counted, jnp.int32), stacked)
    if not checks.finite_tree(after.params):
        raise DivergedError(f"the server's params are not finite after round {round} with {contract.hparams}")
    return after, Report(
        loss=float(np.mean([loss for _, loss, _ in opened.values()])),
        bits_up=8 * sum(size for _, _, size in opened.values()) / contract.n,
        bits_down=down,
        header_bytes=HEADER_BYTES * (len(asked) + len(opened)),
        absent=absent,
    )
