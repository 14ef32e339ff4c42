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
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Integer

from commjax.data import download, libsvm_text
from commjax.data.libsvm_files import NUM_FEATURES, locate
from commjax.data.partition import Rows

__all__ = [
    "NUM_FEATURES",
    "Dataset",
    "Summary",
    "load",
    "read",
    "read_parts",
    "read_rows",
    "scan",
    "write",
]


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


def read(path_or_file: str | os.PathLike | io.IOBase, n_features: int | None = None) -> Dataset:
    """Read a LIBSVM file (plain, .gz, .bz2, .xz) into dense float64 arrays.

    The smaller of the two labels becomes -1, the larger +1. Blank lines and ``# comments`` are skipped.
    Any other text that is not LIBSVM raises a ValueError that names the file, the line, the given and the allowed
    values.

    Thesis: Sec. A.3.1.
    Differs (docs/errata.md): E14 (the thesis does not say how labels are mapped to -1 and +1).

    Args:
        path_or_file: The path, or an open file.
        n_features: The number of features. The default is the largest index in the file.

    Returns:
        The data set.

    >>> read(io.StringIO("2 1:0.5 3:1\\n1 2:4  # a comment\\n"))
    Dataset(features=array([[0.5, 0. , 1. ],
           [0. , 4. , 0. ]]), labels=array([ 1., -1.]), name='<file>')
    """
    return _parsed(path_or_file, n_features, None, None)


def _parsed(
    source: Any,
    n_features: int | None,
    classes: libsvm_text.Classes | None,
    wanted: Integer[np.ndarray, "m"] | None,
) -> Dataset:
    """Parse rows of a file into a data set."""
    features, labels = libsvm_text.parse(source, n_features, classes, wanted)
    return Dataset(features, labels, libsvm_text.name_of(source))


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
    path, n_features = locate(name, **where)
    rows, largest, classes = libsvm_text.count(path)
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
    return _parsed(summary.path, summary.width, summary.classes, rows)


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
    path, n_features = locate(
        name, folder=folder, cache=cache, url=url, n_features=n_features, trust_first_use=trust_first_use
    )
    return read(path, n_features)
