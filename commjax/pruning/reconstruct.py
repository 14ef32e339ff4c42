"""Reconstruction error |X W - X W~|_F of a layer with inputs X, dense weights W and pruned weights W~.

Thesis: Sec. 6.3.1, the objective (InpRecon).
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from commjax.pruning.statistics import Statistics, wide

Matrix = Float[Array, "i o"]


class Error(NamedTuple):
    """Reconstruction error of one layer.

    Attributes:
        absolute: |X W - X W~|_F.
        relative: `absolute` divided by |X W|_F; 0 if nothing changed.
    """

    absolute: Float[Array, ""]
    relative: Float[Array, ""]


@jax.jit
def of_activations(x: Float[Array, "*samples tokens i"], W: Matrix, pruned: Matrix) -> Error:
    """Compute the reconstruction error from the inputs of the layer.

    >>> error = of_activations(jnp.array([[3.0, 1.0]]), jnp.array([[1.0], [1.0]]), jnp.array([[1.0], [0.0]]))
    >>> float(error.absolute), float(error.relative)
    (1.0, 0.25)

    Args:
        x: Inputs, [..., tokens, in].
        W: Dense weights [in, out].
        pruned: Pruned weights [in, out].

    Returns:
        The absolute and the relative error.
    """
    x, W, pruned = _at_least_float32(x, W, pruned)

    def total(M: Matrix) -> Float[Array, ""]:
        return jnp.sum(jnp.square(jnp.matmul(x, M, precision="highest")))

    return _error(total(W - pruned), total(W))


@jax.jit
def of_gram(stats: Statistics, W: Matrix, pruned: Matrix) -> Error:
    """Compute the reconstruction error from G = X^T X, without the activations X.

        |X M|_F^2 = sum_k M_:k^T G M_:k        for M = W - W~ and M = W

    Args:
        stats: Statistics made by `statistics.of(x, gram=True)`.
        W: Dense weights [in, out].
        pruned: Pruned weights [in, out].

    Returns:
        The absolute and the relative error.
    """
    if stats.gram is None:
        raise ValueError("stats has no gram; allowed: statistics made by of(x, gram=True)")
    gram, W, pruned = _at_least_float32(stats.gram, W, pruned)

    def total(M: Matrix) -> Float[Array, ""]:
        return jnp.maximum(jnp.sum(M * jnp.matmul(gram, M, precision="highest")), 0)

    return _error(total(W - pruned), total(W))


def _at_least_float32(*arrays: Float[Array, "..."]) -> list[Array]:
    dtype = wide(*(a.dtype for a in arrays))
    return [a.astype(dtype) for a in arrays]


def _error(changed: Float[Array, ""], dense: Float[Array, ""]) -> Error:
    return Error(jnp.sqrt(changed), jnp.where(changed == 0, 0, jnp.sqrt(changed / dense)))
