"""What the drivers share beside figures: a table as text and as JSON, and the first time a target is met."""

import json
from pathlib import Path

import numpy as np

from commjax.core.checkpoint import write_atomically


def first(values: np.ndarray, target: float) -> float:
    """Index of the first value at most target, or nan."""
    hits = np.flatnonzero(values <= target)
    return float(hits[0]) if len(hits) else float("nan")


def save(path: Path, rows: list[dict], text: str) -> None:
    """`path`.json and `path`.txt, and on the screen"""
    write_atomically(path.with_suffix(".json"), json.dumps(rows, indent=1).encode())
    write_atomically(path.with_suffix(".txt"), (text + "\n").encode())
    print(text)
