"""What a sampling of cohorts is: its draw, its constants, and the checks of what they are given."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int
from numpy.typing import ArrayLike

from commjax.core.base import Key

Vector = Float[np.ndarray, "n"]
Rows = Float[np.ndarray, "n d"]
Outcomes = Iterator[tuple[float, tuple[int, ...]]]
Clusters = Sequence[Any] | Int[np.ndarray, "b k"]  # arrays or sequences of client numbers, which partition 0..n-1


class Draw(NamedTuple):
    """One cohort in m slots; an unused slot repeats a client of the cohort, with weight 0 and mask False."""

    ids: Int[Array, "m"]
    weights: Float[Array, "m"]  # 1 / (n p_i)
    mask: Bool[Array, "m"]


class Sampling(NamedTuple):
    """A distribution over cohorts.  `sample` is pure and has static shapes; everything else is NumPy on the host.

    Thesis: L2033-L2060, Table (L4745).  Differs: P3 (weights 1/(n p_i), which need not add up to 1), P4 (each client has its mu_i).
    """

    name: str
    n: int
    size: int  # m, the number of slots
    sample: Callable[[Key], Draw]
    probabilities: Vector  # p_i = Prob(i in S)
    mu: Callable[[ArrayLike], float]  # mu_AS from the clients' mu_i
    variance: Callable[[ArrayLike], float]  # sigma^2_AS from the clients' gradients at x*, which add up to 0
    outcomes: Callable[[], Outcomes]  # (probability, cohort), each cohort once: exponentially many in general
    shares: Vector  # E [1(i in S) / |S|], which add up to 1: what FedProx-SPPM-AS gives each client (P3)
    smoothness: Callable[
        [ArrayLike], float
    ]  # expected smoothness max_i E [sum_{j in S} L_j / (n p_j) | i in S] from the clients' L_i


def build(name, p, shares, size, pick, mu, variance, outcomes, smoothness) -> Sampling:
    """`pick(key)` gives ids and mask; `mu`, `variance` and `smoothness` may trust their arguments."""
    n, weights = len(p), 1 / (len(p) * p)

    def sample(key: Key) -> Draw:
        ids, mask = pick(key)
        return Draw(ids, jnp.where(mask, jnp.asarray(weights, float)[ids], 0.0), mask)

    def checked_mu(values: ArrayLike) -> float:
        values = np.asarray(values, np.float64)
        if np.shape(values) != (n,) or not np.all(np.isfinite(values) & (values >= 0)):
            raise ValueError(f"mu has shape {np.shape(values)} and values {values}; allowed: n={n} finite numbers >= 0")
        return float(mu(values))

    def checked_variance(gradients: ArrayLike) -> float:
        gradients = np.asarray(gradients, np.float64)
        if gradients.ndim != 2 or len(gradients) != n or not np.all(np.isfinite(gradients)):
            raise ValueError(f"gradients has shape {gradients.shape}; allowed: n={n} finite rows")
        rest, scale = np.linalg.norm(gradients.mean(axis=0)), np.linalg.norm(gradients, axis=1).max()
        if rest > 1e-5 * scale + 1e-8:
            raise ValueError(
                f"gradients have a mean of norm {rest:.3g} (largest row: {scale:.3g}); allowed: gradients at x*, which add up "
                "to 0: centre them with gradients - gradients.mean(axis=0)"
            )
        return float(variance(gradients))

    def checked_smoothness(L: ArrayLike) -> float:
        L = np.asarray(L, np.float64)
        if np.shape(L) != (n,) or not np.all(np.isfinite(L) & (L > 0)):
            raise ValueError(f"L_i has shape {np.shape(L)} and values {L}; allowed: n={n} finite positive numbers")
        return float(smoothness(L))

    return Sampling(name, n, size, sample, p, checked_mu, checked_variance, outcomes, shares, checked_smoothness)


def distribution(name: str, p: Any) -> Vector:
    """p as float64 that adds up to exactly 1, up to rounding"""
    p = np.asarray(p, np.float64)
    if p.ndim != 1 or len(p) == 0 or not np.all(p > 0):
        raise ValueError(f"{name}={p.tolist()}; allowed: a positive probability for each (a proper sampling)")
    if not abs(p.sum() - 1) <= 1e-6:
        raise ValueError(f"{name} adds up to {p.sum()}; allowed: 1")
    return p / p.sum()


def squares(rows: Float[np.ndarray, "k d"]) -> Float[np.ndarray, "k"]:
    return np.sum(rows**2, axis=1)


class Parts(NamedTuple):
    """Clusters, checked, and as a table [b, largest size] whose empty places repeat the cluster's first client"""

    members: list[Int[np.ndarray, "_"]]
    sizes: Int[np.ndarray, "b"]
    of: Int[np.ndarray, "n"]  # the cluster of each client
    table: Int[np.ndarray, "b k"]

    def sums(self, rows: Rows) -> Float[np.ndarray, "b d"]:
        return np.stack([rows[ids].sum(axis=0) for ids in self.members])

    def variances(self, rows: Rows) -> Float[np.ndarray, "b"]:
        """v_j = mean over the cluster of |a_i - its mean|^2"""
        return np.array([squares(rows[ids] - rows[ids].mean(axis=0)).mean() for ids in self.members])


def partition(clusters: Clusters) -> Parts:
    members = [np.asarray(ids) for ids in clusters]
    if not members or any(ids.size == 0 for ids in members):
        empty = next((j for j, ids in enumerate(members) if ids.size == 0), None)
        what = "clusters is empty" if empty is None else f"clusters[{empty}] is empty"
        raise ValueError(f"{what}, so that a cohort could be; allowed: at least one client in each")
    if any(ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer) or ids.min() < 0 for ids in members):
        raise ValueError(f"clusters={[ids.tolist() for ids in members]}; allowed: lists of client numbers >= 0")
    times = np.bincount(np.concatenate(members))
    for client in np.flatnonzero(times != 1)[:1]:
        raise ValueError(
            f"clusters do not partition range({len(times)}): client {client} is in {times[client]} of them; "
            "allowed: each client in exactly one"
        )
    sizes = np.array([len(ids) for ids in members])
    table = np.stack([np.concatenate([ids, np.full(sizes.max() - len(ids), ids[0])]) for ids in members])
    of = np.empty(len(times), int)
    for j, ids in enumerate(members):
        of[ids] = j
    return Parts(members, sizes, of, table.astype(np.int32))


def check_size(name: str, size: int, most: int, what: str) -> None:
    if not isinstance(size, int | np.integer):
        raise ValueError(f"{name}={size!r}; allowed: an int")
    if not 1 <= size <= most:
        raise ValueError(f"{name}={size}; allowed: 1 to {most}, {what} (a cohort may not be empty)")
