"""Cohort-Squeeze: the figures of the thesis's Chapter 5.

    python -m experiments.cohort_squeeze cost            total cost TK against K for several gamma, SPPM-SS and LocalGD
    python -m experiments.cohort_squeeze hierarchical    the same runs at c1 = 0.1 and 0.05, c2 = 1, one hub or several
    python -m experiments.cohort_squeeze solvers         the prox by six solvers: iterations, evaluations, bits
    python -m experiments.cohort_squeeze epsilon         least cost of both methods against the accuracy
    python -m experiments.cohort_squeeze recommended     predictions of `recommend`, and what its choice costs
    python -m experiments.cohort_squeeze samplings       measured neighbourhoods of four samplings beside their bounds
    python -m experiments.cohort_squeeze stepsizes       speed against neighbourhood for gamma from 1e-3 to 1e5
    python -m experiments.cohort_squeeze baselines       SPPM-SS against MB-GD and MB-LocalGD at theoretical stepsizes
    python -m experiments.cohort_squeeze clusters        t-SNE picture of the clients' clusters
    python -m experiments.cohort_squeeze networks        cost to target accuracies, 100 clients
    python -m experiments.cohort_squeeze network-solvers the prox of a network by federated solvers

`cost` and `hierarchical` tabulate all targets.  `recommended` runs `commjax.algorithms.recommend`, and its costs are
those that the run counted.  The last two commands have settings of their own (`experiments.cohort_squeeze.networks`).

LibSVM files come from $COMMJAX_DATA or are downloaded; `--datasets breast_cancer --clusters 5 --per-cluster 4` needs
neither. Clients: k-means on the rows' features, each cluster cut into equal parts; a cohort is one client of each
cluster.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from commjax.algorithms import recommend
from commjax.prox.cohort import Hubs
from experiments import tables
from experiments.cohort_squeeze import figures, network_figures
from experiments.cohort_squeeze import networks as network_runs
from experiments.cohort_squeeze.costs import (
    TOPOLOGIES,
    accuracy_rows,
    cost_of_advice,
    cost_rows,
    ledger,
    solver_costs,
)
from experiments.cohort_squeeze.grid import Grid, run_grid
from experiments.cohort_squeeze.runs import Settings, problem
from experiments.cohort_squeeze.samplings import baselines, clusters, compare_samplings, stepsizes

Rows = list[dict[str, Any]]


def _grids(settings: Settings) -> dict[str, Grid]:
    """The runs of both methods on every data set."""
    return {name: run_grid(problem(name, settings), settings) for name in settings.datasets}


def cost(settings: Settings) -> Rows:
    """Figs. 5.1, 5.2 (a) and D.3: cost TK to a target, counted as iterations and as evaluations."""
    grids = _grids(settings)
    rows = [row for name, grid in grids.items() for row in cost_rows(name, grid, settings, 1.0, 0.0)]
    figures.cost(grids, settings, settings.out / f"cost_{settings.solver}.png")
    tables.save(settings.out / f"cost_{settings.solver}", rows, figures.cost_table(rows))
    return rows


def hierarchical(settings: Settings) -> Rows:
    """Figs. 5.2 (d) and D.5: the cost of the runs of `cost` with hubs, c2 = 1, against LocalGD's (c1 + c2) T.

    "one hub": the whole cohort is under one hub, (c1 K + c2) T as in the thesis.  "spread": its clients have different
    hubs, as when hubs are the clusters of stratified sampling; then the server takes part in every aggregation, (c1 +
    c2) K T.  For the first target the cheapest setting is run again with these hubs, and its cost is computed from the
    metrics of that run.
    """
    rows: Rows = []
    grids = _grids(settings)
    cases = [(name, c1, topology) for name in grids for c1 in settings.hubs for topology in TOPOLOGIES]
    for name, c1, topology in cases:
        several = cost_rows(name, grids[name], settings, c1, 1.0, topology)
        if "evaluations" in (first := several[0]):
            split, target = problem(name, settings), first["value"]
            first["ledger"] = ledger(split, settings, grids[name], target, c1=c1, c2=1.0, topology=topology)
        rows += several
    figures.hierarchical(grids, settings, settings.out / f"hierarchical_{settings.solver}.png")
    tables.save(settings.out / f"hierarchical_{settings.solver}", rows, figures.cost_table(rows))
    return rows


def by_solver(settings: Settings) -> Rows:
    """Figs. 5.2 (b) and D.3: the prox by other solvers, each at its best gamma for every K.

    The table has the bits beside the two counts.
    """
    results = {name: solver_costs(problem(name, settings), settings) for name in settings.datasets}
    rows = [row for result in results.values() for row in result.rows]
    figures.solvers(results, settings, settings.out / "solvers.png")
    tables.save(settings.out / "solvers", rows, figures.solvers_table(rows))
    return rows


def epsilon(settings: Settings) -> Rows:
    """Fig. 5.2 (c): the least cost of both methods against the accuracy, relative to |x^0 - x*|^2.

    One panel has c1 = 1, c2 = 0, the other one has hubs.
    """
    rows = [
        row
        for name, grid in _grids(settings).items()
        for c1, c2 in ((1.0, 0.0), (0.1, 1.0))
        for row in accuracy_rows(name, grid, c1, c2)
    ]
    figures.epsilon(rows, settings.out / "epsilon.png")
    tables.save(settings.out / "epsilon", rows, figures.epsilon_table(rows))
    return rows


COST_PAIRS = ((1.0, 0.0), (0.1, 1.0), (0.01, 1.0))  # (c1, c2) of `recommended`


def recommended(settings: Settings) -> Rows:
    """The practical Table 5.1 as a function: what `recommend` predicts, and what its choice costs in a run.

    All clients are under one hub, so that c2 is charged once per global round, as in the thesis.
    """
    rows: Rows = []
    for name in settings.datasets:
        split = problem(name, settings)
        hubs = Hubs.make(np.zeros(len(split.rows), int))
        start, key = jnp.ones(len(split.optimum)), jax.random.key(settings.seed)
        pilot = recommend.pilot(key, split.loss, start, split.data, split.clusters, hubs=hubs, rounds=settings.rounds)
        for accuracy, (c1, c2) in ((accuracy, pair) for accuracy in (0.1, 0.01) for pair in COST_PAIRS):
            advice = pilot.recommend(accuracy, c1, c2)
            measured, needed = cost_of_advice(split, advice, settings, settings.rounds)
            rows.append(
                {
                    "dataset": name,
                    "accuracy": accuracy,
                    "c1": c1,
                    "c2": c2,
                    "sampling": advice.sampling.name,
                    "gamma": advice.gamma,
                    "K": advice.K,
                    "T": advice.T,
                    "predicted": advice.cost,
                    "measured": measured,
                    "rounds": needed,
                    "spent": advice.spent,
                }
            )
            print(advice, flush=True)
    tables.save(settings.out / "recommended", rows, figures.recommended_table(rows))
    return rows


def networks(settings: network_runs.Settings) -> Rows:
    """Figs. D.7 and D.8: least cost to target training accuracies, for several c1."""
    runs = network_runs.measure(settings)
    rows = network_runs.cost_rows(runs, settings)
    path = settings.out / f"networks_{settings.task}_{settings.model}"
    network_figures.cost(runs, rows, settings, path.with_suffix(".png"))
    rates = runs.rates()
    text = f"{network_figures.cost_table(rows)}\ntuned rates: {rates}"
    tables.save(path, [{**row, "rates": rates} for row in rows], text)
    return rows


def network_solvers(settings: network_runs.Settings) -> Rows:
    """Fig. D.9 and Table 5.2: K = 3 local rounds of 3 worker steps, gamma = 1, the same tuning grid for all rates."""
    runs = network_runs.measure_solvers(settings)
    rows = network_runs.solver_rows(runs)
    path = settings.out / f"network_solvers_{settings.task}_{settings.model}"
    network_figures.solvers(runs, path.with_suffix(".png"))
    tables.save(path, rows, network_figures.solvers_table(rows))
    return rows


COMMANDS = {
    "cost": cost,
    "hierarchical": hierarchical,
    "solvers": by_solver,
    "epsilon": epsilon,
    "recommended": recommended,
    "samplings": compare_samplings,
    "stepsizes": stepsizes,
    "baselines": baselines,
    "clusters": clusters,
    "networks": networks,
    "network-solvers": network_solvers,
}
