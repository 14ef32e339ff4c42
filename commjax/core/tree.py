"""Arithmetic on pytrees that keeps every leaf's dtype.

`optax.tree.add_scale` turns a bfloat16 tree into float32 when the scalar is a float32 array; these do not.
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
    """a + b"""
    return jax.tree.map(jnp.add, a, b)


def sub(a: PyTree, b: PyTree) -> PyTree:
    """a - b"""
    return jax.tree.map(jnp.subtract, a, b)


def scale(scalar: Scalar, a: PyTree) -> PyTree:
    """scalar * a, in the dtypes of a

    >>> scale(0.5, {"w": jnp.ones(2, jnp.bfloat16)})["w"].dtype
    dtype(bfloat16)
    """
    return jax.tree.map(lambda leaf: _like(scalar, leaf) * leaf, a)


def times(factor: float | int, a: PyTree) -> PyTree:
    """factor * a, rounded once: the factor of a leaf in half precision is a float32 number.

    `scale` would round the factor d/k of rand-k to bfloat16, and every value that is sent would be too large or too small by the
    same relative error, up to 2^-9.

    Args:
        factor: a number.
        a: arrays.

    Returns:
        Arrays in the dtypes of `a`.

    >>> times(257 / 255, jnp.full(1, 255.0, jnp.bfloat16)).item()  # 257 is not a bfloat16, 256 is
    256.0
    """

    def product(leaf: Array) -> Array:
        wide = leaf.dtype if leaf.dtype.itemsize >= 4 else jnp.float32
        return (jnp.asarray(factor, wide) * leaf.astype(wide)).astype(leaf.dtype)

    return jax.tree.map(product, a)


def add_scaled(a: PyTree, scalar: Scalar, b: PyTree) -> PyTree:
    """a + scalar * b, in the dtypes of a"""
    return jax.tree.map(lambda x, y: x + _like(scalar, x) * y.astype(x.dtype), a, b)


def cast(a: PyTree, like: PyTree) -> PyTree:
    """a in the dtypes of `like`"""
    return jax.tree.map(lambda x, y: x.astype(y.dtype), a, like)


def zeros_like(a: PyTree) -> PyTree:
    """0 of the same shapes and dtypes"""
    return jax.tree.map(jnp.zeros_like, a)


def vdot(a: PyTree, b: PyTree) -> Array:
    """<a, b> over all leaves

    >>> float(vdot({"u": jnp.ones(3)}, {"u": jnp.full(3, 2.0)}))
    6.0
    """
    products = jax.tree.leaves(jax.tree.map(jnp.vdot, a, b))
    wide = jnp.zeros(()).dtype  # leaves of several dtypes add up in the default one
    return sum((one.astype(wide) for one in products), start=jnp.zeros((), wide))


def sq_norm(a: PyTree) -> Array:
    """|a|^2 over all leaves"""
    return vdot(a, a)


def size(a: PyTree) -> int:
    """d: the number of coordinates

    >>> size({"w": jnp.ones((2, 3)), "b": jnp.ones(3)})
    9
    """
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(a))


def repeat(a: PyTree, n: int) -> PyTree:
    """n equal rows: the same tree with a leading client axis"""
    return jax.tree.map(lambda leaf: jnp.broadcast_to(jnp.asarray(leaf), (n, *jnp.shape(leaf))), a)


def varying_like(a: PyTree, *like: Array) -> PyTree:
    """a, marked as varying over the device axes of `like`: what the carry of a loop under `shard_map` has to be."""
    # By arithmetic that compiles to nothing: the type's own attribute has changed its name between JAX versions.
    first = jnp.stack([one.reshape(-1)[0] != one.reshape(-1)[0] for one in like])
    never = jnp.sum(first) > len(like)
    return jax.tree.map(lambda leaf: leaf + never.astype(leaf.dtype), a)


def once(a: PyTree) -> PyTree:
    """The same values, computed once and stored: every operation that reads them reads the same bits.

    XLA copies cheap arithmetic into each fused loop that needs its result, and rounds it there as the processor likes (a product
    and a sum may become one instruction).  One array can then have two values that differ in the last bit, and a
    selection that compares the array with an entry of itself goes wrong.  A selection, and whatever is sent and kept as
    well, begins with this function.

    On a CPU this is a call that XLA may not inline (an `optimization_barrier` is removed before loops are fused); elsewhere it is
    an `optimization_barrier`.

    Args:
        a: arrays.

    Returns:
        `a`, bit for bit.
    """
    if not jax.tree.leaves(a):
        return a
    return jax.lax.platform_dependent(a, cpu=_stored, default=jax.lax.optimization_barrier)


def ordered_sum(x: Float[Array, "d"]) -> Float[Array, ""]:
    """The sum of a vector, with additions in one order in every program, so that it has the same bits in all of them.

    `jnp.sum` adds in the order that suits the loop it is fused into: a sender and a receiver that compile different programs may
    then compute two norms of one vector.

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
