"""FLIX: personalization by an explicit mixture of the global model and each client's own optimum."""

import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, PyTree, Shaped

from commjax.core import checks, local, rounds, tree
from commjax.core.base import Algorithm, Key, Params, Reducer, Spec, State
from commjax.core.local import Sample, ValueAndGrad


class HParams(NamedTuple):
    """Hyperparameters of FLIX.

    Attributes:
        gamma: stepsize.
        alpha: weight of the global model, one number or one per client (indexed by id).
    """

    gamma: Any
    alpha: Any


def check(hparams: HParams, n: int) -> None:
    """Raise a ValueError unless gamma > 0 and alpha in [0, 1].

    Args:
        hparams: the hyperparameters; alpha is one number or one per client.  Traced values are skipped.
        n: number of clients.
    """
    checks.scalars(hparams._replace(alpha=0.0))
    checks.positive("gamma", hparams.gamma)
    checks.per_client("alpha", hparams.alpha, n)
    checks.share("alpha", hparams.alpha)


class Server(NamedTuple):
    """What the server remembers.

    Attributes:
        round: number of rounds so far.
        params: x, the model.
    """

    round: Int[Array, ""]
    params: Params


class Client(NamedTuple):
    """What each client remembers.

    Attributes:
        id: number of the client.
        optimum: x_i*, the minimiser of f_i.
    """

    id: Int[Array, "*n"]
    optimum: PyTree


def own(value: Any, id: Any) -> Array:
    """A client's entry of a vector, or the number that all clients share.

    Args:
        value: one number or one per client, [n].
        id: number of the client.

    Returns:
        A scalar.
    """
    value = jnp.asarray(value)
    return value if value.ndim == 0 else value[id]


def mixture(alpha: Any, params: Params, optimum: PyTree) -> Params:
    """alpha x + (1 - alpha) x_i*, in the dtypes of x.

    Args:
        alpha: weight of the global model.
        params: x.
        optimum: x_i*, a pytree like x.

    Returns:
        A pytree like x.

    >>> mixture(0.25, jnp.full(2, 4.0), jnp.zeros(2)).tolist()
    [1.0, 1.0]
    """
    return tree.add_scaled(tree.scale(alpha, params), 1 - alpha, optimum)


def personalized(hparams: Any, state: State, at: Shaped[Array, "m"] | None = None) -> PyTree:
    """The models that the clients of FLIX or Scafflix deploy: alpha_i x + (1 - alpha_i) x_i*.

    Args:
        hparams: hyperparameters with `alpha`.
        state: the state of FLIX or Scafflix.
        at: numbers of the rows to compute, [m]; None is all n.

    Returns:
        A pytree like the params with a leading axis of clients.
    """
    rows = state.clients if at is None else jax.tree.map(lambda leaf: leaf[at], state.clients)
    if rows.optimum is None:
        return tree.repeat(state.server.params, len(rows.id))
    return jax.vmap(lambda row: mixture(own(hparams.alpha, row.id), state.server.params, row.optimum))(rows)


def objective(value_and_grad: ValueAndGrad) -> Callable[..., tuple[Array, Params]]:
    """The FLIX objective of one client.

        f_i(alpha x + (1 - alpha) x_i*),   with the gradient alpha grad f_i(alpha x + (1 - alpha) x_i*) in x

    Args:
        value_and_grad: `value_and_grad(params, data)` of one client returns the loss (a scalar) and the gradient (a
            pytree like `params`).

    Returns:
        A function (alpha, params, optimum, data) -> (value, gradient in x).

    Thesis: Sec. 3.1 (FLIX); alpha_i^2 L_i-smooth and alpha_i^2 mu_i-strongly convex (Sec. B.2).
    """

    def of(alpha, params, optimum, data):
        value, grad = rounds.evaluated(value_and_grad, mixture(alpha, params, optimum), data)
        return value, tree.scale(alpha, grad)

    return of


def flix(
    value_and_grad: ValueAndGrad,
    sample: Sample = local.all_rows,
    *,
    cohort: int | None = None,
    over: Callable = jax.vmap,
    reduce: Reducer | None = None,
) -> Algorithm:
    r"""Gradient descent (or SGD, with `sample`) on the FLIX objective.

        g_i = alpha_i grad f_i(alpha_i x + (1 - alpha_i) x_i*)
        x  <- x - gamma mean_i g_i

    Args:
        value_and_grad: as in `objective`.
        sample: `sample(key, data)` returns the rows of one client's data for one gradient.
        cohort: number of clients that take part in a round, drawn at random; None is all of them.
        over: maps the client step over the clients: `jax.vmap`, or `rounds.one_by_one` for large models.
        reduce: a reducer of `commjax.core.robust` that replaces mean_i g_i; None is the mean.

    Returns:
        The algorithm.  Its `init(params, ids, optimum)` takes x_i* with one row per client (`local_optima`,
        `local_sgd`).

    Thesis: Sec. 3.1 (FLIX).  Holds if: x_i* minimises f_i; gamma <= 1 / mean_i alpha_i^2 L_i.
    """
    value_and_mixed_grad = objective(value_and_grad)

    def init(params: Params, ids: Int[Array, "n"], optimum: PyTree | None = None) -> State:
        return State(Server(jnp.zeros((), jnp.int32), params), Client(ids, checked_optimum(params, ids, optimum)))

    def client_step(round, hparams, server, client, data):
        alpha = own(hparams.alpha, client.id)
        loss, grad = value_and_mixed_grad(alpha, server.params, client.optimum, sample(round.client_key, data))
        return client, round.send(grad), loss

    def server_step(hparams, server, grad):
        return server._replace(params=tree.add_scaled(server.params, -hparams.gamma, grad))

    def bits_down(server):
        return rounds.dense_bits(server.params)

    spec = Spec(HParams, Server, Client, check)
    return rounds.federated(init, client_step, server_step, bits_down, cohort, over, reduce=reduce, spec=spec)


def checked_optimum(params: Params, ids: Array, optimum: PyTree | None) -> PyTree:
    """The given x_i*; a ValueError unless there is one row per client, each of the structure of x.

    Args:
        params: x.
        ids: numbers of the clients, [n].
        optimum: x_i* with one row per client.

    Returns:
        `optimum`.
    """
    if optimum is None:
        raise ValueError("init needs optimum=, one row of x_i* per client: see flix.local_optima and flix.local_sgd")
    wanted = jax.tree.map(lambda leaf: (len(ids), *jnp.shape(leaf)), params)
    found = jax.tree.map(jnp.shape, optimum)
    if found != wanted:
        raise ValueError(f"optimum must have one row of the params for each of {len(ids)} clients, got shapes {found}")
    return optimum


def checked_alpha(alpha: ArrayLike) -> np.ndarray:
    """alpha in float64; a ValueError unless it is in [0, 1], one number or one per client."""
    alpha = np.asarray(alpha, np.float64)
    if alpha.ndim > 1 or not np.all((alpha >= 0) & (alpha <= 1)):
        raise ValueError(f"alpha={alpha}; allowed: one number in [0, 1], or one for each client")
    return alpha


def theoretical(L_i: Float[np.ndarray, "n"], alpha: ArrayLike) -> HParams:
    """gamma = 1 / mean_i alpha_i^2 L_i.

    Args:
        L_i: smoothness constants of the f_i.
        alpha: weight of the global model, one number or one per client.

    Returns:
        The hyperparameters.

    Thesis: Sec. 3.1.  Differs: S6 (here, and only here, the constant has alpha_i^2).

    >>> theoretical(np.array([2.0, 4.0]), 0.5).gamma
    1.3333333333333333
    """
    alpha = checked_alpha(alpha)
    curvature = float(np.mean(alpha**2 * L_i))
    if not curvature > 0:
        raise ValueError(
            f"alpha={alpha}, L_i={L_i}; allowed: at least one alpha_i L_i > 0, or there is nothing to minimise"
        )
    return HParams(1 / curvature, alpha if alpha.ndim else float(alpha))


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
    """x_i* = argmin f_i by gradient descent with stepsize 1/L_i, for all clients in one program.

    A client stops when |grad f_i| <= tolerance; its own number of iterations is reported.

    Args:
        value_and_grad: as in `objective`.
        params: where all clients start.
        data: the data of all clients, leading axis n.
        L_i: smoothness constants, one number or one per client.
        tolerance: on |grad f_i|.
        max_iterations: a client that needs more stops there, with `converged` False.

    Returns:
        The optima.

    Thesis: Sec. 3.3.4 (tolerance 1e-6, GD).  Holds if: f_i is L_i-smooth; strongly convex for a linear rate.
    Precision: in float32 |grad| stalls near 1e-7 times the scale of the data.  Choose a larger tolerance, or use
    float64.
    """
    if not tolerance > 0 or max_iterations < 0:
        raise ValueError(f"tolerance={tolerance}, max_iterations={max_iterations}; allowed: > 0 and >= 0")

    def one(L, data):
        def advance(carry):
            x, grad, iterations = carry
            x = tree.add_scaled(x, -1 / L, grad)
            return x, value_and_grad(x, data)[1], iterations + 1

        def going_on(carry):
            _, grad, iterations = carry
            return (tree.sq_norm(grad) > tolerance**2) & (iterations < max_iterations)

        x, grad, iterations = jax.lax.while_loop(
            going_on, advance, (params, value_and_grad(params, data)[1], jnp.zeros((), jnp.int32))
        )
        norm = jnp.sqrt(tree.sq_norm(grad))
        return LocalOptima(x, iterations, norm, norm <= tolerance)

    n = len(jax.tree.leaves(data)[0])
    return jax.jit(jax.vmap(one))(jnp.broadcast_to(jnp.asarray(L_i), (n,)), data)


def epoch_steps(data: PyTree, epochs: float | int, batch: int) -> int:
    """Number of steps of `batch` rows that make `epochs` epochs of the largest client: the `steps` of `local_sgd`.

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
    over: Callable = rounds.one_by_one,
) -> PyTree:
    """Approximate x_i* of a network: each client takes SGD steps from the same start.

    Args:
        key: random key of the rows.
        value_and_grad: as in `objective`.
        params: where all clients start.
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
def _sgd_of_all(value_and_grad: ValueAndGrad, sample: Sample, steps: int, over: Callable) -> Callable:
    """`local_sgd` as one program for all keys, stepsizes and starts."""
    train = local.sgd(value_and_grad, sample, steps)

    def every(key, stepsize, params, data):
        def one(id, data):
            return train(jax.random.fold_in(key, id), stepsize, params, data)[0]

        return over(one)(jnp.arange(len(jax.tree.leaves(data)[0])), data)

    return jax.jit(every)
