"""Constants against the goldens, and theorems T1 to T9 by enumeration of every outcome."""

import json
import math
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commjax.compressors import comp, m_nice, mix, natural, perm_k, rand_k, scaled, scaled_sign, top_k
from commjax.theory.ef_bv import best_scaling, one_minus_r
from tests.compressors.zoo import WITH_LAW, centred, cloud, moments, sizes

GOLDENS = json.loads((pathlib.Path(__file__).parents[1] / "data" / "goldens_ef_bv.json").read_text())
BUILD = {
    "top_k": lambda d, k, k_prime: top_k(k),
    "rand_k": lambda d, k, k_prime: rand_k(k),
    "scaled_rand_k": lambda d, k, k_prime: scaled(k / d, rand_k(k)),
    "mix": lambda d, k, k_prime: mix(k, k_prime),
    "comp": lambda d, k, k_prime: comp(k, k_prime),
}
LAWS = pytest.mark.parametrize("name", WITH_LAW)
DIMENSIONS = pytest.mark.parametrize("d", [4, 5, 6])


@pytest.mark.parametrize("row", GOLDENS["compressors"], ids=lambda r: f"{r['kind']}-{r['d']}-{r['k']}-{r['k_prime']}")
def test_constants_are_the_goldens(row):
    eta, omega, _ = BUILD[row["kind"]](row["d"], row["k"], row["k_prime"]).constants(row["d"])
    assert (eta, omega) == pytest.approx((row["eta"], row["omega"]), rel=1e-9)
    if row["alpha"] is not None:
        assert 1 - eta**2 - omega == pytest.approx(row["alpha"], rel=1e-9)
    lam = best_scaling(eta, omega)
    assert lam == pytest.approx(row["lambda_star"], rel=1e-9)
    assert one_minus_r(eta, omega, lam) == pytest.approx(row["alpha_after_scaling"], rel=1e-9)


@pytest.mark.parametrize("row", GOLDENS["m_nice"], ids=lambda r: f"{r['m']}-of-{r['n']}")
def test_m_nice_is_the_golden(row):
    eta, omega, omega_ran = m_nice(row["m"]).constants(112, row["n"])
    assert (eta, omega, omega_ran) == pytest.approx((0, row["omega"], row["omega_ran"]), rel=1e-9)


def test_independent_clients_average_as_the_golden_says():
    example = GOLDENS["independent"]["example"]
    constants = comp(1, 56).constants(112, example["n"])
    assert constants.omega == pytest.approx(example["omega"], rel=1e-12)
    assert constants.omega_ran == pytest.approx(example["omega_ran"], rel=1e-9)


@DIMENSIONS
def test_rand_k_is_unbiased_and_its_variance_exact_for_every_x(d):  # T1
    for k in range(1, d + 1):
        xs = cloud(k, 1, d)
        bias, variance, _ = moments(rand_k(k), xs)
        assert bias == pytest.approx(0, abs=1e-24 * sizes(xs)[0] + 1e-24)
        assert variance == pytest.approx((d / k - 1) * sizes(xs), rel=1e-12, abs=1e-14)
        assert rand_k(k).constants(d).omega == pytest.approx(d / k - 1, rel=1e-15)


@DIMENSIONS
def test_top_k_contracts_and_is_tight_at_flat_x(d):  # T2
    for k in range(1, d + 1):
        eta = top_k(k).constants(d).eta
        for seed in range(5):
            xs = cloud(seed, 1, d)
            bias, variance, _ = moments(top_k(k), xs)
            assert variance == 0 and bias <= eta**2 * sizes(xs) * (1 + 1e-12)
        assert moments(top_k(k), np.ones((1, d)))[0] == pytest.approx(eta**2 * d, rel=1e-12, abs=1e-14)


@LAWS
def test_every_law_keeps_the_stated_constants_and_the_class_inclusions(name):  # T3, T4
    d, n = 4, 2
    stated = WITH_LAW[name].constants(d, n)
    assert stated.omega_ran <= stated.omega
    for xs in [
        cloud(0, n, d),
        centred(1, n, d),
        np.ones((n, d)),
        np.eye(n, d),
        np.array([[1.0] * d, [-1.0] * d]),
    ]:
        bias, variance, average = moments(WITH_LAW[name], xs)
        assert np.all(bias <= stated.eta**2 * sizes(xs) * (1 + 1e-12) + 1e-20)
        assert np.all(variance <= stated.omega * sizes(xs) * (1 + 1e-12) + 1e-20)
        assert average <= stated.omega_ran * sizes(xs).mean() * (1 + 1e-12) + 1e-20
        assert np.all(bias + variance <= (stated.eta**2 + stated.omega) * sizes(xs) * (1 + 1e-12) + 1e-20)


@LAWS
def test_the_average_compressor_is_in_the_class_with_omega_ran(name):  # T4
    d, n = 4, 3
    compressor = WITH_LAW[name]
    if len(compressor.outcomes(np.ones((n, d)))[0]) > 3000:
        n = 2
    stated = compressor.constants(d, n)
    x = cloud(3, 1, d)
    probability, values = compressor.outcomes(np.repeat(x, n, axis=0))
    average = values.mean(axis=1)
    mean = probability @ average
    assert np.sum((mean - x[0]) ** 2) <= stated.eta**2 * sizes(x)[0] * (1 + 1e-12) + 1e-20
    variance = probability @ np.sum((average - mean) ** 2, axis=1)
    assert variance <= stated.omega_ran * sizes(x)[0] * (1 + 1e-12) + 1e-20


@pytest.mark.parametrize("n", [2, 3])
def test_independent_clients_divide_the_variance_by_n_exactly(n):  # T4
    xs = cloud(n, n, 4)
    _, _, average = moments(rand_k(1), xs)
    assert rand_k(1).constants(4, n).omega_ran == 3 / n
    assert average == pytest.approx(3 / n * sizes(xs).mean(), rel=1e-12)


@pytest.mark.parametrize("n,m", [(2, 1), (3, 1), (3, 2), (3, 3), (1, 1)])
def test_m_nice_is_exact_for_each_client_and_for_the_average_when_centred(n, m):  # T5
    _, omega, omega_ran = m_nice(m).constants(5, n)
    xs = centred(n + m, n, 5) if n > 1 else cloud(0, 1, 5)
    bias, variance, average = moments(m_nice(m), xs)
    assert bias == pytest.approx(0, abs=1e-20)
    assert variance == pytest.approx(omega * sizes(xs), rel=1e-12, abs=1e-20)
    assert average == pytest.approx(omega_ran * sizes(xs).mean(), rel=1e-12, abs=1e-20)


def test_m_nice_of_rand_k_is_exact_too():
    compressor, xs = m_nice(2, rand_k(2)), centred(5, 3, 4)
    _, omega, omega_ran = compressor.constants(4, 3)
    _, variance, average = moments(compressor, xs)
    assert variance == pytest.approx(omega * sizes(xs), rel=1e-12)
    assert average == pytest.approx(omega_ran * sizes(xs).mean(), rel=1e-12)


@pytest.mark.parametrize(
    "inner", [top_k(1), comp(1, 2), scaled(0.5, rand_k(1)), perm_k(), m_nice(2)], ids=lambda c: c.name
)
@pytest.mark.parametrize("m", [1, 2])
def test_m_nice_of_biased_or_joint_compressors_keeps_its_constants(inner, m):
    compressor = m_nice(m, inner)
    stated = compressor.constants(3, 3)
    for xs in [cloud(0, 3, 3), centred(1, 3, 3), np.ones((3, 3)), np.eye(3)]:
        bias, variance, average = moments(compressor, xs)
        assert np.all(bias <= stated.eta**2 * sizes(xs) * (1 + 1e-12) + 1e-20)
        assert np.all(variance <= stated.omega * sizes(xs) * (1 + 1e-12))
        assert average <= stated.omega_ran * sizes(xs).mean() * (1 + 1e-12)


def test_m_nice_of_a_biased_compressor_is_exact_where_the_compressor_does_not_shrink():
    # C = 2x/2... top-1 at x = e_1 is the identity, so only (1+eta)^2 is slack: omega - (n/m-1)((1+eta)^2 - 1) is
    # measured.
    compressor, xs = m_nice(1, top_k(1)), np.eye(3)[[0, 0, 0]]
    eta, omega, _ = compressor.constants(3, 3)
    assert eta == pytest.approx(math.sqrt(2 / 3), rel=1e-12) and omega == pytest.approx(2 * (1 + eta) ** 2, rel=1e-12)
    assert moments(compressor, xs)[1] == pytest.approx(2.0, rel=1e-12)


@pytest.mark.parametrize("d,n", [(4, 2), (5, 2), (3, 3), (2, 3), (2, 4), (3, 5), (3, 4), (4, 1), (1, 3)])
def test_perm_k_is_unbiased_and_exact_when_centred(d, n):
    _, omega, omega_ran = perm_k().constants(d, n)
    xs = centred(d * n, n, d) if n > 1 else cloud(0, 1, d)
    bias, variance, average = moments(perm_k(), xs)
    assert bias == pytest.approx(0, abs=1e-18)
    assert variance == pytest.approx(omega * sizes(xs), rel=1e-12, abs=1e-18)
    assert average == pytest.approx(omega_ran * sizes(xs).mean(), rel=1e-12, abs=1e-18)


@DIMENSIONS
def test_mix_is_tight_in_both_constants_at_flat_x(d):  # T8
    for k in range(1, d):
        for k_rand in range(1, d - k + 1):
            eta, omega, _ = mix(k, k_rand).constants(d)
            assert 1 - eta**2 - omega == pytest.approx((k + k_rand) / d, rel=1e-12)
            bias, variance, _ = moments(mix(k, k_rand), np.ones((1, d)))
            assert (bias[0], variance[0]) == pytest.approx((eta**2 * d, omega * d), rel=1e-12, abs=1e-14)
            xs = cloud(d, 1, d)
            bias, variance, _ = moments(mix(k, k_rand), xs)
            assert bias <= eta**2 * sizes(xs) * (1 + 1e-12) + 1e-20
            assert variance <= omega * sizes(xs) * (1 + 1e-12)


@DIMENSIONS
def test_comp_is_tight_in_one_constant_at_a_time(d):  # T9, E10
    for k in range(1, d + 1):
        for k_top in range(k, d + 1):
            compressor = comp(k, k_top)
            eta, omega, _ = compressor.constants(d)
            bias, variance, _ = moments(compressor, np.ones((1, d)))
            assert bias == pytest.approx(eta**2 * d, rel=1e-12, abs=1e-20)
            assert variance == pytest.approx(omega * k_top, rel=1e-12, abs=1e-20)  # below omega d unless k' = d
            supported = np.where(np.arange(d) < k_top, cloud(k, 1, d), 0.0)
            bias, variance, _ = moments(compressor, supported)
            assert bias == pytest.approx(0, abs=1e-20)
            assert variance == pytest.approx(omega * sizes(supported), rel=1e-12, abs=1e-20)
            xs = cloud(k_top, 1, d)
            head = np.sum(np.sort(xs[0] ** 2)[d - k_top :])
            bias, variance, _ = moments(compressor, xs)
            assert bias + variance == pytest.approx(omega * head + sizes(xs)[0] - head, rel=1e-12, abs=1e-14)
            assert bias + variance <= max(omega, 1) * sizes(xs) * (1 + 1e-12) + 1e-20


def test_comp_is_top_k_at_one_end_and_rand_k_at_the_other():  # T9
    xs = cloud(0, 2, 5)
    for ours, other in [(comp(2, 2), top_k(2)), (comp(2, 5), rand_k(2))]:
        assert ours.constants(5, 2) == pytest.approx(other.constants(5, 2), rel=1e-15)
        for mine, theirs in zip(ours.outcomes(xs), other.outcomes(xs)):
            np.testing.assert_allclose(mine.reshape(-1), np.broadcast_to(theirs, mine.shape).reshape(-1), rtol=1e-15)
    for ours, other in [(comp(2, 2), top_k(2)), (comp(2, 5), rand_k(2))]:
        mine, theirs = (c.compress(jax.random.key(1), jnp.asarray(xs[0]), 3, 4).value for c in (ours, other))
        np.testing.assert_array_equal(mine, theirs)


def test_natural_compression_is_tight_at_four_thirds_and_exact_at_powers_of_two():
    bias, variance, _ = moments(natural(), np.array([[4 / 3, -8 / 3, 1 / 3]]))
    assert bias == pytest.approx(0, abs=1e-24) and variance == pytest.approx(
        sizes(np.array([[4 / 3, 8 / 3, 1 / 3]])) / 8
    )
    assert natural().constants(3, 4) == (0.0, 1 / 8, 1 / 32)
    assert moments(natural(), np.array([[2.0, -0.25, 0.0]]))[1] == 0


def test_scaled_sign_loses_what_its_docstring_says_and_is_tight_at_one_entry():
    xs = cloud(0, 1, 5)
    bias, variance, _ = moments(scaled_sign(), xs)
    assert variance == 0 and bias == pytest.approx(sizes(xs) - np.abs(xs).sum() ** 2 / 5, rel=1e-12)
    assert moments(scaled_sign(), np.eye(1, 5))[0] == pytest.approx(scaled_sign().constants(5).eta ** 2, rel=1e-12)
