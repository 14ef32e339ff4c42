"""Masks from scores: exact counts, defined ties, and no sort.

A mask is True where a weight of W [in, out] is kept.  Weights compete within a group:

    "output"    the inputs of one output (Wanda, DSnoT)
    "input"     the outputs of one input
    "layer"     the whole matrix (the released RIA, and magnitude everywhere)

Among equal scores the first position (in a layer: input first, then output) is pruned first.  Non-negative floats order as their bit
patterns do, so a group's threshold is found by building its bits from the top, one counting pass a bit, as long as some group's
count is not yet right; XLA's sort is a hundred times slower.

Thesis: the group is never stated (W9); eps, the fraction removed, is L2419 (W8).
"""

import math
from collections.abc import Sequence
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

_OVER: dict[str, tuple[int, ...]] = {"output": (0,), "input": (1,), "layer": (0, 1)}
_BLOCK = 256  # groups at a time, so that a block of a few thousand inputs stays in cache
_INT = {2: jnp.int16, 4: jnp.int32, 8: jnp.int64}


def count(size: int, sparsity: float) -> int:
    """How many of `size` weights to prune: floor(size * sparsity), safe against 100 * 0.29 = 28.999...

    The product is exact, and what a float lacks of the share that was meant is forgiven.

    >>> count(4096, 0.6), count(100, 0.29), count(104_857_600, 0.29)
    (2457, 29, 30408704)
    """
    if not 0 <= sparsity < 1:
        raise ValueError(f"sparsity={sparsity}; allowed: 0 <= sparsity < 1")
    forgiven = max(1e-9, 2 * size * math.ulp(sparsity))
    return math.floor(size * Fraction(sparsity) + Fraction(forgiven))


def unstructured(scores: Scores, sparsity: float, group: Group = "output", *, reference_ties: bool = False) -> Mask:
    """Prunes floor(size * sparsity) weights in every group, those of least score.

    `reference_ties=True`: as the released layer-wise code does, prunes every score up to and including the one that comes
    next, so at least one weight more, and all its equals.

    >>> unstructured(jnp.array([[1.0, 5.0], [2.0, 4.0]]), 0.5).tolist()
    [[False, True], [True, False]]
    >>> unstructured(jnp.array([[1.0, 5.0], [2.0, 4.0]]), 0.5, "layer").tolist()
    [[False, True], [False, True]]
    """
    pruned = count(_size(scores, group), sparsity)
    return _checked(scores, *_unstructured(scores, np.int32(pruned), group, reference_ties))


def largest(scores: Scores, k: int, group: Group = "layer") -> Mask:
    """Keeps exactly k weights of every group, those of largest score; of equals the last.

    >>> largest(jnp.array([[1.0, 5.0], [2.0, 4.0]]), 1).tolist()
    [[False, True], [False, False]]
    """
    size = _size(scores, group)
    if not 0 <= k <= size:
        raise ValueError(f"k={k}; allowed: 0 to {size}, the weights of a group")
    return _checked(scores, *_unstructured(scores, np.int32(size - k), group, False))


def _size(scores: Scores, group: Group) -> int:
    """How many weights compete."""
    if group not in _OVER:
        raise ValueError(f"group={group!r}; allowed: {', '.join(map(repr, _OVER))}")
    _check_shape(scores)
    return math.prod(scores.shape[axis] for axis in _OVER[group])


def n_m(scores: Scores, n: int, m: int) -> Mask:
    """Keeps the n largest of every m consecutive inputs of an output (n kept; the released RIA counts the pruned).

    >>> n_m(jnp.array([[0.1], [0.9], [0.3], [0.5]]), 1, 4).T.tolist()
    [[False, True, False, False]]
    """
    check_pattern(scores.shape[0], n, m)
    _check_shape(scores)
    return _checked(scores, *_n_m(scores, n, m))


def check_pattern(inputs: int, n: int, m: int) -> None:
    """ValueError unless n of m inputs can be kept."""
    if m < 1 or inputs % m:
        raise ValueError(f"m={m}; allowed: a divisor of the {inputs} inputs")
    if not 1 <= n <= m:
        raise ValueError(f"n={n}; allowed: 1 <= n <= m = {m}")


def _check_shape(scores: Scores) -> None:
    if 0 in scores.shape:
        raise ValueError(f"scores has shape {scores.shape}; allowed: at least one input and one output")


def _checked(scores: Scores, mask: Mask, ordered: Array) -> Mask:
    """The mask, if there is an order; only outside jit, where there are numbers to look at."""
    if not isinstance(ordered, Tracer) and not ordered:
        bad = int(jnp.sum(~(scores >= 0)))
        raise ValueError(f"scores has {bad} values that are NaN or negative; allowed: numbers from 0 on")
    return mask


def _bits(scores: Scores) -> Int[Array, "i o"]:
    """Integers of the same order (-0.0 is 0.0)."""
    kind = _INT[scores.dtype.itemsize]
    return jax.lax.bitcast_convert_type(scores, kind) & jnp.iinfo(kind).max


@partial(jax.jit, static_argnames=("group", "reference_ties"))
def _unstructured(scores, k, group, reference_ties):
    """(mask, are all scores numbers from 0 on?)"""
    return _least_pruned(scores, k, group, reference_ties), jnp.all(scores >= 0)


def _least_pruned(scores, k, group, reference_ties):
    keys = tree.once(_bits(scores))
    if reference_ties:
        return keys > _search(keys, k, group, value_of_next=True)[0]
    return ~least(keys, k, group)


def least(keys: Int[Array, "i o"], k: Int[Array, ""] | int, group: Group) -> Mask:
    """True for the k least of every group of non-negative integers, the first among equals; k may be traced.

    `keys` must have one value each (`tree.once`): they are compared with a threshold that is one of them.
    """
    threshold, end = _search(keys, k, group, value_of_next=False)
    return (keys < threshold) | ((keys == threshold) & (_position(keys.shape, _OVER[group]) < end))


def _search(keys, k, group, *, value_of_next):
    search = partial(_threshold, k=k, over=_OVER[group], value_of_next=value_of_next)
    along = {"output": 1, "input": 0}.get(group)
    return search(keys) if along is None else _in_blocks(search, keys, along)


def _in_blocks(search, keys, along):
    """`search` over blocks of groups, which lie along the axis `along`."""
    groups = keys.shape[along]
    whole = groups - groups % _BLOCK

    def block(start):
        return search(jax.lax.dynamic_slice_in_dim(keys, start, _BLOCK, along))

    parts = []
    if whole:
        found = jax.lax.map(block, jnp.arange(0, whole, _BLOCK, dtype=jnp.int32))
        shape = (1, whole) if along else (whole, 1)
        parts.append(tuple(a.reshape(shape) for a in found))
    if whole < groups:
        parts.append(search(jax.lax.slice_in_dim(keys, whole, groups, axis=along)))
    return tuple(jnp.concatenate(pair, axis=along) for pair in zip(*parts))


def _position(shape: tuple[int, ...], over: tuple[int, ...]) -> Int[Array, "i o"]:
    """The position of an entry in its group."""
    i, o = (jax.lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (0, 1))
    return i * shape[1] + o if len(over) == 2 else (i, o)[over[0]]


def _threshold(keys, *, k, over, value_of_next):
    """(t, end), one a group, such that the k first in order are the keys < t and the keys == t at positions < end.

    With `value_of_next`, t is the key that comes next after those k.
    """

    def total(mask):
        return jnp.sum(mask, axis=over, keepdims=True, dtype=jnp.int32)

    def grow(carry):
        bit, t, below = carry
        higher = t | (jnp.ones((), keys.dtype) << bit.astype(keys.dtype))
        smaller = total(keys < higher)
        fits = smaller <= k
        return bit - 1, jnp.where(fits, higher, t), jnp.where(fits, smaller, below)

    # t is the largest prefix with at most k keys below it.  When all counts are k, fewer bits do; but not for the value itself.
    def unfinished(carry):
        bit, _, below = carry
        return (bit >= 0) & (True if value_of_next else jnp.any(below != k))

    zero = total(jnp.zeros_like(keys, bool))
    start = (jnp.int32(jnp.iinfo(keys.dtype).bits - 2), zero.astype(keys.dtype), zero)
    _, t, below = jax.lax.while_loop(unfinished, grow, start)

    # Ties only: the largest `end` with at most `wanted` equals before it, again bit by bit.
    position = _position(keys.shape, over)
    wanted = k - below
    equal = (keys == t) & (wanted > 0)
    size = math.prod(keys.shape[axis] for axis in over)

    def extend(carry):
        bit, end = carry
        further = end | (1 << bit)
        return bit - 1, jnp.where(total(equal & (position < further)) <= wanted, further, end)

    bits = jnp.where(jnp.any(wanted > 0), jnp.int32(size.bit_length() - 1), jnp.int32(-1))
    _, end = jax.lax.while_loop(lambda carry: carry[0] >= 0, extend, (bits, zero))
    return t, jnp.where(wanted > 0, end, 0)


@partial(jax.jit, static_argnames=("n", "m"))
def _n_m(scores, n, m):
    """(mask, are all scores numbers from 0 on?)"""
    return _largest_kept(scores, n, m), jnp.all(scores >= 0)


def _largest_kept(scores, n, m):
    groups = tree.once(scores).reshape(-1, m, scores.shape[1])
    if m > 16:  # comparing pairs grows with m^2
        return jax.lax.map(lambda g: _least_pruned(g, jnp.int32(m - n), "output", False), groups).reshape(scores.shape)
    members = [groups[:, a] for a in range(m)]
    kept = []
    for a in range(m):
        # Ahead of a: larger, or equal and later (the first of equals is pruned first).
        ahead = [(members[b] >= members[a]) if b > a else (members[b] > members[a]) for b in range(m) if b != a]
        kept.append(sum((x.astype(jnp.int8) for x in ahead), jnp.zeros(members[a].shape, jnp.int8)) < n)
    return jnp.stack(kept, axis=1).reshape(scores.shape)


# Sparsity per layer.


def uniform(layers: int, sparsity: float) -> np.ndarray:
    """The same sparsity for every layer.

    >>> uniform(3, 0.5).tolist()
    [0.5, 0.5, 0.5]
    """
    count(1, sparsity)
    return np.full(layers, sparsity)


def outlier_ratio(scores: Scores | Sequence[Array], multiple: float = 5.0) -> float:
    """The share of scores above `multiple` times their mean, over the matrices of one layer (a block) together."""
    matrices = [scores] if isinstance(scores, jax.Array) else list(scores)
    sizes = np.array([S.size for S in matrices])
    mean = float(sum(float(jnp.mean(S)) * S.size for S in matrices) / sizes.sum())  # a Python number keeps S's dtype
    return float(sum(int(jnp.sum(multiple * mean < S)) for S in matrices) / sizes.sum())


def outlier_weighted(
    ratios: Sequence[float] | np.ndarray, sparsity: float, spread: float = 0.08, sizes: Sequence[int] | None = None
) -> np.ndarray:
    """OWL: layers with more outliers are pruned less; sparsities differ by 2 `spread` at most and have the given mean.

        keep_l = 2 spread (D_l - min D) / (max D - min D) + c,      c such that the mean of 1 - keep_l is `sparsity`

    `ratios` are the D_l of `outlier_ratio` under Wanda's score; `sizes` weights the mean by the number of weights (by default
    layers count equally, as released).  Compared with the formulas of OWL in forks of its code, and with its Llama script: the scores of all matrices of a
    block are pooled, activations are those of the dense model, and the defaults, 0.08 and 5 times the mean, are its Llama script's.
    Differs: equal ratios give uniform sparsities, where the released code divides by 0, and what leaves [0, 1) is refused.

    >>> outlier_weighted([0.01, 0.02, 0.03], 0.5).round(2).tolist()
    [0.58, 0.5, 0.42]
    """
    count(1, sparsity)
    D = np.asarray(ratios, dtype=float)
    if D.ndim != 1 or not D.size or not np.all(np.isfinite(D)):
        raise ValueError(f"ratios={ratios}; allowed: a finite number for every layer")
    if not spread >= 0:
        raise ValueError(f"spread={spread}; allowed: at least 0")
    width = D.max() - D.min()
    keep = 2 * spread * (D - D.min()) / width if width > 0 else np.zeros_like(D)
    result = sparsity - (keep - np.average(keep, weights=sizes))
    if result.min() < 0 or result.max() >= 1:
        raise ValueError(
            f"spread={spread} with sparsity={sparsity} gives sparsities from {result.min():.3g} to {result.max():.3g}; "
            "allowed: 0 <= sparsity < 1"
        )
    return result
