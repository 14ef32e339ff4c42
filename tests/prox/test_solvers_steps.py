"""Convex inner solvers, step by step: the points and directions that the textbooks give."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.optimize

from commjax.prox import solvers
from commjax.prox.solvers import quasi_newton
from commjax.prox.solvers.base import BROKE_DOWN, CONVERGED, OUT_OF_BUDGET, Oracle
from tests.prox.solvers_cases import (
    CENTER,
    MU,
    POINTS,
    PROBLEMS,
    QUADRATIC,
    WEIGHTS,
    D,
    L,
    M,
    _value_and_grad,
    gradient,
    jit,
    oracle_of,
    run,
)

pytestmark = pytest.mark.long


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
    matrices = []
    for before, current in itertools.pairwise(points):
        s, y = current - before, value_and_grad(current)[1] - value_and_grad(before)[1]
        rho = 1 / (s @ y)
        V = np.eye(len(x)) - rho * np.outer(s, y)
        H = V @ H @ V.T + rho * np.outer(s, s)
        matrices.append(H)
    return matrices


def test_bfgs_goes_along_the_direction_of_the_textbooks_matrix():
    def value_and_grad(x):
        return [np.asarray(a) for a in _value_and_grad(PROBLEMS["logistic"], x)]

    steps = [np.asarray(run("bfgs", "logistic", budget=k).params) for k in range(1, 7)]
    for H, current, following in zip(dense_bfgs(value_and_grad, np.asarray(CENTER), steps), steps, steps[1:]):
        direction, moved = -H @ value_and_grad(current)[1], following - current
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
    """On quadratics the mean y of the clients' minimisers is where every direction points, and nothing beats it
    there."""
    minimisers = [np.linalg.solve(H + np.eye(D) / 5, H @ c + CENTER / 5) for H, c in zip(QUADRATIC.H, QUADRATIC.c)]
    y, x = WEIGHTS @ np.stack(minimisers), np.asarray(CENTER)

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
