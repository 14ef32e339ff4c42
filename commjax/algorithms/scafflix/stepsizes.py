"""Scafflix and Scaffnew: the hyperparameters of the theorems."""

import warnings

import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Float

from commjax.algorithms.flix import checked_alpha
from commjax.algorithms.scafflix.method import HParams
from commjax.core import checks
from commjax.theory import scafflix as theory


def theoretical(
    A: Float[np.ndarray, "n"],
    mu: ArrayLike,
    alpha: ArrayLike = 1.0,
    *,
    C: Float[np.ndarray, "n"] | None = None,
    epsilon: float | None = None,
    gamma: ArrayLike | None = None,
    p: float | None = None,
    strict: bool = False,
) -> HParams:
    """Hyperparameters of Scafflix from theory: gamma_i = 1/A_i and p = sqrt(min_i gamma_i mu_i).

    With exact gradients A_i = L_i.  With stochastic gradients and a target accuracy, gamma_i is that of Cor. 3.2.5.

    Args:
        A: smoothness constants A_i, [n].
        mu: strong convexity constants mu_i, one number or [n]; 0 < mu_i <= A_i.
        alpha: weight of the global model, one number or one per client.
        C: variance constants C_i of stochastic gradients, [n] (`theory.expected_smoothness`).  Needs `epsilon`.
        epsilon: target accuracy with stochastic gradients.  Needs `C`.
        gamma: replaces the theorem's stepsizes.  The theorem does not cover values above 1/A_i: they cause a warning.
        p: replaces the theorem's p.
        strict: whether gamma_i > 1/A_i is a ValueError instead of a warning.

    Returns:
        The hyperparameters.

    Thesis: Cor. 3.2.4, Cor. 3.2.5.  Differs (docs/errata.md): S6 (A_i is that of f_i, without alpha_i^2).

    >>> theoretical(np.array([2.0, 8.0, 1.0]), np.array([0.5, 1.0, 0.1])).gamma.tolist()
    [0.5, 0.125, 1.0]
    """
    A_i = np.asarray(A, np.float64)
    mu = np.broadcast_to(np.asarray(mu, np.float64), A_i.shape)
    if not np.all((A_i > 0) & (mu > 0) & (mu <= A_i * (1 + 1e-9))):
        raise ValueError(f"A={A_i}, mu={mu}; allowed: 0 < mu_i <= A_i")
    if (C is None) != (epsilon is None):
        raise ValueError(f"C={C}, epsilon={epsilon}; allowed: both (stochastic gradients) or neither (exact ones)")
    if gamma is None:
        gamma = 1 / A_i if C is None or epsilon is None else theory.stepsizes_for(epsilon, A_i, mu, C)
    gamma = np.broadcast_to(np.asarray(gamma, np.float64), A_i.shape)
    if np.any(gamma > (1 + 1e-9) / A_i):
        i = int(np.argmax(gamma * A_i))
        message = f"gamma_{i} = {gamma[i]:.4g} is above 1/A_{i} = {1 / A_i[i]:.4g}, which the theorem does not cover"
        if strict:
            raise ValueError(message)
        warnings.warn(message, stacklevel=2)
    checks.positive("gamma", gamma)
    p = min(1.0, theory.best_probability(gamma, mu)) if p is None else p
    checks.probability("p", p)
    return HParams(gamma, checked_alpha(alpha), float(p))


def scaffnew_hparams(A: Float[np.ndarray, "n"], mu: ArrayLike, p: float | None = None) -> HParams:
    """Hyperparameters of Scaffnew (Mishchenko et al., 2022) for `i_scaffnew`: one stepsize 1/max_i A_i, and alpha = 1.

    Args:
        A: smoothness constants A_i, [n].
        mu: strong convexity constants, one number or [n].
        p: probability of a communication; None is that of `theoretical`.

    Returns:
        The hyperparameters.
    """
    return theoretical(A, mu, gamma=1 / np.asarray(A, np.float64).max(), p=p)
