"""Data sets of TensorFlow Datasets as clients, without TensorFlow.  Needs `commjax[data]`."""

import os
from collections.abc import Iterator, Sequence
from typing import Any, cast

import numpy as np

from commjax.data import feed
from commjax.data.feed import Feed
from commjax.data.partition import Rows, by_group


def source(name: str, split: str, data_dir: str | os.PathLike[str] | None = None) -> Sequence[dict[str, Any]]:
    """Open a data set with `tfds.data_source`.  It is downloaded if it is not on disk in the array_record format.

    Args:
        name: name of the data set.
        split: name of the split.
        data_dir: folder of the data sets; None is the default of TensorFlow Datasets.

    Returns:
        A sequence of records.
    """
    try:
        import tensorflow_datasets as tfds
    except ImportError as error:
        raise ImportError("integrations.tfds needs tensorflow-datasets: pip install 'commjax[data]'") from error
    folder = None if data_dir is None else os.fspath(data_dir)
    return cast(Any, tfds.data_source(name, split=split, data_dir=folder))


def clients(records: Sequence[dict[str, Any]], of: str | Rows, rows: int | None = None) -> Feed:
    """Make a feed of records, with clients by a feature or by record numbers.

    The rows have the features that are numbers.  Texts, bytes and the feature `of` are left out: convert them to
    numbers first if a model needs them.

    Args:
        records: sequence of records, such as that of `source`.
        of: name of a feature whose values are the ids of the clients (one pass over the records), or the record numbers
            of each client, such as `partition.blocks(len(records), n)`.
        rows: largest number of rows of a client; None is all.

    Returns:
        The feed.

    >>> records = [{"user": "b", "x": 1}, {"user": "a", "x": 2}, {"user": "b", "x": 3}]
    >>> clients(records, "user").ids, clients(records, "user").fetch(np.array([1])).rows["x"].tolist()
    (('a', 'b'), [[1, 3]])
    """
    if len(records) == 0:
        raise ValueError("records: the source has none; allowed: at least one")
    first = records[0]
    if isinstance(of, str):
        if of not in first:
            raise ValueError(f"of: no feature {of!r} in the records; there are {sorted(first)}")
        names, parts = by_group([_plain(record[of]) for record in _all(records)])
        ids = names.tolist()
    else:
        parts, ids = list(of), list(range(len(of)))
        for number in (int(i) for part in parts for i in part):
            if not 0 <= number < len(records):
                raise ValueError(f"of: record {number} is not one of the {len(records)} of the source")
    kept = [name for name in first if name != of and _numeric(first[name])]
    if not kept:
        raise ValueError(f"records: no feature of {sorted(first)} besides {of!r} has numbers; allowed: at least one")

    def read(number: int, most: int) -> dict[str, np.ndarray]:
        selected = [records[int(i)] for i in parts[number][:most]]
        return {name: np.stack([np.asarray(record[name]) for record in selected]) for name in kept}

    return feed.make(ids, [len(part) for part in parts], read, rows)


def _all(records: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    return (records[i] for i in range(len(records)))


def _numeric(value: Any) -> bool:
    return np.issubdtype(np.asarray(value).dtype, np.number) or np.asarray(value).dtype == bool


def _plain(value: Any) -> Any:
    value = value.item() if isinstance(value, np.ndarray | np.generic) else value
    return value.decode() if isinstance(value, bytes) else value
