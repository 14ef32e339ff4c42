"""The figures of Chapter 5 on networks, and the tables beside them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from commjax.core.records import Record
from experiments import plots, tables
from experiments.cohort_squeeze.networks import Measured, Runs, Settings, shown
from experiments.tables import Column

Rows = Sequence[dict[str, Any]]


def _curve(axis: Axes, records: list[Record], round_cost: float, label: str, line: str = "-") -> None:
    """Draw training accuracy against cost, with its deviation over seeds."""
    scores = 100 * np.array([record.evaluations["train"] for record in records])
    spent = records[0].evaluations["round"] * round_cost
    mean = scores.mean(axis=0)
    (drawn,) = axis.plot(spent, mean, line, linewidth=1, label=label)
    if len(scores) > 1:
        deviation = scores.std(axis=0, ddof=1)
        axis.fill_between(spent, mean - deviation, mean + deviation, color=drawn.get_color(), alpha=0.15, linewidth=0)


def cost(runs: Measured, rows: Rows, settings: Settings, path: Path) -> None:
    """Accuracy against cost where c1 = 0.1 and c2 = 1, and the least cost to every target against c1."""
    figure, axes = plt.subplots(1, 2, figsize=(6.4, 2.6), layout="constrained")
    for K, several in runs.sppm.items():
        _curve(axes[0], several.records, 0.1 * K + 1, f"SPPM-NICE, $K$ = {K}")
    for steps, several in runs.localgd.items():
        _curve(axes[0], several.records, 1.1, f"LocalGD, {steps} steps", "--")
    axes[0].set_xlabel("cost $(0.1 K + 1) T$")
    axes[0].set_ylabel("training accuracy, %")
    axes[0].set_title(f"{settings.task}, {settings.cohort} clients a round")
    axes[0].legend(fontsize=5)
    for number, target in enumerate(settings.targets):
        for name, method, line in (("sppm", "SPPM-NICE", "o-"), ("localgd", "LocalGD", "s--")):
            least = [row.get(name) for row in rows if row["target"] == target and row["c2"] == 1.0]
            values = [np.nan if value is None else value for value in least]
            look = {"color": f"C{number}", "markersize": 3, "linewidth": 1, "label": f"{method}, {100 * target:g} %"}
            axes[1].plot(settings.c1, values, line, **look)
    axes[1].set_xscale("log")
    axes[1].set_yscale("log")
    axes[1].set_xlabel("$c_1$ ($c_2$ = 1)")
    axes[1].set_ylabel("least cost to the target")
    axes[1].legend(fontsize=5)
    plots.save(figure, path)


def cost_table(rows: Rows) -> str:
    """The table of `networks` as text."""

    def cell(row: dict[str, Any], name: str, key: str) -> str:
        return "-" if row[name] is None else f"{row[name]:.1f} +- {row[f'{name}_std']:.1f} ({row[key]})"

    columns = [
        Column("target", "target", "7g"),
        Column("c1", "c1", "5g"),
        Column("c2", "c2", "3g"),
        Column("SPPM-NICE (K)", lambda row: cell(row, "sppm", "K"), ">22"),
        Column("LocalGD (steps)", lambda row: cell(row, "localgd", "steps"), ">24"),
    ]
    return tables.table(columns, rows)


def solvers(runs: dict[str, Runs], path: Path) -> None:
    """Training and test accuracy against global rounds, one curve per worker."""
    figure, axes = plt.subplots(1, 2, figsize=(6.2, 2.6), layout="constrained", sharex=True)
    for axis, part, word in zip(axes, ("train", "test"), ("training", "test")):
        for name, several in runs.items():
            scores = 100 * np.array([record.evaluations[part] for record in several.records])
            axis.plot(several.records[0].evaluations["round"], scores.mean(axis=0), linewidth=1, label=name)
        axis.set_xlabel("global rounds, $K$ = 3")
        axis.set_ylabel(f"{word} accuracy, %")
    axes[0].legend(fontsize=6)
    plots.save(figure, path)


def solvers_table(rows: Rows) -> str:
    """The table of `network-solvers` as text."""
    columns = [
        Column("solver", "solver", "15"),
        Column("rate", lambda row: shown(row["rate"]), ">12"),
        Column("training, %", lambda row: f"{row['train']:8.2f} +- {row['train_std']:4.2f}", ">16"),
        Column("test, %", lambda row: f"{row['test']:8.2f} +- {row['test_std']:4.2f}", ">16"),
        Column("Mbit up a client", "megabits", "17.1f"),
    ]
    return tables.table(columns, rows)
