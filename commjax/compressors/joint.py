"""Compressors of all clients together, made from one event that all of them draw from the round's key."""

import itertools
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from commjax.compressors import wire
from commjax.compressors.sparse import identity
from commjax.compressors.vectors import check_count, from_value, on_vectors, payload_bytes, value_bits
from commjax.core import tree
from commjax.core.base import ClientId, Compressor, Constants, Key, Message


@partial(jax.jit, static_argnames=("n", "m"))
def _takes_part(key: Key, id: ClientId, n: int, m: int) -> tuple[Bool[Array, ""], Key]:
    """Does this client take part, and the key of C: not the same one, for C may draw from it as we do."""
    key_event, key = jax.random.split(key)
    return jax.random.permutation(key_event, n)[id] < m, key


@partial(jax.jit, static_argnames=("d", "n"))
def _owned(key: Key, d: int, id: ClientId, n: int) -> Bool[Array, "d"]:
    """The coordinates of a client of `perm_k`"""
    key_coordinates, key_clients = jax.random.split(key)
    seat = jax.random.permutation(key_clients, n)[id]
    place = jax.random.permutation(key_coordinates, d)
    return _block(place, d, n) == seat if d >= n else place == _block(seat, n, d)


def m_nice(m: int, compressor: Compressor | None = None) -> Compressor:
    """Partial participation: m of n clients, drawn uniformly, send (n/m) C(x); the others send nothing and 0 is assumed.

    Thesis: L824-L833 with C the identity: omega = (n-m)/m, omega_ran = (n-m)/(m(n-1)), attained at sum x_i = 0.
    With C in C(eta, omega_C), independent over clients, by the law of total variance
        omega = (n/m) omega_C + (n/m - 1) (1+eta)^2,   omega_ran = (n/m) omega_ran_C + (n-m)/(m(n-1)) (1+eta)^2.

    >>> m_nice(3).constants(7, n=5)
    Constants(eta=0.0, omega=0.6666666666666667, omega_ran=0.16666666666666666)
    """
    check_count("m_nice", "m", m)
    inner = identity() if compressor is None else compressor

    def check(n):
        if m > n:
            raise ValueError(f"m_nice: m must be at most the number of clients n = {n}, got {m}")

    def draw(key, id, n):
        check(n)
        return _takes_part(key, id, n, m)

    def compress(key, x, id=0, n=1):
        here, key = draw(key, id, n)
        value, bits = inner.compress(key, x, id, n)
        value = tree.times(n / m, tree.once(value))  # rounded twice, as in `scaled`
        sent = tree.once(jax.tree.map(lambda leaf: jnp.where(here, leaf, jnp.zeros_like(leaf)), value))
        return Message(sent, jnp.where(here, bits, jnp.zeros_like(bits)))

    def constants(d, n=1):
        check(n)
        eta, omega, omega_ran = inner.constants(d, n)
        spread = 0.0 if n == 1 else (n - m) / (m * (n - 1))
        return Constants(eta, n / m * omega + (n / m - 1) * (1 + eta) ** 2, n / m * omega_ran + spread * (1 + eta) ** 2)

    def encode(key, x, id=0, n=1):
        here, key = draw(key, id, n)
        return inner.encode(key, x, id, n) if here else b""

    def decode(key, data, like, id=0, n=1):
        here, key = draw(key, id, n)
        if not here:
            if data:
                raise ValueError(f"m_nice: client {id} does not take part in this round, got {len(data)} bytes")
            return jax.tree.map(jnp.zeros_like, like)
        return tree.times(n / m, jax.tree.map(jnp.asarray, inner.decode(key, data, like, id, n)))

    def length(key, like, id=0, n=1):
        here, key = draw(key, id, n)
        return payload_bytes(inner, key, like, id, n) if here else 0

    def outcomes(xs):
        n = len(xs)
        assert inner.outcomes is not None
        probability, values = inner.outcomes(xs)
        here = np.array([[i in chosen for i in range(n)] for chosen in itertools.combinations(range(n), m)])
        joint = np.where(here[:, None, :, None], n / m * values[None], 0.0).reshape(-1, *xs.shape)
        return np.tile(probability, len(here)) / len(here), joint

    name = f"{m}-nice" + ("" if compressor is None else f"({inner.name})")
    return Compressor(
        name,
        compress,
        constants,
        encode,
        decode,
        lambda d, n=1: m / n * inner.kept(d, n),
        inner.outcomes and outcomes,
        absence=True,
        length=length,
    )


def _block(i, items: int, blocks: int):
    """The block of item i when items are cut into consecutive blocks whose sizes differ by one at most, the larger first.

    (`i * blocks // items` would overflow int32 for a large model and many clients.)
    """
    size, larger = divmod(items, blocks)
    return jnp.maximum(i // (size + 1), (i - larger) // size)


def perm_k() -> Compressor:
    """Perm-K (Szlendak et al., 2022): the clients share out the coordinates by one random permutation.

    d >= n: every coordinate has one owner, blocks of d/n; the owner sends n x_j.
    d <  n: every client owns one coordinate, n/d owners each; it sends d x_j.
    Where the one does not divide the other, blocks differ by one and their owners are drawn too, so that every client owns every
    coordinate equally often, and the compressor stays unbiased.

    In U(n - 1) with omega_ran = 1 (d >= n > 1), or U(d - 1) with omega_ran = (d^2/n) (1/d - E s(s-1) / (n(n-1))), s the number
    of owners of a coordinate; both attained at sum x_i = 0.  No position is sent.

    >>> perm_k().constants(8, n=4)
    Constants(eta=0.0, omega=3.0, omega_ran=1.0)
    """

    def factor(d, n):
        return min(d, n)

    def compress(key, x, id, n):
        owned = jnp.where(_owned(key, x.size, id, n), x, jnp.zeros((), x.dtype))
        return tree.once(tree.times(factor(x.size, n), owned))

    def bits(key, d, dtype, id, n):
        if d % n == 0 or d < n:
            return max(1, d // n) * value_bits(dtype)
        # In floats: the count times 32 may overflow int32.
        return jnp.sum(_owned(key, d, id, n)).astype(jnp.zeros(()).dtype) * value_bits(dtype)

    def unpack(key, data, d, dtype, id, n):
        mask = np.asarray(_owned(key, d, id, n))
        value = np.zeros(d, dtype)
        value[mask] = wire.decode_values(data, int(mask.sum()), dtype)
        return value

    def constants(d, n):
        if n == 1:
            return Constants(0.0, 0.0, 0.0)
        if d >= n:
            return Constants(0.0, n - 1.0, 1.0)
        small, many = n // d, n % d  # `many` coordinates have small + 1 owners
        pairs = ((d - many) * small * (small - 1) + many * (small + 1) * small) / d
        return Constants(0.0, d - 1.0, d * d / n * (1 / d - pairs / (n * (n - 1))))

    def outcomes(xs):
        n, d = xs.shape
        block = np.asarray(_block(jnp.arange(max(d, n)), max(d, n), min(d, n)))
        value = []
        for place in itertools.permutations(range(d)):
            for seat in itertools.permutations(range(n)):
                place_, seat_ = np.array(place), np.array(seat)[:, None]
                mine = block[place_] == seat_ if d >= n else place_ == block[seat_]
                value.append(np.where(mine, factor(d, n) * xs, 0.0))
        return np.full(len(value), 1 / len(value)), np.array(value)

    def length(key, like, id=0, n=1):
        d, dtypes = tree.size(like), [leaf.dtype for leaf in jax.tree.leaves(like)]
        owned = max(1, d // n) if d % n == 0 or d < n else int(jnp.sum(_owned(key, d, id, n)))
        return owned * (dtypes[0] if len(dtypes) == 1 else jnp.result_type(*dtypes)).itemsize

    made = on_vectors(
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
    return made._replace(length=length)
