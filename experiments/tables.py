"""Shared helpers of the experiments: tables as text and JSON, and the first time a target is met."""

import json
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from commjax.core.files import write_atomically

Row = dict[str, Any]


class Column(NamedTuple):
    """One column of a text table.

    Attributes:
        title: Title of the column.
        value: Field of a row, or a function of a row that returns the value.
        form: Format of a value, such as "14" or "9.1f".  Its width is also that of the title.  Text is written to the
            left and numbers to the right, unless the format says otherwise (">16").
    """

    title: str
    value: str | Callable[[Row], Any]
    form: str

    def head(self) -> str:
        """The title at the width of the column."""
        side, width = re.match(r"([<>]?)(\d*)", self.form).groups()  # type: ignore[union-attr]
        side = side or ("<" if self.form == width else ">")
        return f"{self.title:{side}{width}}"

    def cell(self, row: Row) -> str:
        """The value of a row at the width of the column."""
        return format(row[self.value] if isinstance(self.value, str) else self.value(row), self.form)


def fields(**forms: str) -> list[Column]:
    """Columns whose titles are the names of their fields, with the format of each.

    >>> table(fields(c1="5g", cost="7.2f"), [{"c1": 0.05, "cost": 2.5}]).split("\\n")
    ['   c1    cost', ' 0.05    2.50']
    """
    return [Column(name, name, form) for name, form in forms.items()]


def table(columns: Sequence[Column], rows: Sequence[Row]) -> str:
    """Write rows as a text table with one line of titles.

    >>> print(table([Column("data set", "name", "9"), Column("bits", "bits", "6.1f")], [{"name": "a9a", "bits": 2.5}]))
    data set    bits
    a9a          2.5
    """
    lines = [" ".join(column.head() for column in columns)]
    lines += [" ".join(column.cell(row) for column in columns) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def first(values: np.ndarray, target: float) -> float:
    """Return the index of the first value that is at most `target`, or nan if there is none."""
    hits = np.flatnonzero(values <= target)
    return float(hits[0]) if len(hits) else float("nan")


def save(path: Path, rows: Sequence[Row], text: str) -> None:
    """Write `rows` to `path`.json and `text` to `path`.txt, and print `text`."""
    write_atomically(path.with_suffix(".json"), json.dumps(rows, indent=1).encode())
    save_text(path, text)


def save_text(path: Path, text: str) -> None:
    """Write `text` to `path`.txt, and print it."""
    write_atomically(path.with_suffix(".txt"), (text + "\n").encode())
    print(text)
