"""Convex inner solvers: against closed forms and SciPy, exact counts, certificates, traced budgets, breakdowns, extreme gamma."""

import functools
import itertools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize

from commjax.problems import quadratic
from commjax.prox import cohort, solvers
from commjax.prox.solvers import quasi_newton
from commjax.prox.solvers.base import BROKE_DOWN, CONVERGED, OUT_OF_BUDGET, Oracle
from commjax.theory import sppm as theory

jit = jax.jit

MU, L, M, D = 0.1, 2.0, 3, 4
WEIGHTS = np.array([0.5, 0.2, 0.3])

# (L, mu) of F -> solver
EXACT = {
    "gd": lambda L, mu: solvers.gradient_descent(L),
    "agd": lambda L, mu: solvers.accelerated_gradient_descent(L, mu),
    "cg": lambda L, mu: quasi_newton.conjugate_gradients(),
    "bfgs": lambda L, mu: quasi_newton.bfgs(),
    "lbfgs": lambda L, mu: quasi_newton.lbfgs(),
    "aicn": lambda L, mu: solvers.aicn(),
}
ALL = EXACT | {
    "scaffnew": lambda L, mu: solvers.scaffnew(1 / L, 0.5),
    "local_newton": lambda L, mu: solvers.local_newton(),
}
each_exact = pytest.mark.parametrize("name", EXACT)
each = pytest.mark.parametrize("name", ALL)


QUADRATIC = quadratic.random(0, M, D, mu=MU, L=L)
_rng = np.random.default_rng(1)
_A = _rng.standard_normal((M, 6, D)) * [2.0, 1.0, 0.5, 0.1]
LOGISTIC = (_A, np.sign(_rng.standard_normal((M, 6))))


class Data(NamedTuple):
    """A quadratic and a logistic loss with MU |x|^2 / 2: one program for both."""

    H: Any
    c: Any
    features: Any = LOGISTIC[0]
    labels: Any = LOGISTIC[1]
    share: Any = np.zeros(M)  # of the logistic loss


def _loss(x, data):
    fit = jnp.mean(jnp.logaddexp(jnp.zeros((), x.dtype), -data.labels * (data.features @ x))) + MU / 2 * jnp.vdot(x, x)
    return (x - data.c) @ data.H @ (x - data.c) / 2 + data.share * fit


PROBLEMS = {"quadratic": Data(*QUADRATIC), "logistic": Data(0 * QUADRATIC.H, QUADRATIC.c, share=np.ones(M))}
SMOOTH = {"quadratic": L, "logistic": max(np.linalg.norm(A, 2) ** 2 / 24 for A in _A) + MU}
CENTER = np.array([1.0, -2.0, 0.5, 3.0])


POINTS = []  # at which a cohort of `problem` was asked, when compiled with `counted`


def oracle_of(data, gamma, center, counted=False):
    """The oracle that SPPM-AS builds, on three clients with weights that add up to 1."""
    data = jax.tree.map(lambda leaf: jnp.asarray(leaf, center.dtype), data)
    oracle = cohort.prox_oracle(
        _loss, lambda x: x, cohort.Cohort(data, jnp.asarray(WEIGHTS, center.dtype)), center, gamma
    )

    def value_and_grad(x):
        jax.debug.callback(lambda x: POINTS.append(tuple(map(float, x))), x)
        return oracle.value_and_grad(x)

    return oracle._replace(value_and_grad=value_and_grad) if counted else oracle


def solution(name, smooth, gamma, start, budget, tolerance, center, data, counted):
    solver = ALL[name](smooth + 1 / gamma, jnp.asarray(MU, center.dtype) + 1 / gamma)
    return solver(oracle_of(data, gamma, center, counted), start, budget, tolerance)


compiled = jit(solution, static_argnums=(0, 8))


def run(
    name,
    kind="quadratic",
    gamma=5.0,
    budget=2000,
    tolerance=1e-9,
    start=CENTER,
    center=CENTER,
    data=None,
    dtype=np.float64,
):
    """Everything but the solver and the dtype is traced, so that each is compiled once."""
    POINTS.clear()
    smooth, gamma, start, center = (jnp.asarray(value, dtype) for value in (SMOOTH[kind], gamma, start, center))
    data = jax.tree.map(jnp.asarray, PROBLEMS[kind] if data is None else data)
    result = compiled(
        name, smooth, gamma, start, jnp.asarray(budget), jnp.asarray(tolerance), center, data, dtype == np.float64
    )
    jax.block_until_ready(result)
    jax.effects_barrier()
    return result


_value_and_grad = jit(lambda data, x: oracle_of(data, 5.0, jnp.asarray(CENTER)).value_and_grad(x))


def gradient(kind, x):
    return np.asarray(_value_and_grad(PROBLEMS[kind], jnp.asarray(x))[1])


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
    for found in (result, rough):
        assert float(found.residual) == pytest.approx(np.linalg.norm(gradient(kind, found.params)), rel=1e-3, abs=1e-14)
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


def test_gradient_descent_takes_the_steps_of_its_docstring():
    x = CENTER
    for _ in range(4):
        x = x - gradient("quadratic", x) / (L + 0.2)
    np.testing.assert_allclose(run("gd", budget=4).params, x, rtol=1e-12)


def test_accelerated_gradient_descent_takes_the_steps_of_nesterov():
    root = np.sqrt((L + 0.2) / (MU + 0.2))
    x, y = CENTER, CENTER
    for _ in range(4):
        new = y - gradient("quadratic", y) / (L + 0.2)
        x, y = new, new + (root - 1) / (root + 1) * (new - x)
    np.testing.assert_allclose(run("agd", budget=4).params, y, rtol=1e-12)


def test_aicn_takes_damped_newton_steps():
    H = np.einsum("i,ijk->jk", WEIGHTS, QUADRATIC.H) + np.eye(D) / 5
    x = CENTER
    for _ in range(3):
        grad = gradient("quadratic", x)
        step = np.linalg.solve(H, grad)
        dual = np.sqrt(grad @ step)
        x = x - (np.sqrt(1 + 2 * dual) - 1) / dual * step
    np.testing.assert_allclose(run("aicn", budget=3).params, x, rtol=1e-10)


def test_the_scale_of_aicn_shortens_its_steps():
    oracle = Oracle(lambda x: (jnp.vdot(x, x) / 2, x), lambda x: jnp.eye(1))
    result = solvers.aicn(4.0)(oracle, jnp.ones(1), 1, 0.0)
    np.testing.assert_allclose(result.params, 1 - (3.0 - 1) / 4)  # sqrt(1 + 2 * 4) = 3


def test_bfgs_takes_as_many_iterations_as_scipy_give_or_take_two():
    options = {"gtol": 1e-6, "norm": 2}
    theirs = scipy.optimize.minimize(
        lambda x: [np.asarray(a) for a in _value_and_grad(PROBLEMS["logistic"], x)],
        CENTER,
        jac=True,
        method="BFGS",
        options=options,
    )
    ours = run("bfgs", "logistic", tolerance=1e-6)
    assert abs(int(ours.iterations) - theirs.nit) <= 2 and abs(int(ours.evaluations) - theirs.nfev) <= 4


def dense_bfgs(value_and_grad, x, steps):
    """The textbook's matrix update, with the steps that our line search took: [H, ...] after each pair."""
    H = np.eye(len(x))
    points = [x, *steps]
    found = []
    for before, here in itertools.pairwise(points):
        s, y = here - before, value_and_grad(here)[1] - value_and_grad(before)[1]
        rho = 1 / (s @ y)
        V = np.eye(len(x)) - rho * np.outer(s, y)
        H = V @ H @ V.T + rho * np.outer(s, s)
        found.append(H)
    return found


def test_bfgs_goes_along_the_direction_of_the_textbooks_matrix():
    def value_and_grad(x):
        return [np.asarray(a) for a in _value_and_grad(PROBLEMS["logistic"], x)]

    steps = [np.asarray(run("bfgs", "logistic", budget=k).params) for k in range(1, 7)]
    for H, here, following in zip(dense_bfgs(value_and_grad, np.asarray(CENTER), steps), steps, steps[1:]):
        direction, moved = -H @ value_and_grad(here)[1], following - here
        cosine = direction @ moved / np.linalg.norm(direction) / np.linalg.norm(moved)
        assert cosine > 1 - 1e-9


def test_bfgs_with_a_short_history_starts_again_and_still_converges():
    oracle = oracle_of(PROBLEMS["logistic"], 5.0, jnp.asarray(CENTER))

    @functools.partial(jit, static_argnums=0)
    def solve(history, budget):
        return quasi_newton.bfgs(history)(oracle, jnp.asarray(CENTER), budget, 1e-9)

    # The same until the history is full; then the first step is along the gradient again.
    short = solve(3, 4)
    np.testing.assert_allclose(short.params, solve(50, 4).params, rtol=1e-12)
    grad = gradient("logistic", short.params)
    assert not np.allclose(solve(3, 5).params, solve(50, 5).params, rtol=1e-6)
    assert int(short.code) == OUT_OF_BUDGET and np.linalg.norm(grad) > 1e-9
    assert int(solve(3, 200).code) == CONVERGED
    with pytest.raises(ValueError, match="history=0; allowed: a whole number, at least 1"):
        quasi_newton.bfgs(0)


@pytest.mark.parametrize("kind", PROBLEMS)
def test_cg_goes_along_polak_and_ribieres_directions_and_first_tries_to_fall_as_far_as_last_time(kind):
    steps = [np.asarray(run("cg", kind, budget=k, tolerance=0.0).params) for k in range(7)]
    asked = np.array(POINTS)
    values, grads = zip(*([np.asarray(a) for a in _value_and_grad(PROBLEMS[kind], x)] for x in steps))
    direction = -grads[0]
    guess = min(1.0, 1 / np.linalg.norm(grads[0]))
    for k in range(6):
        if k:
            beta = max(0.0, grads[k] @ (grads[k] - grads[k - 1]) / (grads[k - 1] @ grads[k - 1]))
            direction = -grads[k] + beta * direction
            guess = 1.01 * 2 * (values[k] - values[k - 1]) / (grads[k] @ direction)
        moved = steps[k + 1] - steps[k]
        assert direction @ moved / np.linalg.norm(direction) / np.linalg.norm(moved) > 1 - 1e-9
        tried = steps[k] + guess * direction
        assert np.abs(asked - tried).max(axis=1).min() < 1e-9 * np.linalg.norm(tried)


def test_scaffnew_that_always_communicates_is_gradient_descent():
    oracle = oracle_of(PROBLEMS["quadratic"], 5.0, jnp.asarray(CENTER))
    always = jit(lambda x: solvers.scaffnew(1 / (L + 0.2), 1.0)(oracle, x, 5, 0.0))(jnp.asarray(CENTER))
    np.testing.assert_allclose(always.params, run("gd", budget=5).params, rtol=1e-12)


def test_local_newton_is_exact_when_clients_agree():
    same = jax.tree.map(lambda leaf: np.repeat(leaf[:1], M, 0), PROBLEMS["quadratic"])
    result = run("local_newton", data=same)
    assert int(result.iterations) == 1 and int(result.code) == CONVERGED  # one Newton step on one quadratic
    H, c = QUADRATIC.H[0], QUADRATIC.c[0]
    np.testing.assert_allclose(result.params, np.linalg.solve(H + np.eye(D) / 5, H @ c + CENTER / 5), rtol=1e-10)


def test_local_newton_goes_towards_the_mean_of_the_clients_own_proxes_as_far_as_f_falls():
    """On quadratics the mean y of the clients' minimisers is where every direction points, and nothing beats it there."""
    own = [np.linalg.solve(H + np.eye(D) / 5, H @ c + CENTER / 5) for H, c in zip(QUADRATIC.H, QUADRATIC.c)]
    y, x = WEIGHTS @ np.stack(own), np.asarray(CENTER)

    def F(x):
        return float(_value_and_grad(PROBLEMS["quadratic"], jnp.asarray(x))[0])

    step, trials = 1.0, 1
    while F(x + step * (y - x)) > F(x) + 1e-4 * step * gradient("quadratic", x) @ (y - x):
        step, trials = step / 2, trials + 1
    first = run("local_newton", budget=1)
    ends = min((x, x + step * (y - x)), key=lambda x: np.linalg.norm(gradient("quadratic", x)))
    np.testing.assert_allclose(first.params, ends, rtol=1e-9)
    assert int(first.evaluations) == 1 + trials and int(first.code) == OUT_OF_BUDGET
    away = run("local_newton", budget=20, start=y)  # no way down along 0
    assert np.linalg.norm(away.params - y) < 1e-6 and float(away.residual) > 1e-3


@pytest.mark.parametrize("curvatures", [(1.0, -2.0), (-2.0, 1.0)])
def test_a_client_with_indefinite_curvature_breaks_local_newton_down_at_its_start(curvatures):
    H = jnp.asarray(np.stack([np.diag([1.0, c]) for c in curvatures]))
    weights = jnp.array([0.7, 0.3])

    def rows(x):
        return 0.5 * jnp.einsum("mi,mij,mj->m", x, H, x), jnp.einsum("mij,mj->mi", H, x)

    oracle = Oracle(lambda x: (jnp.vdot(x, x) / 2, x), None, solvers.LocalOracle(rows, lambda x: H, weights))
    result = jit(lambda x: solvers.local_newton()(oracle, x, 10, 1e-6))(jnp.ones(2))
    assert int(result.code) == BROKE_DOWN and int(result.iterations) == 1
    np.testing.assert_array_equal(result.params, np.ones(2))
    absent = oracle._replace(local=oracle.local._replace(weights=jnp.asarray(np.array(curvatures) > 0, float)))
    assert int(jit(lambda x: solvers.local_newton()(absent, x, 1, 1e-6))(jnp.ones(2)).code) == CONVERGED


@pytest.mark.parametrize("name", ["gd", "cg", "bfgs"])
def test_traced_budgets_and_tolerances_under_vmap_give_the_separate_runs(name):
    budgets, tolerances = jnp.array([0, 1, 4, 100, 100]), jnp.array([0.0, 0.0, 1e-3, 1e-3, 100.0])
    center = jnp.asarray(CENTER)
    data = jax.tree.map(jnp.asarray, PROBLEMS["quadratic"])
    solve = jax.vmap(lambda budget, tolerance: solution(name, L, 5.0, center, budget, tolerance, center, data, False))
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
        # Rounding leaves |grad| at about eps |x| (L + 1/gamma); a line search may stop where F no longer changes, at its root.
        eps = np.finfo(dtype).eps
        floor = (np.sqrt(eps) if name in ("cg", "bfgs", "lbfgs") else 100 * eps) * (SMOOTH["logistic"] + 1 / gamma)
        assert float(result.residual) <= floor, (gamma, result.residual, floor)
        error = np.linalg.norm(np.asarray(result.params, np.float64) - argmin("logistic", gamma))
        assert error <= np.sqrt(theory.squared_prox_error(float(result.residual), gamma, MU)) + 50 * eps + 1e-9


@pytest.mark.parametrize("c2", [0.1, 0.9])
def test_the_line_search_satisfies_strong_wolfe_from_short_and_long_first_steps(c2):
    @jit
    def search(data, here, directions, steps):
        oracle = oracle_of(data, 5.0, jnp.asarray(CENTER))

        def one(direction, step):
            def trial(search):
                point = solvers.evaluate(oracle, here.x + search.step * direction)
                return quasi_newton._narrow(search, here, direction, point, 1e-4, c2)

            start = quasi_newton._search(here, jnp.vdot(here.grad, direction), step)
            return jax.lax.while_loop(lambda search: ~search.done & (search.count < 20), trial, start)

        return jax.vmap(one)(directions, steps)

    for kind, data in PROBLEMS.items():
        here = solvers.Point(jnp.asarray(CENTER), *_value_and_grad(data, jnp.asarray(CENTER)))
        noise = np.random.default_rng(2).standard_normal((6, D)) * np.linalg.norm(here.grad) / 4
        directions = -here.grad[None] + jnp.asarray(noise)
        directions = directions * -jnp.sign(directions @ here.grad)[:, None]
        slope = directions @ here.grad
        found = search(data, here, directions, jnp.array([1e-4, 1e-2, 1.0, 10.0, 1e3, 1e6]))
        point, step = found.point, found.step
        assert np.all(found.done), kind
        assert np.all(point.value <= here.value + 1e-4 * step * slope)
        assert np.all(np.abs(np.sum(point.grad * directions, 1)) <= c2 * np.abs(slope))
        np.testing.assert_allclose(point.x, CENTER[None] + step[:, None] * directions, rtol=1e-12)


def _wall(x):
    """|x - 3|^2 / 2, not defined where x_0 >= 2; the minimum lies behind the wall."""
    away = x - 3
    return jnp.where(x[0] < 2, jnp.vdot(away, away) / 2, jnp.nan), jnp.where(x[0] < 2, away, jnp.nan)


def _barrier(x):
    """A minimum inside (0, 2), NaN outside."""
    return jnp.sum(0.1 * x - jnp.log(2 - x) - jnp.log(x)), 0.1 + 1 / (2 - x) - 1 / x


ILL = {
    "wall": _wall,
    "barrier": _barrier,
    "NaN": lambda x: (jnp.full((), jnp.nan), jnp.zeros_like(x)),
    "infinite": lambda x: (jnp.full((), jnp.inf), jnp.zeros_like(x)),
    "wrong sign": lambda x: (jnp.vdot(x, x) / 2, -x),
    "unbounded": lambda x: (-jnp.vdot(x, x) / 2, -x),
}


@functools.partial(jit, static_argnums=0)
def _ill(name, which, start, budget, tolerance):
    oracle = Oracle(lambda x: jax.lax.switch(which, list(ILL.values()), x), lambda x: jnp.eye(D))
    return ALL[name](1.25, 1.0)(oracle, start, budget, tolerance)


def ill(name, which, start=CENTER, budget=200, tolerance=1e-6):
    return _ill(name, list(ILL).index(which), jnp.asarray(start), budget, tolerance)


@each_exact
def test_an_objective_that_is_not_finite_ends_the_run_at_the_best_finite_point(name):
    result = ill(name, "wall", np.zeros(D))
    assert int(result.code) == BROKE_DOWN and np.all(np.isfinite(result.params)) and result.params[0] < 2
    assert float(result.residual) == pytest.approx(float(jnp.linalg.norm(result.params - 3)))
    assert float(result.residual) <= np.linalg.norm(3 * np.ones(D)) and int(result.iterations) < 200


@pytest.mark.parametrize("name", ["cg", "bfgs", "lbfgs"])
def test_a_line_search_steps_back_from_a_wall_and_goes_on(name):
    result = ill(name, "barrier", np.array([1e-3, 1.9, 1.0, 0.5]), tolerance=1e-7)
    assert int(result.code) == CONVERGED
    np.testing.assert_allclose(0.1 + 1 / (2 - result.params) - 1 / result.params, 0, atol=1e-7)


@each_exact
@pytest.mark.parametrize("which", ["NaN", "infinite"])
def test_a_start_that_is_not_finite_is_returned_as_broken_even_with_a_zero_gradient(name, which):
    result = ill(name, which, tolerance=1.0)
    assert (int(result.code), int(result.iterations), int(result.evaluations)) == (BROKE_DOWN, 0, 1)
    np.testing.assert_array_equal(result.params, CENTER)


@pytest.mark.parametrize("name", ["cg", "bfgs", "lbfgs"])
@pytest.mark.parametrize("which", ["wrong sign", "unbounded"])
def test_a_search_without_descent_or_without_end_breaks_down_and_stays_finite(name, which):
    result = ill(name, which)
    assert int(result.code) == BROKE_DOWN and int(result.iterations) < 200
    assert np.all(np.isfinite(result.params)) and int(result.evaluations) <= 1 + 20 * int(result.iterations)


def test_an_indefinite_hessian_breaks_aicn_down_whether_or_not_its_step_descends():
    H = jnp.diag(jnp.array([1.0, -1.0]))

    @jit
    def solve(b):
        oracle = Oracle(lambda x: (jnp.vdot(x, H @ x) / 2 + jnp.vdot(b, x), H @ x + b), lambda x: H)
        return solvers.aicn()(oracle, jnp.zeros(2), 10, 1e-6)

    for b in ([1.0, 0.1], [0.1, 1.0]):
        result = solve(jnp.array(b))
        assert int(result.code) == BROKE_DOWN and int(result.iterations) == 1
        np.testing.assert_array_equal(result.params, np.zeros(2))


def test_solvers_that_need_more_than_gradients_say_so():
    oracle = Oracle(lambda x: (jnp.vdot(x, x), 2 * x))
    with pytest.raises(ValueError, match=r"oracle\.hessian, got None"):
        solvers.aicn()(oracle, jnp.ones(2), 1, 0.0)
    for solver in (solvers.local_newton(), solvers.scaffnew(1.0, 0.5)):
        with pytest.raises(ValueError, match=r"oracle\.local, got None"):
            solver(oracle, jnp.ones(2), 1, 0.0)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: solvers.gradient_descent(-1.0), "L=-1.0; allowed: positive"),
        (lambda: solvers.accelerated_gradient_descent(1.0, 0.0), "mu=0.0; allowed: positive"),
        (lambda: solvers.aicn(-1.0), "scale=-1.0; allowed: positive"),
        (lambda: solvers.local_newton(0), "steps=0; allowed: a whole number, at least 1"),
        (lambda: solvers.scaffnew(-1.0, 0.5), "gamma=-1.0; allowed: positive"),
        (lambda: solvers.scaffnew(1.0, 0.0), "p=0.0; allowed: 0 < p <= 1"),
        (lambda: quasi_newton.lbfgs(0), "history=0; allowed"),
    ],
)
def test_bad_arguments_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
