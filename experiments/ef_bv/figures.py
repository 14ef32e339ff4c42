"""The figures of Chapter 2, and the table of bits beside them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from commjax.core.records import Record
from experiments import plots, tables
from experiments.ef_bv.runs import METHODS, bits_to_targets
from experiments.tables import Column, fields

# (data set, k, xi) -> record
Records = dict[tuple[str, int, int], Record]


def panel(axes: Axes, record: Record, metric: str = "loss") -> None:
    """Draw the curves of both methods against kilobits."""
    floor = record.config["floor"] if metric == "loss" else 0.0
    for row, method in enumerate(METHODS):
        values = record.metrics[metric][row, 0] - floor
        values = values if metric == "loss" else np.minimum.accumulate(values)
        pick = plots.thin(values)
        axes.semilogy(record.bits_up()[row, 0][pick] / 1e3, values[pick], **plots.style(method))
    axes.set_title(f"{record.config['dataset']}, k={record.config['k']}")


def grid_figure(records: Records, metric: str, ylabel: str) -> Figure:
    """One panel per data set and (k, xi)."""
    names = list(dict.fromkeys(name for name, _, _ in records))
    rows = list(dict.fromkeys((k, xi) for _, k, xi in records))
    figure, axes = plots.panels(len(rows), len(names), (1.8 * len(names) + 0.3, 1.65 * len(rows) + 0.3))
    for (name, k, xi), record in records.items():
        panel_axes = axes[rows.index((k, xi)), names.index(name)]
        panel(panel_axes, record, metric)
        panel_axes.set_title(f"{name}, k={k}, $\\xi$={xi}")
    figure.supxlabel("kilobits sent by one client (first exchange included)", fontsize=8)
    figure.supylabel(ylabel, fontsize=8)
    axes[0, 0].legend()
    return figure


BITS_TABLE = [
    Column("data set", "dataset", "12"),
    *fields(k="2d", xi="2d"),
    Column("target", "fraction", "7g"),
    Column("EF-BV bits", lambda row: row["bits"][0], "12.0f"),
    Column("EF21 bits", lambda row: row["bits"][1], "12.0f"),
    *fields(ratio="6.3f"),
    Column("sqrt(r_av/r)", "predicted", "13.3f"),
]


def report(records: Records, metric: str = "loss") -> str:
    """Table: measured bits of EF-BV over EF21 at every target that one of them reaches, beside the prediction."""
    rows = [
        {"dataset": name, "k": k, "xi": xi, "predicted": record.config["predicted"], **target}
        for (name, k, xi), record in records.items()
        for target in bits_to_targets(record, metric=metric)
    ]
    return tables.table(BITS_TABLE, rows)


def ratio_figure(rows: Sequence[dict[str, Any]], xlabel: str, path: Path) -> None:
    """Measured and predicted ratios of bits, one pair of curves per data set."""
    figure, axes = plt.subplots(figsize=(3.4, 2.5), layout="constrained")
    for name in dict.fromkeys(row["dataset"] for row in rows):
        x, measured, predicted = (
            [row[field] for row in rows if row["dataset"] == name] for field in ("value", "ratio", "predicted")
        )
        line = axes.semilogx(x, measured, "o", label=f"{name}, measured")[0]
        axes.semilogx(x, predicted, "--", color=line.get_color(), label=r"$\sqrt{r_{av}/r}$")
    axes.set_xlabel(xlabel)
    axes.set_ylabel("bits of EF-BV / bits of EF21")
    axes.legend()
    plots.save(figure, path)


def stepsize_figure(record: Record, factors: Sequence[float], path: Path) -> None:
    """The gap after the last round against gamma / (theoretical gamma), for both methods."""
    loss, floor = record.metrics["loss"][:, 0], record.config["floor"]
    figure, axes = plt.subplots(figsize=(3.4, 2.5), layout="constrained")
    for method, row in zip(METHODS, loss[:, -1].reshape(2, -1) - floor):
        axes.loglog(factors, np.where(np.isfinite(row), row, np.nan), marker="o", markersize=3, **plots.style(method))
    axes.axhline(loss[0, 0] - floor, color="grey", linewidth=0.8, label="start")
    axes.set_xlabel(r"$\gamma$ / theoretical $\gamma$")
    axes.set_ylabel(rf"$f(x^t) - f^\star$ after {loss.shape[1]} rounds")
    axes.set_title(f"{record.config['dataset']}, n={record.config['n']}")
    axes.legend()
    plots.save(figure, path)
