"""Rates and constants of Scafflix and i-Scaffnew, in plain numbers.

The loss f_i of client i is mu_i-strongly convex and L_i-smooth.  Client i has stochastic gradients with expected
smoothness (A_i, C_i) (A_i = L_i and C_i = 0 for exact gradients), stepsize gamma_i, personalization weight alpha_i,
local model xtilde_i and control variate h_i.  xtilde_i* is the local model at the optimum.  All vectors have one entry
per client.
"""

import numpy as np
from jaxtyping import Float

Vector = Float[np.ndarray, "n"]


def server_stepsize(gamma: Vector, alpha: Vector) -> float:
    """Return the server's stepsize gamma = (mean_i alpha_i^2 / gamma_i)^{-1}; infinite if every alpha_i is 0.

    Thesis: Alg. 4.

    Args:
        gamma: stepsizes gamma_i.
        alpha: personalization weights alpha_i.

    Returns:
        The server's stepsize.

    >>> server_stepsize(np.array([0.5, 0.25]), np.array([1.0, 1.0]))
    0.3333333333333333
    """
    mean = float(np.mean(alpha**2 / gamma))
    return 1 / mean if mean > 0 else float("inf")


def aggregation_weights(gamma: Vector, alpha: Vector) -> Vector:
    """Return the weights with which the server averages: alpha_i^2 / gamma_i, divided by their sum over the clients.

    Thesis: Alg. 4.  Differs (docs/errata.md): S3 (the index of the weights).

    Args:
        gamma: stepsizes gamma_i.
        alpha: personalization weights alpha_i.

    Returns:
        The weights.
    """
    return server_stepsize(gamma, alpha) / len(gamma) * alpha**2 / gamma


def best_probability(gamma: Vector, mu: Vector) -> float:
    """Return p = sqrt(min_i gamma_i mu_i), the smallest probability of communication that does not slow the rate.

    Thesis: Cor. 3.2.5.  Differs (docs/errata.md): S7 (a smaller p makes the iterations slower).

    Args:
        gamma: stepsizes gamma_i.
        mu: strong convexity constants mu_i.

    Returns:
        p.
    """
    return float(np.sqrt(np.min(gamma * mu)))


def rate(gamma: Vector, mu: Vector, p: float) -> float:
    """Return zeta = min(min_i gamma_i mu_i, p^2): the Lyapunov function E Psi shrinks by 1 - zeta per iteration.

    Thesis: Thm 3.2.3.

    Args:
        gamma: stepsizes gamma_i.
        mu: strong convexity constants mu_i.
        p: probability of communication.

    Returns:
        zeta.

    >>> rate(np.array([0.5, 1.0]), np.array([0.5, 0.1]), 0.2)
    0.04000000000000001
    """
    return float(min(np.min(gamma * mu), p**2))


def lyapunov(away: Vector, drift: Vector, gamma: Vector, p: float) -> float:
    """Return Psi, the Lyapunov function that contracts in each iteration of Scafflix.

        Psi = mean_i (gamma_min/gamma_i) |xtilde_i - xtilde_i*|^2
              + (gamma_min/p^2) mean_i gamma_i |h_i - grad f_i(xtilde_i*)|^2

    xtilde_i is the local model of client i, xtilde_i* its value at the optimum, h_i the control variate, and gamma_min
    the smallest gamma_i.

    Thesis: Thm 3.2.3.

    Args:
        away: |xtilde_i - xtilde_i*|^2 of each client.
        drift: |h_i - grad f_i(xtilde_i*)|^2 of each client.
        gamma: stepsizes gamma_i.
        p: probability of communication.

    Returns:
        Psi.
    """
    least = gamma.min()
    return float(np.mean(least / gamma * away) + least / p**2 * np.mean(gamma * drift))


def neighbourhood(gamma: Vector, mu: Vector, p: float, C: Vector) -> float:
    """Return (gamma_min / zeta) mean_i gamma_i C_i, a bound on the limit of E Psi with stochastic gradients.

    gamma_min is the smallest gamma_i, zeta the `rate`, and Psi the Lyapunov function (`lyapunov`).

    Thesis: Thm 3.2.3.

    Args:
        gamma: stepsizes gamma_i.
        mu: strong convexity constants mu_i.
        p: probability of communication.
        C: variance constants C_i of the stochastic gradients.

    Returns:
        The bound.
    """
    return float(gamma.min() / rate(gamma, mu, p) * np.mean(gamma * C))


def stepsizes_for(epsilon: float, A: Vector, mu: Vector, C: Vector) -> Vector:
    """Return stepsizes for which the neighbourhood is at most epsilon/2.

        gamma_i = min(1/A_i, epsilon mu_min / (2 C_i))

    Thesis: Cor. 3.2.5.

    Args:
        epsilon: target accuracy, positive.
        A: expected smoothness constants A_i of the stochastic gradients.
        mu: strong convexity constants mu_i.
        C: variance constants C_i of the stochastic gradients.

    Returns:
        gamma_i.

    >>> stepsizes_for(0.1, np.array([2.0, 8.0]), np.array([0.5, 1.0]), np.array([0.0, 3.0])).round(6).tolist()
    [0.5, 0.008333]
    """
    if not epsilon > 0:
        raise ValueError(f"epsilon={epsilon}; allowed: positive")
    bound = np.full_like(A, np.inf)
    np.divide(epsilon * mu.min(), 2 * C, out=bound, where=C > 0)
    return np.minimum(1 / A, bound)


def iterations_to(epsilon: float, psi: float, zeta: float) -> float:
    """Return log(Psi^0 / epsilon) / zeta: after this many iterations E Psi <= epsilon, if C_i = 0.

    The expected number of communications is p times as large.

    Args:
        epsilon: target accuracy.
        psi: Psi^0, the Lyapunov function at the start.
        zeta: the rate, as `rate` returns it.

    Returns:
        The number of iterations, not rounded.
    """
    return float(np.log(psi / epsilon) / zeta)


def expected_smoothness(L: float, gradients: Float[np.ndarray, "m d"]) -> tuple[float, float]:
    """Return (A_i, C_i) of a stochastic gradient of one uniformly drawn row.

        A = 2 L        C = 2 mean_j |g_j|^2 - 2 |mean_j g_j|^2

    Thesis: Sec. 3.2.  Holds if: every row's loss is convex (erratum S5 in docs/errata.md).

    Args:
        L: the largest smoothness constant of a row.
        gradients: g_j, the gradients of the m rows at xtilde_i*, [m, d].

    Returns:
        A and C.
    """
    center = gradients.mean(axis=0)
    return 2 * L, float(2 * np.mean(np.sum((gradients - center) ** 2, axis=1)))
