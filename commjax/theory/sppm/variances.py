"""Variances of cohorts: nice sampling, and the bounds on stratified and block sampling."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

Rows = Float[np.ndarray, "n d"]


def nice_variance(n: int, tau: int, mean_square: float) -> float:
    """Return E |mean of tau of n vectors|^2 for vectors that add up to 0, with all sets of size tau equally likely.

        (n/tau - 1)/(n - 1) mean_i |a_i|^2

    Thesis: Lemma D.6.11.  Differs (docs/errata.md): P9 (1 <= tau <= n).

    Args:
        n: number of vectors.
        tau: size of the set, 1 <= tau <= n.
        mean_square: mean_i |a_i|^2.

    Returns:
        The variance.

    >>> nice_variance(4, 2, 1.0), nice_variance(1, 1, 1.0)
    (0.3333333333333333, 0.0)
    """
    if not 1 <= tau <= n:
        raise ValueError(f"tau={tau}; allowed: 1 to n={n}")
    return (n - tau) / (tau * (n - 1)) * float(mean_square) if n > 1 else 0.0


def stratified_upper_bounds(gradients: Rows, clusters: Sequence[Any]) -> tuple[float, float]:
    """Return the thesis's two upper bounds on sigma^2_SS, the variance of stratified sampling.

        sigma^2_SS <= (b/n^2) sum_j |C_j|^2 sigma_j^2 <= b max_j sigma_j^2

    sigma_j is the largest distance of a client's gradient in cluster j from the cluster's mean.  The bounds are too
    large by a factor of at least b; `sampling.stratified(clusters).variance` is exact.
    Thesis: lemma on the variance of stratified sampling, Sec. 5.3.3.  Differs (docs/errata.md): P6.

    Args:
        gradients: a_i, the gradients of the clients at x*, [n, d].
        clusters: b arrays or sequences of client numbers.

    Returns:
        Both bounds.

    >>> stratified_upper_bounds(np.array([[1.0], [3.0], [-4.0]]), [[0, 1], [2]])
    (0.8888888888888888, 2.0)
    """
    rows = [gradients[np.asarray(ids)] for ids in clusters]
    spread = np.array([np.max(np.sum((a - a.mean(axis=0)) ** 2, axis=1)) for a in rows])
    sizes = np.array([len(a) for a in rows])
    b, n = len(rows), len(gradients)
    return float(b / n**2 * np.sum(sizes**2 * spread)), float(b * spread.max())


def stratified_from_block(block_variance: float, mean_square: float, b: int) -> float:
    """Return the variance of stratified sampling, sigma^2_SS = (mean_i |a_i|^2 - sigma^2_BS) / b.

    a_i is the gradient of client i at x*, and the a_i add up to 0.

    Holds if: the b clusters have equal sizes and probabilities (erratum P10 in docs/errata.md).

    Args:
        block_variance: sigma^2_BS, the variance of block sampling on the same clusters.
        mean_square: mean_i |a_i|^2.
        b: number of clusters.

    Returns:
        The variance of stratified sampling.
    """
    return (mean_square - block_variance) / b


def optimal_clustering_bounds(mean_square: float, b: int, m: int) -> tuple[float, float]:
    """Bound the variances of stratified and block sampling on the clusters that minimise sigma^2_SS.

        sigma^2_SS <= (m-1)/(bm-1) T = sigma^2_NICE(b)        sigma^2_BS >= (b-1)/(bm-1) T,   T = mean_i |a_i|^2

    a_i is the gradient of client i at x*, and sigma^2_NICE(b) the variance of nice sampling of b clients.  Hence
    stratified sampling is never worse than nice sampling, and for m <= b block sampling is never better than either.
    This settles an open question of the thesis (Sec. D.6.8).  For m > b, block sampling can be better.
    Differs (docs/errata.md): P10 (the comparison of the three samplings).

    Args:
        mean_square: T.
        b: number of clusters.
        m: number of clients in each cluster.

    Returns:
        The upper bound on sigma^2_SS and the lower bound on sigma^2_BS.

    >>> optimal_clustering_bounds(1.0, b=2, m=2)
    (0.3333333333333333, 0.3333333333333333)
    """
    if b < 1 or m < 1:
        raise ValueError(f"b={b}, m={m}; allowed: both at least 1")
    return nice_variance(b * m, b, mean_square), (b - 1) / max(b * m - 1, 1) * mean_square
