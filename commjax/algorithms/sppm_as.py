"""SPPM-AS: the stochastic proximal point method with arbitrary sampling; several communication rounds inside one cohort."""

from collections.abc import Callable
from typing import Any, NamedTuple

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
    """gamma: parameter of the prox; rounds (K): iterations of the inner solver at most; tolerance: on |grad| of its objective;

    rate: of a solver that has one.
    """

    gamma: Any
    rounds: Any
    tolerance: Any = 0.0
    rate: Any = 0.0


def check_hparams(hparams: HParams, n: int) -> None:
    """ValueError unless gamma > 0, rounds is a count, tolerance >= 0 and rate is finite."""
    checks.scalars(hparams)
    checks.positive("gamma", hparams.gamma)
    checks.count("rounds", hparams.rounds)
    checks.at_least_zero("tolerance", hparams.tolerance)
    checks.finite("rate", hparams.rate)


class Server(NamedTuple):
    round: Int[Array, ""]
    params: Params  # x


class Client(NamedTuple):
    id: Int[Array, "*n"]  # clients keep no state


class Metrics(NamedTuple):
    loss: Shaped[Array, "..."]  # f_S(x) of the cohort's weighted objective at the round's start, unbiased for f(x)
    bits_up: Shaped[Array, "..."]  # sent by one client in all local rounds, mean over clients
    bits_down: Shaped[Array, "..."]
    local_rounds: Shaped[Array, "..."]  # aggregations inside the cohort: gradients and trial values
    iterations: Shaped[Array, "..."]  # of the solver, which the thesis counts as K
    residual: Shaped[Array, "..."]  # |grad| of the prox objective where the solver stopped
    code: Shaped[Array, "..."]  # solvers.CONVERGED, OUT_OF_BUDGET or BROKE_DOWN
    bits_hubs: Shaped[Array, "..."]  # sent by all hubs of the cohort together to the server; 0 without hubs
    bits_hubs_down: Shaped[Array, "..."]  # sent to them by the server
    hub_rounds: Shaped[
        Array, "..."
    ]  # exchanges between hubs and server: 1 if one hub has the cohort, else local_rounds


def init(params: Params, ids: Int[Array, "n"]) -> State:
    """x, and who there is: clients keep no state."""
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

    `solver(hparams)` makes the inner solver, e.g. `lambda h: quasi_newton.bfgs()`, `lambda h: adaptive.adam(h.rate)` or
    `lambda h: solvers.gradient_descent(L + 1 / h.gamma)`.  `loss(params, data)` is one client's.  With `hubs` every
    aggregation has two levels and the hubs' bits are counted apart: a hub that has the whole cohort solves the prox by itself and
    tells the server the result, hubs that share a cohort exchange with the server at every evaluation.  `vectors` that a client sends in one aggregation beside
    the value: 1 + (d + 1) / 2 for `aicn` (the Hessian), `prox.federated.vectors_per_round` of solvers whose clients work by themselves.
    `received`: vectors that it is sent, x and what its local steps read besides, `prox.federated.vectors_down`.  `pool` changes the speed only: `pool(data, shares)` is one client's data whose loss is sum_i shares_i f_i, e.g. `stacked.pool`.

    Thesis: Alg. SPPM-AS (L2073), Thm (L2085).
    Holds if: f_i mu_i-strongly convex, the prox exact, any gamma > 0; inexact prox: `theory.sppm` and the residual in the metrics.
    Differs: P1 (1/(2 gamma)), P3 (weights 1/(n p_i)), P12 (evaluations are counted, not only iterations).
    """

    def step(key, hparams, state, batch, *, axis_name=None):
        check(gamma=hparams.gamma, rounds=hparams.rounds, tolerance=hparams.tolerance)
        server = state.server
        draw, n = cohort.draw_of(key, sampling, state, axis_name)
        members = cohort.gather(draw, state.clients.id, batch, axis_name, hubs)
        center, unravel = ravel_pytree(server.params)
        oracle = cohort.prox_oracle(
            loss, unravel, members, center, hparams.gamma, axis_name, 1 if hubs is None else hubs.count, pool
        )
        # At the centre the prox term is 0; it is the solver's first evaluation, computed once.
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
    """Every evaluation sends `received` vectors down and `vectors` with one value up."""
    price = cohort.price(draw, n, params)
    sent = vectors * price + cohort.price(draw, n, start)
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
    """Of each round, from what was counted: c1 an aggregation inside the cohort, c2 an exchange between hubs and server.

    Under one hub that is the thesis's c1 K + c2, over several (c1 + c2) K, and c1 K without hubs, with evaluations for K.

    Thesis: L2343.
    Differs: P11, P12.
    """
    inside, outside = (rounds.astype(metrics.bits_up.dtype) for rounds in (metrics.local_rounds, metrics.hub_rounds))
    return c1 * inside + c2 * outside


def flat_metrics(
    loss: Array, price: Array, rounds: Any, iterations: Any, residual: Array | None = None, code: Any = 0
) -> Metrics:
    """Of a method that averages models over a flat cohort: one vector a local round each way."""
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


_LEAST = {"gamma": "positive and finite", "alpha": "positive and finite", "stepsize": "positive and finite", "rounds": "K >= 1 local rounds, whole", "steps": "at least 1, whole", "tolerance": "at least 0"}  # fmt: skip


def _allowed(name: str, value: Any) -> Any:
    """For NumPy and JAX alike"""
    if name == "tolerance":
        return value >= 0
    return (value >= 1) & (value % 1 == 0) if name in ("rounds", "steps") else (value > 0) & (value < np.inf)


def check(**values: Any) -> None:
    """Numbers and arrays that are known when the step is traced are looked at; of the others `refused` tells."""
    for name, value in values.items():
        if not isinstance(value, Tracer) and not np.all(_allowed(name, np.asarray(value))):
            raise ValueError(f"{name}={value}; allowed: {_LEAST[name]}")


def refused(**values: Any) -> Array:
    """Whether stepsizes are not positive and finite, or counts not whole or below 1; traced values are allowed."""
    bad = jnp.zeros((), bool)
    for name, value in values.items():
        bad = bad | ~_allowed(name, jnp.asarray(value).astype(float))
    return bad


def hparams(gamma: float, rounds: int, tolerance: float = 0.0) -> HParams:
    """HParams that were looked at: gamma > 0, K >= 1, tolerance >= 0."""
    check(gamma=gamma, rounds=rounds, tolerance=tolerance)
    return HParams(gamma, rounds, tolerance)
