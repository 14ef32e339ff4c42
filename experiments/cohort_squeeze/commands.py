"""Cohort-Squeeze: the figures of the thesis's Chapter 5 on logistic regression.

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
those that the run counted.  The last two commands are in `experiments.cohort_squeeze.networks`.

LibSVM files come from $COMMJAX_DATA or are downloaded; `--datasets breast_cancer --clusters 5 --per-cluster 4` needs
neither. Clients: k-means on the rows' features, each cluster cut into equal parts; a cohort is one client of each
cluster.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import LogFormatter, MaxNLocator

from commjax.algorithms import recommend, sppm_as
from commjax.core import runner
from commjax.data import stacked
from commjax.prox.cohort import Hubs
from experiments import plots, tables
from experiments.cohort_squeeze import networks as cohort_squeeze_networks
from experiments.cohort_squeeze.grid import (
    TOPOLOGIES,
    Grid,
    Settings,
    bits_to,
    costs,
    grid,
    ledger,
    most_rows,
    problem,
    rounds_to,
    watched,
)
from experiments.cohort_squeeze.samplings import baselines, clusters, compare_samplings, stepsizes


def targets(found: Grid, settings: Settings) -> dict[str, float]:
    """Label -> target |x - x*|^2: the absolute targets, and the relative ones times |x^0 - x*|^2."""
    named = {f"{value:g}": value for value in settings.absolute}
    return named | {f"{value:g} |x0-x*|^2": value * found.start for value in settings.relative}


def cheapest(found: Grid, target: float, c1: float, c2: float, topology: str = "one hub") -> dict[str, Any]:
    """The cheapest setting of SPPM-SS by both counts (`costs`): its cost, gamma and K."""
    row: dict[str, Any] = {}
    for count in ("iterations", "evaluations"):
        ours, _ = costs(found, target, c1, c2, count, topology)
        if np.isfinite(ours).any():
            at = int(np.nanargmin(ours))
            row |= {count: float(ours[at]), f"{count}_gamma": found.pairs[at][0], f"{count}_K": found.pairs[at][1]}
    return row


def cost_rows(name: str, found: Grid, settings: Settings, c1: float, c2: float, topology: str = "flat") -> list[dict]:
    """One row per target: the cheapest settings of SPPM-SS and of LocalGD."""
    rows = []
    for label, target in targets(found, settings).items():
        row: dict[str, Any] = {"dataset": name, "target": label, "value": target, "c1": c1, "c2": c2, "hubs": topology}
        row |= cheapest(found, target, c1, c2, "one hub" if topology == "flat" else topology)
        local = costs(found, target, c1, c2, "iterations")[1]
        if np.isfinite(local).any():
            at = int(np.nanargmin(local))
            stepsize, steps = found.local_pairs[at]
            row |= {"localgd": float(local[at]), "localgd_stepsize": stepsize, "localgd_steps": steps}
            thesis = [c for c, (stepsize, _) in zip(local, found.local_pairs) if stepsize == 0.1 and np.isfinite(c)]
            row["localgd_at_0.1"] = float(min(thesis)) if thesis else None
        rows.append(row)
    return rows


def show(rows: list[dict]) -> str:
    """The rows of `cost_rows` as text."""

    def cell(row, key, pattern):
        return format(row[key], pattern) if row.get(key) is not None else "-"

    lines = [
        f"{'data set':13} {'target |x-x*|^2':>18} {'c1':>5} {'c2':>3} {'hubs':>8} | "
        f"{'SPPM-SS, iterations (gamma, K)':>31} | {'evaluations (gamma, K)':>25} | "
        f"{'LocalGD (stepsize, steps)':>27} | at stepsize 0.1 | "
        "evaluations, from the ledger of a run with hubs"
    ]
    for r in rows:
        ours = f"{cell(r, 'iterations', '.1f')} ({cell(r, 'iterations_gamma', 'g')}, {cell(r, 'iterations_K', 'd')})"
        true = f"{cell(r, 'evaluations', '.1f')} ({cell(r, 'evaluations_gamma', 'g')}, {cell(r, 'evaluations_K', 'd')})"
        local = f"{cell(r, 'localgd', '.1f')} ({cell(r, 'localgd_stepsize', '.3g')}, {cell(r, 'localgd_steps', 'd')})"
        lines.append(
            f"{r['dataset']:13} {r['target']:>18} {r['c1']:5g} {r['c2']:3g} {r['hubs']:>8} | "
            f"{ours:>31} | {true:>25} | {local:>27} | "
            f"{cell(r, 'localgd_at_0.1', '.1f'):>15} | {cell(r, 'ledger', '.1f')}"
        )
    return "\n".join(lines)


def cost_panel(axes, found: Grid, target: float, settings: Settings, c1: float, c2: float) -> None:
    """Draw the cost against K, one curve per gamma, and LocalGD's least cost."""
    ours, local = costs(found, target, c1, c2, "iterations")
    shades = plt.get_cmap("viridis")(np.linspace(0, 0.85, len(settings.gammas)))
    K = np.arange(1, settings.most_local + 1)
    for shade, gamma, values in zip(shades, settings.gammas, ours.reshape(len(K), -1).T):
        if np.isfinite(values).any():
            axes.plot(K, values, "o-", markersize=2.5, color=shade, label=rf"$\gamma$ = {gamma:g}")
    if np.isfinite(local).any():
        axes.axhline(np.nanmin(local), color="#D55E00", linestyle="--", linewidth=1, label="LocalGD, tuned")
    axes.set_yscale("log")
    for ticks in (axes.yaxis.set_major_formatter, axes.yaxis.set_minor_formatter):
        ticks(LogFormatter(labelOnlyBase=False, minor_thresholds=(2, 0.5)))
    axes.set_xlim(0, settings.most_local + 1)
    axes.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    axes.set_xlabel("local communication rounds $K$")


def cost(settings: Settings) -> list[dict]:
    """Figs. 5.1, 5.2 (a) and D.3: cost TK to a target, counted as iterations and as evaluations."""
    rows: list[dict] = []
    figure, axes = plt.subplots(
        1,
        len(settings.datasets),
        figsize=(2.6 * len(settings.datasets) + 0.6, 2.5),
        squeeze=False,
        layout="constrained",
    )
    for panel, name in zip(axes[0], settings.datasets):
        found = grid(problem(name, settings), settings)
        rows += cost_rows(name, found, settings, 1.0, 0.0)
        cost_panel(panel, found, settings.absolute[0], settings, 1.0, 0.0)
        panel.set_title(f"{name}, {settings.solver}, $|x-x^\\star|^2 <$ {settings.absolute[0]:g}")
    axes[0, 0].set_ylabel("total cost $TK$")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside right center")
    plots.save(figure, settings.out / f"cost_{settings.solver}.png")
    tables.save(settings.out / f"cost_{settings.solver}", rows, show(rows))
    return rows


def hierarchical(settings: Settings) -> list[dict]:
    """Figs. 5.2 (d) and D.5: the cost of the runs of `cost` with hubs, c2 = 1, against LocalGD's (c1 + c2) T.

    "one hub": the whole cohort is under one hub, (c1 K + c2) T as in the thesis.  "spread": its clients have different
    hubs, as when hubs are the clusters of stratified sampling; then the server takes part in every aggregation, (c1 +
    c2) K T.  For the first target the cheapest setting is run again with these hubs, and its cost is computed from the
    metrics of that run.
    """
    rows: list[dict] = []
    size = (2.6 * len(settings.hubs) + 0.6, 2.4 * len(settings.datasets))
    figure, axes = plt.subplots(
        len(settings.datasets), len(settings.hubs), figsize=size, squeeze=False, layout="constrained"
    )
    for line, name in zip(axes, settings.datasets):
        found = grid(problem(name, settings), settings)
        for panel, c1 in zip(line, settings.hubs):
            for topology in TOPOLOGIES:
                priced = cost_rows(name, found, settings, c1, 1.0, topology)
                if "evaluations" in (first := priced[0]):
                    first["ledger"] = ledger(
                        problem(name, settings), settings, found, first["value"], c1, 1.0, topology
                    )
                rows += priced
            cost_panel(panel, found, settings.absolute[0], settings, c1, 1.0)
            panel.set_title(f"{name}, $c_1$ = {c1:g}, $c_2$ = 1")
        line[0].set_ylabel(f"$(c_1 K + c_2) T$ to $|x-x^\\star|^2 <$ {settings.absolute[0]:g}")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside right center")
    plots.save(figure, settings.out / f"hierarchical_{settings.solver}.png")
    tables.save(settings.out / f"hierarchical_{settings.solver}", rows, show(rows))
    return rows


def by_solver(settings: Settings) -> list[dict]:
    """Figs. 5.2 (b) and D.3: the prox by other solvers, each at its best gamma for every K.

    The table has the bits beside the two counts.
    """
    rows: list[dict] = []
    names, target = ("bfgs", "cg", "lbfgs", "agd", "gd", "aicn"), settings.absolute[0]
    size = (6.2, 2.4 * len(settings.datasets) + 0.2)
    figure, panels = plt.subplots(
        len(settings.datasets), 2, figsize=size, layout="constrained", sharey="row", squeeze=False
    )
    for axes, name in zip(panels, settings.datasets):
        one, rival = problem(name, settings), None
        for solver in names:
            found = grid(one, replace(settings, solver=solver), rival)
            rival = found.localgd
            bits = bits_to(found, target)
            for axis, count in zip(axes, ("iterations", "evaluations")):
                table = costs(found, target, 1.0, 0.0, count)[0].reshape(settings.most_local, -1)
                least = np.min(np.where(np.isfinite(table), table, np.inf), axis=1)
                best = np.where(np.isfinite(least), least, np.nan)
                axis.plot(np.arange(1, settings.most_local + 1), best, "o-", markersize=2.5, linewidth=1, label=solver)
                axis.set_xlabel("local rounds $K$")
                axis.set_title(f"{name}, counted as {count}")
            row = {"dataset": name, "solver": solver, "target": target} | cheapest(found, target, 1.0, 0.0)
            if np.isfinite(bits).any():
                row["kilobits"] = float(np.nanmin(bits)) / 1e3
            rows.append(row)
        local = rounds_to(found.localgd, target).mean(axis=1)
        if np.isfinite(local).any():
            for axis in axes:
                axis.axhline(np.nanmin(local), color="#D55E00", linestyle="--", linewidth=1, label="LocalGD, tuned")
            # As in SPPM-AS, the mean over clients: each client of a cohort uploads one float64 vector per round.
            spent, share = float(np.nanmin(local)), settings.clusters / len(one.rows)
            rows.append(
                {
                    "dataset": name,
                    "solver": "LocalGD, tuned",
                    "target": target,
                    "iterations": spent,
                    "evaluations": spent,
                    "kilobits": spent * 64 * len(one.optimum) * share / 1e3,
                }
            )
        axes[0].set_ylabel(f"total cost to $|x-x^\\star|^2 <$ {target:g}")
        axes[0].set_yscale("log")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside right center")
    plots.save(figure, settings.out / "solvers.png")
    lines = [
        f"{'data set':13} {'solver':15} {'iterations (gamma, K)':>26} {'evaluations (gamma, K)':>26} "
        f"{'kbit up a client':>17}"
    ]
    for r in rows:
        at = {
            count: f" ({r[f'{count}_gamma']:g}, {r[f'{count}_K']:d})" if f"{count}_K" in r else ""
            for count in ("iterations", "evaluations")
        }
        cells = [f"{r[count]:.1f}{at[count]}" if count in r else "-" for count in at]
        lines.append(
            f"{r['dataset']:13} {r['solver']:15} {cells[0]:>26} {cells[1]:>26} {r.get('kilobits', float('nan')):17.1f}"
        )
    tables.save(settings.out / "solvers", rows, "\n".join(lines))
    return rows


def epsilon(settings: Settings) -> list[dict]:
    """Fig. 5.2 (c): the least cost of both methods against the accuracy, relative to |x^0 - x*|^2.

    One panel has c1 = 1, c2 = 0, the other one has hubs.
    """
    rows: list[dict] = []
    fractions = np.geomspace(0.1, 1e-5, 17)
    labels = {"iterations": "SPPM-SS, iterations", "evaluations": "SPPM-SS, evaluations", "localgd": "LocalGD, tuned"}
    size = (6.2, 2.3 * len(settings.datasets) + 0.2)
    figure, panels = plt.subplots(len(settings.datasets), 2, figsize=size, layout="constrained", squeeze=False)
    for axes, name in zip(panels, settings.datasets):
        found = grid(problem(name, settings), settings)
        for axis, (c1, c2) in zip(axes, ((1.0, 0.0), (0.1, 1.0))):
            curves: dict[str, list] = {key: [] for key in labels}
            for fraction in fractions:
                both = {
                    count: costs(found, fraction * found.start, c1, c2, count)
                    for count in ("iterations", "evaluations")
                }
                values = {count: ours for count, (ours, _) in both.items()} | {"localgd": both["iterations"][1]}
                row = {key: float(np.nanmin(v)) if np.isfinite(v).any() else None for key, v in values.items()}
                rows.append({"dataset": name, "fraction": float(fraction), "c1": c1, "c2": c2} | row)
                for key, value in row.items():
                    curves[key].append(np.nan if value is None else value)
            for key, label in labels.items():
                axis.loglog(fractions, curves[key], "o-", markersize=2.5, linewidth=1, label=label)
            axis.invert_xaxis()
            axis.set_xlabel(r"target $|x-x^\star|^2 / |x^0-x^\star|^2$")
            axis.set_title(f"{name}, $c_1$ = {c1:g}, $c_2$ = {c2:g}")
        axes[0].set_ylabel("least cost $(c_1 K + c_2) T$")
    panels[0, 0].legend()
    plots.save(figure, settings.out / "epsilon.png")
    lines = [
        f"{'data set':13} {'c1':>5} {'c2':>3} {'fraction':>9} {'iterations':>11} {'evaluations':>12} {'LocalGD':>9}"
    ]
    for r in rows:
        cells = ["-" if r[key] is None else f"{r[key]:.1f}" for key in ("iterations", "evaluations", "localgd")]
        lines.append(
            f"{r['dataset']:13} {r['c1']:5g} {r['c2']:3g} {r['fraction']:9.1e} "
            f"{cells[0]:>11} {cells[1]:>12} {cells[2]:>9}"
        )
    tables.save(settings.out / "epsilon", rows, "\n".join(lines))
    return rows


COST_PAIRS = ((1.0, 0.0), (0.1, 1.0), (0.01, 1.0))  # (c1, c2) of `recommended`


def _measured(one: Any, advice: recommend.Recommendation, settings: Settings, rounds: int) -> tuple[float, float]:
    """(cost from the metrics of the run, global rounds) until the target, mean over seeds.

    Both are nan if a seed does not reach the target in `rounds`.
    """
    pool = stacked.pool(most_rows(one, advice.sampling))
    algorithm = watched(one, sppm_as.sppm_as(one.loss, advice.sampling, advice.solver, advice.hubs, pool=pool))
    start = jnp.ones(len(one.optimum))
    state = algorithm.init(start, jnp.arange(len(one.rows)))
    keys = jax.random.split(jax.random.key(settings.seed + 1), settings.seeds)
    hparams = runner.stack([sppm_as.HParams(advice.gamma, advice.K, 0.0)])
    _, metrics = runner.sweep(keys, algorithm, hparams, state, one.data, rounds)
    distance = np.asarray(metrics.distance)[0]
    needed = np.array([tables.first(run, advice.accuracy * distance[0, 0]) for run in distance])
    counted = sppm_as.Metrics(*(getattr(metrics, name) for name in sppm_as.Metrics._fields))
    spent = np.asarray(sppm_as.cost(counted, advice.c1, advice.c2))[0]
    paid = [row[: int(T)].sum() if np.isfinite(T) else np.nan for row, T in zip(spent, needed)]
    return float(np.mean(paid)), float(np.mean(needed))


def recommended(settings: Settings) -> list[dict]:
    """The practical Table 5.1 as a function: what `recommend` predicts, and what its choice costs in a run.

    All clients are under one hub, so that c2 is charged once per global round, as in the thesis.
    """
    rows: list[dict] = []
    for name in settings.datasets:
        one = problem(name, settings)
        hubs = Hubs.make(np.zeros(len(one.rows), int))
        pilot = recommend.pilot(
            jax.random.key(settings.seed),
            one.loss,
            jnp.ones(len(one.optimum)),
            one.data,
            one.clusters,
            hubs=hubs,
            rounds=settings.rounds,
        )
        for accuracy in (0.1, 0.01):
            for c1, c2 in COST_PAIRS:
                advice = pilot.recommend(accuracy, c1, c2)
                measured, needed = _measured(one, advice, settings, settings.rounds)
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
    columns = f"{'data set':13} {'target':>6} {'c1':>5} {'c2':>3} {'sampling':15} {'gamma':>7} {'K':>2}"
    lines = [f"{columns} {'T: predicted':>12} {'measured':>8} {'cost: predicted':>15} {'measured':>8} {'pilot':>5}"]
    for r in rows:
        lines.append(
            f"{r['dataset']:13} {r['accuracy']:6g} {r['c1']:5g} {r['c2']:3g} {r['sampling']:15} "
            f"{r['gamma']:7.3g} {r['K']:2d}"
            f" {r['T']:12.1f} {r['rounds']:8.1f} {r['predicted']:15.2f} {r['measured']:8.2f} {r['spent']:5d}"
        )
    tables.save(settings.out / "recommended", rows, "\n".join(lines))
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
    "networks": cohort_squeeze_networks.networks,
    "network-solvers": cohort_squeeze_networks.network_solvers,
}
