"""Shared helpers of the experiments: write a table as text and JSON, and find the first time a target is met."""

import json
from pathlib import Path

import numpy as np

from commjax.core.files import write_atomically


def first(values: np.ndarray, target: float) -> float:
    """Return the index of the first value that is at most `target`, or nan if there is none."""
    hits = np.flatnonzero(values <= target)
    return float(hits[0]) if len(hits) else float("nan")


def save(path: Path, rows: list[dict], text: str) -> None:
    """Write `rows` to `path`.json and `text` to `path`.txt, and print `text`."""
    write_atomically(path.with_suffix(".json"), json.dumps(rows, indent=1).encode())
    write_atomically(path.with_suffix(".txt"), (text + "\n").encode())
    print(text)
