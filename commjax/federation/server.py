"""The server's part of a round as bytes: `downloads` opens the round, `close` reduces the uploads."""

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int, PyTree

from commjax.core import checks, rounds
from commjax.core.base import Exchange, Key
from commjax.core.runner import DivergedError
from commjax.federation.contract import (
    Contract,
    download_bits,
    exchange_of,
    fingerprint,
    key_round,
    keys_of,
    members,
    received_fields,
)
from commjax.federation.envelope import HEADER_BYTES, Header, RefusedError, seal, unseal
from commjax.federation.payload import longest_upload, read_upload, refuse_numbers, write_downloads


class AbsentError(RuntimeError):
    """A client did not answer, and the method does not allow absent clients."""


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


def downloads(contract: Contract, server: Any, counted: Mapping[int, int]) -> dict[int, bytes]:
    """Make the downloads of a round.

    Args:
        contract: the contract of the run.
        server: server state at the beginning of the round.
        counted: by id, the last round in which an upload of this client was counted; clients without one may be
            missing.

    Returns:
        The sealed download of each client that takes part, by id.
    """
    exchange, round, run = exchange_of(contract), int(server.round), fingerprint(contract)
    asked = members(contract, round)
    payloads = write_downloads(exchange, key_round(contract, round), server, asked, contract.n)
    for i, payload in zip(asked, payloads, strict=True):
        if 8 * len(payload) != (bits := download_bits(exchange, server, i)):
            raise ValueError(f"the download to client {i} has {8 * len(payload)} bits, but the ledger says {bits:g}")
    headers = {i: Header("down", run, round, i, counted.get(i, -1)) for i in asked}
    return {i: seal(headers[i], payload) for i, payload in zip(asked, payloads)}


class Upload(NamedTuple):
    """An upload that the server has opened.

    Attributes:
        value: the message.
        loss: the client's loss; nan for a private method.
        size: number of bytes of the payload.
    """

    value: PyTree
    loss: float
    size: int


def _open(contract: Contract, run: int, server: Any, id: int, upload: bytes) -> Upload:
    """Open an upload.  Raises a ValueError if it is not valid."""
    exchange, round = exchange_of(contract), int(server.round)
    header, payload = unseal(upload, kind="up", run=run, limit=longest_upload(contract, server, id))
    if (header.client, header.round) != (id, round):
        raise RefusedError(
            f"of another client or round: from client {header.client} in round {header.round}, not {id} in {round}"
        )
    value = read_upload(exchange, key_round(contract, round), payload, server, id, contract.n)
    refuse_numbers("the message", value)
    if not (exchange.private or math.isfinite(header.loss)):
        raise RefusedError(f"the loss it reports is {header.loss}; allowed: finite")
    return Upload(value, header.loss, len(payload))


def _open_all(
    contract: Contract, server: Any, uploads: Mapping[int, bytes]
) -> tuple[dict[int, Upload], dict[int, str]]:
    """Open the uploads.  Returns the valid ones, and the reason why each other one is refused, both by id."""
    run, opened, refused = fingerprint(contract), dict[int, Upload](), dict[int, str]()
    for i, upload in uploads.items():
        try:
            opened[i] = _open(contract, run, server, i, upload)
        except ValueError as error:
            refused[i] = str(error)
    return opened, refused


@cache
def _program(exchange: Exchange) -> Callable[..., Any]:
    """The compiled server step."""

    @jax.jit
    def step(key: Key, hparams: Any, server: Any, ids: Int[Array, "m"], values: PyTree) -> Any:
        if exchange.joined is not None:
            return rounds.next_round(server, exchange.joined(key, hparams, server, ids, values))
        return rounds.server_round(exchange, hparams, server, values, jnp.zeros(len(ids)))[0]

    return step


def close(
    contract: Contract, server: Any, uploads: Mapping[int, bytes], reasons: Mapping[int, str] | None = None
) -> tuple[Any, Report]:
    """Run the server's part of a round: open the uploads, reduce them, take the server step.

    A client whose upload is refused counts as absent.  If the compressor allows absence (`m_nice`), its message is 0,
    as for a client that was not drawn, and h = mean_i h_i still holds.  A robust reducer (`Exchange.reduce`) ignores
    absent clients.  In all other cases an absent client raises an `AbsentError`.

    Args:
        contract: the contract of the run.
        server: server state at the beginning of the round.
        uploads: the sealed upload of each client that answered, by id.
        reasons: by id, why the other clients sent nothing.

    Returns:
        The next server state, and a report.  Raises a `DivergedError` if the new params are not finite; the given
        `server` is then the last good state.
    """
    exchange, round = exchange_of(contract), int(server.round)
    asked = members(contract, round)
    opened, absent = _open_all(contract, server, {i: uploads[i] for i in asked if i in uploads})
    absent |= {i: (reasons or {}).get(i, "no answer") for i in asked if i not in uploads}
    robust = exchange.reduce is not None
    if absent and not (opened and (robust or (exchange.compressor and exchange.compressor.absence))):
        who = "; ".join(f"client {i}: {why}" for i, why in sorted(absent.items()))
        name = exchange.compressor.name if exchange.compressor else "an uncompressed message"
        raise AbsentError(f"round {round}: {who}.  {name} has no theory for an absent client; compressors.m_nice has")
    nothing = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), received_fields(exchange, server))
    counted = [i for i in asked if i in opened] if robust else asked
    values = [opened[i].value if i in opened else nothing for i in counted]
    stacked = jax.tree.map(lambda *leaves: jnp.stack([jnp.asarray(leaf) for leaf in leaves]), *values)
    down = sum(download_bits(exchange, server, i) for i in asked) / contract.n
    ids = jnp.asarray(counted, jnp.int32)
    after = _program(exchange)(keys_of(contract)[0], contract.hparams, server, ids, stacked)
    if not checks.finite_tree(after.params):
        raise DivergedError(f"the server's params are not finite after round {round} with {contract.hparams}")
    return after, Report(
        loss=float(np.mean([upload.loss for upload in opened.values()])),
        bits_up=8 * sum(upload.size for upload in opened.values()) / contract.n,
        bits_down=down,
        header_bytes=HEADER_BYTES * (len(asked) + len(opened)),
        absent=absent,
    )
