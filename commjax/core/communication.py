"""Communication over the client axis: `broadcast` down, `mean` up, and what depends on the rows of all devices.

The clients of one device are the rows of its arrays.  `axis_name` names the device axis.  It is an `Axis` if the last
rows are padding, and None if there is no device axis.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, PyTree, Shaped

from commjax.core.base import Axis, AxisName, Reducer


def plain_name(axis_name: AxisName) -> str | None:
    """Return the name of a device axis, as JAX's collectives take it.

    Args:
        axis_name: the device axis; None if there is none.

    Returns:
        The name, or None.

    >>> plain_name(Axis("clients", n=6))
    'clients'
    """
    return axis_name.name if isinstance(axis_name, Axis) else axis_name


def column(values: Shaped[Array, "n"], leaf: Shaped[Array, "n ..."]) -> Array:
    """Reshape a vector, one number for each row of `leaf`, so that it multiplies the rows.

    Args:
        values: [n].
        leaf: an array [n, ...].

    Returns:
        The values with the shape [n, 1, ..., 1].
    """
    return jnp.reshape(values, (-1,) + (1,) * (leaf.ndim - 1))


def broadcast(server: PyTree, axis_name: AxisName = None) -> PyTree:
    """Give every device its own copy of the server's values.

    Under `shard_map` the gradient at a *replicated* value would silently be summed over devices.  At a value that
    varies over the axis, each device gets the gradient of its own clients.

    Args:
        server: a pytree that is the same on all devices.
        axis_name: the device axis; None if there is none.

    Returns:
        The same values, marked as varying over `axis_name`.
    """
    axis = plain_name(axis_name)
    if axis is None:
        return server
    return jax.tree.map(lambda leaf: jax.lax.pcast(leaf, axis, to="varying"), server)


def mean(rows: PyTree, axis_name: AxisName = None, weights: Shaped[Array, "n"] | None = None) -> PyTree:
    """Average the rows of all clients on all devices.

        (1/n) sum_i row_i,  or with weights  (1/n) sum_i w_i row_i

    Args:
        rows: a pytree whose leaves have a leading axis, one row for each client of this device.
        axis_name: the device axis; None if there is none.
        weights: one number for each client of this device; None is 1 for each.

    Returns:
        A pytree without the leading axis, in the dtypes of `rows`, the same on all devices.

    >>> mean(jnp.arange(4.0)).item(), mean(jnp.arange(4.0), weights=jnp.array([0.0, 0.0, 0.0, 4.0])).item()
    (1.5, 3.0)
    """

    def leaf_mean(leaf: Array) -> Array:
        if weights is not None:
            if len(weights) != len(leaf):
                raise ValueError(f"weights must have one entry per row, got {len(weights)} for {len(leaf)} rows")
            leaf = leaf * column(weights, leaf).astype(leaf.dtype)
        if isinstance(axis_name, Axis):
            kept = jnp.where(column(real(len(leaf), axis_name), leaf), leaf, jnp.zeros((), leaf.dtype))
            return jax.lax.psum(jnp.sum(kept, axis=0), axis_name.name) / jnp.asarray(axis_name.n, leaf.dtype)
        local = jnp.mean(leaf, axis=0)
        return local if axis_name is None else jax.lax.pmean(local, axis_name)

    return jax.tree.map(leaf_mean, rows)


def mean_bits(bits: Shaped[Array, "n"], axis_name: AxisName = None, weights: Shaped[Array, "n"] | None = None) -> Array:
    """Average the bits of the clients' messages, exactly if they are equal.

    The plain `mean` is not exact: n times the bits need not be a float32 number.

    Args:
        bits: one number for each client of this device.
        axis_name: the device axis; None if there is none.
        weights: weights of `mean`.

    Returns:
        The mean over the clients of all devices.

    >>> mean_bits(jnp.full(1000, 674_720, jnp.float32)).item()
    674720.0
    """
    if weights is not None or isinstance(axis_name, Axis):
        return mean(bits, axis_name, weights)
    local = bits[0] + jnp.mean(bits - bits[0])
    return local if axis_name is None else jax.lax.pmean(local, axis_name)


def gathered(rows: PyTree, axis_name: AxisName = None) -> PyTree:
    """Collect the rows of all devices on every device.

    The rows are placed in an array of zeros and summed over the devices, because `shard_map` knows that a sum is the
    same on all devices.

    Args:
        rows: a pytree whose leaves have a leading axis, one row for each client of this device.
        axis_name: the device axis; None if there is none.

    Returns:
        The pytree with the rows of all devices, in the order of the devices.
    """
    axis = plain_name(axis_name)
    if axis is None:
        return rows
    devices, at = jax.lax.axis_size(axis), jax.lax.axis_index(axis)

    def leaf_gathered(leaf: Array) -> Array:
        wide = leaf.astype(jnp.int32) if leaf.dtype == bool else leaf
        this_device = (jnp.arange(devices, dtype=jnp.int32) == at).reshape(-1, *[1] * leaf.ndim)
        placed = jnp.where(this_device, wide[None], jnp.zeros((), wide.dtype))
        return jax.lax.psum(placed, axis).reshape(-1, *leaf.shape[1:]).astype(leaf.dtype)

    return jax.tree.map(leaf_gathered, rows)


def count(ids: Shaped[Array, "n"], axis_name: AxisName = None) -> int:
    """Return the number of clients on all devices, as a Python int.

    Args:
        ids: the ids on this device.
        axis_name: the device axis; None if there is none.

    Returns:
        n, without padding rows.
    """
    if isinstance(axis_name, Axis):
        return axis_name.n
    return ids.shape[0] * (1 if axis_name is None else jax.lax.axis_size(axis_name))


def real(local: int, axis_name: AxisName = None) -> Bool[Array, "m"]:
    """Say which rows of this device are clients, not padding.

    Args:
        local: number of rows on this device.
        axis_name: the device axis; None if there is none.

    Returns:
        A bool for each row.
    """
    if not isinstance(axis_name, Axis):
        return jnp.ones(local, bool)
    return jax.lax.axis_index(axis_name.name) * local + jnp.arange(local, dtype=jnp.int32) < axis_name.n


def reduced(
    reducer: Reducer | None,
    rows: PyTree,
    losses: Shaped[Array, "n"],
    axis_name: AxisName = None,
    weights: Shaped[Array, "n"] | None = None,
) -> tuple[PyTree, Array]:
    """Reduce the messages of all clients to one message, and their losses to the mean loss.

    Args:
        reducer: None is the mean.  A reducer ignores messages that are not `acceptable`, and their losses.
        rows: the messages, with a leading axis of clients.
        losses: one for each message.
        axis_name: the device axis; a reducer gets the rows of all devices, which costs n messages of traffic instead of
            one.
        weights: weights of `mean`; weight 0 marks a client that takes no part in the round.

    Returns:
        The message and the loss, the same on all devices.
    """
    if reducer is None:
        return mean((rows, losses), axis_name, weights)
    counts = real(len(losses), axis_name) & jax.vmap(acceptable)(rows)
    counts = counts if weights is None else counts & (weights > 0)
    clean = jax.tree.map(lambda leaf: jnp.where(column(counts, leaf), leaf, jnp.zeros((), leaf.dtype)), (rows, losses))
    (values, losses), counts = gathered((clean, counts), axis_name)
    number = jnp.sum(counts).astype(losses.dtype)
    return reducer.reduce(values, counts), jnp.sum(losses) / number


def acceptable(row: PyTree) -> Bool[Array, ""]:
    """Whether a server may use a message: its numbers and their squares are finite.

    The bound on a magnitude is `largest` of the dtype: 1.8e19 for float32 and bfloat16 messages, 1.3e154 for float64.
    A float16 message only has to be finite.  Sums and squares of accepted messages therefore stay finite.

    Args:
        row: one message.

    Returns:
        A bool.

    >>> bool(acceptable(jnp.array([1.0, -1e18]))), bool(acceptable(jnp.array([1e300])))
    (True, False)
    >>> bool(acceptable(jnp.array(jnp.nan)))
    False
    """

    def leaf_acceptable(leaf: Array) -> Array:
        if not jnp.issubdtype(leaf.dtype, jnp.inexact):
            return jnp.ones((), bool)
        return jnp.all(jnp.abs(leaf) <= jnp.asarray(largest(leaf.dtype), leaf.dtype))  # False for NaN

    return jnp.all(jnp.stack([leaf_acceptable(leaf) for leaf in jax.tree.leaves(row)] or [jnp.ones((), bool)]))


def largest(dtype: Any) -> float:
    """The largest magnitude that `acceptable` allows in a message of this dtype.

    It is the square root of the largest number of the dtype, or of float32 if the dtype has fewer bits.

    Args:
        dtype: a floating-point dtype.

    Returns:
        A number of at most the largest number of the dtype.
    """
    wide = dtype if jnp.finfo(dtype).bits > 32 else jnp.float32
    return min(float(jnp.finfo(dtype).max), float(jnp.finfo(wide).max) ** 0.5)


def dense_bits(params: PyTree) -> int:
    """Return the number of bits of a pytree that is sent uncompressed, as an exact int."""
    return sum(8 * leaf.dtype.itemsize * leaf.size for leaf in jax.tree.leaves(params))


def bits_of(params: PyTree) -> Array:
    """Return `dense_bits` as an array of the default float dtype, for `Message.bits`."""
    return jnp.asarray(dense_bits(params), jnp.zeros(()).dtype)
