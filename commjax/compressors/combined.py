"""Compressors that are built from another compressor."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from commjax.compressors.exact_laws import Law
from commjax.compressors.vectors import payload_bytes
from commjax.core import tree
from commjax.core.base import ClientId, Compressor, Constants, Key, Message


def scaled(factor: float, compressor: Compressor) -> Compressor:
    """Scale the output of a compressor by a constant factor lambda.

        C'(x) = lambda C(x)

    Both sides know the factor, so it is not sent.
    Thesis: Prop. 2.2.1.
    Differs (docs/errata.md): E7 (eta' is in [0, 1)).

    Args:
        factor: lambda, 0 < lambda <= 1.
        compressor: C, in C(eta, omega).

    Returns:
        A compressor in C(lambda eta + 1 - lambda, lambda^2 omega), with lambda^2 omega_ran.

    >>> from commjax.compressors import rand_k
    >>> round(scaled(0.1, rand_k(1)).constants(10).omega, 12)  # keeps one entry unchanged
    0.09
    """
    if not 0 < factor <= 1:
        raise ValueError(f"scaled: factor must be in (0, 1], got {factor}")

    def compress(key: Key, x: PyTree, id: ClientId = 0, n: int = 1) -> Message:
        value, bits = compressor.compress(key, x, id, n)
        # The inner value is rounded first.  Otherwise XLA would merge the two factors, and the value would differ from
        # the decoded one.
        return Message(tree.once(tree.times(factor, tree.once(value))), bits)

    def decode(key: Key, data: bytes, like: PyTree, id: ClientId = 0, n: int = 1) -> PyTree:
        return tree.times(factor, jax.tree.map(jnp.asarray, compressor.decode(key, data, like, id, n)))

    def constants(d: Any, n: int = 1) -> Constants:
        eta, omega, omega_ran = compressor.constants(d, n)
        return Constants(factor * eta + 1 - factor, factor**2 * omega, factor**2 * omega_ran)

    def outcomes(xs: np.ndarray) -> Law:
        assert compressor.outcomes is not None
        probability, values = compressor.outcomes(xs)
        return probability, factor * values

    return compressor._replace(
        name=f"{factor:g} {compressor.name}",
        compress=compress,
        constants=constants,
        decode=decode,
        outcomes=compressor.outcomes and outcomes,
    )


def rounded(compressor: Compressor, dtype: Any = jnp.float32) -> Compressor:
    """Round x to `dtype` before compressing it, so that a float64 run sends numbers of fewer bits.

        C'(x) = C(round(x))

    With u the unit roundoff of `dtype`, Minkowski's inequality maps C(eta, omega) to

        C(eta + u (1 + eta), (1+u)^2 omega),   and omega_ran to (1+u)^2 omega_ran.

    Holds if: no entry overflows or is subnormal in `dtype`.  As everywhere, C's own arithmetic is taken as exact.

    Args:
        compressor: C, in C(eta, omega).
        dtype: the floating-point dtype that is sent.

    Returns:
        A compressor whose values have the dtypes of its input.  It has no `outcomes`.
    """
    unit = float(jnp.finfo(dtype).eps) / 2

    def down(x: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: leaf.astype(dtype), x)

    def zeros(like: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: np.zeros(leaf.shape, dtype), like)

    def shapes(like: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), like)

    def up(value: PyTree, like: PyTree) -> PyTree:
        return jax.tree.map(lambda leaf, shape: leaf.astype(shape.dtype), value, like)

    def compress(key: Key, x: PyTree, id: ClientId = 0, n: int = 1) -> Message:
        value, bits = compressor.compress(key, down(x), id, n)
        return Message(up(value, x), bits)

    def constants(d: Any, n: int = 1) -> Constants:
        eta, omega, omega_ran = compressor.constants(d, n)
        return Constants(eta + unit * (1 + eta), (1 + unit) ** 2 * omega, (1 + unit) ** 2 * omega_ran)

    def encode(key: Key, x: PyTree, id: ClientId = 0, n: int = 1) -> bytes:
        return compressor.encode(key, down(x), id, n)

    def decode(key: Key, data: bytes, like: PyTree, id: ClientId = 0, n: int = 1) -> PyTree:
        return up(compressor.decode(key, data, zeros(like), id, n), like)

    def length(key: Key, like: PyTree, id: ClientId = 0, n: int = 1) -> int:
        return payload_bytes(compressor, key, shapes(like), id, n)

    return compressor._replace(
        name=f"{compressor.name} in {jnp.dtype(dtype).name}",
        compress=compress,
        constants=constants,
        encode=encode,
        decode=decode,
        outcomes=None,
        length=length,
    )
