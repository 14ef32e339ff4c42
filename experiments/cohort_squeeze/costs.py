"""What the runs of a grid cost until a target: by the formula of the thesis, and from the metrics of a run."""

from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from commjax.algorithms import recommend, sppm_as
from commjax.core import runner
from commjax.data import stacked
from commjax.prox.cohort import Hubs
from commjax.sampling import samplings
from experiments import tables
from experiments.cohort_squeeze.grid import Grid, bits_to, rounds_to, run_grid
from experiments.cohort_squeeze.runs import SOLVERS, Problem, Settings, most_rows, sppm, watched

TOPOLOGIES = ("one hub", "spread")
COUNTS = ("iterations", "evaluations")
Rows = list[dict[str, Any]]


def costs(
    grid: Grid, target: float, c1: float, c2: float, count: str, topology: str = "one hub"
) -> tuple[np.ndarray, np.ndarray]:
    """Mean cost over seeds of every setting of both methods; nan unless all seeds reach the target within the cap.

    Args:
        grid: The runs.
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
    T = rounds_to(grid.sppm, target)
    spent = np.full_like(T, np.nan)
    for (h, s), rounds in np.ndenumerate(T):
        if np.isfinite(rounds):
            rounds = int(rounds)
            inside = (
                grid.pairs[h][1] * rounds
                if count == "iterations"
                else grid.sppm.metrics["local_rounds"][h, s, :rounds].sum()
            )
            spent[h, s] = c1 * inside + c2 * (rounds if topology == "one hub" else inside)
    local = rounds_to(grid.localgd, target) * (c1 + c2)
    cap = grid.cap * (c1 + c2)
    ours, theirs = (np.where(mean <= cap, mean, np.nan) for mean in (spent.mean(axis=1), local.mean(axis=1)))
    return ours, theirs


def _least(costs: np.ndarray) -> float | None:
    """The least cost, or None if no setting has one."""
    return float(np.nanmin(costs)) if np.isfinite(costs).any() else None


def targets(grid: Grid, settings: Settings) -> dict[str, float]:
    """Label -> target |x - x*|^2: the absolute targets, and the relative ones times |x^0 - x*|^2."""
    named = {f"{value:g}": value for value in settings.absolute}
    return named | {f"{value:g} |x0-x*|^2": value * grid.start for value in settings.relative}


def cheapest(grid: Grid, target: float, c1: float, c2: float, topology: str = "one hub") -> dict[str, Any]:
    """The cheapest setting of SPPM-SS by both counts (`costs`): its cost, gamma and K."""
    row: dict[str, Any] = {}
    for count in COUNTS:
        ours, _ = costs(grid, target, c1, c2, count, topology)
        if np.isfinite(ours).any():
            at = int(np.nanargmin(ours))
            row |= {count: float(ours[at]), f"{count}_gamma": grid.pairs[at][0], f"{count}_K": grid.pairs[at][1]}
    return row


def cost_rows(name: str, grid: Grid, settings: Settings, c1: float, c2: float, topology: str = "flat") -> Rows:
    """One row per target: the cheapest settings of SPPM-SS and of LocalGD."""
    rows = []
    for label, target in targets(grid, settings).items():
        row: dict[str, Any] = {"dataset": name, "target": label, "value": target, "c1": c1, "c2": c2, "hubs": topology}
        row |= cheapest(grid, target, c1, c2, "one hub" if topology == "flat" else topology)
        local = costs(grid, target, c1, c2, "iterations")[1]
        if np.isfinite(local).any():
            at = int(np.nanargmin(local))
            stepsize, steps = grid.local_pairs[at]
            row |= {"localgd": float(local[at]), "localgd_stepsize": stepsize, "localgd_steps": steps}
            thesis = [c for c, (stepsize, _) in zip(local, grid.local_pairs) if stepsize == 0.1 and np.isfinite(c)]
            row["localgd_at_0.1"] = float(min(thesis)) if thesis else None
        rows.append(row)
    return rows


def accuracy_rows(name: str, grid: Grid, c1: float, c2: float) -> Rows:
    """One row per accuracy, a fraction of |x^0 - x*|^2: the least costs of SPPM-SS by both counts, and of LocalGD."""
    rows = []
    for fraction in np.geomspace(0.1, 1e-5, 17):
        both = {count: costs(grid, fraction * grid.start, c1, c2, count) for count in COUNTS}
        values = {count: ours for count, (ours, _) in both.items()} | {"localgd": both["iterations"][1]}
        least = {key: _least(value) for key, value in values.items()}
        rows.append({"dataset": name, "fraction": float(fraction), "c1": c1, "c2": c2} | least)
    return rows


class SolverCosts(NamedTuple):
    """The costs of one data set to the first absolute target, for every solver of the prox.

    Attributes:
        rows: One row per solver, and one for LocalGD if it reaches the target.
        curves: (solver, count) -> least cost over gamma for every K, or nan.
        localgd: LocalGD's least cost, or None.
    """

    rows: Rows
    curves: dict[tuple[str, str], np.ndarray]
    localgd: float | None


def solver_costs(problem: Problem, settings: Settings) -> SolverCosts:
    """Run the grid with every solver, and LocalGD once."""
    rows, curves, rival, target = [], {}, None, settings.absolute[0]
    for solver in SOLVERS:
        grid = run_grid(problem, replace(settings, solver=solver), rival)
        rival = grid.localgd
        for count in COUNTS:
            by_K = costs(grid, target, 1.0, 0.0, count)[0].reshape(settings.most_local, -1)
            least = np.min(np.where(np.isfinite(by_K), by_K, np.inf), axis=1)
            curves[solver, count] = np.where(np.isfinite(least), least, np.nan)
        row = {"dataset": problem.name, "solver": solver, "target": target} | cheapest(grid, target, 1.0, 0.0)
        if (bits := _least(bits_to(grid, target))) is not None:
            row["kilobits"] = bits / 1e3
        rows.append(row)
    assert rival is not None
    spent = _least(rounds_to(rival, target).mean(axis=1))
    if spent is not None:
        # As in SPPM-AS, the mean over clients: each client of a cohort uploads one float64 vector per round.
        bits = spent * 64 * len(problem.optimum) * (settings.clusters / len(problem.rows))
        row = {"dataset": problem.name, "solver": "LocalGD, tuned", "target": target}
        rows.append(row | {count: spent for count in COUNTS} | {"kilobits": bits / 1e3})
    return SolverCosts(rows, curves, spent)


def hubs_of(problem: Problem, topology: str) -> Hubs:
    """All clients under one hub, or ("spread") every cluster under its own."""
    of = np.zeros(len(problem.rows), int)
    if topology == "spread":
        for number, members in enumerate(problem.clusters):
            of[members] = number
    return Hubs.make(of)


def ledger(
    problem: Problem, settings: Settings, grid: Grid, target: float, *, c1: float, c2: float, topology: str
) -> float:
    """The least cost of `costs` by evaluations, measured again.

    The setting is run with real hubs, and its cost is computed from the metrics of that run.
    """
    best = int(np.nanargmin(costs(grid, target, c1, c2, "evaluations", topology)[0]))
    gamma, K = grid.pairs[best]
    T = rounds_to(grid.sppm, target)[best].astype(int)
    algorithm = sppm(problem, samplings.stratified(problem.clusters), settings, hubs=hubs_of(problem, topology))
    state = algorithm.init(jnp.ones(len(problem.optimum)), jnp.arange(len(problem.rows)))
    keys = jax.random.split(jax.random.key(settings.seed), settings.seeds)
    hparams = runner.stack([sppm_as.HParams(gamma, K, 1e-9)])
    _, metrics = runner.sweep(keys, algorithm, hparams, state, problem.data, int(T.max()))
    spent = np.asarray(sppm_as.cost(metrics, c1, c2))[0]
    return float(np.mean([row[:rounds].sum() for row, rounds in zip(spent, T)]))


def cost_of_advice(
    problem: Problem, advice: recommend.Recommendation, settings: Settings, rounds: int
) -> tuple[float, float]:
    """(cost from the metrics of the run, global rounds) until the target, mean over seeds.

    Both are nan if a seed does not reach the target in `rounds`.
    """
    pool = stacked.pool(most_rows(problem, advice.sampling))
    algorithm = sppm_as.sppm_as(problem.loss, advice.sampling, advice.solver, advice.hubs, pool=pool)
    algorithm = watched(problem, algorithm)
    state = algorithm.init(jnp.ones(len(problem.optimum)), jnp.arange(len(problem.rows)))
    keys = jax.random.split(jax.random.key(settings.seed + 1), settings.seeds)
    hparams = runner.stack([sppm_as.HParams(advice.gamma, advice.K, 0.0)])
    _, metrics = runner.sweep(keys, algorithm, hparams, state, problem.data, rounds)
    distance = np.asarray(metrics.distance)[0]
    needed = np.array([tables.first(run, advice.accuracy * distance[0, 0]) for run in distance])
    counted = sppm_as.Metrics(*(getattr(metrics, name) for name in sppm_as.Metrics._fields))
    spent = np.asarray(sppm_as.cost(counted, advice.c1, advice.c2))[0]
    paid = [row[: int(T)].sum() if np.isfinite(T) else np.nan for row, T in zip(spent, needed)]
    return float(np.mean(paid)), float(np.mean(needed))
