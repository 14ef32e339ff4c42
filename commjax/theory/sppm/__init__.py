"""SPPM-AS: rates, neighbourhoods, complexities, inexact proxes and communication costs.

Thesis: Sec. 5.3.2, Sec. 5.3.3 and Sec. D.6.

Throughout, mu and sigma2 are mu_AS and sigma^2_AS of a sampling (`commjax.sampling.samplings`), gamma > 0 is any
stepsize, and prox_{gamma f}(y) = argmin_x f(x) + |x - y|^2 / (2 gamma) (erratum P1 in docs/errata.md).  x* is the
minimiser of f = (1/n) sum_i f_i, and x_t the model after t steps.

exact       rates and neighbourhoods with an exact prox
inexact     the same with an inexact prox
averaged    averaged proxes and proxes with two anchors
costs       communication costs
variances   variances of cohorts
"""

from commjax.theory.sppm.averaged import (
    fedprox,
    fedprox_bound,
    two_anchor,
)
from commjax.theory.sppm.costs import (
    cost,
    localgd_cost,
)
from commjax.theory.sppm.exact import (
    bound,
    iterations,
    neighbourhood,
    one_step,
    rate,
    recurrence,
    squared_prox_error,
    stepsize_for,
)
from commjax.theory.sppm.inexact import (
    best_s,
    inexact_bound,
    inexact_limit,
    inexact_neighbourhood,
    inexact_one_step,
    inexact_rate,
)
from commjax.theory.sppm.variances import (
    nice_variance,
    optimal_clustering_bounds,
    stratified_from_block,
    stratified_upper_bounds,
)

__all__ = [
    "best_s",
    "bound",
    "cost",
    "fedprox",
    "fedprox_bound",
    "inexact_bound",
    "inexact_limit",
    "inexact_neighbourhood",
    "inexact_one_step",
    "inexact_rate",
    "iterations",
    "localgd_cost",
    "neighbourhood",
    "nice_variance",
    "one_step",
    "optimal_clustering_bounds",
    "rate",
    "recurrence",
    "squared_prox_error",
    "stepsize_for",
    "stratified_from_block",
    "stratified_upper_bounds",
    "two_anchor",
]
