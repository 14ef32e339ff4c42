"""FedJAX's federated data sets, SQLite files included, cohort by cohort.  Needs `commjax[fedjax]`.

FedJAX 0.0.17 runs beside today's JAX as a data layer only: its own algorithms and compressors do not.
"""

import os
from typing import Any

from commjax.data import feed
from commjax.data.feed import Feed


def clients(data: Any, rows: int | None = None) -> Feed:
    """The clients of a `fedjax.FederatedData`, in its order and under its ids; its preprocessing is applied."""
    sizes = dict(data.client_sizes())
    ids = list(sizes)

    def read(number, most):
        return data.get_client(ids[number])[:most].all_examples()

    return feed.make(ids, list(sizes.values()), read, rows)


def sqlite(path: str | os.PathLike, rows: int | None = None) -> Feed:
    """The clients of a file that FedJAX wrote (`fedjax.SQLiteFederatedDataBuilder`); a cohort's are read when it is fetched."""
    try:
        from fedjax.core.sqlite_federated_data import SQLiteFederatedData
    except ImportError as error:
        raise ImportError("fedjax_feed needs fedjax: pip install 'commjax[fedjax]'") from error
    if not os.path.isfile(path):
        raise ValueError(f"path: there is no file {os.fspath(path)!r}")
    return clients(SQLiteFederatedData.new(os.fspath(path)), rows)
