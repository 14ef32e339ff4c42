"""SPPM-AS's theorems on averaged and inexact proxes, T43-T45: exact expectations, and counterexamples."""

import math

import numpy as np
import pytest

from commjax.problems import quadratic
from commjax.theory import sppm
from tests.theory.sppm_cases import (
    GAMMAS,
    GOLDENS,
    MU,
    PROBLEM,
    SAMPLINGS,
    STAR,
    D,
    N,
    cohort_weights,
    each,
    gradients_at,
    prox,
    squares,
    starts,
)


@each
def test_fedprox_is_within_its_theorem(sampling):
    """T43 (L4842), K = 1: A_S and B_S by their definition, and one step with weights 1/|S| (P3)"""
    a, x = gradients_at(STAR), starts()
    before, outcomes = squares(x - STAR), list(sampling.outcomes())
    for gamma in GAMMAS:
        A, B = sppm.fedprox(gamma, MU, a, sampling.shares)
        shrink, noise = 1 / (1 + gamma * MU), gamma / ((1 + gamma * MU) * MU) * squares(a)
        wanted = [sum(chance * of[list(ids)].mean() for chance, ids in outcomes) for of in (shrink, noise)]
        np.testing.assert_allclose([A, B], wanted, rtol=1e-12)
        after = 0.0
        for chance, ids in outcomes:
            mean = np.mean([prox(gamma, np.eye(N)[i], x) for i in ids], axis=0)
            after = after + chance * squares(mean - STAR)
        assert np.all(after <= (A * before + B) * (1 + 1e-9))
        distance = 5.0
        for t in range(4):
            assert distance <= sppm.fedprox_bound(t, 5.0, A, B) * (1 + 1e-12)
            distance = A * distance + B
        assert sppm.fedprox_bound(0, 5.0, A, B) == pytest.approx(5.0 + B / (1 - A))


def test_the_prox_of_two_anchors_is_one_prox():
    """T44 (L4854) in the form of P2; the golden prox"""
    golden = GOLDENS["prox_quadratic"]
    H, linear, y = (np.array(golden[name]) for name in ("H", "b", "y"))
    problem = quadratic.Quadratic(H[None], np.linalg.solve(H, linear)[None])  # f(x) = 1/2 x'Hx - b'x
    np.testing.assert_allclose(prox(golden["gamma"], np.ones(1), y, problem), golden["prox"], rtol=1e-12)
    case = golden["fedavg_sppm"]
    gamma, alpha, x_t, x_k = golden["gamma"], case["alpha"], np.array(case["x_t"]), np.array(case["x_k"])
    stepsize, centre = sppm.two_anchor(alpha, gamma, x_t, x_k)
    assert stepsize == pytest.approx(alpha * gamma / (alpha + gamma))
    found = prox(stepsize, np.ones(1), centre, problem)
    np.testing.assert_allclose(found, case["value"], rtol=1e-12)
    slope = H @ (found - problem.c[0]) + (found - x_t) / gamma + (found - x_k) / alpha
    np.testing.assert_allclose(slope, 0, atol=1e-13)
    printed = prox(stepsize, np.ones(1), x_k, problem)  # the thesis drops x_t
    assert np.linalg.norm(printed - found) > 0.4
    same, centre = sppm.two_anchor(alpha, gamma, x_k, x_k)
    assert same == stepsize and np.array_equal(centre, x_k)  # the two agree in the first local round only


def test_many_rounds_of_averaged_proxes_do_not_give_the_prox_of_the_cohort():
    """P2: neither FedAvg-SPPM-AS nor FedProx-SPPM-AS tends to prox_{gamma f_S}(x_t) as K grows, nor to each other"""
    gamma, alpha, x_t = 2.0, 0.5, np.ones(D)
    wanted = prox(gamma, np.full(N, 1 / N), x_t)
    anchored = free = x_t
    for _ in range(300):
        stepsize, centre = sppm.two_anchor(alpha, gamma, x_t, anchored)
        anchored = np.mean([prox(stepsize, np.eye(N)[i], centre) for i in range(N)], axis=0)
        free = np.mean([prox(gamma, np.eye(N)[i], free) for i in range(N)], axis=0)
    assert min(np.linalg.norm(anchored - wanted), np.linalg.norm(free - wanted), np.linalg.norm(free - anchored)) > 0.02
    tiny = x_t  # a small alpha does bring FedAvg-SPPM-AS there: it is then gradient descent
    for _ in range(3000):
        stepsize, centre = sppm.two_anchor(0.003, gamma, x_t, tiny)
        tiny = np.mean([prox(stepsize, np.eye(N)[i], centre) for i in range(N)], axis=0)
    assert np.linalg.norm(tiny - wanted) < 0.1 * np.linalg.norm(anchored - wanted)


@pytest.mark.parametrize("gamma", [0.01, 1.0, 100.0])
def test_an_inexact_step_is_within_the_lemma(gamma):
    """T45 (L5671): the error points away from x*, its square is b"""
    a, x = gradients_at(STAR), starts()
    before = squares(x - STAR)
    for sampling in (SAMPLINGS[4], SAMPLINGS[6], SAMPLINGS[9]):
        mu, sigma2 = sampling.mu(MU), sampling.variance(a)
        limit = sppm.inexact_limit(gamma, mu)
        for b in (1e-6, 1e-2):
            after = 0.0
            for chance, ids in sampling.outcomes():
                away = prox(gamma, cohort_weights(sampling, ids), x) - STAR
                after = after + chance * (np.sqrt(squares(away)) + math.sqrt(b)) ** 2
            for s in (0.01 * limit, 0.3 * limit, 0.99 * limit, 7 * limit, None):
                allowed = np.array([sppm.inexact_one_step(d, gamma, mu, sigma2, b, s) for d in before])
                assert np.all(after <= allowed * (1 + 1e-12))
                if s is not None and s > limit:
                    continue  # one step holds for every s, several do not (P5)
                unrolled = [sppm.inexact_bound(1, d, gamma, mu, sigma2, b, s=s) for d in before]
                assert np.all(allowed <= np.array(unrolled) * (1 + 1e-9))


def test_the_unrolled_inexact_bound():
    """T45: the golden, the recurrence it comes from, the exact theorem at b = 0"""
    golden = GOLDENS["sppm_inexact"]
    gamma, mu, s, b, sigma2 = (golden[name] for name in ("gamma", "mu", "s", "b", "sigma2"))
    assert sppm.inexact_limit(gamma, mu) == pytest.approx(golden["s_max"])
    assert sppm.inexact_rate(gamma, mu, s) == pytest.approx(golden["rate"])
    assert sppm.inexact_neighbourhood(gamma, mu, sigma2, b, s) == pytest.approx(golden["neighborhood"])
    for s in (0.1, 0.5, 1.2, None):
        distance, fixed = 7.0, sppm.inexact_neighbourhood(gamma, mu, sigma2, b, s)
        assert sppm.inexact_one_step(fixed, gamma, mu, sigma2, b, s) == pytest.approx(fixed, rel=1e-12)
        for t in range(30):
            assert distance <= sppm.inexact_bound(t, 7.0, gamma, mu, sigma2, b, s=s) * (1 + 1e-12)
            distance = sppm.inexact_one_step(distance, gamma, mu, sigma2, b, s)
        assert distance >= 0.5 * min(fixed, 7.0)
    assert sppm.inexact_bound(3, 7.0, gamma, mu, sigma2, 0.0) == pytest.approx(sppm.bound(3, 7.0, gamma, mu, sigma2))
    assert sppm.inexact_bound(3, 7.0, gamma, mu, sigma2, b, s=0.5) == pytest.approx(golden["rate"] ** 3 * 7 + 4.09)


def test_the_best_s_is_best():
    rng = np.random.default_rng(10)
    for _ in range(50):
        gamma, mu, sigma2, b = 10.0 ** rng.uniform(-2, 2, 4)
        best, limit = sppm.best_s(gamma, mu, sigma2, b), sppm.inexact_limit(gamma, mu)
        assert 0 < best < limit
        least = sppm.inexact_neighbourhood(gamma, mu, sigma2, b)
        assert least == sppm.inexact_neighbourhood(gamma, mu, sigma2, b, best)
        around = np.concatenate([best * np.array([0.99, 1.01]), limit * np.linspace(0.001, 0.999, 50)])
        assert all(sppm.inexact_neighbourhood(gamma, mu, sigma2, b, s) >= least for s in around[around < limit])
        # without sampling noise s = gamma mu, and errors that always point outwards attain the bound
        assert sppm.best_s(gamma, mu, 0.0, b) == pytest.approx(gamma * mu, rel=1e-12)
        attained = b * ((1 + gamma * mu) / (gamma * mu)) ** 2
        assert sppm.inexact_neighbourhood(gamma, mu, 0.0, b) == pytest.approx(attained, rel=1e-9)


def test_the_inexact_lemma_is_false_for_larger_s():
    """T45, P5: as printed, for s >= gamma^2 mu^2 + 2 gamma mu, it promises less than nothing at x_0 = x*"""
    gamma, mu, b, s = 1.0, 0.5, 0.01, 2.0
    printed = (1 + s) * b * (1 + gamma * mu) ** 2 / s / (gamma**2 * mu**2 + 2 * gamma * mu - s)
    assert printed < 0 <= b  # and the point may be at distance b from x* after one step
    for s in (1.25, 2.0, 0.0, -0.1, math.nan):
        for refused in (
            lambda s: sppm.inexact_neighbourhood(gamma, mu, 1.0, b, s),
            lambda s: sppm.inexact_bound(2, 1.0, gamma, mu, 1.0, b, s=s),
        ):
            with pytest.raises(ValueError, match=r"s=.*; allowed: 0 < s < gamma\^2 mu\^2 \+ 2 gamma mu = 1.25"):
                refused(s)
    for s in (0.0, -0.1, math.nan):
        with pytest.raises(ValueError, match=r"s=.*; allowed: positive"):
            sppm.inexact_one_step(1.0, gamma, mu, 1.0, b, s)


@pytest.mark.parametrize("gamma", GAMMAS)
def test_a_residual_certifies_the_error_of_a_prox(gamma):
    rng = np.random.default_rng(11)
    for sampling in SAMPLINGS[:6]:
        for _, ids in sampling.outcomes():
            weights, y = cohort_weights(sampling, ids), 3 * rng.standard_normal(D)
            best, H = prox(gamma, weights, y), np.einsum("n,nij->ij", weights, PROBLEM.H)
            x = best + rng.standard_normal((20, D))
            residual = np.linalg.norm((x - best) @ (H + np.eye(D) / gamma), axis=1)
            sure = sppm.squared_prox_error(residual, gamma, float(weights @ MU))
            assert np.all(squares(x - best) <= sure * (1 + 1e-9))
            assert np.all(sure <= sppm.squared_prox_error(residual, gamma, sampling.mu(MU)) * (1 + 1e-12))
    x = rng.standard_normal(D)  # f = mu/2 |x|^2: an equality
    assert sppm.squared_prox_error(np.linalg.norm((0.3 + 1 / gamma) * x), gamma, 0.3) == pytest.approx(squares(x))
