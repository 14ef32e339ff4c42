"""What theory needs to know about a problem, computed on the host in float64."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike


class Smoothness(NamedTuple):
    """Constants of f = (1/n) sum_i f_i, as `smoothness(L_i)` makes them from the clients'.

    Thesis: L647, L1119 (L_tilde).
    Differs: E1 (L_tilde has the 1/n that L2991 drops).

    >>> smoothness(np.array([1.0, 7.0]))
    Smoothness(L=5.0, L_tilde=5.0, L_max=7.0, mu=0.0, L_i=array([1., 7.]))
    """

    L: float  # of f
    L_tilde: float  # sqrt(mean L_i^2)
    L_max: float
    mu: float  # of strong convexity, hence also of the PL inequality; 0 where there is none
    L_i: Float[np.ndarray, "n"]  # of f_i


def smoothness(L_i: ArrayLike, L: float | None = None, mu: float = 0.0) -> Smoothness:
    """Smoothness from the clients' constants; without ``L``, the bound L_tilde stands for it.

    Holds if: f is L-smooth with L <= mean L_i <= L_tilde, which is checked up to rounding.

    >>> smoothness([1.0, 7.0], L=2.0, mu=0.5)[:4]
    (2.0, 5.0, 7.0, 0.5)
    """
    L_i = np.asarray(L_i, np.float64)
    if L_i.ndim != 1 or L_i.size == 0 or not (np.isfinite(L_i).all() and (L_i > 0).all()):
        raise ValueError(f"L_i={L_i}; allowed: one finite positive number for each client")
    L_tilde = float(np.sqrt(np.mean(L_i**2)))
    L = L_tilde if L is None else float(L)
    if not 0 < L <= L_tilde * (1 + 1e-9):
        raise ValueError(f"L={L}; allowed: 0 < L <= L_tilde={L_tilde}")
    if not 0 <= mu <= L * (1 + 1e-9):
        raise ValueError(f"mu={mu}; allowed: 0 <= mu <= L={L}")
    return Smoothness(L, L_tilde, float(L_i.max()), float(mu), L_i)


class Optimum(NamedTuple):
    """The minimiser of f, min f, and the gradient norm that was reached.

    >>> Optimum(np.zeros(2), 0.0, 0.0).value
    0.0
    """

    params: Float[np.ndarray, "d"]
    value: float
    gradient_norm: float
