"""FLIX: the objective, gradient descent on it, what each client finds by itself, and what it deploys."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commjax.algorithms import flix
from commjax.core import local, rounds, runner
from commjax.problems import quadratic

N, D = 5, 4
PROBLEM = quadratic.random(3, N, D, mu=0.3, L=2.0)
DATA = jax.tree.map(jnp.asarray, PROBLEM)
L = np.linalg.eigvalsh(PROBLEM.H)[:, -1]
ALPHA = np.array([0.5, 1.0, 0.0, 0.8, 0.35])
IDS, KEY = jnp.arange(N), jax.random.key(2)
START, OPTIMUM = jnp.linspace(-1.0, 2.0, D), jnp.asarray(PROBLEM.c)
value_and_grad = jax.value_and_grad(quadratic.loss)


def gradients(models):
    return np.einsum("nij,nj->ni", PROBLEM.H, models - PROBLEM.c)


def mixed_gradients(alpha, x):
    a = np.broadcast_to(alpha, (N,))[:, None]
    return a * gradients(a * x + (1 - a) * PROBLEM.c)


def run(algorithm, hparams, rounds, **per_client):
    start = algorithm.init(START, IDS, **per_client)
    return runner.run(KEY, algorithm, hparams, start, DATA, rounds)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_the_gradient_is_that_of_the_mixture_by_automatic_differentiation(alpha):
    def loss(params, data):
        return jnp.sum(jax.nn.softplus(data * params["w"])) + jnp.sum(params["b"] ** 4)

    rng = np.random.default_rng(0)
    params, optimum = ({"w": jnp.asarray(row[:3]), "b": jnp.asarray(row[3:])} for row in rng.standard_normal((2, 5)))
    data = jnp.asarray(rng.standard_normal(3))

    def mixed(params):
        return loss(jax.tree.map(lambda x, y: alpha * x + (1 - alpha) * y, params, optimum), data)

    value, grad = flix.objective(jax.value_and_grad(loss))(alpha, params, optimum, data)
    wanted, slope = jax.value_and_grad(mixed)(params)
    np.testing.assert_allclose(value, wanted, rtol=1e-13)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14), grad, slope)


def test_gradient_descent_reaches_the_closed_form_minimiser():
    hparams = flix.theoretical(L, ALPHA)
    state, metrics = run(flix.flix(value_and_grad), hparams, 400, optimum=OPTIMUM)
    weights = ALPHA**2
    best = np.linalg.solve(np.einsum("n,nij->ij", weights, PROBLEM.H), np.einsum("n,nij,nj->i", weights, *PROBLEM))
    np.testing.assert_allclose(state.server.params, best, atol=1e-11)
    assert (metrics.bits_up == 64 * D).all() and (metrics.bits_down == 64 * D).all()
    assert np.all(np.diff(metrics.loss) <= 1e-15)


@pytest.mark.parametrize("alpha", [ALPHA, 0.7], ids=["one each", "one for all"])
def test_the_steps_are_those_of_numpy_and_the_loss_is_that_at_the_start_of_the_round(alpha):
    state, metrics = run(flix.flix(value_and_grad), flix.HParams(0.4, alpha), 7, optimum=OPTIMUM)
    x, losses = np.array(START), []
    a = np.broadcast_to(alpha, (N,))[:, None]
    for _ in range(7):
        models = a * x + (1 - a) * PROBLEM.c
        losses.append(np.mean(np.sum((models - PROBLEM.c) * gradients(models), axis=1)) / 2)
        x = x - 0.4 * mixed_gradients(alpha, x).mean(0)
    np.testing.assert_allclose(state.server.params, x, rtol=1e-12)
    np.testing.assert_allclose(metrics.loss, losses, rtol=1e-12)


def test_a_cohort_takes_the_mean_over_its_members_and_pays_for_them():
    tau = 2
    algorithm = flix.flix(value_and_grad, cohort=tau)
    state = algorithm.init(START, IDS, optimum=OPTIMUM)
    for t in range(4):
        key = jax.random.fold_in(jax.random.fold_in(KEY, t), N)
        member = np.asarray(rounds.cohort_members(key, IDS, N, tau))
        x = np.asarray(state.server.params)
        state, metrics = algorithm.step(KEY, flix.HParams(0.4, ALPHA), state, DATA)
        wanted = x - 0.4 * mixed_gradients(ALPHA, x)[member].mean(0)
        np.testing.assert_allclose(state.server.params, wanted, rtol=1e-12)
        assert metrics.bits_up == metrics.bits_down == tau / N * 64 * D


def test_with_alpha_1_it_is_gradient_descent():
    state, _ = run(flix.flix(value_and_grad), flix.theoretical(L, 1.0), 10, optimum=jnp.full((N, D), 1e3))
    x = np.array(START)
    for _ in range(10):
        x = x - gradients(np.tile(x, (N, 1))).mean(0) / L.mean()
    np.testing.assert_allclose(state.server.params, x, rtol=1e-10)


def test_stochastic_gradients_reach_the_same_point_on_average():
    rng = np.random.default_rng(4)
    data = jnp.asarray(rng.standard_normal((N, 6, 2)))  # f_i(x) = mean over rows of |x - row|^2 / 2

    def loss(x, rows):
        return jnp.mean(jnp.sum((x[None] - rows) ** 2, axis=-1)) / 2

    algorithm = flix.flix(jax.value_and_grad(loss), local.minibatch(1))
    optimum = data.mean(1)
    start = algorithm.init(jnp.zeros(2), IDS, optimum=optimum)
    hparams = runner.stack([flix.HParams(0.5, 0.5)])
    states, _ = runner.sweep(jax.random.split(KEY, 400), algorithm, hparams, start, data, 10)
    found = np.asarray(states.server.params)[0]
    exact = (1 - (1 - 0.5 * 0.25) ** 10) * np.asarray(optimum.mean(0))
    np.testing.assert_allclose(found.mean(0), exact, atol=5 * found.std() / 20)
    assert found.std(axis=0).min() > 0.01


def test_the_stepsize_has_alpha_squared():
    gamma, alpha = flix.theoretical(L, ALPHA)
    assert gamma == pytest.approx(1 / np.mean(ALPHA**2 * L)) and alpha is not None
    assert flix.theoretical(L, 0.5) == pytest.approx((4 / L.mean(), 0.5))


def test_alpha_0_for_all_leaves_nothing_to_minimise():
    for alpha in (0.0, np.zeros(N)):
        with pytest.raises(ValueError, match="at least one alpha_i L_i > 0"):
            flix.theoretical(L, alpha)
    for alpha in (-0.5, np.full(N, 1.5), np.nan):
        with pytest.raises(ValueError, match=r"allowed: one number in \[0, 1\]"):
            flix.theoretical(L, alpha)


def test_local_optima_are_found_in_as_many_steps_as_gradient_descent_in_numpy():
    tolerance = 1e-6
    found = flix.local_optima(value_and_grad, START, DATA, L, tolerance=tolerance)
    assert found.converged.all() and (found.gradient_norm <= tolerance).all()
    for i in range(N):
        x, count = np.array(START), 0
        while np.linalg.norm(grad := PROBLEM.H[i] @ (x - PROBLEM.c[i])) > tolerance:
            x, count = x - grad / L[i], count + 1
        assert found.iterations[i] == count > 3
        np.testing.assert_allclose(found.params[i], x, rtol=1e-10)
        np.testing.assert_allclose(found.gradient_norm[i], np.linalg.norm(grad), rtol=1e-6)
        np.testing.assert_allclose(found.params[i], PROBLEM.c[i], atol=1e-5)
    assert len(set(found.iterations.tolist())) > 1
    np.testing.assert_allclose(found.gradient_norm, np.linalg.norm(gradients(np.asarray(found.params)), axis=1))


def test_a_client_that_did_not_arrive_is_reported():
    found = flix.local_optima(value_and_grad, START, DATA, L, max_iterations=5)
    assert found.iterations.tolist() == [5] * N and not found.converged.any() and (found.gradient_norm > 1e-6).all()
    here = flix.local_optima(value_and_grad, OPTIMUM[1], DATA, float(L.max()), max_iterations=0)
    assert here.converged.tolist() == [i == 1 for i in range(N)] and not here.iterations.any()
    np.testing.assert_array_equal(here.params, jnp.tile(OPTIMUM[1], (N, 1)))


@pytest.mark.parametrize("bad", [{"tolerance": 0.0}, {"tolerance": -1.0}, {"max_iterations": -1}])
def test_a_tolerance_or_a_number_of_iterations_that_cannot_be_is_refused(bad):
    with pytest.raises(ValueError, match=r"allowed: > 0 and >= 0"):
        flix.local_optima(value_and_grad, START, DATA, L, **bad)


def test_local_sgd_is_the_same_in_parallel_and_one_by_one_and_each_client_has_its_client_key():
    rows = jnp.asarray(np.random.default_rng(5).standard_normal((N, 6, D)))

    def loss(x, batch):
        return jnp.mean(jnp.sum((x[None] - batch) ** 2, axis=-1)) / 2

    how = {"stepsize": 0.3, "steps": 4, "sample": local.minibatch(2)}
    found = flix.local_sgd(KEY, jax.value_and_grad(loss), START, rows, **how)
    parallel = flix.local_sgd(KEY, jax.value_and_grad(loss), START, rows, over=jax.vmap, **how)
    np.testing.assert_allclose(found, parallel, rtol=1e-13)
    for i in range(N):
        x = START
        for t in range(4):
            key = jax.random.fold_in(jax.random.fold_in(KEY, i), t)
            x = x - 0.3 * (x - local.minibatch(2)(key, rows[i]).mean(0))
        np.testing.assert_allclose(found[i], x, rtol=1e-12)


def test_what_the_clients_deploy_is_their_mixture_also_for_some_of_them():
    algorithm = flix.flix(value_and_grad)
    order = jnp.array([4, 0, 3, 1, 2])
    state = algorithm.init(START, order, optimum=OPTIMUM[order])
    hparams = flix.HParams(0.1, ALPHA)
    wanted = ALPHA[:, None] * np.asarray(START) + (1 - ALPHA)[:, None] * PROBLEM.c
    np.testing.assert_allclose(flix.personalized(hparams, state), wanted[np.asarray(order)], rtol=1e-14)
    some = flix.personalized(hparams, state, jnp.array([2, 0]))
    np.testing.assert_allclose(some, wanted[[3, 4]], rtol=1e-14)
    np.testing.assert_allclose(
        flix.personalized(flix.HParams(0.1, 0.25), state)[0], 0.25 * START + 0.75 * OPTIMUM[4], rtol=1e-14
    )


def test_a_missing_or_misshapen_optimum_is_refused():
    algorithm = flix.flix(value_and_grad)
    with pytest.raises(ValueError, match="init needs optimum="):
        algorithm.init(START, IDS)
    for wrong in (OPTIMUM[:-1], OPTIMUM[:, :-1], [OPTIMUM]):
        with pytest.raises(ValueError, match=f"one row of the params for each of {N} clients"):
            algorithm.init(START, IDS, optimum=wrong)
