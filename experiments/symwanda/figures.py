"""Figures of the SymWanda experiments."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from commjax.pruning.masks import Group
from experiments import plots
from experiments.symwanda.task import Settings

GROUPS: tuple[Group, ...] = ("output", "layer")


def methods(settings: Settings, rows: Sequence[dict], names: Sequence[str], dense: float) -> None:
    """Draw perplexity over sparsity, one line per score and one panel per comparison group.

    Args:
        settings: Settings of the table.
        rows: The rows of the table, named "SCORE, SPARSITY %".
        names: Names of the scores.
        dense: Perplexity of the dense model.
    """
    figure, axes = plt.subplots(1, 2, figsize=(6.4, 2.6), layout="constrained", sharey=True)
    for axis, group in zip(axes, GROUPS):
        for number, name in enumerate(names):
            axis.semilogy(
                [100 * s for s in settings.sparsities],
                [
                    row[group]
                    for row in rows
                    if row["name"].startswith(f"{name}, ") and row["name"].count(",") == name.count(",") + 1
                ],
                "o-",
                markersize=2.5,
                linewidth=1,
                color=f"C{number}",
                label=name,
            )
        axis.axhline(dense, color="grey", linestyle=":", linewidth=1, label="dense")
        axis.set_xlabel("sparsity, %")
        axis.set_title(f"{Path(settings.model).name}, {group} group")
    axes[0].set_ylabel("perplexity")
    axes[0].legend(fontsize=6)
    plots.save(figure, settings.out / f"methods_{Path(settings.model).name}.png")


def heat_map(settings: Settings, panels: dict[str, np.ndarray], label: str) -> None:
    """Draw weight matrices side by side, with the colours of the first one, "dense".

    Args:
        settings: Settings of the table.
        panels: Title -> absolute weights [in, out].
        label: Label of the colours.
    """
    figure, axes = plt.subplots(1, 3, figsize=(6.8, 2.5), layout="constrained", sharey=True)
    for axis, (title, values) in zip(axes, panels.items()):
        image = axis.imshow(
            values,
            cmap="viridis",
            vmin=0,
            vmax=np.quantile(panels["dense"], 0.995),
            aspect="auto",
            interpolation="nearest",
        )
        axis.set_title(title)
        axis.set_xlabel("output")
        axis.grid(False)
    axes[0].set_ylabel("input")
    figure.colorbar(image, ax=axes, label=label)
    plots.save(figure, settings.out / f"heat_map_{Path(settings.model).name}.png")
