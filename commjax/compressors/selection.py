"""Select coordinates without sorting: the k largest, k at random, or k at random among the k' largest.

XLA's CPU sort is the bottleneck of every selection.  Non-negative floats have the same order as their bit patterns.
Therefore the k-th largest can be built bit by bit from the highest bit, with one counting pass per bit.  The result is
exact; ties are resolved by position.

The magnitudes that a selection compares are computed once (`tree.once`).  If XLA computed an entry twice, the two
results could differ, and the mask would have too many or too few entries.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from commjax.core import tree
from commjax.core.base import ClientId, Key
from commjax.core.tree import varying_like

_INT = {1: jnp.int8, 2: jnp.int16, 4: jnp.int32, 8: jnp.int64}

# Up to this dimension and this many expected draws, testing the ranks of candidates is cheaper than a threshold.
_MAX_DIMENSION = 4096
_MAX_CANDIDATES = 16
# Largest number of candidates of one row.
_LAST = 1 << 24


def magnitude_bits(x: Shaped[Array, "d"]) -> Int[Array, "d"]:
    """Return |x| as non-negative integers of the same order, with NaN above all numbers.

    The integers are signed because CPUs compare signed integers faster.

    Args:
        x: floating-point vector [d].

    Returns:
        Signed integers [d] of the same width.
    """
    bits = jax.lax.bitcast_convert_type(x, _INT[x.dtype.itemsize])
    return bits & jnp.iinfo(bits.dtype).max


def _count(mask: Bool[Array, "d"]) -> Int[Array, ""]:
    return jnp.sum(mask, dtype=jnp.int32)


def _random_keys(key: Key, d: int) -> Int[Array, "d"]:
    return (jax.random.bits(key, (d,), jnp.uint32) >> 1).astype(jnp.int32)


def _largest(keys: Int[Array, "d"], k: int) -> Bool[Array, "d"]:
    """Return the mask of the k largest non-negative integers; among equals, the first positions win."""
    width, d = jnp.iinfo(keys.dtype).bits - 1, keys.shape[0]

    def grow(step: Array, threshold: Array) -> Array:
        higher = threshold | (jnp.ones((), keys.dtype) << (width - 1 - step).astype(keys.dtype))
        return jnp.where(_count(keys >= higher) >= k, higher, threshold)

    threshold = jax.lax.fori_loop(0, width, grow, varying_like(jnp.zeros((), keys.dtype), keys))
    above, equal = keys > threshold, keys == threshold
    wanted = k - _count(above)

    # Ties only: find, bit by bit, the smallest position p such that `wanted` of the equal entries are at or before p.
    # Under vmap the loop runs zero times if no row has a tie.
    position = jnp.arange(d, dtype=jnp.int32)
    tie = _count(equal) > wanted

    def narrow(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        step, end = carry
        middle = end | (1 << step)
        enough = _count(equal & (position < middle)) >= wanted
        return step - 1, jnp.where(enough, end, middle)

    bits = max(1, (d - 1).bit_length())
    start = varying_like((jnp.int32(bits - 1), jnp.zeros((), jnp.int32)), keys)
    _, end = jax.lax.while_loop(lambda carry: tie & (carry[0] >= 0), narrow, start)
    return above | (equal & (~tie | (position <= end)))


@partial(jax.jit, static_argnames="k")
def top_k_mask(x: Shaped[Array, "d"], k: int) -> Bool[Array, "d"]:
    """Return the mask of the k entries of largest magnitude; among equals, the first positions win.

    Args:
        x: floating-point vector [d].
        k: number of entries, 1 <= k <= d.

    Returns:
        Mask [d] in which exactly k entries are True.

    >>> top_k_mask(jnp.array([1.0, -3.0, 2.0, 3.0]), 2).tolist()
    [False, True, False, True]
    """
    return jnp.ones(x.shape, bool) if k == x.shape[0] else _largest(tree.once(magnitude_bits(x)), k)


def random_index(key: Key, shape: tuple[int, ...], d: int) -> Int[Array, "..."]:
    """Draw uniform indices 0..d-1 from one 32-bit word each; the bias is below d / 2^32.

    For d < 2^16 this is faster than `jax.random.randint`, which draws two words and divides.

    Args:
        key: random key.
        shape: shape of the result.
        d: number of values.

    Returns:
        Integers of this shape.
    """
    if d >= 1 << 16:
        return jax.random.randint(key, shape, 0, d)
    word = jax.random.bits(key, shape, jnp.uint32)
    high, low = word >> 16, word & 0xFFFF
    return ((high * d + ((low * d) >> 16)) >> 16).astype(jnp.int32)


@partial(jax.jit, static_argnames=("d", "k"))
def random_mask(key: Key, d: int, k: int) -> Bool[Array, "d"]:
    """Draw a mask of k distinct coordinates; every subset of size k is equally likely.

    Up to 32 coordinates are drawn with Floyd's algorithm.  More are the k largest of d random words (ties, of
    probability about k / 2^31, go to the first).

    Args:
        key: random key.
        d: number of coordinates.
        k: number of chosen coordinates, 1 <= k <= d.

    Returns:
        Mask [d].
    """
    if k == d:
        return jnp.ones(d, bool)
    if k > 32:
        return _largest(_random_keys(key, d), k)
    position = jnp.arange(d, dtype=jnp.int32)
    mask = jnp.zeros(d, bool)
    for draw, last in enumerate(range(d - k, d)):
        index = random_index(jax.random.fold_in(key, draw), (), last + 1)
        taken = jnp.any(mask & (position == index))
        mask = mask | (position == jnp.where(taken, last, index))
    return mask


@partial(jax.jit, static_argnames=("d", "k"))
def clients_mask(key: Key, id: ClientId, d: int, k: int) -> Bool[Array, "d"]:
    """Draw a `random_mask` with the client's key, in one program.

    Args:
        key: key of the round.
        id: number of the client, which is folded into the key.
        d: number of coordinates.
        k: number of chosen coordinates.

    Returns:
        Mask [d].
    """
    return random_mask(jax.random.fold_in(key, id), d, k)


@partial(jax.jit, static_argnames="k")
def random_of_mask(key: Key, allowed: Bool[Array, "d"], k: int) -> Bool[Array, "d"]:
    """Draw a mask of k distinct coordinates of `allowed`, uniformly: those with the k largest random words.

    Args:
        key: random key.
        allowed: mask [d] with at least k True entries.
        k: number of chosen coordinates.

    Returns:
        Mask [d].
    """
    return _largest(jnp.where(allowed, _random_keys(key, allowed.shape[0]) | 1, 0), k)


@partial(jax.jit, static_argnames=("k", "k_top"))
def k_of_top_mask(key: Key, x: Shaped[Array, "d"], k: int, k_top: int) -> Bool[Array, "d"]:
    """Draw a mask of k coordinates among the k_top largest magnitudes, uniformly without replacement.

    Args:
        key: random key.
        x: floating-point vector [d].
        k: number of chosen coordinates, 1 <= k <= k_top.
        k_top: number of largest magnitudes to choose from, at most d.

    Returns:
        Mask [d].
    """
    d = x.shape[0]
    if k == k_top:
        return top_k_mask(x, k)
    if k_top == d:
        return random_mask(key, d, k)
    if d > _MAX_DIMENSION or k * d > _MAX_CANDIDATES * k_top:
        return random_of_mask(key, top_k_mask(x, k_top), k)
    return _draw_from_top(k, k_top)(key, tree.once(magnitude_bits(x)))


@cache
def _draw_from_top(k: int, k_top: int) -> Callable[[Key, Int[Array, "d"]], Bool[Array, "d"]]:
    """Return a function (key, keys [d]) -> mask [d].

    Under vmap it handles all rows at once, with the clients on the last axis, so that the counting is vectorised.
    """

    @jax.custom_batching.custom_vmap
    def draw(key: Key, keys: Array) -> Array:
        return _draw_rows(key[None], keys[None], k, k_top)[0]

    @draw.def_vmap
    def rule(n: int, batched: Sequence[bool], key: Key, keys: Array) -> tuple[Array, bool]:
        key, keys = (a if b else jnp.repeat(a[None], n, 0) for a, b in zip((key, keys), batched))
        return _draw_rows(key, keys, k, k_top), True

    return draw


def _draw_rows(key: Key, keys: Int[Array, "n d"], k: int, k_top: int) -> Bool[Array, "n d"]:
    """Choose the first k distinct accepted candidates of a uniform stream, one stream per row.

    This needs neither a sort nor a threshold.  First, all rows get a few candidates.  Then the rows that have too few
    accepted candidates are gathered and get more.
    """
    n, d = keys.shape
    few, many = _draws(k, k_top, d, 1 / 16), _draws(k, k_top, d, 1e-4)
    room = max(1, n // 8)
    chosen, count = _accepted(key, keys, jnp.int32(0), few, None, k=k, k_top=k_top)

    def finish(carry: _Chosen) -> _Chosen:
        chosen, count = carry
        at = jnp.nonzero(count < k, size=room, fill_value=n)[0].astype(jnp.int32)
        row_keys, rows = key[jnp.minimum(at, n - 1)], keys[jnp.minimum(at, n - 1)]

        def turn(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            begin, chosen, count = carry
            after = _accepted(row_keys, rows, begin, many, _Chosen(chosen, count), k=k, k_top=k_top)
            return begin + many, after.positions, after.number

        start = jnp.int32(few), chosen[:, jnp.minimum(at, n - 1)], jnp.where(at < n, count[jnp.minimum(at, n - 1)], k)
        _, new, done = jax.lax.while_loop(lambda carry: jnp.any(carry[2] < k) & (carry[0] < _LAST), turn, start)
        # k candidates of a row can always be accepted; `_LAST` only makes sure that the loop ends.
        done = jnp.where(at < n, k, done)
        return _Chosen(chosen.at[:, at].set(new, mode="drop"), count.at[at].set(done, mode="drop"))

    chosen, _ = jax.lax.while_loop(lambda carry: jnp.any(carry[1] < k), finish, _Chosen(chosen, count))
    position = jnp.arange(d, dtype=jnp.int32)
    return jnp.any(jnp.stack([position[None] == row[:, None] for row in chosen]), axis=0)


def _draws(k: int, k_top: int, d: int, unlucky: float) -> int:
    """Return how many draws suffice: fewer than k are accepted with probability at most `unlucky`."""
    share, draws = k_top / d, k
    while sum(math.comb(draws, j) * share**j * (1 - share) ** (draws - j) for j in range(k)) > unlucky:
        draws += 1
    return draws


class _Chosen(NamedTuple):
    """The coordinates that were chosen so far.

    Attributes:
        positions: chosen positions [k, n], -1 in empty slots.
        number: number of chosen positions [n].
    """

    positions: Int[Array, "k n"]
    number: Int[Array, "n"]


def _accepted(
    key: Key,
    keys: Int[Array, "n d"],
    begin: Int[Array, ""],
    draws: int,
    before: _Chosen | None,
    *,
    k: int,
    k_top: int,
) -> _Chosen:
    """Test the next candidates and add the accepted ones to `before`.

    A candidate is one of the k_top largest if and only if fewer than k_top entries are larger.
    """
    n, d = keys.shape
    columns, order = keys.T, jnp.arange(draws, dtype=jnp.int32)
    candidate = _candidates(key, begin, draws, d)
    magnitude = jnp.take_along_axis(columns, candidate, axis=0)

    def add(j: Array, total: Array) -> Array:
        tie = (j < candidate).astype(keys.dtype)  # among equals, the first position counts as the larger
        return total + (columns[j][None] + tie > magnitude).astype(jnp.int32)

    start = varying_like(jnp.zeros((draws, n), jnp.int32), candidate, magnitude)
    accept = jax.lax.fori_loop(0, d, add, start, unroll=56) < k_top
    nothing = jnp.full((k, n), -1, jnp.int32), jnp.zeros(n, jnp.int32)
    chosen, count = varying_like(nothing, magnitude) if before is None else before
    if k > 1:  # distinct: neither accepted earlier in this call nor chosen before it
        earlier = (order[None, :] < order[:, None])[..., None]
        same = (candidate[:, None] == candidate[None]) & accept[None] & earlier
        accept &= ~jnp.any(same, axis=1) & ~jnp.any(candidate[:, None] == chosen[None], axis=1)
    place = count[None] + jnp.cumsum(accept, axis=0, dtype=jnp.int32) - accept.astype(jnp.int32)
    slots = [jnp.max(jnp.where(accept & (place == slot), candidate, -1), axis=0) for slot in range(k)]
    total = jnp.minimum(count + jnp.sum(accept, axis=0, dtype=jnp.int32), k)
    return _Chosen(jnp.maximum(chosen, jnp.stack(slots)), total)


def _candidates(key: Key, begin: Int[Array, ""], draws: int, d: int) -> Int[Array, "t n"]:
    """Return uniform indices [draws, n] below d <= 2^12, column i from key i, after the first `begin` of the stream.

    The bias is below d / 2^32.  A threefry hash per word would cost more than the rest of the selection.  Instead, the
    64 random bits of each key seed a counter that goes through the finaliser of MurmurHash3 (a bijection with full
    avalanche), twice.
    """
    seed = jax.random.key_data(key).reshape(len(key), -1)[:, -2:].T[:, None, :]
    counter = begin.astype(jnp.uint32) + jnp.arange(1, draws + 1, dtype=jnp.uint32)
    word = _mixed(_mixed(seed[0] + (counter * jnp.uint32(0x9E3779B9))[:, None]) ^ seed[1])
    high, low = word >> 16, word & 0xFFFF
    return ((high * d + ((low * d) >> 16)) >> 16).astype(jnp.int32)


def _mixed(word: Array) -> Array:
    """Apply MurmurHash3's 32-bit finaliser."""
    word = (word ^ (word >> 16)) * jnp.uint32(0x85EBCA6B)
    word = (word ^ (word >> 13)) * jnp.uint32(0xC2B2AE35)
    return word ^ (word >> 16)
