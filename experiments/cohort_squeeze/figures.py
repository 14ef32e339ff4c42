"""The convex figures of Chapter 5, and the tables beside them."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import LogFormatter, MaxNLocator

from experiments import plots, tables
from experiments.cohort_squeeze.costs import COUNTS, SolverCosts, costs
from experiments.cohort_squeeze.grid import Grid
from experiments.cohort_squeeze.runs import SOLVERS, Settings
from experiments.tables import Column, fields

Rows = Sequence[dict[str, Any]]
LOCALGD = {"color": "#D55E00", "linestyle": "--", "linewidth": 1, "label": "LocalGD, tuned"}
BAR = Column("|", lambda row: "|", "1")
DATASET = Column("data set", "dataset", "13")
UNIT_COSTS = fields(c1="5g", c2="3g")


def _cost_panel(panel: Axes, grid: Grid, settings: Settings, c1: float, c2: float) -> None:
    """Draw the cost to the first target against K, one curve per gamma, and LocalGD's least cost."""
    ours, local = costs(grid, settings.absolute[0], c1, c2, "iterations")
    K = np.arange(1, settings.most_local + 1)
    for shade, gamma, values in zip(plots.shades(len(settings.gammas)), settings.gammas, ours.reshape(len(K), -1).T):
        if np.isfinite(values).any():
            panel.plot(K, values, "o-", markersize=2.5, color=shade, label=rf"$\gamma$ = {gamma:g}")
    if np.isfinite(local).any():
        panel.axhline(np.nanmin(local), **LOCALGD)
    panel.set_yscale("log")
    for ticks in (panel.yaxis.set_major_formatter, panel.yaxis.set_minor_formatter):
        ticks(LogFormatter(labelOnlyBase=False, minor_thresholds=(2, 0.5)))
    panel.set_xlim(0, settings.most_local + 1)
    panel.xaxis.set_major_locator(MaxNLocator(5, integer=True))
    panel.set_xlabel("local communication rounds $K$")


def cost(grids: dict[str, Grid], settings: Settings, path: Path) -> None:
    """The cost TK against K, one panel per data set."""
    size = (2.6 * len(grids) + 0.6, 2.5)
    figure, axes = plots.panels(1, len(grids), size)
    for panel, (name, grid) in zip(axes[0], grids.items()):
        _cost_panel(panel, grid, settings, 1.0, 0.0)
        panel.set_title(f"{name}, {settings.solver}, $|x-x^\\star|^2 <$ {settings.absolute[0]:g}")
    axes[0, 0].set_ylabel("total cost $TK$")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside right center")
    plots.save(figure, path)


def hierarchical(grids: dict[str, Grid], settings: Settings, path: Path) -> None:
    """The cost with one hub against K, one row of panels per data set, one column per c1."""
    size = (2.6 * len(settings.hubs) + 0.6, 2.4 * len(grids))
    figure, axes = plots.panels(len(grids), len(settings.hubs), size)
    for line, (name, grid) in zip(axes, grids.items()):
        for panel, c1 in zip(line, settings.hubs):
            _cost_panel(panel, grid, settings, c1, 1.0)
            panel.set_title(f"{name}, $c_1$ = {c1:g}, $c_2$ = 1")
        line[0].set_ylabel(f"$(c_1 K + c_2) T$ to $|x-x^\\star|^2 <$ {settings.absolute[0]:g}")
    figure.legend(*axes[0, 0].get_legend_handles_labels(), loc="outside right center")
    plots.save(figure, path)


def _cell(row: dict[str, Any], key: str, form: str) -> str:
    """A value of a row as text, or "-" if the row has none."""
    return format(row[key], form) if row.get(key) is not None else "-"


def _at_setting(value: str, first: str, second: str, form: str = "g") -> Callable[[dict[str, Any]], str]:
    """Function of a row: the value, and in brackets the two numbers of its setting."""
    return lambda row: f"{_cell(row, value, '.1f')} ({_cell(row, first, form)}, {_cell(row, second, 'd')})"


COST = [
    DATASET,
    Column("target |x-x*|^2", "target", ">18"),
    *UNIT_COSTS,
    *fields(hubs=">8"),
    BAR,
    Column("SPPM-SS, iterations (gamma, K)", _at_setting("iterations", "iterations_gamma", "iterations_K"), ">31"),
    BAR,
    Column("evaluations (gamma, K)", _at_setting("evaluations", "evaluations_gamma", "evaluations_K"), ">25"),
    BAR,
    Column("LocalGD (stepsize, steps)", _at_setting("localgd", "localgd_stepsize", "localgd_steps", ".3g"), ">27"),
    BAR,
    Column("at stepsize 0.1", lambda row: _cell(row, "localgd_at_0.1", ".1f"), ">15"),
    BAR,
    Column("evaluations, from the ledger of a run with hubs", lambda row: _cell(row, "ledger", ".1f"), ""),
]


def cost_table(rows: Rows) -> str:
    """The table of `cost` and of `hierarchical` as text."""
    return tables.table(COST, rows)


def solvers(results: dict[str, SolverCosts], settings: Settings, path: Path) -> None:
    """The least cost over gamma against K, one curve per solver, counted in both ways."""
    size = (6.2, 2.4 * len(results) + 0.2)
    figure, panels = plots.panels(len(results), 2, size, sharey="row")
    for axes, (name, result) in zip(panels, results.items()):
        for axis, count in zip(axes, COUNTS):
            for solver in SOLVERS:
                K = np.arange(1, settings.most_local + 1)
                axis.plot(K, result.curves[solver, count], "o-", markersize=2.5, linewidth=1, label=solver)
            axis.set_xlabel("local rounds $K$")
            axis.set_title(f"{name}, counted as {count}")
            if result.localgd is not None:
                axis.axhline(result.localgd, **LOCALGD)
        axes[0].set_ylabel(f"total cost to $|x-x^\\star|^2 <$ {settings.absolute[0]:g}")
        axes[0].set_yscale("log")
    figure.legend(*panels[0, 0].get_legend_handles_labels(), loc="outside right center")
    plots.save(figure, path)


def _counted(count: str) -> Callable[[dict[str, Any]], str]:
    """Function of a row: its cost by a count, and in brackets gamma and K; LocalGD has neither."""

    def cell(row: dict[str, Any]) -> str:
        setting = f" ({row[f'{count}_gamma']:g}, {row[f'{count}_K']:d})" if f"{count}_K" in row else ""
        return f"{row[count]:.1f}{setting}" if count in row else "-"

    return cell


def solvers_table(rows: Rows) -> str:
    """The table of `solvers` as text."""
    columns = [
        DATASET,
        *fields(solver="15"),
        *(Column(f"{count} (gamma, K)", _counted(count), ">26") for count in COUNTS),
        Column("kbit up a client", lambda row: row.get("kilobits", float("nan")), "17.1f"),
    ]
    return tables.table(columns, rows)


def epsilon(rows: Rows, path: Path) -> None:
    """The least costs against the accuracy, one row of panels per data set, one column per (c1, c2)."""
    labels = {"iterations": "SPPM-SS, iterations", "evaluations": "SPPM-SS, evaluations", "localgd": "LocalGD, tuned"}
    names = list(dict.fromkeys(row["dataset"] for row in rows))
    pairs = list(dict.fromkeys((row["c1"], row["c2"]) for row in rows))
    size = (6.2, 2.3 * len(names) + 0.2)
    figure, panels = plots.panels(len(names), len(pairs), size)
    for axes, name in zip(panels, names):
        for axis, (c1, c2) in zip(axes, pairs):
            chosen = [row for row in rows if (row["dataset"], row["c1"], row["c2"]) == (name, c1, c2)]
            for key, label in labels.items():
                values = [np.nan if row[key] is None else row[key] for row in chosen]
                axis.loglog([row["fraction"] for row in chosen], values, "o-", markersize=2.5, linewidth=1, label=label)
            axis.invert_xaxis()
            axis.set_xlabel(r"target $|x-x^\star|^2 / |x^0-x^\star|^2$")
            axis.set_title(f"{name}, $c_1$ = {c1:g}, $c_2$ = {c2:g}")
        axes[0].set_ylabel("least cost $(c_1 K + c_2) T$")
    panels[0, 0].legend()
    plots.save(figure, path)


def epsilon_table(rows: Rows) -> str:
    """The table of `epsilon` as text."""
    columns = [
        DATASET,
        *UNIT_COSTS,
        *fields(fraction="9.1e"),
        Column("iterations", lambda row: _cell(row, "iterations", ".1f"), ">11"),
        Column("evaluations", lambda row: _cell(row, "evaluations", ".1f"), ">12"),
        Column("LocalGD", lambda row: _cell(row, "localgd", ".1f"), ">9"),
    ]
    return tables.table(columns, rows)


def recommended_table(rows: Rows) -> str:
    """The table of `recommended` as text."""
    columns = [
        DATASET,
        Column("target", "accuracy", "6g"),
        *UNIT_COSTS,
        *fields(sampling="15", gamma="7.3g", K="2d"),
        Column("T: predicted", "T", "12.1f"),
        Column("measured", "rounds", "8.1f"),
        Column("cost: predicted", "predicted", "15.2f"),
        Column("measured", "measured", "8.2f"),
        Column("pilot", "spent", "5d"),
    ]
    return tables.table(columns, rows)
