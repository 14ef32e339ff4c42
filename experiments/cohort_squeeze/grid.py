"""The runs of Chapter 5 on logistic regression: clustered data, and the (gamma x K x seed) grid of SPPM-SS and LocalGD.

Clients: k-means on the rows' features, each cluster cut into equal parts; a cohort is one client of each cluster.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from commjax.algorithms import local_gd, sppm_as
from commjax.core import runner
from commjax.core.base import Algorithm
from commjax.core.records import Record
from commjax.data import partition, stacked
from commjax.data.libsvm import Dataset
from commjax.problems import logistic
from commjax.problems.constants import Smoothness
from commjax.prox import solvers
from commjax.prox.cohort import Hubs
from commjax.prox.solvers import quasi_newton
from commjax.sampling import samplings
from experiments import tables
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
    rows: Any
    clusters: list[np.ndarray]
    data: stacked.ClientData
    smoothness: Smoothness
    optimum: np.ndarray
    loss: Callable


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
    return runner.observe(algorithm, distance=lambda state, batch: jnp.sum((state.server.params - optimum) ** 2))


def at_once(count: int, most: int) -> int:
    """The largest divisor of count in (most / 2, most], so that no second program computes a rest; else `most`."""
    return next((size for size in range(most, most // 2, -1) if count % size == 0), most)


def sweep(
    problem: Problem, algorithm: Algorithm, hparams: list, settings: Settings, label: str, rounds: int | None = None
) -> Record:
    """Run all hparams with all seeds in one program, with the metric `distance` of `watched`."""
    return follow(problem, watched(problem, algorithm), hparams, settings, label, rounds)


def follow(
    problem: Problem, algorithm: Algorithm, hparams: list, settings: Settings, label: str, rounds: int | None = None
) -> Record:
    """`sweep` of an algorithm that `watched` made.

    The same object with the same number of hparams is compiled once.
    """
    d = len(problem.optimum)
    state = algorithm.init(jnp.ones(d), jnp.arange(len(problem.rows)))
    keys = jax.random.split(jax.random.key(settings.seed), settings.seeds)
    _, record = runner.loop(
        keys,
        algorithm,
        runner.stack(hparams),
        state,
        problem.data,
        settings.rounds if rounds is None else rounds,
        chunk=5,
        checkpoint=settings.out / f"{label}.ckpt",
        label=label,
        progress=settings.progress,
        at_once=at_once(len(hparams), settings.at_once),
        config={"dataset": problem.name, "d": d, "n": len(problem.rows), "solver": settings.solver},
    )
    record.save(settings.out / label)
    return record


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


class Grid(NamedTuple):
    """Both methods over their grids.

    Attributes:
        start: |x^0 - x*|^2.
        sppm: Record [gamma x K, seed, round] of SPPM-SS; nan after the last round of a setting.
        localgd: Record [stepsize x steps, seed, round] of LocalGD.
        pairs: (gamma, K) of each setting of SPPM-SS.
        local_pairs: (stepsize, steps) of each setting of LocalGD.
        cap: Largest number of local rounds of both methods.
    """

    start: float
    sppm: Record
    localgd: Record
    pairs: list[tuple[float, int]]
    local_pairs: list[tuple[float, int]]
    cap: float


def together(records: list[Record]) -> Record:
    """One record of all settings, nan where a run has ended."""
    longest = max(record.metrics["distance"].shape[-1] for record in records)

    def extended(values: np.ndarray) -> np.ndarray:
        room = [(0, 0)] * (values.ndim - 1) + [(0, longest - values.shape[-1])]
        return np.pad(np.asarray(values, np.float64), room, constant_values=np.nan)

    names = records[0].metrics
    merged = {name: np.concatenate([extended(record.metrics[name]) for record in records]) for name in names}
    return replace(records[0], metrics=merged)


def grid(problem: Problem, settings: Settings, rival: Record | None = None) -> Grid:
    """Run both methods over their grids, with the same cap on the cost.

    LocalGD runs `cap` rounds; SPPM-SS with K local rounds runs at least cap / K.

    Args:
        problem: The problem.
        settings: The settings.
        rival: LocalGD's record, if the grid of another solver has it already.
    """
    sampling = samplings.stratified(problem.clusters)
    algorithm = watched(problem, sppm(problem, sampling, settings))
    # The pairs are sorted by K, so that settings computed together have inner loops of about equal length.  Three K are
    # run at a time, with as many rounds as the smallest of them may take; all of them share one program.
    pairs = [(gamma, K) for K in range(1, settings.most_local + 1) for gamma in settings.gammas]
    ours = []
    for least in range(1, settings.most_local + 1, 3):
        hparams = [sppm_as.HParams(gamma, K, 1e-9) for gamma, K in pairs if least <= K < least + 3]
        label, rounds = f"{problem.name}_{settings.solver}_{least}", 5 * -(-settings.cap // (5 * least))
        ours.append(follow(problem, algorithm, hparams, settings, label, rounds))
    stepsizes = (*settings.localgd, 1 / problem.smoothness.L_max)
    local_pairs = [(stepsize, steps) for steps in range(1, settings.most_local + 1) for stepsize in stepsizes]
    theirs = rival or sweep(
        problem,
        local_gd.mb_local_gd(jax.value_and_grad(problem.loss), sampling),
        [local_gd.HParams(*pair) for pair in local_pairs],
        settings,
        f"{problem.name}_localgd",
        rounds=settings.cap,
    )
    start = float(np.sum((1 - problem.optimum) ** 2))
    return Grid(start, together(ours), theirs, pairs, local_pairs, settings.cap)


def rounds_to(record: Record, target: float) -> np.ndarray:
    """[setting, seed]: the first round whose start is within the target, or nan."""
    distance = record.metrics["distance"]
    return np.array([[tables.first(run, target) for run in setting] for setting in distance])


TOPOLOGIES = ("one hub", "spread")


def costs(
    found: Grid, target: float, c1: float, c2: float, count: str, topology: str = "one hub"
) -> tuple[np.ndarray, np.ndarray]:
    """Mean cost over seeds of every setting of both methods; nan unless all seeds reach the target within the cap.

    Args:
        found: The runs.
        target: Target |x - x*|^2.
        c1: Cost of a local round.
        c2: Cost of a global round.
        count: "iterations" (the thesis: K local rounds per global round) or "evaluations" (what was aggregated, P12).
        topology: "one hub": the hub has the whole cohort and sends the result to the server, (c1 K + c2) T.  "spread":
            the cohort has several hubs, so the server takes part in every aggregation, (c1 + c2) K T
            (`sppm_as.Metrics.hub_rounds`).

    Returns:
        The costs of SPPM-SS, and those of LocalGD.
    """
    T = rounds_to(found.sppm, target)
    spent = np.full_like(T, np.nan)
    for (h, s), rounds in np.ndenumerate(T):
        if np.isfinite(rounds):
            rounds = int(rounds)
            inside = (
                found.pairs[h][1] * rounds
                if count == "iterations"
                else found.sppm.metrics["local_rounds"][h, s, :rounds].sum()
            )
            spent[h, s] = c1 * inside + c2 * (rounds if topology == "one hub" else inside)
    local = rounds_to(found.localgd, target) * (c1 + c2)
    cap = found.cap * (c1 + c2)
    ours, theirs = (np.where(mean <= cap, mean, np.nan) for mean in (spent.mean(axis=1), local.mean(axis=1)))
    return ours, theirs


def hubs_of(problem: Problem, topology: str) -> Hubs:
    """All clients under one hub, or ("spread") every cluster under its own."""
    of = np.zeros(len(problem.rows), int)
    if topology == "spread":
        for number, members in enumerate(problem.clusters):
            of[members] = number
    return Hubs.make(of)


def ledger(
    problem: Problem, settings: Settings, found: Grid, target: float, c1: float, c2: float, topology: str
) -> float:
    """The least cost of `costs` by evaluations, measured again.

    The setting is run with real hubs, and its cost is computed from the metrics of that run.
    """
    prices = costs(found, target, c1, c2, "evaluations", topology)[0]
    best = int(np.nanargmin(prices))
    gamma, K = found.pairs[best]
    T = rounds_to(found.sppm, target)[best].astype(int)
    algorithm = sppm(problem, samplings.stratified(problem.clusters), settings, hubs=hubs_of(problem, topology))
    state = algorithm.init(jnp.ones(len(problem.optimum)), jnp.arange(len(problem.rows)))
    keys = jax.random.split(jax.random.key(settings.seed), settings.seeds)
    hparams = runner.stack([sppm_as.HParams(gamma, K, 1e-9)])
    _, metrics = runner.sweep(keys, algorithm, hparams, state, problem.data, int(T.max()))
    spent = np.asarray(sppm_as.cost(metrics, c1, c2))[0]
    return float(np.mean([row[:rounds].sum() for row, rounds in zip(spent, T)]))


def bits_to(found: Grid, target: float) -> np.ndarray:
    """Bits that one client uploads until the target, mean over seeds; nan unless all seeds reach it."""
    T = rounds_to(found.sppm, target)
    sent = np.full_like(T, np.nan)
    for (h, s), rounds in np.ndenumerate(T):
        if np.isfinite(rounds):
            sent[h, s] = found.sppm.metrics["bits_up"][h, s, : int(rounds)].sum()
    return sent.mean(axis=1)
