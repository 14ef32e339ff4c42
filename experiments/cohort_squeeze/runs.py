"""The runs of Chapter 5 on logistic regression: settings, clustered data, SPPM-AS with a solver, and sweeps of it.

Clients: k-means on the rows' features, each cluster cut into equal parts; a cohort is one client of each cluster.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from commjax.algorithms import sppm_as
from commjax.core import runner
from commjax.core.base import Algorithm, State
from commjax.core.records import Record
from commjax.data import partition, stacked
from commjax.data.libsvm import Dataset
from commjax.problems import logistic
from commjax.problems.constants import Smoothness
from commjax.prox import solvers
from commjax.prox.cohort import Hubs
from commjax.prox.solvers import quasi_newton
from commjax.sampling import samplings
from experiments import saved
from experiments.ef_bv.runs import load


class Use(NamedTuple):
    """A solver in this experiment.

    Attributes:
        make: (smoothness constants, hparams, largest K) -> the solver.
        vectors: d -> number of vectors that a client uploads beside the value.
    """

    make: Callable[[Smoothness, Any, int], solvers.Solver]
    vectors: Callable[[int], float] = lambda d: 1.0


SOLVERS = {
    "bfgs": Use(lambda smooth, h, most: quasi_newton.bfgs(most)),
    "cg": Use(lambda smooth, h, most: quasi_newton.conjugate_gradients()),
    "lbfgs": Use(lambda smooth, h, most: quasi_newton.lbfgs()),
    "agd": Use(
        lambda smooth, h, most: solvers.accelerated_gradient_descent(
            smooth.L_max + 1 / h.gamma, smooth.mu + 1 / h.gamma
        )
    ),
    "gd": Use(lambda smooth, h, most: solvers.gradient_descent(smooth.L_max + 1 / h.gamma)),
    "aicn": Use(lambda smooth, h, most: solvers.aicn(), lambda d: 1 + (d + 1) / 2),
}


@dataclass(frozen=True)
class Settings:
    datasets: tuple[str, ...] = ("a6a",)  # LibSVM names (a6a, mushrooms, a9a, ijcnn1), or breast_cancer (embedded)
    clusters: int = 10  # k-means clusters; the size of a stratified cohort
    per_cluster: int = 10  # clients of each cluster
    mu: float = 0.1  # weight of the regulariser
    solver: Literal["bfgs", "cg", "lbfgs", "agd", "gd", "aicn"] = "bfgs"  # solver of the prox
    gammas: tuple[float, ...] = (1.0, 10.0, 100.0, 1000.0, 10_000.0, 100_000.0)  # stepsizes of the prox
    most_local: int = 15  # K from 1 to this
    rounds: int = 40  # `samplings` runs four times as many global rounds, `baselines` five times
    cap: int = 100  # local rounds that a run of `cost` may take, the same for both methods
    # LocalGD's stepsizes; theory's 1/L_max is added
    localgd: tuple[float, ...] = (0.1, 0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)
    seeds: int = 5  # runs with different cohorts
    # targets |x - x*|^2
    absolute: tuple[float, ...] = (0.1, 0.01, 0.005)
    # targets as fractions of |x^0 - x*|^2, where the text has absolute ones (P15)
    relative: tuple[float, ...] = (0.005, 0.001)
    hubs: tuple[float, ...] = (0.1, 0.05)  # c1 of `hierarchical`, where c2 = 1
    seed: int = 0  # seed of the clusters and the cohorts
    at_once: int = 21  # settings that are computed together; the others follow in the same program
    out: Path = Path("results/cohort_squeeze")  # folder of records and figures
    progress: bool = True  # show a progress bar


class Problem(NamedTuple):
    """A clustered data set, in float64, with x^0 = 1.

    Attributes:
        name: Name of the data set.
        dataset: The whole data set.
        rows: Row numbers of each client.
        clusters: Client numbers of each cluster.
        data: Rows of all clients, with a leading client axis.
        smoothness: Exact smoothness constants.
        optimum: Minimiser x* [d].
        loss: (params [d], data of one client) -> loss.
    """

    name: str
    dataset: Dataset
    rows: list[np.ndarray]
    clusters: list[np.ndarray]
    data: stacked.ClientData
    smoothness: Smoothness
    optimum: np.ndarray
    loss: Callable[[Any, Any], jax.Array]


def problem(name: str, settings: Settings) -> Problem:
    """Cluster a data set and split it over clients; results are cached.  Thesis: Fig. D.1."""
    return _problem(name, settings.clusters, settings.per_cluster, settings.mu, settings.seed)


@cache
def _problem(name: str, count: int, per_cluster: int, mu: float, seed: int) -> Problem:
    dataset = load(name)
    groups = partition.feature_wise(dataset.features, count, seed=seed)
    if (least := min(map(len, groups))) < per_cluster:
        raise ValueError(f"per_cluster={per_cluster}; allowed: at most {least}, the rows of the smallest cluster")
    rows = [part for group in groups for part in np.array_split(group, per_cluster)]
    clusters = list(np.arange(len(rows)).reshape(count, per_cluster))
    data = jax.tree.map(jnp.asarray, stacked.stack(dataset, rows))
    smoothness = logistic.constants(dataset, rows, mu)
    optimum = logistic.optimum(dataset, rows, mu).params
    return Problem(name, dataset, rows, clusters, data, smoothness, optimum, partial(logistic.loss, mu=mu))


def watched(problem: Problem, algorithm: Algorithm) -> Algorithm:
    """Add the metric `distance`: |x - x*|^2 at the start of every round."""
    optimum = jnp.asarray(problem.optimum)

    def distance(state: State, batch: Any) -> jax.Array:
        return jnp.sum((state.server.params - optimum) ** 2)

    return runner.observe(algorithm, distance=distance)


def at_once(count: int, most: int) -> int:
    """The largest divisor of count in (most / 2, most], so that no second program computes a rest; else `most`."""
    return next((size for size in range(most, most // 2, -1) if count % size == 0), most)


def sweep(
    problem: Problem,
    algorithm: Algorithm,
    hparams: Sequence[Any],
    settings: Settings,
    label: str,
    *,
    rounds: int | None = None,
) -> Record:
    """Run all hparams with all seeds in one program.

    An algorithm of `watched` adds the metric `distance`.  The same object with the same number of hparams is compiled
    once.
    """
    d = len(problem.optimum)
    state = algorithm.init(jnp.ones(d), jnp.arange(len(problem.rows)))
    keys = jax.random.split(jax.random.key(settings.seed), settings.seeds)
    return saved.run(
        settings.out / label,
        keys,
        algorithm,
        runner.stack(hparams),
        state,
        problem.data,
        rounds=settings.rounds if rounds is None else rounds,
        chunk=5,
        progress=settings.progress,
        at_once=at_once(len(hparams), settings.at_once),
        config={"dataset": problem.name, "d": d, "n": len(problem.rows), "solver": settings.solver},
    )


def sppm(
    problem: Problem,
    sampling: samplings.Sampling,
    settings: Settings,
    most: int | None = None,
    hubs: Hubs | None = None,
) -> Algorithm:
    """SPPM-AS with the solver of the settings.

    Args:
        problem: The problem.
        sampling: The sampling of cohorts.
        settings: The settings.
        most: Largest K; None: that of the settings.
        hubs: Hub of every client; None: no hubs.
    """
    use = SOLVERS[settings.solver]
    pool = stacked.pool(most_rows(problem, sampling))

    def make(hparams: Any) -> solvers.Solver:
        return use.make(problem.smoothness, hparams, most or settings.most_local)

    return sppm_as.sppm_as(problem.loss, sampling, make, hubs, vectors=use.vectors(len(problem.optimum)), pool=pool)


def most_rows(problem: Problem, sampling: samplings.Sampling) -> int:
    """Number of rows of the largest cohort.

    A stratified cohort has the largest client of each cluster, another cohort the largest clients of all.
    """
    sizes = np.array([len(rows) for rows in problem.rows])
    if sampling.name.startswith("stratified"):
        return int(sum(sizes[cluster].max() for cluster in problem.clusters))
    return int(np.sort(sizes)[-sampling.size :].sum())
