"""Compressors made of others, what a message holds, and whose randomness is whose."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commjax.compressors import comp, identity, leafwise, m_nice, mix, perm_k, rand_k, rounded, scaled, top_k
from commjax.theory.ef_bv import best_scaling, one_minus_r
from tests.compressors.zoo import WITH_LAW, ZOO, cloud, moments, sizes

pytestmark = pytest.mark.slow

LAWS = pytest.mark.parametrize("name", WITH_LAW)
ALL = pytest.mark.parametrize("name", ZOO)


@ALL
def test_kept_counts_the_values_of_a_message(name):
    d, n = 12, 3
    few = {
        "top-2": 2,
        "rand-2": 2,
        "comp-(1,3)": 1,
        "comp-(2,3)": 2,
        "mix-(1,2)": 3,
        "perm-k": d / n,
        "2-nice": 2 / n * d,
        "2-nice(rand-2)": 2 / n * 2,
        "0.3 rand-2": 2,
        "2-nice(dithering(7,p=2))": 2 / n * d,
        "leafwise(function of size)": d / 2,
        "leafwise(top-1)": 1,
        "leafwise(2-nice)": 2 / n * d,
        "rand-2 in float32": 2,
        "2-nice(natural) in bfloat16": 2 / n * d,
    }
    assert ZOO[name].kept(d, n) == pytest.approx(few.get(name, d), rel=1e-15)
    assert perm_k().kept(2, 3) == 1


@LAWS
@pytest.mark.parametrize("factor", [0.25, 1.0])
def test_scaling_multiplies_the_law_and_moves_the_class(name, factor):  # T6
    inner, xs = WITH_LAW[name], cloud(7, 2, 4)
    compressor = scaled(factor, inner)
    eta, omega, omega_ran = inner.constants(4, 2)
    stated = compressor.constants(4, 2)
    assert stated == pytest.approx((factor * eta + 1 - factor, factor**2 * omega, factor**2 * omega_ran), rel=1e-14)
    bias, variance, average = moments(compressor, xs)
    assert np.all(bias <= stated.eta**2 * sizes(xs) * (1 + 1e-12) + 1e-20)
    _, old_variance, old_average = moments(inner, xs)
    assert variance == pytest.approx(factor**2 * old_variance, rel=1e-12)
    assert average == pytest.approx(factor**2 * old_average, rel=1e-12)


@pytest.mark.parametrize("compressor", [rand_k(1), top_k(2), comp(1, 3), mix(1, 1)], ids=lambda c: c.name)
def test_no_scaling_on_a_grid_is_better_than_the_best(compressor):  # T7
    eta, omega, _ = compressor.constants(5)
    best = best_scaling(eta, omega)
    alphas = [1 - (1 - lam + lam * eta) ** 2 - lam**2 * omega for lam in np.linspace(0.001, 1, 2000)]
    assert max(alphas) <= one_minus_r(eta, omega, best) + 1e-12
    stated = scaled(best, compressor).constants(5)
    assert 1 - stated.eta**2 - stated.omega == pytest.approx(one_minus_r(eta, omega, best), rel=1e-12)


def test_leafwise_takes_the_worst_leaf_and_a_function_of_the_size():
    compressor = leafwise(lambda d: rand_k(d // 2) if d > 2 else top_k(1))
    assert compressor.constants([2, 6], 3) == pytest.approx((math.sqrt(1 / 2), 1.0, 1 / 3), rel=1e-15)
    assert compressor.kept([2, 6], 3) == 4 and compressor.kept(6) == 3
    value = compressor.compress(jax.random.key(0), {"a": jnp.array([1.0, 2.0]), "b": jnp.ones((2, 3))}).value
    assert value["a"].tolist() == [0, 2] and int(jnp.sum(value["b"] == 2)) == 3
    assert identity().constants(3) == leafwise(identity()).constants([3, 4])


def test_leafwise_constants_hold_for_the_product_law_and_are_attained():
    inner = {2: rand_k(1), 3: comp(1, 2)}
    compressor = leafwise(lambda d: inner[d])
    stated = compressor.constants([2, 3], 2)
    for xs in [cloud(0, 2, 5), np.tile([0.0, 0, 1, 1, 1], (2, 1)), np.tile([0.0, 0, 0, 1, 1], (2, 1))]:
        first, second = moments(inner[2], xs[:, :2]), moments(inner[3], xs[:, 2:])
        bias, variance, average = (a + b for a, b in zip(first, second))  # independent leaves: sums
        assert np.all(bias <= stated.eta**2 * sizes(xs) * (1 + 1e-12))
        assert np.all(variance <= stated.omega * sizes(xs) * (1 + 1e-12))
        assert average <= stated.omega_ran * sizes(xs).mean() * (1 + 1e-12)
    assert variance == pytest.approx(stated.omega * sizes(xs), rel=1e-12)


def test_rounding_first_costs_what_minkowski_says():
    u = 2.0**-8
    eta, omega, omega_ran = mix(1, 1).constants(6, 2)
    stated = rounded(mix(1, 1), jnp.bfloat16).constants(6, 2)
    assert stated == pytest.approx((eta + u * (1 + eta), (1 + u) ** 2 * omega, (1 + u) ** 2 * omega_ran), rel=1e-14)
    x = jnp.asarray(cloud(0, 1, 6)[0])
    value = rounded(identity(), jnp.bfloat16).compress(jax.random.key(0), x).value
    assert value.dtype == x.dtype
    np.testing.assert_array_equal(value, x.astype(jnp.bfloat16).astype(x.dtype))
    assert float(jnp.linalg.norm(value - x)) <= u * float(jnp.linalg.norm(x))


def _batch(compressor, xs, n):
    return jax.jit(lambda key, xs, ids: jax.vmap(lambda x, id: compressor.compress(key, x, id, n))(xs, ids))


@pytest.mark.parametrize(
    "name",
    ["rand-2", "comp-(1,3)", "mix-(1,2)", "natural", "ternary(p=inf)", "perm-k", "2-nice(rand-2)", "leafwise(2-nice)"],
)
def test_a_client_draws_the_same_numbers_wherever_it_stands_in_the_batch(name):
    n, d = 5, 12
    xs, key = jnp.asarray(cloud(3, n, d)), jax.random.key(11)
    send = _batch(ZOO[name], xs, n)
    every = send(key, xs, jnp.arange(n))
    for subset in ([4, 2, 0, 1, 3], [3, 3, 1, 0, 3]):  # of the same length: one compilation
        rows = jnp.array(subset)
        some = send(key, xs[rows], rows)
        np.testing.assert_array_equal(some.value, every.value[rows])
        np.testing.assert_array_equal(some.bits, every.bits[rows])


@pytest.mark.parametrize(
    "compressor",
    [rand_k(4), rand_k(40), comp(4, 32), comp(20, 32), mix(2, 3), WITH_LAW["natural"], WITH_LAW["ternary(p=inf)"]],
    ids=lambda c: c.name,
)
def test_clients_and_rounds_do_not_share_randomness(compressor):
    n, rounds, d = 6, 60, 64
    x = jnp.asarray(np.linspace(1.1, 1.9, d))
    keys = jax.vmap(lambda t: jax.random.fold_in(jax.random.key(0), t))(jnp.arange(rounds))

    @jax.jit
    def values(keys, x):
        one = lambda key, id: compressor.compress(key, x, id, n).value  # noqa: E731
        return jax.vmap(lambda key: jax.vmap(one, in_axes=(None, 0))(key, jnp.arange(n)))(keys)

    drawn = np.asarray(values(keys, x)).reshape(n * rounds, d)
    assert len(np.unique(drawn, axis=0)) > 0.9 * n * rounds  # 360 messages, hardly two of them equal
    # Uncorrelated: the average over all clients and rounds has 1 / (n rounds) of the variance of one.
    deviation = drawn - drawn.mean(axis=0)
    rows = deviation.reshape(rounds, n, d)
    for group in (rows.mean(axis=1) * np.sqrt(n), rows.mean(axis=0) * np.sqrt(rounds)):
        assert 0.5 < np.sum(group**2) / len(group) / (np.sum(deviation**2) / len(deviation)) < 1.6


@pytest.mark.parametrize(
    "compressor",
    [rand_k(2), leafwise(rand_k(2)), m_nice(1, rand_k(2)), scaled(0.5, rand_k(2)), rounded(rand_k(2))],
    ids=lambda c: c.name,
)
def test_the_default_is_client_0_of_1(compressor):
    x, key = jnp.asarray(cloud(0, 1, 64)[0]), jax.random.key(2)
    data = compressor.encode(key, x)
    assert data == compressor.encode(key, x, 0, 1) != compressor.encode(key, x, 1, 2)
    value = compressor.compress(key, x, 0, 1).value
    np.testing.assert_array_equal(compressor.compress(key, x).value, value)
    np.testing.assert_array_equal(compressor.decode(key, data, x), value)
    np.testing.assert_array_equal(compressor.decode(key, data, x, 0, 1), value)
    assert compressor.constants(64) == compressor.constants(64, 1)
    assert compressor.kept(64) == compressor.kept(64, 1) == 2


def test_joint_compressors_agree_on_one_event_and_leaves_do_not():
    n = 4
    ones = {"a": jnp.ones((n, 8)), "b": jnp.ones((n, 8))}
    send = lambda c: _batch(c, ones, n)(jax.random.key(5), ones, jnp.arange(n)).value  # noqa: E731
    np.testing.assert_array_equal(send(perm_k())["a"].mean(axis=0), np.ones(8))  # every coordinate has one owner
    assert np.count_nonzero(send(m_nice(3))["a"].sum(axis=1)) == 3
    halves = send(leafwise(rand_k(4)))
    assert not np.array_equal(halves["a"], halves["b"])


@pytest.mark.parametrize(
    "compressor, factor",
    [
        (rand_k(254), 257 / 254),
        (comp(254, 257), 257 / 254),
        (m_nice(254), 257 / 254),
        (scaled(0.997, identity()), 0.997),
        (perm_k(), 257),
    ],
    ids=lambda one: getattr(one, "name", ""),
)
def test_factors_that_half_precision_does_not_hold_are_rounded_with_the_product_only(compressor, factor):
    x = jnp.linspace(1, 2, 257).astype(jnp.bfloat16)
    wanted = (np.float32(factor) * np.asarray(x, np.float32)).astype(x.dtype)
    for id in range(20):
        sent = np.asarray(compressor.compress(jax.random.key(3), x, id, 257).value)
        np.testing.assert_array_equal(sent, np.where(sent == 0, 0, wanted))
        if sent.any() and factor != 257:
            assert np.any(sent != (np.asarray(factor, x.dtype) * np.asarray(x)).astype(x.dtype) * (sent != 0))
        data = compressor.encode(jax.random.key(3), x, id, 257)
        np.testing.assert_array_equal(np.asarray(compressor.decode(jax.random.key(3), data, x, id, 257)), sent)
