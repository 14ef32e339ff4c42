"""Averaged proxes (FedProx-SPPM-AS) and proxes with two anchors."""

from typing import Any

import numpy as np
from jaxtyping import Float

from commjax.theory.sppm.checks import positive

Vector = Float[np.ndarray, "n"]
Rows = Float[np.ndarray, "n d"]


def fedprox(gamma: float, mu: Vector, gradients: Rows, shares: Vector) -> tuple[float, float]:
    """Return the constants (A_S, B_S) of one step of FedProx-SPPM-AS, x+ = mean_{i in S} prox_{gamma f_i}(x).

        E |x+ - x*|^2 <= A_S |x - x*|^2 + B_S
        A_S = sum_i r_i / (1 + gamma mu_i)        B_S = sum_i r_i gamma |a_i|^2 / ((1 + gamma mu_i) mu_i)

    Thesis: Thm D.2.1.  Holds if: there is one local round, K = 1 (erratum P2 in docs/errata.md).

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
    positive(gamma=gamma, mu=float(np.min(mu)))
    kept = shares / (1 + gamma * mu)
    return float(np.sum(kept)), float(np.sum(kept * gamma / mu * np.sum(gradients**2, axis=1)))


def fedprox_bound(t: int, distance2: float, A: float, B: float) -> float:
    """Return A^t |x_0 - x*|^2 + B / (1 - A), the bound of FedProx-SPPM-AS after t steps.

    Thesis: Thm D.2.1.

    Args:
        t: number of steps.
        distance2: |x_0 - x*|^2, the squared distance at the start.
        A: A_S of `fedprox`.
        B: B_S of `fedprox`.

    Returns:
        The bound.
    """
    return A**t * distance2 + B / (1 - A)


def two_anchor(alpha: Any, gamma: Any, x_t: Any, x_k: Any) -> tuple[Any, Any]:
    """Return the stepsize and the centre of the single prox that equals a prox with two anchors.

        prox_{stepsize f}(centre) = prox_{alpha f~}(x_k),   f~ = f + |. - x_t|^2 / (2 gamma)
        stepsize = alpha gamma / (alpha + gamma)        centre = (alpha x_t + gamma x_k) / (alpha + gamma)

    Thesis: Sec. D.2.4.  Differs (docs/errata.md): P2 (both anchors stay; the thesis drops x_t).

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
