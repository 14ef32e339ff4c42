"""Inner solvers for networks: NumPy oracles step by step, known limits, exact counts, conventions of FedAdam, breakdowns, bad input."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree

from commjax.problems import quadratic
from commjax.prox import cohort, solvers
from commjax.prox.solvers import adaptive, federated
from commjax.prox.solvers.base import BROKE_DOWN, CONVERGED, OUT_OF_BUDGET, Oracle

jit = jax.jit

M, D, GAMMA = 3, 4, 5.0
WEIGHTS = np.array([0.5, 0.2, 0.3])
CENTER = np.array([1.0, -2.0, 0.5, 3.0])
APART = quadratic.random(0, M, D, mu=0.5, L=2.0)
TOGETHER = jax.tree.map(lambda leaf: np.repeat(leaf[:1], M, 0), APART)
_rng = np.random.default_rng(1)
LOGISTIC = (_rng.standard_normal((M, 6, D)), np.sign(_rng.standard_normal((M, 6))))
_, unravel = ravel_pytree({"a": jnp.zeros(1), "b": jnp.zeros(D - 1)})

SOLVERS = {
    "adam": lambda: adaptive.adam(0.05),
    "fed_opt": lambda: federated.fed_opt(3, 0.2, optax.sgd(1.0)),
    "fed_adam": lambda: federated.fed_adam(2, 0.1, 0.5),
    "fed_adam_adam": lambda: federated.fed_adam(2, 0.1, 0.5, local=optax.scale_by_adam()),
    "fed_adam_adagrad": lambda: federated.fed_adam(2, 0.1, 0.5, local=optax.scale_by_rss()),
    "fed_adagrad": lambda: federated.fed_adagrad(2, 0.1, 0.5),
    "mime": lambda: federated.mime(3, 0.2),
    "mime_lite": lambda: federated.mime_lite(3, 0.2),
    "fed_speed": lambda: federated.fed_speed(10, 0.1, 1.0, rho=0.1),
    "fed_speed_plain": lambda: federated.fed_speed(10, 0.1, 1.0, rho=0.1, alpha=0.0),
    "fed_lamb": lambda: federated.fed_lamb(2, 0.03, unravel),
    "apollo": lambda: adaptive.apollo(0.4),
    "oasis": lambda: adaptive.oasis(),
}
LOCAL = [name for name in SOLVERS if name not in ("adam", "apollo", "oasis")]
each = pytest.mark.parametrize("name", SOLVERS)


class Data(NamedTuple):
    """A quadratic, a logistic loss and a wall behind which F is NaN: one program for all tests."""

    H: Any
    c: Any
    features: Any = LOGISTIC[0]
    labels: Any = LOGISTIC[1]
    share: Any = np.zeros(M)  # of the logistic loss
    wall: Any = np.full(M, np.inf)  # F is NaN where x_0 >= wall


def _loss(x, data):
    fit = jnp.mean(jnp.logaddexp(jnp.zeros((), x.dtype), -data.labels * (data.features @ x))) + jnp.vdot(x, x) / 4
    value = (x - data.c) @ data.H @ (x - data.c) / 2 + data.share * fit
    return jnp.where(x[0] < data.wall, 1.0, jnp.nan) * value


def oracle_of(data, center=CENTER):
    data = jax.tree.map(jnp.asarray, Data(*data))
    weights = jnp.asarray(WEIGHTS, data.H.dtype)
    return cohort.prox_oracle(
        _loss, lambda x: x, cohort.Cohort(data, weights), jnp.asarray(center, data.H.dtype), GAMMA
    )


@functools.partial(jit, static_argnums=0)
def _solve(name, data, center, budget, tolerance):
    return SOLVERS[name]()(oracle_of(data, center), center, budget, tolerance)


def run(name, data=APART, budget=2000, tolerance=1e-6, center=CENTER):
    """Everything but the solver is traced, so that each is compiled once."""
    arrays = jax.tree.map(jnp.asarray, Data(*data))
    return _solve(name, arrays, jnp.asarray(center), jnp.asarray(budget), jnp.asarray(tolerance))


A = APART.H + np.eye(D) / GAMMA  # F_i is a quadratic again, with Hessian A_i and minimiser OWN_i
OWN = np.stack([np.linalg.solve(a, h @ c + CENTER / GAMMA) for a, h, c in zip(A, APART.H, APART.c)])
MEAN = np.einsum("i,ijk->jk", WEIGHTS, A)
OPTIMUM = np.linalg.solve(MEAN, np.einsum("i,ijk,ik->j", WEIGHTS, A, OWN))


def local_grads(rows):
    return np.einsum("ijk,ik->ij", A, rows - OWN)


def grad(x):
    return MEAN @ (x - OPTIMUM)


def assert_walks(name, x_after, solver=None):
    """The solver returns x_K of the oracle `x_after(K)`, for every K, whether |grad F| fell or not."""
    other = jit(lambda budget: solver(oracle_of(APART), jnp.asarray(CENTER), budget, 0.0))
    for budget in range(1, 6):
        last = x_after(budget)
        result = run(name, budget=budget, tolerance=0.0) if solver is None else other(budget)
        np.testing.assert_allclose(result.params, last, rtol=1e-9, atol=1e-12)
        assert float(result.residual) == pytest.approx(np.linalg.norm(grad(last)), rel=1e-8)
        assert np.linalg.norm(last - CENTER) > 0.001  # it moved


GENTLE = {
    "adam": adaptive.adam(0.01),
    "fed_opt": federated.fed_opt(1, 0.01, optax.sgd(1.0)),
    "fed_adam": federated.fed_adam(2, 0.01, 0.02),
    "fed_adam_adagrad": federated.fed_adam(2, 0.01, 0.02, local=optax.scale_by_rss()),
    "fed_adagrad": federated.fed_adagrad(2, 0.01, 0.02),
    "mime": federated.mime(1, 0.01),
    "mime_lite": federated.mime_lite(1, 0.01),
    "fed_speed": federated.fed_speed(3, 0.01, 1.0),
    "fed_lamb": federated.fed_lamb(2, 0.03, unravel),
    "apollo": adaptive.apollo(0.01),
    "oasis": adaptive.oasis(0.01),
}


def test_a_gradient_that_grows_first_does_not_freeze_the_solvers_of_networks():
    """cos(pi x) falls ever more steeply from 0.05 to 0.5: the start has the smallest gradient, and every round has to leave it."""

    def value_and_grad(x):
        return jnp.sum(jnp.cos(jnp.pi * x)), -jnp.pi * jnp.sin(jnp.pi * x)

    local = solvers.LocalOracle(jax.vmap(value_and_grad), lambda rows: jnp.zeros((1, D, D)), jnp.ones(1))
    oracle, start = Oracle(value_and_grad, None, local), jnp.full(D, 0.05)
    found = jit(lambda x: {name: solver(oracle, x, 1, 0.0) for name, solver in GENTLE.items()})(start)
    for name, result in found.items():
        assert np.all(result.params > start) and np.all(result.params < 0.5), name
        assert float(result.residual) > float(jnp.linalg.norm(value_and_grad(start)[1])), name


def fed_adam_by_hand(rounds, local_steps, stepsize, rate, b1=0.9, b2=0.99, tau=1e-3):
    x, m, v = CENTER, np.zeros(D), np.full(D, tau**2)
    for _ in range(rounds):
        rows = np.tile(x, (M, 1))
        for _ in range(local_steps):
            rows = rows - stepsize * local_grads(rows)
        delta = WEIGHTS @ rows - x
        m, v = b1 * m + (1 - b1) * delta, b2 * v + (1 - b2) * delta**2
        x = x + rate * m / (np.sqrt(v) + tau)
    return x


def test_fed_adam_against_numpy():
    assert_walks("fed_adam", lambda rounds: fed_adam_by_hand(rounds, 2, 0.1, 0.5))


def test_fed_adagrad_against_numpy():
    def by_hand(rounds):
        x, v = CENTER, np.full(D, 1e-6)
        for _ in range(rounds):
            rows = np.tile(x, (M, 1))
            for _ in range(2):
                rows = rows - 0.1 * local_grads(rows)
            delta = WEIGHTS @ rows - x
            v = v + delta**2
            x = x + 0.5 * delta / (np.sqrt(v) + 1e-3)
        return x

    assert_walks("fed_adagrad", by_hand)


@pytest.mark.parametrize("name", ["fed_adam_adam", "fed_adam_adagrad"])
def test_local_adam_and_adagrad_start_afresh_in_each_round(name):
    def by_hand(rounds):
        x, m, v = CENTER, np.zeros(D), np.full(D, 1e-6)
        for _ in range(rounds):
            rows, first, second = np.tile(x, (M, 1)), np.zeros((M, D)), np.zeros((M, D))
            total = np.full((M, D), 0.1)
            for t in (1, 2):
                g = local_grads(rows)
                first, second, total = 0.9 * first + 0.1 * g, 0.999 * second + 0.001 * g**2, total + g**2
                adam = first / (1 - 0.9**t) / (np.sqrt(second / (1 - 0.999**t)) + 1e-8)
                rows = rows - 0.1 * (adam if name == "fed_adam_adam" else g / np.sqrt(total + 1e-7))
            delta = WEIGHTS @ rows - x
            m, v = 0.9 * m + 0.1 * delta, 0.99 * v + 0.01 * delta**2
            x = x + 0.5 * m / (np.sqrt(v) + 1e-3)
        return x

    assert_walks(name, by_hand)


@pytest.mark.parametrize("name", ["mime", "mime_lite"])
def test_mime_against_numpy(name):
    def by_hand(rounds):
        x, m, v = CENTER, np.zeros(D), grad(CENTER) ** 2
        for _ in range(rounds):
            rows, anchor = np.tile(x, (M, 1)), local_grads(np.tile(x, (M, 1)))
            for _ in range(3):
                g = local_grads(rows) + (grad(x) - anchor if name == "mime" else 0)
                rows = rows - 0.2 * (0.9 * m + 0.1 * g) / (np.sqrt(v) + 1e-3)
            m, v = 0.9 * m + 0.1 * grad(x), 0.99 * v + 0.01 * grad(x) ** 2
            x = WEIGHTS @ rows
        return x

    assert_walks(name, by_hand)


def test_mime_takes_a_given_first_accumulator():
    solver, oracle = federated.mime(1, 0.2, initial_accumulator=4.0), oracle_of(APART)
    first = jit(lambda x: solver(oracle, x, 1, 0.0))(jnp.asarray(CENTER))
    np.testing.assert_allclose(first.params, CENTER - 0.2 * 0.1 * grad(CENTER) / (2 + 1e-3), rtol=1e-10)


@pytest.mark.parametrize("alpha", [0.7, 0.0])
def test_fed_speed_against_numpy(alpha):
    rho, lam, stepsize = 0.1, 0.8, 0.15

    def by_hand(rounds):
        x, h = CENTER, np.zeros((M, D))
        for _ in range(rounds):
            rows = np.tile(x, (M, 1))
            for _ in range(3):
                g = local_grads(rows)
                quasi = (1 - alpha) * g + alpha * local_grads(rows + rho * g)
                rows = rows - stepsize * (quasi - h + (rows - x) / lam)
            h = h - (rows - x) / lam
            x = WEIGHTS @ (rows - lam * h)
        return x

    assert_walks("fed_speed", by_hand, federated.fed_speed(3, stepsize, lam, rho, alpha))


def test_fed_lamb_against_numpy():
    def by_hand(rounds):
        x, m, u = CENTER, np.zeros((M, D)), np.full(D, 1e-6)
        for _ in range(rounds):
            rows, v = np.tile(x, (M, 1)), np.tile(u, (M, 1))
            for _ in range(2):
                g = local_grads(rows)
                m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g**2
                p, new = m / (np.sqrt(u) + 1e-6), rows.copy()
                for layer in (slice(0, 1), slice(1, D)):
                    ratio = np.linalg.norm(rows[:, layer], axis=1) / np.linalg.norm(p[:, layer], axis=1)
                    new[:, layer] -= 0.03 * ratio[:, None] * p[:, layer]
                rows = new
            x, u = WEIGHTS @ rows, np.maximum(u, WEIGHTS @ v)
        return x

    assert_walks("fed_lamb", by_hand)


def apollo_by_hand(steps, rate, sigma=1.0, b=0.9, eps=1e-4):
    x, m, d, B = CENTER, np.zeros(D), np.zeros(D), np.zeros(D)
    for t in range(1, steps + 1):
        new = (b * (1 - b ** (t - 1)) * m + (1 - b) * grad(x)) / (1 - b**t)
        a = (d @ (new - m) + d @ (B * d)) / (np.sum(d**4) ** 0.25 + eps) ** 4
        B, m = B - a * d**2, new
        d = m / np.maximum(np.abs(B), sigma)
        x = x - rate * d
    return x


def test_apollo_against_numpy():
    assert_walks("apollo", lambda steps: apollo_by_hand(steps, 0.4))
    # B matters: with a small sigma some coordinates are above it.
    assert_walks("apollo", lambda steps: apollo_by_hand(steps, 0.05, 0.1), adaptive.apollo(0.05, sigma=0.1))


def test_only_the_quotient_of_apollos_rate_and_sigma_matters():
    one, other = (adaptive.apollo(c * 0.3, sigma=c * 0.5, eps=1e-12) for c in (1.0, 4.0))
    oracle, x = oracle_of(APART), jnp.asarray(CENTER)
    walks = jit(lambda x: [solver(oracle, x, 6, 0.0).params for solver in (one, other)])(x)
    np.testing.assert_allclose(*walks, rtol=1e-8)


@pytest.mark.parametrize("b1, adapts", [(0.0, True), (0.9, False)])
def test_oasis_against_numpy(b1, adapts):
    key = jax.random.key(7)
    draw = jit(lambda key: jax.random.rademacher(key, (D,), jnp.float64))
    first = np.stack([draw(k) for k in jax.random.split(jax.random.fold_in(key, 0), 4)])
    later = [np.asarray(draw(jax.random.fold_in(key, k + 1))) for k in range(5)]

    def by_hand(steps):
        diagonal, m, step = np.mean(first * (first @ MEAN), 0), np.zeros(D), 0.2
        x, last, growth = CENTER, None, np.inf
        for k in range(steps):
            scale = np.maximum(np.abs(diagonal), 1e-5)
            following = step
            if last is not None and adapts:
                moved, turned = x - last, grad(x) - grad(last)
                smooth = np.sqrt(np.sum(scale * moved**2)) / (2 * np.sqrt(np.sum(turned**2 / scale)))
                following = min(np.sqrt(1 + growth) * step, smooth)
            if last is not None:
                growth = following / step
            step, m = following, b1 * m + (1 - b1) * grad(x)
            last, x = x, x - step * m / scale
            diagonal = 0.8 * diagonal + 0.2 * later[k] * (MEAN @ later[k])
        return x

    assert_walks("oasis", by_hand, adaptive.oasis(0.2, b1, 0.8, adaptive=adapts, samples=4, seed=7))


def test_oasis_draws_from_seed_zero_unless_told():
    oracle, x = oracle_of(APART), jnp.asarray(CENTER)
    makers = adaptive.oasis(samples=1), adaptive.oasis(samples=1, seed=0), adaptive.oasis(samples=1, seed=1)
    default, zero, one = jit(lambda x: [solver(oracle, x, 3, 0.0).params for solver in makers])(x)
    np.testing.assert_allclose(default, zero, rtol=1e-14)
    assert np.abs(default - one).max() > 1e-3


def test_fed_opt_walks_to_the_fixed_point_of_its_local_steps_not_to_the_prox():
    powers = np.stack([np.linalg.matrix_power(np.eye(D) - 0.2 * a, 3) for a in A])

    def by_hand(rounds):
        x = CENTER
        for _ in range(rounds):
            x = WEIGHTS @ (OWN + np.einsum("ijk,ik->ij", powers, x - OWN))
        return x

    assert_walks("fed_opt", by_hand)
    fixed = by_hand(300)
    assert np.linalg.norm(fixed - OPTIMUM) > 1e-3
    far = run("fed_opt", budget=300)
    assert int(far.code) == OUT_OF_BUDGET
    np.testing.assert_allclose(far.params, fixed, rtol=1e-9)


def test_one_local_step_and_a_unit_server_is_gradient_descent():
    oracle, x = oracle_of(APART), jnp.asarray(CENTER)
    pair = federated.fed_opt(1, 0.3, optax.sgd(1.0)), solvers.gradient_descent(1 / 0.3)
    walks = jit(lambda x: [solver(oracle, x, 5, 0.0).params for solver in pair])(x)
    np.testing.assert_allclose(*walks, rtol=1e-10)


@pytest.mark.parametrize("epsilon", ["outside", "inside", "uncorrected"])
def test_the_conventions_of_fed_adam(epsilon):
    """Two are Optax's; the third has the correction outside of everything."""
    options = {"bias_correction": True, "initial_accumulator": 0.0, "epsilon": epsilon}
    ours = federated.fed_adam(2, 0.1, 0.5, 0.9, 0.99, 1e-2, **options)
    oracle, x = oracle_of(APART), jnp.asarray(CENTER)
    result = jit(lambda x: ours(oracle, x, 4, 0.0))(x)
    if epsilon != "uncorrected":
        server = optax.adam(
            0.5, 0.9, 0.99, **({"eps": 1e-2} if epsilon == "outside" else {"eps": 0.0, "eps_root": 1e-2})
        )
        theirs = jit(lambda x: federated.fed_opt(2, 0.1, server)(oracle, x, 4, 0.0))(x)
        np.testing.assert_allclose(result.params, theirs.params, rtol=1e-10)
        return
    x, m, v = CENTER, np.zeros(D), np.zeros(D)
    for t in range(1, 5):
        rows = np.tile(x, (M, 1))
        for _ in range(2):
            rows = rows - 0.1 * local_grads(rows)
        delta = WEIGHTS @ rows - x
        m, v = 0.9 * m + 0.1 * delta, 0.99 * v + 0.01 * delta**2
        x = x + 0.5 * np.sqrt(1 - 0.99**t) / (1 - 0.9**t) * m / (np.sqrt(v) + 1e-2)
    np.testing.assert_allclose(result.params, x, rtol=1e-10)


# What |grad F| each gets to, and how: exactly, or to a neighbourhood of its stepsize (clients apart: of their disagreement too).
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
    """The prox term alone has curvature 1/gamma: too much for a rate may end the run, and never gives what is not finite."""
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
        for solver in federated._VECTORS
    }
    gradient, model = (1, 1), (1, 2)
    assert prices == {
        **dict.fromkeys(("adam", "apollo", "mime"), gradient),  # Mime pays by its second evaluation
        **dict.fromkeys(("fed_opt", "fed_adam", "fed_adagrad", "fed_speed", "scaffnew"), model),
        **dict.fromkeys(("mime_lite", "oasis", "local_newton"), (2, 2)),
        "fed_lamb": (2, 3),
    }
    down = {solver.__name__ for solver in federated._VECTORS if federated.vectors_down(solver) != 1}
    assert down == {"mime_lite", "fed_lamb"}  # whose local steps read what the server has
