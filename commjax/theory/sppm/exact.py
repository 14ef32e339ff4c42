"""SPPM-AS with an exact prox: rate, neighbourhood, number of steps, and the error of an inexact prox."""

import math
from typing import Any

from commjax.theory.sppm.checks import nonnegative, positive


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
        mu: mu_AS, the strong convexity constant of the cohorts' objectives.

    Returns:
        The factor.

    >>> rate(2.0, 0.5)
    0.25
    """
    positive(gamma=gamma, mu=mu)
    return 1 / (1 + gamma * mu) ** 2


def neighbourhood(gamma: float, mu: float, sigma2: float) -> float:
    """Return gamma sigma^2 / (gamma mu^2 + 2 mu), the limit of the bound on E |x_t - x*|^2.

    It is at most min(sigma^2/mu^2, gamma sigma^2/(2 mu)).
    Thesis: convergence theorem of SPPM-AS, Sec. 5.3.2.
    Differs (docs/errata.md): P14 (the factor 2 in the second bound).

    Args:
        gamma: stepsize.
        mu: mu_AS, the strong convexity constant of the cohorts' objectives.
        sigma2: sigma^2_AS, the variance of the cohorts' gradients at x*.

    Returns:
        The limit.

    >>> neighbourhood(1.0, 0.5, 2.0)
    1.6
    """
    positive(gamma=gamma, mu=mu)
    nonnegative(sigma2=sigma2)
    return sigma2 / (mu * (mu + 2 / gamma))


def one_step(distance2: float, gamma: float, mu: float, sigma2: float) -> float:
    """Return the bound on the squared distance after one step.

        E |x_{t+1} - x*|^2 <= (|x_t - x*|^2 + gamma^2 sigma^2) / (1 + gamma mu)^2

    Thesis: Sec. D.6.2.

    Args:
        distance2: |x_t - x*|^2.
        gamma: stepsize.
        mu: mu_AS, the strong convexity constant of the cohorts' objectives.
        sigma2: sigma^2_AS, the variance of the cohorts' gradients at x*.

    Returns:
        The bound.
    """
    nonnegative(sigma2=sigma2)
    return rate(gamma, mu) * (distance2 + gamma**2 * sigma2)


def bound(t: int, distance2: float, gamma: float, mu: float, sigma2: float) -> float:
    """Return the bound on the squared distance after t steps, for every gamma > 0.

        E |x_t - x*|^2 <= rate^t |x_0 - x*|^2 + neighbourhood

    Thesis: convergence theorem of SPPM-AS, Sec. 5.3.2.
    Holds if: f_i is differentiable and mu_i-strongly convex, the prox exact (else `inexact_bound`).

    Args:
        t: number of steps.
        distance2: |x_0 - x*|^2, the squared distance at the start.
        gamma: stepsize.
        mu: mu_AS, the strong convexity constant of the cohorts' objectives.
        sigma2: sigma^2_AS, the variance of the cohorts' gradients at x*.

    Returns:
        The bound.
    """
    return rate(gamma, mu) ** t * distance2 + neighbourhood(gamma, mu, sigma2)


def stepsize_for(epsilon: float, mu: float, sigma2: float) -> float:
    """Return gamma = epsilon mu / sigma^2, whose neighbourhood is at most epsilon/2; infinite if sigma^2 = 0.

    Thesis: Sec. 5.3.2, for epsilon <= sigma^2/mu^2.  It also holds for larger epsilon, where larger stepsizes would
    suffice.

    Args:
        epsilon: target accuracy, positive.
        mu: mu_AS, the strong convexity constant of the cohorts' objectives.
        sigma2: sigma^2_AS, the variance of the cohorts' gradients at x*.

    Returns:
        gamma.

    >>> stepsize_for(0.1, 0.5, 2.0)
    0.025
    """
    positive(epsilon=epsilon, mu=mu)
    nonnegative(sigma2=sigma2)
    return epsilon * mu / sigma2 if sigma2 > 0 else math.inf


def iterations(epsilon: float, mu: float, sigma2: float, distance2: float, gamma: float | None = None) -> float:
    """Return the number of steps after which E |x_t - x*|^2 <= epsilon.

    With the stepsize of `stepsize_for` (thesis: Sec. 5.3.2) this is

        (sigma^2/(2 epsilon mu^2) + 1/2) log(2 |x_0 - x*|^2 / epsilon)

    Args:
        epsilon: target accuracy, positive.
        mu: mu_AS, the strong convexity constant of the cohorts' objectives.
        sigma2: sigma^2_AS, the variance of the cohorts' gradients at x*.
        distance2: |x_0 - x*|^2, the squared distance at the start.
        gamma: another stepsize.  The result is then the t at which `bound` is epsilon, infinite if the neighbourhood is
            not smaller than epsilon.

    Returns:
        The number of steps, not rounded.

    >>> round(iterations(0.1, 0.5, 2.0, 10.0), 6), iterations(0.1, 0.5, 2.0, 10.0, gamma=1.0)
    (214.581853, inf)
    """
    positive(epsilon=epsilon, mu=mu, distance2=distance2)
    nonnegative(sigma2=sigma2)
    if gamma is None:
        return max(0.0, (sigma2 / (2 * epsilon * mu**2) + 0.5) * math.log(2 * distance2 / epsilon))
    room = epsilon - neighbourhood(gamma, mu, sigma2)
    return max(0.0, math.log(distance2 / room) / (2 * math.log1p(gamma * mu))) if room > 0 else math.inf


def squared_prox_error(residual: Any, gamma: float, mu: float) -> Any:
    """Bound the squared error of an inexact prox by its residual |grad F(x)|, F = f + |. - y|^2/(2 gamma).

        |x - prox_{gamma f}(y)|^2 <= (|grad F(x)| / (mu + 1/gamma))^2

    Holds if: f is mu-strongly convex (mu = 0 is allowed).  For the objective of a given cohort, its own constant is at
    least mu_AS and gives a sharper bound.

    Args:
        residual: |grad F(x)|, a number or an array.
        gamma: stepsize of the prox.
        mu: strong convexity constant of f.

    Returns:
        The bound.

    >>> squared_prox_error(3.0, gamma=1.0, mu=0.5)
    4.0
    """
    positive(gamma=gamma)
    nonnegative(mu=mu)
    return (residual / (mu + 1 / gamma)) ** 2
