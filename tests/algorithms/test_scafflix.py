"""Scafflix: goldens, the thesis's box in NumPy, two faces of one trajectory, cohorts, bits, special cases, bad input."""

import json
import math
from functools import cache
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commjax.algorithms import flix, scafflix
from commjax.algorithms.scafflix import communication
from commjax.core import local, rounds, runner
from commjax.core.base import State
from commjax.problems import quadratic
from commjax.theory import scafflix as theory

GOLDEN = json.loads((Path(__file__).parents[1] / "data/goldens_scafflix.json").read_text())
N, D = 6, 4
PROBLEM = quadratic.random(0, N, D, mu=0.2, L=2.0)
DATA = jax.tree.map(jnp.asarray, PROBLEM)
SPECTRA = np.linalg.eigvalsh(PROBLEM.H)
L, MU = SPECTRA[:, -1], SPECTRA[:, 0]
ALPHA = np.array([0.5, 1.0, 0.2, 0.8, 0.35, 0.9])
IDS, KEY = jnp.arange(N), jax.random.key(7)
START, OPTIMUM = jnp.linspace(-1.0, 2.0, D), jnp.asarray(PROBLEM.c)
value_and_grad = jax.value_and_grad(quadratic.loss)


@cache
def made(make, cohort=None):
    """One object per method, so that what one test compiled serves the next."""
    return make(value_and_grad, cohort=cohort)


stepper = cache(lambda algorithm: jax.jit(algorithm.step))


def run(algorithm, hparams, rounds, state=None, key=KEY, data=DATA):
    """The state after so many rounds, and the metrics of each."""
    state, seen = begin(algorithm) if state is None else state, []
    for _ in range(rounds):
        state, metrics = stepper(algorithm)(key, hparams, state, data)
        seen.append(metrics)
    return state, jax.tree.map(lambda *rows: np.stack(rows), *seen)


def gradients(x):
    return np.einsum("nij,nj->ni", PROBLEM.H, x - PROBLEM.c)


def best(alpha):
    """The minimiser of the FLIX objective: x_i* = c_i, so f_i(alpha x + (1 - alpha) c_i) = alpha^2 f_i(x)."""
    weights = np.broadcast_to(np.asarray(alpha) ** 2, (N,))
    return np.linalg.solve(np.einsum("n,nij->ij", weights, PROBLEM.H), np.einsum("n,nij,nj->i", weights, *PROBLEM))


def begin(algorithm, **per_client):
    return algorithm.init(START, IDS, optimum=OPTIMUM, **per_client)


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
    assert 1 / scafflix.scaffnew(A, mu).p ** 2 == pytest.approx(golden["kappa_global"], rel=1e-13)


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
    hparams = scafflix.hparams(np.array(golden["gamma_i"]), alpha, golden["p"])
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
    """The thesis's algorithm L1263, with its division by alpha_i: x_i, h_i and the loss at the first x_i of each iteration."""
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
    hparams = scafflix.hparams(gamma, ALPHA, p)
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
    hparams = scafflix.hparams(np.linspace(0.02, 0.05, N), ALPHA, 0.3)
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
    rows = communication.keys_of(KEY).rows
    state, hparams = begin(scafflix.iterations(value_and_grad)), scafflix.hparams(0.1, ALPHA, 0.5)
    drawn = []
    for t in range(3):
        for i in range(N):
            client = jax.tree.map(lambda leaf, i=i: leaf[i], state.clients)
            data = jax.tree.map(lambda leaf, i=i: leaf[i], DATA)
            communication.local_step(value_and_grad, look, rows, hparams, START, client, data, t)
            drawn.append(jax.random.key_data(seen[-1]).tolist())
    assert len({tuple(one) for one in drawn}) == 3 * N


def test_with_nothing_tuned_it_reaches_the_minimiser_of_the_flix_objective():
    hparams = scafflix.theoretical(L, MU, ALPHA)
    algorithm = made(scafflix.scafflix)
    state, metrics = run(algorithm, hparams, 300)
    np.testing.assert_allclose(state.server.params, best(ALPHA), atol=1e-12)
    x = flix.personalized(hparams, state)
    wanted = ALPHA[:, None] * best(ALPHA) + (1 - ALPHA)[:, None] * PROBLEM.c
    np.testing.assert_allclose(x, wanted, atol=1e-12)
    np.testing.assert_allclose(state.clients.shift, gradients(wanted), atol=1e-11)
    np.testing.assert_allclose(metrics.loss[-1], np.mean(np.sum((wanted - PROBLEM.c) * gradients(wanted), 1)) / 2)


def test_the_work_of_one_client_after_another_is_that_of_all_at_once():
    hparams = scafflix.theoretical(L, MU, ALPHA)
    together, apart = made(scafflix.scafflix), scafflix.scafflix(value_and_grad, over=rounds.one_by_one)
    chex.assert_trees_all_close(run(together, hparams, 10), run(apart, hparams, 10), rtol=1e-10)


@pytest.mark.parametrize("make", [scafflix.scafflix, scafflix.iterations])
def test_a_client_with_alpha_0_stays_at_its_own_optimum_and_does_not_disturb_the_others(make):
    alpha = ALPHA.copy()
    alpha[2] = 0.0
    hparams = scafflix.theoretical(L, MU, alpha)
    state, metrics = run(made(make), hparams, 600)
    chex.assert_tree_all_finite((state, metrics))
    np.testing.assert_allclose(state.server.params, best(alpha), atol=1e-10)
    np.testing.assert_array_equal(flix.personalized(hparams, state)[2], OPTIMUM[2])
    assert not state.clients.shift[2].any()


@pytest.mark.parametrize("make", [scafflix.scafflix, scafflix.iterations])
@pytest.mark.parametrize("cohort", [None, 2])
def test_if_every_alpha_is_0_nothing_moves_and_nothing_is_nan(make, cohort):
    hparams = scafflix.theoretical(L, MU, np.zeros(N))
    state, metrics = run(made(make, cohort), hparams, 5)
    chex.assert_tree_all_finite((state, metrics))
    np.testing.assert_array_equal(state.server.params, START)
    np.testing.assert_array_equal(flix.personalized(hparams, state), OPTIMUM)
    assert not metrics.loss.any() and not state.clients.shift.any()


def test_with_alpha_1_it_is_i_scaffnew_which_needs_no_optimum_and_knows_no_other_alpha():
    hparams = scafflix.theoretical(L, MU)
    personal, plain = made(scafflix.scafflix), made(scafflix.i_scaffnew)
    one, seen = run(personal, hparams, 15)
    start = plain.init(START, IDS)
    assert start.clients.optimum is None
    for other in (hparams, hparams._replace(alpha=ALPHA)):
        two, metrics = run(plain, other, 15, start)
        chex.assert_trees_all_close((two.server, two.clients.shift), (one.server, one.clients.shift), rtol=1e-9)
        chex.assert_trees_all_close(metrics, seen, rtol=1e-10)
    np.testing.assert_array_equal(flix.personalized(hparams, two), np.tile(two.server.params, (N, 1)))
    late, _ = run(plain, hparams, 300, start)
    np.testing.assert_allclose(late.server.params, quadratic.optimum(PROBLEM).params, atol=1e-11)


def test_scaffnew_has_one_stepsize_and_the_global_condition_number():
    hparams = scafflix.scaffnew(L, MU)
    np.testing.assert_array_equal(hparams.gamma, np.full(N, 1 / L.max()))
    assert hparams.alpha == 1.0 and hparams.p == pytest.approx(math.sqrt(MU.min() / L.max()))
    assert scafflix.scaffnew(L, MU, p=0.25).p == 0.25
    assert scafflix.theoretical(L, MU).p >= hparams.p


@pytest.mark.parametrize("alpha", [0.6, 0.2])  # alpha^2/gamma above and below 1
def test_with_p_1_and_equal_stepsizes_it_is_gradient_descent_on_the_flix_objective(alpha):
    hparams = scafflix.hparams(0.3, alpha, 1.0)
    state, metrics = run(made(scafflix.scafflix), hparams, 20)
    x = np.array(START)
    for _ in range(20):
        x = x - 0.3 / alpha * gradients(alpha * x + (1 - alpha) * PROBLEM.c).mean(0)
    np.testing.assert_allclose(state.server.params, x, rtol=1e-10)
    assert (metrics.iterations == 1).all()


@pytest.mark.parametrize("cohort", [None, 2, 5])
@pytest.mark.parametrize("alpha", [ALPHA, np.where(np.arange(N) == 1, 0.0, ALPHA)], ids=["all move", "one does not"])
def test_the_sum_of_alpha_h_stays_0_and_the_method_reaches_the_minimiser(cohort, alpha):
    hparams = scafflix.theoretical(L, MU, alpha)
    algorithm = made(scafflix.scafflix, cohort)
    state = begin(algorithm)
    for num_rounds in (1, 20, 1200):
        state, _ = run(algorithm, hparams, num_rounds, state)
        np.testing.assert_allclose(alpha @ np.asarray(state.clients.shift), 0, atol=2e-13)
    assert np.abs(state.clients.shift).max() > 0.1
    np.testing.assert_allclose(state.server.params, best(alpha), atol=1e-10)


@pytest.mark.parametrize("make", [scafflix.scafflix, scafflix.iterations])
def test_who_is_not_in_the_cohort_is_frozen(make):
    tau, algorithm = 2, made(make, 2)
    hparams, state = scafflix.theoretical(L, MU, ALPHA), begin(algorithm)
    moved = []
    for _ in range(10):
        draw = jax.random.fold_in(communication.keys_of(KEY).cohort, state.server.communications)
        member = np.asarray(rounds.cohort_members(draw, IDS, N, tau))
        before, (state, _) = state, stepper(algorithm)(KEY, hparams, state, DATA)
        fields = ("shift",) if make is scafflix.scafflix else ("shift", "drift")
        for field in fields:
            changed = np.any(getattr(before.clients, field) != getattr(state.clients, field), axis=1)
            assert not changed[~member].any()
            moved.append(changed.sum())
    assert max(moved) == tau


def test_with_full_participation_model_goes_up_and_down_once_a_communication():
    hparams = scafflix.theoretical(L, MU, ALPHA)
    for cohort in (None, N):
        _, metrics = run(made(scafflix.scafflix, cohort), hparams, 8)
        assert (metrics.bits_up == D * 64).all() and (metrics.bits_down == D * 64).all()
    state, metrics = run(made(scafflix.iterations), hparams, 30)
    assert 0 < state.server.communications < 30
    assert metrics.bits_up.sum() == metrics.bits_down.sum() == D * 64 * int(state.server.communications)


def test_the_bits_of_a_cohort_are_a_recount_over_its_members():
    tau, num_rounds = 2, 30
    _, metrics = run(made(scafflix.scafflix, tau), scafflix.theoretical(L, MU, ALPHA), num_rounds)
    draw = communication.keys_of(KEY).cohort
    knows = set(range(N))  # who has the server's present model: at the start all
    for r in range(num_rounds):
        member = rounds.cohort_members(jax.random.fold_in(draw, r), IDS, N, tau)
        S = set(np.flatnonzero(member).tolist())
        told = len(S - knows) + len(S)  # the model to start from, where it is not known, and the new one
        assert metrics.bits_up[r] == pytest.approx(len(S) * 64 * D / N)
        assert metrics.bits_down[r] == pytest.approx(told * 64 * D / N)
        knows = S
    assert len(set(np.asarray(metrics.bits_down).tolist())) == 3  # nobody, one, both were newcomers


@pytest.mark.parametrize("p", [0.2, 0.5])
def test_the_number_of_local_steps_is_geometric_with_mean_1_over_p(p):
    algorithm = scafflix.scafflix(lambda x, data: (jnp.zeros(()), jnp.zeros(1)))
    start = algorithm.init(jnp.zeros(1), jnp.arange(1), optimum=jnp.zeros((1, 1)))
    rounds = 4000
    _, metrics = runner.run(KEY, algorithm, scafflix.hparams(1.0, 1.0, p), start, jnp.zeros((1, 1)), rounds)
    steps = np.asarray(metrics.iterations)
    assert steps.min() == 1
    assert abs(steps.mean() - 1 / p) < 5 * math.sqrt((1 - p) / p**2 / rounds)
    assert abs(np.mean(steps == 1) - p) < 5 * math.sqrt(p * (1 - p) / rounds)


def test_no_probability_makes_a_program_that_does_not_end(monkeypatch):
    monkeypatch.setattr(communication, "MOST_STEPS", 50)
    _, metrics = run(scafflix.scafflix(value_and_grad), scafflix.hparams(0.1, ALPHA, 1e-9), 2)
    assert metrics.iterations.tolist() == [51, 51]


def test_the_mean_over_a_sweep_with_a_vector_of_hparams_is_the_mean_over_runs():
    settings = [scafflix.theoretical(L, MU, ALPHA), scafflix.hparams(0.5 / L, ALPHA[::-1], 0.7)]
    keys = jax.random.split(KEY, 3)
    algorithm = made(scafflix.scafflix)
    _, metrics = runner.sweep(keys, algorithm, runner.stack(settings), begin(algorithm), DATA, 6)
    for h, hparams in enumerate(settings):
        losses = [run(algorithm, hparams, 6, key=jax.random.split(key)[0])[1].loss for key in keys]
        np.testing.assert_allclose(metrics.loss[h].mean(0), np.mean(losses, axis=0), rtol=1e-10)
    assert metrics.iterations.shape == (2, 3, 6)


def test_an_observed_run_keeps_the_metrics_of_scafflix():
    algorithm = made(scafflix.scafflix)
    seen = runner.observe(algorithm, gap=lambda state, data: jnp.sum((state.server.params - best(ALPHA)) ** 2))
    hparams = scafflix.theoretical(L, MU, ALPHA)
    _, metrics = run(seen, hparams, 100)
    np.testing.assert_allclose(metrics.iterations, run(algorithm, hparams, 100)[1].iterations)
    assert metrics.gap[-1] < 1e-6 * metrics.gap[0]


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


@pytest.mark.parametrize("make", [scafflix.scafflix, scafflix.iterations, scafflix.i_scaffnew])
def test_a_shift_that_breaks_the_invariant_is_refused(make):
    algorithm = make(value_and_grad)
    optimum = {} if make is scafflix.i_scaffnew else {"optimum": OPTIMUM}
    ones = jnp.ones((N, D))
    with pytest.raises(ValueError, match=r"shift: sum_i alpha_i h_i must be 0 and is .* allowed: zeros"):
        algorithm.init(START, IDS, shift=ones, alpha=ALPHA, **optimum)
    with pytest.raises(ValueError, match="must be 0"):
        algorithm.init(START, IDS, shift=ones.at[0, 0].set(jnp.nan), alpha=1.0, **optimum)
    sums_to_0 = ones.at[N // 2 :].set(-1.0)
    algorithm.init(START, IDS, shift=sums_to_0, alpha=1.0, **optimum)
    with pytest.raises(ValueError, match=r"is 1\.25 in some"):
        algorithm.init(START, IDS, shift=ones.at[0].set(0.25 - N + 2), alpha=1.0, **optimum)
    off = sums_to_0.at[0, 0].add(1e-10)
    with pytest.raises(ValueError, match="must be 0"):
        algorithm.init(START, IDS, shift=off, alpha=1.0, **optimum)


def test_a_shift_without_alpha_is_refused_where_it_cannot_be_checked():
    with pytest.raises(ValueError, match="needs alpha="):
        begin(scafflix.scafflix(value_and_grad), shift=jnp.zeros((N, D)))
    with pytest.raises(ValueError, match=r"alpha=.* allowed"):
        begin(scafflix.scafflix(value_and_grad), shift=jnp.zeros((N, D)), alpha=1.5)


@pytest.mark.parametrize("alpha", [-0.1, 1.1, [0.5, 2.0], [[0.5]], math.nan])
def test_an_alpha_outside_0_to_1_is_refused(alpha):
    with pytest.raises(ValueError, match=r"alpha=.*; allowed: one number in \[0, 1\]"):
        scafflix.hparams(0.1, np.array(alpha), 0.5)


@pytest.mark.parametrize("p", [0.0, -0.5, 1.01, math.nan])
def test_a_p_outside_0_to_1_is_refused(p):
    with pytest.raises(ValueError, match=r"p=.*; allowed: 0 < p <= 1"):
        scafflix.hparams(0.1, 0.5, p)
    with pytest.raises(ValueError, match=r"allowed: 0 < p <= 1"):
        scafflix.theoretical(L, MU, p=p)


@pytest.mark.parametrize("gamma", [0.0, -1.0, math.inf, math.nan, [0.1, 0.0], [[0.1]]])
def test_a_gamma_that_is_not_positive_is_refused(gamma):
    with pytest.raises(ValueError, match=r"gamma=.*; allowed: one positive number"):
        scafflix.hparams(np.array(gamma), 0.5, 0.5)


def test_a_gamma_above_the_theorems_warns_or_is_refused_and_one_below_is_taken():
    gamma = 1 / L
    gamma[3] *= 1.5
    with pytest.warns(UserWarning, match=r"gamma_3 = .* is above 1/A_3 = .*"):
        assert scafflix.theoretical(L, MU, ALPHA, gamma=gamma).gamma.tolist() == gamma.tolist()
    with pytest.raises(ValueError, match="gamma_3"):
        scafflix.theoretical(L, MU, ALPHA, gamma=gamma, strict=True)
    below = scafflix.theoretical(L, MU, ALPHA, gamma=0.1, strict=True)
    assert below.p == pytest.approx(math.sqrt(0.1 * MU.min()))
    scafflix.theoretical(L, MU, ALPHA, gamma=1 / L, strict=True)


@pytest.mark.parametrize(
    "A, mu", [([1.0, 2.0], [0.5, 0.0]), ([1.0, -2.0], 0.1), ([1.0, 2.0], 1.5), ([1, math.nan], 0.1)]
)
def test_constants_that_no_function_has_are_refused(A, mu):
    with pytest.raises(ValueError, match="allowed: 0 < mu_i <= A_i"):
        scafflix.theoretical(np.array(A), np.array(mu))


def test_noise_and_accuracy_come_together_or_not_at_all():
    for given in ({"C": np.ones(N)}, {"epsilon": 0.1}):
        with pytest.raises(ValueError, match="allowed: both"):
            scafflix.theoretical(L, MU, **given)
    for epsilon in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match="epsilon"):
            scafflix.theoretical(L, MU, C=np.ones(N), epsilon=epsilon)


def test_a_missing_or_misshapen_optimum_is_refused():
    algorithm = scafflix.scafflix(value_and_grad)
    with pytest.raises(ValueError, match="init needs optimum="):
        algorithm.init(START, IDS)
    for wrong in (OPTIMUM[:-1], OPTIMUM[:, :-1], OPTIMUM[0], {"x": OPTIMUM}):
        with pytest.raises(ValueError, match="optimum must have one row"):
            algorithm.init(START, IDS, optimum=wrong)


def test_a_misshapen_shift_is_refused():
    zeros = jnp.zeros((N, D))
    for wrong in (zeros[:-1], zeros[:, :-1], zeros[0], {"x": zeros}):
        with pytest.raises(ValueError, match=f"shift must have one row of the params for each of {N} clients"):
            begin(made(scafflix.scafflix), shift=wrong, alpha=ALPHA)


@pytest.mark.parametrize("make", [scafflix.scafflix, scafflix.iterations])
def test_a_cohort_of_nobody_or_of_more_than_all_is_refused(make):
    for cohort in (0, -1):
        with pytest.raises(ValueError, match=f"cohort must be at least 1 client .*, got {cohort}"):
            make(value_and_grad, cohort=cohort)
    algorithm = make(value_and_grad, cohort=N + 1)
    with pytest.raises(ValueError, match=f"between 1 and the number of clients, got {N + 1} of {N}"):
        algorithm.step(KEY, scafflix.hparams(0.1, 0.5, 0.5), begin(algorithm), DATA)


def test_a_state_has_one_row_of_everything_for_each_client():
    for make, fields in ((scafflix.scafflix, 3), (scafflix.iterations, 4)):
        state = begin(make(value_and_grad))
        assert isinstance(state, State) and len(jax.tree.leaves(state.clients)) == fields
        assert {len(leaf) for leaf in jax.tree.leaves(state.clients)} == {N}
