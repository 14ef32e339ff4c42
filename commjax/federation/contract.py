"""The contract of a federation: what server and clients agree on, and the keys, cohorts and bits that follow."""

import hashlib
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from commjax.core import checks, code, identity, rounds
from commjax.core.base import Algorithm, Exchange, Key, State
from commjax.core.runner import BatchFn, full_batch


class Contract(NamedTuple):
    """What server and clients agree on before the run begins.

    Attributes:
        algorithm: an algorithm with an `exchange`.
        hparams: hyperparameters of this algorithm.
        init: (ids) -> State.  A client calls it with its own id only, and only the server uses `State.server`.
        n: number of clients; their ids are 0 to n - 1.
        key: key of the run, as in `runner.run`.
        batch_fn: as that of `runner.run`.
        run: number of the run with this contract, 64 bits.
        rounds: largest number of rounds in which a client answers; private methods need it.
    """

    algorithm: Algorithm
    hparams: Any
    init: Callable[[Any], State]
    n: int
    key: Key
    batch_fn: BatchFn = full_batch
    run: int = 0
    rounds: int | None = None


def exchange_of(contract: Contract) -> Exchange:
    """Return the client step and the server step of the contract's algorithm, after a check of the contract.

    Args:
        contract: the contract of the run.

    Returns:
        The exchange.  Raises a ValueError or TypeError if the contract cannot be used with remote clients.
    """
    exchange = contract.algorithm.exchange
    if exchange is None:
        raise ValueError("algorithm must exchange once a round (rounds.federated); this one has no exchange")
    checks.key_of(contract.key)
    checks.hparams_of(contract.algorithm, contract.hparams, contract.n)
    if exchange.download is None:
        server = jax.eval_shape(partial(start, contract), jnp.arange(contract.n)).server
        counted, sent = float(exchange.bits_down(server)), rounds.dense_bits(received_fields(exchange, server))
        if counted != sent:
            raise ValueError(f"down={exchange.down} has {sent} bits, but the algorithm's ledger says {counted:g}")
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
    """Return the state of the server and of the given clients before the first round.

    Args:
        contract: the contract of the run.
        ids: vector of client ids.

    Returns:
        The state of the server and of these clients.
    """
    state, exchange = contract.init(ids), contract.algorithm.exchange
    return state if exchange is None or exchange.start is None else exchange.start(state)


def received_fields(exchange: Exchange, server: Any) -> PyTree:
    """Return the fields of the server state that a client receives: one field itself, several as a tuple."""
    fields = tuple(getattr(server, name) for name in exchange.down)
    return fields[0] if len(fields) == 1 else fields


def download_bits(exchange: Exchange, server: Any, id: int) -> float:
    """Return the number of bits of the download to client `id`."""
    return float(exchange.bits_down(server) if exchange.download is None else exchange.download.bits(server, id))


def keys_of(contract: Contract) -> tuple[Key, Key]:
    """Return the key of the steps and the key of the batches, which `runner.run` uses too."""
    key_step, key_batch = jax.random.split(contract.key)  # as in `runner.run`
    return key_step, key_batch


def key_round(contract: Contract, round: int) -> Key:
    """Return the key of one round, from which its steps draw."""
    return rounds.keys(keys_of(contract)[0], round, contract.n).shared


@cache
def _functions(exchange: Exchange, batch_fn: BatchFn) -> str:
    codecs = (exchange.download, exchange.upload)
    functions = (exchange.members, exchange.joined, exchange.start, exchange.commit, exchange.reduce)
    return code.of_function((exchange.client_step, exchange.server_step, batch_fn, (*codecs, *functions)))


def fingerprint(contract: Contract) -> int:
    """Hash everything that server and clients must agree on.

    Every message carries this number.  A message of another contract is refused.

    Args:
        contract: the contract of the run.

    Returns:
        A number of 64 bits.
    """
    exchange = exchange_of(contract)
    server = start(contract, jnp.arange(contract.n)).server
    name = exchange.compressor.name if exchange.compressor else "dense"
    about = identity.fingerprint(contract.key, contract.hparams, start=server)
    functions = _functions(exchange, contract.batch_fn)
    plain = (exchange.down, exchange.cohort_size, exchange.private, contract.n, contract.run, contract.rounds)
    text = repr((sorted(about.items()), name, functions, plain))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little")


def members(contract: Contract, round: int) -> list[int]:
    """Return the ids of the clients that take part in this round, in ascending order."""
    exchange, ids = exchange_of(contract), jnp.arange(contract.n)
    if exchange.members is not None:
        return sorted(int(i) for i in exchange.members(keys_of(contract)[0], round, contract.n))
    if exchange.cohort_size is None or exchange.cohort_size == contract.n:
        return list(range(contract.n))
    key = rounds.keys(keys_of(contract)[0], round, contract.n).cohort
    return np.flatnonzero(rounds.cohort_members(key, ids, contract.n, exchange.cohort_size)).tolist()
