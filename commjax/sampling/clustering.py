"""Clusters of similar clients, for the stratified and block samplings of `commjax.sampling.samplings`."""

import math
from collections.abc import Sequence
from functools import cache
from itertools import combinations
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from commjax.data import partition

Rows = Float[np.ndarray, "n d"]
MOST_PARTITIONS = 200_000


def by_features(
    features: Float[np.ndarray, "N d"], rows: Sequence[Any], b: int, seed: int = 0
) -> list[Int[np.ndarray, "_"]]:
    """Cluster the clients by their mean features, with k-means.

    Thesis: Sec. 5.4.1.  Needs scikit-learn, commjax[data].

    Args:
        features: features [N, d] of all rows.
        rows: `rows[i]` are the row numbers of client i.
        b: number of clusters.
        seed: seed of k-means.

    Returns:
        b arrays of client numbers.

    >>> [ids.tolist() for ids in by_features(np.array([[0.0], [9.0], [0.1], [9.2]]), [[0], [1], [2], [3]], 2)]
    [[0, 2], [1, 3]]
    """
    for i, ids in enumerate(rows):
        if len(ids) == 0:
            raise ValueError(f"rows[{i}] is empty; allowed: at least one row for each client")
    return by_gradients(np.stack([features[np.asarray(ids)].mean(axis=0) for ids in rows]), b, seed)


def by_gradients(gradients: Rows, b: int, seed: int = 0) -> list[Int[np.ndarray, "_"]]:
    """Cluster the clients by their gradients or other vectors, with k-means.

    This is a heuristic for a small sigma^2_SS, the variance of stratified sampling on these clusters.
    Needs scikit-learn, commjax[data].

    Args:
        gradients: one vector per client, [n, d].
        b: number of clusters, at most the number of distinct rows.
        seed: seed of k-means.

    Returns:
        b arrays of client numbers.

    >>> [ids.tolist() for ids in by_gradients(np.array([[0.0], [9.0], [0.1], [9.2]]), 2)]
    [[0, 2], [1, 3]]
    """
    distinct = len(np.unique(gradients, axis=0))
    if not 1 <= b <= distinct:
        raise ValueError(f"b={b} clusters of {len(gradients)} clients; allowed: 1 to {distinct}, the distinct clients")
    return partition.feature_wise(gradients, b, seed=seed)


def optimal_stratified(gradients: Rows, b: int) -> list[Int[np.ndarray, "_"]]:
    """Find, by exhaustive search, the b clusters of equal size m = n/b with the smallest sigma^2_SS.

    sigma^2_SS is the variance of stratified sampling.  With z_j the sum of the a_i in cluster j,

        sigma^2_SS = (sum_i |a_i|^2 - (1/m) sum_j |z_j|^2) m / n^2

    Hence the search maximises sum_j |z_j|^2.  It computes the best split of each set of remaining clients only once.
    Thesis: Def. D.6.14.  Differs (docs/errata.md): P8 (the definition is of the optimal clusters for stratified
    sampling).

    Args:
        gradients: a_i, the gradients of the clients at x*, [n, d].
        b: number of clusters; b must divide n.

    Returns:
        b arrays of client numbers.  A ValueError is raised if there are more than `MOST_PARTITIONS` partitions.

    >>> [ids.tolist() for ids in optimal_stratified(np.array([[0.0, 1.0], [1.0, 0.0], [0.0, -1.0], [-1.0, 0.0]]), 2)]
    [[0, 1], [2, 3]]
    """
    n = len(gradients)
    if b < 1 or n == 0 or n % b:
        raise ValueError(f"b={b} clusters of n={n} clients; allowed: b that divides n")
    m = n // b
    count = math.factorial(n) // (math.factorial(m) ** b * math.factorial(b))
    if count > MOST_PARTITIONS:
        raise ValueError(
            f"n={n} clients have {count} partitions into b={b} clusters of {m}; allowed: at most {MOST_PARTITIONS} "
            "(use by_gradients)"
        )
    centred = gradients - gradients.mean(axis=0)
    inner = centred @ centred.T

    @cache
    def best(left: tuple[int, ...]) -> tuple[float, tuple[tuple[int, ...], ...]]:
        if not left:
            return 0.0, ()
        largest = (-1.0, ())
        for others in combinations(left[1:], m - 1):
            cluster = (left[0], *others)
            value, rest = best(tuple(i for i in left if i not in cluster))
            value += inner[np.ix_(cluster, cluster)].sum()
            if value > largest[0]:
                largest = (value, (cluster, *rest))
        return largest

    return [np.array(ids) for ids in best(tuple(range(n)))[1]]
