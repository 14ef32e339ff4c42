"""The convex figures of Chapter 3, and the tables beside them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from experiments import plots, tables
from experiments.scafflix.runs import Settings
from experiments.tables import Column, fields

Rows = Sequence[dict[str, Any]]
# alpha -> two curves against communication rounds, drawn solid and dashed
Curves = dict[float, tuple[np.ndarray, np.ndarray]]


def _alpha_panel(panel: Axes, curves: Curves, title: str) -> None:
    """Draw both curves of every alpha, one colour per alpha."""
    for shade, (alpha, pair) in zip(plots.shades(len(curves)), curves.items()):
        for values, line in zip(pair, ("-", "--")):
            pick = plots.thin(values)
            panel.semilogy(pick, np.maximum(values[pick], 1e-14), line, color=shade, linewidth=1.1)
        panel.plot([], [], color=shade, label=rf"$\alpha$ = {alpha:g}")
    panel.set_title(title)
    panel.set_xlabel("communication rounds")


def _legend(axes: Axes, solid: str, dashed: str) -> None:
    """Label the first panel: the objective, and which method is which line."""
    axes.set_ylabel(r"$\tilde f(x) - \tilde f^\star$")
    axes.plot([], [], "k-", label=solid)
    axes.plot([], [], "k--", label=dashed)
    axes.legend(ncols=2, columnspacing=0.8, handlelength=1.4)


def acceleration(panels: Mapping[str, tuple[Rows, Curves]], accuracy: float, path: Path) -> None:
    """Scafflix against GD, one panel per data set."""
    size = (2.5 * len(panels) + 0.2, 2.3)
    figure, axes = plots.panels(1, len(panels), size)
    for panel, (name, (rows, curves)) in zip(axes[0], panels.items()):
        ratios = [row["ratio"] for row in rows]
        title = f"{name}, {rows[0]['split']}: {min(ratios):.2f} to {max(ratios):.2f} of GD's rounds"
        _alpha_panel(panel, curves, title)
        panel.set(ylim=(accuracy / 10, None), xlim=(0, 1.1 * np.nanmax([row["gd"] for row in rows])))
    _legend(axes[0, 0], "Scafflix", "GD")
    plots.save(figure, path)


DATASET = Column("data set", "dataset", "14")
ACCELERATION = [
    DATASET,
    *fields(split="9", alpha="5.1f", kappa_max="9.1f"),
    Column("GD", "gd", "7.0f"),
    Column("Scafflix", lambda row: f"{row['scafflix']:9.1f} +- {row['scafflix_std']:3.1f}", ">16"),
    *fields(ratio="6.3f"),
]


def acceleration_table(rows: Rows, settings: Settings) -> str:
    """The table of `double_acceleration` as text."""
    fewer = all(row["ratio"] < 1 for row in rows)
    falling = all(
        np.all(np.diff([row[method] for row in rows if (row["dataset"], row["split"]) == key]) >= 0)
        for key in dict.fromkeys((row["dataset"], row["split"]) for row in rows)
        for method in ("gd", "scafflix")
    )
    return (
        f"communication rounds to f - f* <= {settings.accuracy:g}, n = {settings.n}, mu = {settings.mu}\n"
        f"{tables.table(ACCELERATION, rows)}\n"
        f"Scafflix needs fewer rounds than GD in every row: {fewer}; fewer rounds for smaller alpha: {falling}"
    )


def inexact(rows: Rows, curves: dict[tuple[str, float], np.ndarray], path: Path) -> None:
    """Distances with inexact local optima, by epsilon and by iterations; and the iterations that an epsilon costs."""
    figure, axes = plt.subplots(1, 3, figsize=(7.0, 2.2), layout="constrained")
    titles = {
        "epsilon": (r"$|\nabla f_i| < \epsilon$", "upper right"),
        "iterations": ("local iterations", "lower left"),
    }
    for panel, (kind, (title, place)) in zip(axes, titles.items()):
        chosen = {value: distance for (of, value), distance in curves.items() if of == kind}
        for shade, (value, distance) in zip(plots.shades(len(chosen)), chosen.items()):
            panel.semilogy(distance, color=shade, label=f"{value:g}")
        panel.set_xlabel("communication rounds")
        panel.set_ylabel(r"mean$_i$ $|\tilde x_i - \tilde x_i^\star|^2$")
        panel.legend(title=title, title_fontsize=7, loc=place, ncols=2, columnspacing=0.8, handlelength=1)
    by_epsilon = [row for row in rows if row["kind"] == "epsilon"]
    mean, least, most = (np.array([row[f"iterations_{name}"] for row in by_epsilon]) for name in ("mean", "min", "max"))
    epsilons, spread = [row["value"] for row in by_epsilon], np.stack([mean - least, most - mean])
    axes[2].errorbar(epsilons, mean, yerr=spread, marker="o", markersize=3, capsize=2)
    axes[2].set_xscale("log")
    axes[2].set_xlabel(r"$\epsilon$")
    axes[2].set_ylabel("local iterations (mean, range)")
    plots.save(figure, path)


INEXACT = [
    *fields(kind="11", value="8g"),
    Column(
        "iterations (min, mean, max)",
        lambda row: f"{row['iterations_min']:8d} {row['iterations_mean']:10.1f} {row['iterations_max']:8d}",
        ">28",
    ),
    Column("mean |xt - xt*|^2", "distance", "18.3e"),
    Column("mean f_i - best", "loss", "16.3e"),
]


def inexact_table(rows: Rows, title: str) -> str:
    """The table of `inexact` as text."""
    mean = [row["iterations_mean"] for row in rows if row["kind"] == "epsilon"]
    ratio = f"iterations at epsilon = 1e-6 over those at 1e-1: {mean[0] / mean[-1]:.2f} (thesis: 23.55)"
    return f"{title}\n{tables.table(INEXACT, rows)}\n{ratio}"


def stepsizes(panels: Mapping[str, tuple[Rows, Curves]], accuracy: float, path: Path) -> None:
    """One stepsize per client against one for all, one panel per data set."""
    figure, axes = plots.panels(1, len(panels), (2.6 * len(panels), 2.3))
    for panel, (name, (rows, curves)) in zip(axes[0], panels.items()):
        _alpha_panel(panel, curves, f"{name}, feature-wise")
        panel.set(ylim=(accuracy / 10, None), xlim=(0, 1.2 * np.nanmax([row["global"] for row in rows])))
    _legend(axes[0, 0], "individual", "global")
    plots.save(figure, path)


def stepsizes_table(rows: Rows, settings: Settings) -> str:
    """The table of `stepsizes` as text."""
    columns = [DATASET, *fields(alpha="5.1f", individual="11.1f"), Column("global", "global", "8.1f")]
    return f"rounds to {settings.accuracy:g}, feature-wise split\n{tables.table(columns, rows)}"


def probability(rows: Rows, accuracy: float, title: str, path: Path) -> None:
    """Rounds and iterations against p."""
    figure, axes = plt.subplots(figsize=(3.4, 2.4), layout="constrained")
    grid, blue = [row["p"] for row in rows], plots.COLORS["Scafflix"]
    rounds, steps = ([row[field] for row in rows] for field in ("rounds", "iterations"))
    axes.loglog(grid, rounds, "o-", markersize=3, color=blue, label="communication rounds")
    axes.loglog(grid, steps, "s--", markersize=3, color="grey", label="local iterations")
    theory = r"theory: $\sqrt{\min_i \gamma_i\mu_i}$"
    axes.axvline(rows[0]["theory"], color="k", linewidth=0.8, linestyle=":", label=theory)
    axes.set_xlabel("communication probability $p$")
    axes.set_ylabel(f"to reach {accuracy:g}")
    axes.set_title(title)
    axes.legend()
    plots.save(figure, path)


def probability_table(rows: Rows) -> str:
    """The table of `probability` as text."""
    columns = fields(p="8.4f", rounds="9.1f", iterations="11.1f")
    return f"theory's p = {rows[0]['theory']:.4f}\n{tables.table(columns, rows)}"
