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
    """gamma: stepsize; alpha: weight of the global model, one number or one a client (indexed by id)."""

    gamma: Any
    alpha: Any


def check(hparams: HParams, n: int) -> None:
    """ValueError unless gamma > 0 and alpha in [0, 1], one number or one a client."""
    checks.scalars(hparams._replace(alpha=0.0))
    checks.positive("gamma", hparams.gamma)
    checks.per_client("alpha", hparams.alpha, n)
    checks.share("alpha", hparams.alpha)


class Server(NamedTuple):
    round: Int[Array, ""]
    params: Params  # x


class Client(NamedTuple):
    id: Int[Array, "*n"]
    optimum: PyTree  # x_i*


def own(value: Any, id: Any) -> Array:
    """A client's entry of a vector, or the number that all share"""
    value = jnp.asarray(value)
    return value if value.ndim == 0 else value[id]


def mixture(alpha: Any, params: Params, optimum: PyTree) -> Params:
    """alpha x + (1 - alpha) x_i*, in the dtypes of x

    >>> mixture(0.25, jnp.full(2, 4.0), jnp.zeros(2)).tolist()
    [1.0, 1.0]
    """
    return tree.add_scaled(tree.scale(alpha, params), 1 - alpha, optimum)


def personalized(hparams: Any, state: State, at: Shaped[Array, "m"] | None = None) -> PyTree:
    """What the clients deploy: one row of alpha_i x + (1 - alpha_i) x_i* each (of FLIX or Scafflix); `at`: of these rows only."""
    rows = state.clients if at is None else jax.tree.map(lambda leaf: leaf[at], state.clients)
    if rows.optimum is None:
        return tree.repeat(state.server.params, len(rows.id))
    return jax.vmap(lambda row: mixture(own(hparams.alpha, row.id), state.server.params, row.optimum))(rows)


def objective(value_and_grad: ValueAndGrad) -> Callable[..., tuple[Array, Params]]:
    """(alpha, params, optimum, data) -> f_i(alpha x + (1 - alpha) x_i*) and its gradient in x, alpha times that of f_i.

    Thesis: (FLIX), L1236; alpha_i^2 L_i-smooth and alpha_i^2 mu_i-strongly convex (L3685).
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

    `init(params, ids, optimum=...)` takes one row of x_i* per client (`local_optima`, `local_sgd`).  `cohort`: so many clients
    a round, drawn at random.  `reduce`: a reducer of `commjax.core.robust` instead of mean_i g_i.

    Thesis: FLIX (L1249).  Holds if: x_i* minimises f_i; gamma <= 1 / mean_i alpha_i^2 L_i.
    """
    value_and_mixed_grad = objective(value_and_grad)

    def init(params: Params, ids: Int[Array, "n"], optimum: PyTree | None = None) -> State:
        return State(Server(jnp.zeros((), jnp.int32), params), Client(ids, checked_optimum(params, ids, optimum)))

    def client_step(round, hparams, server, client, data):
        alpha = own(hparams.alpha, client.id)
        loss, grad = value_and_mixed_grad(alpha, server.params, client.optimum, sample(round.own_key, data))
        return client, round.send(grad), loss

    def server_step(hparams, server, grad):
        return server._replace(params=tree.add_scaled(server.params, -hparams.gamma, grad))

    def bits_down(server):
        return rounds.dense_bits(server.params)

    spec = Spec(HParams, Server, Client, check)
    return rounds.federated(init, client_step, server_step, bits_down, cohort, over, reduce=reduce, spec=spec)


def checked_optimum(params: Params, ids: Array, optimum: PyTree | None) -> PyTree:
    """One x_i* a client, of the structure of x"""
    if optimum is None:
        raise ValueError("init needs optimum=, one row of x_i* per client: see flix.local_optima and flix.local_sgd")
    wanted = jax.tree.map(lambda leaf: (len(ids), *jnp.shape(leaf)), params)
    found = jax.tree.map(jnp.shape, optimum)
    if found != wanted:
        raise ValueError(f"optimum must have one row of the params for each of {len(ids)} clients, got shapes {found}")
    return optimum


def checked_alpha(alpha: ArrayLike) -> np.ndarray:
    """alpha in [0, 1], or a ValueError"""
    alpha = np.asarray(alpha, np.float64)
    if alpha.ndim > 1 or not np.all((alpha >= 0) & (alpha <= 1)):
        raise ValueError(f"alpha={alpha}; allowed: one number in [0, 1], or one for each client")
    return alpha


def theoretical(L_i: Float[np.ndarray, "n"], alpha: ArrayLike) -> HParams:
    """gamma = 1 / mean_i alpha_i^2 L_i.

    Thesis: L1253.  Differs: S6 (here, and only here, the constant has alpha_i^2).

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
    """What each client found by itself."""

    params: PyTree  # x_i*, one row a client
    iterations: Int[Array, "n"]  # gradient evaluations of each client
    gradient_norm: Float[Array, "n"]
    converged: Bool[Array, "n"]  # |grad f_i| <= tolerance within max_iterations


def local_optima(
    value_and_grad: ValueAndGrad,
    params: Params,
    data: PyTree,
    L_i: ArrayLike,
    *,
    tolerance: float = 1e-6,
    max_iterations: int = 100_000,
) -> LocalOptima:
    """x_i* = argmin f_i by gradient descent with stepsize 1/L_i to |grad f_i| <= tolerance, all clients in one program.

    A client that has arrived waits; `iterations` is its own count, and stops at `max_iterations` (then `converged` is False).

    Thesis: L1573 (tolerance 1e-6, GD).  Holds if: f_i is L_i-smooth; strongly convex for a linear rate.
    Precision: in float32 |grad| stalls near 1e-7 times the scale of the data; ask for less, or use float64.
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
    """Steps of `batch` rows that make so many epochs of the largest client: the `steps` of `local_sgd`

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
    """x_i* of a network, nearly: `steps` steps of SGD by each client from the same start; one row a client.

    `steps` of so many epochs: `epoch_steps`.  Thesis: L1496 (batch 100, SGD).
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
