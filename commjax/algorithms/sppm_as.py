"""SPPM-AS: the stochastic proximal point method with arbitrary sampling.

A cohort of clients has several communication rounds before the next cohort is drawn.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Int, Shaped

from commjax.core import checks, rounds
from commjax.core.base import Algorithm, Params, Spec, State
from commjax.prox import cohort
from commjax.prox.cohort import Hubs
from commjax.prox.solvers.base import BROKE_DOWN, Result, Solver
from commjax.sampling.samplings import Draw, Sampling


class HParams(NamedTuple):
    """Hyperparameters of SPPM-AS.

    Attributes:
        gamma: parameter of the prox.
        rounds: K, the largest number of iterations of the inner solver.
        tolerance: the solver stops where |grad| of the prox objective is at most this.
        rate: learning rate of the solver, if it has one; a tuple of two for solvers with a rate on the clients and a
            rate on the server.
    """

    gamma: Any
    rounds: Any
    tolerance: Any = 0.0
    rate: Any = 0.0


def check_hparams(hparams: HParams, n: int) -> None:
    """Raise a ValueError unless gamma > 0, rounds is a whole number >= 1, tolerance >= 0 and rate is finite.

    Args:
        hparams: the hyperparameters.  Traced values are skipped.
        n: number of clients; not used.
    """
    checks.scalars(hparams._replace(rate=0.0))
    checks.positive("gamma", hparams.gamma)
    checks.count("rounds", hparams.rounds)
    checks.at_least_zero("tolerance", hparams.tolerance)
    for rate in jax.tree.leaves(hparams.rate):
        checks.scalar("rate", rate)
        checks.finite("rate", rate)


class Server(NamedTuple):
    """What the server remembers.

    Attributes:
        round: number of rounds so far.
        params: x, the model.
    """

    round: Int[Array, ""]
    params: Params


class Client(NamedTuple):
    """The clients, which keep no state.

    Attributes:
        id: number of the client.
    """

    id: Int[Array, "*n"]


class Metrics(NamedTuple):
    """What one round reports.

    Attributes:
        loss: f_S(x), the cohort's weighted objective at the start of the round; unbiased for f(x).
        bits_up: bits that one client sent in all local rounds, mean over clients.
        bits_down: bits that one client received in all local rounds, mean over clients.
        local_rounds: aggregations inside the cohort, for gradients and for trial values.
        iterations: iterations of the solver, which the thesis counts as K.
        residual: |grad| of the prox objective where the solver stopped.
        code: `CONVERGED`, `OUT_OF_BUDGET` or `BROKE_DOWN` of `commjax.prox.solvers.base`.
        bits_hubs: bits that all hubs of the cohort together sent to the server; 0 without hubs.
        bits_hubs_down: bits that the server sent to all hubs of the cohort together.
        hub_rounds: exchanges between hubs and server: 1 if one hub has the whole cohort, `local_rounds` if several hubs
            share it, 0 without hubs.
    """

    loss: Shaped[Array, "..."]
    bits_up: Shaped[Array, "..."]
    bits_down: Shaped[Array, "..."]
    local_rounds: Shaped[Array, "..."]
    iterations: Shaped[Array, "..."]
    residual: Shaped[Array, "..."]
    code: Shaped[Array, "..."]
    bits_hubs: Shaped[Array, "..."]
    bits_hubs_down: Shaped[Array, "..."]
    hub_rounds: Shaped[Array, "..."]


def init(params: Params, ids: Int[Array, "n"]) -> State:
    """The state before the first round.

    Args:
        params: x, the model.
        ids: numbers of the clients, [n].

    Returns:
        The state.
    """
    return State(Server(jnp.zeros((), jnp.int32), params), Client(ids))


def sppm_as(
    loss: Callable[[Params, Any], Array],
    sampling: Sampling,
    solver: Callable[[Any], Solver],
    hubs: Hubs | None = None,
    vectors: float = 1.0,
    received: float = 1.0,
    pool: Callable[[Any, Array], Any] | None = None,
) -> Algorithm:
    r"""SPPM-AS with any sampling and any inner solver.

        S ~ sampling,   f_S = sum_{i in S} f_i / (n p_i)
        x <- prox_{gamma f_S}(x) = argmin_z f_S(z) + |z - x|^2 / (2 gamma),   by K iterations of the solver

    Args:
        loss: `loss(params, data)` returns the loss of one client, a scalar.
        sampling: draws the cohort S.
        solver: `solver(hparams)` returns the inner solver, e.g. `lambda h: quasi_newton.bfgs()`,
            `lambda h: adaptive.adam(h.rate)` or `lambda h: solvers.gradient_descent(L + 1 / h.gamma)`.
        hubs: hubs between the clients and the server; None is no hubs.  With hubs every aggregation has two levels, and
            the hubs' bits are counted separately.  A hub that has the whole cohort solves the prox by itself and sends
            the result to the server.  Hubs that share a cohort exchange with the server at every evaluation.
        vectors: number of vectors that a client sends in one aggregation, besides the value.  It is 1 + (d + 1) / 2 for
            `aicn`, which sends the Hessian, and `federated.vectors_per_round` for solvers with local steps.
        received: number of vectors that a client receives in one aggregation: x, and what its local steps need besides
            x (`federated.vectors_down`).
        pool: `pool(data, shares)` merges the data of several clients into one client's data whose loss is
            sum_i shares_i f_i, e.g. `stacked.pool(size)`.  It changes the speed only.

    Returns:
        The algorithm; its `init` is the function `init` of this module.

    Thesis: Alg. 8, Sec. 5.3.2 (convergence theorem).
    Holds if: f_i mu_i-strongly convex, the prox exact, any gamma > 0; inexact prox: `theory.sppm` and the residual in
    the metrics.
    Differs: P1 (1/(2 gamma)), P3 (weights 1/(n p_i)), P12 (evaluations are counted, not only iterations).
    """

    def step(key, hparams, state, batch, *, axis_name=None):
        check(gamma=hparams.gamma, rounds=hparams.rounds, tolerance=hparams.tolerance)
        server = state.server
        draw, n = cohort.draw_of(key, sampling, state, axis_name)
        members = cohort.gather(draw, state.clients.id, batch, axis_name, hubs)
        center, unravel = ravel_pytree(server.params)
        oracle = cohort.prox_oracle(
            loss,
            unravel,
            members,
            center,
            hparams.gamma,
            axis_name=axis_name,
            hubs=1 if hubs is None else hubs.count,
            pool=pool,
        )
        # The prox term is 0 at the centre.  The solver's first evaluation is there too, so it is computed once.
        start = oracle.value_and_grad(center)[0]
        result = solver(hparams)(oracle, center, hparams.rounds, hparams.tolerance)
        bad = refused(gamma=hparams.gamma, rounds=hparams.rounds, tolerance=hparams.tolerance)
        result = result._replace(
            params=jnp.where(bad, center, result.params), code=jnp.where(bad, BROKE_DOWN, result.code)
        )
        metrics = _metrics(start, result, draw, n, server.params, vectors, received, hubs)
        return State(Server(server.round + 1, unravel(result.params)), state.clients), metrics

    return Algorithm(checks.checked_init(init), step, spec=Spec(HParams, Server, Client, check_hparams))


def _metrics(
    start: Array, result: Result, draw: Draw, n: int, params: Params, vectors: float, received: float, hubs: Hubs | None
) -> Metrics:
    """The metrics of a round.

    In every evaluation a client receives `received` vectors and sends `vectors` of them and one value.
    """
    price = cohort.upload_bits(draw, n, params)
    sent = vectors * price + cohort.upload_bits(draw, n, start)
    evaluations = result.evaluations.astype(price.dtype)
    met = jnp.zeros((), jnp.int32) if hubs is None else cohort.hubs_met(draw, hubs)
    hub_rounds = jnp.where(met == 1, 1, jnp.where(met > 1, result.evaluations, 0))
    model, value = rounds.bits_of(params), rounds.bits_of(start)
    links = (met * hub_rounds).astype(price.dtype)
    return Metrics(
        loss=start,
        bits_up=sent * evaluations,
        bits_down=received * price * evaluations,
        local_rounds=result.evaluations,
        iterations=result.iterations,
        residual=result.residual,
        code=result.code,
        bits_hubs=links * jnp.where(met == 1, model, vectors * model + value),
        bits_hubs_down=links * jnp.where(met == 1, model, received * model),
        hub_rounds=hub_rounds,
    )


def cost(metrics: Metrics, c1: float, c2: float) -> Array:
    """The cost of each round, from the counted aggregations and exchanges.

        cost = c1 local_rounds + c2 hub_rounds

    This is the thesis's c1 K + c2 under one hub, (c1 + c2) K under several hubs and c1 K without hubs, where K is the
    number of evaluations.

    Args:
        metrics: the metrics of a round, or of many.
        c1: cost of an aggregation inside the cohort.
        c2: cost of an exchange between the hubs and the server.

    Returns:
        The costs, of the shape of the metrics.

    Thesis: Sec. 5.4.5.
    Differs: P11, P12.
    """
    inside, outside = (rounds.astype(metrics.bits_up.dtype) for rounds in (metrics.local_rounds, metrics.hub_rounds))
    return c1 * inside + c2 * outside


def flat_metrics(
    loss: Array, price: Array, rounds: Any, iterations: Any, residual: Array | None = None, code: Any = 0
) -> Metrics:
    """Metrics of a method that averages models over a cohort without hubs.

    A local round sends one vector down and one vector up.

    Args:
        loss: loss at the start of the round.
        price: bits of one model, mean over all clients (0 for a client outside the cohort).
        rounds: number of local rounds.
        iterations: number of iterations.
        residual: |grad| at the end; None is 0.
        code: code of the solver.

    Returns:
        The metrics.
    """
    rounds, iterations = jnp.asarray(rounds, jnp.int32), jnp.asarray(iterations, jnp.int32)
    spent = price * rounds.astype(price.dtype)
    return Metrics(
        loss=loss,
        bits_up=spent,
        bits_down=spent,
        local_rounds=rounds,
        iterations=iterations,
        residual=jnp.zeros_like(loss) if residual is None else residual,
        code=jnp.asarray(code, jnp.int32),
        bits_hubs=jnp.zeros_like(price),
        bits_hubs_down=jnp.zeros_like(price),
        hub_rounds=jnp.zeros((), jnp.int32),
    )


_LEAST = {
    "gamma": "positive and finite",
    "alpha": "positive and finite",
    "stepsize": "positive and finite",
    "rounds": "K >= 1 local rounds, whole",
    "steps": "at least 1, whole",
    "tolerance": "at least 0",
}


def _allowed(name: str, value: Any) -> Any:
    """Whether a value is allowed, for NumPy and JAX arrays alike."""
    if name == "tolerance":
        return value >= 0
    return (value >= 1) & (value % 1 == 0) if name in ("rounds", "steps") else (value > 0) & (value < np.inf)


def check(**values: Any) -> None:
    """Raise a ValueError for a value that is not allowed.

    Args:
        **values: numbers or arrays by the name of the hyperparameter.  Traced values are skipped: see `refused`.
    """
    for name, value in values.items():
        if not isinstance(value, Tracer) and not np.all(_allowed(name, np.asarray(value))):
            raise ValueError(f"{name}={value}; allowed: {_LEAST[name]}")


def refused(**values: Any) -> Array:
    """Whether a value is not allowed, for traced values too.

    Args:
        **values: numbers or arrays by the name of the hyperparameter, as for `check`.

    Returns:
        True where a stepsize is not positive and finite, a count is not a whole number >= 1, or a tolerance is
        negative.
    """
    bad = jnp.zeros((), bool)
    for name, value in values.items():
        bad = bad | ~_allowed(name, jnp.asarray(value).astype(float))
    return bad


def hparams(gamma: float, rounds: int, tolerance: float = 0.0) -> HParams:
    """Hyperparameters that were validated: gamma > 0, K >= 1, tolerance >= 0.

    Args:
        gamma: parameter of the prox.
        rounds: K, the largest number of iterations of the inner solver.
        tolerance: the solver stops where |grad| of the prox objective is at most this.

    Returns:
        The hyperparameters.
    """
    check(gamma=gamma, rounds=rounds, tolerance=tolerance)
    return HParams(gamma, rounds, tolerance)
