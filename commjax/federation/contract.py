"""What the parties of a federation agree on before it begins, and what follows from that: who takes part, what it costs, who is foreign."""

import hashlib
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from commjax.core import checkpoint, checks, rounds
from commjax.core.base import Algorithm, Exchange, InitFn, Key, State
from commjax.core.runner import BatchFn, full_batch
from commjax.federation.fingerprint import digest


class Contract(NamedTuple):
    """What all parties know before the run begins, and must agree on."""

    algorithm: Algorithm  # one with an `exchange`
    hparams: Any
    init: (
        InitFn  # (ids) -> State; a client calls it with its own id only, and nobody but the server reads `State.server`
    )
    n: int  # clients, numbered from 0
    key: Key  # of the run, as in `runner.run`
    batch_fn: BatchFn = full_batch
    run: int = 0  # which run of this contract, 64 bits
    rounds: int | None = None  # that a client answers, at most; needed by private methods


def halves(contract: Contract) -> Exchange:
    """The method's exchange, or a ValueError that says why it cannot leave the simulation."""
    exchange = contract.algorithm.exchange
    if exchange is None:
        raise ValueError("algorithm must exchange once a round (clients.federated); this one has no exchange")
    checks.key_of(contract.key)
    checks.hparams_of(contract.algorithm, contract.hparams, contract.n)
    if exchange.letter is None:
        server = jax.eval_shape(partial(start, contract), jnp.arange(contract.n)).server
        priced, sent = float(exchange.bits_down(server)), rounds.dense_bits(received_fields(exchange, server))
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


def start(contract: Contract, ids: Any) -> State:
    """What the server and the clients `ids` remember before the first round."""
    state, exchange = contract.init(ids), contract.algorithm.exchange
    return state if exchange is None or exchange.start is None else exchange.start(state)


def received_fields(exchange: Exchange, server: Any) -> PyTree:
    """What of the server a client may know"""
    fields = tuple(getattr(server, name) for name in exchange.down)
    return fields[0] if len(fields) == 1 else fields


def price_down(exchange: Exchange, server: Any, id: int) -> float:
    """Bits of the letter to one client"""
    return float(exchange.bits_down(server) if exchange.letter is None else exchange.letter.bits(server, id))


def keys_of(contract: Contract) -> tuple[Key, Key]:
    """Of the steps and of the batches"""
    key_step, key_batch = jax.random.split(contract.key)  # as in `runner.run`
    return key_step, key_batch


def key_round(contract: Contract, round: int) -> Key:
    """Of the steps of one round"""
    return jax.random.fold_in(keys_of(contract)[0], round)


@cache
def _code(exchange: Exchange, batch_fn: BatchFn) -> str:
    return digest((exchange.client_step, exchange.server_step, batch_fn, exchange[7:]))


def fingerprint(contract: Contract) -> int:
    """64 bits of everything that both sides must agree on: a message of another contract is foreign."""
    exchange = halves(contract)
    server = start(contract, jnp.arange(contract.n)).server
    name = exchange.compressor.name if exchange.compressor else "dense"
    about = checkpoint.fingerprint(contract.key, contract.hparams, start=server)
    code = _code(exchange, contract.batch_fn)
    plain = (exchange.down, exchange.cohort_size, exchange.private, contract.n, contract.run, contract.rounds)
    text = repr((sorted(about.items()), name, code, plain))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def members(contract: Contract, round: int) -> list[int]:
    """Who takes part in this round."""
    exchange, ids = halves(contract), jnp.arange(contract.n)
    if exchange.members is not None:
        return sorted(int(i) for i in exchange.members(keys_of(contract)[0], round, contract.n))
    if exchange.cohort_size is None or exchange.cohort_size == contract.n:
        return list(range(contract.n))
    key = jax.random.fold_in(jax.random.fold_in(keys_of(contract)[0], round), contract.n)
    return np.flatnonzero(rounds.cohort_members(key, ids, contract.n, exchange.cohort_size)).tolist()
