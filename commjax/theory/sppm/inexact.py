"""SPPM-AS with an inexact prox: bounds that hold if the squared error of every prox is at most b."""

import math

from commjax.theory.sppm.checks import nonnegative, positive
from commjax.theory.sppm.exact import one_step, rate


def inexact_limit(gamma: float, mu: float) -> float:
    """Return gamma^2 mu^2 + 2 gamma mu, an upper limit for the free parameter s of the inexact bounds.

    Differs (docs/errata.md): P5 (the thesis does not state this limit).

    Args:
        gamma: stepsize.
        mu: mu_AS, the strong convexity constant of the cohorts' objectives.

    Returns:
        The limit.
    """
    positive(gamma=gamma, mu=mu)
    return gamma * mu * (gamma * mu + 2)


def _checked_s(s: float | None, gamma: float, mu: float, sigma2: float, b: float) -> float:
    nonnegative(sigma2=sigma2, b=b)
    s = best_s(gamma, mu, sigma2, b) if s is None else s
    limit = inexact_limit(gamma, mu)
    if not (0 < s < limit or s == b == 0):
        raise ValueError(f"s={s}; allowed: 0 < s < gamma^2 mu^2 + 2 gamma mu = {limit} (else nothing contracts)")
    return s


def best_s(gamma: float, mu: float, sigma2: float, b: float) -> float:
    """Return the free parameter s for which `inexact_neighbourhood` is smallest.

        s = Q M / (Q + sqrt(Q^2 + Q M (P M + P + Q)))
        M = gamma^2 mu^2 + 2 gamma mu,   P = gamma^2 sigma^2,   Q = b (1 + gamma mu)^2

    s = 0 if b = 0, and s = gamma mu if sigma^2 = 0.

    Args:
        gamma: stepsize.
        mu: mu_AS, the strong convexity constant of the cohorts' objectives.
        sigma2: sigma^2_AS, the variance of the cohorts' gradients at x*.
        b: bound on the squared prox error.

    Returns:
        s.

    >>> best_s(2.0, 0.25, 0.0, 0.1)
    0.5
    """
    nonnegative(sigma2=sigma2, b=b)
    M, P, Q = inexact_limit(gamma, mu), gamma**2 * sigma2, b * (1 + gamma * mu) ** 2
    return Q * M / (Q + math.sqrt(Q**2 + Q * M * (P * M + P + Q))) if b > 0 else 0.0


def inexact_rate(gamma: float, mu: float, s: float) -> float:
    """Return (1 + s) / (1 + gamma mu)^2, the factor by which a step with an inexact prox shrinks the squared distance.

    Thesis: lemma on inexact SPPM-AS, Sec. D.6.9.  Differs (docs/errata.md): P5 (s must be below `inexact_limit`).

    Args:
        gamma: stepsize.
        mu: mu_AS, the strong convexity constant of the cohorts' objectives.
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

    Thesis: Sec. D.6.9.  Holds if: s > 0.  Only a bound over several steps needs s below `inexact_limit`.

    Args:
        distance2: |x_t - x*|^2.
        gamma: stepsize.
        mu: mu_AS, the strong convexity constant of the cohorts' objectives.
        sigma2: sigma^2_AS, the variance of the cohorts' gradients at x*.
        b: bound on the squared prox error.
        s: positive; None means `best_s`.

    Returns:
        The bound.
    """
    nonnegative(sigma2=sigma2, b=b)
    s = best_s(gamma, mu, sigma2, b) if s is None else s
    if not (s > 0 or s == b == 0):
        raise ValueError(f"s={s}; allowed: positive")
    return (b + b / s if b > 0 else 0.0) + (1 + s) * one_step(distance2, gamma, mu, sigma2)


def inexact_neighbourhood(gamma: float, mu: float, sigma2: float, b: float, s: float | None = None) -> float:
    """Return the limit of the bound on E |x_t - x*|^2 when every prox has squared error at most b.

        (1 + s) (gamma^2 sigma^2 + b (1 + gamma mu)^2 / s) / (gamma^2 mu^2 + 2 gamma mu - s)

    Thesis: lemma on inexact SPPM-AS, Sec. D.6.9.  Differs (docs/errata.md): P5 (false for larger s).

    Args:
        gamma: stepsize.
        mu: mu_AS, the strong convexity constant of the cohorts' objectives.
        sigma2: sigma^2_AS, the variance of the cohorts' gradients at x*.
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
    t: int, distance2: float, gamma: float, mu: float, sigma2: float, b: float, *, s: float | None = None
) -> float:
    """Return the bound on the squared distance after t steps when every prox has squared error at most b.

        E |x_t - x*|^2 <= inexact_rate^t |x_0 - x*|^2 + inexact_neighbourhood

    Args:
        t: number of steps.
        distance2: |x_0 - x*|^2, the squared distance at the start.
        gamma: stepsize.
        mu: mu_AS, the strong convexity constant of the cohorts' objectives.
        sigma2: sigma^2_AS, the variance of the cohorts' gradients at x*.
        b: bound on the squared prox error.
        s: 0 < s < `inexact_limit`; None means `best_s`.

    Returns:
        The bound.
    """
    s = _checked_s(s, gamma, mu, sigma2, b)
    return ((1 + s) * rate(gamma, mu)) ** t * distance2 + inexact_neighbourhood(gamma, mu, sigma2, b, s)
