"""Convolutions that are fast on a CPU, also inside loops.

XLA on a CPU has a fast kernel for convolutions, for one layout of images and kernels.  It brings a convolution to this
layout only outside of loops.  In the body of a loop the gradients of a convolution are ten to forty times slower, and
local training is such a loop.  A convolution of many clients or groups is slow everywhere.

Here are three other forms: the fast kernel in its layout, client by client, where the kernel is small; matrix products
where the output is small, as in the gradient of a kernel; sums of shifted images where every feature has a kernel of
its own.
"""

import itertools
import math
from collections.abc import Sequence
from functools import partial, reduce
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core.primitives import conv_general_dilated_p
from jaxtyping import Array

_MOST_OFFSETS = 128  # Beyond, a program with a term for each would be too long.
_CHANNELS = 8  # The least for which a few rows more are no loss (`_more_rows`).
_MOST_BYTES, _CHUNK_BYTES = 2**24, 2**21  # Shifted images that do not fit in the cache are made in chunks that do.


def _by_lax(lhs: Array, rhs: Array, **params: Any) -> Array:
    return conv_general_dilated_p.bind(lhs, rhs, **params)


def program(lhs: Array, rhs: Array, **params: Any) -> Array:
    """The convolution of an equation `conv_general_dilated`, in the form that is fast on a CPU.

    Either the kernel is small or, in the gradient of a kernel, the output.
    """
    (n, c, *_), (o, _, *kernel), (_, f, *output) = params["dimension_numbers"]
    features, batches = params["feature_group_count"], params["batch_group_count"]
    shape = conv_general_dilated_p.abstract_eval(jax.typeof(lhs), jax.typeof(rhs), **params)[0]
    sizes = [math.prod(a.shape[axis] for axis in axes) for a, axes in ((shape, output), (rhs, kernel))]
    small, offsets = sizes[0] < sizes[1], min(sizes)
    if not jnp.issubdtype(shape.dtype, jnp.floating) or 0 in (*lhs.shape, *rhs.shape, *shape.shape):
        return _by_lax(lhs, rhs, **params)
    groups, axis = (features, c) if features > 1 else (batches, n)
    single = groups == lhs.shape[axis] == rhs.shape[o]  # one feature in, one out
    if groups > 1 and single and offsets <= _MOST_OFFSETS and small == (batches > 1):
        return _depthwise(lhs, rhs, shape.dtype, **params)
    one = partial(_products if small else _in_layout, **params | {"feature_group_count": 1, "batch_group_count": 1})
    if groups == 1:
        return one(lhs, rhs)
    lhs, rhs = _split(lhs, axis, groups), _split(rhs, o, groups)
    if small:
        out = jax.vmap(one, (axis, o), f)(lhs, rhs)
    else:
        one_by_one = lax.map(lambda pair: one(*pair), (jnp.moveaxis(lhs, axis, 0), jnp.moveaxis(rhs, o, 0)))
        out = jnp.moveaxis(one_by_one, 0, f)
    return out.reshape(shape.shape)


def _sum_dtype(dtype: Any) -> Any:
    """As in lax on a CPU, numbers of 16 bits are added up in 32 bits."""
    return dtype if dtype.itemsize >= 4 else jnp.dtype(jnp.float32)


def _split(a: Array, axis: int, size: int) -> Array:
    """Split an axis into `size` equal parts: [..., size, length / size, ...]."""
    return a.reshape(*a.shape[:axis], size, -1, *a.shape[axis + 1 :])


def _matrix(a: Array) -> Array:
    return a.reshape(-1, a.shape[-1])


def _in_layout(lhs: Array, rhs: Array, *, dimension_numbers: lax.ConvDimensionNumbers, **params: Any) -> Array:
    """lax's convolution in the layout of XLA's fast kernel, which XLA itself does not choose inside a loop."""
    (n, c, *s), (o, i, *t), out_spec = dimension_numbers
    last, ends = len(s) + 1, (0, len(s) + 1, *range(1, len(s) + 1))
    layout = lax.ConvDimensionNumbers(ends, (last, last - 1, *range(last - 1)), ends)
    images, kernel = lhs.transpose(n, *s, c), rhs.transpose(*t, i, o)
    rows, params["padding"] = _more_rows(images, kernel, **params)
    out = _by_lax(images, kernel, dimension_numbers=layout, **params)
    out = lax.slice_in_dim(out, 0, out.shape[1] - rows, axis=1)
    return out.transpose(np.argsort([out_spec[0], *out_spec[2:], out_spec[1]]))


def _more_rows(
    images: Array,
    kernel: Array,
    *,
    padding: Sequence[tuple[int, int]],
    window_strides: Sequence[int],
    lhs_dilation: Sequence[int],
    rhs_dilation: Sequence[int],
    **_: Any,
) -> tuple[int, Sequence[tuple[int, int]]]:
    """Rows of output to compute and discard, and the padding that makes them.

    XLA has two fast kernels.  The one that it prefers for images uses half of a machine with two cores (jax 0.10.2,
    measured), but never if the output has more rows than the image.  With few channels it is the better one.
    """
    (low, high), *others = padding
    height, span = images.shape[1], (kernel.shape[0] - 1) * rhs_dilation[0] + 1
    rows = height + span - (height + low + high)  # as many as make height + 1
    plain = len(others) == 1 and (*window_strides, *lhs_dilation) == (1, 1, 1, 1) and kernel.shape[-2] >= _CHANNELS
    if not plain or not 0 < rows <= height // 4:
        return 0, padding
    return rows, ((low, high + rows), *others)


def _products(
    lhs: Array,
    rhs: Array,
    *,
    window_strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int],
    rhs_dilation: Sequence[int],
    dimension_numbers: lax.ConvDimensionNumbers,
    precision: Any,
    preferred_element_type: Any,
    **_: Any,
) -> Array:
    """The convolution as a matrix product for each position q of its output along the first axis.

        out[q, r; n, o] = sum over k, l, c of image[stride q + dilation k, r, l; c, n] kernel[k, l; c, o]

    The images are shifted by all positions r along the other axes, side by side.  Many images are taken in chunks, so
    that the shifted ones stay in the cache.
    """
    (n, c, *s), (o, i, *t), out_spec = dimension_numbers
    x, kernel = lhs.transpose(c, *s, n), rhs.transpose(i, *t, o)
    x = _padded(x, padding, lhs_dilation)
    spans = [(size - 1) * by + 1 for size, by in zip(kernel.shape[1:-1], rhs_dilation)]
    counts = [(size - span) // by + 1 for size, span, by in zip(x.shape[1:-1], spans, window_strides)]

    def shifted(x: Array, axis: int, position: int) -> Array:
        start = position * window_strides[axis]
        return lax.slice_in_dim(x, start, start + spans[axis], rhs_dilation[axis], axis + 1)

    dtype = jnp.dtype(preferred_element_type or lhs.dtype)
    options = {"precision": precision, "preferred_element_type": _sum_dtype(dtype)}
    # The narrow factor comes first, which is faster.
    kernel_first = math.prod(counts[1:]) * x.shape[-1] >= kernel.shape[-1]

    def products(x: Array, kernel: Array) -> Array:
        for axis in range(len(counts) - 1, 0, -1):
            x = jnp.concatenate([shifted(x, axis, position) for position in range(counts[axis])], -1)
        parts = [_matrix(shifted(x, 0, position)) for position in range(counts[0])]
        kernel = _matrix(kernel)
        pairs = [(kernel, part) if kernel_first else (part, kernel) for part in parts]
        return jnp.stack([lax.dot_general(*pair, (((0,), (0,)), ((), ())), **options) for pair in pairs])

    size = math.prod(counts[1:]) * x.size * x.dtype.itemsize
    if size <= _MOST_BYTES:
        out = products(x, kernel)
    else:
        fitting = [by for by in range(1, len(x) + 1) if len(x) % by == 0 and size <= by * _CHUNK_BYTES] or [len(x)]
        chunks = _split(x, 0, fitting[0]), _split(kernel, 0, fitting[0])
        first, others = (tuple(a[part] for a in chunks) for part in (0, slice(1, None)))
        out = lax.scan(lambda total, chunk: (total + products(*chunk), None), products(*first), others)[0]
    out = jnp.swapaxes(out, 1, 2) if kernel_first else out
    out = out.reshape(*counts, lhs.shape[n], rhs.shape[o]).astype(dtype)
    return out.transpose(np.argsort([*out_spec[2:], *out_spec[:2]]))


def _depthwise(
    lhs: Array,
    rhs: Array,
    dtype: Any,
    *,
    window_strides: Sequence[int],
    padding: Sequence[tuple[int, int]],
    lhs_dilation: Sequence[int],
    rhs_dilation: Sequence[int],
    dimension_numbers: lax.ConvDimensionNumbers,
    batch_group_count: int,
    **_: Any,
) -> Array:
    """The convolution of each feature by itself, as sums of products of shifted images.

    out[n, q, g] = sum_k image[n, stride q + dilation k, g] kernel[k, g]
    out[q, g]    = sum_{c, k} image[c, stride q + dilation k, g] kernel[c, k, g]    for the gradient of a kernel
    """
    (n, c, *s), (o, i, *t), (m, f, *u) = dimension_numbers
    rows, features = (c, n) if batch_group_count > 1 else (n, c)
    wide = _sum_dtype(dtype)
    x = _padded(lhs.transpose(rows, *s, features).astype(wide), padding, lhs_dilation)
    kernel = rhs.transpose(i, *t, o).astype(wide)
    spans = [(size - 1) * by + 1 for size, by in zip(kernel.shape[1:-1], rhs_dilation)]
    counts = [(size - span) // by + 1 for size, span, by in zip(x.shape[1:-1], spans, window_strides)]
    moved, sizes, starts, steps = kernel.shape[1:-1], counts, rhs_dilation, window_strides
    if batch_group_count > 1:
        moved, sizes, starts, steps = counts, kernel.shape[1:-1], window_strides, rhs_dilation

    def shifted(position: Sequence[int]) -> Array:
        low = [place * by for place, by in zip(position, starts)]
        high = [start + (size - 1) * by + 1 for start, size, by in zip(low, sizes, steps)]
        return lax.slice(x, (0, *low, 0), (len(x), *high, x.shape[-1]), (1, *steps, 1))

    positions = itertools.product(*map(range, moved))
    if batch_group_count > 1:
        sums = [jnp.sum(shifted(position) * kernel, axis=tuple(range(x.ndim - 1))) for position in positions]
        out = jnp.stack(sums).reshape(1, *counts, -1)
    else:
        weights = kernel.reshape(1, *kernel.shape[1:-1], *[1] * len(moved), -1)
        out = reduce(jnp.add, (shifted(position) * weights[:, *position] for position in positions))
    return out.astype(dtype).transpose(np.argsort([m, *u, f]))


def _padded(x: Array, padding: Sequence[tuple[int, int]], dilation: Sequence[int]) -> Array:
    """Pad or cut images [rows, space, features], and put zeros between their entries."""
    pads = [(low, high, by - 1) for (low, high), by in zip(padding, dilation)]
    return lax.pad(x, jnp.zeros((), x.dtype), [(0, 0, 0), *pads, (0, 0, 0)])
