"""Which sampling, gamma, solver and K: the chapter's practical table as a function."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float

from commjax import cohorts
from commjax.prox import adaptive, quasi_newton
from commjax.prox.solvers import Solver
from commjax.theory import sppm as theory


class Facts(NamedTuple):
    """What the recommendation needs to know.  At a rough optimum the gradients are rough, and so is the recommendation."""

    mu_i: Float[np.ndarray, "n"]  # strong convexity of each client
    L_i: Float[np.ndarray, "n"]  # smoothness of each client
    gradients: Float[np.ndarray, "n d"]  # of each client at (about) the optimum
    distance2: float  # |x^0 - x*|^2, or a bound on it
    clusters: Sequence[np.ndarray]  # of similar clients


class Advice(NamedTuple):
    """A solver of the prox for `sppm_as`, and how many evaluations K iterations of it typically take (not a bound)."""

    name: str
    make: Callable[[Any], Solver]
    evaluations: Callable[[int], int]


class Recommendation(NamedTuple):
    sampling: cohorts.Sampling
    gamma: float
    solver: Callable[[Any], Solver]  # for `sppm_as`
    K: int  # local rounds a global one
    T: int  # global rounds
    cost: float  # (c1 K + c2) T, predicted
    neighbourhood: float  # bound on where it settles
    solver_name: str
    evaluations: float  # (c1 E + c2) T, predicted, with E evaluations typical for K iterations


SOLVERS = {
    # Its first trial of a step is a guess: two evaluations an iteration.
    "iterations": Advice("cg", lambda hparams: quasi_newton.conjugate_gradients(), lambda K: 2 * K + 1),
    # Its natural step 1 is nearly always accepted.
    "evaluations": Advice("lbfgs", lambda hparams: quasi_newton.lbfgs(), lambda K: K + 2),
}


def solver_for(convex: bool, count: str = "iterations") -> Advice:
    """The solver's row of the practical table: CG or a quasi-Newton method if f_S is convex, Adam with a tuned rate for networks.

    `count`: what a local round is, an iteration as in the thesis or an evaluation (P12).  CG takes the fewest iterations (L2300),
    L-BFGS the fewest evaluations (`experiments.cohort_squeeze solvers`).

    Thesis: L2192, L2300.

    >>> solver_for(True).name, solver_for(True, "evaluations").name, solver_for(False).name
    ('cg', 'lbfgs', 'adam')
    """
    if count not in SOLVERS:
        raise ValueError(f"count={count!r}; allowed: {' or '.join(SOLVERS)}")
    return SOLVERS[count] if convex else Advice("adam", lambda hparams: adaptive.adam(hparams.rate), lambda K: K + 1)


def local_rounds(gamma: float, mu: float, L: float, error2: float, distance2: float) -> int:
    """K after which accelerated gradient descent (and, in practice sooner, CG or BFGS) has |x_K - prox|^2 <= error2.

    The prox objective has condition number kappa = (L + 1/gamma) / (mu + 1/gamma); K = sqrt(kappa) log((kappa + 1) distance2 / error2).
    """
    kappa = (L + 1 / gamma) / (mu + 1 / gamma)
    return max(1, math.ceil(math.sqrt(kappa) * math.log(max(math.e, (kappa + 1) * distance2 / error2))))


def _check(problem: Facts) -> None:
    n = len(problem.mu_i)
    for name, values in (("mu_i", problem.mu_i), ("L_i", problem.L_i)):
        if np.shape(values) != (n,) or not np.all(np.isfinite(values) & (np.asarray(values) > 0)):
            raise ValueError(f"{name}={values}; allowed: n={n} finite positive numbers")
    if np.any(problem.L_i < problem.mu_i):
        raise ValueError(f"L_i={problem.L_i} is below mu_i={problem.mu_i} somewhere; allowed: mu_i <= L_i")
    if np.ndim(problem.gradients) != 2 or len(problem.gradients) != n or not np.all(np.isfinite(problem.gradients)):
        raise ValueError(f"gradients has shape {np.shape(problem.gradients)}; allowed: n={n} finite rows")
    if not (math.isfinite(problem.distance2) and problem.distance2 >= 0):
        raise ValueError(f"distance2={problem.distance2}; allowed: finite, at least 0")


def recommend(
    problem: Facts,
    epsilon: float,
    c1: float = 1.0,
    c2: float = 0.0,
    gammas: Sequence[float] | None = None,
    count: str = "iterations",
) -> Recommendation:
    """The cheapest setting that the theorems suggest to reach E |x - x*|^2 <= epsilon, at cost (c1 K + c2) T.

    Samplings of b clients, as many as there are clusters, are compared by their bounds: stratified, nice, and block where every cluster
    has b members (the cost does not count who takes part).  For each gamma on a grid whose neighbourhood is
    below epsilon: T from the inexact bound (prox error b such that it stays below epsilon), K from the rate of accelerated gradient
    descent on the prox of the worst cohort (`local_rounds`), the solver from `solver_for`.  Newton-type solvers exchange Hessians
    and are left to the user.

    Thesis: table L2192.
    Holds if: strongly convex.  T is a bound if every prox has a squared error of b at most.  That K iterations give it is a rule, not
    a theorem: the rate is another solver's, and the first distance |x_0 - x*|^2 stands for |x_t - prox(x_t)|^2 of every round.
    `experiments.cohort_squeeze recommended` compares prediction and measurement.
    """
    if not epsilon > 0:
        raise ValueError(f"epsilon={epsilon}; allowed: positive")
    if not (c1 >= 0 and c2 >= 0 and c1 + c2 > 0):
        raise ValueError(f"c1={c1}, c2={c2}; allowed: not negative, and not both 0")
    _check(problem)
    advice = solver_for(True, count)
    gradients = problem.gradients - problem.gradients.mean(axis=0)
    n, b = len(problem.mu_i), len(problem.clusters)
    samplings = [cohorts.stratified(problem.clusters), cohorts.nice(n, min(b, n))]
    if all(len(ids) == b for ids in problem.clusters):
        samplings.append(cohorts.block(problem.clusters))
    grid = np.geomspace(1e-3, 1e5, 65) if gammas is None else np.asarray(gammas, np.float64)
    if len(grid) == 0 or not np.all((grid > 0) & np.isfinite(grid)):
        raise ValueError(f"gammas={gammas}; allowed: positive finite numbers, at least one")
    found: list[Recommendation] = []
    for sampling in samplings:
        mu, sigma2 = sampling.mu(problem.mu_i), sampling.variance(gradients)
        L = float(
            np.sort(problem.L_i / (n * sampling.probabilities))[-sampling.size :].sum()
        )  # of any cohort's f_S at most
        for gamma in map(float, grid):
            settles = theory.neighbourhood(gamma, mu, sigma2)
            if settles >= epsilon:
                continue
            # Half of what is left of epsilon for the prox error, half for the start to be forgotten.
            error2 = _affordable_error(gamma, mu, sigma2, (epsilon + settles) / 2)
            s = theory.best_s(gamma, mu, sigma2, error2)
            contraction = 2 * math.log1p(gamma * mu) - math.log1p(s)
            rough = theory.inexact_neighbourhood(gamma, mu, sigma2, error2)
            if contraction < 1e-12 or not rough < epsilon:
                continue  # lost in rounding
            T = max(1, math.ceil(math.log(max(1.0, problem.distance2 / (epsilon - rough))) / contraction))
            K = local_rounds(gamma, mu, L, error2, problem.distance2)
            cost, asked = (theory.cost(c1, c2, inside, T) for inside in (K, advice.evaluations(K)))
            found.append(Recommendation(sampling, gamma, advice.make, K, T, cost, rough, advice.name, asked))
    if not found:
        least = min(
            theory.neighbourhood(float(grid.min()), s.mu(problem.mu_i), s.variance(gradients)) for s in samplings
        )
        raise ValueError(
            f"epsilon={epsilon}; allowed: above {least:.3g}, where the smallest gamma settles (and mu_i far enough from 0); allow "
            "smaller gammas"
        )
    return min(found, key=lambda one: one.cost if count == "iterations" else one.evaluations)


def _affordable_error(gamma: float, mu: float, sigma2: float, target: float) -> float:
    """The largest squared prox error (by halving) whose inexact neighbourhood is at most target"""
    error2 = target
    while theory.inexact_neighbourhood(gamma, mu, sigma2, error2) > target and error2 > 1e-300:
        error2 /= 2
    return error2
