"""EF-BV: goldens, a NumPy oracle, the special cases, invariants, and convergence with nothing tuned."""

import json
import math
from itertools import pairwise
from pathlib import Path

import chex
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commjax import compressors as c
from commjax import prox
from commjax.algorithms import ef_bv
from commjax.core import runner
from commjax.core.base import Constants
from commjax.data.libsvm import Dataset
from commjax.data.stacked import stack
from commjax.problems import logistic, quadratic
from commjax.problems.constants import smoothness
from commjax.theory import ef_bv as theory

N, D = 6, 8
PROBLEM = quadratic.random(0, N, D, mu=0.5, L=2.0)
DATA = jax.tree.map(jnp.asarray, PROBLEM)
SMOOTH = quadratic.constants(PROBLEM)
BEST = quadratic.optimum(PROBLEM)
KEY = jax.random.key(7)
IDS = jnp.arange(N)
value_and_grad = jax.value_and_grad(quadratic.loss)


def gradients(x):
    return np.einsum("nij,nj->ni", PROBLEM.H, x - PROBLEM.c)


def gap(x):
    away = np.asarray(x) - BEST.params
    return 0.5 * away @ PROBLEM.H.mean(0) @ away


def soft(x, threshold):
    return np.sign(x) * np.maximum(np.abs(x) - threshold, 0)


def test_three_steps_are_the_golden_ones():
    golden = json.loads((Path(__file__).parents[1] / "data/goldens_ef_bv.json").read_text())["efbv_trajectory"]
    data = quadratic.Quadratic(jnp.array([jnp.diag(jnp.array(row)) for row in golden["Hs"]]), jnp.array(golden["cs"]))
    algorithm = ef_bv.ef_bv(value_and_grad, c.top_k(1))
    hparams = ef_bv.HParams(golden["gamma"], golden["lam"], golden["nu"])
    state = algorithm.init(jnp.array(golden["x0"], float), jnp.arange(2))
    for step in golden["steps"]:
        before, (state, metrics) = state, algorithm.step(KEY, hparams, state, data)
        sent = (state.clients.shift - before.clients.shift) / hparams.lam
        np.testing.assert_allclose(sent, step["d"], atol=1e-14)
        np.testing.assert_allclose(state.clients.shift, step["h"], atol=1e-14)
        estimate = (before.server.params - state.server.params) / hparams.gamma
        np.testing.assert_allclose(estimate, step["g"], atol=1e-13)
        np.testing.assert_allclose(state.server.params, step["x"], atol=1e-14)
        assert metrics.bits_down == 2 * 64
    assert state.server.round == 3


def test_top_k_with_a_soft_threshold_follows_the_numpy_oracle():
    gamma, lam, nu, k, weight = 0.15, 0.8, 0.9, 3, 0.2
    x, h = np.full(D, 2.0), np.zeros((N, D))
    losses = []
    for _ in range(40):
        losses.append(np.mean(np.sum((x - PROBLEM.c) * gradients(x), axis=1)) / 2)
        d = gradients(x) - h
        d[np.argsort(np.abs(d), axis=1).argsort(axis=1) < D - k] = 0
        g = h.mean(0) + nu * d.mean(0)
        h = h + lam * d
        x = soft(x - gamma * g, gamma * weight)
    algorithm = ef_bv.ef_bv(value_and_grad, c.top_k(k), prox.l1(weight))
    start = algorithm.init(jnp.full(D, 2.0), IDS)
    state, metrics = runner.run(KEY, algorithm, ef_bv.HParams(gamma, lam, nu), start, DATA, 40)
    np.testing.assert_allclose(state.server.params, x, rtol=1e-10)
    np.testing.assert_allclose(state.clients.shift, h, atol=1e-10)
    np.testing.assert_allclose(metrics.loss, losses, rtol=1e-10)


@pytest.mark.parametrize(
    "make", [lambda R: ef_bv.gd(value_and_grad, R), lambda R: ef_bv.ef_bv(value_and_grad, c.mix(3, D - 3), R)]
)
def test_without_compression_it_is_proximal_gradient_descent(make):
    hparams = ef_bv.gd_hparams(SMOOTH)
    assert hparams == ef_bv.theoretical(c.identity().constants(D, N), SMOOTH)
    algorithm = make(prox.l1(0.3))
    state, _ = runner.run(KEY, algorithm, hparams, algorithm.init(jnp.ones(D), IDS), DATA, 25)
    x = np.ones(D)
    for _ in range(25):
        x = soft(x - gradients(x).mean(0) / SMOOTH.L, 0.3 / SMOOTH.L)
    np.testing.assert_allclose(state.server.params, x, rtol=1e-11)


@pytest.mark.parametrize("compressor", [c.comp(2, 5), c.m_nice(2, c.rand_k(3))], ids=lambda one: one.name)
def test_nu_equal_to_lambda_is_the_original_ef21_with_a_scaled_compressor(compressor):
    gamma, lam, nu = ef_bv.ef21_hparams(compressor.constants(D, N), SMOOTH)
    assert lam == nu < 1
    ours = ef_bv.ef_bv(value_and_grad, compressor)
    original = ef_bv.ef_bv(value_and_grad, c.scaled(lam, compressor))
    one, _ = runner.run(KEY, ours, ef_bv.HParams(gamma, lam, nu), ours.init(jnp.ones(D), IDS), DATA, 50)
    two, _ = runner.run(KEY, original, ef_bv.HParams(gamma, 1.0, 1.0), original.init(jnp.ones(D), IDS), DATA, 50)
    chex.assert_trees_all_close(one, two, rtol=1e-9, atol=1e-12)


def test_hparams_of_the_special_cases_are_the_thesiss():
    biased, unbiased = c.comp(2, 5).constants(D, N), c.rand_k(2).constants(D, N)
    gamma, lam, nu = ef_bv.diana_hparams(unbiased, SMOOTH)
    assert (lam, nu) == (0.25, 1.0)
    assert gamma == pytest.approx(1 / (SMOOTH.L_max * (1 + (1 + math.sqrt(2)) ** 2 * 0.5)))
    general = ef_bv.theoretical(unbiased, SMOOTH, nu=1.0)
    assert ef_bv.diana_hparams(unbiased, SMOOTH, "pl") == general and general.gamma < gamma
    assert ef_bv.diana_hparams(biased, SMOOTH, "kl") == ef_bv.theoretical(biased, SMOOTH, "kl", nu=1.0)
    ef21 = ef_bv.ef21_hparams(biased, SMOOTH)
    assert ef21.lam == ef21.nu == theory.best_scaling(biased.eta, biased.omega)
    coarse = Constants(biased.eta, biased.omega, biased.omega)
    assert ef21 == ef_bv.theoretical(coarse, SMOOTH, nu=ef21.lam)
    assert ef_bv.ef21_hparams(biased, SMOOTH, use_omega_ran=True) == ef_bv.theoretical(biased, SMOOTH, nu=ef21.lam)
    smaller = ef_bv.theoretical(biased, SMOOTH, lam=0.01)
    assert smaller.lam == 0.01 and smaller.gamma < ef_bv.theoretical(biased, SMOOTH).gamma
    plain = ef_bv.compressed_gd_hparams(unbiased, SMOOTH)
    assert plain == pytest.approx((1 / (SMOOTH.L + SMOOTH.L_max), 0.0, 1.0))


def test_without_shifts_it_stalls_where_ef_bv_and_diana_converge():
    compressor = c.rand_k(2)
    constants = compressor.constants(D, N)
    algorithm = ef_bv.ef_bv(value_and_grad, compressor)
    start = algorithm.init(jnp.zeros(D), IDS)
    plain, _ = runner.run(KEY, algorithm, ef_bv.compressed_gd_hparams(constants, SMOOTH), start, DATA, 2000)
    assert not plain.clients.shift.any() and not plain.server.shift.any()
    assert gap(plain.server.params) > 1e-3
    for hparams in (ef_bv.diana_hparams(constants, SMOOTH), ef_bv.theoretical(constants, SMOOTH)):
        state, _ = runner.run(KEY, algorithm, hparams, start, DATA, 2000)
        assert gap(state.server.params) < 1e-12


@pytest.mark.parametrize("compressor", [c.comp(1, 4), c.m_nice(2), c.perm_k()], ids=lambda one: one.name)
def test_the_servers_shift_stays_the_mean_of_the_clients(compressor):
    algorithm = ef_bv.ef_bv(value_and_grad, compressor)
    shift = jnp.asarray(np.random.default_rng(1).standard_normal((N, D)))
    state = algorithm.init(jnp.ones(D), IDS, shift=shift)
    np.testing.assert_allclose(state.server.shift, shift.mean(0), atol=1e-15)
    hparams = ef_bv.theoretical(compressor.constants(D, N), SMOOTH)
    for _ in range(3):
        state, _ = runner.run(KEY, algorithm, hparams, state, DATA, 40)
        np.testing.assert_allclose(state.server.shift, state.clients.shift.mean(0), atol=1e-13)
        assert not np.allclose(state.clients.shift, shift, atol=1e-3)


def test_the_optimum_with_its_gradients_as_shifts_is_a_fixed_point():
    for compressor in (c.top_k(1), c.dithering(2)):
        algorithm = ef_bv.ef_bv(value_and_grad, compressor)
        start = algorithm.init(jnp.asarray(BEST.params), IDS, shift=jnp.asarray(gradients(BEST.params)))
        state, _ = runner.run(KEY, algorithm, ef_bv.HParams(0.3, 0.5, 1.0), start, DATA, 10)
        np.testing.assert_allclose(state.server.params, BEST.params, atol=1e-12)


EVERY = [c.comp(1, 4), c.mix(1, 2), c.top_k(1), c.rand_k(2), c.m_nice(2), c.m_nice(3, c.top_k(4)), c.perm_k()]
EVERY += [c.natural(), c.dithering(2), c.ternary(), c.scaled_sign(), c.rounded(c.top_k(2)), c.identity()]
EVERY += [c.leafwise(c.top_k(3)), c.scaled(0.5, c.rand_k(2))]


@pytest.mark.parametrize("compressor", EVERY, ids=lambda one: one.name)
def test_with_nothing_tuned_it_converges_as_fast_as_the_theorem_says(compressor):
    eta, omega, omega_ran = constants = compressor.constants(D, N)
    hparams = ef_bv.theoretical(constants, SMOOTH)
    r, r_av = theory.contraction(eta, omega, hparams.lam), theory.contraction(eta, omega_ran, hparams.nu)
    weight = theory.lyapunov_weight(hparams.gamma, r, theory.one_minus_r(eta, omega, hparams.lam), r_av)
    psi = gap(np.zeros(D)) + weight * np.sum(gradients(np.zeros(D)) ** 2) / N
    rounds = math.ceil(math.log(1e-9 / psi) / math.log(theory.rate(hparams.gamma, SMOOTH.mu, r)))
    algorithm = ef_bv.ef_bv(value_and_grad, compressor)
    state, metrics = runner.run(KEY, algorithm, hparams, algorithm.init(jnp.zeros(D), IDS), DATA, rounds)
    assert gap(state.server.params) < 1e-8 < gap(np.zeros(D))
    np.testing.assert_allclose(metrics.loss[-1], BEST.value, rtol=1e-7)


REGULARIZERS = {
    "zero": (prox.zero(), lambda x, gamma: x),
    "l1": (prox.l1(0.3), lambda x, gamma: soft(x, 0.3 * gamma)),
    "l2_squared": (prox.l2_squared(0.7), lambda x, gamma: x / (1 + 0.7 * gamma)),
    "elastic_net": (prox.elastic_net(0.3, 0.7), lambda x, gamma: soft(x, 0.3 * gamma) / (1 + 0.7 * gamma)),
    "box": (prox.box(-0.2, 0.4), lambda x, gamma: np.minimum(np.maximum(x, -0.2), 0.4)),
    "nonnegative": (prox.nonnegative(), lambda x, gamma: np.maximum(x, 0)),
}


@pytest.mark.parametrize("regularizer, by_hand", REGULARIZERS.values(), ids=REGULARIZERS)
def test_with_every_regularizer_it_converges_to_the_minimiser(regularizer, by_hand):
    x = np.zeros(D)
    for _ in range(2000):
        x = by_hand(x - gradients(x).mean(0) / SMOOTH.L, 1 / SMOOTH.L)
    algorithm = ef_bv.ef_bv(value_and_grad, c.rand_k(3), regularizer)
    hparams = ef_bv.theoretical(c.rand_k(3).constants(D, N), SMOOTH, "kl")
    state, _ = runner.run(KEY, algorithm, hparams, algorithm.init(jnp.ones(D), IDS), DATA, 1500)
    np.testing.assert_allclose(state.server.params, x, atol=1e-9)


def tiny_rows():
    """Two clients with three and two rows, so that one is padded."""
    rng = np.random.default_rng(4)
    dataset = Dataset(rng.standard_normal((5, 3)), np.array([1.0, -1.0, 1.0, 1.0, -1.0]), "five rows")
    return jax.tree.map(jnp.asarray, stack(dataset, [np.arange(3), np.arange(3, 5)]))


def test_minibatch_gradients_are_unbiased():
    data, x = tiny_rows(), jnp.array([0.5, -1.0, 2.0])
    grad = jax.jit(jax.vmap(jax.grad(lambda x, one: logistic.loss(x, one, 0.1)), in_axes=(None, 0)))
    draw = jax.jit(runner.minibatches(1))
    seen = [{}, {}]
    for seed in range(40):
        batch = draw(jax.random.key(seed), jnp.arange(2), data)
        for i, g in enumerate(grad(x, batch)):
            row = np.flatnonzero((np.asarray(data.features[i]) == np.asarray(batch.features[i, 0])).all(-1))
            seen[i].setdefault(int(row[0]), np.asarray(g))
    for i, exact in enumerate(grad(x, data)):  # all rows that count are drawn, each equally likely: the mean is exact
        assert len(seen[i]) == np.sum(data.weights[i] > 0)
        np.testing.assert_allclose(np.mean(list(seen[i].values()), axis=0), exact, rtol=1e-12)


def test_stochastic_gradients_train():
    data = tiny_rows()
    algorithm = ef_bv.ef_bv(jax.value_and_grad(lambda x, one: logistic.loss(x, one, 0.1)), c.rand_k(1))
    start = algorithm.init(jnp.array([3.0, 3.0, -3.0]), jnp.arange(2))
    state, _ = runner.run(
        KEY, algorithm, ef_bv.HParams(0.05, 0.1, 0.5), start, data, 400, batch_fn=runner.minibatches(2)
    )
    full = jax.vmap(lambda x, one: logistic.loss(x, one, 0.1), in_axes=(None, 0))
    assert full(state.server.params, data).mean() < full(start.server.params, data).mean() - 0.5


def test_a_nested_tree_takes_the_steps_of_its_flat_vector():
    def split(x):
        return {"a": x[..., :3], "b": {"c": x[..., 3:7].reshape(*x.shape[:-1], 2, 2), "d": x[..., 7]}}

    def flat(params):
        return jnp.concatenate([params["a"], params["b"]["c"].reshape(-1), params["b"]["d"][None]])

    hparams = ef_bv.HParams(0.2, 0.5, 0.9)
    one = ef_bv.ef_bv(value_and_grad, c.top_k(3), prox.l1(0.1))
    two = ef_bv.ef_bv(jax.value_and_grad(lambda p, data: quadratic.loss(flat(p), data)), c.top_k(3), prox.l1(0.1))
    x, shift = jnp.linspace(-1.0, 1.0, D), jnp.asarray(gradients(np.ones(D)))
    expected, _ = runner.run(KEY, one, hparams, one.init(x, IDS, shift=shift), DATA, 20)
    found, metrics = runner.run(KEY, two, hparams, two.init(split(x), IDS, shift=split(shift)), DATA, 20)
    chex.assert_trees_all_close(found.server.params, split(expected.server.params), rtol=1e-12)
    chex.assert_trees_all_close(found.clients.shift, split(expected.clients.shift), rtol=1e-12)
    assert (metrics.bits_down == D * 64).all()


def test_flax_parameters_are_trained():
    model = nn.Dense(2, param_dtype=jnp.float64)
    rng = np.random.default_rng(5)
    inputs, targets = jnp.asarray(rng.standard_normal((3, 5, 4))), jnp.asarray(rng.standard_normal((3, 5, 2)))

    def loss(params, data):
        return jnp.mean((model.apply(params, data[0]) - data[1]) ** 2)

    algorithm = ef_bv.ef_bv(jax.value_and_grad(loss), c.leafwise(c.top_k(2)))
    start = algorithm.init(model.init(jax.random.key(0), inputs[0]), jnp.arange(3))
    state, metrics = runner.run(KEY, algorithm, ef_bv.HParams(0.1, 1.0, 1.0), start, (inputs, targets), 60)
    chex.assert_trees_all_equal_shapes_and_dtypes(state, start)
    thinned = np.asarray(metrics.loss)[::15]
    assert all(later < earlier for earlier, later in pairwise(thinned))


def test_constants_that_theory_cannot_use_are_named():
    none = c.identity().constants(3, 2)
    for tuned, name in (
        (ef_bv.theoretical, "L_tilde"),
        (ef_bv.ef21_hparams, "L_tilde"),
        (ef_bv.diana_hparams, "L_max"),
    ):
        good = smoothness(np.array([1.0, 2.0]))
        with pytest.raises(ValueError, match=rf"smoothness.{name} must be positive and finite, got nan"):
            tuned(none, good._replace(**{name: float("nan")}))
    with pytest.raises(ValueError, match=r"smoothness.L must be positive and finite, got 0"):
        ef_bv.gd_hparams(smoothness(np.array([1.0]))._replace(L=0.0))
    with pytest.raises(
        ValueError, match=r"one of \('strongly convex', 'pl', 'kl', 'nonconvex'\), got 'strongly-convex'"
    ):
        ef_bv.diana_hparams(none, smoothness(np.array([1.0])), "strongly-convex")
    algorithm = ef_bv.gd(jax.value_and_grad(lambda x, data: jnp.sum((x - data) ** 2)))
    with pytest.raises(
        ValueError, match=r"a row like params for each client, leaves of shapes \[\(4, 2\)\]; got \[\(3, 2\)\]"
    ):
        algorithm.init(jnp.zeros(2), jnp.arange(4), shift=jnp.zeros((3, 2)))


def test_a_number_is_no_smoothness_and_says_how_to_make_one():
    with pytest.raises(TypeError, match="smoothness"):
        ef_bv.theoretical(c.top_k(2).constants(11, 20), 8.0)  # type: ignore[arg-type]
