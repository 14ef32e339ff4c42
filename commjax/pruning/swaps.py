"""The loop of DSnoT: in every cycle each output swaps one pruned input for a kept one, until it is done.

The released code sorts the inputs of every output twice, but few of them are ever needed.  A tournament finds the next
candidate instead.  The inputs are cut into chunks, the best key of every chunk is known, and taking a candidate reads
one chunk.  Candidates are taken best first, so the latest candidate taken determines all earlier ones, and no list of
swaps is kept.  `in_blocks` runs the loop over so many outputs that their keys stay in cache.  A block ends when all its
outputs are done.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int, Shaped

from commjax.core import tree

Matrix = Float[Array, "i o"]
Mask = Bool[Array, "i o"]

_INT = {4: jnp.int32, 8: jnp.int64}
_CHUNK = 16  # inputs of a chunk: taking a candidate reads one chunk, and one number of every chunk
_BLOCK = 256  # outputs of a block


class _Queue(NamedTuple):
    """Candidates of either sign, best first; index 0 is positive, index 1 is negative.

    Attributes:
        best: Largest key left in every chunk.
        key: Key of the latest candidate taken.
        index: Input of the latest candidate taken.
    """

    best: Int[Array, "2 n o"]
    key: Int[Array, "2 o"]
    index: Int[Array, "2 o"]


class _Carry(NamedTuple):
    """State of the loop.

    Attributes:
        cycle: Number of finished cycles.
        error: Expected error of each output.
        active: Outputs that are not done.
        grow: Candidates to grow.
        prune: A `_Queue` of candidates to prune; None with a pattern.
        mask: Present mask, with a pattern only.
    """

    cycle: Int[Array, ""]
    error: Float[Array, "o"]
    active: Bool[Array, "o"]
    grow: _Queue
    prune: Any
    mask: Mask | None


def _ordered(a: Matrix) -> Int[Array, "i o"]:
    """Return |a| as integers in the same order."""
    kind = _INT[a.dtype.itemsize]
    return jax.lax.bitcast_convert_type(a, kind) & jnp.iinfo(kind).max


def _chunked(keys: Int[Array, "i o"], size: int) -> Int[Array, "n c o"]:
    return jnp.pad(keys, ((0, -keys.shape[0] % size), (0, 0))).reshape(-1, size, keys.shape[1])


def _queue(keys: Int[Array, "n c o"]) -> _Queue:
    outputs = keys.shape[-1]
    best = jnp.stack([jnp.max(keys, axis=1), jnp.max(-keys, axis=1)])
    return _Queue(best, jnp.full((2, outputs), jnp.iinfo(keys.dtype).max), jnp.full((2, outputs), -1, jnp.int32))


def _iota(shape: tuple[int, ...]) -> Int[Array, "..."]:
    return jax.lax.broadcasted_iota(jnp.int32, shape, 0)


def _first(mask: Bool[Array, "n o"], way: Int[Array, "o"] | None = None) -> Int[Array, "o"]:
    """First position along axis 0 where mask is True; the last one where `way` [o] is -1.  There must be one."""
    positions = _iota(mask.shape) if way is None else way[None] * _iota(mask.shape)
    position = jnp.min(jnp.where(mask, positions, mask.shape[0] - 1), axis=0)
    return position if way is None else way * position


def _chunk(keys: Shaped[Array, "n c o"], chunk: Int[Array, "o"]) -> Shaped[Array, "c o"]:
    rows = jnp.take_along_axis(keys, chunk[None, None], axis=0, mode="clip")[0]
    return jax.lax.optimization_barrier(rows)  # otherwise every use repeats the gather


def _take(
    keys: Int[Array, "n c o"], queue: _Queue, positive: Bool[Array, "o"], *, from_end: bool = False
) -> tuple[Bool[Array, "o"], Int[Array, "o"], _Queue]:
    """Take the best candidate of one sign for every output, the first among equals.

    `from_end`: among equals of positive sign take the last, as if a sorted list were read from its end.  Returns
    (whether there is one, its input, the queue after it).
    """
    size = keys.shape[1]
    way = jnp.where(positive, jnp.int32(-1), jnp.int32(1)) if from_end else None

    def of(pair: Int[Array, "2 *n o"]) -> Int[Array, "*n o"]:
        return jnp.where(positive[None], pair[0], pair[1]) if pair.ndim == 3 else jnp.where(positive, pair[0], pair[1])

    best, key, index = (of(a) for a in queue)
    chunk = _first(best == jnp.max(best, axis=0)[None], way)
    rows = _chunk(keys, chunk)
    rows = jnp.where(positive[None], rows, -rows)
    place = _iota(rows.shape) + (chunk * size)[None]
    later = place > index[None] if way is None else way[None] * (place - index[None]) > 0
    rows = jnp.where((rows < key[None]) | ((rows == key[None]) & later), rows, 0)
    most = jnp.max(rows, axis=0)
    taken = chunk * size + _first(rows == most[None], way)
    left = jnp.max(jnp.where(place == taken[None], 0, rows), axis=0)
    side, out = jnp.stack([positive, ~positive]), jnp.arange(keys.shape[-1])
    return (
        most > 0,
        taken,
        _Queue(
            queue.best.at[jnp.where(positive, 0, 1), chunk, out].set(left, unique_indices=True),
            jnp.where(side, most[None], queue.key),
            jnp.where(side, taken[None], queue.index),
        ),
    )


def _taken(keys: Int[Array, "n c o"], queue: _Queue, inputs: int, *, from_end: bool = False) -> Mask:
    """Mask of the candidates that were taken: for each sign, the latest one and those before it."""
    flat = keys.reshape(-1, keys.shape[-1])[:inputs]
    place = _iota(flat.shape)
    (up, down), (up_index, down_index) = queue.key, queue.index
    earlier = place >= up_index[None] if from_end else place <= up_index[None]
    positive = (flat > up[None]) | ((flat == up[None]) & earlier)
    return positive | (-flat > down[None]) | ((-flat == down[None]) & (place <= down_index[None]))


def _keys(
    mask: Mask, contribution: Matrix, grow: Matrix, prune: Matrix, m: int | None
) -> tuple[Int[Array, "n c o"], Int[Array, "k d o"]]:
    """Keys of the candidates to grow and to prune, in chunks; 0 for an input that is no candidate."""
    kind = _INT[grow.dtype.itemsize]
    grow_keys = _chunked(jnp.where(mask, 0, jnp.sign(grow).astype(kind) * _ordered(grow)), _CHUNK)
    # The candidate of least prune score is the best.  For a positive error the contribution must be negative; in a
    # group of m all kept weights are candidates.
    side = jnp.ones((), kind) if m else -jnp.sign(contribution).astype(kind)
    prune_keys = _chunked(jnp.where(mask, side * (jnp.iinfo(kind).max - _ordered(prune)), 0), m or _CHUNK)
    # Computed once, because each key is compared with the key of the latest candidate taken.
    return tree.once((grow_keys, prune_keys))


def _least_of_group(
    keys: Int[Array, "k m o"], g: Int[Array, "o"], mask: Mask
) -> tuple[Bool[Array, "o"], Int[Array, "o"]]:
    """Find the best input to prune in the group of g, among the inputs that are kept now and were kept at first."""
    m = keys.shape[1]
    chunk = g // m
    rows = jnp.where(_chunk(mask.reshape(keys.shape), chunk), _chunk(keys, chunk), 0)
    most = jnp.max(rows, axis=0)
    return most > 0, chunk * m + _first(rows == most[None])


def swaps(
    mask: Mask,
    W: Matrix,
    sums: Float[Array, "i"],
    grow: Matrix,
    prune: Matrix,
    *,
    threshold: Float[Array, ""],
    cycles: Int[Array, ""],
    m: int | None,
    same_sign: bool,
) -> Mask:
    """Swap, in every output, at most `cycles` times a pruned input g for a kept input p.

        contribution_j = W_j sums_j,   error = sum of contribution_j over the pruned inputs j
        g = argmax of |grow| over the pruned inputs where grow has the sign of error
        p = argmin of prune over the kept inputs where contribution has the sign of -error
            (with m: over the kept inputs of g's group of m)
        error <- error + contribution_p - contribution_g

    A weight moves at most once.  Among equal scores the first input wins, except that for a positive error the last g
    wins, because the released code reads its sorted list from the end.  With m, a g whose group has no p left is
    skipped.  An output is done if

    - |error| <= threshold before the swap,
    - `same_sign` is set and the error after the swap would not have the sign of the first error, or
    - there is no g, or (without m) no p.

    Args:
        mask: Mask before the swaps [in, out].
        W: Dense weights [in, out].
        sums: Sum of each input over the tokens of a sample [in].
        grow: Grow scores with sign [in, out].
        prune: Prune scores [in, out].
        threshold: Error at which an output is done.
        cycles: Largest number of swaps of an output.
        m: Size of a group of an n:m pattern; None: no pattern.
        same_sign: Whether an output is done when its error would change sign.

    Returns:
        The mask after the swaps [in, out].
    """
    inputs, outputs = mask.shape
    contribution = W * sums[:, None]
    grow_keys, prune_keys = _keys(mask, contribution, grow, prune, m)
    first_error = jnp.sum(jnp.where(mask, 0, contribution), axis=0)
    out = jnp.arange(outputs)

    def at(index: Int[Array, "o"]) -> Float[Array, "o"]:
        # Computed from W, so that no matrix of contributions is written to memory.
        return jnp.take_along_axis(W, index[None], axis=0, mode="clip")[0] * sums[index]

    def cycle(carry: _Carry) -> _Carry:
        t, error, active, grow, prune, mask = carry
        has_g, g, grow_after = _take(grow_keys, grow, error > 0, from_end=True)
        if mask is not None:
            has_p, p = _least_of_group(prune_keys, g, mask)
        else:
            has_p, p, prune_after = _take(prune_keys, prune, error > 0)
        after = error + at(p) - at(g)
        active &= (jnp.abs(error) > threshold) & has_g
        if mask is None:
            active &= has_p
        if same_sign:
            active &= ~has_p | (jnp.sign(after) == jnp.sign(first_error))
        swap = active & has_p
        error = jnp.where(swap, after, error)
        if mask is None:  # a candidate that was taken is swapped, or its output is done
            return _Carry(t + 1, error, active, _where(swap, grow_after, grow), _where(swap, prune_after, prune), None)
        mask = mask.at[jnp.where(swap, g, inputs), out].set(True, mode="drop")
        mask = mask.at[jnp.where(swap, p, inputs), out].set(False, mode="drop")
        return _Carry(t + 1, error, active, grow_after, None, mask)

    start = _Carry(
        cycle=jnp.zeros((), jnp.int32),
        error=first_error,
        active=jnp.ones(outputs, bool),
        grow=_queue(grow_keys),
        prune=None if m else _queue(prune_keys),
        mask=mask if m else None,
    )
    end = jax.lax.while_loop(lambda carry: (carry.cycle < cycles) & jnp.any(carry.active), cycle, start)
    if end.mask is not None:
        return end.mask
    grown, pruned = _taken(grow_keys, end.grow, inputs, from_end=True), _taken(prune_keys, end.prune, inputs)
    return (mask | grown) & ~pruned


def _where(swap: Bool[Array, "o"], after: _Queue, before: _Queue) -> _Queue:
    """Keep the latest candidate taken where it is swapped.  The chunks of the other outputs are never read again."""
    key, index = (jnp.where(swap[None], a, b) for a, b in zip(after[1:], before[1:]))
    return _Queue(after.best, key, index)


def in_blocks(function: Callable[..., Mask], *matrices: Array) -> Mask:
    """Compute function(*matrices) for at most `_BLOCK` outputs at a time.

    Args:
        function: Maps matrices [in, o] to a mask [in, o], each output independently of the others.
        *matrices: Matrices [in, out], which are cut along the outputs.

    Returns:
        The mask [in, out].
    """
    outputs = matrices[0].shape[1]
    number = -(-outputs // _BLOCK)
    size = -(-outputs // number)
    if number == 1:
        return function(*matrices)
    # Padded outputs have no weights and no error, so they are done at once.
    padded = [jnp.pad(a, ((0, 0), (0, number * size - outputs))) for a in matrices]

    def block(start: Int[Array, ""]) -> Mask:
        return function(*(jax.lax.dynamic_slice_in_dim(a, start, size, axis=1) for a in padded))

    blocks = jax.lax.map(block, size * jnp.arange(number, dtype=jnp.int32))
    return jnp.moveaxis(blocks, 0, 1).reshape(-1, number * size)[:, :outputs]
