"""SPPM-AS: the stochastic proximal point method with arbitrary sampling.

A cohort of clients has several communication rounds before the server draws the next cohort.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, PyTree, Shaped

from commjax.algorithms.fedavg import Client, Server, init
from commjax.core import checks, rounds
from commjax.core.base import Algorithm, AxisName, Key, Params, Spec, State
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


def check(hparams: HParams, n: int) -> None:
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


def refused(hparams: HParams) -> Array:
    """Whether the hyperparameters have a value that is not allowed; unlike `check`, it works for traced values.

    Args:
        hparams: the hyperparameters.

    Returns:
        A bool: gamma is not positive and finite, rounds is not a whole number >= 1, or tolerance is negative.
    """
    gamma, K, tolerance = (jnp.asarray(value).astype(float) for value in hparams[:3])
    return ~(checks.is_positive(gamma) & checks.is_count(K) & (tolerance >= 0))


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


def sppm_as(
    loss: Callable[[Params, Any], Array],
    sampling: Sampling,
    solver: Callable[[Any], Solver],
    hubs: Hubs | None = None,
    *,
    vectors: float = 1.0,
    received: float = 1.0,
    pool: Callable[[Any, Array], Any] | None = None,
) -> Algorithm:
    r"""SPPM-AS with any sampling and any inner solver.

        S ~ sampling,   f_S = sum_{i in S} f_i / (n p_i)
        x <- prox_{gamma f_S}(x) = argmin_z f_S(z) + |z - x|^2 / (2 gamma),   by K iterations of the solver

    x is the model, n the number of clients, and p_i the probability that client i is in the cohort S.

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
        The algorithm; its `init` is that of `fedavg`.

    Thesis: Alg. 8, Sec. 5.3.2 (convergence theorem).
    Holds if: f_i mu_i-strongly convex, the prox exact, any gamma > 0.  For an inexact prox, `theory.sppm` has bounds in
    terms of the residual, which the metrics report.
    Differs (docs/errata.md): P1 (1/(2 gamma)), P3 (weights 1/(n p_i)), P12 (evaluations are counted, not only
    iterations).
    """
    ledger = _Ledger(hubs, vectors, received)

    def step(
        key: Key, hparams: HParams, state: State, batch: PyTree, *, axis_name: AxisName = None
    ) -> tuple[State, Metrics]:
        server = state.server
        draw, n = cohort.draw_of(key, sampling, state, axis_name)
        check(hparams, n)
        members = cohort.gather(draw, state.clients.id, batch, axis_name, hubs)
        center, unravel = ravel_pytree(server.params)
        hub_count = 1 if hubs is None else hubs.count
        oracle = cohort.prox_oracle(
            loss, unravel, members, center, hparams.gamma, axis_name=axis_name, hubs=hub_count, pool=pool
        )
        # The prox term is 0 at the centre.  The solver's first evaluation is there too, so it is computed once.
        start = oracle.value_and_grad(center)[0]
        result = solver(hparams)(oracle, center, hparams.rounds, hparams.tolerance)
        bad = refused(hparams)
        result = result._replace(
            params=jnp.where(bad, center, result.params), code=jnp.where(bad, BROKE_DOWN, result.code)
        )
        params = unravel(result.params)
        return State(Server(server.round + 1, params), state.clients), ledger.metrics(draw, n, params, start, result)

    return Algorithm(checks.checked_init(init), step, spec=Spec(HParams, Server, Client, check))


class _Ledger(NamedTuple):
    """What one aggregation of SPPM-AS sends.

    Attributes:
        hubs: hubs between the clients and the server, or None.
        vectors: number of vectors that a client sends, besides the value.
        received: number of vectors that a client receives.
    """

    hubs: Hubs | None
    vectors: float
    received: float

    def metrics(self, draw: Draw, n: int, params: Params, start: Array, result: Result) -> Metrics:
        """The metrics of a round.

        Args:
            draw: the cohort.
            n: number of all clients.
            params: a pytree with the shapes and dtypes of the model.
            start: f_S at the start of the round.
            result: what the solver returned.

        Returns:
            The metrics.
        """
        vector_bits = cohort.upload_bits(draw, n, params)
        evaluations = result.evaluations.astype(vector_bits.dtype)
        met = jnp.zeros((), jnp.int32) if self.hubs is None else cohort.hubs_met(draw, self.hubs)
        hub_rounds = jnp.where(met == 1, 1, jnp.where(met > 1, result.evaluations, 0))
        model, value = rounds.bits_of(params), rounds.bits_of(start)
        links = (met * hub_rounds).astype(vector_bits.dtype)
        return Metrics(
            loss=start,
            bits_up=(self.vectors * vector_bits + cohort.upload_bits(draw, n, start)) * evaluations,
            bits_down=self.received * vector_bits * evaluations,
            local_rounds=result.evaluations,
            iterations=result.iterations,
            residual=result.residual,
            code=result.code,
            bits_hubs=links * jnp.where(met == 1, model, self.vectors * model + value),
            bits_hubs_down=links * jnp.where(met == 1, model, self.received * model),
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
    Differs (docs/errata.md): P11 (several hubs pay c2 at every evaluation), P12 (evaluations, not iterations).
    """
    inside, outside = (rounds.astype(metrics.bits_up.dtype) for rounds in (metrics.local_rounds, metrics.hub_rounds))
    return c1 * inside + c2 * outside


def flat_metrics(
    loss: Array, vector_bits: Array, *, rounds: Any, iterations: Any, residual: Array | None = None, code: Any = 0
) -> Metrics:
    """Metrics of a method that averages models over a cohort without hubs.

    A local round sends one vector down and one vector up.

    Args:
        loss: loss at the start of the round.
        vector_bits: bits of one model, mean over all clients (0 for a client outside the cohort).
        rounds: number of local rounds.
        iterations: number of iterations.
        residual: |grad| at the end; None is 0.
        code: code of the solver.

    Returns:
        The metrics.
    """
    rounds, iterations = jnp.asarray(rounds, jnp.int32), jnp.asarray(iterations, jnp.int32)
    spent = vector_bits * rounds.astype(vector_bits.dtype)
    return Metrics(
        loss=loss,
        bits_up=spent,
        bits_down=spent,
        local_rounds=rounds,
        iterations=iterations,
        residual=jnp.zeros_like(loss) if residual is None else residual,
        code=jnp.asarray(code, jnp.int32),
        bits_hubs=jnp.zeros_like(vector_bits),
        bits_hubs_down=jnp.zeros_like(vector_bits),
        hub_rounds=jnp.zeros((), jnp.int32),
    )
