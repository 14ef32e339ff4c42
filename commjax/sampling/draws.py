"""The types of a sampling and of one draw, and the checks of their arguments."""

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
# Arrays or sequences of client numbers; together they contain each of 0..n-1 exactly once.
Clusters = Sequence[Any] | Int[np.ndarray, "b k"]


class Draw(NamedTuple):
    """One cohort in m slots.  An unused slot repeats a client of the cohort, with weight 0 and mask False.

    Attributes:
        ids: number of the client in each slot.
        weights: 1 / (n p_i) for each slot, where p_i is the probability that client i is drawn; 0 for an unused slot.
        mask: whether the slot is used.
    """

    ids: Int[Array, "m"]
    weights: Float[Array, "m"]
    mask: Bool[Array, "m"]


class Sampling(NamedTuple):
    """A distribution over cohorts S, and its constants.

    `sample` is pure and has static shapes; everything else runs in NumPy on the host.

    Thesis: Sec. 5.3.1, Table D.3.
    Differs (docs/errata.md): P3 (weights 1/(n p_i), which need not add up to 1), P4 (each client has its mu_i).

    Attributes:
        name: name of the sampling.
        n: number of clients.
        size: m, the number of slots.
        sample: (key) -> Draw.
        probabilities: p_i = Prob(i in S).
        mu: (strong convexity constants mu_i [n]) -> mu_AS, with which every f_S is strongly convex.
        variance: (gradients of the clients at x* [n, d], which add up to 0) -> sigma^2_AS = E |grad f_S(x*)|^2.
        outcomes: () -> iterator over (probability, cohort), each cohort once; exponentially many in general.
        shares: r_i = E [1(i in S) / |S|], which add up to 1: the mean weights of the clients in FedProx-SPPM-AS.
        smoothness: (smoothness constants L_i [n]) -> expected smoothness
            max_i E [sum_{j in S} L_j / (n p_j) | i in S].
    """

    name: str
    n: int
    size: int
    sample: Callable[[Key], Draw]
    probabilities: Vector
    mu: Callable[[ArrayLike], float]
    variance: Callable[[ArrayLike], float]
    outcomes: Callable[[], Outcomes]
    shares: Vector
    smoothness: Callable[[ArrayLike], float]


def build(
    name: str,
    p: Vector,
    shares: Vector,
    size: int,
    pick: Callable[[Key], tuple[Int[Array, "m"], Bool[Array, "m"]]],
    *,
    mu: Callable[[Vector], Any],
    variance: Callable[[Rows], Any],
    outcomes: Callable[[], Outcomes],
    smoothness: Callable[[Vector], Any],
) -> Sampling:
    """Build a `Sampling` that validates the arguments of `mu`, `variance` and `smoothness`.

    Args:
        name: name of the sampling.
        p: p_i = Prob(i in S), [n].
        shares: E [1(i in S) / |S|], [n].
        size: m, the number of slots.
        pick: (key) -> (ids [m], mask [m]).
        mu: (mu_i [n]) -> mu_AS; its argument is already validated.
        variance: (gradients [n, d]) -> sigma^2_AS; its argument is already validated.
        outcomes: () -> iterator over (probability, cohort).
        smoothness: (L_i [n]) -> expected smoothness; its argument is already validated.

    Returns:
        The sampling.
    """
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
                f"gradients have a mean of norm {rest:.3g} (largest row: {scale:.3g}); "
                "allowed: gradients at x*, which add up to 0: centre them with gradients - gradients.mean(axis=0)"
            )
        return float(variance(gradients))

    def checked_smoothness(L: ArrayLike) -> float:
        L = np.asarray(L, np.float64)
        if np.shape(L) != (n,) or not np.all(np.isfinite(L) & (L > 0)):
            raise ValueError(f"L_i has shape {np.shape(L)} and values {L}; allowed: n={n} finite positive numbers")
        return float(smoothness(L))

    return Sampling(name, n, size, sample, p, checked_mu, checked_variance, outcomes, shares, checked_smoothness)


def distribution(name: str, p: Any) -> Vector:
    """Return p as float64, normalised to add up to 1 up to rounding.

    Args:
        name: name of the argument, for the error message.
        p: positive numbers that add up to 1, up to 1e-6.

    Returns:
        Probabilities [n].  A ValueError is raised if p is not a distribution with positive probabilities.
    """
    p = np.asarray(p, np.float64)
    if p.ndim != 1 or len(p) == 0 or not np.all(p > 0):
        raise ValueError(f"{name}={p.tolist()}; allowed: a positive probability for each (a proper sampling)")
    if not abs(p.sum() - 1) <= 1e-6:
        raise ValueError(f"{name} adds up to {p.sum()}; allowed: 1")
    return p / p.sum()


def squares(rows: Float[np.ndarray, "k d"]) -> Float[np.ndarray, "k"]:
    """Return the squared norm of each row.

    Args:
        rows: vectors [k, d].

    Returns:
        Numbers [k].
    """
    return np.sum(rows**2, axis=1)


class Parts(NamedTuple):
    """Validated clusters.

    Attributes:
        members: the clients of each cluster.
        sizes: the size of each cluster.
        of: the cluster of each client.
        table: the clients of each cluster as an array [b, largest size]; unused places repeat the
            cluster's first client.
    """

    members: list[Int[np.ndarray, "_"]]
    sizes: Int[np.ndarray, "b"]
    of: Int[np.ndarray, "n"]
    table: Int[np.ndarray, "b k"]

    def sums(self, rows: Rows) -> Float[np.ndarray, "b d"]:
        """Return the sum of the rows of each cluster.

        Args:
            rows: one vector per client, [n, d].

        Returns:
            Vectors [b, d].
        """
        return np.stack([rows[ids].sum(axis=0) for ids in self.members])

    def variances(self, rows: Rows) -> Float[np.ndarray, "b"]:
        """Return v_j = mean over cluster j of |a_i - mean of cluster j|^2.

        Args:
            rows: a_i, one vector per client, [n, d].

        Returns:
            v_j, [b].
        """
        return np.array([squares(rows[ids] - rows[ids].mean(axis=0)).mean() for ids in self.members])


def partition(clusters: Clusters) -> Parts:
    """Validate clusters: each of 0..n-1 must be in exactly one cluster, and no cluster may be empty.

    Args:
        clusters: arrays or sequences of client numbers.

    Returns:
        The clusters in several forms.  A ValueError is raised if the clusters are not a partition.
    """
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
    """Raise a ValueError unless `size` is an integer from 1 to `most`.

    Args:
        name: name of the argument, for the error message.
        size: the value to check.
        most: the largest allowed value.
        what: a description of `most`, for the error message.
    """
    if not isinstance(size, int | np.integer):
        raise ValueError(f"{name}={size!r}; allowed: an int")
    if not 1 <= size <= most:
        raise ValueError(f"{name}={size}; allowed: 1 to {most}, {what} (a cohort may not be empty)")
