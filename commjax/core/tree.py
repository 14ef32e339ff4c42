"""Arithmetic on pytrees that keeps every leaf's dtype.

`optax.tree.add_scale` turns a bfloat16 tree into float32 if the scalar is a float32 array.  The functions of this
module do not.
"""

import math

import jax
import jax.numpy as jnp
from jax.experimental.xla_metadata import set_xla_metadata
from jaxtyping import Array, Float, PyTree, Shaped

Scalar = float | int | Shaped[Array, ""]


def _like(scalar: Scalar, leaf: Array) -> Array:
    return jnp.asarray(scalar).astype(leaf.dtype)


def add(a: PyTree, b: PyTree) -> PyTree:
    """Return a + b, leaf by leaf."""
    return jax.tree.map(jnp.add, a, b)


def sub(a: PyTree, b: PyTree) -> PyTree:
    """Return a - b, leaf by leaf."""
    return jax.tree.map(jnp.subtract, a, b)


def scale(scalar: Scalar, a: PyTree) -> PyTree:
    """Return scalar * a, in the dtypes of a.

    >>> scale(0.5, {"w": jnp.ones(2, jnp.bfloat16)})["w"].dtype
    dtype(bfloat16)
    """
    return jax.tree.map(lambda leaf: _like(scalar, leaf) * leaf, a)


def times(factor: float | int, a: PyTree) -> PyTree:
    """Return factor * a, in the dtypes of a.

    For leaves in half precision the product is computed in float32 and rounded once.  `scale` would round the factor,
    such as the d/k of rand-k, to bfloat16.  Every value that is sent would then have the same relative error, up to
    2^-9.

    Args:
        factor: a number.
        a: a pytree of arrays.

    Returns:
        A pytree of arrays in the dtypes of `a`.

    >>> times(257 / 255, jnp.full(1, 255.0, jnp.bfloat16)).item()  # 257 is not a bfloat16, 256 is
    256.0
    """

    def product(leaf: Array) -> Array:
        wide = leaf.dtype if leaf.dtype.itemsize >= 4 else jnp.float32
        return (jnp.asarray(factor, wide) * leaf.astype(wide)).astype(leaf.dtype)

    return jax.tree.map(product, a)


def add_scaled(a: PyTree, scalar: Scalar, b: PyTree) -> PyTree:
    """Return a + scalar * b, in the dtypes of a."""
    return jax.tree.map(lambda x, y: x + _like(scalar, x) * y.astype(x.dtype), a, b)


def cast(a: PyTree, like: PyTree) -> PyTree:
    """Cast a to the dtypes of `like`."""
    return jax.tree.map(lambda x, y: x.astype(y.dtype), a, like)


def zeros_like(a: PyTree) -> PyTree:
    """Return zeros with the shapes and dtypes of a."""
    return jax.tree.map(jnp.zeros_like, a)


def vdot(a: PyTree, b: PyTree) -> Array:
    """Return the inner product <a, b>, summed over all leaves, in the default float dtype.

    >>> float(vdot({"u": jnp.ones(3)}, {"u": jnp.full(3, 2.0)}))
    6.0
    """
    products = jax.tree.leaves(jax.tree.map(jnp.vdot, a, b))
    wide = jnp.zeros(()).dtype  # leaves may have different dtypes
    return sum((product.astype(wide) for product in products), start=jnp.zeros((), wide))


def sq_norm(a: PyTree) -> Array:
    """Return the squared Euclidean norm |a|^2, summed over all leaves."""
    return vdot(a, a)


def size(a: PyTree) -> int:
    """Return d, the number of coordinates of all leaves together.

    >>> size({"w": jnp.ones((2, 3)), "b": jnp.ones(3)})
    9
    """
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(a))


def repeat(a: PyTree, n: int) -> PyTree:
    """Repeat a tree n times along a new leading axis."""
    return jax.tree.map(lambda leaf: jnp.broadcast_to(jnp.asarray(leaf), (n, *jnp.shape(leaf))), a)


def varying_like(a: PyTree, *like: Array) -> PyTree:
    """Mark a as varying over the device axes of `like`, as the carry of a loop under `shard_map` must be.

    Args:
        a: a pytree of arrays.
        *like: arrays with at least one entry.

    Returns:
        The same values.
    """
    # The sum below never changes a value; it only carries the axes over.  The attribute of the type that holds them has
    # different names in different JAX versions.
    first = jnp.stack([leaf.reshape(-1)[0] != leaf.reshape(-1)[0] for leaf in like])
    never = jnp.sum(first) > len(like)
    return jax.tree.map(lambda leaf: leaf + never.astype(leaf.dtype), a)


def once(a: PyTree) -> PyTree:
    """Store values, so that every operation that reads them reads the same bits.

    XLA may copy cheap arithmetic into each fused loop that needs its result, and may round differently in each (a
    product and a sum may become one instruction).  One array can then have two values that differ in the last bit.
    This breaks a selection that compares an array with one of its entries, and a value that is both sent and kept.
    Such code calls this function first.

    On a CPU it is a call that XLA may not inline, because XLA removes an `optimization_barrier` before it fuses loops.
    Elsewhere it is an `optimization_barrier`.

    Args:
        a: a pytree of arrays.

    Returns:
        `a`, bit for bit.
    """
    if not jax.tree.leaves(a):
        return a
    return jax.lax.platform_dependent(a, cpu=_stored, default=jax.lax.optimization_barrier)


def ordered_sum(x: Float[Array, "d"]) -> Float[Array, ""]:
    """Sum a vector in a fixed order, so that every program computes the same bits.

    The order in `jnp.sum` depends on the loop that it is fused into.  A sender and a receiver with different programs
    could therefore compute different norms of one vector.

    Args:
        x: the vector.

    Returns:
        Its sum, in its dtype.

    >>> ordered_sum(jnp.arange(5.0)).item()
    10.0
    """
    lanes = max(1, math.isqrt(x.size))
    rows = -(-x.size // lanes)
    table = once(jnp.pad(x, (0, rows * lanes - x.size)).reshape(rows, lanes))

    def total(vectors: Array) -> Array:
        start = varying_like(jnp.zeros_like(vectors[0]), vectors)
        return jax.lax.fori_loop(0, len(vectors), lambda i, so_far: so_far + vectors[i], start)

    return total(total(table))


def _stored(a: PyTree) -> PyTree:
    with set_xla_metadata(inlineable="false"):
        return _same(a)


@jax.jit
def _same(a: PyTree) -> PyTree:
    return a
