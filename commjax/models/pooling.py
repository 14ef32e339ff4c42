"""Maximum pooling with gradients that are fast on a CPU: XLA's own visit every window one after another."""

import itertools
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend.core.primitives import ge_p, select_and_scatter_add_p
from jaxtyping import Array

_MOST_OFFSETS = 64  # Beyond, a program with a term for each would be too long.


def scattered(
    source: Array,
    image: Array,
    *,
    select_prim: Any,
    window_dimensions: Sequence[int],
    window_strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
) -> Array:
    """The equation `select_and_scatter_add`: add each source to the first largest (or smallest) entry of its window."""
    window, stride = window_dimensions, window_strides
    offsets = list(itertools.product(*map(range, window)))
    if len(offsets) > _MOST_OFFSETS or not jnp.issubdtype(image.dtype, jnp.floating):
        return select_and_scatter_add_p.bind(
            source,
            image,
            select_prim=select_prim,
            window_dimensions=window,
            window_strides=stride,
            padding=padding,
        )
    worst = jnp.array(-jnp.inf if select_prim is ge_p else jnp.inf, image.dtype)
    padded = lax.pad(image, worst, [(low, high, 0) for low, high in padding])

    def entries(offset: Sequence[int]) -> Array:
        ends = [start + (size - 1) * by + 1 for start, size, by in zip(offset, source.shape, stride)]
        return lax.slice(padded, offset, ends, stride)

    best, first = entries(offsets[0]), jnp.zeros(source.shape, jnp.int8)
    for number, offset in enumerate(offsets[1:], 1):
        entry = entries(offset)
        stays = select_prim.bind(best, entry)
        best, first = jnp.where(stays, best, entry), jnp.where(stays, first, jnp.int8(number))
    none = jnp.zeros((), source.dtype)
    total: Any = none
    for number, offset in enumerate(offsets):
        part = jnp.where(first == number, source, none)
        pads = []
        for start, by, size, count in zip(offset, stride, padded.shape, source.shape):
            pads.append((start, size - start - (count - 1) * by - 1, by - 1))
        total = total + lax.pad(part, none, pads)
    ends = [low + size for (low, _), size in zip(padding, image.shape)]
    return lax.slice(total, [low for low, _ in padding], ends)
