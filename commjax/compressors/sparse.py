"""Compressors that keep some coordinates: identity, top-k, rand-k, and the thesis's mixtures of top-k and rand-k."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from commjax.compressors import candidates, exact_laws, random_sets, selection, wire
from commjax.compressors.exact_laws import Law
from commjax.compressors.vectors import (
    OnVector,
    check_count,
    check_k,
    from_value,
    independent,
    on_vectors,
    value_bits,
)
from commjax.core import tree
from commjax.core.base import ClientId, Compressor, Constants, Key


def identity() -> Compressor:
    """Send every entry unchanged.

        C(x) = x

    Returns:
        A compressor in C(0, 0).

    >>> identity().constants(10)
    Constants(eta=0.0, omega=0.0, omega_ran=0.0)
    """
    return on_vectors(
        "identity",
        compress=lambda key, x, id, n: x,
        bits=lambda key, d, dtype, id, n: d * value_bits(dtype),
        pack=lambda key, x, id, n: wire.encode_values(np.asarray(x)),
        unpack=lambda key, data, d, dtype, id, n: wire.decode_values(data, d, dtype),
        constants=lambda d, n: Constants(0.0, 0.0, 0.0),
        kept=lambda d, n: d,
        outcomes=exact_laws.certain(lambda x: x),
    )


def _masked(x: Array, mask: Array, factor: float = 1.0) -> Array:
    """Return factor x where mask is True, else 0.

    The product is rounded before anything is added to it, because the rounded product is what is sent.
    """
    kept = jnp.where(mask, x, jnp.zeros((), x.dtype))
    return kept if factor == 1.0 else tree.once(tree.times(factor, kept))


def _placed(x: Array, positions: Array, factor: float) -> Array:
    """Return factor x at these distinct positions, else 0; for many coordinates this is faster than a mask."""
    sent = tree.once(tree.times(factor, x[positions]))
    return jnp.zeros_like(x).at[positions].set(sent, unique_indices=True)


def _at_unknown_positions(
    name: str,
    k: int,
    compress: OnVector,
    constants: Callable[[int, int], Constants],
    outcomes: Callable[[np.ndarray], Law],
) -> Compressor:
    """Build a compressor that sends k values and their positions, because the positions depend on the data."""

    def pack(key: Key, value: np.ndarray, id: ClientId, n: int) -> bytes:
        where = wire.support(value, k)
        return wire.encode_values(value[where]) + wire.encode_indices(where, len(value))

    def unpack(key: Key, data: bytes, d: int, dtype: Any, id: ClientId, n: int) -> np.ndarray | Array:
        cut = k * np.dtype(dtype).itemsize
        values, value = wire.decode_values(data[:cut], k, dtype), np.zeros(d, dtype)
        value[wire.decode_indices(data[cut:], d, k)] = values
        return value

    return on_vectors(
        name,
        compress=compress,
        bits=lambda key, d, dtype, id, n: wire.sparse_bits(d, k, value_bits(dtype)),
        pack=from_value(compress, pack),
        unpack=unpack,
        constants=constants,
        kept=lambda d, n: k,
        outcomes=outcomes,
    )


def top_k(k: int) -> Compressor:
    """Keep the k entries of largest magnitude unchanged; among equal magnitudes, the first positions win.

        C(x)_j = x_j  if |x_j| is one of the k largest,  else 0

    Thesis: Sec. 1.5.2.

    Args:
        k: number of kept entries, 1 <= k <= d.

    Returns:
        A compressor in C(sqrt(1 - k/d), 0).  The bound is attained where all |x_j| are equal.

    >>> top_k(1).compress(jax.random.key(0), jnp.array([1.0, -3.0])).value.tolist()
    [0.0, -3.0]
    """
    check_count("top_k", "k", k)

    def compress(key: Key, x: Array, id: ClientId, n: int) -> Array:
        check_k("top_k", k, x.size)
        return _masked(x, selection.top_k_mask(x, k))

    def constants(d: int, n: int) -> Constants:
        check_k("top_k", k, d)
        return Constants(math.sqrt(1 - k / d), 0.0, 0.0)

    law = exact_laws.certain(lambda x: np.where(exact_laws.top(x, k), x, 0))
    return _at_unknown_positions(f"top-{k}", k, compress, constants, law)


def rand_k(k: int) -> Compressor:
    """Keep k coordinates, drawn uniformly, and scale them by d/k.

        C(x)_j = (d/k) x_j  if j is in a random set of size k,  else 0

    Clients draw independently.  The positions come from the shared key and are not sent.
    Thesis: Sec. 1.5.2.

    Args:
        k: number of kept entries, 1 <= k <= d.

    Returns:
        An unbiased compressor, in C(0, d/k - 1).  The variance attains its bound for every x.

    >>> rand_k(2).constants(10, n=4)
    Constants(eta=0.0, omega=4.0, omega_ran=1.0)
    """
    check_count("rand_k", "k", k)

    def mask(key: Key, d: int, id: ClientId) -> Array:
        check_k("rand_k", k, d)
        return random_sets.clients_mask(key, id, d, k)

    def compress(key: Key, x: Array, id: ClientId, n: int) -> Array:
        check_k("rand_k", k, x.size)
        if x.size < random_sets.LARGE or 2 * k > x.size:
            return _masked(x, mask(key, x.size, id), x.size / k)
        return _placed(x, random_sets.random_positions(jax.random.fold_in(key, id), x.size, k), x.size / k)

    def pack(key: Key, value: np.ndarray, id: ClientId, n: int) -> bytes:
        return wire.encode_values(value[np.asarray(mask(key, len(value), id))])

    def unpack(key: Key, data: bytes, d: int, dtype: Any, id: ClientId, n: int) -> np.ndarray | Array:
        values, value = wire.decode_values(data, k, dtype), np.zeros(d, dtype)
        value[np.asarray(mask(key, d, id))] = values
        return value

    def constants(d: int, n: int) -> Constants:
        check_k("rand_k", k, d)
        return independent(n, 0.0, d / k - 1)

    return on_vectors(
        f"rand-{k}",
        compress=compress,
        bits=lambda key, d, dtype, id, n: k * value_bits(dtype),
        pack=from_value(compress, pack),
        unpack=unpack,
        constants=constants,
        kept=lambda d, n: k,
        outcomes=exact_laws.independent(lambda x: exact_laws.subsets(x, np.full(len(x), True), k, len(x) / k)),
    )


def comp(k: int, k_top: int) -> Compressor:
    """comp-(k, k'): apply top-k' first, then keep k of the k' entries at random.

        C(x)_j = (k'/k) x_j  if j is in a random set of size k among the k' largest magnitudes,  else 0

    comp-(k, k) is top-k.  comp-(k, d) has the law of rand-k.  The positions depend on the data and are sent.
    Thesis: Prop. A.1.2.
    Differs (docs/errata.md): E9 (the factor k'/k), E10 (1 - eta^2 - omega is only a bound), E13 (positions cost bits).

    Args:
        k: number of entries that are sent, 1 <= k <= k'.
        k_top: k', the number of largest magnitudes to draw from, at most d.

    Returns:
        A compressor in C(sqrt((d - k')/d), (k' - k)/k).

    >>> comp(1, 56).constants(112, n=1000).omega_ran
    0.055
    """
    check_count("comp", "k", k)
    check_count("comp", "k'", k_top)
    if k_top < k:
        raise ValueError(f"comp: k' must be at least k = {k}, got {k_top}")

    def compress(key: Key, x: Array, id: ClientId, n: int) -> Array:
        check_k("comp", k_top, x.size, "k'")
        key = jax.random.fold_in(key, id)
        if x.size <= candidates.MAX_DIMENSION:
            return _masked(x, candidates.k_of_top_mask(key, x, k, k_top), k_top / k)
        return _placed(x, candidates.k_of_top(key, x, k, k_top), k_top / k)

    def constants(d: int, n: int) -> Constants:
        check_k("comp", k_top, d, "k'")
        return independent(n, math.sqrt((d - k_top) / d), (k_top - k) / k)

    law = exact_laws.independent(lambda x: exact_laws.subsets(x, exact_laws.top(x, k_top), k, k_top / k))
    return _at_unknown_positions(f"comp-({k},{k_top})", k, compress, constants, law)


def mix(k: int, k_rand: int) -> Compressor:
    """mix-(k, k'): keep the k largest magnitudes and k' of the other entries at random, all unchanged.

        C(x)_j = x_j  if j is among the k largest or in a random set of size k' of the others,  else 0

    Only the positions of the k largest entries are sent; the receiver draws the others from the shared key.
    Thesis: Prop. A.1.1.
    Differs (docs/errata.md): E9 (k + k' = d is the identity).

    Args:
        k: number of largest magnitudes to keep, at least 1.
        k_rand: k', the number of other entries to keep, at least 1; k + k' <= d.

    Returns:
        A compressor in C((d-k-k')/sqrt((d-k)d), k'(d-k-k')/((d-k)d)).

    >>> mix(1, 1).constants(10)
    Constants(eta=0.8432740427115678, omega=0.08888888888888889, omega_ran=0.08888888888888889)
    """
    check_count("mix", "k", k)
    check_count("mix", "k'", k_rand)

    def check(d: int) -> None:
        if k + k_rand > d:
            raise ValueError(f"mix: k + k' must be at most the dimension d = {d}, got {k} + {k_rand}")

    @jax.jit
    def random_part(key: Key, top: Array, id: ClientId) -> Array:
        return random_sets.random_of_mask(jax.random.fold_in(key, id), ~top, top.size - k, k_rand)

    def compress(key: Key, x: Array, id: ClientId, n: int) -> Array:
        check(x.size)
        top = selection.top_k_mask(x, k)
        return _masked(x, top | random_part(key, top, id))

    def constants(d: int, n: int) -> Constants:
        check(d)
        if k + k_rand == d:
            return Constants(0.0, 0.0, 0.0)
        rest = d - k - k_rand
        return independent(n, rest / math.sqrt((d - k) * d), k_rand * rest / ((d - k) * d))

    def pack(key: Key, value: np.ndarray, id: ClientId, n: int) -> bytes:
        # The k largest of the message are the k largest of the vector.
        top = np.asarray(selection.top_k_mask(jnp.asarray(value), k))
        others = np.asarray(random_part(key, jnp.asarray(top), id))
        return (
            wire.encode_values(value[top])
            + wire.encode_values(value[others])
            + wire.encode_indices(np.flatnonzero(top), len(value))
        )

    def unpack(key: Key, data: bytes, d: int, dtype: Any, id: ClientId, n: int) -> np.ndarray | Array:
        size = np.dtype(dtype).itemsize
        values = wire.decode_values(data[: (k + k_rand) * size], k + k_rand, dtype)
        top = np.zeros(d, bool)
        top[wire.decode_indices(data[(k + k_rand) * size :], d, k)] = True
        value = np.zeros(d, dtype)
        value[top] = values[:k]
        value[np.asarray(random_part(key, jnp.asarray(top), id))] = values[k:]
        return value

    def law(x: np.ndarray) -> Law:
        top = exact_laws.top(x, k)
        probability, value = exact_laws.subsets(x, ~top, k_rand)
        return probability, np.where(top, x, value)

    return on_vectors(
        f"mix-({k},{k_rand})",
        compress=compress,
        bits=lambda key, d, dtype, id, n: k_rand * value_bits(dtype) + wire.sparse_bits(d, k, value_bits(dtype)),
        pack=from_value(compress, pack),
        unpack=unpack,
        constants=constants,
        kept=lambda d, n: k + k_rand,
        outcomes=exact_laws.independent(law),
    )
