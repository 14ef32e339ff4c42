"""The figures and tables of the networks of Chapter 3."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes

from commjax.core.records import Record
from experiments import plots, tables
from experiments.scafflix.networks import Settings
from experiments.tables import Column

# method -> its stepsize, megabits [evaluation] and test accuracies [seed, evaluation] (`networks.measure`)
Results = dict[str, dict[str, Any]]


def rows_of(results: Results, settings: Settings) -> list[dict[str, Any]]:
    """The last accuracy of each method: mean and deviation over seeds, in percent."""
    rows = []
    for name, result in results.items():
        last = result["test"][:, -1] if result["test"].ndim == 2 else result["test"]
        rows.append(
            {
                "task": settings.task,
                "method": name,
                "stepsize": result.get("stepsize"),
                "accuracy": 100 * float(last.mean()),
                "std": 100 * float(last.std(ddof=1)) if len(last) > 1 else float("nan"),
                "megabits": float(result["megabits"][-1]) if "megabits" in result else 0.0,
            }
        )
    return rows


ACCURACIES = [
    Column("method", "method", "12"),
    Column("stepsize", lambda row: "" if row["stepsize"] is None else format(row["stepsize"], "g"), ">8"),
    Column("accuracy, %", lambda row: f"{row['accuracy']:8.2f} +- {row['std']:4.2f}", ">16"),
    Column("Mbit up", "megabits", "9.3f"),
]


def table(rows: Sequence[dict[str, Any]], settings: Settings) -> str:
    """The accuracies as text."""
    return (
        f"{settings.task}: test accuracy of what the clients deploy after {settings.rounds} rounds, "
        f"mean +- deviation of {settings.seeds} seeds\n{tables.table(ACCURACIES, rows)}"
    )


def curves(axes: Axes, results: Results) -> None:
    """Draw test accuracy against megabits, with error bars."""
    for name, result in results.items():
        mean, spread = 100 * result["test"].mean(axis=0), 100 * result["test"].std(axis=0, ddof=1)
        if name == "local only":
            axes.axhline(mean, color="grey", linestyle=":", linewidth=1, label="local only")
            continue
        axes.errorbar(result["megabits"], mean, yerr=spread, capsize=1.5, elinewidth=0.7, **plots.style(name))
    axes.set_xlabel("Mbit sent by one client")
    axes.set_ylabel("test accuracy, %")
    worst = min(100 * result["test"].mean(axis=0)[-1] for name, result in results.items() if name != "local only")
    axes.set_ylim(bottom=max(0, worst - 12))  # the accuracy of the untrained network would hide the rest


def accuracy_against_bits(results: Results, clients: int, settings: Settings, path: Path) -> None:
    """Test accuracy against megabits, one curve per method."""
    figure, axes = plt.subplots(figsize=(3.4, 2.5), layout="constrained")
    curves(axes, results)
    axes.set_title(f"{settings.task}, {clients} clients, $\\alpha$ = {settings.alpha:g}, p = {settings.p:g}")
    axes.legend()
    plots.save(figure, path)


def ablations(runs: dict[tuple[str, float], list[Record]], path: Path) -> list[dict[str, Any]]:
    """Test accuracy against rounds, one panel per knob and one curve per value; returns the last accuracies."""
    titles = {"alpha": r"$\alpha$", "cohort": r"$\tau$", "p": "$p$"}
    figure, axes = plt.subplots(1, 3, figsize=(7.0, 2.3), layout="constrained")
    rows = []
    for panel, (knob, title) in zip(axes, titles.items()):
        chosen = {value: records for (of, value), records in runs.items() if of == knob}
        for shade, (value, records) in zip(plots.shades(len(chosen)), chosen.items()):
            scores = 100 * np.array([record.evaluations["test"] for record in records])
            mean, spread = scores.mean(axis=0), scores.std(axis=0)
            rounds = records[0].evaluations["round"]
            panel.errorbar(rounds, mean, yerr=spread, color=shade, capsize=1.5, elinewidth=0.7, label=f"{value:g}")
            rows.append({"knob": knob, "value": value, "accuracy": mean[-1], "std": spread[-1]})
        panel.set_xlabel("communication rounds")
        panel.legend(title=title, title_fontsize=7)
    axes[0].set_ylabel("test accuracy, %")
    plots.save(figure, path)
    return rows


def ablations_table(rows: Sequence[dict[str, Any]], title: str) -> str:
    """The last accuracies of the ablations as text."""
    columns = [
        Column("knob", "knob", "7"),
        Column("value", "value", "5g"),
        Column("accuracy, %", lambda row: f"{row['accuracy']:8.2f} +- {row['std']:.2f}", ">16"),
    ]
    return f"{title}\n{tables.table(columns, rows)}"
