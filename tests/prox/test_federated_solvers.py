"""Inner solvers for networks: NumPy oracles step by step, and the conventions of FedAdam."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from commjax.prox import solvers
from commjax.prox.solvers import adaptive, federated
from commjax.prox.solvers.base import OUT_OF_BUDGET, Oracle
from tests.prox.federated_solvers_cases import (
    APART,
    CENTER,
    MEAN,
    OPTIMUM,
    OWN,
    WEIGHTS,
    A,
    D,
    M,
    fed_adam_by_hand,
    jit,
    local_grads,
    oracle_of,
    run,
    unravel,
)

pytestmark = pytest.mark.long


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
    """cos(pi x) falls ever more steeply from 0.05 to 0.5: the start has the smallest gradient, and every round has to
    leave it."""

    def value_and_grad(x):
        return jnp.sum(jnp.cos(jnp.pi * x)), -jnp.pi * jnp.sin(jnp.pi * x)

    local = solvers.LocalOracle(jax.vmap(value_and_grad), lambda rows: jnp.zeros((1, D, D)), jnp.ones(1))
    oracle, start = Oracle(value_and_grad, None, local), jnp.full(D, 0.05)
    results = jit(lambda x: {name: solver(oracle, x, 1, 0.0) for name, solver in GENTLE.items()})(start)
    for name, result in results.items():
        assert np.all(result.params > start) and np.all(result.params < 0.5), name
        assert float(result.residual) > float(jnp.linalg.norm(value_and_grad(start)[1])), name


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
    unit, other = (adaptive.apollo(c * 0.3, sigma=c * 0.5, eps=1e-12) for c in (1.0, 4.0))
    oracle, x = oracle_of(APART), jnp.asarray(CENTER)
    walks = jit(lambda x: [solver(oracle, x, 6, 0.0).params for solver in (unit, other)])(x)
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
    default, zero, unit = jit(lambda x: [solver(oracle, x, 3, 0.0).params for solver in makers])(x)
    np.testing.assert_allclose(default, zero, rtol=1e-14)
    assert np.abs(default - unit).max() > 1e-3


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
