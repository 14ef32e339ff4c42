"""LIBSVM text files: ``label index:value index:value ...``, indices from 1, in ascending order."""

import io
import lzma
import os
import re
import zlib
from itertools import compress
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
from jaxtyping import Float

from commjax.data import download

NUM_FEATURES = (
    {"mushrooms": 112, "phishing": 68, "ijcnn1": 22}
    | {f"a{i}a": 123 for i in range(1, 10)}
    | {f"w{i}a": 300 for i in range(1, 9)}
)
_LINE = re.compile(r"\s*([^\s:_]+)((?:\s+[+-]?\d{1,9}:[^\s:_]+)*)\s*")
_DATASET_NAME = re.compile(r"\w[\w.\-]*")


class Dataset(NamedTuple):
    """A binary classification set.

    >>> Dataset(np.eye(2), np.array([-1.0, 1.0]), "two").features.shape
    (2, 2)
    """

    features: Float[np.ndarray, "N d"]
    labels: Float[np.ndarray, "N"]  # -1 or +1
    name: str


def _number(text: str) -> float:
    """As ``float``, but NaN where the text is no number: reported together with true NaNs."""
    try:
        return float(text)
    except ValueError:
        return np.nan


def _text_and_name(source: Any) -> tuple[str, str]:
    """The whole unpacked text, and a name for messages and for the data set."""
    if hasattr(source, "read"):
        content, name = source.read(), str(getattr(source, "name", "<file>"))
    else:
        path = Path(source)
        with open(path, "rb") as raw:
            try:
                content = download.unpack(raw, path.suffix).read()
            except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
                raise ValueError(f"{path} cannot be unpacked: {error or 'it ends too early'}") from error
        name = path.stem if path.suffix in download.PACKED_SUFFIXES else path.name
    # latin-1 never fails, so foreign bytes are reported with the line they stand on.
    return content if isinstance(content, str) else content.decode("latin-1"), name


def read(path_or_file: str | os.PathLike | io.IOBase, n_features: int | None = None) -> Dataset:
    """Read a LIBSVM file (plain, .gz, .bz2, .xz) into dense float64 arrays.

    Of the two labels the smaller becomes -1, the larger +1. Blank lines and ``# comments`` are skipped.
    Anything else that is not LIBSVM text is a ValueError with file, line, what was given and what is allowed.

    Thesis: Sec. 2 experiments.
    Differs: E14 (the label mapping is not in the text).

    >>> read(io.StringIO("2 1:0.5 3:1\\n1 2:4  # a comment\\n"))
    Dataset(features=array([[0.5, 0. , 1. ],
           [0. , 4. , 0. ]]), labels=array([ 1., -1.]), name='<file>')
    """
    text, name = _text_and_name(path_or_file)
    lines = text.split("\n")
    line_of_row: list[int] = []
    label_words: list[str] = []
    bodies: list[str] = []

    def refuse(line: int, given: str, allowed: str) -> NoReturn:
        raise ValueError(f"{name}, line {line + 1}: {given}; allowed: {allowed}. The line: {lines[line]!r}")

    for number, line in enumerate(lines):
        line = line.partition("#")[0]
        match = _LINE.fullmatch(line)
        if match:
            line_of_row.append(number)
            label_words.append(match[1])
            bodies.append(match[2])
        elif line.strip():
            refuse(number, "the line does not parse", "label index:value index:value ...")
    if not bodies:
        raise ValueError(f"{name}: no rows; allowed: at least one line 'label index:value ...'")

    words = " ".join(bodies).replace(":", " ").split()
    row = np.repeat(np.arange(len(bodies)), [body.count(":") for body in bodies])
    index = np.array(list(map(int, words[::2])), dtype=np.int64)
    value = np.array(list(map(_number, words[1::2])), dtype=np.float64)
    raw_labels = np.array(list(map(_number, label_words)))

    def refuse_any(bad: np.ndarray, given: list[str], what: str, allowed: str) -> None:
        for at, word in compress(zip(row, given, strict=True), bad):
            refuse(line_of_row[at], f"{what} {word}", allowed)

    for at in np.flatnonzero(~np.isfinite(raw_labels))[:1]:
        refuse(line_of_row[at], f"label {label_words[at]}", "a finite number")
    refuse_any(~np.isfinite(value), words[1::2], "value", "a finite number")
    refuse_any(index < 1, words[::2], "index", "1, 2, 3, ...")
    steps_back = np.diff(index, prepend=0) <= 0
    same_row = np.diff(row, prepend=-1) == 0
    refuse_any(steps_back & same_row, words[::2], "unsorted or repeated index", "ascending indices")
    if n_features is not None:
        refuse_any(index > n_features, words[::2], "index", f"1 to n_features={n_features}")

    width = n_features if n_features is not None else int(index.max(initial=0))
    features = np.zeros((len(bodies), width))
    features[row, index - 1] = value
    return Dataset(features, _signs(raw_labels, name), name)


def _signs(raw: np.ndarray, name: str) -> np.ndarray:
    classes = np.unique(raw)
    if len(classes) != 2:
        shown = ", ".join(f"{c:g}" for c in classes[:5])
        raise ValueError(f"{name}: {len(classes)} distinct label(s) ({shown}); allowed: exactly two")
    return np.where(raw == classes[1], 1.0, -1.0)


def write(path: str | os.PathLike, dataset: Dataset) -> None:
    """Write plain LIBSVM text that ``read`` gives back bit for bit (with the same ``n_features``).

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
    for suffix in ("", *reversed(download.PACKED_SUFFIXES)):
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
) -> Dataset:
    """A data set by path or by name.

    Looked for, in this order: ``name`` as a path; ``folder`` (or the environment variable ``COMMJAX_DATA``)
    and its ``libsvm`` subfolder, plain or packed; ``cache`` (or ``COMMJAX_CACHE``, or ``~/.cache/commjax``);
    the LIBSVM site (or a mirror of that folder at ``url``), from which it goes into the cache if its sha256,
    where known, is right. Known sets get their known width; ``n_features`` overrides it.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     write(Path(folder, "a1a"), Dataset(np.eye(2), np.array([-1.0, 1.0]), "a1a"))
    ...     load("a1a", folder=folder).features.shape  # the width of a1a is known
    (2, 123)
    """
    path: Path | None = Path(name)
    if not path.is_file():
        name = str(name)
        if not _DATASET_NAME.fullmatch(name):
            raise ValueError(f"load: {name!r} is no file; allowed: an existing path, or a name such as 'mushrooms'")
        cache = Path(cache or os.environ.get("COMMJAX_CACHE") or Path.home() / ".cache" / "commjax")
        folder = folder or os.environ.get("COMMJAX_DATA")
        places = [Path(folder), Path(folder, "libsvm")] if folder else []
        path = next(filter(None, (_find(place, name) for place in [*places, cache])), None)
        if path is None:
            remote = name + ".bz2" if name.startswith("ijcnn1") else name
            source = f"{url.rstrip('/')}/{remote}"
            path = download.fetch(source, cache / remote, download.TEXT_SHA256.get(name))
    if n_features is None:
        n_features = NUM_FEATURES.get(path.name.split(".")[0])
    return read(path, n_features)
