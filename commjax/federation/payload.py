"""The payloads of downloads and uploads: encoders, decoders and the numbers that are refused."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from commjax.compressors import wire
from commjax.compressors.vectors import payload_bytes
from commjax.core import rounds
from commjax.core.base import Exchange, Key
from commjax.federation.contract import Contract, exchange_of, key_round, received_fields
from commjax.federation.envelope import RefusedError


def write_downloads(exchange: Exchange, key: Key, server: Any, ids: list[int], n: int) -> list[bytes]:
    """Encode what the clients receive.

    Args:
        exchange: client step and server step of the method.
        key: key of the round.
        server: server state at the beginning of the round.
        ids: the clients.
        n: number of clients.

    Returns:
        One payload for each of `ids`.
    """
    if exchange.download is None:
        return [wire.encode_tree(received_fields(exchange, server))] * len(ids)
    return exchange.download.write(key, server, ids, n)


def read_download(exchange: Exchange, key: Key, payload: bytes, like: Any, id: int, n: int) -> PyTree:
    """Decode what a client receives.

    Args:
        exchange: client step and server step of the method.
        key: key of the round.
        payload: one of `write_downloads`.
        like: a server state with the shapes and dtypes of the one that was sent.
        id: the client's number.
        n: number of clients.

    Returns:
        The fields `exchange.down`: one field itself, several as a tuple.  Raises a RefusedError if the payload is not
        valid.
    """
    try:
        if exchange.download is None:
            return wire.decode_tree(payload, received_fields(exchange, like))
        return exchange.download.read(key, payload, like, id, n)
    except ValueError as error:
        raise RefusedError(f"malformed: {error}") from error


def write_upload(exchange: Exchange, key: Key, x: PyTree, id: int, n: int) -> bytes:
    """Encode what a client sends.

    Args:
        exchange: client step and server step of the method.
        key: key of the round.
        x: what the client gave to `Round.send`.
        id: the client's number.
        n: number of clients.

    Returns:
        The payload.
    """
    if exchange.upload is not None:
        return exchange.upload.write(key, x, id, n)
    if exchange.compressor is None:
        return wire.encode_tree(x)
    return exchange.compressor.encode(key, x, id, n)


def read_upload(exchange: Exchange, key: Key, payload: bytes, server: Any, id: int, n: int) -> PyTree:
    """Decode what a client has sent.

    Args:
        exchange: client step and server step of the method.
        key: key of the round.
        payload: the result of `write_upload`.
        server: server state at the beginning of the round.
        id: the client's number.
        n: number of clients.

    Returns:
        The value of the message.  Raises a ValueError if the payload is not valid.
    """
    if exchange.upload is not None:
        return exchange.upload.read(key, payload, server, id, n)
    like = received_fields(exchange, server)
    if exchange.compressor is None:
        return wire.decode_tree(payload, like)
    return exchange.compressor.decode(key, payload, like, id, n)


def longest_upload(contract: Contract, server: Any, id: int) -> int:
    """Return the number of bytes of the payload that a client sends in this round.

    Args:
        contract: the contract of the run.
        server: server state at the beginning of the round; shapes and dtypes of the fields that it sends are enough.
        id: the client's number.

    Returns:
        The number of bytes, exact; for a compressor without `length`, an upper bound.
    """
    exchange = exchange_of(contract)
    like = received_fields(exchange, server)
    if exchange.upload is not None:
        return int(exchange.upload.bits(server, id)) // 8
    if exchange.compressor is None:
        return rounds.dense_bits(like) // 8
    return payload_bytes(exchange.compressor, key_round(contract, int(server.round)), like, id, contract.n)


def refuse_numbers(what: str, received: PyTree) -> None:
    """Raise a RefusedError for numbers that are not finite or above `rounds.largest` of their dtype."""
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
