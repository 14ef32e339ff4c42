"""The text of LIBSVM files: lines ``label index:value index:value ...``, parsed into dense arrays or only counted."""

import re
from collections.abc import Iterator
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from jaxtyping import Float, Int, Integer

from commjax.data import bounded

LINE = re.compile(r"\s*([^\s:_]+)((?:\s+[+-]?\d{1,9}:[^\s:_]+)*)\s*")
MOST_FEATURES = 2**25  # the largest index
MOST_NUMBERS = 2**30  # rows times features of a dense array: 8 GiB
_INDEX = re.compile(r"[0-9]{1,9}")

Classes = tuple[float, float]  # the two labels, the smaller first


def _number(text: str) -> float:
    """Like ``float``, but NaN if the text is not a number. The caller reports it together with true NaNs."""
    try:
        return float(text)
    except ValueError:
        return np.nan


def name_of(source: Any) -> str:
    """The name of the data set, also used in error messages."""
    if hasattr(source, "read"):
        return str(getattr(source, "name", "<file>"))
    path = Path(source)
    return path.stem if path.suffix in bounded.PACKED_SUFFIXES else path.name


def _lines(source: Any) -> Iterator[str]:
    """Iterate over the lines of the unpacked text; only one is in memory at a time."""

    def text(line: str | bytes) -> str:
        # latin-1 never fails, so bytes that are not ASCII are reported later, with their line.
        return (line if isinstance(line, str) else line.decode("latin-1")).removesuffix("\n")

    if hasattr(source, "read"):
        yield from map(text, source)
        return
    yield from map(text, bounded.lines(source))


def _refuse(name: str, number: int, line: str, given: str, allowed: str) -> NoReturn:
    shown = repr(line) if len(line) <= 300 else f"{line[:300]!r}..."
    raise ValueError(f"{name}, line {number + 1}: {given}; allowed: {allowed}. The line: {shown}")


def _contents(source: Any) -> Iterator[tuple[int, str, str]]:
    """Iterate over the rows: the number of the line, the line, and the line without its comment."""
    for number, line in enumerate(_lines(source)):
        content = line.partition("#")[0]
        if content.strip():
            yield number, line, content


def _match(name: str, number: int, line: str, content: str) -> re.Match[str]:
    """Match a row, or refuse it."""
    match = LINE.fullmatch(content)
    if match is None:
        _refuse(name, number, line, "the line does not parse", "label index:value index:value ...")
    return match


class _Texts(NamedTuple):
    """The rows of a file that are parsed, as text.

    Attributes:
        name: The name of the data set.
        numbers: The numbers of the lines.
        lines: The lines.
        labels: The labels.
        bodies: The pairs index:value of each row.
    """

    name: str
    numbers: list[int]
    lines: list[str]
    labels: list[str]
    bodies: list[str]

    def refuse(self, at: int, given: str, allowed: str) -> NoReturn:
        """Refuse row `at`."""
        _refuse(self.name, self.numbers[at], self.lines[at], given, allowed)


def _texts(source: Any, wanted: Integer[np.ndarray, "m"] | None) -> _Texts:
    """Keep the text of the wanted rows; None keeps all rows."""
    texts = _Texts(name_of(source), [], [], [], [])
    rows, remaining = 0, None if wanted is None else set(wanted.tolist())
    for number, line, content in _contents(source):
        if remaining is None or rows in remaining:
            match = _match(texts.name, number, line, content)
            texts.numbers.append(number)
            texts.lines.append(line)
            texts.labels.append(match[1])
            texts.bodies.append(match[2])
        rows += 1
    if not rows:
        raise ValueError(f"{texts.name}: no rows; allowed: at least one line 'label index:value ...'")
    kept = len(texts.bodies)
    if wanted is not None and kept < len(wanted):
        raise ValueError(f"{texts.name}: row {wanted[kept]} is wanted; allowed: 0 to {rows - 1}, the file has no more")
    return texts


class _Entries(NamedTuple):
    """The numbers of the rows, in the order of the text.

    Attributes:
        row: The row of each number.
        index: Its index, from 1.
        value: The number.
    """

    row: Int[np.ndarray, "k"]
    index: Int[np.ndarray, "k"]
    value: Float[np.ndarray, "k"]


def _entries(texts: _Texts, n_features: int | None) -> _Entries:
    """Parse the pairs index:value of all rows, and refuse the first bad one."""
    words = " ".join(texts.bodies).replace(":", " ").split()
    row = np.repeat(np.arange(len(texts.bodies)), [body.count(":") for body in texts.bodies])
    index = np.array(list(map(int, words[::2])), dtype=np.int64)
    value = np.array(list(map(_number, words[1::2])), dtype=np.float64)

    def refuse_any(bad: np.ndarray, given: list[str], what: str, allowed: str) -> None:
        for at, word in compress(zip(row, given, strict=True), bad):
            texts.refuse(int(at), f"{what} {word}", allowed)

    refuse_any(~np.isfinite(value), words[1::2], "value", "a finite number")
    refuse_any(index < 1, words[::2], "index", "1, 2, 3, ...")
    steps_back = np.diff(index, prepend=0) <= 0
    same_row = np.diff(row, prepend=-1) == 0
    refuse_any(steps_back & same_row, words[::2], "unsorted or repeated index", "ascending indices")
    if n_features is not None:
        refuse_any(index > n_features, words[::2], "index", f"1 to n_features={n_features}")
    refuse_any(index > MOST_FEATURES, words[::2], "index", f"1 to {MOST_FEATURES}")
    return _Entries(row, index, value)


def parse(
    source: Any, n_features: int | None, classes: Classes | None, wanted: Integer[np.ndarray, "m"] | None
) -> tuple[Float[np.ndarray, "m d"], Float[np.ndarray, "m"]]:
    """Parse rows of a file.

    Args:
        source: The path, or an open file.
        n_features: The number of features; None takes the largest index.
        classes: The two labels; None takes those of the parsed rows.
        wanted: The ascending numbers of the rows to parse; None parses all rows.

    Returns:
        The features, dense, and the labels, -1 and +1.
    """
    texts = _texts(source, wanted)
    labels, rows = np.array(list(map(_number, texts.labels))), len(texts.bodies)
    for at in np.flatnonzero(~np.isfinite(labels))[:1]:
        texts.refuse(int(at), f"label {texts.labels[at]}", "a finite number")
    entries = _entries(texts, n_features)
    width = n_features if n_features is not None else int(entries.index.max(initial=0))
    if rows * width > MOST_NUMBERS:
        raise ValueError(
            f"{texts.name}: {rows} rows of {width} features are {rows * width} numbers; allowed: {MOST_NUMBERS} at most"
        )
    features = np.zeros((rows, width))
    features[entries.row, entries.index - 1] = entries.value
    low, high = _two(labels, texts.name) if classes is None else classes
    for at in np.flatnonzero((labels != low) & (labels != high))[:1]:
        texts.refuse(int(at), f"label {texts.labels[at]}", f"{low:g} or {high:g}")
    return features, np.where(labels == high, 1.0, -1.0)


def _two(raw: np.ndarray, name: str) -> Classes:
    """The two distinct labels, or a ValueError."""
    classes = np.unique(raw)
    if len(classes) != 2:
        shown = ", ".join(f"{c:g}" for c in classes[:5])
        raise ValueError(f"{name}: {len(classes)} distinct label(s) ({shown}); allowed: exactly two")
    return float(classes[0]), float(classes[1])


def count(path: Path) -> tuple[int, int, Classes]:
    """Count the rows of a file without parsing them.

    Only the first and the last word of each line are read, and no line is kept.

    Args:
        path: The file.

    Returns:
        The number of rows, the largest index, and the two labels.
    """
    name = name_of(path)
    rows, largest, seen = 0, 0, set[str]()
    for number, line, content in _contents(path):
        words = content.split()
        rows += 1
        if words[0] not in seen:
            if not np.isfinite(_number(words[0])):
                _refuse(name, number, line, f"label {words[0]}", "a finite number")
            seen.add(words[0])
        # Indices ascend, so the last is the largest. The host that parses the row refuses words of another form.
        index = words[-1].partition(":")[0]
        if len(words) > 1 and _INDEX.fullmatch(index):
            largest = max(largest, int(index))
            if largest > MOST_FEATURES:
                _refuse(name, number, line, f"index {largest}", f"1 to {MOST_FEATURES}")
    if not rows:
        raise ValueError(f"{name}: no rows; allowed: at least one line 'label index:value ...'")
    return rows, largest, _two(np.array([float(word) for word in seen]), name)


def check_first_row(path: Path) -> None:
    """Raise a ValueError if a download is not LIBSVM text, for example if it is an error page of a proxy."""
    for number, line, content in _contents(path):
        _match("the download", number, line, content)
        return
