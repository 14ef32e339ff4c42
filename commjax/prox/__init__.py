"""Proximal operators (`regularizers`); inner solvers for the prox of a cohort (`solvers`, `quasi_newton`, for networks `adaptive` and
`federated`)."""

from commjax.prox import solvers
from commjax.prox.regularizers import Regularizer, box, elastic_net, l1, l2_squared, nonnegative, zero
from commjax.prox.solvers import adaptive, federated, quasi_newton

__all__ = [
    "Regularizer", "adaptive", "box", "elastic_net", "federated", "l1", "l2_squared", "nonnegative", "quasi_newton", "solvers", "zero",
]  # fmt: skip
