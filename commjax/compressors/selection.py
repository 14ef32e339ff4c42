"""Select the k largest coordinates without sorting.

XLA's CPU sort is the bottleneck of every selection.  Non-negative floats have the same order as their bit patterns.
Therefore the k largest are found by counting: a threshold is moved until exactly k entries are above it.  The result is
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
from jaxtyping import Array, Bool, Float, Int, Shaped

from commjax.core import tree
from commjax.core.tree import varying_like

_INT = {1: jnp.int8, 2: jnp.int16, 4: jnp.int32, 8: jnp.int64}
# From this dimension on, rows are taken one after another: a threshold needs few passes, and a row stays in the cache.
# Shorter rows are taken together, because each step of a loop has a price of its own.
_LARGE = 1 << 14
_SAMPLE = 1024
_HALVING = 16
_LANES = 16


def magnitude_bits(x: Shaped[Array, "d"]) -> Int[Array, "d"]:
    """Return |x| as non-negative integers of the same order, with NaN above all numbers.

    The integers are signed because CPUs compare signed integers faster.

    Args:
        x: floating-point vector [d].

    Returns:
        Signed integers [d] of the same width.
    """
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise ValueError(f"a selection by magnitude of a vector of {x.dtype}; allowed: floating-point numbers")
    bits = jax.lax.bitcast_convert_type(x, _INT[x.dtype.itemsize])
    return bits & jnp.iinfo(bits.dtype).max


def count(mask: Bool[Array, "d"]) -> Int[Array, ""]:
    """Count a mask.  Bytes are added column by column, because XLA on a CPU makes vector instructions of that only."""
    columns, rest = _columns(mask)
    return jnp.sum(columns, dtype=jnp.int32) + rest


def _columns(mask: Bool[Array, "d"]) -> tuple[Int[Array, "c"], Int[Array, ""]]:
    """Count each column of a table of 16 rows, and what is behind its last whole row."""
    columns = len(mask) // _LANES
    table, rest = mask[: _LANES * columns].reshape(_LANES, columns), mask[_LANES * columns :]
    return jnp.sum(table, axis=0, dtype=jnp.int8).astype(jnp.int32), jnp.sum(rest, dtype=jnp.int32)


def largest(values: Shaped[Array, "d"], k: int) -> Bool[Array, "d"]:
    """Return the mask of the k largest magnitudes or non-negative integers; among equals, the first positions win.

    XLA must compute the values once (`tree.once`).
    """
    if len(values) >= 2**31:
        raise ValueError(f"a selection of d={len(values)} coordinates; allowed: fewer than 2^31")
    if k == len(values):
        return jnp.ones(len(values), bool)
    return jax.lax.platform_dependent(values, cpu=partial(_by_counting, k=k), default=partial(_by_top_k, k=k))


def _keys(values: Shaped[Array, "d"]) -> Int[Array, "d"]:
    return values if jnp.issubdtype(values.dtype, jnp.integer) else magnitude_bits(values)


def _by_top_k(values: Shaped[Array, "d"], k: int) -> Bool[Array, "d"]:
    return jnp.zeros(len(values), bool).at[jax.lax.top_k(_keys(values), k)[1]].set(True)


def _by_counting(values: Shaped[Array, "d"], k: int) -> Bool[Array, "d"]:
    keys = _keys(values)
    t, end = _row(k)(values) if len(values) >= _LARGE else _with_ties(keys, bisected(keys, k))
    return (keys > t) | ((keys == t) & (jnp.arange(len(keys), dtype=jnp.int32) <= end))


@cache
def _row(k: int) -> Callable[[Shaped[Array, "d"]], tuple[Int[Array, ""], Int[Array, ""]]]:
    """Return a function of one long vector which, under vmap, takes rows one after another."""

    def one(values: Array) -> tuple[Array, Array]:
        keys = _keys(values)
        return _with_ties(keys, interpolated(keys, k))

    selected = jax.custom_batching.custom_vmap(one)

    @selected.def_vmap
    def rule(n: int, batched: Sequence[bool], values: Array) -> tuple[tuple[Array, Array], tuple[bool, bool]]:
        return jax.lax.map(one, values), (True, True)

    return selected


class _Threshold(NamedTuple):
    """A number t with at most k keys above it, and how many of the keys equal to t are selected with them."""

    t: Int[Array, ""]
    equal: Int[Array, ""]


def _with_ties(keys: Int[Array, "d"], threshold: _Threshold) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """Return the threshold, and the position up to which keys equal to it are selected: -1 without ties."""
    t, wanted = threshold

    def narrow(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        step, end = carry
        middle = end | (1 << step)
        # The step is never negative.  Without it, XLA would compute keys == t before the loop, with ties or without.
        equal = keys == jnp.where(step < 0, step.astype(t.dtype), t)
        enough = count(equal & (jnp.arange(len(keys), dtype=jnp.int32) < middle)) >= wanted
        return step - 1, jnp.where(enough, end, middle)

    # Under vmap the loop runs zero times if no row has a tie.
    bits = max(1, (len(keys) - 1).bit_length())
    start = varying_like((jnp.int32(bits - 1), jnp.zeros((), jnp.int32)), keys)
    _, end = jax.lax.while_loop(lambda carry: (wanted > 0) & (carry[0] >= 0), narrow, start)
    return t, jnp.where(wanted > 0, end, -1)


def bisected(keys: Int[Array, "d"], k: int) -> _Threshold:
    """Build the k-th largest key bit by bit from the highest bit, with one count per bit."""
    t = _at_rank(keys, k)
    above, equal = count(keys > t), count(keys == t)
    exact = above + equal == k
    return _Threshold(t - exact.astype(t.dtype), jnp.where(exact, 0, k - above))


def _at_rank(keys: Int[Array, "d"], rank: int) -> Int[Array, ""]:
    width = jnp.iinfo(keys.dtype).bits - 1

    def grow(step: Array, t: Array) -> Array:
        higher = t | (jnp.ones((), keys.dtype) << (width - 1 - step).astype(keys.dtype))
        return jnp.where(count(keys >= higher) >= rank, higher, t)

    return jax.lax.fori_loop(0, width, grow, varying_like(jnp.zeros((), keys.dtype), keys))


class _End(NamedTuple):
    """An end of the bracket around the threshold: a number, how many keys are above it, and log(count / k)."""

    t: Int[Array, ""]
    above: Int[Array, ""]
    log: Float[Array, ""]


def sampled(keys: Int[Array, "d"], k: int) -> tuple[Int[Array, ""], Int[Array, ""]]:
    """Return keys of a sample, two deviations below and above the k-th largest key, as far as a sample can tell."""
    sample = keys[:: max(1, len(keys) // _SAMPLE) | 1]  # an odd stride, because layers have even sizes
    rank, size = k * len(sample) / len(keys), len(sample)
    spread = 2 * math.sqrt(rank * (1 - k / len(keys))) + 1
    low, high = (_at_rank(sample, min(max(round(r), 1), size)) for r in (rank + spread, rank - spread))
    return low, high


def interpolated(keys: Int[Array, "d"], k: int) -> _Threshold:
    """Find a number with exactly k keys above it, or with ties, in few passes.

    At least k keys are above the low end of a bracket, fewer than k above the high end.  The first two guesses come
    from a sample.  The others interpolate the logarithm of the count (the Illinois method: an end that stays twice
    counts half).  From the 16th on, every second guess halves the bracket.
    """
    guesses = sampled(keys, k)

    def end(t: Array, above: Array) -> _End:
        return _End(t, above, jnp.log((above.astype(jnp.float32) + 0.5) / k))

    def narrow(carry: tuple[Array, _End, _End, Array]) -> tuple[Array, _End, _End, Array]:
        step, low, high, was_low = carry
        span = high.t.astype(jnp.float32) - low.t.astype(jnp.float32)
        between = low.t + (span * (low.log / (low.log - high.log))).astype(keys.dtype)
        middle = (low.t >> 1) + (high.t >> 1)
        t = jnp.where((step >= _HALVING) & (step % 2 == 0), middle, between)
        t = jnp.where(step == 0, guesses[0] - 1, jnp.where(step == 1, guesses[1], t))
        t = jnp.clip(t, low.t + 1, high.t - 1)
        new = end(t, count(keys > t))
        is_low = new.above >= k
        again = (step > 2) & (is_low == was_low)
        half = jnp.where(again, jnp.float32(0.5), jnp.float32(1))
        low, high = low._replace(log=low.log * half), high._replace(log=high.log * half)
        low = jax.tree.map(partial(jnp.where, is_low), new, low)
        return step + 1, low, jax.tree.map(partial(jnp.where, is_low), high, new), is_low

    def unfinished(carry: tuple[Array, _End, _End, Array]) -> Bool[Array, ""]:
        _, low, high, _ = carry
        return (low.above != k) & (low.t < high.t - 1)

    ends = jnp.array([-1, jnp.iinfo(keys.dtype).max], keys.dtype), jnp.array([len(keys), 0], jnp.int32)
    start = jnp.int32(0), *map(end, *ends), jnp.bool_(False)
    _, low, high, _ = jax.lax.while_loop(unfinished, narrow, varying_like(start, keys))
    exact = low.above == k
    return _Threshold(jnp.where(exact, low.t, high.t), jnp.where(exact, 0, k - high.above))


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
    magnitude_bits(x[:0])  # refuses what is not a floating-point vector
    return largest(jax.lax.stop_gradient(tree.once(x)), k)


@partial(jax.jit, static_argnames="k")
def top_k(x: Shaped[Array, "d"], k: int) -> tuple[Int[Array, "k"], Shaped[Array, "k"]]:
    """Return the k entries of largest magnitude; among equals, the first positions win.

    Args:
        x: floating-point vector [d].
        k: number of entries, 1 <= k <= d.

    Returns:
        (positions [k], values [k]), in an order that depends on the positions only.

    >>> positions, values = top_k(jnp.array([1.0, -3.0, 2.0, 3.0]), 2)
    >>> positions.tolist(), values.tolist()
    ([1, 3], [-3.0, 3.0])
    """
    x = tree.once(x)
    positions = ranked(top_k_mask(x, k), jnp.arange(k, dtype=jnp.int32))
    return positions, x[positions]


def ranked(mask: Bool[Array, "d"], ranks: Int[Array, "k"]) -> Int[Array, "k"]:
    """Return the positions of entries of a mask by their number, column by column of a table of 16 rows.

    Rank r is the r-th True entry, from 0.  The entries behind the last whole row of the table are the last column.
    """
    d, columns = len(mask), len(mask) // _LANES
    total = jnp.cumsum(jnp.append(*_columns(mask)), dtype=jnp.int32)
    column = jnp.searchsorted(total, ranks, side="right").astype(jnp.int32)[:, None]
    before = jnp.where(column > 0, total[column - 1], 0)
    lane = jnp.arange(_LANES, dtype=jnp.int32)[None]
    place = jnp.where(column < columns, lane * columns + column, _LANES * columns + lane)
    marked = (place < d) & mask[jnp.minimum(place, d - 1)]
    number = before + jnp.cumsum(marked, axis=1, dtype=jnp.int32) - 1
    return jnp.sum(jnp.where(marked & (number == ranks[:, None]), place, 0), axis=1, dtype=jnp.int32)
