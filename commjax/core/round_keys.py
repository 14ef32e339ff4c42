"""The keys of a round, and what a client knows about the round."""

from functools import partial
from typing import NamedTuple

import jax
from jaxtyping import Array, Int, PyTree

from commjax.core.base import ClientId, Exchange, Key, Message, Round
from commjax.core.communication import bits_of


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


def message_of(exchange: Exchange, key: Key, x: PyTree, id: ClientId, n: int) -> Message:
    """Compress x as client `id` does in a round.

    Args:
        exchange: client step and server step of the method, with its compressor.
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


def round_of(exchange: Exchange, shared: Key, id: ClientId, n: int, *, run: Key, secret: Key | None = None) -> Round:
    """Return what a client knows about the current round.

    Args:
        exchange: client step and server step of the method, with its compressor.
        shared: key of the round, `RoundKeys.shared`.
        id: the client's number.
        n: number of clients.
        run: key of the run.
        secret: key that only this client knows; None if the method is not private.

    Returns:
        The round.  Its `send` compresses (`message_of`).
    """
    return Round(shared, id, n, partial(message_of, exchange, shared, id=id, n=n), secret, run)
