"""Masks from scores: exact counts and defined ties, without a sort.

A mask is True where a weight of W [in, out] is kept.  Weights compete within a group:

    "output"    the inputs of one output (Wanda, DSnoT)
    "input"     the outputs of one input
    "layer"     the whole matrix (the released RIA, and magnitude everywhere)

Among equal scores the first position (in a layer: input first, then output) is pruned first.  Non-negative floats have
the same order as their bit patterns.  A group's threshold is therefore built bit by bit from the highest bit, with one
counting pass per bit, until the count of every group is right.  XLA's sort is a hundred times slower.

Thesis: the fraction removed is the eps of Sec. 6.3.1.
Differs (docs/errata.md): W8 (eps is a fraction), W9 (the thesis never states the group).
"""

import math
from collections.abc import Callable
from fractions import Fraction
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jaxtyping import Array, Bool, Float, Int

from commjax.core import tree

Group = Literal["output", "input", "layer"]
Scores = Float[Array, "i o"]
Mask = Bool[Array, "i o"]
Keys = Int[Array, "i o"]
OfGroups = Int[Array, "#i #o"]  # a number for every group: [1, out], [in, 1] or [1, 1]

_OVER: dict[str, tuple[int, ...]] = {"output": (0,), "input": (1,), "layer": (0, 1)}
_BLOCK = 256  # groups per block, so that a block of a few thousand inputs stays in cache
_INT = {2: jnp.int16, 4: jnp.int32, 8: jnp.int64}


def count(size: int, sparsity: float) -> int:
    """Return the number of weights to prune among `size` weights.

        floor(size * sparsity)

    A product that lies below a whole number only because `sparsity` is rounded counts as that number: 100 * 0.29 is
    28.999... in floats, and the result is 29.

    >>> count(4096, 0.6), count(100, 0.29), count(104_857_600, 0.29)
    (2457, 29, 30408704)

    Args:
        size: Number of weights that compete.
        sparsity: Share of them to prune, 0 <= sparsity < 1.

    Returns:
        The number of weights to prune.
    """
    if not 0 <= sparsity < 1:
        raise ValueError(f"sparsity={sparsity}; allowed: 0 <= sparsity < 1")
    forgiven = max(1e-9, 2 * size * math.ulp(sparsity))
    return math.floor(size * Fraction(sparsity) + Fraction(forgiven))


def unstructured(scores: Scores, sparsity: float, group: Group = "output", *, reference_ties: bool = False) -> Mask:
    """Prune the floor(size * sparsity) weights of least score in every group.

    >>> unstructured(jnp.array([[1.0, 5.0], [2.0, 4.0]]), 0.5).tolist()
    [[False, True], [True, False]]
    >>> unstructured(jnp.array([[1.0, 5.0], [2.0, 4.0]]), 0.5, "layer").tolist()
    [[False, True], [False, True]]

    Args:
        scores: Scores [in, out], non-negative.
        sparsity: Share of each group to prune, 0 <= sparsity < 1.
        group: Which weights compete: "output", "input" or "layer".
        reference_ties: Prune as the released layer-wise code does: it also prunes the next larger score and all weights
            of that score, so that at least one more weight is pruned.

    Returns:
        The mask [in, out], True where a weight is kept.
    """
    pruned = count(_size(scores, group), sparsity)
    return _checked(scores, *_unstructured(scores, np.int32(pruned), group, reference_ties))


def largest(scores: Scores, k: int, group: Group = "layer") -> Mask:
    """Keep exactly the k weights of largest score in every group; among equal scores the last are kept.

    >>> largest(jnp.array([[1.0, 5.0], [2.0, 4.0]]), 1).tolist()
    [[False, True], [False, False]]

    Args:
        scores: Scores [in, out], non-negative.
        k: Number of weights to keep in each group.
        group: Which weights compete: "output", "input" or "layer".

    Returns:
        The mask [in, out], True where a weight is kept.
    """
    size = _size(scores, group)
    if not 0 <= k <= size:
        raise ValueError(f"k={k}; allowed: 0 to {size}, the weights of a group")
    return _checked(scores, *_unstructured(scores, np.int32(size - k), group, False))


def _size(scores: Scores, group: Group) -> int:
    """Number of weights that compete in a group."""
    if group not in _OVER:
        raise ValueError(f"group={group!r}; allowed: {', '.join(map(repr, _OVER))}")
    _check_shape(scores)
    return math.prod(scores.shape[axis] for axis in _OVER[group])


def n_m(scores: Scores, n: int, m: int) -> Mask:
    """Keep the n largest scores among every m consecutive inputs of an output.

    n counts the kept weights; the released RIA counts the pruned ones.

    >>> n_m(jnp.array([[0.1], [0.9], [0.3], [0.5]]), 1, 4).T.tolist()
    [[False, True, False, False]]

    Args:
        scores: Scores [in, out], non-negative.
        n: Weights to keep in each group of m.
        m: Size of a group, a divisor of the number of inputs.

    Returns:
        The mask [in, out], True where a weight is kept.
    """
    check_pattern(scores.shape[0], n, m)
    _check_shape(scores)
    return _checked(scores, *_n_m(scores, n, m))


def check_pattern(inputs: int, n: int, m: int) -> None:
    """Raise a ValueError unless n of every m inputs can be kept.

    Args:
        inputs: Number of inputs of the layer.
        n: Weights to keep in each group of m.
        m: Size of a group.
    """
    if m < 1 or inputs % m:
        raise ValueError(f"m={m}; allowed: a divisor of the {inputs} inputs")
    if not 1 <= n <= m:
        raise ValueError(f"n={n}; allowed: 1 <= n <= m = {m}")


def _check_shape(scores: Scores) -> None:
    if 0 in scores.shape:
        raise ValueError(f"scores has shape {scores.shape}; allowed: at least one input and one output")


def _checked(scores: Scores, mask: Mask, ordered: Array) -> Mask:
    """Return the mask, or raise a ValueError if a score is NaN or negative.  Under jit nothing is checked."""
    if not isinstance(ordered, Tracer) and not ordered:
        bad = int(jnp.sum(~(scores >= 0)))
        raise ValueError(f"scores has {bad} values that are NaN or negative; allowed: numbers from 0 on")
    return mask


def _bits(scores: Scores) -> Keys:
    """Integers in the same order as the scores (-0.0 becomes 0.0)."""
    kind = _INT[scores.dtype.itemsize]
    return jax.lax.bitcast_convert_type(scores, kind) & jnp.iinfo(kind).max


@partial(jax.jit, static_argnames=("group", "reference_ties"))
def _unstructured(
    scores: Scores, k: Int[Array, ""], group: Group, reference_ties: bool
) -> tuple[Mask, Bool[Array, ""]]:
    """Returns (mask, whether all scores are numbers >= 0)."""
    return _least_pruned(scores, k, group, reference_ties), jnp.all(scores >= 0)


def _least_pruned(scores: Scores, k: Int[Array, ""], group: Group, reference_ties: bool) -> Mask:
    keys = tree.once(_bits(scores))
    if reference_ties:
        return keys > _search(keys, k, group, value_of_next=True)[0]
    return ~least(keys, k, group)


def least(keys: Keys, k: Int[Array, ""] | int, group: Group) -> Mask:
    """Mark the k smallest keys of every group; among equal keys the first positions win.

    Args:
        keys: Non-negative integers [in, out].  XLA must compute them once (`tree.once`), because they are compared with
            a threshold that is one of them.
        k: Number of keys to mark in each group; it may be traced.
        group: Which keys compete: "output", "input" or "layer".

    Returns:
        A mask [in, out], True for the marked keys.
    """
    threshold, end = _search(keys, k, group, value_of_next=False)
    return (keys < threshold) | ((keys == threshold) & (_position(keys.shape, _OVER[group]) < end))


def _search(keys: Keys, k: Int[Array, ""] | int, group: Group, *, value_of_next: bool) -> tuple[OfGroups, OfGroups]:
    search = partial(_threshold, k=k, over=_OVER[group], value_of_next=value_of_next)
    along = {"output": 1, "input": 0}.get(group)
    return search(keys) if along is None else _in_blocks(search, keys, along)


def _in_blocks(
    search: Callable[[Keys], tuple[OfGroups, OfGroups]], keys: Keys, along: int
) -> tuple[OfGroups, OfGroups]:
    """Apply `search` to blocks of `_BLOCK` groups; the groups lie along the axis `along`."""
    groups = keys.shape[along]
    whole = groups - groups % _BLOCK

    def block(start: Int[Array, ""]) -> tuple[OfGroups, OfGroups]:
        return search(jax.lax.dynamic_slice_in_dim(keys, start, _BLOCK, along))

    parts = []
    if whole:
        pairs = jax.lax.map(block, jnp.arange(0, whole, _BLOCK, dtype=jnp.int32))
        shape = (1, whole) if along else (whole, 1)
        parts.append(tuple(a.reshape(shape) for a in pairs))
    if whole < groups:
        parts.append(search(jax.lax.slice_in_dim(keys, whole, groups, axis=along)))
    t, end = (jnp.concatenate(pair, axis=along) for pair in zip(*parts))
    return t, end


def _position(shape: tuple[int, ...], over: tuple[int, ...]) -> Int[Array, "i o"]:
    """Position of each entry in its group."""
    i, o = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    return i * shape[1] + o if len(over) == 2 else (i, o)[over[0]]


def _threshold(
    keys: Keys, *, k: Int[Array, ""] | int, over: tuple[int, ...], value_of_next: bool
) -> tuple[OfGroups, OfGroups]:
    """Find (t, end) for each group such that its first k keys are those < t and those == t at positions < end.

    With `value_of_next`, t is the key that follows these k keys.
    """

    def total(mask: Mask) -> OfGroups:
        return jnp.sum(mask, axis=over, keepdims=True, dtype=jnp.int32)

    def grow(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        bit, t, below = carry
        higher = t | (jnp.ones((), keys.dtype) << bit.astype(keys.dtype))
        smaller = total(keys < higher)
        fits = smaller <= k
        return bit - 1, jnp.where(fits, higher, t), jnp.where(fits, smaller, below)

    # t is the largest prefix with at most k keys below it.  The search may stop early when every count is k, unless the
    # value itself is wanted.
    def unfinished(carry: tuple[Array, Array, Array]) -> Bool[Array, ""]:
        bit, _, below = carry
        return (bit >= 0) & (True if value_of_next else jnp.any(below != k))

    zero = total(jnp.zeros_like(keys, bool))
    start = (jnp.int32(jnp.iinfo(keys.dtype).bits - 2), zero.astype(keys.dtype), zero)
    _, t, below = jax.lax.while_loop(unfinished, grow, start)

    # Only for ties: find, again bit by bit, the largest `end` with at most `wanted` equal keys before it.
    position = _position(keys.shape, over)
    wanted = k - below
    equal = (keys == t) & (wanted > 0)
    size = math.prod(keys.shape[axis] for axis in over)

    def extend(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        bit, end = carry
        further = end | (1 << bit)
        return bit - 1, jnp.where(total(equal & (position < further)) <= wanted, further, end)

    bits = jnp.where(jnp.any(wanted > 0), jnp.int32(size.bit_length() - 1), jnp.int32(-1))
    _, end = jax.lax.while_loop(lambda carry: carry[0] >= 0, extend, (bits, zero))
    return t, jnp.where(wanted > 0, end, 0)


@partial(jax.jit, static_argnames=("n", "m"))
def _n_m(scores: Scores, n: int, m: int) -> tuple[Mask, Bool[Array, ""]]:
    """Returns (mask, whether all scores are numbers >= 0)."""
    return _largest_kept(scores, n, m), jnp.all(scores >= 0)


def _largest_kept(scores: Scores, n: int, m: int) -> Mask:
    groups = tree.once(scores).reshape(-1, m, scores.shape[1])
    if m > 16:  # the number of pairs to compare grows with m^2
        return jax.lax.map(lambda g: _least_pruned(g, jnp.int32(m - n), "output", False), groups).reshape(scores.shape)
    members = [groups[:, a] for a in range(m)]
    kept = []
    for a in range(m):
        # An entry is ahead of a if it is larger, or equal and later: the first of equals is pruned first.
        ahead = [(members[b] >= members[a]) if b > a else (members[b] > members[a]) for b in range(m) if b != a]
        kept.append(sum((x.astype(jnp.int8) for x in ahead), jnp.zeros(members[a].shape, jnp.int8)) < n)
    return jnp.stack(kept, axis=1).reshape(scores.shape)
