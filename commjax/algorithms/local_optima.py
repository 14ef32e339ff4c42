"""The local optima x_i* of the clients, which FLIX and Scafflix mix with the global model."""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, PyTree

from commjax.core import local, rounds, tree
from commjax.core.base import Key, Params
from commjax.core.local import Over, Sample, ValueAndGrad

# x, its gradient, and the number of steps so far
Carry = tuple[Params, Params, Array]


class LocalOptima(NamedTuple):
    """The local optima of all clients.

    Attributes:
        params: x_i*, one row per client.
        iterations: gradient steps of each client.
        gradient_norm: |grad f_i(x_i*)|.
        converged: whether |grad f_i| <= tolerance within the allowed number of iterations.
    """

    params: PyTree
    iterations: Int[Array, "n"]
    gradient_norm: Float[Array, "n"]
    converged: Bool[Array, "n"]


def local_optima(
    value_and_grad: ValueAndGrad,
    params: Params,
    data: PyTree,
    L_i: ArrayLike,
    *,
    tolerance: float = 1e-6,
    max_iterations: int = 100_000,
) -> LocalOptima:
    """Find x_i* = argmin f_i by gradient descent with stepsize 1/L_i, for all clients in one program.

    Each client stops when its |grad f_i| <= tolerance.

    Args:
        value_and_grad: as in `flix.objective`.
        params: the model from which all clients start.
        data: the data of all clients, leading axis n.
        L_i: smoothness constants, one number or one per client.
        tolerance: |grad f_i| at which a client stops.
        max_iterations: largest number of steps of a client; a client that needs more has `converged` False.

    Returns:
        The optima.

    Thesis: Sec. 3.3.4 (tolerance 1e-6, GD).  Holds if: f_i is L_i-smooth; strongly convex for a linear rate.
    Precision: in float32 |grad| stalls near 1e-7 times the scale of the data.  Choose a larger tolerance, or use
    float64.
    """
    if not tolerance > 0 or max_iterations < 0:
        raise ValueError(f"tolerance={tolerance}, max_iterations={max_iterations}; allowed: > 0 and >= 0")

    def client_optimum(L: Array, data: PyTree) -> LocalOptima:
        def advance(carry: Carry) -> Carry:
            x, grad, iterations = carry
            x = tree.add_scaled(x, -1 / L, grad)
            return x, value_and_grad(x, data)[1], iterations + 1

        def going_on(carry: Carry) -> Array:
            _, grad, iterations = carry
            return (tree.sq_norm(grad) > tolerance**2) & (iterations < max_iterations)

        x, grad, iterations = jax.lax.while_loop(
            going_on, advance, (params, value_and_grad(params, data)[1], jnp.zeros((), jnp.int32))
        )
        norm = jnp.sqrt(tree.sq_norm(grad))
        return LocalOptima(x, iterations, norm, norm <= tolerance)

    n = len(jax.tree.leaves(data)[0])
    return jax.jit(jax.vmap(client_optimum))(jnp.broadcast_to(jnp.asarray(L_i), (n,)), data)


def epoch_steps(data: PyTree, epochs: float | int, batch: int) -> int:
    """Return how many steps of `batch` rows are `epochs` epochs of the largest client, for `local_sgd`.

    Args:
        data: the data of all clients, leading axes n and rows.
        epochs: number of epochs.
        batch: number of rows of a step.

    Returns:
        The number of steps, rounded up.

    >>> epoch_steps({"x": jnp.ones((3, 50, 2))}, epochs=2, batch=20)
    5
    """
    if not epochs > 0 or batch < 1:
        raise ValueError(f"epochs={epochs}, batch={batch}; allowed: positive, and at least 1 row")
    return math.ceil(epochs * jax.tree.leaves(data)[0].shape[1] / batch)


def local_sgd(
    key: Key,
    value_and_grad: ValueAndGrad,
    params: Params,
    data: PyTree,
    *,
    stepsize: float,
    steps: int,
    sample: Sample,
    over: Over = rounds.one_by_one,
) -> PyTree:
    """Approximate x_i* of a network: each client takes SGD steps from the same start.

    Args:
        key: random key of the rows.
        value_and_grad: as in `flix.objective`.
        params: the model from which all clients start.
        data: the data of all clients, leading axis n.
        stepsize: stepsize of SGD.
        steps: number of steps (`epoch_steps` for a number of epochs).
        sample: `sample(key, data)` returns the rows of one client's data for one step.
        over: maps the training over the clients.

    Returns:
        The models, with one row per client.

    Thesis: Fig. 3.3 (batch 100, SGD).
    """
    return _sgd_of_all(value_and_grad, sample, steps, over)(key, stepsize, params, data)


@lru_cache(maxsize=8)
def _sgd_of_all(value_and_grad: ValueAndGrad, sample: Sample, steps: int, over: Over) -> Callable[..., PyTree]:
    """`local_sgd` as one program (key, stepsize, params, data) -> models, for all keys, stepsizes and starts."""
    train = local.sgd(value_and_grad, sample, steps)

    def train_all(key: Key, stepsize: Any, params: Params, data: PyTree) -> PyTree:
        def train_client(client: Array, data: PyTree) -> Params:
            return train(jax.random.fold_in(key, client), stepsize, params, data)[0]

        return over(train_client)(jnp.arange(len(jax.tree.leaves(data)[0])), data)

    return jax.jit(train_all)
