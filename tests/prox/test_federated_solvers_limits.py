"""Inner solvers for networks: known limits, exact counts, traced budgets, breakdowns, bad input, prices."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from commjax.prox import cohort, solvers
from commjax.prox.solvers import adaptive, federated
from commjax.prox.solvers.base import BROKE_DOWN, CONVERGED, OUT_OF_BUDGET, Oracle
from tests.prox.federated_solvers_cases import (
    APART,
    CENTER,
    GAMMA,
    OPTIMUM,
    SOLVERS,
    WEIGHTS,
    D,
    Data,
    M,
    _loss,
    _solve,
    fed_adam_by_hand,
    jit,
    oracle_of,
    run,
    unravel,
)

pytestmark = pytest.mark.long

TOGETHER = jax.tree.map(lambda leaf: np.repeat(leaf[:1], M, 0), APART)
LOCAL = [name for name in SOLVERS if name not in ("adam", "apollo", "oasis")]
each = pytest.mark.parametrize("name", SOLVERS)


# What |grad F| each gets to, and how: exactly, or to a neighbourhood of its stepsize (clients apart: of their
# disagreement too).
LIMITS = {"fed_lamb": 0.3, "adam": 1e-3, "fed_adam_adam": 0.3}


@each
def test_clients_that_agree_leave_only_the_neighbourhood_of_the_stepsize(name):
    limit = LIMITS.get(name, 1e-3 if "adam" in name else 1e-6)
    result = run(name, TOGETHER, tolerance=limit)
    assert int(result.code) == CONVERGED and float(result.residual) <= limit
    H = TOGETHER.H[0] + np.eye(D) / GAMMA
    target = np.linalg.solve(H, TOGETHER.H[0] @ TOGETHER.c[0] + CENTER / GAMMA)
    assert np.linalg.norm(result.params - target) <= limit / 0.7


@pytest.mark.parametrize("name", ["adam", "mime", "fed_speed_plain", "apollo", "oasis"])
def test_methods_without_client_drift_reach_the_prox_of_clients_that_differ(name):
    limit = LIMITS.get(name, 1e-6)
    result = run(name, tolerance=limit)
    assert int(result.code) == CONVERGED
    np.testing.assert_allclose(result.params, OPTIMUM, atol=limit / 0.7)


def test_every_method_approaches_the_prox_of_a_logistic_loss():
    data = Data(0 * APART.H, APART.c, share=np.ones(M))
    oracle = oracle_of(data)
    exact = jit(lambda x: solvers.aicn()(oracle, x, 50, 1e-9))(jnp.asarray(CENTER))
    gradient = jit(lambda x: oracle.value_and_grad(x)[1])
    assert int(exact.code) == CONVERGED
    for name in SOLVERS:
        result = run(name, data, 60, 0.0)
        assert np.linalg.norm(result.params - exact.params) < np.linalg.norm(CENTER - exact.params) / 3, name
        assert float(result.residual) == pytest.approx(np.linalg.norm(gradient(result.params)), rel=1e-6)


@each
def test_counts_are_exact_and_a_start_at_the_optimum_costs_one_evaluation(name):
    for budget in (0, 4):
        result = run(name, budget=budget, tolerance=0.0)
        aggregations = 2 if name == "mime" else 1
        assert (int(result.iterations), int(result.evaluations)) == (budget, 1 + aggregations * budget)
        assert (int(result.gradients), int(result.values)) == (1 + budget, 0)
        assert int(result.code) == OUT_OF_BUDGET
    zero = np.zeros(D)
    result = run(name, APART._replace(c=0 * APART.c), 4, 0.0, center=zero)
    assert (int(result.iterations), int(result.evaluations), int(result.code)) == (0, 1, CONVERGED)
    np.testing.assert_array_equal(result.params, zero)


@pytest.mark.parametrize("name, local", [("fed_adam", 2), ("mime", 4), ("oasis", 0)])
def test_the_cohort_is_asked_as_often_as_counted(name, local):
    """Points of F: one an iteration and the start (for Mime, whose other aggregation is of models, too)."""
    points, rounds = set(), []
    oracle = oracle_of(APART)

    def counted(x):
        jax.debug.callback(lambda x: points.add(tuple(map(float, x))), x)
        return oracle.value_and_grad(x)

    def counted_local(rows):
        jax.debug.callback(lambda: rounds.append(1))
        return oracle.local.value_and_grad(rows)

    watched = Oracle(counted, None, oracle.local._replace(value_and_grad=counted_local))
    result = jax.block_until_ready(jit(lambda x: SOLVERS[name]()(watched, x, 3, 0.0))(jnp.asarray(CENTER)))
    jax.effects_barrier()
    assert len(points) == 4 and len(rounds) == 3 * local and int(result.iterations) == 3


def test_traced_budgets_and_tolerances_under_vmap_give_the_separate_runs(name="oasis"):
    budgets, tolerances = jnp.array([0, 3, 50]), jnp.array([0.0, 0.0, 0.5])
    solve = jit(jax.vmap(lambda b, t: SOLVERS[name]()(oracle_of(APART), jnp.asarray(CENTER), b, t)))
    together = solve(budgets, tolerances)
    for row, (budget, tolerance) in enumerate(zip(budgets, tolerances)):
        for mine, theirs in zip(run(name, budget=budget, tolerance=tolerance), together):
            np.testing.assert_allclose(mine, theirs[row], rtol=1e-9, atol=1e-12)


def test_stepsizes_and_steps_may_be_traced_so_that_a_grid_is_one_program():
    def solve(rate, steps):
        return federated.fed_adam(steps, rate / 5, rate)(oracle_of(APART), jnp.asarray(CENTER), 3, 0.0).params

    together = jit(jax.vmap(solve))(jnp.array([0.5, 0.2]), jnp.array([2, 5]))
    for row, (rate, steps) in zip(together, ((0.5, 2), (0.2, 5))):
        np.testing.assert_allclose(row, fed_adam_by_hand(3, steps, rate / 5, rate), rtol=1e-9)


@each
@pytest.mark.parametrize("dtype", [jnp.float64, jnp.float32])
def test_any_gamma_gives_finite_points(name, dtype):
    """The prox term alone has curvature 1/gamma: too much for a rate may end the run, and never gives what is not
    finite."""
    for gamma in (1e-3, 1e5):
        result = _at_gamma(name, jnp.asarray(gamma, dtype))
        assert np.all(np.isfinite(result.params)) and np.isfinite(result.residual)
        assert result.params.dtype == dtype


@functools.partial(jit, static_argnums=0)
def _at_gamma(name, gamma):
    data, weights, center = jax.tree.map(lambda leaf: jnp.asarray(leaf, gamma.dtype), (Data(*APART), WEIGHTS, CENTER))
    oracle = cohort.prox_oracle(_loss, lambda x: x, cohort.Cohort(data, weights), center, gamma)
    return SOLVERS[name]()(oracle, center, 20, 0.0)


@each
def test_float32_is_kept(name):
    data = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.float32), Data(*APART))
    shapes = jax.eval_shape(functools.partial(_solve.__wrapped__, name), data, jnp.asarray(CENTER, jnp.float32), 5, 0.0)
    assert shapes.params.dtype == shapes.residual.dtype == jnp.float32


@each
def test_an_objective_that_is_not_finite_ends_the_run_at_the_best_finite_point(name):
    H = np.tile(np.eye(D), (M, 1, 1))  # the minimum 3 lies behind the wall
    data = Data(H, np.full((M, D), 3.0), wall=np.full(M, 2.0))
    result = run(name, data, 300, center=np.ones(D))
    assert int(result.code) == BROKE_DOWN and int(result.iterations) < 300
    assert np.all(np.isfinite(result.params)) and result.params[0] < 2
    grad = result.params - 3 + (result.params - 1) / GAMMA
    assert float(result.residual) == pytest.approx(np.linalg.norm(grad)) and float(result.residual) <= 4.0


@pytest.mark.parametrize("name", LOCAL)
def test_without_local_objectives_there_is_an_error(name):
    with pytest.raises(ValueError, match=r"oracle\.local, got None"):
        SOLVERS[name]()(Oracle(lambda x: (jnp.vdot(x, x), 2 * x)), jnp.ones(D), 1, 0.0)


@pytest.mark.parametrize(
    "make, message",
    [
        (lambda: adaptive.adam(0.0), "learning_rate=0.0; allowed: positive"),
        (lambda: adaptive.adam(0.1, b1=1.0), "b1=1.0; allowed: 0 <= b1 < 1"),
        (lambda: federated.fed_opt(0, 0.1, optax.sgd(1.0)), "local_steps=0; allowed: positive"),
        (lambda: federated.fed_adam(1, 0.1, 0.1, eps=-1.0), "eps=-1.0; allowed: positive"),
        (lambda: federated.fed_adam(1, 0.1, 0.1, epsilon="under"), "epsilon='under'; allowed: one of outside, inside"),
        (lambda: federated.fed_adagrad(1, 0.1, -0.1), "learning_rate=-0.1"),
        (lambda: federated.mime(1, -1.0), "local_stepsize=-1.0"),
        (lambda: federated.mime_lite(1, 1.0, b2=-0.5), "b2=-0.5"),
        (lambda: federated.fed_speed(1, 0.1, 0.0), "lam=0.0; allowed: positive"),
        (lambda: federated.fed_speed(1, 0.1, 1.0, rho=-3.0), "rho=-3.0; allowed: at least 0"),
        (lambda: federated.fed_speed(1, 0.1, 1.0, alpha=7.0), "alpha=7.0; allowed: 0 <= alpha <= 1"),
        (lambda: federated.fed_lamb(-1, 0.1, unravel), "local_steps=-1"),
        (lambda: adaptive.apollo(0.1, sigma=0.0), "sigma=0.0"),
        (lambda: adaptive.oasis(samples=0), "samples=0; allowed: positive"),
        (lambda: federated.vectors_per_round(len), "allowed: local_newton, scaffnew, adam, fed_opt"),
    ],
)
def test_bad_arguments_are_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def test_every_solver_has_its_price():
    prices = {
        solver.__name__: (federated.vectors_per_round(solver), federated.vectors_per_round(solver, True))
        for solver in federated.vectors._VECTORS
    }
    gradient, model = (1, 1), (1, 2)
    assert prices == {
        **dict.fromkeys(("adam", "apollo", "mime"), gradient),  # Mime pays by its second evaluation
        **dict.fromkeys(("fed_opt", "fed_adam", "fed_adagrad", "fed_speed", "scaffnew"), model),
        **dict.fromkeys(("mime_lite", "oasis", "local_newton"), (2, 2)),
        "fed_lamb": (2, 3),
    }
    down = {solver.__name__ for solver in federated.vectors._VECTORS if federated.vectors_down(solver) != 1}
    assert down == {"mime_lite", "fed_lamb"}  # whose local steps read what the server has
