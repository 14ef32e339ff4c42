"""SPPM-AS: the stochastic proximal point method with arbitrary sampling; several communication rounds inside one cohort."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Int, PyTree, Shaped

from commjax import clients
from commjax.base import Algorithm, Params, State
from commjax.cohorts import Draw, Sampling
from commjax.prox import solvers
from commjax.prox.solvers import LocalOracle, Oracle, Solver
from commjax.theory import sppm as theory


class HParams(NamedTuple):
    """gamma: parameter of the prox; rounds (K): iterations of the inner solver at most; tolerance: on |grad| of its objective;

    rate: of a solver that has one.
    """

    gamma: Any
    rounds: Any
    tolerance: Any = 0.0
    rate: Any = 0.0


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
    bits_hubs: Shaped[Array, "..."]  # sent by all hubs of the cohort together in all local rounds; 0 without hubs


class _Cohort(NamedTuple):
    """Rows of the cohort's clients, their weights 1/(n p_i) (0 for rows that take no part), and their hubs."""

    data: PyTree
    weights: Shaped[Array, "m"]
    hub: Int[Array, "m"] | None = None


class Hubs(NamedTuple):
    """Server-hub-client topology: client i talks to hub `of[i]` only, hubs add up what they hear and pass one vector on.

    Thesis: Fig. L2318.
    """

    of: np.ndarray  # [n], from 0 to count - 1
    count: int

    @staticmethod
    def make(of: Any) -> "Hubs":
        """Hubs are numbered 0, 1, 2, ... and none is empty.

        >>> Hubs.make([0, 0, 1]).count
        2
        """
        found = np.asarray(of)
        used = np.unique(found)
        if found.ndim != 1 or not np.array_equal(used, np.arange(len(used))):
            raise ValueError(f"hubs={found}; allowed: one number a client, every number from 0 on used")
        return Hubs(found, len(used))


def _gather(draw: Draw, ids, batch, axis_name, hubs: Hubs | None = None) -> _Cohort:
    """Off a mesh the m drawn rows; on a mesh all rows of the device, because who is where is not known at compile time."""
    of = (lambda at: None) if hubs is None else (lambda at: jnp.asarray(hubs.of)[at])
    if axis_name is None:
        place = jnp.argsort(ids)[draw.ids]  # ids may stand in any order
        return _Cohort(jax.tree.map(lambda leaf: leaf[place], batch), draw.weights, of(draw.ids))
    n = clients.count(ids, axis_name)
    weights = jnp.zeros(n, draw.weights.dtype).at[draw.ids].add(jnp.where(draw.mask, draw.weights, 0))
    return _Cohort(batch, weights[ids], of(ids))


def _sum(rows: PyTree, cohort: _Cohort, weights: Array, axis_name: str | None, hubs: int = 1) -> PyTree:
    """sum_i weights_i row_i over all devices; with hubs in two levels, each hub's clients first"""
    hub = cohort.hub
    if hub is None:
        return clients.mean(rows, axis_name, weights * clients.count(weights, axis_name))

    def one(leaf):
        weighted = leaf * weights.reshape(-1, *(1,) * (leaf.ndim - 1))
        at_hubs = jax.ops.segment_sum(weighted, hub, hubs)
        return jnp.sum(at_hubs if axis_name is None else jax.lax.psum(at_hubs, axis_name), axis=0)

    return jax.tree.map(one, rows)


def prox_oracle(
    loss: Callable,
    unravel: Callable,
    cohort: _Cohort,
    center: Array,
    gamma: Any,
    axis_name: str | None = None,
    hubs: int = 1,
    pool: Callable | None = None,
) -> Oracle:
    """F(x) = sum_i w_i f_i(x) + |x - center|^2 / (2 gamma), its derivatives, and the same client by client."""
    gamma = jnp.asarray(gamma, center.dtype)
    weights = cohort.weights.astype(center.dtype)

    def one(x, data):
        return loss(unravel(x), data)

    def summed(function):
        """One aggregation: each client's part at the same x, weighted and summed."""

        def at(x):
            x = clients.broadcast(x, axis_name)
            return _sum(jax.vmap(function, in_axes=(None, 0))(x, cohort.data), cohort, weights, axis_name, hubs)

        return at

    total = jnp.sum(weights)
    pooled = None if pool is None or axis_name is not None else pool(cohort.data, weights / total)

    def together(x):
        if pooled is not None:
            return total * one(x, pooled)
        return weights @ jax.vmap(one, in_axes=(None, 0))(x, cohort.data)

    def fit_together(x):
        """The same where nobody asks for one client's part: the gradient of the sum is one matrix product."""
        found = jax.value_and_grad(together)(clients.broadcast(x, axis_name))
        return found if axis_name is None else jax.lax.psum(found, axis_name)

    fit = fit_together if cohort.hub is None else summed(jax.value_and_grad(one))
    fit_hessian = summed(jax.hessian(one))

    def value_and_grad(x):
        value, grad = fit(x)
        away = x - center
        return value + jnp.vdot(away, away) / (2 * gamma), grad + away / gamma

    def hessian(x):
        return fit_hessian(x) + jnp.eye(x.shape[0], dtype=x.dtype) / gamma

    def own(x, data):
        away = x - center
        return total * one(x, data) + jnp.vdot(away, away) / (2 * gamma)

    local = LocalOracle(
        lambda rows: jax.vmap(jax.value_and_grad(own))(rows, cohort.data),
        lambda rows: jax.vmap(jax.hessian(own))(rows, cohort.data),
        weights / total,
    )
    return Oracle(value_and_grad, hessian, local if axis_name is None else None)


def _init(params: Params, ids: Int[Array, "n"]) -> State:
    return State(Server(jnp.zeros((), jnp.int32), params), Client(ids))


def _check(sampling: Sampling, n: int) -> None:
    if sampling.n != n:
        raise ValueError(f"sampling is over {sampling.n} clients, the state has {n}")


def sppm_as(
    loss: Callable[[Params, Any], Array],
    sampling: Sampling,
    solver: Callable[[Any], Solver],
    hubs: Hubs | None = None,
    vectors: float = 1.0,
    pool: Callable[[Any, Array], Any] | None = None,
) -> Algorithm:
    r"""SPPM-AS with any sampling and any inner solver.

        S ~ sampling,   f_S = sum_{i in S} f_i / (n p_i)
        x <- prox_{gamma f_S}(x) = argmin_z f_S(z) + |z - x|^2 / (2 gamma),   by K iterations of the solver

    `solver(hparams)` makes the inner solver, e.g. `lambda h: quasi_newton.bfgs()`, `lambda h: federated.adam(h.rate)` or
    `lambda h: solvers.gradient_descent(L + 1 / h.gamma)`.  `loss(params, data)` is one client's.  With `hubs` every
    aggregation has two levels and the hubs' bits are counted apart.  `vectors` that a client sends in one aggregation beside
    the value: 1 + (d + 1) / 2 for `aicn` (the Hessian), `prox.federated.vectors_per_round` of the solvers there.  `pool` changes
    the speed only: `pool(data, shares)` is one client's data whose loss is sum_i shares_i f_i, e.g. `partition.pool`.

    Thesis: Alg. SPPM-AS (L2073), Thm (L2085).
    Holds if: f_i mu_i-strongly convex, the prox exact, any gamma > 0; inexact prox: `theory.sppm` and the residual in the metrics.
    Differs: P1 (1/(2 gamma)), P3 (weights 1/(n p_i)), P12 (evaluations are counted, not only iterations).
    """

    def step(key, hparams, state, batch, *, axis_name=None):
        server, ids = state.server, state.clients.id
        n = clients.count(ids, axis_name)
        _check(sampling, n)
        draw = sampling.sample(jax.random.fold_in(key, server.round))
        cohort = _gather(draw, ids, batch, axis_name, hubs)
        center, unravel = ravel_pytree(server.params)
        count = 1 if hubs is None else hubs.count
        oracle = prox_oracle(loss, unravel, cohort, center, hparams.gamma, axis_name, count, pool)
        # At the centre the prox term is 0; it is the solver's first evaluation, computed once.
        start = oracle.value_and_grad(center)[0]
        result = solver(hparams)(oracle, center, hparams.rounds, hparams.tolerance)
        price = _price(draw, n, server.params)
        sent = vectors * price + _price(draw, n, start)  # vectors, and the value that comes with them
        evaluations = result.evaluations.astype(price.dtype)
        met = jnp.zeros_like(price) if hubs is None else _hubs_met(draw, hubs).astype(price.dtype)
        metrics = Metrics(
            loss=start,
            bits_up=sent * evaluations,
            bits_down=price * evaluations,
            local_rounds=result.evaluations,
            iterations=result.iterations,
            residual=result.residual,
            code=result.code,
            bits_hubs=met * evaluations * (vectors * clients.bits_of(server.params) + clients.bits_of(start)),
        )
        return State(Server(server.round + 1, unravel(result.params)), state.clients), metrics

    return Algorithm(_init, step)


def _shares(draw: Draw) -> Array:
    """1/|S| on the members"""
    return draw.mask.astype(draw.weights.dtype) / jnp.sum(draw.mask, dtype=draw.weights.dtype)


def _price(draw: Draw, n: int, params: Params) -> Array:
    """Bits of one vector from each member, mean over all n clients"""
    dense = clients.bits_of(params)
    return jnp.sum(draw.mask, dtype=dense.dtype) / n * dense


def _hubs_met(draw: Draw, hubs: Hubs) -> Array:
    """How many hubs have a client in the cohort"""
    at = jnp.where(draw.mask, jnp.asarray(hubs.of)[draw.ids], hubs.count)
    return jnp.sum(jnp.zeros(hubs.count + 1, jnp.int32).at[at].set(1)[:-1])


def _averaged_prox(loss, sampling, inner, center_of) -> Algorithm:
    """K times: x_k <- (1/|S|) sum_{i in S} prox_{step f_i}(center), where (step, center) = center_of(hparams, x_t, x_k)."""

    def step(key, hparams, state, batch, *, axis_name=None):
        server, ids = state.server, state.clients.id
        n = clients.count(ids, axis_name)
        _check(sampling, n)
        draw = sampling.sample(jax.random.fold_in(key, server.round))
        cohort = _gather(draw._replace(weights=_shares(draw)), ids, batch, axis_name)
        anchor, unravel = ravel_pytree(server.params)
        share = cohort.weights.astype(anchor.dtype)

        def prox(gamma, center, data):
            alone = _Cohort(jax.tree.map(lambda leaf: leaf[None], data), jnp.ones(1, anchor.dtype))
            oracle = prox_oracle(loss, unravel, alone, center, gamma)
            return inner(hparams._replace(gamma=gamma))(oracle, center, 10_000, hparams.tolerance).params

        def one(number, x):
            gamma, center = center_of(hparams, anchor, x)
            center = clients.broadcast(center, axis_name)
            return _sum(jax.vmap(prox, in_axes=(None, None, 0))(gamma, center, cohort.data), cohort, share, axis_name)

        x = jax.lax.fori_loop(0, hparams.rounds, one, anchor)
        params = clients.broadcast(server.params, axis_name)
        value = _sum(jax.vmap(loss, in_axes=(None, 0))(params, cohort.data), cohort, share, axis_name)
        rounds = jnp.asarray(hparams.rounds, jnp.int32)
        price = _price(draw, n, server.params)
        spent = price * rounds.astype(price.dtype)
        zero = jnp.zeros((), anchor.dtype)
        metrics = Metrics(value, spent, spent, rounds, rounds, zero, jnp.zeros((), jnp.int32), 0 * price)
        return State(Server(server.round + 1, unravel(x)), state.clients), metrics

    return Algorithm(_init, step)


class AveragedHParams(NamedTuple):
    """gamma: as in HParams; alpha: prox parameter of one local round (FedAvg-SPPM-AS); rounds (K); tolerance of each client's prox."""

    gamma: Any
    rounds: Any
    tolerance: Any
    alpha: Any = 1.0


def fedprox_sppm_as(
    loss: Callable, sampling: Sampling, inner: Callable[[Any], Solver] = lambda hparams: solvers.aicn()
) -> Algorithm:
    """FedProx-SPPM-AS: K times x <- mean_{i in S} prox_{gamma f_i}(x).  Each client's prox costs no communication.

    Thesis: Alg. (L4814), Thm for K = 1 (L4842).  Differs: it does not approach prox_{gamma f_S} as K grows (P2).
    """
    return _averaged_prox(loss, sampling, inner, lambda hparams, anchor, x: (jnp.asarray(hparams.gamma, x.dtype), x))


def fedavg_sppm_as(
    loss: Callable, sampling: Sampling, inner: Callable[[Any], Solver] = lambda hparams: solvers.aicn()
) -> Algorithm:
    """FedAvg-SPPM-AS: K times x_k <- mean_{i in S} prox_{alpha ftilde_i}(x_k), ftilde_i = f_i + |. - x_t|^2 / (2 gamma).

    Thesis: Alg. (L4832).  Differs: P2: the inner prox has two anchors, prox of f_i with parameter alpha gamma / (alpha + gamma) at
    (alpha x_t + gamma x_k) / (alpha + gamma); the text drops the first, which makes it FedProx-SPPM-AS.
    """

    def center_of(hparams, anchor, x):
        alpha, gamma = (jnp.asarray(number, x.dtype) for number in (hparams.alpha, hparams.gamma))
        return theory.two_anchor(alpha, gamma, anchor, x)

    return _averaged_prox(loss, sampling, inner, center_of)


class LocalHParams(NamedTuple):
    """stepsize: of local gradient steps; steps: how many (may be traced, so a grid is one program)."""

    stepsize: Any
    steps: Any


def mb_local_gd(value_and_grad: Callable, sampling: Sampling) -> Algorithm:
    """LocalGD (FedAvg) on a sampled cohort: each member takes `steps` gradient steps, the mean is the new x; steps = 1 is MB-GD.

    Thesis: LocalGD, MB-GD and MB-LocalGD (L2258, L2304).  One round costs one aggregation.  Weights 1/|S| (P3).
    """

    def step(key, hparams, state, batch, *, axis_name=None):
        server, ids = state.server, state.clients.id
        n = clients.count(ids, axis_name)
        _check(sampling, n)
        draw = sampling.sample(jax.random.fold_in(key, server.round))
        cohort = _gather(draw._replace(weights=_shares(draw)), ids, batch, axis_name)
        x, unravel = ravel_pytree(clients.broadcast(server.params, axis_name))

        def train(data):
            def one(number, x):
                return x - jnp.asarray(hparams.stepsize, x.dtype) * ravel_pytree(value_and_grad(unravel(x), data)[1])[0]

            return jax.lax.fori_loop(0, hparams.steps, one, x), value_and_grad(unravel(x), data)[0]

        rows, losses = jax.vmap(train)(cohort.data)
        mean, loss = _sum((rows, losses), cohort, cohort.weights.astype(x.dtype), axis_name)
        price = _price(draw, n, server.params)
        one, zero = jnp.ones((), jnp.int32), jnp.zeros((), x.dtype)
        metrics = Metrics(
            loss, price, price, one, jnp.asarray(hparams.steps, jnp.int32), zero, jnp.zeros((), jnp.int32), 0 * price
        )
        return State(Server(server.round + 1, ravel_pytree(server.params)[1](mean)), state.clients), metrics

    return Algorithm(_init, step)


def hparams(gamma: float, rounds: int, tolerance: float = 0.0) -> HParams:
    """HParams that were looked at: gamma > 0, K >= 1, tolerance >= 0."""
    if not gamma > 0 or not jnp.isfinite(gamma):
        raise ValueError(f"gamma={gamma}; allowed: positive and finite")
    if rounds < 1:
        raise ValueError(f"rounds={rounds}; allowed: K >= 1 local rounds")
    if not tolerance >= 0:
        raise ValueError(f"tolerance={tolerance}; allowed: at least 0")
    return HParams(gamma, rounds, tolerance)
