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


class _Candidates(NamedTuple):
    """Signed integer keys, 0 for none: of sign s, the best has the largest s * key > 0."""

    keys: Int[Array, "n c o"]
    best: Int[Array, "2 n o"] | None  # of every chunk, for either sign


class _Found(NamedTuple):
    """One candidate of every output, and its chunk."""

    ok: Bool[Array, "o"]
    index: Int[Array, "o"]
    rows: Int[Array, "c o"]


class _Carry(NamedTuple):
    cycle: Int[Array, ""]
    error: Float[Array, "o"]
    active: Bool[Array, "o"]
    grow: _Candidates
    prune: _Candidates
    swapped: Int[Array, "2 t o"]  # which input grew, which was pruned; the number of inputs where none


def _ordered(a: Matrix) -> Int[Array, "i o"]:
    """|a| as integers of the same order"""
    kind = _INT[a.dtype.itemsize]
    return jax.lax.bitcast_convert_type(a, kind) & jnp.iinfo(kind).max


def _of_both_signs(keys, axis):
    return jnp.stack([jnp.max(keys, axis=axis), jnp.max(-keys, axis=axis)])


def _candidates(keys: Int[Array, "i o"], chunk: int, tournament: bool = True) -> _Candidates:
    keys = jnp.pad(keys, ((0, -keys.shape[0] % chunk), (0, 0))).reshape(-1, chunk, keys.shape[1])
    return _Candidates(keys, _of_both_signs(keys, 1) if tournament else None)


def _iota(shape):
    return jax.lax.broadcasted_iota(jnp.int32, shape, 0)


def _first(mask):
    """The first position along axis 0 where mask is True"""
    return jnp.min(jnp.where(mask, _iota(mask.shape), mask.shape[0] - 1), axis=0)


def _best_in(keys, chunk, positive) -> _Found:
    """The best of a chunk, the first among equals."""
    rows = jnp.take_along_axis(keys, chunk[None, None], axis=0, mode="clip")[0]
    signed = jnp.where(positive[None], rows, -rows)
    most = jnp.max(signed, axis=0)
    return _Found(most > 0, chunk * keys.shape[1] + _first(signed == most[None]), rows)


def _best(candidates: _Candidates, positive) -> _Found:
    assert candidates.best is not None
    best = jnp.where(positive[None], candidates.best[0], candidates.best[1])
    return _best_in(candidates.keys, _first(best == jnp.max(best, axis=0)[None]), positive)


def _without(candidates: _Candidates, found: _Found) -> _Candidates:
    keys, best = candidates
    chunks, size, outputs = keys.shape
    chunk, place = found.index // size, found.index % size
    keys = keys.at[chunk, place, jnp.arange(outputs)].set(0, mode="drop")
    if best is None:
        return _Candidates(keys, None)
    rows = jnp.where(_iota(found.rows.shape) == place[None], 0, found.rows)
    here = _iota((chunks, outputs)) == chunk[None]
    return _Candidates(keys, jnp.where(here[None], _of_both_signs(rows, 0)[:, None], best))


def swaps(
    mask: Mask,
    contribution: Matrix,
    grow: Matrix,
    prune: Matrix,
    threshold: Float[Array, ""],
    *,
    cycles: int,
    m: int | None,
    same_sign: bool,
) -> Mask:
    r"""The mask after at most `cycles` swaps in every output.

        error = sum over the pruned of contribution
        g = argmax of |grow| over the pruned where grow has the sign of error
        p = argmin of prune over the kept where contribution has the other sign; with m, over the kept of g's group of m
        error <- error + contribution_p - contribution_g

    A weight moves once at most; the first input wins among equals.  An output is done when |error| <= threshold before the swap; with
    `same_sign`, when the swap would leave the sign of the first error; when there is no g or no p.  With m, a g whose group has no p
    left is passed over.
    """
    inputs, outputs = mask.shape
    kind, chunk = _INT[grow.dtype.itemsize], round(inputs**0.5)
    grow_keys = jnp.where(mask, 0, jnp.sign(grow).astype(kind) * _ordered(grow))
    # The least is the best; for a positive error those of negative contribution, in a group of m all.
    side = jnp.ones_like(grow_keys) if m else -jnp.sign(contribution).astype(kind)
    prune_keys = jnp.where(mask, side * (jnp.iinfo(kind).max - _ordered(prune)), 0)
    first_error = jnp.sum(jnp.where(mask, 0, contribution), axis=0)

    def at(index):
        return jnp.take_along_axis(contribution, index[None], axis=0, mode="clip")[0]

    def cycle(carry):
        t, error, active, grow, prune, swapped = carry
        g = _best(grow, error > 0)
        p = _best_in(prune.keys, g.index // m, jnp.ones_like(active)) if m else _best(prune, error > 0)
        after = error + at(p.index) - at(g.index)
        active &= (jnp.abs(error) > threshold) & g.ok
        if m is None:
            active &= p.ok
        if same_sign:
            active &= ~p.ok | (jnp.sign(after) == jnp.sign(first_error))
        swap = active & p.ok
        pair = jnp.where(swap[None], jnp.stack([g.index, p.index]), inputs)
        return _Carry(
            cycle=t + 1,
            error=jnp.where(swap, after, error),
            active=active,
            grow=_without(grow, g),
            prune=_without(prune, p),
            swapped=jax.lax.dynamic_update_slice_in_dim(swapped, pair[:, None], t, axis=1),
        )

    start = _Carry(
        cycle=jnp.int32(0),
        error=first_error,
        active=jnp.ones(outputs, bool),
        grow=_candidates(grow_keys, chunk),
        prune=_candidates(prune_keys, m or chunk, tournament=m is None),
        swapped=jnp.full((2, cycles, outputs), inputs, jnp.int32),
    )
    end = jax.lax.while_loop(lambda carry: (carry.cycle < cycles) & jnp.any(carry.active), cycle, start)
    grown, pruned = end.swapped
    out = jnp.broadcast_to(jnp.arange(outputs)[None], grown.shape)
    return mask.at[grown, out].set(True, mode="drop").at[pruned, out].set(False, mode="drop")
