"""`certify` passes every compressor of the package and catches those that lie, by enumeration and by sampling."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commjax.compressors import (
    ViolatedConstantError,
    certify,
    comp,
    identity,
    m_nice,
    perm_k,
    rand_k,
    rounded,
    scaled,
    top_k,
)
from commjax.compressors.certify import _bounds, trial_vectors
from commjax.core.base import Constants, Message
from tests.compressors.zoo import WITH_LAW, ZOO, moments, sizes

pytestmark = pytest.mark.long

METHODS = pytest.mark.parametrize("limit", [6, 0], ids=["enumeration", "sampling"])


@pytest.mark.parametrize("name", WITH_LAW)
def test_every_law_is_certified_exactly(name):
    certificate = certify(WITH_LAW[name], d=4, n=2)
    assert certificate.method == "enumeration"
    assert certificate.measured == certificate.estimate
    assert certificate.stated == WITH_LAW[name].constants(4, 2)
    assert all(have <= said + 1e-9 for have, said in zip(certificate.measured, certificate.stated))


@pytest.mark.parametrize(
    "name",
    [
        name
        for name in ZOO
        if name not in ("identity", "2-nice", "dithering(2,p=1)", "dithering(2,p=inf)", "leafwise(top-1)")
    ],
)
def test_every_compressor_is_certified_by_sampling(name):
    certificate = certify(ZOO[name], d=8, n=3, trials=3, samples=2000)
    assert certificate.method == "2000 samples"
    assert all(have <= said + 1e-9 for have, said in zip(certificate.measured, certificate.stated))
    # The bound is of use: it is not far below what is measured.
    assert certificate.measured.omega >= 0.6 * certificate.estimate.omega
    assert certificate.estimate.omega <= 1.4 * certificate.stated.omega + 1e-12


def test_the_enumerated_constants_are_the_expectations():
    for compressor in (comp(1, 3), m_nice(1, top_k(1)), scaled(0.4, rand_k(1))):
        certificate = certify(compressor, d=4, n=2, trials=5)
        eta = omega = omega_ran = 0.0
        for xs in trial_vectors(np.random.default_rng(0), 4, 2, 5):
            bias, variance, average = moments(compressor, xs)
            size = np.maximum(sizes(xs), 1e-300)
            eta, omega = max(eta, np.sqrt(bias / size).max()), max(omega, (variance / size).max())
            omega_ran = max(omega_ran, average / size.mean())
        assert certificate.measured == pytest.approx((eta, omega, omega_ran), rel=1e-10)


def test_measured_constants_are_the_true_ones_where_they_are_attained():
    assert certify(rand_k(2), d=4, n=2).measured == (0.0, 1.0, 0.5)
    assert certify(top_k(1), d=4).measured == pytest.approx((math.sqrt(3) / 2, 0, 0), abs=1e-11)
    assert certify(m_nice(2), d=2, n=3).measured == pytest.approx((0, 0.5, 0.25), abs=1e-11)
    assert certify(perm_k(), d=4, n=2).measured == pytest.approx((0, 1, 1), abs=1e-11)
    assert certify(WITH_LAW["natural"], d=3).measured == pytest.approx((0, 1 / 8, 1 / 8), abs=1e-11)
    assert certify(WITH_LAW["ternary(p=inf)"], d=4).measured == pytest.approx((0, 0.5, 0.5), abs=1e-11)


def test_samples_estimate_what_enumeration_knows():
    compressor = scaled(0.5, m_nice(1))
    exact = certify(compressor, d=4, n=2, trials=3).measured
    sampled = certify(compressor, d=4, n=2, trials=3, enumerate_up_to=0)
    assert sampled.method == "4000 samples"
    assert sampled.estimate == pytest.approx(exact, rel=0.1)
    assert all(have <= true + 1e-9 for have, true in zip(sampled.measured, exact))
    assert all(have > 0.7 * true for have, true in zip(sampled.measured, exact))
    assert certify(compressor, d=4, n=2, trials=3, enumerate_up_to=0) == sampled  # reproducible
    other = certify(compressor, d=4, n=2, trials=3, enumerate_up_to=0, key=jax.random.key(1))
    assert other.estimate != sampled.estimate
    careful = certify(compressor, d=4, n=2, trials=3, enumerate_up_to=0, z=10.0)
    assert careful.estimate == sampled.estimate and careful.measured.omega < sampled.measured.omega


def test_bounds_are_what_their_names_say():
    rng = np.random.default_rng(0)
    xs, z, samples = rng.standard_normal((2, 3)), 3.0, 40
    values = xs + 0.7 + rng.standard_normal((samples, 2, 3))
    lower, estimate = _bounds(values, xs, z)
    size = sizes(xs)
    omega = np.var(values, axis=0, ddof=1).sum(axis=1) / size
    omega_ran = np.var(values.mean(axis=1), axis=0, ddof=1).sum() / size.mean()
    bias = np.linalg.norm(values.mean(axis=0) - xs, axis=1) / np.sqrt(size)
    noise = np.sqrt(omega / samples)
    assert estimate == pytest.approx((np.sqrt(bias**2 - noise**2).max(), omega.max(), omega_ran), rel=1e-12)
    squares = np.sum((values - values.mean(axis=0)) ** 2, axis=2) / size
    averages = np.sum((values - values.mean(axis=0)).mean(axis=1) ** 2, axis=1) / size.mean()
    keep = 1 - 16 / samples
    assert lower.eta == pytest.approx((bias - 4 * noise).max(), rel=1e-12) and lower.eta > 0
    assert lower.omega == pytest.approx((keep * omega - z / np.sqrt(samples) * squares.std(axis=0)).max(), rel=1e-12)
    assert lower.omega_ran == pytest.approx(keep * omega_ran - z / np.sqrt(samples) * averages.std(), rel=1e-12)
    assert _bounds(xs + rng.standard_normal((4, 2, 3)), xs, 5.0)[0] == (0.0, 0.0, 0.0)  # too few to say anything


def test_large_problems_are_sampled():
    for compressor, d, n in [(top_k(1), 7, 1), (top_k(1), 4, 4), (rand_k(3), 6, 3), (rounded(top_k(1)), 4, 1)]:
        assert (
            certify(compressor, d, n, trials=0, samples=50).method == "50 samples"
        )  # 8000 outcomes in the third, no law in the last
    assert certify(rand_k(2), 6, 3, trials=0, samples=50).method == "enumeration"  # 3375 outcomes


def shared_key(k):
    """rand-k with one mask for all clients, stated as independent"""
    honest = rand_k(k)

    def outcomes(xs):
        probability, masks = honest.outcomes(np.ones((1, xs.shape[1])))
        return probability, masks * xs[None]

    return honest._replace(
        name="shared rand", compress=lambda key, x, id=0, n=1: honest.compress(key, x, 0, n), outcomes=outcomes
    )


def halved(compressor, field):
    def constants(d, n=1):
        stated = compressor.constants(d, n)
        return stated._replace(**{field: getattr(stated, field) / 2})

    return compressor._replace(name=f"halved {compressor.name}", constants=constants)


LIARS = {
    # name: (compressor, n, the constant that is violated, what is true at least)
    "rand-k without d/k": (scaled(0.5, rand_k(2))._replace(constants=rand_k(2).constants), 2, "eta", 0.4),
    "comp without k'/k": (scaled(1 / 3, comp(1, 3))._replace(constants=comp(1, 3).constants), 2, "eta", 0.7),
    "comp with half its omega": (halved(comp(1, 3), "omega"), 2, "omega", 1.8),
    "rand-k with half its omega": (halved(rand_k(1), "omega"), 2, "omega", 2.5),
    "top-k with half its eta": (halved(top_k(1), "eta"), 2, "eta", 0.85),
    "clients that share a mask": (shared_key(1), 2, "omega_ran", 2.5),
    "m-nice as if independent": (
        m_nice(1)._replace(constants=lambda d, n=1: Constants(0.0, n - 1.0, (n - 1.0) / n)),
        3,
        "omega_ran",
        0.9,
    ),
    "perm-k with half": (halved(perm_k(), "omega_ran"), 2, "omega_ran", 0.9),
    "natural with half": (halved(WITH_LAW["natural"], "omega"), 1, "omega", 0.11),
}


@METHODS
@pytest.mark.parametrize("name", LIARS)
def test_liars_are_caught_and_named(name, limit):
    compressor, n, constant, truth = LIARS[name]
    with pytest.raises(ViolatedConstantError) as error:
        certify(compressor._replace(name=name), d=4, n=n, trials=6, enumerate_up_to=limit)
    stated = getattr(compressor.constants(4, n), constant)
    text, measured = str(error.value).rsplit(" ", 1)
    assert text == f"{name} on R^4 with {n} clients states {constant} = {stated:.6g}, measured at least"
    assert float(measured) > max(stated, truth)


@pytest.mark.parametrize("compressor", [identity(), m_nice(2), scaled(0.3, identity()), top_k(3)], ids=lambda c: c.name)
def test_rounding_in_single_precision_is_no_violation(compressor):
    with jax.enable_x64(False):
        assert certify(compressor, d=10, n=2, trials=4, samples=50).method == "50 samples"


def test_an_unlucky_draw_is_no_violation():
    # Two values, one a little more likely: the plain z-score forgets that the spread is estimated too.
    certificate = certify(m_nice(2, m_nice(2)), d=3, n=3, enumerate_up_to=0)
    assert certificate.measured.omega < certificate.stated.omega == 1.25


def test_a_small_lie_passes_unseen_by_samples_but_not_by_enumeration():
    slightly = rand_k(1)._replace(constants=lambda d, n=1: Constants(0.0, (d - 1) * (1 - 1e-6), (d - 1) / n))
    with pytest.raises(ViolatedConstantError, match="omega = 3, measured"):
        certify(slightly, d=4)
    assert certify(slightly, d=4, trials=2, samples=500, enumerate_up_to=0).measured.omega < 3


def test_trial_vectors_hold_the_extreme_cases():
    for d, n in [(5, 1), (4, 2), (6, 3), (5, 4), (4, 5)]:
        trial = trial_vectors(np.random.default_rng(0), d, n, 9)
        assert trial.shape == (15, n, d)
        flat, centred, one, half, peak, thirds = trial[:6]
        assert np.all(flat == 1) and np.all(thirds == 4 / 3)
        assert np.all(one == np.eye(d)[0]) and np.all(half.sum(axis=1) == d // 2)
        assert np.allclose(peak[:, 1:], 1 / (1 + math.sqrt(d))) and np.all(peak[:, 0] == 1)
        if n > 1:
            assert np.all(centred.sum(axis=0) == 0) and np.abs(centred).sum() >= 2 * d
            np.testing.assert_allclose(trial[12:].sum(axis=1), 0, atol=1e-10)
            assert np.all(np.abs(trial[6:12].sum(axis=1)).max(axis=1) > 1e-3)
        heavy = np.abs(trial[9:12]).max(axis=(1, 2)) / np.median(np.abs(trial[9:12]), axis=(1, 2))
        assert heavy.max() > 8 > np.abs(trial[6:9]).max()


def test_samples_are_in_the_default_precision():
    certificate = certify(identity(), d=8, samples=20)
    assert certificate.measured == (0.0, 0.0, 0.0) and jnp.zeros(()).dtype == jnp.float64


@METHODS
def test_a_compressor_that_does_not_follow_its_law_is_refused(limit):
    liar = top_k(1)._replace(compress=lambda key, x, id=0, n=1: Message(10 * x, jnp.zeros(())))
    with pytest.raises(ViolatedConstantError, match=r"none of its `outcomes`|measured at least"):
        certify(liar, d=4, n=2, trials=3, samples=50, enumerate_up_to=limit)


@METHODS
def test_a_compressor_that_sometimes_draws_what_is_not_finite_is_refused(limit):
    def compress(key, x, id=0, n=1):
        return Message(jnp.where(jax.random.bernoulli(key, 0.1), jnp.nan, x), jnp.zeros(()))

    liar = identity()._replace(compress=compress)
    with pytest.raises(ViolatedConstantError, match=r"none of its `outcomes`|drew a value that is not finite"):
        certify(liar, d=4, n=2, trials=3, samples=50, enumerate_up_to=limit)
