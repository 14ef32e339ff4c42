"""Proximal operators (`regularizers`); inner solvers for the prox of a cohort come with SPPM-AS."""

from commjax.prox.regularizers import Regularizer, box, elastic_net, l1, l2_squared, nonnegative, zero

__all__ = ["Regularizer", "box", "elastic_net", "l1", "l2_squared", "nonnegative", "zero"]
