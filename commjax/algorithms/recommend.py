"""Recommend a sampling, gamma, K and solver of SPPM-AS for a loss and data."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float

from commjax.algorithms import sppm_as
from commjax.core import runner
from commjax.core.base import Key, Params
from commjax.prox.cohort import Hubs
from commjax.prox.solvers import adaptive, quasi_newton
from commjax.prox.solvers.base import Oracle, Solver
from commjax.sampling import samplings

# (params, data of one client) -> loss, a scalar
Loss = Callable[[Params, Any], Any]
# Limit of d: the pilot stores n d^2 numbers.
_MOST_DIMENSIONS = 1000


class Advice(NamedTuple):
    """A solver of the prox for `sppm_as`.

    Attributes:
        name: name of the solver.
        make: `make(hparams)` returns the solver.
    """

    name: str
    make: Callable[[Any], Solver]


def solver_for(convex: bool, count: str = "iterations") -> Advice:
    """Choose the solver of the prox: CG or L-BFGS if f_S is convex, Adam with a tuned rate for networks.

    Args:
        convex: whether the loss f_S of every cohort S is convex.
        count: what is to be small: "iterations", the local rounds of the thesis, or "evaluations", the aggregations
            that commjax counts (erratum P12 in docs/errata.md).  CG takes the fewest iterations (Fig. 5.4), L-BFGS the
            fewest evaluations (`experiments.cohort_squeeze solvers`).

    Returns:
        The solver's name and its constructor.

    Thesis: Table 5.1, Fig. 5.4.

    >>> solver_for(True).name, solver_for(True, "evaluations").name, solver_for(False).name
    ('cg', 'lbfgs', 'adam')
    """
    if count not in ("iterations", "evaluations"):
        raise ValueError(f"count={count!r}; allowed: iterations or evaluations")
    if not convex:
        return Advice("adam", lambda hparams: adaptive.adam(hparams.rate))
    if count == "iterations":
        return Advice("cg", lambda hparams: quasi_newton.conjugate_gradients())
    return Advice("lbfgs", lambda hparams: quasi_newton.lbfgs())


class Recommendation(NamedTuple):
    """A setting of `sppm_as` and its predicted cost; `print` shows it as text.

    Attributes:
        sampling: the sampling.
        gamma: parameter of the prox.
        K: iterations of the solver in a global round, `HParams.rounds` of `sppm_as`.
        T: number of global rounds, mean over the pilot's seeds.
        cost: predicted cost as in `sppm_as.cost`.
        evaluations: predicted aggregations in all rounds together.
        solver: `solver(hparams)` returns the solver, for `sppm_as`.
        solver_name: name of the solver.
        hubs: the hubs, for `sppm_as`.
        accuracy: target for |x - x*|^2 / |x0 - x*|^2.
        c1: cost of an aggregation inside the cohort.
        c2: cost of an exchange between a hub and the server.
        spent: number of aggregations over all clients that the pilot took.
    """

    sampling: samplings.Sampling
    gamma: float
    K: int
    T: float
    cost: float
    evaluations: float
    solver: Callable[[Any], Solver]
    solver_name: str
    hubs: Hubs | None
    accuracy: float
    c1: float
    c2: float
    spent: int

    def __str__(self) -> str:
        at = "no hubs" if self.hubs is None else f"{self.hubs.count} hub{'s' if self.hubs.count > 1 else ''}"
        return (
            f"To reach {self.accuracy:g} of the first squared distance at c1 = {self.c1:g}, c2 = {self.c2:g} ({at}):\n"
            f"  sampling {self.sampling.name} ({self.sampling.size} of {self.sampling.n} clients a round)\n"
            f"  gamma = {self.gamma:.3g}, K = {self.K} iterations of {self.solver_name}\n"
            f"  predicted: cost {self.cost:.3g} in {self.T:.1f} global rounds and {self.evaluations:.1f} aggregations\n"
            f"  the pilot took {self.spent} aggregations over all clients and one Hessian from each"
        )


class Pilot(NamedTuple):
    """Simulated runs on a quadratic model of the problem; every array is [setting, seed, round].

    Attributes:
        settings: sampling, gamma and K of each setting.
        fraction: |x - x*|^2 / |x0 - x*|^2 at the start of a round.
        local_rounds: aggregations inside the cohort.
        hub_rounds: exchanges between hubs and server.
        hubs: the hubs of the simulated runs.
        spent: number of aggregations over all clients that the pilot took.
        solver: the solver of the simulated runs.
    """

    settings: list[tuple[samplings.Sampling, float, int]]
    fraction: Float[np.ndarray, "s k t"]
    local_rounds: Float[np.ndarray, "s k t"]
    hub_rounds: Float[np.ndarray, "s k t"]
    hubs: Hubs | None
    spent: int
    solver: Advice

    def recommend(self, accuracy: float, c1: float = 1.0, c2: float = 0.0) -> Recommendation:
        """The cheapest simulated setting for one target and one pair of costs.

        Args:
            accuracy: target for |x - x*|^2 / |x0 - x*|^2, between 0 and 1.
            c1: cost of an aggregation inside the cohort.
            c2: cost of an exchange between a hub and the server; needs hubs.

        Returns:
            The setting with the smallest mean cost over seeds.  Raises a ValueError if none reaches the target in every
            seed.
        """
        if not 0 < accuracy < 1:
            raise ValueError(
                f"accuracy={accuracy}; allowed: 0 < accuracy < 1, a fraction of the first squared distance"
            )
        if not (c1 >= 0 and c2 >= 0 and c1 + c2 > 0):
            raise ValueError(f"c1={c1}, c2={c2}; allowed: not negative, and not both 0")
        if c2 > 0 and self.hubs is None:
            raise ValueError(f"c2={c2}; allowed: 0 without hubs, for the ledger then charges c1 only")
        reached = self.fraction <= accuracy
        rounds = np.where(reached.any(axis=2), reached.argmax(axis=2), -1)
        if not (rounds >= 0).all(axis=1).any():
            best = self.fraction.min(axis=2).max(axis=1).min()
            raise ValueError(
                f"accuracy={accuracy}; allowed: at least {best:.3g}, "
                f"which the pilot reached in {self.fraction.shape[2]} rounds"
            )
        before = np.arange(self.fraction.shape[2]) < rounds[:, :, None]
        evaluations = (self.local_rounds * before).sum(axis=2).mean(axis=1)
        exchanges = (self.hub_rounds * before).sum(axis=2).mean(axis=1)
        cost = np.where((rounds >= 0).all(axis=1), c1 * evaluations + c2 * exchanges, math.inf)
        at = int(cost.argmin())
        sampling, gamma, K = self.settings[at]
        return Recommendation(
            sampling,
            gamma,
            K,
            float(rounds[at].mean()),
            float(cost[at]),
            float(evaluations[at]),
            self.solver.make,
            self.solver.name,
            self.hubs,
            accuracy,
            c1,
            c2,
            self.spent,
        )


def _rough_optimum(
    loss: Loss, params: Params, data: Any, iterations: int
) -> tuple[Array, Array, Callable[[Array], Params], int]:
    """(x0, x, unravel, aggregations), where x comes from L-BFGS on the mean of all losses."""
    flat, unravel = ravel_pytree(params)

    def mean(x: Array) -> Array:
        return jnp.mean(jax.vmap(lambda rows: loss(unravel(x), rows))(data))

    oracle = Oracle(jax.value_and_grad(mean))
    result = jax.jit(lambda x: quasi_newton.lbfgs()(oracle, x, iterations, 0.0))(flat)
    if not bool(jnp.all(jnp.isfinite(result.params))):
        raise ValueError("loss: L-BFGS from `params` did not stay finite; allowed: a convex, differentiable loss")
    return flat, result.params, unravel, int(result.evaluations)


def _quadratic(z: Array, model: dict[str, Array]) -> Array:
    """g z + z' H z / 2, a client's loss around the rough optimum."""
    return jnp.vdot(model["g"], z) + jnp.vdot(z, model["H"] @ z) / 2


def pilot(
    key: Key,
    loss: Loss,
    params: Params,
    data: Any,
    clusters: Sequence[np.ndarray],
    *,
    hubs: Hubs | None = None,
    iterations: int = 15,
    local_rounds: Sequence[int] = (1, 2, 4, 8),
    rounds: int = 30,
    seeds: int = 3,
) -> Pilot:
    """Simulate SPPM-AS on a quadratic model of the problem, for several samplings, stepsizes and local rounds.

    First the clients take `iterations` steps of L-BFGS on the mean loss, which needs about as many aggregations
    (`spent`).  Each client then sends its gradient g_i and Hessian H_i at the last point x.  The server simulates
    `sppm_as` on the model f_i(x + z) ~ g_i z + z' H_i z / 2, with the same accounting of costs.  A cohort has as many
    clients as there are clusters, drawn by stratified sampling, by nice sampling, and by block sampling if every
    cluster has this size.  The gammas are 1 to 4096 times 1 / L, where L is the largest eigenvalue of the mean Hessian.

    Holds if: the losses are convex, and nearly quadratic between `params` and the optimum.  Otherwise the prediction is
    rough.

    Args:
        key: random key of the simulated cohorts.
        loss: `loss(params, data)` returns the loss of one client, a scalar.
        params: the model with which the run will start.
        data: the data of all clients, leading axis n.
        clusters: ids of similar clients, for example `clustering.by_features`.  A cohort has as many clients as there
            are clusters.
        hubs: hubs of the planned run.
        iterations: number of iterations of L-BFGS on the mean of all losses.
        local_rounds: candidates for K.
        rounds: number of simulated global rounds.
        seeds: number of simulated runs of every setting.

    Returns:
        The simulated runs; `.recommend(accuracy, c1, c2)` chooses among them.
    """
    start, x, unravel, spent = _rough_optimum(loss, params, data, iterations)
    if len(x) > _MOST_DIMENSIONS:
        raise ValueError(f"params has {len(x)} numbers; allowed: at most {_MOST_DIMENSIONS}, for Hessians are kept")

    def quadratic_model(rows: Any) -> dict[str, Array]:
        def client_loss(z: Array) -> Array:
            return loss(unravel(z), rows)

        return {"g": jax.grad(client_loss)(x), "H": jax.hessian(client_loss)(x)}

    model = jax.jit(jax.lax.map, static_argnums=0)(quadratic_model, data)
    H, n = np.asarray(model["H"], np.float64).mean(axis=0), len(model["g"])
    z_star = jnp.asarray(np.linalg.solve(H, -np.asarray(model["g"], np.float64).mean(axis=0)), x.dtype)
    z0 = start - x
    first = jnp.sum((z0 - z_star) ** 2)
    gammas = np.geomspace(1.0, 4096.0, 7) / float(np.linalg.eigvalsh(H)[-1])
    pairs = [(float(gamma), int(K)) for gamma in gammas for K in local_rounds]
    b, solver = len(clusters), solver_for(True, "evaluations")
    choices = [samplings.stratified(clusters), samplings.nice(n, min(b, n))]
    if all(len(ids) == b for ids in clusters):
        choices.append(samplings.block(clusters))
    columns = []
    for sampling in choices:
        algorithm = runner.observe(
            sppm_as.sppm_as(_quadratic, sampling, solver.make, hubs),
            fraction=lambda state, batch: jnp.sum((state.server.params - z_star) ** 2) / first,
        )
        hparams = runner.stack([sppm_as.HParams(gamma, K, 0.0) for gamma, K in pairs])
        state = algorithm.init(z0, jnp.arange(n))
        _, metrics = runner.sweep(jax.random.split(key, seeds), algorithm, hparams, state, model, rounds)
        columns.append([np.asarray(getattr(metrics, name)) for name in ("fraction", "local_rounds", "hub_rounds")])
    settings = [(sampling, gamma, K) for sampling in choices for gamma, K in pairs]
    fraction, local, outside = (np.concatenate(part) for part in zip(*columns))
    return Pilot(settings, fraction, local, outside, hubs, spent, solver)


def recommend(
    key: Key,
    loss: Loss,
    params: Params,
    data: Any,
    clusters: Sequence[np.ndarray],
    accuracy: float,
    *,
    c1: float = 1.0,
    c2: float = 0.0,
    hubs: Hubs | None = None,
    **options: Any,
) -> Recommendation:
    """Recommend the cheapest setting of SPPM-AS that reaches |x - x*|^2 <= accuracy |x0 - x*|^2, by simulation.

    Args:
        key: random key of the simulated cohorts.
        loss: `loss(params, data)` returns the loss of one client, a scalar.
        params: the model with which the run will start.
        data: the data of all clients, leading axis n.
        clusters: ids of similar clients; a cohort has as many clients as there are clusters.
        accuracy: target for |x - x*|^2 / |x0 - x*|^2, between 0 and 1.
        c1: cost of an aggregation inside the cohort.
        c2: cost of an exchange between a hub and the server.
        hubs: hubs of the planned run; None with c2 > 0 puts all clients under one hub, as the thesis does.
        **options: other arguments of `pilot`.  Its docstring says what the clients have to compute.

    Returns:
        The setting and its predicted cost; `print` shows both as text.

    Thesis: Table 5.1.
    """
    if hubs is None and c2 > 0:
        hubs = Hubs.make(np.zeros(jax.tree.leaves(data)[0].shape[0], int))
    return pilot(key, loss, params, data, clusters, hubs=hubs, **options).recommend(accuracy, c1, c2)
