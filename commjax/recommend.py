"""Which sampling, gamma, solver and K: the chapter's practical table as a function."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from commjax import cohorts
from commjax.prox import quasi_newton
from commjax.prox.solvers import Solver
from commjax.theory import sppm as theory


class Facts(NamedTuple):
    """What the recommendation needs to know.  At a rough optimum the gradients are rough, and so is the recommendation."""

    mu_i: Float[np.ndarray, "n"]  # strong convexity of each client
    L_i: Float[np.ndarray, "n"]  # smoothness of each client
    gradients: Float[np.ndarray, "n d"]  # of each client at (about) the optimum
    distance2: float  # |x^0 - x*|^2, or a bound on it
    clusters: Sequence[np.ndarray]  # of similar clients


class Recommendation(NamedTuple):
    sampling: cohorts.Sampling
    gamma: float
    solver: Callable[[Any], Solver]  # for `sppm_as`
    K: int  # local rounds a global one
    T: int  # global rounds
    cost: float  # (c1 K + c2) T, predicted
    neighbourhood: float  # bound on where it settles


def local_rounds(gamma: float, mu: float, L: float, error2: float, distance2: float) -> int:
    """K after which accelerated gradient descent (and, in practice sooner, CG or BFGS) has |x_K - prox|^2 <= error2.

    The prox objective has condition number kappa = (L + 1/gamma) / (mu + 1/gamma); sqrt(kappa) log(kappa distance2 / error2).
    """
    kappa = (L + 1 / gamma) / (mu + 1 / gamma)
    return max(1, math.ceil(math.sqrt(kappa) * math.log(max(math.e, (kappa + 1) * distance2 / error2))))


def _solver(hparams: Any) -> Solver:
    return quasi_newton.conjugate_gradients()


def recommend(
    problem: Facts, epsilon: float, c1: float = 1.0, c2: float = 0.0, gammas: Sequence[float] | None = None
) -> Recommendation:
    """The cheapest setting that the theorems promise to reach E |x - x*|^2 <= epsilon, at cost (c1 K + c2) T.

    Samplings of equal size (stratified, nice, block) are compared by their bounds.  For each gamma on a grid whose neighbourhood is
    below epsilon: T from the inexact bound (prox error b such that it stays below epsilon), K from the solver's rate.  Newton-type
    solvers exchange Hessians and are left to the user.

    Thesis: table L2192.  Holds if: strongly convex; predictions are upper bounds, several times what is needed on real data.
    """
    if not epsilon > 0:
        raise ValueError(f"epsilon={epsilon}; allowed: positive")
    if c1 < 0 or c2 < 0 or c1 + c2 == 0:
        raise ValueError(f"c1={c1}, c2={c2}; allowed: not negative, and not both 0")
    gradients = problem.gradients - problem.gradients.mean(axis=0)
    n, b = len(problem.mu_i), len(problem.clusters)
    samplings = [cohorts.stratified(problem.clusters), cohorts.nice(n, min(b, n)), cohorts.block(problem.clusters)]
    grid = np.geomspace(1e-3, 1e5, 65) if gammas is None else np.asarray(gammas, np.float64)
    best: Recommendation | None = None
    for sampling in samplings:
        mu, sigma2 = sampling.mu(problem.mu_i), sampling.variance(gradients)
        L = float(problem.L_i.max())
        for gamma in map(float, grid):
            settles = theory.neighbourhood(gamma, mu, sigma2)
            if settles >= epsilon:
                continue
            # Half of what is left of epsilon for the prox error, half for the start to be forgotten.
            error2 = _affordable_error(gamma, mu, sigma2, (epsilon + settles) / 2)
            rough = theory.inexact_neighbourhood(gamma, mu, sigma2, error2)
            rate = theory.inexact_rate(gamma, mu, theory.best_s(gamma, mu, sigma2, error2))
            T = max(1, math.ceil(math.log(max(1.0, problem.distance2 / (epsilon - rough))) / -math.log(rate)))
            K = local_rounds(gamma, mu, L, error2, problem.distance2)
            cost = theory.cost(c1, c2, K, T)
            if best is None or cost < best.cost:
                best = Recommendation(sampling, gamma, _solver, K, T, cost, rough)
    if best is None:
        least = min(
            theory.neighbourhood(float(grid.min()), s.mu(problem.mu_i), s.variance(gradients)) for s in samplings
        )
        raise ValueError(
            f"epsilon={epsilon}; allowed: above {least:.3g}, where the smallest gamma settles; allow smaller gammas"
        )
    return best


def _affordable_error(gamma: float, mu: float, sigma2: float, target: float) -> float:
    """The largest squared prox error (by halving) whose inexact neighbourhood is at most target"""
    error2 = target
    while theory.inexact_neighbourhood(gamma, mu, sigma2, error2) > target and error2 > 1e-300:
        error2 /= 2
    return error2
