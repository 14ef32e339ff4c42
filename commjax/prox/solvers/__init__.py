"""Inner solvers for the prox of a cohort.  Every evaluation is one aggregation inside the cohort, and is counted.

base            the contract of a solver, gradient descent, Newton, Scaffnew
quasi_newton    BFGS and nonlinear conjugate gradients
adaptive        solvers for networks that use one gradient of F per round
federated       solvers for networks with local steps on the clients
"""

from commjax.prox.solvers import adaptive, federated, quasi_newton
from commjax.prox.solvers.base import (
    BROKE_DOWN,
    CONVERGED,
    OUT_OF_BUDGET,
    LocalOracle,
    Oracle,
    Point,
    Result,
    Solver,
    accelerated_gradient_descent,
    aicn,
    evaluate,
    gradient_descent,
    iterate,
    local_newton,
    scaffnew,
)

__all__ = [
    "BROKE_DOWN",
    "CONVERGED",
    "OUT_OF_BUDGET",
    "LocalOracle",
    "Oracle",
    "Point",
    "Result",
    "Solver",
    "accelerated_gradient_descent",
    "adaptive",
    "aicn",
    "evaluate",
    "federated",
    "gradient_descent",
    "iterate",
    "local_newton",
    "quasi_newton",
    "scaffnew",
]
