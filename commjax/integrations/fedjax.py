"""Federated data sets and SQLite files of FedJAX, read one cohort at a time.  Needs `commjax[fedjax]`.

With current versions of JAX only the data layer of FedJAX 0.0.17 works; its algorithms and compressors do not.
"""

import os
from typing import Any

from commjax.data import feed
from commjax.data.feed import Feed


def clients(data: Any, rows: int | None = None) -> Feed:
    """Make a feed of a `fedjax.FederatedData`, with its order, ids and preprocessing.

    Args:
        data: the `fedjax.FederatedData`.
        rows: largest number of rows of a client; None is all.

    Returns:
        The feed.
    """
    sizes = dict(data.client_sizes())
    ids = list(sizes)

    def read(number: int, most: int) -> dict[str, Any]:
        return data.get_client(ids[number])[:most].all_examples()

    return feed.make(ids, list(sizes.values()), read, rows)


def sqlite(path: str | os.PathLike[str], rows: int | None = None) -> Feed:
    """Make a feed of a file of `fedjax.SQLiteFederatedDataBuilder`.  Rows are read when their cohort is fetched.

    Args:
        path: the file.
        rows: largest number of rows of a client; None is all.

    Returns:
        The feed.
    """
    try:
        from fedjax.core.sqlite_federated_data import SQLiteFederatedData
    except ImportError as error:
        raise ImportError("integrations.fedjax needs fedjax: pip install 'commjax[fedjax]'") from error
    if not os.path.isfile(path):
        raise ValueError(f"path: there is no file {os.fspath(path)!r}")
    return clients(SQLiteFederatedData.new(os.fspath(path)), rows)
