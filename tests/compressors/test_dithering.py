"""The variance of random dithering: never above what is stated, attained where the docstring says so."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commjax.compressors import dithering, natural, ternary
from commjax.compressors.quantized import _rounded_at_random, dithering_omega
from tests.compressors.zoo import INF, cloud, moments, sizes

NORMS = [1.0, 1.5, 2.0, 3.0, INF]


def relative_variance(x, levels, p):
    """E |C(x) - x|^2 / |x|^2 of each row, by hand"""
    x = np.atleast_2d(np.abs(x))
    scale = x.max(axis=1) if math.isinf(p) else (x**p).sum(axis=1) ** (1 / p)
    fraction = levels * x / scale[:, None]
    fraction = fraction - np.floor(fraction + 1e-12)
    fraction = np.clip(fraction, 0, 1)
    return ((scale / levels) ** 2) * (fraction * (1 - fraction)).sum(axis=1) / (x**2).sum(axis=1)


@pytest.mark.parametrize("p", NORMS)
@pytest.mark.parametrize("levels", [1, 2, 5])
def test_the_formula_of_this_file_is_the_variance_of_the_law(p, levels):
    xs = cloud(levels, 1, 5)
    bias, variance, _ = moments(dithering(levels, p), xs)
    assert bias == pytest.approx(0, abs=1e-20)
    assert variance / sizes(xs) == pytest.approx(relative_variance(xs, levels, p), rel=1e-9)


def worst(d, levels, p, seed):
    """A search for the worst x: many random ones, then coordinate ascent from the best."""
    rng = np.random.default_rng(seed)
    x = np.exp(2 * rng.standard_normal((3000, d)))
    x[:1000] = 1 + rng.uniform(0, 1, (1000, 1)) * rng.standard_normal((1000, d))
    x[1000:1500, 1:] = rng.uniform(0, 1, (500, 1))  # one large entry, the others equal
    x[1000:1500, 0] = 1
    x[1500] = 1
    value = relative_variance(x, levels, p)
    best, x = value.max(), x[value.argmax()]
    for width in (0.5, 0.1, 0.02, 0.004):
        for _ in range(6):
            for i in range(d):
                trial = np.tile(x, (60, 1))
                trial[:, i] *= np.exp(width * rng.standard_normal(60))
                value = relative_variance(trial, levels, p)
                if value.max() > best:
                    best, x = value.max(), trial[value.argmax()]
    return best


@pytest.mark.parametrize("p", NORMS)
@pytest.mark.parametrize("levels", [1, 2, 3, 4, 5])
def test_no_vector_that_a_search_finds_violates_omega(p, levels):
    for d in (1, 2, 3, 5, 16):
        assert worst(d, levels, p, seed=d) <= dithering_omega(d, levels, p) * (1 + 1e-9) + 1e-12


@pytest.mark.parametrize("p", [1.0, 1.5, 2.0])
def test_omega_is_attained_at_flat_x_when_levels_are_few(p):
    for d in (1, 4, 9, 16, 37, 100):
        for levels in range(1, int(math.sqrt(d) / 2) + 1):
            exact = relative_variance(np.ones(d), levels, p)[0]
            assert dithering_omega(d, levels, p) == pytest.approx(exact, rel=1e-9, abs=1e-12)
            assert exact == pytest.approx(d ** (1 / p) / levels - 1, rel=1e-9, abs=1e-12)


def test_one_level_is_attained_for_every_dimension():
    for d in (1, 2, 3, 10):
        for p in (1.0, 1.5, 2.0):
            exact = relative_variance(np.ones(d), 1, p)[0]
            assert dithering_omega(d, 1, p) == pytest.approx(exact, rel=1e-9, abs=1e-12)
        peak = np.where(np.arange(d) == 0, 1, 1 / (math.sqrt(d) + 1))
        exact = relative_variance(peak, 1, INF)[0]
        assert ternary().constants(d).omega == pytest.approx(exact, rel=1e-9, abs=1e-12)
        assert exact == pytest.approx((math.sqrt(d) - 1) / 2, rel=1e-9, abs=1e-12)


def test_many_levels_cost_a_quarter_of_a_step_squared_per_coordinate():
    assert dithering_omega(9, 10, 2.0) == pytest.approx(9 / 400)
    assert dithering_omega(9, 10, INF) == pytest.approx(9 / 400)
    assert dithering_omega(9, 10, 1.0) == pytest.approx(81 / 400)
    middle = relative_variance(np.array([0.25, 0.25, 0.75, 0.75, 0.75, 0.75, 0.75, 0.75, 1.0]), 2, INF)[0]
    assert middle <= dithering_omega(9, 2, INF)


def test_omega_is_never_worse_than_qsgd():
    for p in (2.0, 3.0, INF):
        for d in (1, 2, 5, 30, 1000):
            for levels in (1, 2, 3, 7, 50, 1000):
                assert dithering_omega(d, levels, p) <= min(d / levels**2, math.sqrt(d) / levels)


def test_levels_that_the_dtype_cannot_hold_stay_in_range():
    # 259 is 260 in bfloat16: one level too many would carry into the next digit.
    compressor, key = dithering(259), jax.random.key(0)
    x = jnp.array([0, 0, 1.5, 0], jnp.bfloat16)
    value = compressor.compress(key, x).value
    np.testing.assert_array_equal(value, compressor.decode(key, compressor.encode(key, x), x))
    np.testing.assert_allclose(value.astype(float), [0, 0, 1.5, 0], rtol=0.01)


def test_a_rounded_norm_does_not_lift_a_level_above_the_last():
    x = jnp.asarray(np.float32([1e-3, 1.0, 3.3e-4]))
    keys = jax.random.split(jax.random.key(0), 20)
    values = jax.jit(jax.vmap(lambda key, x: dithering(4).compress(key, x).value, in_axes=(0, None)))(keys, x)
    assert float(jnp.abs(values).max()) <= float(jnp.linalg.norm(x))


def test_natural_compression_keeps_signs_and_does_not_hide_what_is_not_finite():
    x = jnp.array([jnp.nan, -jnp.nan, jnp.inf, -jnp.inf, -3.0, 0.0], jnp.float32)
    value = np.asarray(natural().compress(jax.random.key(0), x).value)
    assert np.all(np.isinf(value[:4])) and value[4] in (-2, -4) and value[5] == 0


@pytest.mark.parametrize("dtype,norm", [(jnp.bfloat16, math.inf), (jnp.float16, 2.0)])
def test_half_precision_is_rounded_without_bias_and_does_not_overflow(dtype, norm):
    d, samples = 256, 400
    x = jnp.full(d, 0.5, dtype).at[0].set(1000)
    keys = jax.random.split(jax.random.key(0), samples)
    values = jax.jit(jax.vmap(lambda key: dithering(1, norm).compress(key, x).value))(keys).astype(jnp.float64)
    assert values.shape == (samples, d) and bool(jnp.all(jnp.isfinite(values)))
    # Each small entry is the norm with probability 0.0005 and 0 otherwise: over 102,000 draws its mean has a deviation
    # of 14 %.
    assert 0.4 < float(values[:, 1:].mean()) / 0.5 < 1.6


HALVES = pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16], ids=["bfloat16", "float16"])


@HALVES
def test_the_second_rounding_is_unbiased_and_as_accurate_as_stated_over_all_its_outcomes(dtype):
    format = jnp.finfo(dtype)
    rng = np.random.default_rng(0)
    values = np.ldexp(1 + rng.integers(0, 1 << 16, 40) / (1 << 16), rng.integers(-13, 15, 40)).astype(np.float32)
    values[::2] *= -1
    values[:2] = 0, -1.5
    if dtype == jnp.float16:  # subnormal numbers, to 1/65536 of their distance
        values[2:5] = np.array([3.25, 0.75, 1000.125]) * float(format.smallest_subnormal)
    uniform = np.arange(1 << 16, dtype=np.float32)[:, None] / (1 << 16)  # every outcome equally often
    outcomes = jax.jit(_rounded_at_random, static_argnames="dtype")(values[None], uniform, np.dtype(dtype))
    assert outcomes.dtype == dtype
    outcomes = np.asarray(outcomes, np.float64)
    np.testing.assert_array_equal(outcomes.mean(axis=0), values.astype(np.float64))
    neighbours = np.stack([outcomes.min(axis=0), outcomes.max(axis=0)])
    nearest = np.asarray(jnp.asarray(values).astype(dtype), np.float64)
    assert np.all((neighbours == nearest).any(axis=0))
    variance = outcomes.var(axis=0)
    normal = np.abs(values) >= float(format.tiny)
    assert np.all(variance[normal] <= (float(format.eps) / 2) ** 2 * values.astype(np.float64)[normal] ** 2)


@pytest.mark.parametrize(
    "compressor,dtype",
    [(dithering(7), jnp.bfloat16), (dithering(5, 1.0), jnp.float16), (ternary(), jnp.bfloat16)],
    ids=["dithering-bfloat16", "dithering-float16", "ternary-bfloat16"],
)
def test_half_precision_has_no_bias_at_one_hot_vectors(compressor, dtype):
    """The norm in half precision and its product with l / s had one of up to 3.9 half units in the last place."""
    entries = jnp.asarray(1 + np.arange(128) / 128, dtype)
    x = jnp.zeros((128, 4), dtype).at[:, 1].set(entries)
    keys = jax.random.split(jax.random.key(0), 50)
    values = jax.jit(jax.vmap(lambda x: jax.vmap(lambda key: compressor.compress(key, x).value)(keys)))(x)
    values = np.asarray(values, np.float64)
    assert np.all(values[:, :, [0, 2, 3]] == 0)
    unit = float(jnp.finfo(dtype).eps) / 4
    exact = np.asarray(entries, np.float64)
    assert np.abs(values[:, :, 1].mean(axis=1) / exact - 1).max() < 0.2 * unit
    message = compressor.compress(keys[0], x[0])
    data = compressor.encode(keys[0], x[0])
    assert message.value.dtype == dtype and float(message.bits) == 8 * len(data) and len(data) > 4  # a norm in float32
    np.testing.assert_array_equal(compressor.decode(keys[0], data, x[0]), message.value)


def test_more_levels_than_digits_can_have_are_refused():
    with pytest.raises(
        ValueError, match=r"levels must be below 2\^30 \(digits are 32-bit integers\), got 1099511627776"
    ):
        dithering(1 << 40)
