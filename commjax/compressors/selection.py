"""Select the k largest coordinates without sorting.

XLA's CPU sort is the bottleneck of every selection.  Non-negative floats have the same order as their bit patterns.
Therefore the k-th largest can be built bit by bit from the highest bit, with one counting pass per bit.  The result is
exact; ties are resolved by position.

The magnitudes that a selection compares are computed once (`tree.once`).  If XLA computed an entry twice, the two
results could differ, and the mask would have too many or too few entries.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Int, Shaped

from commjax.core import tree
from commjax.core.tree import varying_like

_INT = {1: jnp.int8, 2: jnp.int16, 4: jnp.int32, 8: jnp.int64}


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


def largest(keys: Int[Array, "d"], k: int) -> Bool[Array, "d"]:
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
    return jnp.ones(x.shape, bool) if k == x.shape[0] else largest(tree.once(magnitude_bits(x)), k)
