"""Convex inner solvers where they break down: line searches, walls, objectives that are not finite, bad arguments."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commjax.prox import solvers
from commjax.prox.solvers import quasi_newton
from commjax.prox.solvers.base import BROKE_DOWN, CONVERGED, Oracle
from tests.prox.solvers_cases import ALL, CENTER, PROBLEMS, D, _value_and_grad, each_exact, jit, oracle_of

pytestmark = pytest.mark.long


@pytest.mark.parametrize("c2", [0.1, 0.9])
def test_the_line_search_satisfies_strong_wolfe_from_short_and_long_first_steps(c2):
    @jit
    def search(data, start_point, directions, steps):
        oracle = oracle_of(data, 5.0, jnp.asarray(CENTER))

        def line_search(direction, step):
            def trial(search):
                point = solvers.evaluate(oracle, start_point.x + search.step * direction)
                return quasi_newton._narrow(search, start_point, direction, point, 1e-4, c2)

            start = quasi_newton._search(start_point, jnp.vdot(start_point.grad, direction), step)
            return jax.lax.while_loop(lambda search: ~search.done & (search.count < 20), trial, start)

        return jax.vmap(line_search)(directions, steps)

    for kind, data in PROBLEMS.items():
        start_point = solvers.Point(jnp.asarray(CENTER), *_value_and_grad(data, jnp.asarray(CENTER)))
        noise = np.random.default_rng(2).standard_normal((6, D)) * np.linalg.norm(start_point.grad) / 4
        directions = -start_point.grad[None] + jnp.asarray(noise)
        directions = directions * -jnp.sign(directions @ start_point.grad)[:, None]
        slope = directions @ start_point.grad
        accepted = search(data, start_point, directions, jnp.array([1e-4, 1e-2, 1.0, 10.0, 1e3, 1e6]))
        point, step = accepted.point, accepted.step
        assert np.all(accepted.done), kind
        assert np.all(point.value <= start_point.value + 1e-4 * step * slope)
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
