"""Compressors that coordinate the clients: all clients draw one common event from the key of the round."""

import itertools
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, PyTree

from commjax.compressors import wire
from commjax.compressors.exact_laws import Law
from commjax.compressors.random_sets import LARGE, permutation
from commjax.compressors.sparse import identity
from commjax.compressors.vectors import check_count, from_value, on_vectors, payload_bytes, value_bits
from commjax.core import tree
from commjax.core.base import ClientId, Compressor, Constants, Key, Message


@partial(jax.jit, static_argnames=("n", "m"))
def _takes_part(key: Key, id: ClientId, n: int, m: int) -> tuple[Bool[Array, ""], Key]:
    """Return whether this client takes part, and a key for C.

    The key for C differs from the key of the draw, because C may draw from its key in the same way.
    """
    key_event, key = jax.random.split(key)
    return jax.random.permutation(key_event, n)[id] < m, key


@partial(jax.jit, static_argnames=("d", "n"))
def _owned(key: Key, d: int, id: ClientId, n: int) -> Bool[Array, "d"]:
    """Return the mask of the coordinates that a client of `perm_k` owns."""
    key_coordinates, key_clients = jax.random.split(key)
    seat = jax.random.permutation(key_clients, jnp.arange(n, dtype=jnp.int32))[id]
    many = jnp.arange(d, dtype=jnp.int32)
    place = permutation(key_coordinates, d, d) if d >= LARGE else jax.random.permutation(key_coordinates, many)
    return _block(place, d, n) == seat if d >= n else place == _block(seat, n, d)


def _nice_constants(inner: Constants, m: int, n: int) -> Constants:
    """Return the constants of `m_nice` from those of the compressor of the clients that send."""
    eta, omega, omega_ran = inner
    spread = 0.0 if n == 1 else (n - m) / (m * (n - 1))
    return Constants(eta, n / m * omega + (n / m - 1) * (1 + eta) ** 2, n / m * omega_ran + spread * (1 + eta) ** 2)


def _nice_law(probability: np.ndarray, values: np.ndarray, m: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the outcomes of `m_nice` from those of the compressor of the clients that send, [outcomes, n, d]."""
    n = values.shape[1]
    drawn = np.array([[i in chosen for i in range(n)] for chosen in itertools.combinations(range(n), m)])
    joint = np.where(drawn[:, None, :, None], n / m * values[None], 0.0).reshape(-1, *values.shape[1:])
    return np.tile(probability, len(drawn)) / len(drawn), joint


def m_nice(m: int, compressor: Compressor | None = None) -> Compressor:
    """Partial participation: m of n clients, drawn uniformly, send C(x); the receiver scales it by n/m.

        C_i(x) = (n/m) C(x)  if client i is drawn,  else 0 (nothing is sent)

    With C the identity, omega = (n-m)/m and omega_ran = (n-m)/(m(n-1)), which is attained where sum_i x_i = 0.
    With C in C(eta, omega_C), independent over clients, the law of total variance gives

        omega     = (n/m) omega_C + (n/m - 1) (1+eta)^2
        omega_ran = (n/m) omega_ran_C + (n-m)/(m(n-1)) (1+eta)^2

    Thesis: Sec. 2.2.2.

    Args:
        m: number of clients that send in each round, 1 <= m <= n.
        compressor: C, the compressor of the clients that send.  None means the identity.

    Returns:
        A compressor in C(eta, omega).  Its `encode` returns no bytes for a client that is not drawn.

    >>> m_nice(3).constants(7, n=5)
    Constants(eta=0.0, omega=0.6666666666666667, omega_ran=0.16666666666666666)
    """
    check_count("m_nice", "m", m)
    inner = identity() if compressor is None else compressor

    def check(n: int) -> None:
        if m > n:
            raise ValueError(f"m_nice: m must be at most the number of clients n = {n}, got {m}")

    def draw(key: Key, id: ClientId, n: int) -> tuple[Array, Key]:
        check(n)
        return _takes_part(key, id, n, m)

    def compress(key: Key, x: PyTree, id: ClientId = 0, n: int = 1) -> Message:
        takes_part, key = draw(key, id, n)
        value, bits = inner.compress(key, x, id, n)
        value = tree.times(n / m, tree.once(value))  # rounded after each factor, as in `scaled`
        sent = tree.once(jax.tree.map(lambda leaf: jnp.where(takes_part, leaf, jnp.zeros_like(leaf)), value))
        return Message(sent, jnp.where(takes_part, bits, jnp.zeros_like(bits)))

    def constants(d: Any, n: int = 1) -> Constants:
        check(n)
        return _nice_constants(inner.constants(d, n), m, n)

    def encode(key: Key, x: PyTree, id: ClientId = 0, n: int = 1) -> bytes:
        takes_part, key = draw(key, id, n)
        return inner.encode(key, x, id, n) if takes_part else b""

    def decode(key: Key, data: bytes, like: PyTree, id: ClientId = 0, n: int = 1) -> PyTree:
        takes_part, key = draw(key, id, n)
        if not takes_part:
            if data:
                raise ValueError(f"m_nice: client {id} does not take part in this round, got {len(data)} bytes")
            return jax.tree.map(jnp.zeros_like, like)
        return tree.times(n / m, jax.tree.map(jnp.asarray, inner.decode(key, data, like, id, n)))

    def length(key: Key, like: PyTree, id: ClientId = 0, n: int = 1) -> int:
        takes_part, key = draw(key, id, n)
        return payload_bytes(inner, key, like, id, n) if takes_part else 0

    def outcomes(xs: np.ndarray) -> Law:
        assert inner.outcomes is not None
        return _nice_law(*inner.outcomes(xs), m)

    def kept(d: Any, n: int = 1) -> float:
        return m / n * inner.kept(d, n)

    name = f"{m}-nice" + ("" if compressor is None else f"({inner.name})")
    return Compressor(
        name,
        compress,
        constants,
        encode,
        decode,
        kept,
        inner.outcomes and outcomes,
        absence=True,
        length=length,
    )


def _block(i: Array, items: int, blocks: int) -> Array:
    """Return the block of item i when items are cut into consecutive blocks whose sizes differ by at most one.

    The larger blocks come first.  (`i * blocks // items` would overflow int32 for a large model and many clients.)
    """
    size, larger = divmod(items, blocks)
    return jnp.maximum(i // (size + 1), (i - larger) // size)


def perm_k() -> Compressor:
    """Perm-K (Szlendak et al., 2022): a random permutation divides the coordinates among the clients.

        C_i(x)_j = min(d, n) x_j  if client i owns coordinate j,  else 0

    d >= n: every coordinate has one owner, and a client owns about d/n coordinates.
    d <  n: every client owns one coordinate, and a coordinate has about n/d owners.
    Where one number does not divide the other, block sizes differ by one.  The owners of the blocks are drawn as well,
    so every client owns every coordinate equally often, and the compressor is unbiased.  No position is sent: the
    receiver draws the same permutation from the shared key.

    Returns:
        An unbiased compressor.  For d >= n > 1, omega = n - 1 and omega_ran = 1.  For d < n, omega = d - 1 and
        omega_ran = (d^2/n) (1/d - E s(s-1) / (n(n-1))), where s is the number of owners of a coordinate.  Both values
        of omega_ran are attained where sum_i x_i = 0.

    >>> perm_k().constants(8, n=4)
    Constants(eta=0.0, omega=3.0, omega_ran=1.0)
    """

    def factor(d: int, n: int) -> int:
        return min(d, n)

    def compress(key: Key, x: Array, id: ClientId, n: int) -> Array:
        owned = jnp.where(_owned(key, x.size, id, n), x, jnp.zeros((), x.dtype))
        return tree.once(tree.times(factor(x.size, n), owned))

    def bits(key: Key, d: int, dtype: Any, id: ClientId, n: int) -> int | Array:
        if d % n == 0 or d < n:
            return max(1, d // n) * value_bits(dtype)
        # In floats, because the count times 32 may overflow int32.
        return jnp.sum(_owned(key, d, id, n)).astype(jnp.zeros(()).dtype) * value_bits(dtype)

    def unpack(key: Key, data: bytes, d: int, dtype: Any, id: ClientId, n: int) -> np.ndarray | Array:
        mask = np.asarray(_owned(key, d, id, n))
        value = np.zeros(d, dtype)
        value[mask] = wire.decode_values(data, int(mask.sum()), dtype)
        return value

    def constants(d: int, n: int) -> Constants:
        if n == 1:
            return Constants(0.0, 0.0, 0.0)
        if d >= n:
            return Constants(0.0, n - 1.0, 1.0)
        small, many = n // d, n % d  # `many` coordinates have small + 1 owners
        pairs = ((d - many) * small * (small - 1) + many * (small + 1) * small) / d
        return Constants(0.0, d - 1.0, d * d / n * (1 / d - pairs / (n * (n - 1))))

    def outcomes(xs: np.ndarray) -> Law:
        n, d = xs.shape
        block = np.asarray(_block(jnp.arange(max(d, n)), max(d, n), min(d, n)))
        value = []
        for place in itertools.permutations(range(d)):
            for seat in itertools.permutations(range(n)):
                place_, seat_ = np.array(place), np.array(seat)[:, None]
                mine = block[place_] == seat_ if d >= n else place_ == block[seat_]
                value.append(np.where(mine, factor(d, n) * xs, 0.0))
        return np.full(len(value), 1 / len(value)), np.array(value)

    def length(key: Key, like: PyTree, id: ClientId = 0, n: int = 1) -> int:
        d, dtypes = tree.size(like), [leaf.dtype for leaf in jax.tree.leaves(like)]
        owned = max(1, d // n) if d % n == 0 or d < n else int(jnp.sum(_owned(key, d, id, n)))
        return owned * (dtypes[0] if len(dtypes) == 1 else jnp.result_type(*dtypes)).itemsize

    compressor = on_vectors(
        "perm-k",
        compress=compress,
        bits=bits,
        pack=from_value(
            compress,
            lambda key, value, id, n: wire.encode_values(value[np.asarray(_owned(key, len(value), id, n))]),
        ),
        unpack=unpack,
        constants=constants,
        kept=lambda d, n: max(1.0, d / n),
        outcomes=outcomes,
    )
    return compressor._replace(length=length)
