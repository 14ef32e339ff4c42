"""SPPM-AS: rates, neighbourhoods, complexities, inexact proxes and communication costs.

Thesis: Sec. 5.3.2, Sec. 5.3.3 and Sec. D.6.

Throughout, mu and sigma2 are mu_AS and sigma^2_AS of a sampling (`commjax.sampling.samplings`), gamma > 0 is any
stepsize, and prox_{gamma f}(y) = argmin_x f(x) + |x - y|^2 / (2 gamma) (errata P1).
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

Vector = Float[np.ndarray, "n"]
Rows = Float[np.ndarray, "n d"]
Number = float | int


def _positive(**values: Number) -> None:
    for name, value in values.items():
        if not value > 0:
            raise ValueError(f"{name}={value}; allowed: positive")


def _nonnegative(**values: Number) -> None:
    for name, value in values.items():
        if not value >= 0:
            raise ValueError(f"{name}={value}; allowed: at least 0")


def recurrence(start: float, a: float, b: float, t: int) -> float:
    """Return a^t start + b min(t, 1/(1-a)), which bounds s_t if s_{t+1} <= a s_t + b.

    Thesis: Fact D.6.5.

    Args:
        start: s_0.
        a: factor, 0 <= a < 1.
        b: increment.
        t: number of steps.

    Returns:
        The bound.

    >>> recurrence(8.0, 0.5, 1.0, 2)
    4.0
    """
    if not 0 <= a < 1:
        raise ValueError(f"a={a}; allowed: 0 <= a < 1")
    return a**t * start + b * min(t, 1 / (1 - a))


def rate(gamma: float, mu: float) -> float:
    """Return 1 / (1 + gamma mu)^2, the factor by which one step shrinks the squared distance to x*.

    Thesis: convergence theorem of SPPM-AS, Sec. 5.3.2.

    Args:
        gamma: stepsize.
        mu: mu_AS.

    Returns:
        The factor.

    >>> rate(2.0, 0.5)
    0.25
    """
    _positive(gamma=gamma, mu=mu)
    return 1 / (1 + gamma * mu) ** 2


def neighbourhood(gamma: float, mu: float, sigma2: float) -> float:
    """Return gamma sigma^2 / (gamma mu^2 + 2 mu), the limit of the bound on E |x_t - x*|^2.

    It is at most min(sigma^2/mu^2, gamma sigma^2/(2 mu)).
    Thesis: convergence theorem of SPPM-AS, Sec. 5.3.2.  Differs: P14 (the factor 2 in the second bound).

    Args:
        gamma: stepsize.
        mu: mu_AS.
        sigma2: sigma^2_AS.

    Returns:
        The limit.

    >>> neighbourhood(1.0, 0.5, 2.0)
    1.6
    """
    _positive(gamma=gamma, mu=mu)
    _nonnegative(sigma2=sigma2)
    return sigma2 / (mu * (mu + 2 / gamma))


def one_step(distance2: float, gamma: float, mu: float, sigma2: float) -> float:
    """Return the bound on the squared distance after one step.

        E |x_{t+1} - x*|^2 <= (|x_t - x*|^2 + gamma^2 sigma^2) / (1 + gamma mu)^2

    Thesis: Sec. D.6.2.

    Args:
        distance2: |x_t - x*|^2.
        gamma: stepsize.
        mu: mu_AS.
        sigma2: sigma^2_AS.

    Returns:
        The bound.
    """
    _nonnegative(sigma2=sigma2)
    return rate(gamma, mu) * (distance2 + gamma**2 * sigma2)


def bound(t: int, distance2: float, gamma: float, mu: float, sigma2: float) -> float:
    """Return the bound on the squared distance after t steps, for every gamma > 0.

        E |x_t - x*|^2 <= rate^t |x_0 - x*|^2 + neighbourhood

    Thesis: convergence theorem of SPPM-AS, Sec. 5.3.2.
    Holds if: f_i is differentiable and mu_i-strongly convex, the prox exact (else `inexact_bound`).

    Args:
        t: number of steps.
        distance2: |x_0 - x*|^2.
        gamma: stepsize.
        mu: mu_AS.
        sigma2: sigma^2_AS.

    Returns:
        The bound.
    """
    return rate(gamma, mu) ** t * distance2 + neighbourhood(gamma, mu, sigma2)


def stepsize_for(epsilon: float, mu: float, sigma2: float) -> float:
    """Return gamma = epsilon mu / sigma^2, whose neighbourhood is at most epsilon/2; infinite if sigma^2 = 0.

    Thesis: Sec. 5.3.2, for epsilon <= sigma^2/mu^2; it holds beyond, where larger stepsizes are allowed too.

    Args:
        epsilon: target accuracy, positive.
        mu: mu_AS.
        sigma2: sigma^2_AS.

    Returns:
        gamma.

    >>> stepsize_for(0.1, 0.5, 2.0)
    0.025
    """
    _positive(epsilon=epsilon, mu=mu)
    _nonnegative(sigma2=sigma2)
    return epsilon * mu / sigma2 if sigma2 > 0 else math.inf


def iterations(epsilon: float, mu: float, sigma2: float, distance2: float, gamma: float | None = None) -> float:
    """Return the number of steps after which E |x_t - x*|^2 <= epsilon.

    With the stepsize of `stepsize_for` (thesis: Sec. 5.3.2) this is

        (sigma^2/(2 epsilon mu^2) + 1/2) log(2 |x_0 - x*|^2 / epsilon)

    Args:
        epsilon: target accuracy, positive.
        mu: mu_AS.
        sigma2: sigma^2_AS.
        distance2: |x_0 - x*|^2.
        gamma: another stepsize.  The result is then the t at which `bound` is epsilon, infinite if the neighbourhood is
            not smaller than epsilon.

    Returns:
        The number of steps, not rounded.

    >>> round(iterations(0.1, 0.5, 2.0, 10.0), 6), iterations(0.1, 0.5, 2.0, 10.0, gamma=1.0)
    (214.581853, inf)
    """
    _positive(epsilon=epsilon, mu=mu, distance2=distance2)
    _nonnegative(sigma2=sigma2)
    if gamma is None:
        return max(0.0, (sigma2 / (2 * epsilon * mu**2) + 0.5) * math.log(2 * distance2 / epsilon))
    room = epsilon - neighbourhood(gamma, mu, sigma2)
    return max(0.0, math.log(distance2 / room) / (2 * math.log1p(gamma * mu))) if room > 0 else math.inf


def squared_prox_error(residual: Any, gamma: float, mu: float) -> Any:
    """Bound the squared error of an inexact prox by its residual |grad F(x)|, F = f + |. - y|^2/(2 gamma).

        |x - prox_{gamma f}(y)|^2 <= (|grad F(x)| / (mu + 1/gamma))^2

    Holds if: f is mu-strongly convex (mu = 0 is allowed); mu_C of the cohort at hand is at least mu_AS, and sharper.

    Args:
        residual: |grad F(x)|, a number or an array.
        gamma: stepsize of the prox.
        mu: strong convexity constant of f.

    Returns:
        The bound.

    >>> squared_prox_error(3.0, gamma=1.0, mu=0.5)
    4.0
    """
    _positive(gamma=gamma)
    _nonnegative(mu=mu)
    return (residual / (mu + 1 / gamma)) ** 2


def inexact_limit(gamma: float, mu: float) -> float:
    """Return gamma^2 mu^2 + 2 gamma mu; s of the inexact bounds must be smaller (P5).

    Args:
        gamma: stepsize.
        mu: mu_AS.

    Returns:
        The limit.
    """
    _positive(gamma=gamma, mu=mu)
    return gamma * mu * (gamma * mu + 2)


def _checked_s(s: float | None, gamma: float, mu: float, sigma2: float, b: float) -> float:
    _nonnegative(sigma2=sigma2, b=b)
    s = best_s(gamma, mu, sigma2, b) if s is None else s
    limit = inexact_limit(gamma, mu)
    if not (0 < s < limit or s == b == 0):
        raise ValueError(f"s={s}; allowed: 0 < s < gamma^2 mu^2 + 2 gamma mu = {limit} (else nothing contracts)")
    return s


def best_s(gamma: float, mu: float, sigma2: float, b: float) -> float:
    """Return the s with the smallest inexact neighbourhood; 0 if b = 0, and gamma mu if sigma^2 = 0.

        s = Q M / (Q + sqrt(Q^2 + Q M (P M + P + Q)))
        M = gamma^2 mu^2 + 2 gamma mu,   P = gamma^2 sigma^2,   Q = b (1 + gamma mu)^2

    Args:
        gamma: stepsize.
        mu: mu_AS.
        sigma2: sigma^2_AS.
        b: bound on the squared prox error.

    Returns:
        s.

    >>> best_s(2.0, 0.25, 0.0, 0.1)
    0.5
    """
    _nonnegative(sigma2=sigma2, b=b)
    M, P, Q = inexact_limit(gamma, mu), gamma**2 * sigma2, b * (1 + gamma * mu) ** 2
    return Q * M / (Q + math.sqrt(Q**2 + Q * M * (P * M + P + Q))) if b > 0 else 0.0


def inexact_rate(gamma: float, mu: float, s: float) -> float:
    """Return (1 + s) / (1 + gamma mu)^2, which is below 1.

    Thesis: lemma on inexact SPPM-AS, Sec. D.6.9.  Differs: P5.

    Args:
        gamma: stepsize.
        mu: mu_AS.
        s: 0 < s < `inexact_limit`.

    Returns:
        The rate.
    """
    return (1 + _checked_s(s, gamma, mu, 0.0, 0.0)) * rate(gamma, mu)


def inexact_one_step(
    distance2: float, gamma: float, mu: float, sigma2: float, b: float, s: float | None = None
) -> float:
    """Return the bound on the squared distance after one step whose squared prox error is at most b.

        (1 + 1/s) b + (1 + s) one_step

    Thesis: Sec. D.6.9.  Holds if: any s > 0; only to unroll it s has to be below `inexact_limit` (P5).

    Args:
        distance2: |x_t - x*|^2.
        gamma: stepsize.
        mu: mu_AS.
        sigma2: sigma^2_AS.
        b: bound on the squared prox error.
        s: positive; None means `best_s`.

    Returns:
        The bound.
    """
    _nonnegative(sigma2=sigma2, b=b)
    s = best_s(gamma, mu, sigma2, b) if s is None else s
    if not (s > 0 or s == b == 0):
        raise ValueError(f"s={s}; allowed: positive")
    return (b + b / s if b > 0 else 0.0) + (1 + s) * one_step(distance2, gamma, mu, sigma2)


def inexact_neighbourhood(gamma: float, mu: float, sigma2: float, b: float, s: float | None = None) -> float:
    """Return the limit of the bound on E |x_t - x*|^2 when every prox has squared error at most b.

        (1 + s) (gamma^2 sigma^2 + b (1 + gamma mu)^2 / s) / (gamma^2 mu^2 + 2 gamma mu - s)

    Thesis: lemma on inexact SPPM-AS, Sec. D.6.9.  Differs: P5 (false for larger s).

    Args:
        gamma: stepsize.
        mu: mu_AS.
        sigma2: sigma^2_AS.
        b: bound on the squared prox error.
        s: 0 < s < `inexact_limit`; None means `best_s`.

    Returns:
        The limit.

    >>> round(inexact_neighbourhood(1.0, 0.5, 2.0, 0.01, s=0.5), 6)
    4.09
    """
    s = _checked_s(s, gamma, mu, sigma2, b)
    inexact = b * (1 + gamma * mu) ** 2 / s if b > 0 else 0.0
    return (1 + s) * (gamma**2 * sigma2 + inexact) / (inexact_limit(gamma, mu) - s)


def inexact_bound(
    t: int, distance2: float, gamma: float, mu: float, sigma2: float, b: float, s: float | None = None
) -> float:
    """Return the bound on the squared distance after t steps when every prox has squared error at most b.

        E |x_t - x*|^2 <= inexact_rate^t |x_0 - x*|^2 + inexact_neighbourhood

    Args:
        t: number of steps.
        distance2: |x_0 - x*|^2.
        gamma: stepsize.
        mu: mu_AS.
        sigma2: sigma^2_AS.
        b: bound on the squared prox error.
        s: 0 < s < `inexact_limit`; None means `best_s`.

    Returns:
        The bound.
    """
    s = _checked_s(s, gamma, mu, sigma2, b)
    return ((1 + s) * rate(gamma, mu)) ** t * distance2 + inexact_neighbourhood(gamma, mu, sigma2, b, s)


def fedprox(gamma: float, mu: Vector, gradients: Rows, shares: Vector) -> tuple[float, float]:
    """Return (A_S, B_S) of FedProx-SPPM-AS, x+ = mean_{i in S} prox_{gamma f_i}(x).

        E |x+ - x*|^2 <= A_S |x - x*|^2 + B_S
        A_S = sum_i r_i / (1 + gamma mu_i)        B_S = sum_i r_i gamma |a_i|^2 / ((1 + gamma mu_i) mu_i)

    Thesis: Thm D.2.1.  Holds if: K = 1; for K > 1 nothing is claimed (P2).

    Args:
        gamma: stepsize.
        mu: strong convexity constants mu_i of the clients, [n].
        gradients: a_i, the gradients of the clients at x*, [n, d].
        shares: r_i = E [1(i in S)/|S|], [n]; see `Sampling.shares`.

    Returns:
        A_S and B_S.

    >>> fedprox(1.0, np.array([1.0, 4.0]), np.array([[2.0], [-2.0]]), np.array([0.5, 0.5]))
    (0.35, 1.1)
    """
    _positive(gamma=gamma, mu=float(np.min(mu)))
    kept = shares / (1 + gamma * mu)
    return float(np.sum(kept)), float(np.sum(kept * gamma / mu * np.sum(gradients**2, axis=1)))


def fedprox_bound(t: int, distance2: float, A: float, B: float) -> float:
    """Return A^t |x_0 - x*|^2 + B / (1 - A), the bound of FedProx-SPPM-AS after t steps.

    Thesis: Thm D.2.1.

    Args:
        t: number of steps.
        distance2: |x_0 - x*|^2.
        A: A_S of `fedprox`.
        B: B_S of `fedprox`.

    Returns:
        The bound.
    """
    return A**t * distance2 + B / (1 - A)


def two_anchor(alpha: Any, gamma: Any, x_t: Any, x_k: Any) -> tuple[Any, Any]:
    """Return the stepsize and centre of one prox that equals a prox with two anchors.

        prox_{stepsize f}(centre) = prox_{alpha f~}(x_k),   f~ = f + |. - x_t|^2 / (2 gamma)
        stepsize = alpha gamma / (alpha + gamma)        centre = (alpha x_t + gamma x_k) / (alpha + gamma)

    Thesis: Sec. D.2.4.  Differs: P2 (both anchors stay; the thesis drops x_t).

    Args:
        alpha: positive stepsize of the inner prox.
        gamma: positive stepsize of the outer prox.
        x_t: anchor of the outer prox, a NumPy or JAX array.
        x_k: anchor of the inner prox, a NumPy or JAX array.

    Returns:
        The stepsize and the centre.

    >>> two_anchor(1.0, 3.0, np.array([4.0]), np.array([0.0]))
    (0.75, array([1.]))
    """
    share = alpha / (alpha + gamma)
    return share * gamma, x_k + share * (x_t - x_k)


def cost(c1: Number, c2: Number, K: int, T: int) -> float:
    """Return the communication cost (c1 K + c2) T of T global rounds with K local rounds each.

    Thesis: Sec. 5.4.5.  Differs: P11.

    Args:
        c1: cost of a local round.
        c2: cost of a global round; 0 (with c1 = 1) for a flat topology.
        K: number of local rounds in a global round.
        T: number of global rounds.

    Returns:
        The cost.

    >>> cost(1, 0, K=10, T=1), cost(0.1, 1, K=10, T=1)
    (10.0, 2.0)
    """
    _check_rounds(c1, c2, K=K, T=T)
    return float((c1 * K + c2) * T)


def localgd_cost(c1: Number, c2: Number, T: int) -> float:
    """Return LocalGD's communication cost (c1 + c2) T: it aggregates once per global round.

    The number of local steps does not matter.
    Thesis: Sec. 5.4.5.

    Args:
        c1: cost of a local round.
        c2: cost of a global round.
        T: number of global rounds.

    Returns:
        The cost.

    >>> round(1 - cost(1, 0, K=10, T=1) / localgd_cost(1, 0, T=39), 4)
    0.7436
    """
    return cost(c1, c2, K=1, T=T)


def _check_rounds(c1: Number, c2: Number, **rounds: int) -> None:
    _nonnegative(c1=c1, c2=c2)
    for name, value in rounds.items():
        if value < 1:
            raise ValueError(f"{name}={value}; allowed: at least 1")


def nice_variance(n: int, tau: int, mean_square: float) -> float:
    """Return E |mean of tau of n vectors|^2 for vectors that add up to 0, with all sets of size tau equally likely.

        (n/tau - 1)/(n - 1) mean_i |a_i|^2

    Thesis: Lemma D.6.11.  Differs: P9 (1 <= tau <= n).

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
    large by a factor of at least b; `sampling.stratified(clusters).variance` is exact (P6).
    Thesis: lemma on the variance of stratified sampling, Sec. 5.3.3.

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
    """Return sigma^2_SS = (mean_i |a_i|^2 - sigma^2_BS) / b for b clusters of equal size and probability (P10).

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

    Hence SS <= NICE(b) always, and SS <= NICE(b) <= BS if m <= b, which settles the thesis's open question (Sec.
    D.6.8).  For m > b, block sampling can be better.  Differs: P10.

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
