"""The loop of DSnoT: one `while_loop` in which every output swaps one pruned input for a kept one, until it is done.

The released code sorts the inputs of every output twice.  Few of them are ever asked for, so here a tournament finds the next
one: the inputs are cut into chunks of about sqrt(in), the best of every chunk is known, and taking a candidate means looking at one
chunk.  Candidates are taken best first, so the latest one taken says which were: no list of swaps is kept.  `in_blocks` runs the
loop over so many outputs at a time that their keys stay in cache, and a block is done when its own outputs are.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from commjax.core import tree

Matrix = Float[Array, "i o"]
Mask = Bool[Array, "i o"]

_INT = {4: jnp.int32, 8: jnp.int64}
_CHUNK = 16  # inputs looked at to take one candidate, beside one number for every chunk
_BLOCK = 256  # outputs at a time


class _Queue(NamedTuple):
    """Candidates of either sign, best first; [0] positive, [1] negative.  What was taken is known by the latest one."""

    best: Int[Array, "2 n o"]  # the largest key left in every chunk
    key: Int[Array, "2 o"]  # of the latest one taken
    index: Int[Array, "2 o"]


class _Carry(NamedTuple):
    cycle: Int[Array, ""]
    error: Float[Array, "o"]
    active: Bool[Array, "o"]
    grow: _Queue
    prune: Any  # _Queue; None with a pattern
    mask: Mask | None  # with a pattern


def _ordered(a: Matrix) -> Int[Array, "i o"]:
    """|a| as integers of the same order"""
    kind = _INT[a.dtype.itemsize]
    return jax.lax.bitcast_convert_type(a, kind) & jnp.iinfo(kind).max


def _chunked(keys: Int[Array, "i o"], size: int) -> Int[Array, "n c o"]:
    return jnp.pad(keys, ((0, -keys.shape[0] % size), (0, 0))).reshape(-1, size, keys.shape[1])


def _queue(keys: Int[Array, "n c o"]) -> _Queue:
    outputs = keys.shape[-1]
    best = jnp.stack([jnp.max(keys, axis=1), jnp.max(-keys, axis=1)])
    return _Queue(best, jnp.full((2, outputs), jnp.iinfo(keys.dtype).max), jnp.full((2, outputs), -1, jnp.int32))


def _iota(shape):
    return jax.lax.broadcasted_iota(jnp.int32, shape, 0)


def _first(mask, way=None):
    """The first position along axis 0 where mask is True, which it is somewhere; where `way` [o] is -1, the last"""
    positions = _iota(mask.shape) if way is None else way[None] * _iota(mask.shape)
    found = jnp.min(jnp.where(mask, positions, mask.shape[0] - 1), axis=0)
    return found if way is None else way * found


def _chunk(keys, chunk):
    rows = jnp.take_along_axis(keys, chunk[None, None], axis=0, mode="clip")[0]
    return jax.lax.optimization_barrier(rows)  # or the gather is done again for every use


def _take(keys: Int[Array, "n c o"], queue: _Queue, positive: Bool[Array, "o"], *, from_end: bool = False):
    """(found, index, the queue after it): for every output its best candidate of one sign, the first among equals.

    `from_end`: the last among equals of positive sign, as a sorted list gives them that is read from its end.
    """
    size = keys.shape[1]
    way = jnp.where(positive, jnp.int32(-1), jnp.int32(1)) if from_end else None

    def of(pair):
        return jnp.where(positive[None], pair[0], pair[1]) if pair.ndim == 3 else jnp.where(positive, pair[0], pair[1])

    best, key, index = (of(a) for a in queue)
    chunk = _first(best == jnp.max(best, axis=0)[None], way)
    rows = _chunk(keys, chunk)
    rows = jnp.where(positive[None], rows, -rows)
    place = _iota(rows.shape) + (chunk * size)[None]
    later = place > index[None] if way is None else way[None] * (place - index[None]) > 0
    rows = jnp.where((rows < key[None]) | ((rows == key[None]) & later), rows, 0)
    most = jnp.max(rows, axis=0)
    found = chunk * size + _first(rows == most[None], way)
    left = jnp.max(jnp.where(place == found[None], 0, rows), axis=0)
    side, out = jnp.stack([positive, ~positive]), jnp.arange(keys.shape[-1])
    return (
        most > 0,
        found,
        _Queue(
            queue.best.at[jnp.where(positive, 0, 1), chunk, out].set(left, unique_indices=True),
            jnp.where(side, most[None], queue.key),
            jnp.where(side, found[None], queue.index),
        ),
    )


def _taken(keys: Int[Array, "n c o"], queue: _Queue, inputs: int, *, from_end: bool = False) -> Mask:
    """Which candidates were taken: those before the latest of their sign, and that one."""
    flat = keys.reshape(-1, keys.shape[-1])[:inputs]
    place = _iota(flat.shape)
    (up, down), (up_index, down_index) = queue.key, queue.index
    earlier = place >= up_index[None] if from_end else place <= up_index[None]
    positive = (flat > up[None]) | ((flat == up[None]) & earlier)
    return positive | (-flat > down[None]) | ((-flat == down[None]) & (place <= down_index[None]))


def swaps(
    mask: Mask,
    W: Matrix,
    sums: Float[Array, "i"],
    grow: Matrix,
    prune: Matrix,
    threshold: Float[Array, ""],
    cycles: Int[Array, ""],
    *,
    m: int | None,
    same_sign: bool,
) -> Mask:
    r"""The mask after at most `cycles` swaps in every output.

        contribution_j = W_j sums_j, error = sum over the pruned of contribution
        g = argmax of |grow| over the pruned where grow has the sign of error
        p = argmin of prune over the kept where contribution has the other sign; with m, over the kept of g's group of m
        error <- error + contribution_p - contribution_g

    A weight moves once at most.  Among equals the first input wins; among the g of a positive error the last, because the released
    code reads its sorted list from the end.  An output is done when |error| <= threshold before the swap; with
    `same_sign`, when the swap would leave the sign of the first error; when there is no g or no p.  With m, a g whose group has no p
    left is passed over.
    """
    inputs, outputs = mask.shape
    kind, contribution = _INT[grow.dtype.itemsize], W * sums[:, None]
    grow_keys = _chunked(jnp.where(mask, 0, jnp.sign(grow).astype(kind) * _ordered(grow)), _CHUNK)
    # The least is the best; for a positive error those of negative contribution, in a group of m all.
    side = jnp.ones((), kind) if m else -jnp.sign(contribution).astype(kind)
    prune_keys = _chunked(jnp.where(mask, side * (jnp.iinfo(kind).max - _ordered(prune)), 0), m or _CHUNK)
    grow_keys, prune_keys = tree.once((grow_keys, prune_keys))  # each key is compared with the latest one taken
    first_error = jnp.sum(jnp.where(mask, 0, contribution), axis=0)
    out = jnp.arange(outputs)

    def at(index):
        # From W, so that no matrix of contributions is written to memory.
        return jnp.take_along_axis(W, index[None], axis=0, mode="clip")[0] * sums[index]

    def least_of_group(g, mask):
        """Of those that are kept now and were kept at first."""
        chunk = g // m
        rows = jnp.where(_chunk(mask.reshape(prune_keys.shape), chunk), _chunk(prune_keys, chunk), 0)
        most = jnp.max(rows, axis=0)
        return most > 0, chunk * m + _first(rows == most[None])

    def cycle(carry):
        t, error, active, grow, prune, mask = carry
        has_g, g, grow_after = _take(grow_keys, grow, error > 0, from_end=True)
        if mask is not None:
            has_p, p = least_of_group(g, mask)
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
        if mask is None:  # what is taken is swapped, or the output is done
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
    """The latest one taken, where it is swapped; the chunks of the others nobody reads again."""
    key, index = (jnp.where(swap[None], a, b) for a, b in zip(after[1:], before[1:]))
    return _Queue(after.best, key, index)


def in_blocks(function: Callable[..., Mask], *matrices: Array) -> Mask:
    """function(*matrices), computed for some outputs at a time; each matrix is [in, out]."""
    outputs = matrices[0].shape[1]
    number = -(-outputs // _BLOCK)
    size = -(-outputs // number)
    if number == 1:
        return function(*matrices)
    # Outputs that are padded have no weights, no error, and nothing to do.
    padded = [jnp.pad(a, ((0, 0), (0, number * size - outputs))) for a in matrices]

    def block(start):
        return function(*(jax.lax.dynamic_slice_in_dim(a, start, size, axis=1) for a in padded))

    found = jax.lax.map(block, size * jnp.arange(number, dtype=jnp.int32))
    return jnp.moveaxis(found, 0, 1).reshape(-1, number * size)[:, :outputs]
