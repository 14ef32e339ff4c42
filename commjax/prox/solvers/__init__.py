"""Inner solvers for the prox of a cohort.  Every evaluation is one aggregation inside the cohort, and is counted.

base            the contract of a solver
gradient        gradient descent, Nesterov's method, Scaffnew
newton          Newton's method with the cohort's Hessian or with local steps
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
    evaluate,
    iterate,
)
from commjax.prox.solvers.gradient import accelerated_gradient_descent, gradient_descent, scaffnew
from commjax.prox.solvers.newton import aicn, local_newton

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
