"""Rates and constants of Scafflix and i-Scaffnew, in plain numbers.

Throughout, client i has f_i mu_i-strongly convex and L_i-smooth, stochastic gradients with expected smoothness (A_i, C_i)
(A_i = L_i and C_i = 0 where they are exact), stepsize gamma_i and personalization weight alpha_i.
"""

import numpy as np
from jaxtyping import Float

Vector = Float[np.ndarray, "n"]


def server_stepsize(gamma: Vector, alpha: Vector) -> float:
    """gamma = (mean_i alpha_i^2 / gamma_i)^{-1}; infinite if every alpha_i is 0.  Thesis: L1268.

    >>> server_stepsize(np.array([0.5, 0.25]), np.array([1.0, 1.0]))
    0.3333333333333333
    """
    mean = float(np.mean(alpha**2 / gamma))
    return 1 / mean if mean > 0 else float("inf")


def aggregation_weights(gamma: Vector, alpha: Vector) -> Vector:
    """(gamma / n) alpha_i^2 / gamma_i, which add up to 1.  Thesis: L1279; Differs: S3 (the index is j)."""
    return server_stepsize(gamma, alpha) / len(gamma) * alpha**2 / gamma


def best_probability(gamma: Vector, mu: Vector) -> float:
    """p = sqrt(min_i gamma_i mu_i): the smallest that does not slow the rate.  Thesis: Cor. 2 (L1395), S7."""
    return float(np.sqrt(np.min(gamma * mu)))


def rate(gamma: Vector, mu: Vector, p: float) -> float:
    """zeta = min(min_i gamma_i mu_i, p^2): E Psi shrinks by 1 - zeta an iteration.  Thesis: Thm (L1343).

    >>> rate(np.array([0.5, 1.0]), np.array([0.5, 0.1]), 0.2)
    0.04000000000000001
    """
    return float(min(np.min(gamma * mu), p**2))


def lyapunov(away: Vector, drift: Vector, gamma: Vector, p: float) -> float:
    """Psi = mean_i (gamma_min/gamma_i) |xtilde_i - xtilde_i*|^2 + (gamma_min/p^2) mean_i gamma_i |h_i - grad f_i(xtilde_i*)|^2,

    from the squared norms `away` and `drift`.  Thesis: L1347.
    """
    least = gamma.min()
    return float(np.mean(least / gamma * away) + least / p**2 * np.mean(gamma * drift))


def neighbourhood(gamma: Vector, mu: Vector, p: float, C: Vector) -> float:
    """(gamma_min / zeta) mean_i gamma_i C_i: what stochastic gradients leave.  Thesis: L1350."""
    return float(gamma.min() / rate(gamma, mu, p) * np.mean(gamma * C))


def stepsizes_for(epsilon: float, A: Vector, mu: Vector, C: Vector) -> Vector:
    """gamma_i = min(1/A_i, epsilon mu_min / (2 C_i)): the neighbourhood is epsilon/2 at most.  Thesis: Cor. 2 (L1395).

    >>> stepsizes_for(0.1, np.array([2.0, 8.0]), np.array([0.5, 1.0]), np.array([0.0, 3.0])).round(6).tolist()
    [0.5, 0.008333]
    """
    if not epsilon > 0:
        raise ValueError(f"epsilon={epsilon}; allowed: positive")
    bound = np.full_like(A, np.inf)
    np.divide(epsilon * mu.min(), 2 * C, out=bound, where=C > 0)
    return np.minimum(1 / A, bound)


def iterations_to(epsilon: float, psi: float, zeta: float) -> float:
    """log(Psi^0 / epsilon) / zeta iterations give E Psi <= epsilon (C_i = 0); p times as many communications."""
    return float(np.log(psi / epsilon) / zeta)


def expected_smoothness(L: float, gradients: Float[np.ndarray, "m d"]) -> tuple[float, float]:
    """(A_i, C_i) of one row drawn uniformly: A = 2 L, C = 2 mean_j |g_j|^2 - 2 |mean_j g_j|^2 with the rows' gradients g_j at xtilde_i*.

    L is the largest smoothness constant of a row.  Thesis: L1335.  Holds if: every row's loss is convex (S5).
    """
    center = gradients.mean(axis=0)
    return 2 * L, float(2 * np.mean(np.sum((gradients - center) ** 2, axis=1)))
