"""Runs of Scafflix: the minimiser it reaches, special cases, cohorts, bits, local steps, sweeps."""

import math

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commjax.algorithms import flix, scafflix
from commjax.algorithms.scafflix import communication
from commjax.core import rounds, runner
from commjax.problems import quadratic
from tests.algorithms.scafflix_cases import (
    ALPHA,
    DATA,
    IDS,
    KEY,
    MU,
    OPTIMUM,
    PROBLEM,
    START,
    D,
    L,
    N,
    begin,
    gradients,
    made,
    run,
    stepper,
    value_and_grad,
)

pytestmark = pytest.mark.slow


def best(alpha):
    """The minimiser of the FLIX objective: x_i* = c_i, so f_i(alpha x + (1 - alpha) c_i) = alpha^2 f_i(x)."""
    weights = np.broadcast_to(np.asarray(alpha) ** 2, (N,))
    return np.linalg.solve(np.einsum("n,nij->ij", weights, PROBLEM.H), np.einsum("n,nij,nj->i", weights, *PROBLEM))


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
    hparams = scafflix.scaffnew_hparams(L, MU)
    np.testing.assert_array_equal(hparams.gamma, np.full(N, 1 / L.max()))
    assert hparams.alpha == 1.0 and hparams.p == pytest.approx(math.sqrt(MU.min() / L.max()))
    assert scafflix.scaffnew_hparams(L, MU, p=0.25).p == 0.25
    assert scafflix.theoretical(L, MU).p >= hparams.p


@pytest.mark.parametrize("alpha", [0.6, 0.2])  # alpha^2/gamma above and below 1
def test_with_p_1_and_equal_stepsizes_it_is_gradient_descent_on_the_flix_objective(alpha):
    hparams = scafflix.HParams(0.3, alpha, 1.0)
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
    _, metrics = runner.run(KEY, algorithm, scafflix.HParams(1.0, 1.0, p), start, jnp.zeros((1, 1)), rounds)
    steps = np.asarray(metrics.iterations)
    assert steps.min() == 1
    assert abs(steps.mean() - 1 / p) < 5 * math.sqrt((1 - p) / p**2 / rounds)
    assert abs(np.mean(steps == 1) - p) < 5 * math.sqrt(p * (1 - p) / rounds)


def test_no_probability_makes_a_program_that_does_not_end(monkeypatch):
    monkeypatch.setattr(communication, "MOST_STEPS", 50)
    _, metrics = run(scafflix.scafflix(value_and_grad), scafflix.HParams(0.1, ALPHA, 1e-9), 2)
    assert metrics.iterations.tolist() == [51, 51]


def test_the_mean_over_a_sweep_with_a_vector_of_hparams_is_the_mean_over_runs():
    settings = [scafflix.theoretical(L, MU, ALPHA), scafflix.HParams(0.5 / L, ALPHA[::-1], 0.7)]
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
