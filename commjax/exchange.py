"""A round in two places: what a client and what the server do with bytes.  No network here (see `commjax.flower`).

    server   letters(contract, server, counted)      ->  one sealed message for each client that takes part
    client   answer(contract, id, data, memory, letter)  ->  what it remembers, and its sealed reply
    server   close(contract, server, replies)        ->  the next server, and a report of what was sent

The payload up is `compressor.encode`, the payload down the raw leaves of the fields that the method names (`Exchange.down`), and
both have exactly the bits of the simulation's ledger.  Client and server add the decoded message, so that h = mean_i h_i holds bit
for bit.  A client commits a round only when the server's next letter says that its message was counted: a reply that came too late
changes nothing on either side.

Privacy.  Everybody knows the contract's key, so a method that hides data behind noise (`Exchange.private`: LDP-FedP3) must not draw it
from there.  A client draws a new secret key from the operating system for every answer and forgets it; nobody can compute the rows
and the noise of a round, not even the client later.  It answers each of `Contract.rounds` rounds once, so that a server
which asks again, or for more, learns nothing beyond `accounting.certify(noise, rate, rounds, delta)`; and it sends no loss, which is a nan.
The limits: that count is in the client's `Memory`, and is of one run; the secret has 64 bits, and JAX's generator (threefry) and
floating-point noise are good statistics, but no cryptography.
"""

import hashlib
import math
import os
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from commjax import agreement, checkpoint, clients
from commjax.base import Algorithm, Exchange, InitFn, Key, Message, Round
from commjax.compressors import wire
from commjax.compressors.envelope import HEADER_BYTES, Header, RefusedError, seal, unseal
from commjax.runner import BatchFn, full_batch


class AbsentError(RuntimeError):
    """A client did not answer, and the method's theory has no place for that."""


class Contract(NamedTuple):
    """What all parties know before the run begins, and must agree on."""

    algorithm: Algorithm  # made by `clients.federated`
    hparams: Any
    init: (
        InitFn  # (ids) -> State; a client calls it with its own id only, and nobody but the server reads `State.server`
    )
    n: int  # clients, numbered from 0
    key: Key  # of the run, as in `runner.run`
    batch_fn: BatchFn = full_batch
    run: int = 0  # which run of this contract, 64 bits
    rounds: int | None = None  # that a client answers, at most; needed by private methods


class Memory(NamedTuple):
    """What a client keeps between two rounds: its row as it was counted last, and as it will be if its reply counts."""

    row: bytes
    last: int  # the round of `row`; -1: none yet
    pending: bytes
    pending_round: int


class Report(NamedTuple):
    """One round as the server saw it.  The first three are `Metrics` of a simulation if nobody was absent."""

    loss: float  # mean over those who answered; nan of a private method
    bits_up: float  # payload of one client, mean over all n
    bits_down: float
    header_bytes: int  # of all envelopes, both ways; not in the ledger
    absent: dict[int, str]  # id -> why


def halves(contract: Contract) -> Exchange:
    """The method's exchange, or a ValueError that says why it cannot leave the simulation."""
    exchange = contract.algorithm.exchange
    if exchange is None:
        raise ValueError("algorithm must exchange once a round (clients.federated); this one has no exchange")
    server = jax.eval_shape(contract.init, jnp.arange(contract.n)).server
    priced, sent = float(exchange.bits_down(server)), clients.dense_bits(_received(exchange, server))
    if priced != sent:
        raise ValueError(f"down={exchange.down} has {sent} bits, but the algorithm's ledger says {priced:g}")
    if exchange.private and contract.rounds is None:
        raise ValueError(
            "rounds must be given with a private method: its clients answer so many, as the accountant counts"
        )
    if exchange.private and contract.batch_fn is not full_batch:
        raise ValueError(
            "batch_fn must be full_batch with a private method, which draws its rows from a secret key itself"
        )
    return exchange


def _received(exchange: Exchange, server: Any) -> PyTree:
    fields = tuple(getattr(server, name) for name in exchange.down)
    return fields[0] if len(fields) == 1 else fields


@cache
def _programs(exchange: Exchange, n: int, batch_fn: BatchFn):
    """Four compiled functions: the client before and after it sends, the server's step, the length of a message."""

    def client_side(send, keys, hparams, server, row, data):
        key_step, key_batch = (jax.random.fold_in(key, server.round) for key in keys[:2])
        batch = batch_fn(key_batch, row.id[None], jax.tree.map(lambda leaf: leaf[None], data))
        own = jax.tree.map(lambda leaf: leaf[0], batch)
        return exchange.client_step(Round(key_step, row.id, n, send, keys[2]), hparams, server, row, own)

    @jax.jit
    def before(keys, hparams, server, row, data):
        sent: list[PyTree] = []
        message = Message(None, jnp.zeros(()))

        def send(x):
            nonlocal message
            sent.append(x)
            message = clients.message_of(exchange, jax.random.fold_in(keys[0], server.round), x, row.id, n)
            return message

        _, returned, loss = client_side(send, keys, hparams, server, row, data)
        if len(sent) != 1 or returned is not message:
            raise ValueError(f"client_step must return what one round.send gave it, it called it {len(sent)} times")
        return sent[0], loss

    @jax.jit
    def after(keys, hparams, server, row, data, value):
        # The gradient is not computed again: nothing that is returned depends on it.
        return client_side(lambda x: Message(value, jnp.zeros(())), keys, hparams, server, row, data)[0]

    @jax.jit
    def step(hparams, server, values):
        return exchange.server_step(hparams, server, clients.mean(values))

    @jax.jit
    def price(key, like, id):
        return clients.message_of(exchange, key, like, id, n).bits

    return before, after, step, price


def _keys(contract: Contract) -> tuple[Key, Key]:
    key_step, key_batch = jax.random.split(contract.key)  # as in `runner.run`
    return key_step, key_batch


@cache
def _code(exchange: Exchange, batch_fn: BatchFn) -> str:
    return agreement.digest((exchange.client_step, exchange.server_step, batch_fn))


def fingerprint(contract: Contract) -> int:
    """64 bits of everything that both sides must agree on: a message of another contract is foreign."""
    exchange = halves(contract)
    server = contract.init(jnp.arange(contract.n)).server
    name = exchange.compressor.name if exchange.compressor else "dense"
    about = checkpoint.fingerprint(contract.key, contract.hparams, start=server)
    code = _code(exchange, contract.batch_fn)
    plain = (exchange.down, exchange.cohort_size, exchange.private, contract.n, contract.run, contract.rounds)
    text = repr((sorted(about.items()), name, code, plain))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def members(contract: Contract, round: int) -> list[int]:
    """Who takes part in this round."""
    exchange, ids = halves(contract), jnp.arange(contract.n)
    if exchange.cohort_size is None or exchange.cohort_size == contract.n:
        return list(range(contract.n))
    key = jax.random.fold_in(jax.random.fold_in(_keys(contract)[0], round), contract.n)
    return np.flatnonzero(clients.cohort_members(key, ids, contract.n, exchange.cohort_size)).tolist()


def letters(contract: Contract, server: Any, counted: Mapping[int, int]) -> dict[int, bytes]:
    """What the server sends in this round, by client; `counted`: the last round in which each was counted, -1 before."""
    round, run = int(server.round), fingerprint(contract)
    payload = wire.encode_tree(_received(halves(contract), server))
    return {i: seal(Header("down", run, round, i, counted.get(i, -1)), payload) for i in members(contract, round)}


def first_memory(contract: Contract, id: int) -> Memory:
    """Before a client has spoken"""
    row = jax.tree.map(lambda leaf: leaf[0], contract.init(jnp.asarray([id])).clients)
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


def _new_secret() -> Key:
    return jax.random.wrap_key_data(jnp.asarray(np.frombuffer(os.urandom(8), np.uint32)), impl="threefry2x32")


def answer(
    contract: Contract, id: int, data: PyTree, memory: Memory, letter: bytes, secret: Key | None = None
) -> tuple[Memory, bytes]:
    """A client's part of a round; `data` is its own, without a client axis.  A `RefusedError` leaves everything as it was.

    Of a private method, keep the memory before the reply leaves.  `secret`: for tests; by default one that nobody knows.
    """
    exchange, run = halves(contract), fingerprint(contract)
    start = contract.init(jnp.asarray([id]))
    like = _received(exchange, start.server)
    header, payload = unseal(letter, kind="down", run=run, limit=clients.dense_bits(like) // 8)
    if header.client != id:
        raise RefusedError(f"foreign: a letter to client {header.client}, this is client {id}")
    if exchange.private:
        secret = _new_secret() if secret is None else secret
        if not max(memory.last, memory.pending_round) < header.round < (contract.rounds or 0):
            raise RefusedError(
                f"client {id} answers each of {contract.rounds} rounds of a private method once, in order, not {header.round} "
                f"after {max(memory.last, memory.pending_round)}"
            )
    elif secret is not None:
        raise ValueError("secret: this method is not private; allowed: None")
    memory = _committed(memory, id, header.counted)
    row = jax.tree.map(jnp.asarray, wire.decode_tree(memory.row, jax.tree.map(lambda leaf: leaf[0], start.clients)))
    # What is not sent is None, so that a method cannot read it.
    received = wire.decode_tree(payload, like)
    fields = dict(zip(exchange.down, (received,) if len(exchange.down) == 1 else received))
    blank = type(start.server)(*(None for _ in start.server))
    server = blank._replace(round=jnp.asarray(header.round, start.server.round.dtype), **fields)

    before, after, _, _ = _programs(exchange, contract.n, contract.batch_fn)
    everything = ((*_keys(contract), secret), contract.hparams, server, row, data)
    x, loss = before(*everything)
    key_round = jax.random.fold_in(everything[0][0], header.round)
    if exchange.compressor is None:
        sent, value = wire.encode_tree(x), x
    else:
        sent = exchange.compressor.encode(key_round, x, id, contract.n)
        value = exchange.compressor.decode(key_round, sent, x, id, contract.n)
    pending = wire.encode_tree(after(*everything, value))
    told = math.nan if exchange.private else float(loss)
    reply = seal(Header("up", run, header.round, id, loss=told), sent)
    return memory._replace(pending=pending, pending_round=header.round), reply


def _open(contract: Contract, run: int, server: Any, id: int, reply: bytes) -> tuple[PyTree, float, int]:
    """(value, loss, payload bytes) of a reply, or a ValueError"""
    exchange, round = halves(contract), int(server.round)
    like = _received(exchange, server)
    key_round = jax.random.fold_in(_keys(contract)[0], round)
    price = _programs(exchange, contract.n, contract.batch_fn)[3]
    header, payload = unseal(reply, kind="up", run=run, limit=int(price(key_round, like, id)) // 8)
    if (header.client, header.round) != (id, round):
        raise RefusedError(f"foreign: from client {header.client} in round {header.round}, not {id} in {round}")
    if exchange.compressor is None:
        return wire.decode_tree(payload, like), header.loss, len(payload)
    return exchange.compressor.decode(key_round, payload, like, id, contract.n), header.loss, len(payload)


def close(
    contract: Contract, server: Any, replies: Mapping[int, bytes], reasons: Mapping[int, str] | None = None
) -> tuple[Any, Report]:
    """The server's part: open every reply, average, step.  `reasons`: why the others sent nothing.

    A reply that is refused counts as none.  Where absence belongs to the compressor's law (`m_nice`), 0 stands in for it, as for
    a client that was not drawn, and h = mean_i h_i still holds; elsewhere it is an `AbsentError`.
    """
    exchange, round, run = halves(contract), int(server.round), fingerprint(contract)
    asked = members(contract, round)
    absent = {i: (reasons or {}).get(i, "no answer") for i in asked if i not in replies}
    opened: dict[int, tuple[PyTree, float, int]] = {}
    for i in asked:
        if i in replies:
            try:
                opened[i] = _open(contract, run, server, i, replies[i])
            except ValueError as error:
                absent[i] = str(error)
    if absent and not (exchange.compressor and exchange.compressor.absence and opened):
        who = "; ".join(f"client {i}: {why}" for i, why in sorted(absent.items()))
        name = exchange.compressor.name if exchange.compressor else "an uncompressed message"
        raise AbsentError(f"round {round}: {who}.  {name} has no theory for an absent client; compressors.m_nice has")
    nothing = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), _received(exchange, server))
    values = [opened[i][0] if i in opened else nothing for i in asked]
    stacked = jax.tree.map(lambda *leaves: jnp.stack([jnp.asarray(leaf) for leaf in leaves]), *values)
    step = _programs(exchange, contract.n, contract.batch_fn)[2]
    down = clients.dense_bits(_received(exchange, server)) * len(asked) / contract.n
    return step(contract.hparams, server, stacked), Report(
        loss=float(np.mean([loss for _, loss, _ in opened.values()])),
        bits_up=8 * sum(size for _, _, size in opened.values()) / contract.n,
        bits_down=down,
        header_bytes=HEADER_BYTES * (len(asked) + len(opened)),
        absent=absent,
    )
