"""k random coordinates among the k' of largest magnitude, without a sort: candidates whose rank is tested."""

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from commjax.compressors.random_sets import mixed, random_mask, random_of_mask, random_positions, scaled
from commjax.compressors.selection import count, magnitude_bits, ranked, top_k_mask
from commjax.core import tree
from commjax.core.base import Key
from commjax.core.tree import varying_like

# Up to this dimension and this many expected draws, testing the ranks of candidates is cheaper than a threshold.
MAX_DIMENSION = 4096
_MAX_CANDIDATES = 16
# Largest number of candidates of one row.
_LAST = 1 << 24


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
    if d > MAX_DIMENSION or k * d > _MAX_CANDIDATES * k_top:
        return random_of_mask(key, top_k_mask(x, k_top), k_top, k)
    return _draw_from_top(k, k_top)(key, tree.once(magnitude_bits(x)))


@partial(jax.jit, static_argnames=("k", "k_top"))
def k_of_top(key: Key, x: Shaped[Array, "d"], k: int, k_top: int) -> Int[Array, "k"]:
    """Return the positions of `k_of_top_mask`, in no particular order.

    Args:
        key: random key.
        x: floating-point vector [d].
        k: number of chosen coordinates, 1 <= k <= k_top.
        k_top: number of largest magnitudes to choose from, at most d.

    Returns:
        Distinct positions [k].
    """
    if len(x) > MAX_DIMENSION and k < k_top < len(x):
        return ranked(top_k_mask(x, k_top), random_positions(key, k_top, k))
    return ranked(k_of_top_mask(key, x, k, k_top), jnp.arange(k, dtype=jnp.int32))


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
    few, many = _draws(k, k_top, d, 1 / 16), _draws(k, k_top, d, 1e-2)
    room = max(1, n // 8)
    nothing = varying_like(_Chosen(jnp.full((n, k), -1, jnp.int32), jnp.zeros(n, jnp.int32)), keys)
    start = _accepted(key, keys, jnp.int32(0), few, nothing, k_top)

    def finish(chosen: _Chosen) -> _Chosen:
        at = jnp.nonzero(chosen.number < k, size=room, fill_value=n)[0].astype(jnp.int32)
        row_keys, rows, before = jax.tree.map(lambda leaf: leaf[jnp.minimum(at, n - 1)], (key, keys, chosen))

        def turn(carry: tuple[Array, _Chosen]) -> tuple[Array, _Chosen]:
            begin, before = carry
            return begin + many, _accepted(row_keys, rows, begin, many, before, k_top)

        before = before._replace(number=jnp.where(at < n, before.number, k))
        _, after = jax.lax.while_loop(
            lambda carry: jnp.any(carry[1].number < k) & (carry[0] < _LAST), turn, (jnp.int32(few), before)
        )
        # k candidates of a row can always be accepted; `_LAST` only makes sure that the loop ends.
        after = after._replace(number=jnp.where(at < n, k, after.number))
        return jax.tree.map(lambda leaf, new: leaf.at[at].set(new, mode="drop"), chosen, after)

    chosen = jax.lax.while_loop(lambda chosen: jnp.any(chosen.number < k), finish, start)
    position = jnp.arange(d, dtype=jnp.int32)
    return jnp.any(chosen.positions[:, :, None] == position[None, None], axis=1)


def _draws(k: int, k_top: int, d: int, unlucky: float) -> int:
    """Return how many draws suffice: fewer than k are accepted with probability at most `unlucky`."""
    share, draws = k_top / d, k
    while sum(math.comb(draws, j) * share**j * (1 - share) ** (draws - j) for j in range(k)) > unlucky:
        draws += 1
    return draws


class _Chosen(NamedTuple):
    """The coordinates that were chosen so far.

    Attributes:
        positions: chosen positions [n, k], -1 in empty slots.
        number: number of chosen positions [n].
    """

    positions: Int[Array, "n k"]
    number: Int[Array, "n"]


def _accepted(
    key: Key, keys: Int[Array, "n d"], begin: Int[Array, ""], draws: int, before: _Chosen, k_top: int
) -> _Chosen:
    """Test the next candidates of each row and add the accepted ones to `before`.

    A candidate is one of the k_top largest if and only if fewer than k_top entries are larger.
    """
    d, k = keys.shape[1], before.positions.shape[1]
    order = jnp.arange(draws, dtype=jnp.int32)

    def rank(keys: Array, candidate: Array) -> Array:
        first = (jnp.arange(d, dtype=jnp.int32) < candidate).astype(keys.dtype)
        return count(keys + first > keys[candidate])  # among equals, the first position counts as the larger

    def of_row(key: Key, keys: Array, before: _Chosen) -> _Chosen:
        candidate = _candidates(key, begin, draws, d)
        accept = jax.vmap(partial(rank, keys))(candidate) < k_top
        if k > 1:  # distinct: neither accepted earlier in this call nor chosen before it
            same = (candidate[:, None] == candidate[None]) & accept[None] & (order[None, :] < order[:, None])
            known = jnp.any(candidate[:, None] == before.positions[None], axis=1)
            accept &= ~jnp.any(same, axis=1) & ~known
        place = before.number + jnp.cumsum(accept, dtype=jnp.int32) - accept.astype(jnp.int32)
        slot = jnp.arange(k, dtype=jnp.int32)[:, None]
        new = jnp.max(jnp.where(accept[None] & (place[None] == slot), candidate[None], -1), axis=1)
        number = jnp.minimum(before.number + jnp.sum(accept, dtype=jnp.int32), k)
        return _Chosen(jnp.maximum(before.positions, new), number)

    return jax.vmap(of_row)(key, keys, before)


def _candidates(key: Key, begin: Int[Array, ""], draws: int, d: int) -> Int[Array, "t"]:
    """Return uniform indices [draws] below d <= 2^12, after the first `begin` of the key's stream.

    The bias is below d / 2^32.  A threefry hash per word would cost more than the rest of the selection.  Instead, the
    64 random bits of each key seed a counter that goes through the finaliser of MurmurHash3 (a bijection with full
    avalanche), twice.
    """
    seed = jax.random.key_data(key)[-2:]
    counter = begin.astype(jnp.uint32) + jnp.arange(1, draws + 1, dtype=jnp.uint32)
    return scaled(mixed(mixed(seed[0] + counter * jnp.uint32(0x9E3779B9)) ^ seed[1]), d).astype(jnp.int32)
