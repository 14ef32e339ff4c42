"""Proximal operators (`regularizers`); inner solvers for the prox of a cohort (`solvers`, and for networks `federated`)."""

from commjax.prox import federated, solvers
from commjax.prox.regularizers import Regularizer, box, elastic_net, l1, l2_squared, nonnegative, zero

__all__ = ["Regularizer", "box", "elastic_net", "federated", "l1", "l2_squared", "nonnegative", "solvers", "zero"]
