"""Tables and figures of the runs of Chapter 4."""

from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from experiments import plots, tables
from experiments.fedp3.task import Settings


def _lines(rows: list[dict], settings: Settings, thesis: dict[tuple[str, str], str] | None) -> list[str]:
    some = f", {settings.rows} rows" if settings.rows else ""
    lines = [
        f"{settings.task}{some}, {settings.model} of width {settings.width}, {settings.clients} clients, "
        f"{settings.cohort} a round, {settings.rounds} rounds of {settings.steps} steps; "
        f"layers not trained: {settings.others}",
        "accuracy (%) of the global model, and mean over clients of that of local models (F23); "
        f"mean +- deviation of {settings.seeds} seeds, each with a plan of its own",
        "kbit of a client a round, mean +- deviation, and [in expectation over plans]",
        f"{'split':10} {'run':20} {'global':>14} {'local':>14} {'kbit up':>27} {'kbit down':>27}"
        + ("  thesis" if thesis else ""),
    ]
    for r in rows:
        own = f"{r['local']:6.2f} +- {r['local std']:4.2f}" if np.isfinite(r["local"]) else ""
        up, down = (
            f"{r[way] / 1e3:8.1f} +- {r[f'{way} std'] / 1e3:5.1f} [{r[f'{way} expected'] / 1e3:7.1f}]"
            for way in ("up", "down")
        )
        beside = "" if not thesis else f"  {thesis.get((r['name'], r['split']), '')}"
        lines.append(
            f"{r['split']:10} {r['name']:20} {r['accuracy']:6.2f} +- {r['std']:4.2f} {own:>14} "
            f"{up:>27} {down:>27}{beside}"
        )
    return lines


def report(name: str, rows: list[dict], settings: Settings, thesis: dict[tuple[str, str], str] | None = None) -> None:
    """Write a table as text and JSON, and a bar chart of the accuracies.

    Args:
        name: Name of the table, part of the file names.
        rows: The rows, as `runs.measure` returns them.
        settings: Settings of the runs.
        thesis: The thesis's figure for (name of the row, split), shown in a column.
    """
    lines = _lines(rows, settings, thesis)
    names = list(dict.fromkeys(row["name"] for row in rows))
    figure, axes = plt.subplots(figsize=(max(3.4, 0.55 * len(names)), 2.6), layout="constrained")
    for number, split in enumerate(settings.splits):
        mine = {row["name"]: row for row in rows if row["split"] == split}
        at = np.arange(len(names)) + 0.38 * (number - (len(settings.splits) - 1) / 2)
        axes.bar(
            at,
            [mine[one]["accuracy"] for one in names],
            0.36,
            yerr=[mine[one]["std"] for one in names],
            capsize=2,
            label={"class": "S1: class-wise", "dirichlet": "S2: Dirichlet"}[split],
            color=("#0072B2", "#E69F00")[number % 2],
        )
    axes.set_xticks(np.arange(len(names)), names, rotation=30, ha="right")
    axes.set_ylabel("test accuracy, %")
    axes.set_ylim(bottom=max(0.0, np.nanmin([row["accuracy"] for row in rows]) - 12))
    axes.set_title(f"{settings.task}, {settings.model}")
    axes.legend(loc="lower right", frameon=True)
    stem = stem_of(name, settings)
    plots.save(figure, stem.with_name(stem.name + ".png"))
    tables.save(stem, rows, "\n".join(lines))


def stem_of(name: str, settings: Settings) -> Path:
    """Return the path of the files of a table, without suffix."""
    changed = f"_opu{settings.trained}" * (name in ("ratio", "local") and settings.trained != 3)
    changed += f"_{settings.others}" * (settings.others != "frozen")
    return settings.out / f"{name}_{settings.task}_{settings.model}{changed}"
