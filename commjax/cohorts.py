r"""Who takes part in a round: samplings of cohorts, and their constants in closed form.

A sampling draws a random nonempty set S of the clients 0..n-1.  With p_i = Prob(i in S), the cohort minimises

    f_S = sum_{i in S} f_i / (n p_i),        E f_S = f = (1/n) sum_i f_i

and two numbers describe it: mu_AS, such that every f_S is mu_AS-strongly convex, and sigma^2_AS = E |grad f_S(x*)|^2.
`commjax.theory.sppm` says what follows from them; `commjax.clients.cohort` is the plain cohort of a federated round.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations, product
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from commjax.base import Key
from commjax.theory.sppm import nice_variance

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
    mu: Callable[[Vector], float]  # mu_AS from the clients' mu_i
    variance: Callable[[Rows], float]  # sigma^2_AS from the clients' gradients at x*, which add up to 0
    outcomes: Callable[[], Outcomes]  # (probability, cohort), each cohort once: exponentially many in general
    shares: Vector  # E [1(i in S) / |S|], which add up to 1: what FedProx-SPPM-AS gives each client (P3)
    smoothness: Callable[
        [Vector], float
    ]  # expected smoothness max_i E [sum_{j in S} L_j / (n p_j) | i in S] from the clients' L_i


def _build(name, p, shares, size, pick, mu, variance, outcomes, smoothness) -> Sampling:
    """`pick(key)` gives ids and mask; `mu`, `variance` and `smoothness` may trust their arguments."""
    n, weights = len(p), 1 / (len(p) * p)

    def sample(key: Key) -> Draw:
        ids, mask = pick(key)
        return Draw(ids, jnp.where(mask, jnp.asarray(weights, float)[ids], 0.0), mask)

    def checked_mu(values: Vector) -> float:
        if np.shape(values) != (n,) or not np.all(np.isfinite(values) & (values >= 0)):
            raise ValueError(f"mu has shape {np.shape(values)} and values {values}; allowed: n={n} finite numbers >= 0")
        return float(mu(values))

    def checked_variance(gradients: Rows) -> float:
        if len(gradients) != n or not np.all(np.isfinite(gradients)):
            raise ValueError(f"gradients has shape {gradients.shape}; allowed: n={n} finite rows")
        rest, scale = np.linalg.norm(gradients.mean(axis=0)), np.linalg.norm(gradients, axis=1).max()
        if rest > 1e-5 * scale + 1e-8:
            raise ValueError(
                f"gradients have a mean of norm {rest:.3g} (largest row: {scale:.3g}); allowed: gradients at x*, which add up "
                "to 0: centre them with gradients - gradients.mean(axis=0)"
            )
        return float(variance(gradients))

    def checked_smoothness(L: Vector) -> float:
        if np.shape(L) != (n,) or not np.all(np.isfinite(L) & (L > 0)):
            raise ValueError(f"L_i has shape {np.shape(L)} and values {L}; allowed: n={n} finite positive numbers")
        return float(smoothness(L))

    return Sampling(name, n, size, sample, p, checked_mu, checked_variance, outcomes, shares, checked_smoothness)


def _distribution(name: str, p: Any) -> Vector:
    """p as float64 that adds up to exactly 1, up to rounding"""
    p = np.asarray(p, np.float64)
    if p.ndim != 1 or len(p) == 0 or not np.all(p > 0):
        raise ValueError(f"{name}={p.tolist()}; allowed: a positive probability for each (a proper sampling)")
    if not abs(p.sum() - 1) <= 1e-6:
        raise ValueError(f"{name} adds up to {p.sum()}; allowed: 1")
    return p / p.sum()


def _choose(key: Key, p: Vector) -> Int[Array, ""]:
    """One index with probabilities p, resolved to about 1e-7 in float32"""
    steps = jnp.asarray(np.cumsum(p)[:-1], float)
    return jnp.searchsorted(steps, jax.random.uniform(key, dtype=steps.dtype), side="right").astype(jnp.int32)


def _subset(key: Key, n: int, size: int) -> Int[Array, "m"]:
    return jax.random.permutation(key, jnp.arange(n, dtype=jnp.int32))[:size]


def _everyone(ids: Int[Array, "m"]) -> tuple[Int[Array, "m"], Bool[Array, "m"]]:
    return ids, jnp.ones(ids.shape, bool)


def _squares(rows: Float[np.ndarray, "k d"]) -> Float[np.ndarray, "k"]:
    return np.sum(rows**2, axis=1)


class _Parts(NamedTuple):
    """Clusters, checked, and as a table [b, largest size] whose empty places repeat the cluster's first client"""

    members: list[Int[np.ndarray, "_"]]
    sizes: Int[np.ndarray, "b"]
    of: Int[np.ndarray, "n"]  # the cluster of each client
    table: Int[np.ndarray, "b k"]

    def sums(self, rows: Rows) -> Float[np.ndarray, "b d"]:
        return np.stack([rows[ids].sum(axis=0) for ids in self.members])

    def variances(self, rows: Rows) -> Float[np.ndarray, "b"]:
        """v_j = mean over the cluster of |a_i - its mean|^2"""
        return np.array([_squares(rows[ids] - rows[ids].mean(axis=0)).mean() for ids in self.members])


def _parts(clusters: Clusters) -> _Parts:
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
    return _Parts(members, sizes, of, table.astype(np.int32))


def _check_size(name: str, size: int, most: int, what: str) -> None:
    if int(size) != size:
        raise ValueError(f"{name}={size}; allowed: a whole number")
    if not 1 <= size <= most:
        raise ValueError(f"{name}={size}; allowed: 1 to {most}, {what} (a cohort may not be empty)")


def _with_others(own: Vector, total: float, tau: int, n: int) -> Vector:
    """L_i + (tau - 1)/(n - 1) sum_{j != i} L_j: the others are as likely as in nice sampling"""
    return own + (total - own) * ((tau - 1) / (n - 1) if n > 1 else 0)


def full(n: int) -> Sampling:
    """All clients: mu = mean_i mu_i, sigma^2 = 0.  Thesis: FS (L4719).

    >>> full(3).sample(jax.random.key(0)).ids.tolist(), full(3).mu(np.array([1.0, 2.0, 3.0]))
    ([0, 1, 2], 2.0)
    """
    _check_size("n", n, 2**31 - 1, "clients")
    return _build(
        "full",
        p=np.ones(n),
        shares=np.full(n, 1 / n),
        size=n,
        pick=lambda key: _everyone(jnp.arange(n, dtype=jnp.int32)),
        mu=np.mean,
        variance=lambda a: 0.0,
        outcomes=lambda: iter([(1.0, tuple(range(n)))]),
        smoothness=np.mean,
    )


def nonuniform(p: Any) -> Sampling:
    """One client, i with probability p_i: mu = min_i mu_i / (n p_i), sigma^2 = (1/n^2) sum_i |a_i|^2 / p_i.

    Thesis: NS (L4727).

    >>> nonuniform([0.25, 0.75]).mu(np.array([1.0, 1.0]))
    0.6666666666666666
    """
    p = _distribution("p", p)
    n = len(p)
    return _build(
        "nonuniform",
        p=p,
        shares=p,
        size=1,
        pick=lambda key: _everyone(_choose(key, p)[None]),
        mu=lambda mu: np.min(mu / (n * p)),
        variance=lambda a: np.sum(_squares(a) / p) / n**2,
        outcomes=lambda: ((float(p[i]), (i,)) for i in range(n)),
        smoothness=lambda L: np.max(L / (n * p)),
    )


def importance(mu: Any) -> Sampling:
    """One client, with p_i proportional to mu_i, which makes mu_AS as large as one client can: mean_i mu_i.

    Thesis: IS (L4733).

    >>> importance([1.0, 3.0]).probabilities.tolist(), importance([1.0, 3.0]).mu(np.array([1.0, 3.0]))
    ([0.25, 0.75], 2.0)
    """
    mu = np.asarray(mu, np.float64)
    if mu.ndim != 1 or len(mu) == 0 or not np.all((mu > 0) & np.isfinite(mu)):
        raise ValueError(f"mu={mu.tolist()}; allowed: a finite positive number for each client")
    return nonuniform(mu / mu.sum())._replace(name="importance")


def nice(n: int, tau: int) -> Sampling:
    """tau of n clients, all sets alike: mu = mean of the tau smallest mu_i, sigma^2 = (n/tau - 1)/(n - 1) mean_i |a_i|^2.

    Thesis: NICE (L2134, L5411).  Differs: P9 (1 <= tau <= n).

    >>> nice(4, 2).mu(np.array([4.0, 3.0, 2.0, 1.0])), nice(4, 2).variance(np.array([[1.0], [1.0], [-1.0], [-1.0]]))
    (1.5, 0.3333333333333333)
    """
    _check_size("tau", tau, n, "the number of clients")
    return _build(
        f"nice({tau})",
        p=np.full(n, tau / n),
        shares=np.full(n, 1 / n),
        size=tau,
        pick=lambda key: _everyone(_subset(key, n, tau)),
        mu=lambda mu: np.sort(mu)[:tau].mean(),
        variance=lambda a: nice_variance(n, tau, _squares(a).mean()),
        outcomes=lambda: ((1 / math.comb(n, tau), ids) for ids in combinations(range(n), tau)),
        smoothness=lambda L: np.max(_with_others(L, L.sum(), tau, n)) / tau,
    )


def block(clusters: Clusters, q: Any = None) -> Sampling:
    """A whole cluster, j with probability q_j (None: all alike): mu = min_j sum_{C_j} mu_i / (n q_j),

    sigma^2 = (1/n^2) sum_j |sum_{C_j} a_i|^2 / q_j.  Unequal clusters leave slots unused.  Thesis: BS (L2147).

    >>> sampling = block([[0, 1, 2], [3]], q=[0.25, 0.75])
    >>> draw = sampling.sample(jax.random.key(1))
    >>> sampling.size, int(draw.mask.sum()) in (1, 3), sampling.probabilities.tolist()
    (3, True, [0.25, 0.25, 0.25, 0.75])
    """
    parts = _parts(clusters)
    n, b = len(parts.of), len(parts.sizes)
    q = _distribution("q", np.full(b, 1 / b) if q is None else q)
    if len(q) != b:
        raise ValueError(f"q has {len(q)} entries; allowed: one for each of the {b} clusters")

    def pick(key):
        j = _choose(key, q)
        return jnp.asarray(parts.table)[j], jnp.arange(parts.sizes.max()) < jnp.asarray(parts.sizes)[j]

    return _build(
        f"block({b})",
        p=q[parts.of],
        shares=(q / parts.sizes)[parts.of],
        size=int(parts.sizes.max()),
        pick=pick,
        mu=lambda mu: min(mu[ids].sum() / (n * q[j]) for j, ids in enumerate(parts.members)),
        variance=lambda a: np.sum(_squares(parts.sums(a)) / q) / n**2,
        outcomes=lambda: ((float(q[j]), _cohort(ids)) for j, ids in enumerate(parts.members)),
        smoothness=lambda L: np.max([L[ids].sum() / (n * q[j]) for j, ids in enumerate(parts.members)]),
    )


def _cohort(ids: Any) -> tuple[int, ...]:
    return tuple(sorted(int(i) for i in ids))


def stratified(clusters: Clusters) -> Sampling:
    """One client from each cluster: mu = sum_j |C_j|/n min_{C_j} mu_i, sigma^2 = (1/n^2) sum_j |C_j|^2 v_j,

    where v_j is the variance of the a_i inside cluster j: small if the clients of a cluster are alike.
    Thesis: SS (L2157).  Differs: P6 (closed form instead of a sum over C_1 x ... x C_b).

    >>> draw = stratified([[0, 1, 2], [3]]).sample(jax.random.key(0))
    >>> int(draw.ids[1]), draw.weights.tolist()
    (3, [0.75, 0.25])
    """
    q = len(clusters)
    return stratified_of(clusters, q)._replace(name=f"stratified({q})") if q else stratified_of(clusters, 1)


def stratified_of(clusters: Clusters, c: int) -> Sampling:
    """One client from each of c of the q clusters: p_i = (c/q) / |C_j|, mu = sum of the c smallest q|C_j|/(nc) min_{C_j} mu_i,

    sigma^2 = q/(n^2 c) sum_j |C_j|^2 v_j + (q/c - 1)/(q - 1) (q/n^2) sum_j |sum_{C_j} a_i|^2.
    Thesis: Alg. (L4906).  Differs: P7 (it is stratified sampling only if c = q).

    >>> stratified_of([[0, 1], [2, 3], [4, 5]], 2).probabilities.round(6).tolist()[:2]
    [0.333333, 0.333333]
    """
    parts = _parts(clusters)
    n, q, sizes = len(parts.of), len(parts.sizes), parts.sizes
    _check_size("c", c, q, "the number of clusters")

    def pick(key):
        key_clusters, key_client = jax.random.split(key)
        chosen = jnp.arange(q, dtype=jnp.int32) if c == q else _subset(key_clusters, q, c)
        at = jax.random.randint(key_client, (c,), 0, jnp.asarray(sizes, jnp.int32)[chosen])
        return _everyone(jnp.asarray(parts.table)[chosen, at])

    def mu(values):
        least = [size * values[ids].min() for size, ids in zip(sizes, parts.members)]
        return q / (n * c) * sum(sorted(least)[:c])

    def variance(a):
        inside = q / (n**2 * c) * np.sum(sizes**2 * parts.variances(a))
        return inside + (q / n) ** 2 * nice_variance(q, c, _squares(parts.sums(a)).mean())

    def outcomes():
        for chosen in combinations(range(q), c):
            chance = 1 / (math.comb(q, c) * math.prod(int(sizes[j]) for j in chosen))
            for ids in product(*(parts.members[j] for j in chosen)):
                yield chance, _cohort(ids)

    def smoothness(L):
        largest, sums = (np.array([f(L[ids]) for ids in parts.members]) for f in (np.max, np.sum))
        # The cluster's worst client for sure; of each other cluster, if it is chosen, the mean client.
        others = (sums.sum() - sums) * ((c - 1) / (q - 1) if q > 1 else 0)
        return q / (n * c) * np.max(sizes * largest + others)

    p = (c / (q * sizes))[parts.of]
    return _build(f"stratified({c} of {q})", p, p / c, c, pick, mu, variance, outcomes, smoothness)


def block_of(clusters: Clusters, c: int) -> Sampling:
    """c clients of one of the q clusters, all clusters alike: p_i = (c/q) / |C_j|,

    mu = min_j q|C_j|/n mean of the c smallest mu_i in C_j,
    sigma^2 = (q/n^2) sum_j |C_j|^2 (|mean_{C_j} a_i|^2 + (|C_j|/c - 1)/(|C_j| - 1) v_j).
    Thesis: Alg. (L4906).  Differs: P7 (it is block sampling only if c = |C_j|).

    >>> block_of([[0, 1, 2], [3, 4]], 2).probabilities.round(6).tolist()
    [0.333333, 0.333333, 0.333333, 0.5, 0.5]
    """
    parts = _parts(clusters)
    n, q, sizes = len(parts.of), len(parts.sizes), parts.sizes
    _check_size("c", c, int(sizes.min()), "the smallest cluster")

    def pick(key):
        key_cluster, key_clients = jax.random.split(key)
        j = jax.random.randint(key_cluster, (), 0, q)
        order = jax.random.uniform(key_clients, (int(sizes.max()),))
        filled = jnp.arange(sizes.max()) < jnp.asarray(sizes)[j]
        return _everyone(jnp.asarray(parts.table)[j, jax.lax.top_k(jnp.where(filled, order, -1.0), c)[1]])

    def mu(values):
        return min(q * size / n * np.sort(values[ids])[:c].mean() for size, ids in zip(sizes, parts.members))

    def variance(a):
        centre = _squares(parts.sums(a) / sizes[:, None])
        spread = [nice_variance(int(m), c, v) for m, v in zip(sizes, parts.variances(a))]
        return q / n**2 * np.sum(sizes**2 * (centre + np.array(spread)))

    def outcomes():
        for ids in parts.members:
            for chosen in combinations(_cohort(ids), c):
                yield 1 / (q * math.comb(len(ids), c)), chosen

    def smoothness(L):
        return max(
            q * m / (n * c) * np.max(_with_others(L[ids], L[ids].sum(), c, int(m)))
            for m, ids in zip(sizes, parts.members)
        )

    p = (c / (q * sizes))[parts.of]
    return _build(f"block({c} of one of {q})", p, p / c, c, pick, mu, variance, outcomes, smoothness)
