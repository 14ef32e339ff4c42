"""Proximal operators (`regularizers`) and inner solvers for the prox of a cohort (`solvers`).

For networks, use the solvers of `adaptive` and `federated`; `quasi_newton` has BFGS and conjugate gradients.
"""

from commjax.prox import solvers
from commjax.prox.regularizers import Regularizer, box, elastic_net, l1, l2_squared, nonnegative, zero
from commjax.prox.solvers import adaptive, federated, quasi_newton

__all__ = [
    "Regularizer",
    "adaptive",
    "box",
    "elastic_net",
    "federated",
    "l1",
    "l2_squared",
    "nonnegative",
    "quasi_newton",
    "solvers",
    "zero",
]
