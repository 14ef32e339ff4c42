"""Random sets of k coordinates: every set of size k is equally likely."""

import math
from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int

from commjax.compressors.selection import largest, ranked
from commjax.core import random_words
from commjax.core.base import ClientId, Key
from commjax.core.tree import varying_like

# From this dimension on, a set is drawn by a keyed permutation, at the price of k.
LARGE = 1024
# Three rounds are not enough for 64 places, as four million keys show; four are.  More places need fewer rounds.
_ROUNDS = 4


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
    return scaled(random_words.bits(key, shape, jnp.uint32), d).astype(jnp.int32)


def at_positions(d: int, positions: Int[Array, "k"]) -> Bool[Array, "d"]:
    """Return the mask of these positions, which must be distinct."""
    return jnp.zeros(d, bool).at[positions].set(True, unique_indices=True)


def mixed(word: Array) -> Array:
    """Apply MurmurHash3's 32-bit finaliser, a bijection."""
    word = (word ^ (word >> 16)) * jnp.uint32(0x85EBCA6B)
    word = (word ^ (word >> 13)) * jnp.uint32(0xC2B2AE35)
    return word ^ (word >> 16)


def scaled(word: Array, m: int) -> Array:
    """floor(m word / 2^32), uniform on 0..m-1 for a uniform word up to m / 2^32, for m <= 2^16."""
    high, low = word >> 16, word & 0xFFFF
    return (high * m + ((low * m) >> 16)) >> 16


@partial(jax.jit, static_argnames=("d", "k"))
def random_positions(key: Key, d: int, k: int) -> Int[Array, "k"]:
    """Draw k distinct coordinates, at the price of k in large dimensions; every subset of size k is equally likely.

    Args:
        key: random key.
        d: number of coordinates, below 2^31.
        k: number of chosen coordinates, 1 <= k <= d.

    Returns:
        Positions [k], in no particular order.
    """
    if d >= LARGE:
        return permutation(key, d, k)
    return ranked(random_mask(key, d, k), jnp.arange(k, dtype=jnp.int32))


@partial(jax.jit, static_argnames=("d", "k"))
def permutation(key: Key, d: int, k: int) -> Int[Array, "k"]:
    """Return the images of 0..k-1 under a random permutation of 0..d-1, at the price of k.

    A Feistel network permutes the pairs (l, r) of an a x b rectangle with at least d places, a and b near sqrt(d):

        l <- (l + F(r)) mod a,   r <- (r + G(l)) mod b        `_ROUNDS` times, F and G keyed by random words

    A place outside 0..d-1 is permuted again, until it lies inside.

    Args:
        key: random key.
        d: number of coordinates, below 2^31.
        k: number of images, 1 <= k <= d.

    Returns:
        Distinct positions [k].
    """
    if d >= 2**31:
        raise ValueError(f"d={d}; allowed: fewer than 2^31 coordinates")
    side = math.isqrt(d - 1) + 1
    a = min(range(max(side // 2 + 1, -(-d >> 16)), side + 1), key=lambda a: (-d % a, -a))  # few places are outside
    sides = a, -(-d // a)
    words = random_words.bits(key, (_ROUNDS, 2, 2), jnp.uint32)

    def permuted(place: Array) -> Array:
        pair = [place // sides[1], place % sides[1]]
        for number in range(_ROUNDS):
            for side in (0, 1):
                word = mixed(mixed(pair[1 - side] + words[number, side, 0]) ^ words[number, side, 1])
                moved = pair[side] + scaled(word, sides[side])
                pair[side] = jnp.where(moved >= sides[side], moved - sides[side], moved)
        return pair[0] * sides[1] + pair[1]

    def inside(place: Array) -> Array:
        return jnp.where(place >= d, permuted(place), place)

    first = permuted(varying_like(jnp.arange(k, dtype=jnp.uint32), words))
    return jax.lax.while_loop(lambda place: jnp.any(place >= d), inside, first).astype(jnp.int32)


@partial(jax.jit, static_argnames=("d", "k"))
def random_mask(key: Key, d: int, k: int) -> Bool[Array, "d"]:
    """Draw a mask of k distinct coordinates; every subset of size k is equally likely.

    Up to 32 coordinates are drawn with Floyd's algorithm.  More are the k largest of d random words (ties, of
    probability about k / 2^31, go to the first) or, in large dimensions, images of a `permutation`.

    Args:
        key: random key.
        d: number of coordinates.
        k: number of chosen coordinates, 1 <= k <= d.

    Returns:
        Mask [d].
    """
    if k == d:
        return jnp.ones(d, bool)
    if d >= LARGE:
        return at_positions(d, permutation(key, d, k)) if 2 * k <= d else ~at_positions(d, permutation(key, d, d - k))
    if k > 32:
        return largest(_random_keys(key, d), k)
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


def _random_keys(key: Key, d: int) -> Int[Array, "d"]:
    return (random_words.bits(key, (d,), jnp.uint32) >> 1).astype(jnp.int32)


@partial(jax.jit, static_argnames=("size", "k"))
def random_of_mask(key: Key, allowed: Bool[Array, "d"], size: int, k: int) -> Bool[Array, "d"]:
    """Draw a mask of k distinct coordinates of `allowed`; every subset of size k is equally likely.

    In small dimensions they are those with the k largest random words, in large ones they are drawn by their number.

    Args:
        key: random key.
        allowed: mask [d].
        size: number of True entries of `allowed`.
        k: number of chosen coordinates, 1 <= k <= size.

    Returns:
        Mask [d].
    """
    d = len(allowed)
    if d < LARGE:
        return largest(jnp.where(allowed, _random_keys(key, d) | 1, 0), k)
    return at_positions(d, ranked(allowed, random_positions(key, size, k)))
