"""How far a pruned layer's outputs are from the dense ones: |X W - X W~|_F.

Thesis: the objective (InpRecon), L2414.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from commjax.pruning.statistics import Statistics, wide

Matrix = Float[Array, "i o"]


class Error(NamedTuple):
    absolute: Float[Array, ""]  # |X W - X W~|_F
    relative: Float[Array, ""]  # divided by |X W|_F; 0 if nothing changed


@jax.jit
def of_activations(x: Float[Array, "*samples tokens i"], W: Matrix, pruned: Matrix) -> Error:
    """From inputs x: two products with the weights' shape.

    >>> error = of_activations(jnp.array([[3.0, 1.0]]), jnp.array([[1.0], [1.0]]), jnp.array([[1.0], [0.0]]))
    >>> float(error.absolute), float(error.relative)
    (1.0, 0.25)
    """
    x, W, pruned = _at_least_float32(x, W, pruned)

    def total(M):
        return jnp.sum(jnp.square(jnp.matmul(x, M, precision="highest")))

    return _error(total(W - pruned), total(W))


@jax.jit
def of_gram(stats: Statistics, W: Matrix, pruned: Matrix) -> Error:
    """From G = X^T X of `statistics.of(x, gram=True)`: |X M|_F^2 = sum_k M_:k^T G M_:k, without the activations."""
    if stats.gram is None:
        raise ValueError("stats has no gram; allowed: statistics made by of(x, gram=True)")
    gram, W, pruned = _at_least_float32(stats.gram, W, pruned)

    def total(M):
        return jnp.maximum(jnp.sum(M * jnp.matmul(gram, M, precision="highest")), 0)

    return _error(total(W - pruned), total(W))


def _at_least_float32(*arrays):
    dtype = wide(*(a.dtype for a in arrays))
    return [a.astype(dtype) for a in arrays]


def _error(changed, dense):
    return Error(jnp.sqrt(changed), jnp.where(changed == 0, 0, jnp.sqrt(changed / dense)))
