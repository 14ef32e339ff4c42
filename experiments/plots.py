"""Shared style and output of the figures.

All figures have one style, are legible at column width, and are written atomically.
"""

import io
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.figure import Figure

from commjax.core.files import write_atomically

# The Okabe-Ito palette is safe for colour-blind readers. A method has the same colour in every figure.
COLORS = {
    "EF-BV": "#0072B2",
    "EF21": "#D55E00",
    "DIANA": "#009E73",
    "GD": "#000000",
    "Scafflix": "#0072B2",
    "FLIX": "#D55E00",
    "FedAvg": "#009E73",
    "FedProx": "#CC79A7",
    "Scaffold": "#E69F00",
    "Ditto": "#56B4E9",
}
STYLES = {"EF-BV": "-", "EF21": "--", "DIANA": "-.", "GD": ":", "FLIX": "--", "FedAvg": "-.", "Ditto": ":"}

plt.rcParams.update(
    {
        "font.size": 8,
        "axes.labelsize": 8,
        "axes.titlesize": 8,
        "legend.fontsize": 7,
        "xtick.labelsize": 7,
        "ytick.labelsize": 7,
        "axes.grid": True,
        "grid.alpha": 0.25,
        "lines.linewidth": 1.4,
        "legend.frameon": False,
    }
)


def style(method: str) -> dict[str, Any]:
    """Return Matplotlib's colour, line style and label of a method."""
    return {"color": COLORS.get(method), "linestyle": STYLES.get(method, "-"), "label": method}


def shades(count: int) -> np.ndarray:
    """Return `count` colours from dark to light, for curves that differ in one number."""
    return plt.get_cmap("viridis")(np.linspace(0, 0.85, count))


def panels(rows: int, columns: int, size: tuple[float, float], **options: Any) -> tuple[Figure, np.ndarray]:
    """Return a figure of `size` inches and its panels, [rows, columns]; `options` are those of `plt.subplots`."""
    return plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained", **options)


def thin(values: np.ndarray, points: int = 400) -> np.ndarray:
    """Return the indices of at most `points` evenly spaced entries. A curve needs no more."""
    return np.unique(np.linspace(0, len(values) - 1, min(points, len(values))).astype(int))


def png(figure: Figure) -> bytes:
    """Return the figure as the bytes of a PNG file, and close it."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=200)
    plt.close(figure)
    return buffer.getvalue()


def save(figure: Figure, path: str | Path) -> Path:
    """Write the figure to `path` as PNG, and close it."""
    write_atomically(path, png(figure))
    return Path(path)
