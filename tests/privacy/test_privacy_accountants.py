"""The accountants: the exact Gaussian mechanism, Renyi against loss distributions, calibration, capacity, bad
arguments."""

import math
import sys

import numpy as np
import pytest

from commjax.privacy import accounting
from commjax.privacy.accounting import Guarantee, calibrate, guarantee
from commjax.theory import ldp_fedp3 as theory

pytestmark = pytest.mark.long

# --- accountants


def exact_gaussian_epsilon(mu, delta):
    """Balle and Wang (2018): delta(eps) = Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu), solved for eps"""
    from scipy.optimize import brentq
    from scipy.stats import norm

    def gap(epsilon):
        return norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu) - delta

    return float(np.asarray(brentq(gap, 1e-9, 200.0)))


@pytest.mark.parametrize("relation, reach", [("add-remove", 1), ("replace-one", 2)])
def test_with_full_batches_the_accountants_know_the_gaussian_mechanism(relation, reach):
    for z, K in ((20.0, 100), (60.0, 400)):
        exact = exact_gaussian_epsilon(reach * math.sqrt(K) / z, 1e-5)
        pld = guarantee(z, 1.0, K, 1e-5, relation=relation).epsilon
        rdp = guarantee(z, 1.0, K, 1e-5, relation=relation, accountant="rdp").epsilon
        assert exact <= pld <= exact + 5e-3 and pld < rdp < 1.15 * exact


@pytest.mark.parametrize("relation", ["add-remove", "replace-one"])
def test_renyi_is_never_below_the_loss_distribution_and_sampling_helps(relation):
    for z, q, K in ((1.5, 0.1, 50), (3.0, 0.3, 30)):
        pld, rdp = (guarantee(z, q, K, 1e-5, relation=relation, accountant=name).epsilon for name in ("pld", "rdp"))
        assert pld <= rdp <= 1.3 * pld
        assert pld < guarantee(z, 1.0, K, 1e-5, relation=relation).epsilon
    assert (
        guarantee(3.0, 0.3, 30, 1e-5, relation="replace-one").epsilon
        > guarantee(3.0, 0.3, 30, 1e-5, relation="add-remove").epsilon
    )


def test_the_renyi_divergence_of_a_changed_row_is_that_of_an_independent_quadrature():
    from scipy.integrate import quad

    for order, z, q in ((2.0, 0.8, 0.2), (8.0, 2.0, 0.5), (3.5, 1.0, 0.01)):

        def density(x, sign, z=z, q=q):
            return (1 - q) * math.exp(-(x**2) / (2 * z * z)) + q * math.exp(-((x - sign) ** 2) / (2 * z * z))

        def integrand(x, order=order, z=z):
            return density(x, 1) ** order * density(x, -1) ** (1 - order) / (z * math.sqrt(2 * math.pi))

        value = quad(integrand, -6 * z - 2, order + 6 * z + 2, limit=500)[0]
        assert accounting.renyi_replace_one(order, z, q) == pytest.approx(math.log(value) / (order - 1), rel=1e-6)
    for order, z in ((2.0, 3.0), (64.0, 0.7)):
        assert accounting.renyi_replace_one(order, z, 1.0) == pytest.approx(2 * order / z**2, rel=1e-9)


def test_calibration_is_monotone_least_and_never_above_its_target():
    targets = (0.5, 1.0, 4.0, 8.0)
    found = [calibrate(epsilon, 1e-5, 1.0, 40) for epsilon in targets]
    noises = [one.noise for one in found]
    assert noises == sorted(noises, reverse=True) and noises[0] > 1.8 * noises[1]
    for one, target in zip(found, targets):
        assert one.epsilon <= target < guarantee(one.noise / 1.002, 1.0, 40, 1e-5).epsilon
        assert one == guarantee(one.noise, 1.0, 40, 1e-5)
    assert calibrate(1.0, 1e-6, 1.0, 40).noise > noises[1] > calibrate(1.0, 1e-5, 0.2, 40, tolerance=0.05).noise
    assert calibrate(1.0, 1e-5, 1.0, 80).noise > noises[1] > calibrate(1.0, 1e-5, 1.0, 40, relation="add-remove").noise
    assert calibrate(1.0, 1e-5, 1.0, 40, accountant="rdp").noise > noises[1]
    small = calibrate(20.0, 1e-5, 1.0, 1, relation="add-remove")  # below the first guess
    assert (
        small.noise < 0.5
        and small.epsilon <= 20 < guarantee(small.noise / 1.002, 1.0, 1, 1e-5, relation="add-remove").epsilon
    )


def test_without_noise_there_is_no_privacy():
    assert guarantee(0.0, 1.0, 1, 1e-5).epsilon == math.inf


def test_a_capacity_is_paid_for_out_of_delta():
    rows, rate, K = 200, 0.1, 50
    enough = guarantee(2.0, rate, K, 1e-5, capacity=70, rows=rows)
    assert accounting.overflow(70, rows, rate, K) < 1e-15 and enough.capacity == 70
    whole = guarantee(2.0, rate, K, 1e-5).epsilon
    assert enough.epsilon == pytest.approx(guarantee(2.0, rate, K, 0.99e-5).epsilon)
    assert whole < enough.epsilon < whole * 1.001
    assert guarantee(2.0, rate, K, 1e-5, capacity=30, rows=rows).epsilon == math.inf
    assert guarantee(2.0, rate, K, 1e-5, capacity=rows, rows=rows).epsilon == whole
    from scipy.stats import binom

    wanted = K * sum(binom.pmf(j, rows, rate) for j in range(31, rows + 1))
    assert accounting.overflow(30, rows, rate, K) == pytest.approx(wanted, rel=1e-9)
    with pytest.raises(ValueError, match="capacity=25; allowed: what some noise can reach"):
        calibrate(1.0, 1e-5, rate, K, capacity=25, rows=rows)


def test_with_a_capacity_an_epsilon_beyond_the_exponential_is_infinite(monkeypatch):
    monkeypatch.setattr(accounting, "_accounted", lambda *arguments: 1000.0)
    assert guarantee(1.0, 0.5, 1, 1e-5).epsilon == 1000
    assert guarantee(1.0, 0.5, 1, 1e-5, capacity=40, rows=50).epsilon == math.inf


@pytest.mark.parametrize("share, epsilon", [(0.99, 0.5), (1.01, math.inf)])
def test_what_is_set_aside_for_dropped_rows_is_one_hundredth_of_delta(share, epsilon, monkeypatch):
    monkeypatch.setattr(accounting, "_accounted", lambda *arguments: 0.5)
    monkeypatch.setattr(accounting, "overflow", lambda *arguments: share * 1e-7 / (1 + math.exp(0.5)))
    assert guarantee(1.0, 0.5, 1, 1e-5, capacity=40, rows=50).epsilon == epsilon


def test_the_thesis_s_noise_is_not_what_the_accountant_asks_for():
    """F20: with c = 1 and full batches, epsilon = 1 is missed by both relations"""
    K, m = 1000, 500
    z = math.sqrt(theory.noise_variance(1.0, 1e-5, c=1.0, C=1.0, K=K, m=m)) * m  # sigma = z C / m
    plain, changed = (
        guarantee(z, 1.0, K, 1e-5, relation=relation).epsilon for relation in ("add-remove", "replace-one")
    )
    assert 1.05 < plain < 1.46 and 2.2 < changed < 3.0  # zCDP has 1.46 and 3.00


def test_noise_on_the_weights_is_not_private_enough_for_long_steps():
    """F16: noise sigma on w - gamma g hides g as sigma / gamma would"""
    found = calibrate(1.0, 1e-5, 0.5, 20)
    seen = {gamma: guarantee(found.noise / gamma, 0.5, 20, 1e-5).epsilon for gamma in (0.5, 2.0)}
    assert seen[0.5] < 0.5 and seen[2.0] > 2.0


def test_bad_arguments_of_the_accountants_are_refused():
    for epsilon in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match=r"epsilon=.*; allowed: positive and finite"):
            calibrate(epsilon, 1e-5, 0.1, 10)
    for delta in (0.0, 1.0, -1e-5, math.nan):
        with pytest.raises(ValueError, match=r"delta=.*; allowed: 0 < delta < 1"):
            guarantee(1.0, 0.1, 10, delta)
    for rate in (0.0, 1.1, math.nan):
        with pytest.raises(ValueError, match=r"rate=.*; allowed: 0 < rate <= 1 \(a batch is not larger than"):
            guarantee(1.0, rate, 10, 1e-5)
    for noise in (-1.0, math.inf):
        with pytest.raises(ValueError, match=r"noise=.*; allowed: finite and >= 0"):
            guarantee(noise, 0.1, 10, 1e-5)
    with pytest.raises(ValueError, match="rounds=0; allowed: at least 1"):
        guarantee(1.0, 0.1, 0, 1e-5)
    with pytest.raises(ValueError, match="accountant='moments'; allowed: 'pld', 'rdp'"):
        guarantee(1.0, 0.1, 1, 1e-5, accountant="moments")
    with pytest.raises(ValueError, match="relation='swap'; allowed: 'add-remove', 'replace-one'"):
        guarantee(1.0, 0.1, 1, 1e-5, relation="swap")
    with pytest.raises(ValueError, match="capacity=3; allowed: with the number of rows"):
        guarantee(1.0, 0.1, 1, 1e-5, capacity=3)


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(ImportError, match=r"pip install 'commjax\[privacy\]'"):
        guarantee(1.0, 1.0, 1, 1e-5)


def test_the_certificate_has_what_a_reader_needs():
    found = guarantee(2.0, 0.5, 3, 1e-5)
    assert found == Guarantee(found.epsilon, 1e-5, 2.0, 0.5, 3, "pld", "replace-one", None)
