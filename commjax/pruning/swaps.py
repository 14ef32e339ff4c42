"""The loop of DSnoT: one `while_loop` in which every output swaps one pruned input for a kept one, until it is done.

The released code sorts the inputs of every output twice.  Few of them are ever asked for, so here a tournament finds the next
one: the inputs are cut into chunks of about sqrt(in), the best of every chunk is known, and taking a candidate means looking at one
chunk.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

Matrix = Float[Array, "i o"]
Mask = Bool[Array, "i o"]

_INT = {4: jnp.int32, 8: jnp.int64}
_CHUNK = 16  # inputs looked at to take one candidate, beside one number for every chunk


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
    prune: _Queue | None
    swapped: Int[Array, "2 t o"]  # which input grew, which was pruned; the number of inputs where none


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
    side = jnp.stack([positive, ~positive])
    here = side[:, None] & (_iota(best.shape) == chunk[None])[None]
    return (
        most > 0,
        found,
        _Queue(
            jnp.where(here, left[None, None], queue.best),
            jnp.where(side, most[None], queue.key),
            jnp.where(side, found[None], queue.index),
        ),
    )


def swaps(
    mask: Mask,
    W: Matrix,
    sums: Float[Array, "i"],
    grow: Matrix,
    prune: Matrix,
    threshold: Float[Array, ""],
    *,
    cycles: int,
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
    first_error = jnp.sum(jnp.where(mask, 0, contribution), axis=0)

    def at(index):
        # From W, so that no matrix of contributions is written to memory.
        return jnp.take_along_axis(W, index[None], axis=0, mode="clip")[0] * sums[index]

    def least_of_group(g, already):
        size = prune_keys.shape[1]
        chunk = g // size
        rows, place = _chunk(prune_keys, chunk), _iota((size, outputs)) + (chunk * size)[None]
        rows = jnp.where(jnp.any(place[None] == already[:, None], axis=0), 0, rows)
        most = jnp.max(rows, axis=0)
        return most > 0, chunk * size + _first(rows == most[None])

    def cycle(carry):
        t, error, active, grow, prune, swapped = carry
        has_g, g, grow = _take(grow_keys, grow, error > 0, from_end=True)
        if prune is None:
            has_p, p = least_of_group(g, swapped[1])
        else:
            has_p, p, prune = _take(prune_keys, prune, error > 0)
        after = error + at(p) - at(g)
        active &= (jnp.abs(error) > threshold) & has_g
        if m is None:
            active &= has_p
        if same_sign:
            active &= ~has_p | (jnp.sign(after) == jnp.sign(first_error))
        swap = active & has_p
        pair = jnp.where(swap[None], jnp.stack([g, p]), inputs)
        swapped = jax.lax.dynamic_update_slice_in_dim(swapped, pair[:, None], t, axis=1)
        return _Carry(t + 1, jnp.where(swap, after, error), active, grow, prune, swapped)

    start = _Carry(
        cycle=jnp.int32(0),
        error=first_error,
        active=jnp.ones(outputs, bool),
        grow=_queue(grow_keys),
        prune=None if m else _queue(prune_keys),
        swapped=jnp.full((2, cycles, outputs), inputs, jnp.int32),
    )
    end = jax.lax.while_loop(lambda carry: (carry.cycle < cycles) & jnp.any(carry.active), cycle, start)
    grown, pruned = end.swapped
    out = jnp.broadcast_to(jnp.arange(outputs)[None], grown.shape)
    return mask.at[grown, out].set(True, mode="drop").at[pruned, out].set(False, mode="drop")
