"""SPPM-AS's theorems, T30-T36: exact expectations over every cohort, with exact proxes of quadratics; costs, bad
input."""

import math

import numpy as np
import pytest

from commjax.problems import quadratic
from commjax.sampling import samplings
from commjax.theory import sppm
from tests.theory.sppm_cases import (
    GAMMAS,
    GOLDENS,
    MU,
    PROBLEM,
    STAR,
    D,
    N,
    centred,
    cohort_weights,
    each,
    gradients_at,
    prox,
    squares,
    starts,
)


def one(d=D):
    """A client with a random strongly convex quadratic: H, c, mu"""
    problem = quadratic.random(7, 1, d, mu=0.4, L=5.0)
    return problem, 0.4


@pytest.mark.parametrize("gamma", GAMMAS)
def test_every_point_is_a_fixed_point_and_the_prox_contracts(gamma):
    """T30 (L5170), T31 (L5190)"""
    problem, mu = one()
    x, y = np.random.default_rng(2).standard_normal((2, 20, D)) * 5
    gradient = (x - problem.c[0]) @ problem.H[0]
    np.testing.assert_allclose(prox(gamma, np.ones(1), x + gamma * gradient, problem), x, rtol=1e-9, atol=1e-9)
    shrunk = squares(prox(gamma, np.ones(1), x, problem) - prox(gamma, np.ones(1), y, problem))
    assert np.all(shrunk <= sppm.rate(gamma, mu) * squares(x - y) * (1 + 1e-9))
    flat = np.linalg.eigh(problem.H[0])[1][:, 0]  # along the flattest direction it is an equality
    moved = prox(gamma, np.ones(1), np.stack([x[0], x[0] + flat]), problem)
    np.testing.assert_allclose(squares(moved[1] - moved[0]), sppm.rate(gamma, mu), rtol=1e-7)


def scalar_prox(gamma, mu, y):
    """Of log cosh x + mu/2 x^2, by bisection of its monotone equation"""
    low, high = np.minimum(y, 0) - 1.0, np.maximum(y, 0) + 1.0
    for _ in range(200):
        middle = (low + high) / 2
        above = gamma * (np.tanh(middle) + mu * middle) + middle - y > 0
        low, high = np.where(above, low, middle), np.where(above, middle, high)
    return middle


def test_the_facts_about_the_prox_hold_for_a_function_that_is_not_quadratic():
    mu, x = 0.2, np.linspace(-5, 5, 41)
    for gamma in (0.1, 1.0, 30.0):
        np.testing.assert_allclose(scalar_prox(gamma, mu, x + gamma * (np.tanh(x) + mu * x)), x, atol=1e-11)
        moved = np.abs(np.subtract.outer(*(2 * [scalar_prox(gamma, mu, x)])))
        assert np.all(moved**2 <= sppm.rate(gamma, mu) * np.subtract.outer(x, x) ** 2 + 1e-12)
        point = x + 0.3  # T45's certificate, at points that are not the prox
        residual = np.abs(np.tanh(point) + mu * point + (point - x) / gamma)
        assert np.all((point - scalar_prox(gamma, mu, x)) ** 2 <= sppm.squared_prox_error(residual, gamma, mu) + 1e-12)


def test_a_recurrence_is_below_its_bound():
    """T32 (L5197)"""
    rng = np.random.default_rng(3)
    for _ in range(50):
        a, b, start = rng.uniform(0, 0.999), rng.uniform(0, 2), rng.uniform(0, 5)
        s = start
        for t in range(60):
            limit = sppm.recurrence(start, a, b, t)
            assert s <= limit * (1 + 1e-12) + 1e-12
            assert limit <= a**t * start + b / (1 - a) + 1e-12 and limit <= a**t * start + b * t + 1e-12
            s = a * s + b
    assert sppm.recurrence(3.0, 0.5, 1.0, 0) == 3.0 and sppm.recurrence(0.0, 0.5, 1.0, 1) == 1.0


def test_a_conic_combination_adds_up_strong_convexity():
    """T33 (L5261): at least sum_i w_i mu_i, and exactly that if the flat directions agree"""
    weights = np.random.default_rng(4).uniform(0.1, 2.0, N)
    assert np.linalg.eigvalsh(np.einsum("n,nij->ij", weights, PROBLEM.H))[0] >= weights @ MU
    agree = np.stack([np.diag([mu, 3.0]) for mu in MU])
    assert np.linalg.eigvalsh(np.einsum("n,nij->ij", weights, agree))[0] == pytest.approx(weights @ MU, rel=1e-12)


@each
def test_one_step_is_within_the_theorem_for_every_stepsize(sampling):
    """T34 (L2085)"""
    mu, sigma2 = sampling.mu(MU), sampling.variance(gradients_at(STAR))
    x, outcomes = starts(), list(sampling.outcomes())
    before = squares(x - STAR)
    for gamma in GAMMAS:
        proxes = [(chance, prox(gamma, cohort_weights(sampling, ids), x)) for chance, ids in outcomes]
        after = sum(chance * squares(point - STAR) for chance, point in proxes)
        limit = np.array([sppm.one_step(d, gamma, mu, sigma2) for d in before])
        assert np.all(after <= limit * (1 + 1e-9) + 1e-20)
        assert np.all(limit <= [sppm.bound(1, d, gamma, mu, sigma2) for d in before] + 1e-12 * limit)


def alike(mu, seed=5):
    """Clients mu/2 |x - c_i|^2 with x* = 0"""
    c = centred(np.random.default_rng(seed).standard_normal((N, D)))
    return quadratic.Quadratic(np.stack([mu * np.eye(D)] * N), c)


@pytest.mark.parametrize("gamma", GAMMAS)
def test_the_theorem_is_an_equality_where_clients_differ_in_their_centres_only(gamma):
    """T34: neither the rate nor the neighbourhood can be improved, for samplings whose weights add up to 1"""
    mu, x = 0.7, starts(10, np.zeros(D))
    problem = alike(mu)
    for sampling in (
        samplings.nice(N, 2),
        samplings.stratified([[0, 1], [2, 3]]),
        samplings.stratified([[0], [1, 2, 3]]),
    ):
        sigma2 = sampling.variance(gradients_at(np.zeros(D), problem))
        assert sampling.mu(np.full(N, mu)) == pytest.approx(mu) and sigma2 > 0.01
        after = 0.0
        for chance, ids in sampling.outcomes():
            after = after + chance * squares(prox(gamma, cohort_weights(sampling, ids), x, problem))
        np.testing.assert_allclose(after, [sppm.one_step(d, gamma, mu, sigma2) for d in squares(x)], rtol=1e-9)
        limit = sppm.neighbourhood(gamma, mu, sigma2)  # the fixed point of the one-step equality
        assert sppm.one_step(limit, gamma, mu, sigma2) == pytest.approx(limit, rel=1e-12)


def test_the_bound_is_the_recurrence_unrolled():
    """T34: one step after another stays below, and comes close to it"""
    for gamma in GAMMAS:
        mu, sigma2, start = 0.4, 2.0, 9.0
        distance = start
        for t in range(40):
            limit = sppm.bound(t, start, gamma, mu, sigma2)
            assert distance <= limit * (1 + 1e-12)
            assert limit - distance == pytest.approx(
                sppm.rate(gamma, mu) ** t * sppm.neighbourhood(gamma, mu, sigma2), abs=1e-12
            )
            distance = sppm.one_step(distance, gamma, mu, sigma2)


def test_the_neighbourhood_is_bounded_by_both_of_its_limits():
    """P14 (L2108)"""
    for gamma in GAMMAS:
        value = sppm.neighbourhood(gamma, 0.3, 2.0)
        assert value <= min(2.0 / 0.09, gamma * 2.0 / 0.6) * (1 + 1e-12)
        assert value >= 0.4 * min(2.0 / 0.09, gamma * 2.0 / 0.6)
    assert sppm.neighbourhood(1 / 0.3, 0.3, 2.0) == pytest.approx(2.0 / (3 * 0.09))  # L2105
    assert sppm.neighbourhood(math.inf, 0.3, 2.0) == pytest.approx(2.0 / 0.09)
    assert sppm.neighbourhood(1e5, 0.3, 0.0) == 0.0


def test_rates_and_complexities_are_the_golden_ones():
    for row in GOLDENS["sppm_rate"]:
        gamma, mu, sigma2, epsilon = (row[name] for name in ("gamma", "mu", "sigma2", "eps"))
        assert sppm.rate(gamma, mu) == pytest.approx(row["rate"], rel=1e-12)
        assert sppm.neighbourhood(gamma, mu, sigma2) == pytest.approx(row["neighborhood"], rel=1e-12)
        assert sppm.stepsize_for(epsilon, mu, sigma2) == pytest.approx(row["gamma_eps"], rel=1e-12)
        assert sppm.iterations(epsilon, mu, sigma2, 1 / epsilon) == pytest.approx(row["T_eps"], rel=1e-12)


def test_so_many_iterations_reach_epsilon():
    """T36 (L2119), also beyond its epsilon <= sigma^2/mu^2; and the count for a stepsize of one's own"""
    rng = np.random.default_rng(6)
    tight = 0
    for _ in range(200):
        mu, sigma2, start = 10.0 ** rng.uniform(-2, 1, 3)
        epsilon = 10.0 ** rng.uniform(-4, 0.5) * sigma2 / mu**2
        gamma, T = sppm.stepsize_for(epsilon, mu, sigma2), sppm.iterations(epsilon, mu, sigma2, start)
        assert sppm.neighbourhood(gamma, mu, sigma2) <= epsilon / 2 * (1 + 1e-12)
        assert sppm.bound(math.ceil(T), start, gamma, mu, sigma2) <= epsilon * (1 + 1e-9)
        tight += T > 10 and sppm.bound(int(0.7 * T), start, gamma, mu, sigma2) > epsilon
        exact = sppm.iterations(epsilon, mu, sigma2, start, gamma)
        assert exact <= T + 1e-9
        if exact > 0:
            reached = sppm.rate(gamma, mu) ** exact * start + sppm.neighbourhood(gamma, mu, sigma2)
            assert reached == pytest.approx(epsilon, rel=1e-9)
    assert tight > 10
    assert sppm.iterations(0.5, 1.0, 2.0, 9.0, gamma=2.0) == math.inf  # the neighbourhood is 1
    assert sppm.iterations(0.5, 1.0, 0.0, 0.1) == 0.0 == sppm.iterations(0.5, 1.0, 0.0, 0.1, gamma=1.0)
    assert sppm.stepsize_for(0.1, 1.0, 0.0) == math.inf


def test_costs():
    """P11 (L2343)"""
    for row in GOLDENS["costs"]:
        ours = sppm.cost(row["c1"], row["c2"], row["K"], row["T"])
        assert ours == pytest.approx(row["sppm"])
        if "localgd" in row:
            theirs = sppm.localgd_cost(row["c1"], row["c2"], row["localgd_T"])
            assert theirs == pytest.approx(row["localgd"])
            assert 100 * (1 - ours / theirs) == pytest.approx(row["reduction_pct"])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: sppm.rate(0.0, 1.0), r"gamma=0.0; allowed: positive"),
        (lambda: sppm.rate(1.0, math.nan), r"mu=nan; allowed: positive"),
        (lambda: sppm.neighbourhood(1.0, 1.0, -1.0), r"sigma2=-1.0; allowed: at least 0"),
        (lambda: sppm.neighbourhood(-1.0, 1.0, 1.0), r"gamma=-1.0"),
        (lambda: sppm.one_step(1.0, 1.0, 1.0, -2.0), r"sigma2=-2.0"),
        (lambda: sppm.recurrence(1.0, 1.0, 1.0, 1), r"a=1.0; allowed: 0 <= a < 1"),
        (lambda: sppm.stepsize_for(0.0, 1.0, 1.0), r"epsilon=0.0; allowed: positive"),
        (lambda: sppm.stepsize_for(0.1, 1.0, -1.0), r"sigma2=-1.0"),
        (lambda: sppm.iterations(0.1, 0.0, 1.0, 1.0), r"mu=0.0"),
        (lambda: sppm.iterations(0.1, 1.0, 1.0, 0.0), r"distance2=0.0"),
        (lambda: sppm.iterations(0.1, 1.0, -1.0, 1.0), r"sigma2=-1.0"),
        (lambda: sppm.squared_prox_error(1.0, 0.0, 1.0), r"gamma=0.0"),
        (lambda: sppm.squared_prox_error(1.0, 1.0, -1.0), r"mu=-1.0; allowed: at least 0"),
        (lambda: sppm.best_s(1.0, 1.0, 1.0, -1.0), r"b=-1.0; allowed: at least 0"),
        (lambda: sppm.inexact_limit(0.0, 1.0), r"gamma=0.0"),
        (lambda: sppm.inexact_rate(1.0, 1.0, 3.0), r"s=3.0; allowed"),
        (lambda: sppm.inexact_bound(1, 1.0, 1.0, 1.0, 1.0, -1.0), r"b=-1.0"),
        (lambda: sppm.fedprox(1.0, np.array([0.0]), np.ones((1, 1)), np.ones(1)), r"mu=0.0; allowed: positive"),
        (lambda: sppm.cost(-1.0, 0.0, 1, 1), r"c1=-1.0; allowed: at least 0"),
        (lambda: sppm.cost(1.0, 0.0, 0, 1), r"K=0; allowed: at least 1"),
        (lambda: sppm.localgd_cost(1.0, 0.0, 0), r"T=0; allowed: at least 1"),
        (lambda: sppm.nice_variance(3, 0, 1.0), r"tau=0; allowed: 1 to n=3"),
        (lambda: sppm.nice_variance(3, 4, 1.0), r"tau=4; allowed: 1 to n=3"),
        (lambda: sppm.optimal_clustering_bounds(1.0, 0, 2), r"b=0, m=2; allowed: both at least 1"),
    ],
)
def test_bad_input_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()
