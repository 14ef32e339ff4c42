"""Scafflix's corollaries and lemmas: how communication grows, the stepsizes for an accuracy, the constants of FLIX
functions."""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commjax.algorithms import flix, scafflix
from commjax.problems import quadratic
from commjax.theory import scafflix as theory
from tests.theory.scafflix_cases import (
    ALPHA,
    DATA,
    IDS,
    KEY,
    MU,
    SPECTRA,
    D,
    L,
    N,
    gradients,
    minimiser,
    mixed,
    squares,
    value_and_grad,
)


def conditioned(kappa):
    """Clients with condition number kappa whose flat directions agree, so that f has it as well."""
    rng = np.random.default_rng(2)
    curvature = np.stack([np.ones(N), np.full(N, 1 / kappa)], axis=1) * rng.uniform(0.5, 2.0, (N, 1))
    H = np.einsum("nd,de->nde", curvature, np.eye(2))
    return quadratic.Quadratic(H, rng.standard_normal((N, 2)))


def rounds_to_accuracy(algorithm, hparams, problem, best):
    """Rounds until |x - x*|^2 is 1e-6 of what it was"""
    data = jax.tree.map(jnp.asarray, problem)
    start = algorithm.init(jnp.zeros(2), IDS, optimum=data.c)
    goal = 1e-6 * np.sum(best**2)

    def going_on(state):
        return jnp.sum((state.server.params - best) ** 2) > goal

    end = jax.jit(
        lambda hparams: jax.lax.while_loop(going_on, lambda state: algorithm.step(KEY, hparams, state, data)[0], start)
    )(hparams)
    return int(end.server.round)


def test_communication_grows_with_the_root_of_the_condition_number():
    """T24, Cor. 1 (L1386): slope 1/2 of Scafflix and 1 of gradient descent, in logarithms"""
    kappas, counts = 10.0 ** np.arange(1, 5), []
    for kappa in kappas:
        problem = conditioned(kappa)
        best = minimiser(ALPHA, problem=problem)
        L = np.linalg.eigvalsh(problem.H)[:, -1]
        ours = scafflix.theoretical(L, L / kappa, ALPHA)
        assert ours.p == pytest.approx(kappa**-0.5)
        counts.append(
            [
                rounds_to_accuracy(scafflix.scafflix(value_and_grad), ours, problem, best),
                rounds_to_accuracy(flix.flix(value_and_grad), flix.theoretical(L, ALPHA), problem, best),
            ]
        )
    ours, plain = np.polyfit(np.log(kappas), np.log(counts), 1)[0]
    assert 0.4 < ours < 0.62 and 0.85 < plain < 1.15, counts
    bound = [theory.iterations_to(1e-6, 1.0, 1 / kappa) / kappa**0.5 for kappa in kappas]
    np.testing.assert_allclose(np.polyfit(np.log(kappas), np.log(bound), 1)[0], 0.5, atol=1e-12)


def test_the_stepsizes_of_corollary_2_leave_half_of_epsilon():
    """T25 (L1395)"""
    rng = np.random.default_rng(6)
    tight = 0
    for _ in range(300):
        mu = 10.0 ** rng.uniform(-3, 0, N)
        A = mu * 10.0 ** rng.uniform(0, 3, N)
        C = 10.0 ** rng.uniform(-3, 3, N) * (rng.uniform(size=N) > 0.3)
        epsilon = 10.0 ** rng.uniform(-4, 0)
        gamma, _, p = scafflix.theoretical(A, mu, C=C, epsilon=epsilon, strict=True)
        assert p == theory.best_probability(gamma, mu) <= 1
        assert theory.rate(gamma, mu, p) == pytest.approx(np.min(gamma * mu))
        floor = theory.neighbourhood(gamma, mu, p, C)
        assert floor <= epsilon / 2 * (1 + 1e-12)
        tight += floor > 0.3 * epsilon / 2
        np.testing.assert_array_equal(gamma[C == 0], 1 / A[C == 0])
        zeta = theory.rate(gamma, mu, p)
        T = theory.iterations_to(epsilon / 2, 7.0, zeta)
        assert zeta == 1 or T * np.log1p(-zeta) <= np.log(epsilon / 2 / 7.0)
    assert tight > 10


def test_a_smaller_p_slows_the_rate_and_a_larger_one_does_not_help():
    rng = np.random.default_rng(7)
    gamma, mu = rng.uniform(0.1, 1.0, N), rng.uniform(0.1, 1.0, N)
    p = theory.best_probability(gamma, mu)
    assert theory.rate(gamma, mu, 0.9 * p) < theory.rate(gamma, mu, p) * 0.82
    assert theory.rate(gamma, mu, 1.0) == pytest.approx(theory.rate(gamma, mu, p))


def test_weights_add_up_to_1_and_favour_small_stepsizes_and_large_alphas():
    rng = np.random.default_rng(8)
    gamma, alpha = rng.uniform(0.1, 1.0, N), rng.uniform(0.1, 1.0, N)
    weights = theory.aggregation_weights(gamma, alpha)
    assert weights.sum() == pytest.approx(1)
    np.testing.assert_allclose(weights, (alpha**2 / gamma) / np.sum(alpha**2 / gamma), rtol=1e-13)
    assert theory.server_stepsize(gamma, np.zeros(N)) == np.inf


def test_the_bound_on_the_first_lyapunov_value_is_algebra():
    """T26 (L1420); its h_i = grad f_i(xtilde_i) is not admissible (S2), its inequalities hold."""
    rng = np.random.default_rng(10)
    for _ in range(50):
        alpha, p = rng.uniform(0.05, 1.0, N), rng.uniform(0.05, 1.0)
        gamma, x = rng.uniform(0.1, 1.0, N) / L, 3 * rng.standard_normal(D)
        x_star = minimiser(alpha)
        start, best = mixed(alpha, x), mixed(alpha, x_star)
        slopes = gradients(best)
        np.testing.assert_allclose(squares(start - best), alpha**2 * np.sum((x - x_star) ** 2), rtol=1e-11)
        found = theory.lyapunov(squares(start - best), squares(gradients(start) - slopes), gamma, p)
        terms = 1 / gamma + gamma * L**2 / p**2
        scale = gamma.min() * np.sum((x - x_star) ** 2)
        looser = scale * alpha.max() ** 2 * terms.mean()
        assert found <= scale * np.mean(alpha**2 * terms) * (1 + 1e-12) <= looser * (1 + 2e-12)
        assert found > 0.05 * scale * np.mean(alpha**2 / gamma)


def test_the_flix_functions_have_alpha_squared_constants_and_the_same_bregman_divergence():
    """T27 (L3685)"""
    objective = flix.objective(value_and_grad)
    rng = np.random.default_rng(11)
    for i, alpha in product(range(N), (0.1, 0.7, 1.0)):
        data = jax.tree.map(lambda leaf, i=i: leaf[i], DATA)
        optimum = jnp.asarray(rng.standard_normal(D))  # any point will do

        def mixed_value(x, alpha=alpha, optimum=optimum, data=data):
            return objective(alpha, x, optimum, data)[0]

        spectrum = np.linalg.eigvalsh(jax.hessian(mixed_value)(jnp.zeros(D)))
        np.testing.assert_allclose(spectrum, alpha**2 * SPECTRA[i], rtol=1e-11)
        x, y = jnp.asarray(rng.standard_normal((2, D)))
        tilde = mixed_value(x) - mixed_value(y) - objective(alpha, y, optimum, data)[1] @ (x - y)
        x, y = (flix.mixture(alpha, one, optimum) for one in (x, y))
        value = quadratic.loss(x, data) - quadratic.loss(y, data) - value_and_grad(y, data)[1] @ (x - y)
        np.testing.assert_allclose(tilde, value, rtol=1e-11)


def test_the_bregman_divergence_is_the_same_for_functions_that_are_not_quadratic():
    def f(x, data):
        return jnp.sum(jax.nn.softplus(x * data)) + 0.1 * jnp.sum(x**4)

    gradient, objective = jax.value_and_grad(f), flix.objective(jax.value_and_grad(f))
    rng = np.random.default_rng(12)
    for alpha in (0.2, 0.9):
        x, y, optimum, data = jnp.asarray(rng.standard_normal((4, D)))
        value, slope = objective(alpha, y, optimum, data)
        tilde = objective(alpha, x, optimum, data)[0] - value - slope @ (x - y)
        x, y = (flix.mixture(alpha, one, optimum) for one in (x, y))
        np.testing.assert_allclose(tilde, f(x, data) - f(y, data) - gradient(y, data)[1] @ (x - y), rtol=1e-11)


def test_an_accuracy_that_is_not_positive_is_refused():
    for epsilon in (0.0, -1.0, np.nan):
        with pytest.raises(ValueError, match=r"epsilon=.*; allowed: positive"):
            theory.stepsizes_for(float(epsilon), L, MU, np.ones(N))


def test_the_constants_of_sampling_are_those_of_the_text():
    rows = np.array([[1.0, 0.0], [3.0, 0.0]])
    A, C = theory.expected_smoothness(1.5, rows)
    # 2 mean |g_j|^2 - 2 |mean g_j|^2 = 2 * 5 - 2 * 4
    assert A == 3.0 and C == 2.0
