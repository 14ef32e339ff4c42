r"""Samplings of cohorts and their constants in closed form.

A sampling draws a random nonempty set S of the clients 0..n-1.  With p_i = Prob(i in S), the cohort minimises

    f_S = sum_{i in S} f_i / (n p_i),        E f_S = f = (1/n) sum_i f_i

Two constants describe a sampling: mu_AS, such that every f_S is mu_AS-strongly convex, and
sigma^2_AS = E |grad f_S(x*)|^2.  Below, mu_i is the strong convexity constant of f_i, and a_i = grad f_i(x*).
`commjax.theory.sppm` has the bounds in terms of these constants.  `commjax.core.rounds.cohort` draws the uniform cohort
of the other federated methods.
"""

import math
from itertools import combinations, product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from commjax.core.base import Key
from commjax.sampling.draws import (
    Clusters,
    Draw,
    Outcomes,
    Rows,
    Sampling,
    Vector,
    build,
    check_size,
    distribution,
    partition,
    squares,
)
from commjax.sampling.picks import Slots, choose, everyone, sorted_cohort, subset, with_others
from commjax.theory.sppm import nice_variance

__all__ = [
    "Clusters",
    "Draw",
    "Sampling",
    "Vector",
    "block",
    "block_of",
    "full",
    "importance",
    "nice",
    "nonuniform",
    "stratified",
    "stratified_of",
]


def full(n: int) -> Sampling:
    """Full participation: every client takes part in every round.

        mu_AS = mean_i mu_i        sigma^2_AS = 0

    f_i is mu_i-strongly convex, a_i = grad f_i(x*), f_S is mu_AS-strongly convex, sigma^2_AS = E |grad f_S(x*)|^2.
    Thesis: full sampling (FS), Sec. D.2.2.

    Args:
        n: number of clients.

    Returns:
        A sampling of n clients with n slots.

    >>> full(3).sample(jax.random.key(0)).ids.tolist(), full(3).mu(np.array([1.0, 2.0, 3.0]))
    ([0, 1, 2], 2.0)
    """
    check_size("n", n, 2**31 - 1, "clients")
    return build(
        "full",
        p=np.ones(n),
        shares=np.full(n, 1 / n),
        size=n,
        pick=lambda key: everyone(jnp.arange(n, dtype=jnp.int32)),
        mu=np.mean,
        variance=lambda a: 0.0,
        outcomes=lambda: iter([(1.0, tuple(range(n)))]),
        smoothness=np.mean,
    )


def nonuniform(p: Any) -> Sampling:
    """Draw one client; client i has probability p_i.

        mu_AS = min_i mu_i / (n p_i)        sigma^2_AS = (1/n^2) sum_i |a_i|^2 / p_i

    f_i is mu_i-strongly convex, a_i = grad f_i(x*), f_S is mu_AS-strongly convex, sigma^2_AS = E |grad f_S(x*)|^2.
    Thesis: nonuniform sampling (NS), Sec. D.2.2.

    Args:
        p: positive probabilities [n] that add up to 1.

    Returns:
        A sampling of n clients with one slot.

    >>> nonuniform([0.25, 0.75]).mu(np.array([1.0, 1.0]))
    0.6666666666666666
    """
    p = distribution("p", p)
    n = len(p)
    return build(
        "nonuniform",
        p=p,
        shares=p,
        size=1,
        pick=lambda key: everyone(choose(key, p)[None]),
        mu=lambda mu: np.min(mu / (n * p)),
        variance=lambda a: np.sum(squares(a) / p) / n**2,
        outcomes=lambda: ((float(p[i]), (i,)) for i in range(n)),
        smoothness=lambda L: np.max(L / (n * p)),
    )


def importance(mu: Any) -> Sampling:
    """Draw one client with probability proportional to mu_i.

        p_i = mu_i / sum_j mu_j        mu_AS = mean_i mu_i

    f_i is mu_i-strongly convex, and f_S is mu_AS-strongly convex.  No sampling of one client has a larger mu_AS.
    Thesis: importance sampling (IS), Sec. D.2.2.

    Args:
        mu: positive strong convexity constants [n] of the clients.

    Returns:
        A sampling of n clients with one slot.

    >>> importance([1.0, 3.0]).probabilities.tolist(), importance([1.0, 3.0]).mu(np.array([1.0, 3.0]))
    ([0.25, 0.75], 2.0)
    """
    mu = np.asarray(mu, np.float64)
    if mu.ndim != 1 or len(mu) == 0 or not np.all((mu > 0) & np.isfinite(mu)):
        raise ValueError(f"mu={mu.tolist()}; allowed: a finite positive number for each client")
    return nonuniform(mu / mu.sum())._replace(name="importance")


def nice(n: int, tau: int) -> Sampling:
    """Draw tau of n clients; all sets of size tau are equally likely.

        mu_AS = mean of the tau smallest mu_i        sigma^2_AS = (n/tau - 1)/(n - 1) mean_i |a_i|^2

    f_i is mu_i-strongly convex, a_i = grad f_i(x*), f_S is mu_AS-strongly convex, sigma^2_AS = E |grad f_S(x*)|^2.
    Thesis: nice sampling (NICE), Sec. 5.3.3 and Lemma D.6.11.  Differs (docs/errata.md): P9 (1 <= tau <= n).

    Args:
        n: number of clients.
        tau: size of the cohort, 1 <= tau <= n.

    Returns:
        A sampling of n clients with tau slots.

    >>> nice(4, 2).mu(np.array([4.0, 3.0, 2.0, 1.0])), nice(4, 2).variance(np.array([[1.0], [1.0], [-1.0], [-1.0]]))
    (1.5, 0.3333333333333333)
    """
    check_size("tau", tau, n, "the number of clients")
    return build(
        f"nice({tau})",
        p=np.full(n, tau / n),
        shares=np.full(n, 1 / n),
        size=tau,
        pick=lambda key: everyone(subset(key, n, tau)),
        mu=lambda mu: np.sort(mu)[:tau].mean(),
        variance=lambda a: nice_variance(n, tau, squares(a).mean()),
        outcomes=lambda: ((1 / math.comb(n, tau), ids) for ids in combinations(range(n), tau)),
        smoothness=lambda L: np.max(with_others(L, L.sum(), tau, n)) / tau,
    )


def block(clusters: Clusters, q: Any = None) -> Sampling:
    """Draw one whole cluster; cluster C_j has probability q_j.

        mu_AS = min_j sum_{C_j} mu_i / (n q_j)        sigma^2_AS = (1/n^2) sum_j |sum_{C_j} a_i|^2 / q_j

    f_i is mu_i-strongly convex, a_i = grad f_i(x*), f_S is mu_AS-strongly convex, sigma^2_AS = E |grad f_S(x*)|^2.
    Thesis: block sampling (BS), Sec. 5.3.3.

    Args:
        clusters: b arrays or sequences of client numbers; together they contain each of 0..n-1 exactly once.
        q: positive probabilities [b] of the clusters.  None means 1/b for each.

    Returns:
        A sampling of n clients with as many slots as the largest cluster has clients.  A smaller cluster leaves slots
        unused.

    >>> sampling = block([[0, 1, 2], [3]], q=[0.25, 0.75])
    >>> draw = sampling.sample(jax.random.key(1))
    >>> sampling.size, int(draw.mask.sum()) in (1, 3), sampling.probabilities.tolist()
    (3, True, [0.25, 0.25, 0.25, 0.75])
    """
    parts = partition(clusters)
    n, b = len(parts.of), len(parts.sizes)
    q = distribution("q", np.full(b, 1 / b) if q is None else q)
    if len(q) != b:
        raise ValueError(f"q has {len(q)} entries; allowed: one for each of the {b} clusters")

    def pick(key: Key) -> Slots:
        j = choose(key, q)
        return jnp.asarray(parts.table)[j], jnp.arange(parts.sizes.max()) < jnp.asarray(parts.sizes)[j]

    return build(
        f"block({b})",
        p=q[parts.of],
        shares=(q / parts.sizes)[parts.of],
        size=int(parts.sizes.max()),
        pick=pick,
        mu=lambda mu: min(mu[ids].sum() / (n * q[j]) for j, ids in enumerate(parts.members)),
        variance=lambda a: np.sum(squares(parts.sums(a)) / q) / n**2,
        outcomes=lambda: ((float(q[j]), sorted_cohort(ids)) for j, ids in enumerate(parts.members)),
        smoothness=lambda L: np.max([L[ids].sum() / (n * q[j]) for j, ids in enumerate(parts.members)]),
    )


def stratified(clusters: Clusters) -> Sampling:
    """Draw one client from each cluster, uniformly.

        mu_AS = sum_j |C_j|/n min_{C_j} mu_i        sigma^2_AS = (1/n^2) sum_j |C_j|^2 v_j

    v_j is the variance of the a_i in cluster C_j, which is small if its clients are similar.
    f_i is mu_i-strongly convex, a_i = grad f_i(x*), f_S is mu_AS-strongly convex, sigma^2_AS = E |grad f_S(x*)|^2.
    Thesis: stratified sampling (SS), Sec. 5.3.3.
    Differs (docs/errata.md): P6 (closed form instead of a sum over C_1 x ... x C_b).

    Args:
        clusters: b arrays or sequences of client numbers; together they contain each of 0..n-1 exactly once.

    Returns:
        A sampling of n clients with b slots.

    >>> draw = stratified([[0, 1, 2], [3]]).sample(jax.random.key(0))
    >>> int(draw.ids[1]), draw.weights.tolist()
    (3, [0.75, 0.25])
    """
    q = len(clusters)
    return stratified_of(clusters, q)._replace(name=f"stratified({q})") if q else stratified_of(clusters, 1)


def stratified_of(clusters: Clusters, c: int) -> Sampling:
    """Draw c of the q clusters uniformly, then one client from each of them.

        p_i        = (c/q) / |C_j|
        mu_AS      = sum of the c smallest q|C_j|/(nc) min_{C_j} mu_i
        sigma^2_AS = q/(n^2 c) sum_j |C_j|^2 v_j + (q/c - 1)/(q - 1) (q/n^2) sum_j |sum_{C_j} a_i|^2

    v_j is the variance of the a_i in cluster C_j.
    f_i is mu_i-strongly convex, a_i = grad f_i(x*), f_S is mu_AS-strongly convex, sigma^2_AS = E |grad f_S(x*)|^2.
    Thesis: Alg. 14.  Differs (docs/errata.md): P7 (it is stratified sampling only if c = q).

    Args:
        clusters: q arrays or sequences of client numbers; together they contain each of 0..n-1 exactly once.
        c: number of clusters that are drawn, 1 <= c <= q.

    Returns:
        A sampling of n clients with c slots.

    >>> stratified_of([[0, 1], [2, 3], [4, 5]], 2).probabilities.round(6).tolist()[:2]
    [0.333333, 0.333333]
    """
    parts = partition(clusters)
    n, q, sizes = len(parts.of), len(parts.sizes), parts.sizes
    check_size("c", c, q, "the number of clusters")

    def pick(key: Key) -> Slots:
        key_clusters, key_client = jax.random.split(key)
        chosen = jnp.arange(q, dtype=jnp.int32) if c == q else subset(key_clusters, q, c)
        at = jax.random.randint(key_client, (c,), 0, jnp.asarray(sizes, jnp.int32)[chosen])
        return everyone(jnp.asarray(parts.table)[chosen, at])

    def mu(values: Vector) -> float:
        least = [size * values[ids].min() for size, ids in zip(sizes, parts.members)]
        return q / (n * c) * sum(sorted(least)[:c])

    def variance(a: Rows) -> float:
        inside = q / (n**2 * c) * np.sum(sizes**2 * parts.variances(a))
        return inside + (q / n) ** 2 * nice_variance(q, c, squares(parts.sums(a)).mean())

    def outcomes() -> Outcomes:
        for chosen in combinations(range(q), c):
            chance = 1 / (math.comb(q, c) * math.prod(int(sizes[j]) for j in chosen))
            for ids in product(*(parts.members[j] for j in chosen)):
                yield chance, sorted_cohort(ids)

    def smoothness(L: Vector) -> float:
        largest, sums = (np.array([f(L[ids]) for ids in parts.members]) for f in (np.max, np.sum))
        # The largest client of the cluster itself is certain; each other cluster adds its mean if it is chosen.
        others = (sums.sum() - sums) * ((c - 1) / (q - 1) if q > 1 else 0)
        return q / (n * c) * np.max(sizes * largest + others)

    p = (c / (q * sizes))[parts.of]
    name = f"stratified({c} of {q})"
    return build(name, p, p / c, c, pick, mu=mu, variance=variance, outcomes=outcomes, smoothness=smoothness)


def block_of(clusters: Clusters, c: int) -> Sampling:
    """Draw one of the q clusters uniformly, then c of its clients.

        p_i        = (c/q) / |C_j|
        mu_AS      = min_j q|C_j|/n (mean of the c smallest mu_i in C_j)
        sigma^2_AS = (q/n^2) sum_j |C_j|^2 (|mean_{C_j} a_i|^2 + (|C_j|/c - 1)/(|C_j| - 1) v_j)

    v_j is the variance of the a_i in cluster C_j.
    f_i is mu_i-strongly convex, a_i = grad f_i(x*), f_S is mu_AS-strongly convex, sigma^2_AS = E |grad f_S(x*)|^2.
    Thesis: Alg. 14.  Differs (docs/errata.md): P7 (it is block sampling only if c = |C_j|).

    Args:
        clusters: q arrays or sequences of client numbers; together they contain each of 0..n-1 exactly once.
        c: number of clients that are drawn, at most the size of the smallest cluster.

    Returns:
        A sampling of n clients with c slots.

    >>> block_of([[0, 1, 2], [3, 4]], 2).probabilities.round(6).tolist()
    [0.333333, 0.333333, 0.333333, 0.5, 0.5]
    """
    parts = partition(clusters)
    n, q, sizes = len(parts.of), len(parts.sizes), parts.sizes
    check_size("c", c, int(sizes.min()), "the smallest cluster")

    def pick(key: Key) -> Slots:
        key_cluster, key_clients = jax.random.split(key)
        j = jax.random.randint(key_cluster, (), 0, q)
        order = jax.random.uniform(key_clients, (int(sizes.max()),))
        filled = jnp.arange(sizes.max()) < jnp.asarray(sizes)[j]
        return everyone(jnp.asarray(parts.table)[j, jax.lax.top_k(jnp.where(filled, order, -1.0), c)[1]])

    def mu(values: Vector) -> float:
        return min(q * size / n * np.sort(values[ids])[:c].mean() for size, ids in zip(sizes, parts.members))

    def variance(a: Rows) -> float:
        centre = squares(parts.sums(a) / sizes[:, None])
        spread = [nice_variance(int(m), c, v) for m, v in zip(sizes, parts.variances(a))]
        return q / n**2 * np.sum(sizes**2 * (centre + np.array(spread)))

    def outcomes() -> Outcomes:
        for ids in parts.members:
            for chosen in combinations(sorted_cohort(ids), c):
                yield 1 / (q * math.comb(len(ids), c)), chosen

    def smoothness(L: Vector) -> float:
        return max(
            q * m / (n * c) * np.max(with_others(L[ids], L[ids].sum(), c, int(m)))
            for m, ids in zip(sizes, parts.members)
        )

    p = (c / (q * sizes))[parts.of]
    name = f"block({c} of one of {q})"
    return build(name, p, p / c, c, pick, mu=mu, variance=variance, outcomes=outcomes, smoothness=smoothness)
