"""Convex inner solvers: against closed forms and SciPy, exact counts, certificates, traced budgets, extreme gamma."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize

from commjax.prox.solvers.base import BROKE_DOWN, CONVERGED, OUT_OF_BUDGET
from commjax.theory import sppm as theory
from tests.prox.solvers_cases import (
    ALL,
    CENTER,
    EXACT,
    LOGISTIC,
    MU,
    POINTS,
    PROBLEMS,
    QUADRATIC,
    SMOOTH,
    WEIGHTS,
    Case,
    D,
    Data,
    L,
    each_exact,
    gradient,
    jit,
    run,
    solution,
)

pytestmark = pytest.mark.long

each = pytest.mark.parametrize("name", ALL)


@functools.cache
def argmin(kind, gamma):
    """prox_{gamma f}(CENTER): a linear system, or SciPy."""
    if kind == "quadratic":
        H = np.einsum("i,ijk->jk", WEIGHTS, QUADRATIC.H) + np.eye(D) / gamma
        return np.linalg.solve(H, np.einsum("i,ijk,ik->j", WEIGHTS, QUADRATIC.H, QUADRATIC.c) + CENTER / gamma)
    A, b = LOGISTIC

    def grad(x):
        pull = np.einsum("i,ij,ijk->k", WEIGHTS, -b / (1 + np.exp(b * (A @ x))) / 6, A)
        return pull + MU * x + (x - CENTER) / gamma

    return scipy.optimize.root(grad, CENTER, tol=1e-14).x


@pytest.mark.parametrize("kind", PROBLEMS)
@pytest.mark.parametrize("name", [*EXACT, "scaffnew"])
def test_it_finds_the_prox_and_its_residual_certifies_the_error(name, kind):
    result, rough = run(name, kind), run(name, kind, tolerance=0.05)
    assert int(result.code) == CONVERGED and float(result.residual) <= 1e-9
    np.testing.assert_allclose(result.params, argmin(kind, 5.0), atol=2e-8)
    for end in (result, rough):
        assert float(end.residual) == pytest.approx(np.linalg.norm(gradient(kind, end.params)), rel=1e-3, abs=1e-14)
    error2 = np.sum((rough.params - argmin(kind, 5.0)) ** 2)
    assert error2 <= theory.squared_prox_error(float(rough.residual), 5.0, MU)
    assert int(rough.iterations) < int(result.iterations)


@each
@pytest.mark.parametrize("budget", [0, 3])
def test_evaluations_are_the_points_at_which_the_cohort_was_asked(name, budget):
    result = run(name, "logistic", 20.0, budget, 0.0)
    assert int(result.iterations) == budget and int(result.code) == OUT_OF_BUDGET
    assert int(result.evaluations) == len(POINTS) == len(set(POINTS))
    searches = name in ("cg", "bfgs", "lbfgs", "local_newton")
    assert int(result.evaluations) >= 1 + budget if searches else int(result.evaluations) == 1 + budget
    # Line searches look at values; LocalNewton's needs no gradient where it rejects a step (P12).
    assert int(result.values) == (int(result.evaluations) if searches else 0)
    wolfe = name in ("cg", "bfgs", "lbfgs")
    assert int(result.gradients) == (int(result.evaluations) if wolfe else 1 + budget)
    # The best of the points that were asked, not the last.
    assert tuple(map(float, result.params)) in POINTS


@pytest.mark.parametrize("name", ["gd", "cg", "bfgs"])
def test_traced_budgets_and_tolerances_under_vmap_give_the_separate_runs(name):
    budgets, tolerances = jnp.array([0, 1, 4, 100, 100]), jnp.array([0.0, 0.0, 1e-3, 1e-3, 100.0])
    center = jnp.asarray(CENTER)
    data = jax.tree.map(jnp.asarray, PROBLEMS["quadratic"])
    solve = jax.vmap(lambda budget, tolerance: solution(name, Case(L, 5.0, center, budget, tolerance, center, data)))
    together = jit(solve)(budgets, tolerances)
    for row, (budget, tolerance) in enumerate(zip(budgets, tolerances)):
        alone = run(name, budget=budget, tolerance=tolerance)
        for mine, theirs in zip(alone, together):
            np.testing.assert_allclose(mine, theirs[row], rtol=1e-7, atol=1e-10)
        assert int(alone.iterations) <= int(budget)
    assert together.code.tolist()[3:] == [CONVERGED, CONVERGED] and int(together.iterations[4]) == 0


@each
def test_a_start_at_the_optimum_costs_one_evaluation_and_converges_at_tolerance_zero(name):
    zero = np.zeros(D)
    result = run(name, budget=10, tolerance=0.0, start=zero, center=zero, data=Data(QUADRATIC.H, 0 * QUADRATIC.c))
    assert (int(result.iterations), int(result.evaluations), int(result.code)) == (0, 1, CONVERGED)
    assert float(result.residual) == 0 and not np.any(result.params)


@each_exact
def test_tolerance_zero_uses_the_budget_or_stops_where_rounding_does_and_stays_at_the_optimum(name):
    result = run(name, budget=500, tolerance=0.0)
    assert int(result.code) in (OUT_OF_BUDGET, BROKE_DOWN) or float(result.residual) == 0
    np.testing.assert_allclose(result.params, argmin("quadratic", 5.0), atol=1e-7)


@pytest.mark.parametrize("name", ["scaffnew", "local_newton"])
def test_solvers_with_local_work_stay_finite_at_every_gamma(name):
    for gamma in (1e-3, 1.0, 1e5):
        result = run(name, "logistic", gamma, 30, 0.0, start=CENTER + 10)
        assert np.all(np.isfinite(result.params)) and float(result.residual) <= np.linalg.norm(
            _anywhere(gamma, CENTER + 10)
        ) * (1 + 1e-9)


def _anywhere(gamma, x):
    A, b = LOGISTIC
    pull = np.einsum("i,ij,ijk->k", WEIGHTS, -b / (1 + np.exp(b * (A @ x))) / 6, A)
    return pull + MU * x + (x - CENTER) / gamma


@each_exact
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_gamma_from_a_thousandth_to_a_hundred_thousand_neither_overflows_nor_stalls(name, dtype):
    for gamma in (1e-3, 0.1, 1.0, 1e3, 1e5):
        far = CENTER + 10  # at gamma = 1e-3 the gradient is 2e4
        result = run(name, "logistic", gamma, 600, 0.0, start=far, dtype=dtype)
        assert result.params.dtype == result.residual.dtype == dtype
        assert np.all(np.isfinite(result.params)) and np.isfinite(result.residual)
        # Rounding leaves |grad| at about eps |x| (L + 1/gamma); a line search may stop where F no longer changes, at
        # its root.
        eps = np.finfo(dtype).eps
        floor = (np.sqrt(eps) if name in ("cg", "bfgs", "lbfgs") else 100 * eps) * (SMOOTH["logistic"] + 1 / gamma)
        assert float(result.residual) <= floor, (gamma, result.residual, floor)
        error = np.linalg.norm(np.asarray(result.params, np.float64) - argmin("logistic", gamma))
        assert error <= np.sqrt(theory.squared_prox_error(float(result.residual), gamma, MU)) + 50 * eps + 1e-9
