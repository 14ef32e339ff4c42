"""FLIX: personalization by an explicit mixture of the global model and each client's own optimum."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int, PyTree, Shaped

from commjax.algorithms.fedavg import Server, bits_down, first
from commjax.algorithms.local_optima import LocalOptima, epoch_steps, local_optima, local_sgd
from commjax.core import checks, local, rounds, tree
from commjax.core.base import Algorithm, ClientId, Params, Reducer, Round, Spec, State
from commjax.core.local import ClientResult, Over, Sample, ValueAndGrad

__all__ = [
    "Client",
    "HParams",
    "LocalOptima",
    "Server",
    "check",
    "checked_alpha",
    "checked_optimum",
    "client_value",
    "epoch_steps",
    "flix",
    "local_optima",
    "local_sgd",
    "mixture",
    "objective",
    "personalized",
    "theoretical",
]


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


class Client(NamedTuple):
    """What each client remembers.

    Attributes:
        id: number of the client.
        optimum: x_i*, the minimiser of f_i.
    """

    id: Int[Array, "*n"]
    optimum: PyTree


def client_value(values: Any, client: ClientId) -> Array:
    """A client's entry of a vector, or the number that all clients share.

    Args:
        values: one number or one per client, [n].
        client: number of the client.

    Returns:
        A scalar.
    """
    values = jnp.asarray(values)
    return values if values.ndim == 0 else values[client]


def mixture(alpha: Any, params: Params, optimum: PyTree) -> Params:
    """Mix the global model x and a client's optimum x_i*: alpha x + (1 - alpha) x_i*, in the dtypes of x.

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
    """Return the models that the clients of FLIX or Scafflix deploy: alpha_i x + (1 - alpha_i) x_i*.

    Args:
        hparams: hyperparameters with `alpha`.
        state: the state of FLIX or Scafflix.
        at: numbers of the rows to compute, [m]; None is all n.

    Returns:
        A pytree like the params with a leading axis of clients.
    """
    params = state.server.params
    clients = state.clients if at is None else jax.tree.map(lambda leaf: leaf[at], state.clients)
    if clients.optimum is None:
        return tree.repeat(params, len(clients.id))
    return jax.vmap(lambda row: mixture(client_value(hparams.alpha, row.id), params, row.optimum))(clients)


# (alpha, params, optimum, data of one client) -> (value, gradient in params)
Objective = Callable[[Any, Params, PyTree, Any], tuple[Array, Params]]


def objective(value_and_grad: ValueAndGrad) -> Objective:
    """Make the FLIX objective of one client, the loss at the mixture of the model x and the client's optimum x_i*.

        f_i(alpha x + (1 - alpha) x_i*),   with the gradient alpha grad f_i(alpha x + (1 - alpha) x_i*) in x

    Args:
        value_and_grad: `value_and_grad(params, data)` of one client returns the loss (a scalar) and the gradient (a
            pytree like `params`).

    Returns:
        A function (alpha, params, optimum, data) -> (value, gradient in x).

    Thesis: Sec. 3.1.  If f_i is L_i-smooth and mu_i-strongly convex, the objective is alpha_i^2 L_i-smooth and
    alpha_i^2 mu_i-strongly convex (Sec. B.2).
    """

    def value_and_mixed_grad(alpha: Any, params: Params, optimum: PyTree, data: Any) -> tuple[Array, Params]:
        value, grad = rounds.evaluated(value_and_grad, mixture(alpha, params, optimum), data)
        return value, tree.scale(alpha, grad)

    return value_and_mixed_grad


def flix(
    value_and_grad: ValueAndGrad,
    sample: Sample = local.all_rows,
    *,
    cohort: int | None = None,
    over: Over = jax.vmap,
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
        return State(first(params), Client(ids, checked_optimum(params, ids, optimum)))

    def client_step(round: Round, hparams: HParams, server: Server, client: Client, data: PyTree) -> ClientResult:
        alpha = client_value(hparams.alpha, client.id)
        loss, grad = value_and_mixed_grad(alpha, server.params, client.optimum, sample(round.client_key, data))
        return client, round.send(grad), loss

    def server_step(hparams: HParams, server: Server, grad: Params) -> Server:
        return server._replace(params=tree.add_scaled(server.params, -hparams.gamma, grad))

    spec = Spec(HParams, Server, Client, check)
    return rounds.federated(init, client_step, server_step, bits_down, cohort, over, reduce=reduce, spec=spec)


def checked_optimum(params: Params, ids: Array, optimum: PyTree | None) -> PyTree:
    """Return `optimum`, after a check: raise a ValueError unless it has one row like x per client.

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
    shapes = jax.tree.map(jnp.shape, optimum)
    if shapes != wanted:
        raise ValueError(f"optimum must have one row of the params for each of {len(ids)} clients, got shapes {shapes}")
    return optimum


def checked_alpha(alpha: ArrayLike) -> np.ndarray:
    """Return alpha in float64.  Raises a ValueError unless it is one number in [0, 1], or one per client."""
    alpha = np.asarray(alpha, np.float64)
    if alpha.ndim > 1 or not np.all((alpha >= 0) & (alpha <= 1)):
        raise ValueError(f"alpha={alpha}; allowed: one number in [0, 1], or one for each client")
    return alpha


def theoretical(L_i: Float[np.ndarray, "n"], alpha: ArrayLike) -> HParams:
    """Hyperparameters of FLIX from theory: gamma = 1 / mean_i alpha_i^2 L_i.

    Args:
        L_i: smoothness constants of the f_i, [n].
        alpha: weight of the global model, one number or one per client.

    Returns:
        The hyperparameters.

    Thesis: Sec. 3.1.  Differs (docs/errata.md): S6 (alpha_i^2 belongs to FLIX only; Scafflix has gamma_i = 1 / L_i).

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
