"""Which client holds which rows."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import numpy as np
from jaxtyping import Float, Integer

from commjax.data.libsvm import Dataset

Rows = Sequence[Integer[np.ndarray, "_"]]


class ClientData(NamedTuple):
    """The rows of all clients, stacked; ``jax.vmap`` hands one client's slice (no ``n``) to a loss.

    A client's loss is ``sum(weights * loss of each row)``: 1/N_i on its N_i rows, 0 on padding.

    >>> ClientData(np.ones((3, 2, 5)), np.ones((3, 2)), np.full((3, 2), 0.5)).labels.shape
    (3, 2)
    """

    features: Float[Any, "n m d"]
    labels: Float[Any, "n m"]
    weights: Float[Any, "n m"]


def blocks(
    num_rows: int,
    n: int,
    *,
    seed: int | None = None,
    remainder: Literal["spread", "last"] = "spread",
    overlap: int = 1,
) -> list[np.ndarray]:
    """Row ids of each of ``n`` clients: blocks of the rows in file order, or shuffled by ``seed``.

    ``remainder="spread"``: sizes differ by at most 1; ``"last"``: num_rows//n each, the rest to the last.
    ``overlap=xi``: client i holds blocks i, ..., i+xi-1, without wrap-around: the last clients all hold the
    last xi blocks.

    Thesis: L2950 (n blocks, ``remainder="last"``, overlap xi).
    Differs: E2, E14: tab10 was made in file order, though the text says "after random shuffling".

    >>> [ids.tolist() for ids in blocks(7, 3)]
    [[0, 1, 2], [3, 4], [5, 6]]
    >>> [ids.tolist() for ids in blocks(7, 3, remainder="last", overlap=2)]
    [[0, 1, 2, 3], [2, 3, 4, 5, 6], [2, 3, 4, 5, 6]]
    """
    if not 1 <= n <= num_rows:
        raise ValueError(f"n={n} clients for num_rows={num_rows}; allowed: 1 <= n <= num_rows")
    if not 1 <= overlap <= n:
        raise ValueError(f"overlap={overlap}; allowed: 1 <= overlap <= n={n}")
    if remainder not in ("spread", "last"):
        raise ValueError(f"remainder={remainder!r}; allowed: 'spread', 'last'")
    ids = np.arange(num_rows)
    if seed is not None:
        ids = np.random.default_rng(seed).permutation(ids)
    if remainder == "spread":
        pieces = np.array_split(ids, n)
    else:
        size = num_rows // n
        pieces = np.split(ids, [size * i for i in range(1, n)])
    starts = [min(i, n - overlap) for i in range(n)]
    return [np.concatenate(pieces[start : start + overlap]) for start in starts]


def check(dataset: Dataset, rows: Rows) -> None:
    """ValueError unless features are finite, labels are -1 or +1, and every client has rows of the data set.

    >>> check(Dataset(np.eye(2), np.array([-1.0, 1.0]), "two"), [np.array([0]), np.array([2])])
    Traceback (most recent call last):
        ...
    ValueError: client 1 has a row id outside two's 0..1: 2 to 2
    """
    num_rows = len(dataset.features)
    if len(rows) == 0:
        raise ValueError("rows is empty; allowed: one array of row ids for each of at least one client")
    for i, ids in enumerate(rows):
        if len(ids) == 0:
            raise ValueError(f"client {i} has no rows; allowed: at least one")
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= num_rows:
            raise ValueError(f"client {i} has a row id outside {dataset.name}'s 0..{num_rows - 1}: {low} to {high}")
    bad = np.flatnonzero(~np.isfinite(dataset.features).all(axis=1) | (np.abs(dataset.labels) != 1.0))
    if bad.size:
        raise ValueError(f"{dataset.name}: row {bad[0]} has a non-finite feature or a label that is not -1 or +1")


def stack(dataset: Dataset, rows: Rows) -> ClientData:
    """Gather each client's rows and pad to the longest client (label +1, features 0, weight 0).

    The padding costs memory: with ``remainder="last"`` every client is as long as the last one.

    >>> two = Dataset(np.eye(2), np.array([-1.0, 1.0]), "two")
    >>> stack(two, [np.array([0, 1]), np.array([1])]).weights
    array([[0.5, 0.5],
           [1. , 0. ]])
    """
    check(dataset, rows)
    n, longest = len(rows), max(map(len, rows))
    features = np.zeros((n, longest, dataset.features.shape[1]))
    labels = np.ones((n, longest))
    weights = np.zeros((n, longest))
    for i, ids in enumerate(rows):
        features[i, : len(ids)] = dataset.features[ids]
        labels[i, : len(ids)] = dataset.labels[ids]
        weights[i, : len(ids)] = 1 / len(ids)
    return ClientData(features, labels, weights)


def row_weights(rows: Rows, num_rows: int) -> Float[np.ndarray, "N"]:
    """What each row weighs in f = (1/n) sum_i f_i: the sum of 1/(n N_i) over the clients that hold it.

    >>> row_weights([np.array([0, 1]), np.array([1])], 3)
    array([0.25, 0.75, 0.  ])
    """
    share = np.repeat([1 / (len(rows) * len(ids)) for ids in rows], [len(ids) for ids in rows])
    return np.bincount(np.concatenate(rows), weights=share, minlength=num_rows)
