"""FedAvg, FedProx, Scaffold and Ditto against NumPy, with all clients and with cohorts; what each is a case of."""

from functools import cache

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commjax.algorithms import ditto, fedavg, fedprox, scaffold
from commjax.core import local, rounds
from commjax.problems import quadratic

N, D, STEPS = 5, 4, 3
PROBLEM = quadratic.random(1, N, D, mu=0.4, L=2.0)
DATA = jax.tree.map(jnp.asarray, PROBLEM)
BEST = quadratic.optimum(PROBLEM).params
IDS, KEY = jnp.arange(N), jax.random.key(4)
START = jnp.linspace(-1.0, 2.0, D)
value_and_grad = jax.value_and_grad(quadratic.loss)
each_cohort = pytest.mark.parametrize("cohort", [None, 3])
MAKERS = {"fedavg": fedavg.fedavg, "fedprox": fedprox.fedprox, "scaffold": scaffold.scaffold, "ditto": ditto.ditto}


@cache
def made(name, steps=STEPS, cohort=None):
    return MAKERS[name](value_and_grad, steps=steps, cohort=cohort)


stepper = cache(lambda algorithm: jax.jit(algorithm.step))


def trajectory(algorithm, hparams, rounds, data=DATA, **per_client):
    state, seen = algorithm.init(START, IDS, **per_client), []
    for _ in range(rounds):
        state, metrics = stepper(algorithm)(KEY, hparams, state, data)
        seen.append((state, metrics))
    return seen


def members(t, cohort):
    if cohort is None:
        return np.arange(N)
    key = jax.random.fold_in(jax.random.fold_in(KEY, t), N)
    return np.flatnonzero(rounds.cohort_members(key, IDS, N, cohort))


def trained(i, x, stepsize, correction=lambda model: 0.0):
    """STEPS local steps of client i from x"""
    model = x
    for _ in range(STEPS):
        model = model - stepsize * (PROBLEM.H[i] @ (model - PROBLEM.c[i]) + correction(model))
    return model


def loss(i, x):
    return (x - PROBLEM.c[i]) @ PROBLEM.H[i] @ (x - PROBLEM.c[i]) / 2


def check_metrics(metrics, S, x, floats=D):
    np.testing.assert_allclose(metrics.loss, np.mean([loss(i, x) for i in S]), rtol=1e-11)
    np.testing.assert_allclose([metrics.bits_up, metrics.bits_down], 64 * floats * len(S) / N, rtol=1e-14)


@each_cohort
@pytest.mark.parametrize("server", [1.0, 0.7])
def test_fedavg_follows_numpy(cohort, server):
    x = np.array(START)
    seen = trajectory(made("fedavg", cohort=cohort), fedavg.HParams(0.3, server), 5)
    for t, (state, metrics) in enumerate(seen):
        S = members(t, cohort)
        check_metrics(metrics, S, x)
        x = x + server * np.mean([trained(i, x, 0.3) - x for i in S], axis=0)
        np.testing.assert_allclose(state.server.params, x, rtol=1e-11)
        assert state.server.round == t + 1


@each_cohort
def test_fedprox_follows_numpy(cohort):
    x, mu = np.array(START), 0.8
    seen = trajectory(made("fedprox", cohort=cohort), fedprox.HParams(0.3, mu, 0.9), 5)
    for t, (state, metrics) in enumerate(seen):
        S = members(t, cohort)
        check_metrics(metrics, S, x)
        moves = [trained(i, x, 0.3, lambda model, x=x: mu * (model - x)) - x for i in S]
        x = x + 0.9 * np.mean(moves, axis=0)
        np.testing.assert_allclose(state.server.params, x, rtol=1e-11)


@each_cohort
def test_scaffold_follows_numpy(cohort):
    x, stepsize = np.array(START), 0.2
    h = np.random.default_rng(0).standard_normal((N, D))
    c = h.mean(0)
    seen = trajectory(made("scaffold", cohort=cohort), scaffold.HParams(stepsize, 0.8), 5, shift=jnp.asarray(h))
    for t, (state, metrics) in enumerate(seen):
        S = members(t, cohort)
        check_metrics(metrics, S, x, floats=2 * D)
        models = {i: trained(i, x, stepsize, lambda model, i=i, c=c, h=h: c - h[i]) for i in S}
        fresh = {i: h[i] - c + (x - models[i]) / (STEPS * stepsize) for i in S}
        x_new = x + 0.8 * np.mean([models[i] - x for i in S], axis=0)
        c = c + len(S) / N * np.mean([fresh[i] - h[i] for i in S], axis=0)
        h = np.array([fresh.get(i, h[i]) for i in range(N)])
        x = x_new
        np.testing.assert_allclose(state.server.params, x, rtol=1e-11)
        np.testing.assert_allclose(state.server.shift, c, rtol=1e-10, atol=1e-12)
        np.testing.assert_allclose(state.clients.shift, h, rtol=1e-10, atol=1e-12)


@each_cohort
def test_ditto_follows_numpy_and_its_global_model_is_fedavg(cohort):
    x, lam = np.array(START), 0.6
    v = np.tile(x, (N, 1))
    seen = trajectory(made("ditto", cohort=cohort), ditto.HParams(0.3, 0.2, lam, 0.9), 5)
    plain = trajectory(made("fedavg", cohort=cohort), fedavg.HParams(0.3, 0.9), 5)
    for t, (state, metrics) in enumerate(seen):
        S = members(t, cohort)
        check_metrics(metrics, S, x)
        for i in S:
            v[i] = trained(i, v[i], 0.2, lambda model, x=x: lam * (model - x))
        x = x + 0.9 * np.mean([trained(i, x, 0.3) - x for i in S], axis=0)
        np.testing.assert_allclose(state.server.params, x, rtol=1e-11)
        np.testing.assert_allclose(state.clients.model, v, rtol=1e-11)
        np.testing.assert_allclose(plain[t][0].server.params, state.server.params, rtol=1e-12)


def test_dittos_personal_models_are_local_without_the_pull_and_may_be_given():
    own = jnp.asarray(np.random.default_rng(2).standard_normal((N, D)))
    state, _ = trajectory(made("ditto"), ditto.HParams(0.3, 0.4, 0.0), 60, model=own)[-1]
    np.testing.assert_allclose(state.clients.model, PROBLEM.c, atol=1e-8)
    first, _ = trajectory(made("ditto"), ditto.HParams(0.3, 0.4, 0.0), 1, model=own)[0]
    np.testing.assert_allclose(first.clients.model[2], trained(2, np.asarray(own[2]), 0.4), rtol=1e-12)


@each_cohort
def test_fedprox_without_a_pull_is_fedavg(cohort):
    one = trajectory(made("fedprox", cohort=cohort), fedprox.HParams(0.3, 0.0), 4)
    two = trajectory(made("fedavg", cohort=cohort), fedavg.HParams(0.3), 4)
    chex.assert_trees_all_close(one, two, rtol=1e-12)


def test_one_step_of_fedavg_is_gradient_descent():
    state, _ = trajectory(made("fedavg", steps=1), fedavg.HParams(0.3), 6)[-1]
    x = np.array(START)
    for _ in range(6):
        x = x - 0.3 * np.mean([PROBLEM.H[i] @ (x - PROBLEM.c[i]) for i in range(N)], axis=0)
    np.testing.assert_allclose(state.server.params, x, rtol=1e-12)


def test_the_server_halves_its_step_where_it_is_told_to():
    whole, half = (trajectory(made("fedavg"), fedavg.HParams(0.3, s), 1)[0][0].server.params for s in (1.0, 0.5))
    np.testing.assert_allclose(half - START, (whole - START) / 2, rtol=1e-12)


@pytest.mark.parametrize("cohort", [None, 2])
def test_scaffold_keeps_the_mean_of_its_shifts_and_reaches_the_optimum_where_fedavg_does_not(cohort):
    seen = trajectory(made("scaffold", cohort=cohort), scaffold.HParams(0.1), 1500)
    for state, _ in seen[::100]:
        np.testing.assert_allclose(state.server.shift, np.mean(state.clients.shift, axis=0), atol=1e-13)
    np.testing.assert_allclose(seen[-1][0].server.params, BEST, atol=1e-9)
    plain = trajectory(made("fedavg", cohort=cohort), fedavg.HParams(0.1), 1500)[-1][0].server.params
    assert np.abs(plain - BEST).max() > 1e-3


def test_fedavg_stops_where_the_mean_of_the_local_ways_is_0():
    x = np.asarray(trajectory(made("fedavg"), fedavg.HParams(0.3), 400)[-1][0].server.params)
    np.testing.assert_allclose(np.mean([trained(i, x, 0.3) for i in range(N)], axis=0), x, atol=1e-12)
    assert np.abs(x - BEST).max() > 1e-3


def test_twice_as_many_numbers_travel_in_scaffold_and_none_of_dittos_personal_models():
    bits = {}
    hparams = {
        "fedavg": fedavg.HParams(0.1),
        "fedprox": fedprox.HParams(0.1, 0.1),
        "scaffold": scaffold.HParams(0.1),
        "ditto": ditto.HParams(0.1, 0.1, 0.1),
    }
    for name, one in hparams.items():
        _, metrics = trajectory(made(name), one, 1)[0]
        bits[name] = (float(metrics.bits_up), float(metrics.bits_down))
    one, two = (64.0 * D,) * 2, (128.0 * D,) * 2
    assert bits == {"fedavg": one, "fedprox": one, "scaffold": two, "ditto": one}


@pytest.mark.parametrize("name", MAKERS)
def test_the_rows_of_a_stochastic_step_are_drawn_anew_by_each_client_in_each_round_and_step(name):
    """A gradient that is the row itself: what was drawn is read off the way the model went."""
    rows = jnp.asarray(np.random.default_rng(6).standard_normal((N, 7, D)))
    hparams = {
        "fedavg": fedavg.HParams(1.0),
        "fedprox": fedprox.HParams(1.0, 0.0),
        "scaffold": scaffold.HParams(1.0),
        "ditto": ditto.HParams(1.0, 1.0, 0.0),
    }[name]

    def row(params, batch):
        return jnp.zeros(()), batch[0]

    algorithm = MAKERS[name](row, local.minibatch(1), steps=2)
    state = algorithm.init(START, IDS)
    for t in range(2):
        before = state.server.params
        state, _ = algorithm.step(KEY, hparams, state, rows)
        total = np.zeros(D)
        for i in range(N):
            key = jax.random.fold_in(jax.random.fold_in(KEY, t), i)
            key = jax.random.split(key)[0] if name == "ditto" else key
            total += sum(local.minibatch(1)(jax.random.fold_in(key, k), rows[i])[0] for k in range(2))
        np.testing.assert_allclose(before - state.server.params, total / N, rtol=1e-9)


@pytest.mark.parametrize("name", MAKERS)
def test_one_client_after_another_is_all_at_once(name):
    hparams = {"fedavg": fedavg.HParams(0.3), "fedprox": fedprox.HParams(0.3, 0.1), "scaffold": scaffold.HParams(0.3)}
    hparams["ditto"] = ditto.HParams(0.3, 0.2, 0.1)
    apart = MAKERS[name](value_and_grad, steps=STEPS, over=rounds.one_by_one)
    chex.assert_trees_all_close(
        trajectory(made(name), hparams[name], 2), trajectory(apart, hparams[name], 2), rtol=1e-12
    )


@pytest.mark.parametrize("name", MAKERS)
def test_no_step_and_nobody_are_refused(name):
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        MAKERS[name](value_and_grad, steps=0)
    with pytest.raises(ValueError, match="cohort must be at least 1 client"):
        MAKERS[name](value_and_grad, steps=1, cohort=0)
    algorithm = MAKERS[name](value_and_grad, steps=1, cohort=N + 1)
    with pytest.raises(ValueError, match=f"got {N + 1} of {N}"):
        jax.eval_shape(algorithm.step, KEY, None, algorithm.init(START, IDS), DATA)
