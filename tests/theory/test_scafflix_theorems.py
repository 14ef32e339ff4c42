"""Scafflix's theorems: exact expectations of one step of the package at arbitrary states, over every outcome.

The coin is forced, so that both outcomes of a step are seen; the rows of a stochastic gradient are enumerated.
"""

from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commjax.algorithms import scafflix
from commjax.algorithms.scafflix import communication
from commjax.core.base import State
from commjax.problems import quadratic
from commjax.theory import scafflix as theory
from tests.theory.scafflix_cases import (
    ALPHA,
    DATA,
    IDS,
    KEY,
    MU,
    PROBLEM,
    D,
    L,
    N,
    gradients,
    minimiser,
    mixed,
    squares,
    value_and_grad,
)


def both_outcomes(monkeypatch, algorithm):
    """step(hparams, states, data) -> states after tails and after heads, for a stack of states"""
    outcomes = []
    for heads in (False, True):

        def step(hparams, state, data, heads=heads):
            monkeypatch.setattr(communication, "coin", lambda key, p, t: jnp.asarray(heads))
            return algorithm.step(KEY, hparams, state, data)[0]

        outcomes.append(jax.jit(jax.vmap(step, (None, 0, None))))
    return outcomes


def stacked(models, shift, alpha, optimum, xbar=None):
    """States with the given xtilde [m, n, d] and h; a server that is somewhere else does not matter."""
    m = len(models)
    xbar = np.random.default_rng(9).standard_normal((m, D)) if xbar is None else xbar
    base = xbar[:, None] if optimum is None else alpha[:, None] * xbar[:, None] + (1 - alpha)[:, None] * optimum
    counter = jnp.zeros(m, jnp.int32)
    rows = None if optimum is None else jnp.broadcast_to(jnp.asarray(optimum), models.shape)
    return State(
        scafflix.Server(counter, jnp.asarray(xbar), counter, counter),
        scafflix.Client(jnp.broadcast_to(IDS, models.shape[:2]), jnp.asarray(models - base), jnp.asarray(shift), rows),
    )


def read(alpha, states):
    """xtilde and h"""
    xbar, rows = np.asarray(states.server.params)[:, None], states.clients
    a = alpha[:, None]
    base = xbar if rows.optimum is None else a * xbar + (1 - a) * np.asarray(rows.optimum)
    return base + np.asarray(rows.drift), np.asarray(rows.shift)


def admissible(shift, alpha):
    """The nearest h with sum_i alpha_i h_i = 0"""
    return shift - alpha[:, None] * np.einsum("n,mnd->md", alpha, shift)[:, None] / (alpha @ alpha)


def random_states(alpha, seed, count=200, best=None, slopes=None):
    """xtilde and h at all distances from the fixed point, some on it in one part."""
    rng = np.random.default_rng(seed)
    far, off = 10.0 ** rng.uniform(-3, 1, (2, count, 1, 1))
    far[::7], off[::5] = 0.0, 0.0
    models = best + far * rng.standard_normal((count, N, D))
    return models, slopes + off * admissible(rng.standard_normal((count, N, D)), alpha)


def psi(models, shift, best, slopes, gamma, p):
    return np.array(
        [theory.lyapunov(squares(x - best), squares(h - slopes), gamma, p) for x, h in zip(models, shift, strict=True)]
    )


def test_the_identity_of_i_scaffnew_is_exact_for_any_gradients(monkeypatch):
    """T20, L3629"""
    rng = np.random.default_rng(0)
    one = np.ones(N)
    algorithm = scafflix.iterations(lambda params, grad: (jnp.zeros(()), grad), personal=False)
    steps = both_outcomes(monkeypatch, algorithm)
    for p in (0.1, 0.6, 1.0):
        gamma = rng.uniform(0.1, 2.0, N)
        grads, x_star = rng.standard_normal((N, D)), rng.standard_normal(D)
        slopes, shift = admissible(rng.standard_normal((2, N, D)), one)
        models = rng.standard_normal((1, N, D))
        hparams = scafflix.HParams(gamma, 1.0, p)

        def norm(x, gamma=gamma):
            return np.sum(squares(x) / gamma)

        total = 0.0
        for chance, step in zip((1 - p, p), steps, strict=True):
            x, h = read(one, step(hparams, stacked(models, shift[None], one, None), jnp.asarray(grads)))
            total += chance * (norm(x[0] - x_star) + norm(gamma[:, None] * (h[0] - slopes)) / p**2)
        w = models[0] - gamma[:, None] * grads - (x_star - gamma[:, None] * slopes)
        wanted = norm(w) + (1 - p**2) / p**2 * norm(gamma[:, None] * (shift - slopes))
        assert total == pytest.approx(wanted, rel=1e-13)
        shift = shift + 1.0  # the identity needs sum_i h_i = 0
        total = 0.0
        for chance, step in zip((1 - p, p), steps, strict=True):
            x, h = read(one, step(hparams, stacked(models, shift[None], one, None), jnp.asarray(grads)))
            total += chance * (norm(x[0] - x_star) + norm(gamma[:, None] * (h[0] - slopes)) / p**2)
        wanted = norm(w) + (1 - p**2) / p**2 * norm(gamma[:, None] * (shift - slopes))
        assert abs(total / wanted - 1) > 1e-3


def worst_ratio(steps, hparams, alpha, personal, seed, shrink=None):
    """max over states of E Psi+ / ((1 - zeta) Psi)"""
    gamma, p = np.asarray(hparams.gamma), hparams.p
    best = mixed(alpha, minimiser(alpha)) if personal else np.tile(minimiser(alpha), (N, 1))
    slopes = gradients(best)
    models, shift = random_states(alpha, seed, best=best, slopes=slopes)
    states = stacked(models, shift, alpha, PROBLEM.c if personal else None)
    tails, heads = (psi(*read(alpha, step(hparams, states, DATA)), best, slopes, gamma, p) for step in steps)
    before = psi(models, shift, best, slopes, gamma, p)
    zeta = theory.rate(gamma, MU, p) if shrink is None else shrink
    moving = before > 1e-20
    return np.max(((1 - p) * tails + p * heads)[moving] / ((1 - zeta) * before[moving]))


@pytest.mark.parametrize("personal", [False, True], ids=["i-Scaffnew, T21", "Scafflix, T22"])
def test_one_step_shrinks_the_lyapunov_function_as_the_theorem_says(monkeypatch, personal):
    """L3512 and L1343"""
    rng = np.random.default_rng(1)
    steps = both_outcomes(monkeypatch, scafflix.iterations(value_and_grad, personal=personal))
    for seed, p in enumerate((None, 0.1, 0.5, 0.9, 1.0)):
        alpha = rng.uniform(0.05, 1.0, N) if personal else np.ones(N)
        for factor in (1.0, rng.uniform(0.1, 1.0, N)):
            hparams = scafflix.theoretical(L, MU, alpha, gamma=factor / L, p=p)
            assert worst_ratio(steps, hparams, alpha, personal, seed) <= 1 + 1e-11


def test_a_rate_2_5_times_as_fast_or_stepsizes_3_times_as_long_would_be_false(monkeypatch):
    steps = both_outcomes(monkeypatch, scafflix.iterations(value_and_grad))
    alpha = np.array([0.05, 0.5, 1.0])
    hparams = scafflix.theoretical(L, MU, alpha)
    zeta = theory.rate(np.asarray(hparams.gamma), MU, hparams.p)
    assert worst_ratio(steps, hparams, alpha, True, 3, shrink=2.5 * zeta) > 1
    wild = scafflix.HParams(3.0 / L, alpha, hparams.p)
    assert worst_ratio(steps, wild, alpha, True, 3) > 1


def follow(hparams, state, rounds, problem=PROBLEM):
    step = jax.jit(scafflix.scafflix(value_and_grad).step)
    data = jax.tree.map(jnp.asarray, problem)
    for _ in range(rounds):
        state, _ = step(KEY, hparams, state, data)
    return state


def start_with(shift):
    state = scafflix.scafflix(value_and_grad).init(jnp.ones(D), IDS, optimum=DATA.c)
    return state._replace(clients=state.clients._replace(shift=jnp.asarray(shift)))


def test_with_the_printed_condition_the_theorem_is_false():
    """T22 with sum h = 0 instead of sum alpha h = 0 (S1): the limit is the minimiser of n ftilde(x) - <c, x>."""
    hparams = scafflix.theoretical(L, MU, ALPHA)
    rng = np.random.default_rng(5)
    shift = rng.standard_normal((N, D))
    shift -= shift.mean(0)
    with pytest.raises(ValueError, match="sum_i alpha_i h_i must be 0"):
        scafflix.scafflix(value_and_grad).init(jnp.ones(D), IDS, optimum=DATA.c, shift=jnp.asarray(shift), alpha=ALPHA)
    wrong = follow(hparams, start_with(shift), 400).server.params
    np.testing.assert_allclose(wrong, minimiser(ALPHA, tilt=ALPHA @ shift), atol=1e-10)
    assert np.abs(wrong - minimiser(ALPHA)).max() > 0.1
    right = follow(hparams, start_with(admissible(shift[None], ALPHA)[0]), 400).server.params
    np.testing.assert_allclose(right, minimiser(ALPHA), atol=1e-10)
    equal = scafflix.theoretical(L, MU, 0.6)
    np.testing.assert_allclose(follow(equal, start_with(shift), 400).server.params, minimiser(0.6), atol=1e-10)


def test_the_printed_start_is_a_fixed_point_and_its_admissible_neighbour_is_not():
    """S2: L1416 takes h_i = grad f_i(xtilde_i)."""
    hparams = scafflix.theoretical(L, MU, ALPHA)
    slopes = gradients(mixed(ALPHA, np.ones(D)))
    printed = start_with(jax.vmap(value_and_grad)(jnp.asarray(mixed(ALPHA, np.ones(D))), DATA)[1])
    stuck = follow(hparams, printed, 20)
    np.testing.assert_allclose(stuck.server.params, np.ones(D), atol=1e-15)
    np.testing.assert_allclose(stuck.clients.shift, slopes, atol=1e-14)
    assert np.abs(minimiser(ALPHA) - 1).max() > 0.1
    init = scafflix.scafflix(value_and_grad).init
    with pytest.raises(ValueError, match="sum_i alpha_i h_i must be 0"):
        init(jnp.ones(D), IDS, optimum=DATA.c, shift=jnp.asarray(slopes), alpha=ALPHA)
    shift = scafflix.admissible_shift(jnp.asarray(slopes), ALPHA)
    state = init(jnp.ones(D), IDS, optimum=DATA.c, shift=shift, alpha=ALPHA)
    np.testing.assert_allclose(follow(hparams, state, 400).server.params, minimiser(ALPHA), atol=1e-11)


ROWS = 3


def rows_of_quadratics(seed):
    """f_ij(x) = 1/2 (<a_ij, x> - b_ij)^2 + r/2 |x|^2, and f_i = mean_j f_ij as a Quadratic"""
    rng = np.random.default_rng(seed)
    a, b, r = rng.standard_normal((N, ROWS, D)), 3 * rng.standard_normal((N, ROWS)), 0.3
    H = np.einsum("nri,nrj->nij", a, a) / ROWS + r * np.eye(D)
    c = np.linalg.solve(H, np.einsum("nri,nr->ni", a, b)[..., None] / ROWS)[..., 0]
    return a, b, r, quadratic.Quadratic(H, c)


@pytest.mark.parametrize("seed", [0, 1])
def test_with_sampled_rows_one_step_is_within_the_noise_of_the_theorem(monkeypatch, seed):
    """T23: A_i = 2 L_i and C_i of L1335, over every choice of rows and both coins."""
    a, b, r, problem = rows_of_quadratics(seed)
    alpha = np.random.default_rng(seed).uniform(0.2, 1.0, N)
    best = mixed(alpha, minimiser(alpha, problem=problem), problem)

    def by_row(models):
        residual = np.einsum("nri,...ni->...nr", a, models) - b
        return residual[..., None] * a + r * models[..., None, :]

    pairs = [theory.expected_smoothness(float(squares(a[i]).max() + r), by_row(best)[i]) for i in range(N)]
    A, C = np.array(pairs).T
    rows = by_row(best)
    np.testing.assert_allclose(C, 2 * squares(rows).mean(1) - 2 * squares(rows.mean(1)), rtol=1e-11)
    np.testing.assert_allclose(rows.mean(1), gradients(best, problem), rtol=1e-11, atol=1e-12)
    mu = np.linalg.eigvalsh(problem.H)[:, 0]

    def loss(x, data):
        vector, offset, _ = data
        return 0.5 * (vector @ x - offset) ** 2 + r / 2 * jnp.sum(x**2)

    def pick(key, data):
        vectors, offsets, chosen = data
        return vectors[chosen], offsets[chosen], chosen

    steps = both_outcomes(monkeypatch, scafflix.iterations(jax.value_and_grad(loss), pick))
    for p in (None, 0.5):
        hparams = scafflix.theoretical(A, mu, alpha, p=p)
        gamma, p = np.asarray(hparams.gamma), hparams.p
        slopes = gradients(best, problem)
        models, shift = random_states(alpha, seed, count=60, best=best, slopes=slopes)
        states = stacked(models, shift, alpha, problem.c)
        expected = 0.0
        for chosen in product(range(ROWS), repeat=N):
            data = (jnp.asarray(a), jnp.asarray(b), jnp.asarray(chosen))
            for chance, step in zip((1 - p, p), steps, strict=True):
                after = psi(*read(alpha, step(hparams, states, data)), best, slopes, gamma, p)
                expected = expected + chance / ROWS**N * after
        before, zeta = psi(models, shift, best, slopes, gamma, p), theory.rate(gamma, mu, p)
        noise = zeta * theory.neighbourhood(gamma, mu, p, C)
        assert noise == pytest.approx(gamma.min() * np.mean(gamma * C), rel=1e-12)
        assert np.all(expected <= (1 - zeta) * before + noise * (1 + 1e-11))
        calm = before < 1e-20
        assert calm.any() and np.all(expected[calm] >= 0.3 * noise)  # C_i is within a factor, and not 0
        # Assumption (L1322) itself, at the same points
        spread = squares(by_row(models) - slopes[:, None]).mean(-1)
        away = models - best
        bregman = 0.5 * np.einsum("mni,nij,mnj->mn", away, problem.H, away)
        assert np.all(spread <= 2 * A * bregman + C + 1e-9)
