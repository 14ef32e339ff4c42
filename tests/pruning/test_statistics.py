"""Statistics: the released definitions, invariance to chunks, batches, order and devices, reconstruction errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from commjax.pruning import reconstruct, statistics

S, T, IN, OUT = 12, 10, 6, 4


def random(seed, shape=(S, T, IN), scale=1.0, shift=0.0):
    return (scale * np.random.default_rng(seed).standard_normal(shape) + shift).astype(np.float32)


W = random(9, (IN, OUT))


def released(x, y):
    """The running form of the released code, one sample at a time, in float64."""
    q, sums, outputs, spread, tokens = np.zeros(IN), np.zeros(IN), np.zeros(OUT), np.zeros(IN), 0
    for n, (a, b) in enumerate(zip(x.astype(float), y.astype(float))):
        q = q * (n / (n + 1)) + (a**2).sum(0) / (n + 1)
        sums = sums * (n / (n + 1)) + a.sum(0) / (n + 1)
        outputs = outputs * (n / (n + 1)) + (b**2).sum(0) / (n + 1)
        spread = spread * (tokens / (tokens + len(a))) + a.var(0) * len(a) / (tokens + len(a))
        tokens += len(a)
    return np.sqrt(q), sums, spread, np.sqrt(outputs)


def read(stats):
    return (
        statistics.input_norm(stats),
        statistics.input_sum(stats),
        statistics.variance(stats),
        statistics.output_norm(stats),
    )


def test_statistics_are_the_released_ones():
    x = random(0, shift=0.7)
    stats = statistics.of(jnp.array(x), jnp.array(x @ W))
    for ours, theirs in zip(read(stats), released(x, x @ W)):
        np.testing.assert_allclose(ours, theirs, rtol=2e-6)
    assert (int(stats.samples), int(stats.tokens)) == (S, S * T)
    np.testing.assert_allclose(statistics.mean(stats), x.mean((0, 1)), rtol=1e-5)


def test_the_variance_is_within_samples_and_not_pooled():
    x = np.repeat(np.arange(3.0)[:, None, None], 5, axis=1).repeat(2, axis=2)  # constant in every sample
    stats = statistics.of(jnp.array(x))
    assert np.all(statistics.variance(stats) == 0) and x.var() > 0.6


def test_samples_of_other_lengths_count_by_their_tokens():
    a, b = random(1, (2, 4, IN)).astype(float), random(2, (1, 9, IN)).astype(float)
    stats = statistics.add(statistics.of(jnp.array(a)), statistics.of(jnp.array(b)))
    expected = (4 * a[0].var(0) + 4 * a[1].var(0) + 9 * b[0].var(0)) / 17
    np.testing.assert_allclose(statistics.variance(stats), expected, rtol=1e-12)
    np.testing.assert_allclose(statistics.mean(stats), (a.sum((0, 1)) + b.sum((0, 1))) / 17, rtol=1e-12)
    np.testing.assert_allclose(statistics.input_sum(stats), (a.sum((0, 1)) + b.sum((0, 1))) / 3, rtol=1e-12)


def test_a_variance_beside_a_large_mean_keeps_its_digits():
    x = random(3, (4, 64, IN)) + np.float32(1000)
    ours = statistics.variance(statistics.of(jnp.array(x)))
    np.testing.assert_allclose(ours, x.astype(float).var(1).mean(0), rtol=1e-4)


def total(chunks, gram=False):
    stats = [statistics.of(jnp.array(x), jnp.array(x @ W), gram=gram) for x in chunks]
    result = stats[0]
    for other in stats[1:]:
        result = statistics.add(result, other)
    return result


def exact(pair):
    return np.asarray(pair.hi, np.float64) + np.asarray(pair.lo, np.float64)


@settings(max_examples=10)
@given(st.sampled_from([[], [1], [4, 8], [3, 4, 11], [6, 8, 10]]), st.permutations(range(S)))
def test_chunks_and_order_do_not_matter(cuts, order):
    """To 1e-14 of the magnitudes in the pairs; float32 readings bit for bit on these samples."""
    x = random(4, scale=50.0, shift=3.0)
    y = x @ W
    whole = total([x])
    parts = total(np.split(x[np.array(order)], sorted(cuts)))
    for name, size in (("x", abs(x)), ("squares", x**2), ("spread", x**2), ("outputs", y**2)):
        magnitude = size.astype(float).sum((0, 1))
        assert np.all(abs(exact(getattr(whole, name)) - exact(getattr(parts, name))) <= 1e-14 * magnitude)
    for a, b in zip(read(whole), read(parts)):
        assert np.array_equal(a, b)
    assert (whole.samples, whole.tokens) == (parts.samples, parts.tokens)


def test_many_small_chunks_lose_no_digits():
    """A plain float32 running sum is off by 1e-5 here."""
    x = np.full((1, 1, 1), 0.1, np.float32)
    one = statistics.of(jnp.array(x))
    stats = jax.lax.fori_loop(1, 20_000, lambda i, stats: statistics.add(stats, one), one)
    assert float(statistics.mean(stats)[0]) == float(x[0, 0, 0])
    plain = jax.lax.fori_loop(1, 20_000, lambda i, s: s + jnp.float32(0.1), jnp.float32(0.1)) / 20_000
    assert abs(float(plain) / 0.1 - 1) > 1e-5


def test_leading_axes_are_samples_and_a_matrix_is_one():
    x = jnp.array(random(5))
    a, b = statistics.of(x), statistics.of(x.reshape(3, 4, T, IN))
    assert jax.tree.all(jax.tree.map(np.array_equal, a, b))
    assert int(statistics.of(x[0]).samples) == 1


@pytest.mark.parametrize("devices", [2, 4])
def test_devices_merge_to_the_same_statistics(devices):
    x = jnp.array(random(6, scale=10.0))
    mesh = jax.make_mesh((devices,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])

    def local(x):
        return statistics.over_devices(statistics.of(x, gram=True), "d")

    stats = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("d"), out_specs=P(), check_vma=False))(x)
    whole = statistics.of(x, gram=True)
    for f in (statistics.input_norm, statistics.input_sum, statistics.variance):
        assert np.array_equal(f(stats), f(whole))
    assert whole.gram is not None
    np.testing.assert_allclose(stats.gram, whole.gram, rtol=1e-5, atol=1e-2)
    mapped = jax.vmap(lambda x: statistics.over_devices(statistics.of(x), "d"), axis_name="d")(x.reshape(3, 4, T, IN))
    assert np.array_equal(
        statistics.input_norm(jax.tree.map(lambda leaf: leaf[0], mapped)), statistics.input_norm(whole)
    )


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_half_precision_is_summed_in_float32(dtype):
    x = jnp.array(random(7)).astype(dtype)
    a, b = statistics.of(x), statistics.of(x.astype(jnp.float32))
    assert a.x.hi.dtype == jnp.float32 and jax.tree.all(jax.tree.map(np.array_equal, a, b))


def test_what_one_side_lacks_the_sum_lacks():
    x = jnp.array(random(8))
    both = statistics.add(statistics.of(x, gram=True), statistics.of(x, x @ W))
    assert both.gram is None and both.outputs is None


# Reconstruction.


def test_reconstruction_errors_from_activations_and_from_the_gram_matrix_are_the_definition():
    x, mask = random(10, shift=0.5).astype(float), random(11, (IN, OUT)) > 0
    pruned = W * mask
    flat = x.reshape(-1, IN)
    expected = np.linalg.norm(flat @ W - flat @ pruned)
    relative = expected / np.linalg.norm(flat @ W)
    for error in (
        reconstruct.of_activations(jnp.array(x), jnp.array(W), jnp.array(pruned)),
        reconstruct.of_gram(total([x[:5], x[5:]], gram=True), jnp.array(W), jnp.array(pruned)),
    ):
        np.testing.assert_allclose(error, (expected, relative), rtol=1e-6)


def test_an_unchanged_layer_has_no_error_even_if_it_is_zero():
    x, zero = jnp.array(random(12)), jnp.zeros((IN, OUT), jnp.float32)
    for w in (jnp.array(W), zero):
        assert reconstruct.of_activations(x, w, w) == (0, 0)
        assert reconstruct.of_gram(statistics.of(x, gram=True), w, w) == (0, 0)


BAD = {
    "a vector": (lambda: statistics.of(jnp.ones(3)), r"x has shape \(3,\); allowed: \[\.\.\., tokens, in\]"),
    "no tokens": (lambda: statistics.of(jnp.ones((2, 0, 3))), r"x has shape \(2, 0, 3\)"),
    "other outputs": (lambda: statistics.of(jnp.ones((2, 5, 3)), jnp.ones((2, 4, 3))), r"y has shape \(2, 4, 3\)"),
    "no outputs": (lambda: statistics.output_norm(statistics.of(jnp.ones((5, 3)))), "stats has no outputs"),
    "no gram": (
        lambda: reconstruct.of_gram(statistics.of(jnp.ones((5, 3))), jnp.ones((3, 2)), jnp.ones((3, 2))),
        r"stats has no gram; allowed: .*of\(x, gram=True\)",
    ),
}


@pytest.mark.parametrize("call, message", BAD.values(), ids=BAD)
def test_bad_input_is_refused_by_name_and_value(call, message):
    with pytest.raises(ValueError, match=message):
        call()
