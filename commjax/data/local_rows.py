"""The rows of some clients of a named data set, and of no others: what one host loads, or one client of a federation."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Integer

from commjax.data import embedded, libsvm, partition
from commjax.data.libsvm import Dataset


def own_rows(
    name: str, n: int, own: Sequence[int] | Integer[np.ndarray, "m"], seed: int
) -> tuple[Dataset, list[np.ndarray], int]:
    """The rows of the clients `own`, of n that share them out in shuffled blocks; whose is which; and the most that a client has.

    A LibSVM file is scanned, so that all agree on the blocks, and only the lines of `own` are parsed and kept
    (`libsvm.read_parts`).  "breast_cancer", which is embedded and has 569 rows, comes whole from its package.
    """
    if name == "breast_cancer":
        dataset = embedded.breast_cancer()
        parts = partition.blocks(len(dataset.labels), n, seed=seed)
        mine = [parts[i] for i in own]
    else:
        summary = libsvm.scan(name)
        parts = partition.blocks(summary.rows, n, seed=seed)
        dataset, mine = libsvm.read_parts(summary, [parts[i] for i in own])
    return dataset, mine, max(map(len, parts))
