"""FedP3's theorems, T50 to T54: exact expectations over every permutation.

Steps are the package's, with their random parts forced; the false statements stand here with their counterexamples.
"""

import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commjax.algorithms.fedp3 import sketched
from commjax.compressors import perm_k
from commjax.core.base import Message
from commjax.problems import quadratic
from commjax.theory import fedp3 as theory

GOLDENS = json.loads((Path(__file__).parents[1] / "data" / "goldens_fedp3_theory.json").read_text())
N, D = 2, 4
KEY = jax.random.key(0)
value_and_grad = jax.value_and_grad(quadratic.loss)


def diagonals(permutation, n):
    """S_1, ..., S_n of Def. L1763, as diagonals"""
    d = len(permutation)
    s = d // n
    rows = np.zeros((n, d))
    for i in range(n):
        rows[i, list(permutation[s * i : s * (i + 1)])] = n
    return rows


def all_diagonals(d, n):
    return np.array([diagonals(p, n) for p in itertools.permutations(range(d))])


def squares(x):
    return np.sum(x**2, axis=-1)


def forced(diagonal):
    """The aggregation sketch whose event is known"""
    return perm_k()._replace(name="forced", compress=lambda key, x, id=0, n=1: Message(x * diagonal[id], jnp.zeros(())))


# --- T50: the sketch


def test_the_golden_permutation_gives_the_golden_diagonals():
    golden = GOLDENS["fedp3_sketch"]
    np.testing.assert_array_equal(diagonals(golden["perm_0based"], golden["n"]), [golden["S1_diag"], golden["S2_diag"]])


@pytest.mark.parametrize("d, n", [(6, 2), (6, 3), (4, 4)])
def test_the_package_s_sketch_has_the_law_of_the_definition(d, n):
    rng = np.random.default_rng(0)
    xs = rng.standard_normal((n, d))
    law = perm_k().outcomes
    assert law is not None
    probability, values = law(xs)
    assert probability == pytest.approx(1 / len(values))
    found = {tuple(np.round(value, 9).ravel()) for value in values}
    wanted = {tuple(np.round(one * xs, 9).ravel()) for one in all_diagonals(d, n)}
    assert found == wanted and len(values) % len(wanted) == 0


def test_a_shared_permutation_is_unbiased_adds_up_to_the_identity_and_keeps_the_second_moment():
    """L4346: equalities, all of them"""
    d, n = 6, 3
    S, ys = all_diagonals(d, n), np.random.default_rng(1).standard_normal((n, d))
    np.testing.assert_allclose(S.mean(axis=1), 1.0)
    np.testing.assert_array_equal(S[:, 0] * S[:, 1], 0.0)
    np.testing.assert_allclose(S.mean(axis=0), 1.0)
    np.testing.assert_allclose(squares(S * ys).mean(axis=0), n * squares(ys))
    mean = (S * ys).mean(axis=1)
    assert squares(mean).mean() == pytest.approx(theory.sketch_moment(ys), rel=1e-12)
    assert squares(mean - ys.mean(axis=0)).mean() == pytest.approx(theory.sketch_variance(ys), rel=1e-12)


def test_permutations_of_their_own_destroy_the_weights():
    """F10: with independent permutations neither (1/n) sum S_i = I nor the second moment holds"""
    d, n = 4, 2
    S, w = all_diagonals(d, n), np.ones(d)
    first, second = np.repeat(S[:, 0], len(S), axis=0), np.tile(S[:, 1], (len(S), 1))
    aggregated = (first + second) / 2 * w
    assert np.mean(np.any(aggregated != w, axis=1)) > 0.8
    lost = squares(aggregated - w).mean()
    assert lost == pytest.approx((n - 1) / n * d)  # variance n - 1 of each coordinate, over n clients
    assert squares(aggregated).mean() > 1.4 * theory.sketch_moment(np.ones((n, d)))


# --- T51, T52: gradients and the infimum


def test_the_gradient_is_bounded_by_the_gap_to_the_client_s_own_infimum():
    rng = np.random.default_rng(2)
    tightest = 0.0
    for seed in range(20):
        problem = quadratic.random(seed, 3, D, mu=0.1, L=4.0, heterogeneity=3.0)
        L = quadratic.constants(problem).L_i
        w = 3 * rng.standard_normal(D)
        for i in range(3):
            away = w - problem.c[i]
            if seed % 4 == 0:  # along the steepest direction it is an equality
                away = np.linalg.eigh(problem.H[i])[1][:, -1]
            left, gap = squares(problem.H[i] @ away), away @ problem.H[i] @ away / 2
            assert left <= theory.gradient_bound(float(L[i]), float(gap)) * (1 + 1e-12)
            tightest = max(tightest, left / theory.gradient_bound(float(L[i]), float(gap)))
    assert tightest > 1 - 1e-9


def pair(size, d=D):
    """f_{1,2}(w) = |w -+ c|^2 / 2 with |c| = size"""
    c = np.zeros((2, d))
    c[0, 0], c[1, 0] = size, -size
    return quadratic.Quadratic(np.tile(np.eye(d), (2, 1, 1)), c)


def test_with_the_infimum_of_the_mean_the_gradient_bound_is_false():
    """F11: at w = 0 the left side is |c|^2, the right side 2 (f_i - inf f) = 0"""
    problem = pair(1.0)
    f_i = 0.5 * squares(problem.c)
    inf_f = quadratic.optimum(problem).value
    assert squares(problem.c)[0] == 1.0 > theory.gradient_bound(1.0, float(f_i[0] - inf_f)) == 0.0


def affine_steps(problem, gamma):
    """w+ = A w + b for every owner of every coordinate, as matrices on (w, 1)"""
    n, d = problem.c.shape
    maps = []
    for diagonal in np.unique(all_diagonals(d, n), axis=0):
        owner = diagonal.argmax(axis=0)
        H = np.stack([problem.H[owner[j], j] for j in range(d)])
        Hc = np.array([problem.H[owner[j], j] @ problem.c[owner[j]] for j in range(d)])
        matrix = np.zeros((d + 1, d + 1))
        matrix[:d, :d], matrix[:d, d], matrix[d, d] = np.eye(d) - gamma * H, gamma * Hc, 1.0
        maps.append(matrix)
    return np.array(maps)


@pytest.fixture(scope="module")
def package_step():
    def step(diagonal, gamma, w, data):
        algorithm = sketched.sketched(value_and_grad, sketch=forced(diagonal))
        state = algorithm.init(w, jnp.arange(N))
        return algorithm.step(KEY, sketched.HParams(gamma), state, data)[0].server.params

    return jax.jit(jax.vmap(step, (0, None, None, None)))


def test_the_step_of_the_package_is_the_affine_map(package_step):
    problem, w = quadratic.random(5, N, D, mu=0.5, L=3.0), np.random.default_rng(3).standard_normal(D)
    events = np.unique(all_diagonals(D, N), axis=0)
    found = package_step(jnp.asarray(events), 0.2, jnp.asarray(w), jax.tree.map(jnp.asarray, problem))
    np.testing.assert_allclose(found, (affine_steps(problem, 0.2) @ np.append(w, 1.0))[:, :D], rtol=1e-12)


def test_one_step_satisfies_the_abc_inequality_with_the_corrected_constant(package_step):
    """T52 with gamma = 1: w - w+ is the estimator"""
    rng, tightest = np.random.default_rng(4), 0.0
    events = jnp.asarray(np.unique(all_diagonals(D, N), axis=0))
    for seed in range(20):
        problem = quadratic.random(seed, N, D, mu=0.3, L=2.0, heterogeneity=2.0)
        if seed >= 15:
            problem = pair(rng.uniform(0.5, 2.0))
        data, smooth = jax.tree.map(jnp.asarray, problem), quadratic.constants(problem)
        best = quadratic.optimum(problem)
        abc = theory.aggregation_constants(smooth.L_i, best.value, np.zeros(N))
        w = best.params + (seed % 3) * rng.standard_normal(D)
        g = w - np.asarray(package_step(events, 1.0, jnp.asarray(w), data))
        away = w - problem.c
        f = np.einsum("ni,nij,nj->n", away, problem.H, away).mean() / 2
        np.testing.assert_allclose(g.mean(axis=0), np.einsum("nij,nj->i", problem.H, away) / N, atol=1e-12)
        right = 2 * abc.A * (f - best.value) + abc.C
        assert squares(g).mean() <= right * (1 + 1e-12)
        tightest = max(tightest, squares(g).mean() / right)
        if seed % 3 == 0:  # at the minimiser: without C the right side is 0
            assert squares(g).mean() > 0.05 > 2 * abc.A * (f - best.value)
    assert tightest > 1 - 1e-12  # the pair attains it


# --- T53, T54: the rate


def exact_run(problem, gamma, K, start):
    """(E |grad f(w^k)|^2, E f(w^k)) for k = 0, ..., K, from the exact second moment of (w, 1)"""
    maps, d = affine_steps(problem, gamma), problem.c.shape[1]
    H, Hc = problem.H.mean(axis=0), np.einsum("nij,nj->i", problem.H, problem.c) / len(problem.c)
    slope = np.column_stack([H, -Hc])
    value = np.zeros((d + 1, d + 1))
    value[:d, :d], value[:d, d], value[d, :d] = H, -Hc, -Hc
    value[d, d] = np.einsum("ni,nij,nj->", problem.c, problem.H, problem.c) / len(problem.c)
    z = np.append(start, 1.0)
    moment, slopes, values = np.outer(z, z), [], []
    for _ in range(K + 1):
        slopes.append(np.trace(slope @ moment @ slope.T))
        values.append(np.trace(value @ moment) / 2)
        moment = np.einsum("wij,jk,wlk->il", maps, moment, maps) / len(maps)
    return np.array(slopes), np.array(values)


def test_the_rate_holds_with_the_noise_floor_and_with_the_infimum_of_the_clients():
    rng = np.random.default_rng(6)
    for seed, K in itertools.product(range(8), (1, 10, 100)):
        problem = quadratic.random(seed, N, D, mu=0.2, L=3.0, heterogeneity=0.0 if seed == 0 else rng.uniform(0.1, 3))
        smooth, best = quadratic.constants(problem), quadratic.optimum(problem)
        gamma = sketched.theoretical(smooth.L_i, K).gamma
        slopes, values = exact_run(problem, gamma, K, best.params + rng.uniform(0.01, 2) * rng.standard_normal(D))
        L_mean = float(smooth.L_i.mean())
        abc = theory.aggregation_constants(smooth.L_i, best.value, np.zeros(N))
        delta0 = float(values[0] - best.value)
        assert slopes[:K].min() <= theory.stationarity(abc, L_mean, gamma, K, delta0) * (1 + 1e-12)
        # The other valid reading: f^inf = min_i inf f_i = 0 in Delta_0 as well
        own = theory.stationarity(abc._replace(C=0.0), L_mean, gamma, K, float(values[0]))
        assert slopes[:K].min() <= own * (1 + 1e-12)
        if seed == 0:  # one minimiser for all: C = 0, as printed
            assert abc.C <= 1e-12


def test_without_the_noise_floor_the_printed_theorem_is_false():
    """F11: n = 2, |c| = 1, K = 100, gamma = 0.1, Delta_0 = 1e-3"""
    problem, K = pair(1.0), 100
    gamma = theory.aggregation_stepsize(np.ones(2), K)
    assert gamma == pytest.approx(0.1)
    start = np.zeros(D)
    start[1] = np.sqrt(2e-3)
    slopes, values = exact_run(problem, gamma, K, start)
    delta0 = float(values[0] - quadratic.optimum(problem).value)
    assert delta0 == pytest.approx(1e-3)
    printed = theory.stationarity(theory.Abc(1.0, 0.0, 0.0), 1.0, gamma, K, delta0)
    assert printed == pytest.approx(5.4e-4, rel=0.01)
    assert slopes[:K].min() == pytest.approx(2.0e-3, rel=1e-9)
    right = theory.stationarity(theory.aggregation_constants(np.ones(2), 0.5, np.zeros(2)), 1.0, gamma, K, delta0)
    assert right == pytest.approx(printed + 0.1) and slopes[:K].min() < right
    # E |grad f|^2 tends to gamma / (2 - gamma) times the variance between clients
    assert slopes[-1] == pytest.approx(gamma / (2 - gamma), rel=1e-6)


def test_the_real_sketch_has_the_floor_that_the_recursion_has():
    problem, gamma = pair(1.0), 0.1
    algorithm = sketched.sketched(value_and_grad)
    data = jax.tree.map(jnp.asarray, problem)

    def one(key):
        def go(state, _):
            return algorithm.step(key, sketched.HParams(gamma), state, data)[0], None

        state = algorithm.init(jnp.zeros(D), jnp.arange(2))
        return jax.lax.scan(go, state, None, length=60)[0].server.params

    found = np.asarray(jax.jit(jax.vmap(one))(jax.random.split(KEY, 4000)))
    assert squares(found).mean() == pytest.approx(gamma / (2 - gamma), rel=0.05)


def test_the_stepsize_keeps_the_power_below_e_and_too_long_a_one_is_refused():
    for K, L in ((1, np.array([2.0, 8.0])), (1000, np.array([0.1, 7.0]))):
        gamma = theory.aggregation_stepsize(L, K)
        assert (1 + L.mean() * L.max() * gamma**2) ** K <= np.e
        assert gamma == min(1 / L.max(), (L.mean() * L.max() * K) ** -0.5)
    assert theory.aggregation_stepsize(np.array([2.0, 8.0]), 1) == 1 / 8
    with pytest.raises(ValueError, match=r"gamma=0.3; allowed: at most 1 / \(Lbar B\) = 0.25"):
        theory.stationarity(theory.Abc(1.0, 2.0, 0.0), 2.0, 0.3, 10, 1.0)
    assert theory.stationarity(theory.Abc(0.0, 1.0, 3.0), 2.0, 0.5, 10, 1.0) == pytest.approx(3.0 + 2 / 5)


def test_the_number_of_rounds_reaches_epsilon_and_the_printed_one_does_not():
    """F13: Lbar L_max in the numerator"""
    rng = np.random.default_rng(7)
    for _ in range(30):
        L, delta0, epsilon = rng.uniform(0.1, 9, 3), rng.uniform(0.1, 10), 10.0 ** rng.uniform(-3, 1)
        K = theory.rounds_to(epsilon, delta0, L)
        reached = 6 * delta0 / (theory.aggregation_stepsize(L, K) * K)
        assert reached == pytest.approx(epsilon, rel=1e-9)
    L = np.array([3.0, 5.0])
    assert theory.rounds_to(2.0, 0.5, L) == 36 * 0.25 * 4 * 5 / 4  # 45 > 6 * 0.5 * 5 / 2
    assert theory.rounds_to(30.0, 0.5, L) == 0.5  # 6 * 0.5 * 5 / 30 > 0.2
    delta0, epsilon = 1.0, 0.01
    printed = 36 * delta0**2 / (L.mean() * L.max() * epsilon**2)
    assert 6 * delta0 / (theory.aggregation_stepsize(L, int(printed)) * printed) > 10 * epsilon


def test_gradient_descent_is_the_cheaper_one_below_one_over_n():
    """F14: d / eps^2 against n d / eps"""
    n, d = 50, 1000
    for epsilon in (0.5, 0.02, 1e-3):
        ours, plain = d / epsilon**2, n * d / epsilon
        assert theory.advantage_over_gd(n, epsilon) == pytest.approx(plain / ours)
    assert theory.advantage_over_gd(n, 0.5) > 1 > theory.advantage_over_gd(n, 1e-3)
