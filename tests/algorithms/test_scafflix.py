"""Scafflix: goldens, the thesis's box in NumPy, two faces of one trajectory, its state and an admissible start."""

import json
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commjax.algorithms import flix, scafflix
from commjax.algorithms.scafflix import communication
from commjax.core import local, rounds
from commjax.core.base import State
from commjax.problems import quadratic
from commjax.theory import scafflix as theory
from tests.algorithms.scafflix_cases import (
    ALPHA,
    DATA,
    IDS,
    KEY,
    PROBLEM,
    START,
    D,
    L,
    N,
    begin,
    gradients,
    run,
    stepper,
    value_and_grad,
)

pytestmark = pytest.mark.slow

GOLDEN = json.loads((Path(__file__).parents[1] / "data/goldens_scafflix.json").read_text())


def toss(monkeypatch, coins):
    """From now on the coin of iteration t is coins[t]."""
    monkeypatch.setattr(communication, "coin", lambda key, p, t: jnp.asarray(coins, bool)[t])


def own_models(hparams, state):
    """xtilde_i between communications"""
    return np.asarray(flix.personalized(hparams, state) + state.clients.drift)


def test_constants_are_the_golden_ones():
    golden = GOLDEN["scafflix_constants"]
    A, mu, alpha = (np.array(golden[name]) for name in ("L", "mu", "alpha"))
    hparams = scafflix.theoretical(A, mu, alpha)
    np.testing.assert_allclose(hparams.gamma, golden["gamma_i"], rtol=1e-14)
    np.testing.assert_allclose(hparams.alpha, alpha, rtol=0)
    assert hparams.p == pytest.approx(golden["p_opt"], rel=1e-14)
    assert theory.server_stepsize(hparams.gamma, alpha) == pytest.approx(golden["gamma_server"], rel=1e-14)
    np.testing.assert_allclose(theory.aggregation_weights(hparams.gamma, alpha), golden["agg_weights"], rtol=1e-13)
    assert theory.rate(hparams.gamma, mu, hparams.p) == pytest.approx(golden["zeta_at_p_opt"], rel=1e-14)
    assert theory.rate(hparams.gamma, mu, 0.2) == pytest.approx(golden["zeta_at_p_0_2"], rel=1e-14)
    assert theory.rate(hparams.gamma, mu, 0.5) == pytest.approx(golden["zeta_at_p_0_5"], rel=1e-14)
    np.testing.assert_allclose(hparams.p * alpha / hparams.gamma, golden["h_step"], rtol=1e-14)
    assert 1 / hparams.p**2 == pytest.approx(golden["kappa_max"], rel=1e-13)
    assert 1 / scafflix.scaffnew_hparams(A, mu).p ** 2 == pytest.approx(golden["kappa_global"], rel=1e-13)


def test_stepsizes_for_stochastic_gradients_are_the_golden_ones():
    golden = GOLDEN["scafflix_cor2"]
    A, mu, C = (np.array(golden[name]) for name in ("A", "mu", "C"))
    gamma, _, p = scafflix.theoretical(A, mu, 0.5, C=C, epsilon=golden["eps"])
    np.testing.assert_allclose(gamma, golden["gamma_i"], rtol=1e-14)
    assert p == pytest.approx(golden["p"], rel=1e-14)
    assert theory.rate(gamma, mu, p) == pytest.approx(golden["zeta"], rel=1e-13)
    assert theory.neighbourhood(gamma, mu, p, C) == pytest.approx(golden["neighborhood"], rel=1e-13)
    exact = scafflix.theoretical(A, mu, 0.5, C=np.zeros(3), epsilon=golden["eps"])
    np.testing.assert_array_equal(exact.gamma, scafflix.theoretical(A, mu).gamma)


def test_four_iterations_are_the_golden_ones(monkeypatch):
    golden = GOLDEN["scafflix_trajectory"]
    H, centre, alpha = (np.array(golden[name]) for name in ("H", "c", "alpha"))
    data = quadratic.Quadratic(jnp.asarray(H)[:, None, None], jnp.asarray(centre)[:, None])
    hparams = scafflix.HParams(np.array(golden["gamma_i"]), alpha, golden["p"])
    algorithm = scafflix.iterations(value_and_grad)
    state = algorithm.init(jnp.zeros(1), jnp.arange(3), optimum=data.c)

    def unmixed(state):
        return (own_models(hparams, state)[:, 0] - (1 - alpha) * centre) / alpha

    def psi(state):
        away = (own_models(hparams, state)[:, 0] - alpha * x_star - (1 - alpha) * centre) ** 2
        drift = (np.asarray(state.clients.shift)[:, 0] - H * alpha * (x_star - centre)) ** 2
        return theory.lyapunov(away, drift, np.asarray(hparams.gamma), hparams.p)

    x_star = golden["x_star"]
    assert psi(state) == pytest.approx(golden["Psi0"], rel=1e-13)
    assert theory.rate(np.asarray(hparams.gamma), H, hparams.p) == golden["zeta"]
    for t, step in enumerate(golden["steps"]):
        toss(monkeypatch, [0] * 4)
        np.testing.assert_allclose(unmixed(algorithm.step(KEY, hparams, state, data)[0]), step["xhat"], atol=1e-14)
        toss(monkeypatch, golden["coins"])
        state, metrics = algorithm.step(KEY, hparams, state, data)
        np.testing.assert_allclose(unmixed(state), step["x"], atol=1e-14)
        np.testing.assert_allclose(state.clients.shift[:, 0], step["h"], atol=1e-14)
        np.testing.assert_allclose(alpha @ state.clients.shift[:, 0], step["sum_alpha_h"], atol=2e-15)
        assert state.server.iterations == t + 1 and metrics.bits_up == 64 * step["coin"]
    assert state.server.communications == 2
    rounds = scafflix.scafflix(value_and_grad)
    by_rounds = rounds.init(jnp.zeros(1), jnp.arange(3), optimum=data.c)
    for steps in (2, 2):
        by_rounds, metrics = rounds.step(KEY, hparams, by_rounds, data)
        assert metrics.iterations == steps
    np.testing.assert_allclose(by_rounds.server.params, golden["steps"][-1]["x"][:1], atol=1e-14)
    np.testing.assert_allclose(by_rounds.clients.shift[:, 0], golden["steps"][-1]["h"], atol=1e-14)


def box(coins, gamma, alpha, p, members=None):
    """The thesis's algorithm L1263, with its division by alpha_i: x_i, h_i and the loss at the first x_i of each
    iteration."""
    x, h = np.tile(START, (N, 1)), np.zeros((N, D))
    a, g = alpha[:, None], gamma[:, None]
    communications = 0
    for coin in coins:
        S = np.ones(N, bool) if members is None else members[communications]
        mixed = a * x + (1 - a) * PROBLEM.c
        xhat = x - g / a * (gradients(mixed) - h)
        if coin:
            weights = alpha[S] ** 2 / gamma[S]
            xbar = weights @ xhat[S] / weights.sum()
            h = np.where(S[:, None], h + p * a / g * (xbar - xhat), h)
            x = np.tile(xbar, (N, 1))
            communications += 1
        else:
            x = np.where(S[:, None], xhat, x)
    return x, h, mixed


COINS = [0, 0, 1, 1, 0, 1, 0, 0, 0, 1, 0, 1, 0, 0, 1]


@pytest.mark.parametrize("cohort", [None, 4])
def test_both_faces_follow_the_thesiss_box_for_given_coins(monkeypatch, cohort):
    toss(monkeypatch, COINS)
    gamma, p = 0.7 / L, 0.4
    hparams = scafflix.HParams(gamma, ALPHA, p)
    draw = communication.keys_of(KEY).cohort
    members = cohort and [
        np.asarray(rounds.cohort_members(jax.random.fold_in(draw, c), IDS, N, cohort)) for c in range(sum(COINS))
    ]
    one, each = (make(value_and_grad, cohort=cohort) for make in (scafflix.scafflix, scafflix.iterations))
    state = begin(each)
    for t in range(len(COINS)):
        x, h, mixed = box(COINS[: t + 1], gamma, ALPHA, p, members)
        before = own_models(hparams, state)
        state, metrics = stepper(each)(KEY, hparams, state, DATA)
        here = (own_models(hparams, state) - (1 - ALPHA)[:, None] * PROBLEM.c) / ALPHA[:, None]
        np.testing.assert_allclose(here, x, rtol=1e-11, atol=1e-12)
        np.testing.assert_allclose(state.clients.shift, h, rtol=1e-11, atol=1e-12)
        S = members[sum(COINS[:t])] if cohort else np.ones(N, bool)
        loss = np.mean(np.sum((mixed - PROBLEM.c) * gradients(mixed), axis=1)[S]) / 2
        np.testing.assert_allclose(metrics.loss, loss, rtol=1e-11)
        np.testing.assert_allclose(before, mixed, rtol=1e-11, atol=1e-12)
    state = begin(one)
    for communications, t in enumerate(np.flatnonzero(COINS)):
        x, h, _ = box(COINS[: t + 1], gamma, ALPHA, p, members)
        state, metrics = stepper(one)(KEY, hparams, state, DATA)
        np.testing.assert_allclose(state.server.params, x[0], rtol=1e-11, atol=1e-12)
        np.testing.assert_allclose(state.clients.shift, h, rtol=1e-11, atol=1e-12)
        assert (state.server.communications, state.server.iterations) == (communications + 1, int(t) + 1)


ROWS = 5
RNG = np.random.default_rng(3)
REGRESSION = {
    "a": jnp.asarray(RNG.standard_normal((N, ROWS, D))),
    "b": jnp.asarray(RNG.standard_normal((N, ROWS))),
    "weights": jnp.asarray(np.where(np.arange(ROWS) < 3 + np.arange(N)[:, None] % 3, 1.0, 0.0)),
}


def regression(params, data):
    residual = data["a"][:, 1:] @ params["w"] + data["a"][:, 0] * params["v"][0] - data["b"]
    return jnp.sum(data["weights"] * residual**2) / 2 + 0.05 * (jnp.sum(params["w"] ** 2) + jnp.sum(params["v"] ** 2))


@pytest.mark.parametrize("sample", [local.all_rows, local.minibatch(2)], ids=["exact", "stochastic"])
@pytest.mark.parametrize("cohort", [None, 2])
def test_both_faces_take_the_same_way_with_the_same_key_also_in_pytrees(sample, cohort):
    gradient = jax.value_and_grad(regression)
    by_rounds = scafflix.scafflix(gradient, sample, cohort=cohort)
    by_iterations = scafflix.iterations(gradient, sample, cohort=cohort)
    params = {"v": jnp.ones(1), "w": jnp.linspace(-1.0, 1.0, D - 1)}
    optimum = {"v": jnp.asarray(RNG.standard_normal((N, 1))), "w": jnp.asarray(RNG.standard_normal((N, D - 1)))}
    hparams = scafflix.HParams(np.linspace(0.02, 0.05, N), ALPHA, 0.3)
    start = by_rounds.init(params, IDS, optimum=optimum)
    one, metrics = run(by_rounds, hparams, 12, start, data=REGRESSION)
    iterations = int(one.server.iterations)
    assert iterations == metrics.iterations.sum() > 15
    start = by_iterations.init(params, IDS, optimum=optimum)
    two, each = run(by_iterations, hparams, iterations, start, data=REGRESSION)
    chex.assert_trees_all_close(two.server._replace(round=one.server.round), one.server, rtol=1e-10)
    chex.assert_trees_all_close(two.clients.shift, one.clients.shift, rtol=1e-9, atol=1e-11)
    assert all(not leaf.any() for leaf in jax.tree.leaves(two.clients.drift))
    for bits in ("bits_up", "bits_down"):
        np.testing.assert_allclose(getattr(each, bits).sum(), getattr(metrics, bits).sum(), rtol=1e-14)
    firsts = np.cumsum(metrics.iterations) - metrics.iterations
    np.testing.assert_allclose(each.loss[firsts], metrics.loss, rtol=1e-10)
    np.testing.assert_array_equal(np.flatnonzero(each.bits_up), firsts + metrics.iterations - 1)


def test_stochastic_gradients_differ_between_iterations_and_clients():
    seen = []

    def look(key, data):
        seen.append(key)
        return data

    scafflix.iterations(value_and_grad, look)  # the sampler is called with the keys of (iteration, client)
    state, hparams = begin(scafflix.iterations(value_and_grad)), scafflix.HParams(0.1, ALPHA, 0.5)
    played = communication.Run(value_and_grad, look, hparams, communication.keys_of(KEY))
    drawn = []
    for t in range(3):
        for i in range(N):
            client = jax.tree.map(lambda leaf, i=i: leaf[i], state.clients)
            data = jax.tree.map(lambda leaf, i=i: leaf[i], DATA)
            played.local_step(START, client, data, jnp.asarray(t))
            drawn.append(jax.random.key_data(seen[-1]).tolist())
    assert len({tuple(key) for key in drawn}) == 3 * N


def test_a_shift_that_was_made_admissible_is_accepted_in_pytrees_and_with_shuffled_ids():
    grads = {"v": jnp.asarray(RNG.standard_normal((N, 2, 3))), "w": jnp.asarray(RNG.standard_normal(N))}
    shift = scafflix.admissible_shift(grads, ALPHA)
    np.testing.assert_allclose(np.tensordot(ALPHA, shift["v"], 1), 0, atol=1e-14)
    difference = np.asarray(grads["w"] - shift["w"])
    np.testing.assert_allclose(difference, ALPHA @ np.asarray(grads["w"]) / ALPHA.sum(), rtol=1e-12)
    order = np.array([3, 1, 5, 0, 2, 4])
    params = {"v": jnp.zeros((2, 3)), "w": jnp.zeros(())}
    shuffled = jax.tree.map(lambda leaf: leaf[order], shift)
    algorithm = scafflix.scafflix(value_and_grad)
    optimum = jax.tree.map(jnp.zeros_like, grads)
    state = algorithm.init(params, jnp.asarray(order), optimum=optimum, shift=shuffled, alpha=ALPHA)
    chex.assert_trees_all_equal(state.clients.shift, shuffled)
    with pytest.raises(ValueError, match="sum_i alpha_i h_i must be 0"):
        algorithm.init(params, IDS, optimum=optimum, shift=shuffled, alpha=ALPHA)
    equal = scafflix.admissible_shift(grads, 0.4)
    algorithm.init(params, IDS, optimum=optimum, shift=equal, alpha=0.4)
    scafflix.i_scaffnew(value_and_grad).init(params, IDS, shift=equal)


def test_a_state_has_one_row_of_everything_for_each_client():
    for make, fields in ((scafflix.scafflix, 3), (scafflix.iterations, 4)):
        state = begin(make(value_and_grad))
        assert isinstance(state, State) and len(jax.tree.leaves(state.clients)) == fields
        assert {len(leaf) for leaf in jax.tree.leaves(state.clients)} == {N}
