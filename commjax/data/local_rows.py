"""Load only the rows of some clients of a named data set, as one host or one client of a federation does."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Integer

from commjax.data import embedded, libsvm, partition
from commjax.data.libsvm import Dataset


def local_rows(
    name: str, n: int, clients: Sequence[int] | Integer[np.ndarray, "m"], seed: int
) -> tuple[Dataset, list[np.ndarray], int]:
    """Load only the rows that belong to the given clients.

    The data set is split into n shuffled blocks, one per client. A LIBSVM file is scanned, so that all hosts agree on
    the blocks, and only the lines of the given clients are parsed and kept (`libsvm.read_parts`). The set
    "breast_cancer" (569 rows) comes from scikit-learn and is loaded whole.

    Args:
        name: "breast_cancer", or the name or path of a LIBSVM file as in `libsvm.load`.
        n: The number of clients.
        clients: The numbers of the clients whose rows are loaded.
        seed: The seed of the shuffle.

    Returns:
        The data set, for each of `clients` the numbers of its rows in the data set, and the number of rows of the
        largest of all n blocks.
    """
    if name == "breast_cancer":
        dataset = embedded.breast_cancer()
        parts = partition.blocks(len(dataset.labels), n, seed=seed)
        mine = [parts[i] for i in clients]
    else:
        summary = libsvm.scan(name)
        parts = partition.blocks(summary.rows, n, seed=seed)
        dataset, mine = libsvm.read_parts(summary, [parts[i] for i in clients])
    return dataset, mine, max(map(len, parts))
