"""The constants of a problem that the theory needs, computed on the host in float64."""

from typing import NamedTuple

import numpy as np
from jaxtyping import Float
from numpy.typing import ArrayLike


class Smoothness(NamedTuple):
    """The smoothness constants of f = (1/n) sum_i f_i. The function `smoothness` computes them from L_1, ..., L_n.

    Thesis: Sec. 1.5.1, Sec. 2.5 (L_tilde).
    Differs (docs/errata.md): E1 (L_tilde has the 1/n that Sec. A.3.1 drops).

    Attributes:
        L: The smoothness constant of f.
        L_tilde: sqrt((1/n) sum_i L_i^2).
        L_max: max_i L_i.
        mu: The constant of strong convexity of f, hence also of the PL inequality; 0 if there is none.
        L_i: The smoothness constant of each f_i.

    >>> smoothness(np.array([1.0, 7.0]))
    Smoothness(L=5.0, L_tilde=5.0, L_max=7.0, mu=0.0, L_i=array([1., 7.]))
    """

    L: float
    L_tilde: float
    L_max: float
    mu: float
    L_i: Float[np.ndarray, "n"]


def smoothness(L_i: ArrayLike, L: float | None = None, mu: float = 0.0) -> Smoothness:
    """Make a Smoothness from the constants of the clients.

    Holds if: f is L-smooth with L <= mean L_i <= L_tilde, which is checked up to rounding.

    Args:
        L_i: The smoothness constant of each client, positive.
        L: The smoothness constant of f. The default is the bound L_tilde.
        mu: The constant of strong convexity of f.

    Returns:
        The constants.

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
    """The minimiser of f and the precision that the solver reached.

    Attributes:
        params: The minimiser.
        value: The minimum of f.
        gradient_norm: The norm of the gradient of f at `params`.

    >>> Optimum(np.zeros(2), 0.0, 0.0).value
    0.0
    """

    params: Float[np.ndarray, "d"]
    value: float
    gradient_norm: float
