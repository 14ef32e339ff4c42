"""SPPM-AS and its baselines against NumPy, on quadratics whose prox is known exactly."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commjax.algorithms import averaged_prox, local_gd, sppm_as
from commjax.core import runner
from commjax.data import stacked
from commjax.data.stacked import ClientData
from commjax.devices.mesh import client_mesh, shard_step
from commjax.problems import logistic, quadratic
from commjax.prox import cohort, solvers
from commjax.prox.solvers import quasi_newton
from commjax.sampling import samplings
from commjax.theory import sppm as theory
from tests.algorithms.sppm_as_cases import CLUSTERS, DATA, EXACT, KEY, PROBLEM, SAMPLINGS, START, D, N, after, newton

pytestmark = pytest.mark.long


def prox(x, weights, gamma):
    """argmin sum_i w_i f_i + |. - x|^2 / (2 gamma)"""
    H = np.einsum("n,nij->ij", weights, PROBLEM.H) + np.eye(D) / gamma
    return np.linalg.solve(H, np.einsum("n,nij,nj->i", weights, PROBLEM.H, PROBLEM.c) + x / gamma)


def dense_weights(draw):
    weights = np.zeros(N)
    np.add.at(weights, np.asarray(draw.ids), np.where(draw.mask, draw.weights, 0))
    return weights


@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_round_is_the_prox_of_the_cohort_with_weights_one_over_n_p(name):
    sampling = SAMPLINGS[name]
    found, metrics = after(sppm_as.sppm_as(quadratic.loss, sampling, newton), EXACT, rounds=3)
    x = np.asarray(START)
    for t in range(3):
        before = x
        draw = sampling.sample(jax.random.fold_in(KEY, t))
        x = prox(x, dense_weights(draw), EXACT.gamma)
    np.testing.assert_allclose(found, x, atol=1e-8)
    values = 0.5 * np.einsum("ni,nij,nj->n", before - PROBLEM.c, PROBLEM.H, before - PROBLEM.c)
    np.testing.assert_allclose(metrics.loss, dense_weights(draw) @ values, rtol=1e-7)
    assert metrics.residual <= 1e-9 and metrics.bits_hubs == 0
    share = np.sum(draw.mask) / N
    np.testing.assert_allclose(metrics.bits_up, share * 64 * (D + 1) * float(metrics.local_rounds))
    assert metrics.local_rounds > 1
    np.testing.assert_allclose(metrics.bits_down, share * 64 * D * float(metrics.local_rounds))


@pytest.mark.parametrize("solver", [quasi_newton.bfgs, quasi_newton.conjugate_gradients, quasi_newton.lbfgs])
def test_all_solvers_give_the_same_step(solver):
    sampling = SAMPLINGS["stratified"]
    found, metrics = after(
        sppm_as.sppm_as(quadratic.loss, sampling, lambda hparams: solver()), EXACT._replace(tolerance=1e-9)
    )
    np.testing.assert_allclose(
        found, prox(np.asarray(START), dense_weights(sampling.sample(jax.random.fold_in(KEY, 0))), 2.0), atol=1e-8
    )
    assert metrics.code == solvers.CONVERGED and metrics.iterations <= metrics.local_rounds


def test_the_order_of_clients_does_not_matter():
    order = np.random.default_rng(1).permutation(N)
    for algorithm in (
        sppm_as.sppm_as(quadratic.loss, SAMPLINGS["block"], newton),
        local_gd.mb_local_gd(jax.value_and_grad(quadratic.loss), SAMPLINGS["block"]),
    ):
        hparams = EXACT if algorithm.step.__qualname__.startswith("sppm") else local_gd.HParams(0.1, 3)
        straight, _ = after(algorithm, hparams, 2)
        shuffled, _ = after(algorithm, hparams, 2, jnp.asarray(order), jax.tree.map(lambda leaf: leaf[order], DATA))
        np.testing.assert_allclose(shuffled, straight, rtol=1e-10)


@pytest.mark.parametrize("hubs", [None, cohort.Hubs.make([0, 0, 1, 1, 2, 2, 0, 1])], ids=["flat", "hubs"])
@pytest.mark.parametrize("name", ["stratified", "block"])
def test_devices_do_not_change_the_trajectory(name, hubs):
    algorithm = sppm_as.sppm_as(quadratic.loss, SAMPLINGS[name], lambda hparams: quasi_newton.bfgs(), hubs)
    state, step = algorithm.init(START, jnp.arange(N)), shard_step(algorithm, client_mesh(4))
    hparams = sppm_as.HParams(2.0, 4, 0.0)
    for _ in range(2):
        state, metrics = step(KEY, hparams, state, DATA)
    wanted, expected = after(algorithm, hparams, 2)
    np.testing.assert_allclose(state.server.params, wanted, rtol=1e-9)
    assert metrics.local_rounds == expected.local_rounds and metrics.bits_hubs == expected.bits_hubs


def test_averaged_proxes_and_their_two_anchors():
    sampling, gamma, alpha, rounds = SAMPLINGS["stratified"], 2.0, 0.7, 3
    members = np.asarray(sampling.sample(jax.random.fold_in(KEY, 0)).ids)
    one = np.eye(N)
    hparams = averaged_prox.HParams(gamma, rounds, 1e-12, alpha)
    fedprox, _ = after(averaged_prox.fedprox_sppm_as(quadratic.loss, sampling, newton), hparams)
    fedavg, metrics = after(averaged_prox.fedavg_sppm_as(quadratic.loss, sampling, newton), hparams)
    x = y = start = np.asarray(START)
    for _ in range(rounds):
        x = np.mean([prox(x, one[i], gamma) for i in members], axis=0)
        step, center = alpha * gamma / (alpha + gamma), (alpha * start + gamma * y) / (alpha + gamma)
        y = np.mean([prox(center, one[i], step) for i in members], axis=0)
    np.testing.assert_allclose(fedprox, x, atol=1e-8)
    np.testing.assert_allclose(fedavg, y, atol=1e-8)
    for algorithm, wanted in (
        (averaged_prox.fedprox_sppm_as(quadratic.loss, sampling, newton), fedprox),
        (averaged_prox.fedavg_sppm_as(quadratic.loss, sampling, newton), fedavg),
    ):
        step = shard_step(algorithm, client_mesh(4))
        state, _ = step(KEY, hparams, algorithm.init(START, jnp.arange(N)), DATA)
        np.testing.assert_allclose(state.server.params, wanted, rtol=1e-9)
    assert np.abs(fedprox - fedavg).max() > 1e-3  # not one method, as the text says (P2)
    assert metrics.local_rounds == rounds and metrics.code == solvers.CONVERGED
    # A member sends and receives one vector a local round.
    np.testing.assert_allclose([metrics.bits_up, metrics.bits_down], rounds * 64 * D * len(members) / N, rtol=1e-12)


def test_one_members_breakdown_is_reported_by_the_averaged_proxes():
    def saddle(x, data):  # client 5 has negative curvature
        return data.c[0] * 0 + jnp.where(data.c[1] > 100, -5.0, 0.5) * jnp.vdot(x, x)

    data = DATA._replace(c=DATA.c.at[5, 1].set(1000.0))
    hparams = averaged_prox.HParams(2.0, 2, 1e-9, most=20)
    for sampling, code in (
        (samplings.full(N), solvers.BROKE_DOWN),
        (samplings.nonuniform(np.eye(N)[0] * 0.992 + 0.001), solvers.CONVERGED),
    ):
        algorithm = averaged_prox.fedprox_sppm_as(saddle, sampling, newton)
        _, metrics = after(algorithm, hparams, data=data)
        assert metrics.code == code and (metrics.residual > 1e-9) == (code == solvers.BROKE_DOWN)
    step = shard_step(averaged_prox.fedprox_sppm_as(saddle, samplings.full(N), newton), client_mesh(4))
    _, metrics = step(KEY, hparams, sppm_as.init(START, jnp.arange(N)), data)
    assert metrics.code == solvers.BROKE_DOWN
    short = averaged_prox.fedprox_sppm_as(
        quadratic.loss, samplings.full(N), lambda hparams: solvers.gradient_descent(5.0)
    )
    assert after(short, hparams)[1].code == solvers.OUT_OF_BUDGET


@pytest.mark.parametrize("steps", [1, 5])
def test_local_gd_on_a_cohort(steps):
    sampling, stepsize = SAMPLINGS["block"], 0.2
    found, metrics = after(
        local_gd.mb_local_gd(jax.value_and_grad(quadratic.loss), sampling), local_gd.HParams(stepsize, steps)
    )
    draw = sampling.sample(jax.random.fold_in(KEY, 0))
    rows = []
    for i in np.asarray(draw.ids)[np.asarray(draw.mask)]:
        x = np.asarray(START)
        for _ in range(steps):
            x = x - stepsize * PROBLEM.H[i] @ (x - PROBLEM.c[i])
        rows.append(x)
    np.testing.assert_allclose(found, np.mean(rows, axis=0), rtol=1e-10)
    assert metrics.local_rounds == 1 and metrics.iterations == steps
    np.testing.assert_allclose([metrics.bits_up, metrics.bits_down], 64 * D * len(rows) / N, rtol=1e-12)


def test_a_grid_over_gamma_and_k_is_one_program_with_the_same_results():
    algorithm = sppm_as.sppm_as(quadratic.loss, SAMPLINGS["stratified"], lambda hparams: quasi_newton.bfgs())
    settings = [sppm_as.HParams(gamma, K, 1e-9) for gamma in (0.1, 10.0) for K in (1, 4)]
    keys = jax.random.split(KEY, 2)
    state = algorithm.init(START, jnp.arange(N))
    _, swept = runner.sweep(keys, algorithm, runner.stack(settings), state, DATA, 3)
    for h, hparams in enumerate(settings):
        for s, key in enumerate(keys):
            _, single = runner.run(key, algorithm, hparams, state, DATA, 3)
            np.testing.assert_allclose(swept.loss[h, s], single.loss, rtol=1e-9)
            np.testing.assert_array_equal(swept.local_rounds[h, s], single.local_rounds)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float64])
def test_any_gamma_runs_without_overflow(dtype):
    data = jax.tree.map(lambda leaf: leaf.astype(dtype), DATA)
    algorithm = sppm_as.sppm_as(quadratic.loss, SAMPLINGS["stratified"], lambda hparams: quasi_newton.bfgs())
    state = algorithm.init(START.astype(dtype), jnp.arange(N))
    for gamma in (1e-3, 1.0, 1e5):
        found, metrics = runner.run(KEY, algorithm, sppm_as.HParams(gamma, 20, 1e-6), state, data, 5)
        assert (
            found.server.params.dtype == dtype
            and np.isfinite(found.server.params).all()
            and np.isfinite(metrics.loss).all()
        )


@pytest.mark.parametrize("name", ["stratified", "nice"])
def test_pooling_the_rows_of_a_cohort_changes_nothing(name):
    rng = np.random.default_rng(5)
    sizes = rng.integers(1, 5, N)
    weights = np.array([[1 / size] * size + [0.0] * (4 - size) for size in sizes])
    data = ClientData(rng.standard_normal((N, 4, D)), np.sign(rng.standard_normal((N, 4))), weights)
    data = jax.tree.map(jnp.asarray, data)
    loss = partial(logistic.loss, mu=0.1)

    def run(pool):
        algorithm = sppm_as.sppm_as(loss, SAMPLINGS[name], lambda hparams: quasi_newton.bfgs(), pool=pool)
        return after(algorithm, EXACT, rounds=2, data=data)

    (x, metrics), (pooled, same) = run(None), run(stacked.pool(12))
    np.testing.assert_allclose(pooled, x, rtol=1e-9)
    np.testing.assert_allclose(same.loss, metrics.loss, rtol=1e-12)
    assert int(same.local_rounds) == int(metrics.local_rounds)


def test_bad_input_is_refused():
    algorithm = sppm_as.sppm_as(quadratic.loss, samplings.nice(5, 2), newton)
    with pytest.raises(ValueError, match="sampling is over 5 clients, the state has 8"):
        after(algorithm, EXACT)
    for bad, message in (((0.0, 3), "gamma=0.0"), ((1.0, 0), "rounds=0"), ((1.0, 1, -1.0), "tolerance=-1.0")):
        with pytest.raises(ValueError, match=message):
            sppm_as.check(sppm_as.HParams(*bad), N)
    assert sppm_as.HParams(1.0, 3) == sppm_as.HParams(1.0, 3, 0.0, 0.0)


@pytest.mark.parametrize("which", ["sppm_as", "fedprox", "local_gd"])
def test_bad_hparams_raise_in_a_step_and_break_down_where_they_are_traced(which):
    sampling = SAMPLINGS["nice"]
    algorithm, bad = {
        "sppm_as": (
            sppm_as.sppm_as(quadratic.loss, sampling, lambda h: solvers.gradient_descent(4.0)),
            {
                "gamma": [sppm_as.HParams(gamma, 5) for gamma in (-1.0, 0.0, np.nan)],
                "rounds": [sppm_as.HParams(1.0, 0), sppm_as.HParams(1.0, 2.7)],
                "tolerance": [sppm_as.HParams(1.0, 5, -1.0), sppm_as.HParams(1.0, 5, np.nan)],
            },
        ),
        "fedprox": (
            averaged_prox.fedprox_sppm_as(quadratic.loss, sampling, lambda h: solvers.gradient_descent(4.0)),
            {
                "gamma": [averaged_prox.HParams(-1.0, 3, 1e-3, most=5)],
                "rounds": [averaged_prox.HParams(1.0, 0, 1e-3, most=5)],
            },
        ),
        "local_gd": (
            local_gd.mb_local_gd(jax.value_and_grad(quadratic.loss), sampling),
            {"stepsize": [local_gd.HParams(-1.0, 2)], "steps": [local_gd.HParams(0.1, 0)]},
        ),
    }[which]
    state = algorithm.init(START, jnp.arange(N))
    compiled = jax.jit(algorithm.step)
    for name, settings in bad.items():
        for hparams in settings:
            with pytest.raises(ValueError, match=f"{name}=.*; allowed"):
                algorithm.step(KEY, hparams, state, DATA)
            found, metrics = compiled(KEY, hparams, state, DATA)
            assert metrics.code == solvers.BROKE_DOWN
            np.testing.assert_array_equal(found.server.params, START)


def test_local_gd_does_not_go_on_from_a_model_that_is_not_finite_and_says_so():
    algorithm = local_gd.mb_local_gd(jax.value_and_grad(quadratic.loss), SAMPLINGS["nice"])
    grid = runner.stack([local_gd.HParams(stepsize, 5) for stepsize in (0.1, 1e80)])
    states, metrics = runner.sweep(KEY[None], algorithm, grid, algorithm.init(START, jnp.arange(N)), DATA, 3)
    assert metrics.code[:, 0].tolist() == [[solvers.CONVERGED] * 3, [solvers.BROKE_DOWN] * 3]
    np.testing.assert_array_equal(states.server.params[1, 0], START)
    assert np.all(np.isfinite(metrics.loss)) and np.all(states.server.round == 3)


def test_theoretical_stepsizes_contract_and_are_those_of_the_papers():
    L_i = np.linalg.eigvalsh(PROBLEM.H)[:, -1]
    n, tau = N, 3
    expected = n * (tau - 1) / (tau * (n - 1)) * L_i.mean() + (n - tau) / (tau * (n - 1)) * L_i.max()
    single, many = (local_gd.theoretical(samplings.nice(n, tau), L_i, steps) for steps in (1, 5))
    assert single.stepsize == pytest.approx(1 / (2 * expected)) and single.steps == 1
    assert many.stepsize == pytest.approx(1 / (32 * L_i.max())) and many.steps == 5
    assert local_gd.theoretical(samplings.full(n), L_i).stepsize == pytest.approx(1 / (2 * L_i.mean()))
    assert local_gd.theoretical(samplings.full(n), L_i, 2).stepsize == pytest.approx(1 / (8 * L_i.max()))
    # E |x+ - x*|^2 <= (1 - s mu) |x - x*|^2 + 2 s^2 sigma^2 over all cohorts (Gower et al. 2019, Thm 3.1)
    for sampling in (
        samplings.nice(n, tau),
        samplings.block(np.arange(n).reshape(4, 2)),
        samplings.stratified(np.arange(n).reshape(4, 2)),
    ):
        s = local_gd.theoretical(sampling, L_i).stepsize
        x_star = quadratic.optimum(PROBLEM).params
        a, x = np.einsum("nij,nj->ni", PROBLEM.H, x_star - PROBLEM.c), np.asarray(START) * 3
        grads = np.einsum("nij,nj->ni", PROBLEM.H, x - PROBLEM.c)
        left = sum(p * np.sum((x - s * grads[list(ids)].mean(axis=0) - x_star) ** 2) for p, ids in sampling.outcomes())
        mu = np.linalg.eigvalsh(PROBLEM.H.mean(axis=0))[0]
        assert left <= (1 - s * mu) * np.sum((x - x_star) ** 2) + 2 * s**2 * sampling.variance(a)
    with pytest.raises(ValueError, match="unequal shares"):
        local_gd.theoretical(samplings.stratified(CLUSTERS), L_i)
    with pytest.raises(ValueError, match="steps=0; allowed"):
        local_gd.theoretical(samplings.full(n), L_i, 0)


def test_residuals_certify_prox_errors_that_keep_the_inexact_bound():
    """The residual of every round -> b of squared_prox_error -> inexact_bound: E |x_T - x*|^2 over 200 runs stays
    under it."""
    sampling, gamma, T = samplings.stratified(np.arange(N).reshape(4, 2)), 0.5, 6
    algorithm = sppm_as.sppm_as(
        quadratic.loss, sampling, lambda hparams: solvers.gradient_descent(3.0 + 1 / hparams.gamma)
    )
    state = algorithm.init(START, jnp.arange(N))
    settings = runner.stack([sppm_as.HParams(gamma, 3, 0.0)])
    states, metrics = runner.sweep(jax.random.split(KEY, 200), algorithm, settings, state, DATA, T)
    mu, x_star = sampling.mu(np.linalg.eigvalsh(PROBLEM.H)[:, 0]), quadratic.optimum(PROBLEM).params
    sigma2 = sampling.variance(np.einsum("nij,nj->ni", PROBLEM.H, x_star - PROBLEM.c))
    b = theory.squared_prox_error(float(np.max(metrics.residual)), gamma, mu)
    distance = np.sum((np.asarray(states.server.params[0]) - x_star) ** 2, axis=1).mean()
    start = float(np.sum((np.asarray(START) - x_star) ** 2))
    assert 1e-8 < b < 1 and distance <= theory.inexact_bound(T, start, gamma, mu, sigma2, b)
