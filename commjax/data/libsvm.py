"""LIBSVM text files: lines ``label index:value index:value ...`` with indices from 1, in ascending order.

Load all rows:

    dataset = load("mushrooms")

Load the rows of some clients only. `scan` counts the rows without parsing them; `read_parts` parses only the given
rows:

    summary = scan("mushrooms")
    dataset, mine = read_parts(summary, [parts[i] for i in clients])
"""

import io
import os
import re
from collections.abc import Iterator
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from jaxtyping import Float, Integer

from commjax.data import bounded, download
from commjax.data.partition import Rows

NUM_FEATURES = (
    {"mushrooms": 112, "phishing": 68, "ijcnn1": 22}
    | {f"a{i}a": 123 for i in range(1, 10)}
    | {f"w{i}a": 300 for i in range(1, 9)}
)
_LINE = re.compile(r"\s*([^\s:_]+)((?:\s+[+-]?\d{1,9}:[^\s:_]+)*)\s*")
MOST_FEATURES = 2**25  # the largest index
MOST_NUMBERS = 2**30  # rows times features of a dense array: 8 GiB
_INDEX = re.compile(r"[0-9]{1,9}")
_DATASET_NAME = re.compile(r"\w[\w.\-]*")


class Dataset(NamedTuple):
    """A binary classification set.

    Attributes:
        features: The features, one example a row.
        labels: The labels, -1 or +1.
        name: The name of the set.

    >>> Dataset(np.eye(2), np.array([-1.0, 1.0]), "two").features.shape
    (2, 2)
    """

    features: Float[np.ndarray, "N d"]
    labels: Float[np.ndarray, "N"]
    name: str


def _number(text: str) -> float:
    """Like ``float``, but NaN if the text is not a number. The caller reports it together with true NaNs."""
    try:
        return float(text)
    except ValueError:
        return np.nan


class Summary(NamedTuple):
    """The facts about a file that all hosts must know, whichever rows they load.

    Attributes:
        path: The file.
        rows: The number of rows.
        width: The number of features: the known width of the set, or the largest index in the file.
        classes: The two labels, the smaller first.
    """

    path: Path
    rows: int
    width: int
    classes: tuple[float, float]


def _name(source: Any) -> str:
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


def read(path_or_file: str | os.PathLike | io.IOBase, n_features: int | None = None) -> Dataset:
    """Read a LIBSVM file (plain, .gz, .bz2, .xz) into dense float64 arrays.

    The smaller of the two labels becomes -1, the larger +1. Blank lines and ``# comments`` are skipped.
    Any other text that is not LIBSVM is a ValueError with the file, the line, the given value and the allowed values.

    Thesis: Sec. A.3.1.
    Differs: E14 (the label mapping is not in the text).

    Args:
        path_or_file: The path, or an open file.
        n_features: The number of features. The default is the largest index in the file.

    Returns:
        The data set.

    >>> read(io.StringIO("2 1:0.5 3:1\\n1 2:4  # a comment\\n"))
    Dataset(features=array([[0.5, 0. , 1. ],
           [0. , 4. , 0. ]]), labels=array([ 1., -1.]), name='<file>')
    """
    return _read(path_or_file, n_features, None, None)


def _read(
    source: Any, n_features: int | None, classes: tuple[float, float] | None, wanted: Integer[np.ndarray, "m"] | None
) -> Dataset:
    """Parse a file. `wanted` holds the ascending numbers of the rows to parse; None parses all rows."""
    name = _name(source)
    number_of_row: list[int] = []
    kept: list[str] = []
    label_words: list[str] = []
    bodies: list[str] = []
    found, remaining = 0, None if wanted is None else set(wanted.tolist())
    for number, line in enumerate(_lines(source)):
        content = line.partition("#")[0]
        if not content.strip():
            continue
        if remaining is None or found in remaining:
            match = _LINE.fullmatch(content)
            if match is None:
                _refuse(name, number, line, "the line does not parse", "label index:value index:value ...")
            number_of_row.append(number)
            kept.append(line)
            label_words.append(match[1])
            bodies.append(match[2])
        found += 1
    if not found:
        raise ValueError(f"{name}: no rows; allowed: at least one line 'label index:value ...'")
    if wanted is not None and len(bodies) < len(wanted):
        raise ValueError(
            f"{name}: row {wanted[len(bodies)]} is wanted; allowed: 0 to {found - 1}, the file has no more"
        )

    words = " ".join(bodies).replace(":", " ").split()
    row = np.repeat(np.arange(len(bodies)), [body.count(":") for body in bodies])
    index = np.array(list(map(int, words[::2])), dtype=np.int64)
    value = np.array(list(map(_number, words[1::2])), dtype=np.float64)
    raw_labels = np.array(list(map(_number, label_words)))

    def refuse(at: int, given: str, allowed: str) -> NoReturn:
        _refuse(name, number_of_row[at], kept[at], given, allowed)

    def refuse_any(bad: np.ndarray, given: list[str], what: str, allowed: str) -> None:
        for at, word in compress(zip(row, given, strict=True), bad):
            refuse(int(at), f"{what} {word}", allowed)

    for at in np.flatnonzero(~np.isfinite(raw_labels))[:1]:
        refuse(int(at), f"label {label_words[at]}", "a finite number")
    refuse_any(~np.isfinite(value), words[1::2], "value", "a finite number")
    refuse_any(index < 1, words[::2], "index", "1, 2, 3, ...")
    steps_back = np.diff(index, prepend=0) <= 0
    same_row = np.diff(row, prepend=-1) == 0
    refuse_any(steps_back & same_row, words[::2], "unsorted or repeated index", "ascending indices")
    if n_features is not None:
        refuse_any(index > n_features, words[::2], "index", f"1 to n_features={n_features}")

    refuse_any(index > MOST_FEATURES, words[::2], "index", f"1 to {MOST_FEATURES}")
    width = n_features if n_features is not None else int(index.max(initial=0))
    if len(bodies) * width > MOST_NUMBERS:
        raise ValueError(
            f"{name}: {len(bodies)} rows of {width} features are {len(bodies) * width} numbers; "
            f"allowed: {MOST_NUMBERS} at most"
        )
    features = np.zeros((len(bodies), width))
    features[row, index - 1] = value
    low, high = _two(raw_labels, name) if classes is None else classes
    for at in np.flatnonzero((raw_labels != low) & (raw_labels != high))[:1]:
        refuse(int(at), f"label {label_words[at]}", f"{low:g} or {high:g}")
    return Dataset(features, np.where(raw_labels == high, 1.0, -1.0), name)


def _two(raw: np.ndarray, name: str) -> tuple[float, float]:
    classes = np.unique(raw)
    if len(classes) != 2:
        shown = ", ".join(f"{c:g}" for c in classes[:5])
        raise ValueError(f"{name}: {len(classes)} distinct label(s) ({shown}); allowed: exactly two")
    return float(classes[0]), float(classes[1])


def scan(name: str | os.PathLike, **where: Any) -> Summary:
    """Count the rows of a data set without parsing them.

    Only the first and the last word of each line are read, and no line is kept. All hosts that have the same file get
    the same summary, so they agree on the partition before any of them parses a row.

    Args:
        name: A path, or the name of a set, as in ``load``.
        **where: The other arguments of ``load``.

    Returns:
        The summary.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "little").write_text("2 1:0.5 3:1\\n1 2:4  # a comment\\n")
    ...     scan("little", folder=folder)[1:]
    (2, 3, (1.0, 2.0))
    """
    path, n_features = _located(name, **where)
    rows, largest, seen = 0, 0, set()
    for number, line in enumerate(_lines(path)):
        words = line.partition("#")[0].split()
        if not words:
            continue
        rows += 1
        if words[0] not in seen:
            if not np.isfinite(_number(words[0])):
                _refuse(_name(path), number, line, f"label {words[0]}", "a finite number")
            seen.add(words[0])
        # Indices ascend, so the last one is the largest. The host that parses the row refuses words of another form.
        index = words[-1].partition(":")[0]
        if len(words) > 1 and _INDEX.fullmatch(index):
            largest = max(largest, int(index))
            if largest > MOST_FEATURES:
                _refuse(_name(path), number, line, f"index {largest}", f"1 to {MOST_FEATURES}")
    if not rows:
        raise ValueError(f"{_name(path)}: no rows; allowed: at least one line 'label index:value ...'")
    classes = _two(np.array([float(word) for word in seen]), _name(path))
    return Summary(path, rows, largest if n_features is None else n_features, classes)


def read_rows(summary: Summary, rows: Integer[np.ndarray, "m"]) -> Dataset:
    """Parse some rows of a file. The other lines are skipped: they are neither parsed nor kept.

    Args:
        summary: The summary of the file, from ``scan``.
        rows: The numbers of the rows, ascending.

    Returns:
        A data set of these rows.
    """
    if len(rows) == 0 or rows[0] < 0 or np.any(np.diff(rows) <= 0):
        raise ValueError(f"rows={rows}; allowed: at least one, ascending, from 0 to {summary.rows - 1}")
    return _read(summary.path, summary.width, summary.classes, rows)


def read_parts(summary: Summary, parts: Rows) -> tuple[Dataset, list[np.ndarray]]:
    """Load a data set that holds only the rows of the given clients.

    Args:
        summary: The summary of the file, from ``scan``.
        parts: For each client, the numbers of its rows in the file.

    Returns:
        The data set of the rows in `parts`, in file order, and for each client the numbers of its rows in this data
        set.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "little").write_text("2 1:0.5\\n1 2:not parsed\\n1 1:7\\n")
    ...     dataset, mine = read_parts(scan("little", folder=folder), [np.array([2, 0]), np.array([2])])
    >>> dataset.features[:, 0].tolist(), [ids.tolist() for ids in mine]
    ([0.5, 7.0], [[1, 0], [1]])
    """
    wanted = np.unique(np.concatenate(parts))
    return read_rows(summary, wanted), [np.searchsorted(wanted, ids) for ids in parts]


def write(path: str | os.PathLike, dataset: Dataset) -> None:
    """Write a data set as plain LIBSVM text.

    ``read`` with the same ``n_features`` returns the same numbers, bit for bit.

    Args:
        path: The file.
        dataset: The data set.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write(Path(folder, "two"), Dataset(np.eye(2), np.array([-1.0, 1.0]), "two"))
    ...     print(Path(folder, "two").read_text(), end="")
    -1 1:1.0
    +1 2:1.0
    """
    with open(path, "w", encoding="ascii") as file:
        for a, y in zip(dataset.features, dataset.labels, strict=True):
            pairs = (f" {j + 1}:{float(a[j])!r}" for j in np.flatnonzero(a))
            file.write(f"{y:+g}{''.join(pairs)}\n")


def _find(folder: Path, name: str) -> Path | None:
    for suffix in ("", *reversed(bounded.PACKED_SUFFIXES)):
        if (path := folder / (name + suffix)).is_file():
            return path
    return None


def load(
    name: str | os.PathLike,
    *,
    folder: str | os.PathLike | None = None,
    cache: str | os.PathLike | None = None,
    url: str = download.LIBSVM_URL,
    n_features: int | None = None,
    trust_first_use: bool = False,
) -> Dataset:
    """Load a data set by path or by name.

    The file is searched in this order:

        1. ``name`` as a path;
        2. ``folder`` (or the environment variable ``COMMJAX_DATA``) and its subfolder ``libsvm``, plain or packed;
        3. ``cache`` (or ``COMMJAX_CACHE``, or ``~/.cache/commjax``);
        4. the LIBSVM site, or a mirror of it at ``url``. The download is stored in the cache.

    Files from the cache and from the network are checked by their sha256.

    Args:
        name: A path, or the name of a set.
        folder: The folder of the user's files. These files are not checked by sha256.
        cache: The folder for downloads.
        url: The LIBSVM site, or a mirror of it.
        n_features: The number of features. The default is the known width of the set (`NUM_FEATURES`), or the largest
            index in the file.
        trust_first_use: For a set whose sha256 is not in `download.TEXT_SHA256`: accept the first download, store its
            sha256 beside it, report it on stderr, and check the file against it from then on. The environment variable
            COMMJAX_TRUST_FIRST_USE=1 has the same effect.

    Returns:
        The data set, dense.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write(Path(folder, "a1a"), Dataset(np.eye(2), np.array([-1.0, 1.0]), "a1a"))
    ...     load("a1a", folder=folder).features.shape  # the width of a1a is known
    (2, 123)
    """
    path, n_features = _located(
        name, folder=folder, cache=cache, url=url, n_features=n_features, trust_first_use=trust_first_use
    )
    return read(path, n_features)


def _located(
    name: str | os.PathLike,
    *,
    folder: str | os.PathLike | None = None,
    cache: str | os.PathLike | None = None,
    url: str = download.LIBSVM_URL,
    n_features: int | None = None,
    trust_first_use: bool = False,
) -> tuple[Path, int | None]:
    """Find the file, and its number of features if that is known."""
    path: Path | None = Path(name)
    if not path.is_file():
        name = str(name)
        if not _DATASET_NAME.fullmatch(name):
            raise ValueError(f"load: {name!r} is no file; allowed: an existing path, or a name such as 'mushrooms'")
        cache = Path(cache or os.environ.get("COMMJAX_CACHE") or Path.home() / ".cache" / "commjax")
        folder = folder or os.environ.get("COMMJAX_DATA")
        places = [Path(folder), Path(folder, "libsvm")] if folder else []
        path = next(filter(None, (_find(place, name) for place in places)), None)
        if path is None:
            path = _cached(name, cache, url, trust_first_use or os.environ.get(download.TRUST) == "1")
    if n_features is None:
        n_features = NUM_FEATURES.get(path.name.split(".")[0])
    return path, n_features


def _cached(name: str, cache: Path, url: str, trust_first_use: bool) -> Path:
    """The checked file in the cache; it is downloaded if it is not there."""
    known = download.TEXT_SHA256.get(name)
    path = _find(cache, name)
    if path is not None:
        download.check_cached(path, known, trust_first_use=trust_first_use)
        return path
    remote = name + ".bz2" if name.startswith("ijcnn1") else name
    source = f"{url.rstrip('/')}/{remote}"
    return download.fetch(source, cache / remote, known, trust_first_use=trust_first_use, accept=_first_row)


def _first_row(path: Path) -> None:
    """Raise a ValueError if a download is not LIBSVM text, for example if it is an error page of a proxy."""
    for number, line in enumerate(_lines(path)):
        content = line.partition("#")[0]
        if content.strip():
            if not _LINE.fullmatch(content):
                _refuse("the download", number, line, "the line does not parse", "label index:value index:value ...")
            return
