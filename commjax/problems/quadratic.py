"""Quadratic clients, for which every constant and the optimum are known exactly."""

from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from commjax.problems.constants import Optimum, Smoothness, smoothness


class Quadratic(NamedTuple):
    """The functions f_i(x) = 1/2 (x - c_i)^T H_i (x - c_i) of n clients.

    Attributes:
        H: The matrices H_i, symmetric.
        c: The centres c_i.

    >>> Quadratic(H=np.ones((3, 1, 1)), c=np.zeros((3, 1))).c.shape
    (3, 1)
    """

    H: Float[Any, "n d d"]
    c: Float[Any, "n d"]


def loss(params: Float[Array, "d"], data: Quadratic) -> Float[Array, ""]:
    """Compute f_i(x) = 1/2 (x - c_i)^T H_i (x - c_i) of one client.

    Args:
        params: The point x.
        data: One client's row of a Quadratic: H_i [d, d] and c_i [d].

    Returns:
        f_i(x).

    >>> print(loss(jnp.ones(2), Quadratic(2 * jnp.eye(2), jnp.zeros(2))))
    2.0
    """
    away = params - data.c
    return 0.5 * jnp.dot(away, data.H @ away)


def random(seed: int, n: int, d: int, *, mu: float, L: float, heterogeneity: float = 1.0) -> Quadratic:
    """Draw random quadratic clients.

        H_i = Q_i diag(eigenvalues uniform in [mu, L]) Q_i^T,   c_i = c + heterogeneity * N(0, I)

    Q_i is a random orthogonal matrix, and c a random point.  Client 0 has both ends of the spectrum (if d = 1, only L),
    so that L_max = L up to rounding.

    Args:
        seed: The seed.
        n: The number of clients.
        d: The dimension.
        mu: The lower end of the spectrum, positive.
        L: The upper end of the spectrum.
        heterogeneity: The standard deviation of the centres c_i around the common point c.

    Returns:
        The clients.

    >>> problem = random(0, n=3, d=4, mu=0.5, L=2.0)
    >>> print(f"{constants(problem).L_max:.6f}")
    2.000000
    """
    if n < 1 or d < 1:
        raise ValueError(f"n={n}, d={d}; allowed: both at least 1")
    if not 0 < mu <= L < np.inf:
        raise ValueError(f"mu={mu}, L={L}; allowed: 0 < mu <= L < inf")
    if not 0 <= heterogeneity < np.inf:
        raise ValueError(f"heterogeneity={heterogeneity}; allowed: finite and >= 0")
    rng = np.random.default_rng(seed)
    spectra = rng.uniform(mu, L, size=(n, d))
    spectra[0, 0], spectra[0, -1] = mu, L
    bases, _ = np.linalg.qr(rng.standard_normal((n, d, d)))
    H = (bases * spectra[:, None, :]) @ bases.transpose(0, 2, 1)
    H = (H + H.transpose(0, 2, 1)) / 2  # makes H exactly symmetric, in spite of rounding
    c = rng.standard_normal(d) + heterogeneity * rng.standard_normal((n, d))
    return Quadratic(H, c)


def constants(problem: Quadratic) -> Smoothness:
    """Compute the exact constants: L_i = lambda_max(H_i); L and mu are the extreme eigenvalues of mean_i H_i.

    Holds if: every H_i is symmetric and positive semidefinite, and not zero.

    Args:
        problem: The clients.

    Returns:
        The constants.

    >>> constants(Quadratic(np.array([[[1.0, 0.0], [0.0, 3.0]], [[3.0, 0.0], [0.0, 1.0]]]), np.zeros((2, 2))))
    Smoothness(L=2.0, L_tilde=3.0, L_max=3.0, mu=2.0, L_i=array([3., 3.]))
    """
    H = np.asarray(problem.H, np.float64)
    if not (np.isfinite(H).all() and np.isfinite(problem.c).all()):
        raise ValueError("H or c is not finite; allowed: finite numbers")
    if np.abs(H - H.transpose(0, 2, 1)).max() > 1e-6 * np.abs(H).max():
        raise ValueError("H is not symmetric; allowed: symmetric positive semidefinite H_i")
    spectra = np.linalg.eigvalsh(H)
    if (low := spectra[:, 0].min()) < -1e-6 * spectra.max():
        raise ValueError(f"an H_i has the eigenvalue {low}; allowed: symmetric positive semidefinite H_i")
    of_mean = np.linalg.eigvalsh(H.mean(axis=0))
    return smoothness(spectra[:, -1], of_mean[-1], max(float(of_mean[0]), 0.0))


def optimum(problem: Quadratic) -> Optimum:
    """Minimise f = (1/n) sum_i f_i by the normal equations (mean_i H_i) x = mean_i H_i c_i.

    Holds if: f is strongly convex. Raises a ValueError otherwise.

    Args:
        problem: The clients.

    Returns:
        The optimum.

    >>> optimum(Quadratic(np.array([[[1.0]], [[3.0]]]), np.array([[0.0], [4.0]])))
    Optimum(params=array([3.]), value=3.0, gradient_norm=0.0)
    """
    known = constants(problem)
    if known.mu <= 1e-14 * known.L:
        raise ValueError(f"mu={known.mu}: the mean of the H_i is singular; allowed: positive definite")
    H, c = np.asarray(problem.H, np.float64), np.asarray(problem.c, np.float64)
    params = np.linalg.solve(H.mean(axis=0), np.einsum("nij,nj->i", H, c) / len(H))
    away = params - c
    gradients = np.einsum("nij,nj->ni", H, away)
    value = np.sum(away * gradients) / (2 * len(H))
    return Optimum(params, float(value), float(np.linalg.norm(gradients.mean(axis=0))))
