"""Each layer against a plain NumPy loop."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commjax.llm import layers
from commjax.llm.config import Rope

pytestmark = pytest.mark.slow


def normal(seed, *shape, dtype=np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def softmax_attention(q, k, v):
    """Token by token, head by head, in float64."""
    batch, time, heads, size = q.shape
    out = np.zeros((batch, time, heads, size))
    for b in range(batch):
        for t in range(time):
            for head in range(heads):
                group = head // (heads // k.shape[2])
                scores = k[b, : t + 1, group].astype(float) @ q[b, t, head].astype(float) / math.sqrt(size)
                weights = np.exp(scores - scores.max())
                out[b, t, head] = weights / weights.sum() @ v[b, : t + 1, group]
    return out.reshape(batch, time, heads * size)


@settings(max_examples=10)  # each shape is compiled anew
@given(
    batch=st.integers(1, 3),
    time=st.integers(1, 9),
    kv=st.integers(1, 3),
    share=st.integers(1, 3),
    size=st.integers(1, 5),
)
def test_attention_reads_the_past_of_its_group(batch, time, kv, share, size):
    q = 2 * normal(0, batch, time, kv * share, size)
    k, v = 2 * normal(1, batch, time, kv, size), normal(2, batch, time, kv, size)
    found = layers.attention(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v))
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, softmax_attention(q, k, v), rtol=0, atol=2e-6)


@pytest.mark.parametrize("time", [63, 64, 65, 130, 258])
def test_long_windows_are_cut_into_parts_without_a_seam(time):
    q, k, v = normal(0, 1, time, 4, 3), normal(1, 1, time, 2, 3), normal(2, 1, time, 2, 3)
    found = jax.jit(layers.attention)(q, k, v)
    np.testing.assert_allclose(found, softmax_attention(q, k, v), rtol=0, atol=2e-6)


@pytest.mark.parametrize("scores", [1, 2 * 70 * 64 * 2, 2 * 70 * 64 * 3])
def test_groups_one_after_another_give_the_same(scores, monkeypatch):
    q, k, v = normal(0, 3, 70, 4, 3), normal(1, 3, 70, 2, 3), normal(2, 3, 70, 2, 3)
    wanted = layers.attention(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v))
    monkeypatch.setattr(layers, "_SCORES", scores)
    found = layers.attention(jnp.asarray(q), jnp.asarray(k), jnp.asarray(v))
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-6)
    held = jax.make_jaxpr(layers.attention)(q, k, v)
    assert "scan" in str(held)


def test_attention_in_bfloat16_stays_near_float32():
    q, k, v = (jnp.asarray(normal(i, 2, 20, 2, 8)) for i in range(3))
    found = layers.attention(*(x.astype(jnp.bfloat16) for x in (q, k, v)))
    assert found.dtype == jnp.bfloat16
    np.testing.assert_allclose(found.astype(jnp.float32), layers.attention(q, k, v), rtol=0, atol=0.03)


@pytest.mark.parametrize("rope", [Rope(), Rope(theta=37.0), Rope(theta=50.0, kind="linear", factor=3.0)])
def test_positions_turn_pairs_half_a_head_apart(rope):
    x = normal(0, 2, 5, 3, 6)
    found = layers.rotate(jnp.asarray(x), rope)
    assert found.dtype == jnp.float32
    for t in range(5):
        for i in range(3):
            angle = t / (rope.theta ** (2 * i / 6) * rope.factor)
            pair = x[:, t, :, i] + 1j * x[:, t, :, i + 3]
            turned = pair * np.exp(1j * angle)
            np.testing.assert_allclose(found[:, t, :, i], turned.real, atol=2e-6)
            np.testing.assert_allclose(found[:, t, :, i + 3], turned.imag, atol=2e-6)


def test_only_the_distance_of_two_tokens_matters():
    q, k = normal(0, 1, 1, 1, 8), normal(1, 1, 1, 1, 8)
    q, k = (layers.rotate(jnp.asarray(np.repeat(x, 9, axis=1)), Rope(theta=20.0))[0, :, 0] for x in (q, k))
    products = np.asarray(q @ k.T)
    for shift in range(-8, 9):
        np.testing.assert_allclose(np.ptp(np.diagonal(products, shift)), 0, atol=1e-5)


def test_llama3_keeps_short_waves_stretches_long_ones_and_blends_between():
    rope = Rope(theta=1e3, kind="llama3", factor=8.0, low_freq_factor=2.0, high_freq_factor=4.0, original_length=100)
    plain, found = layers.frequencies(Rope(theta=1e3), 16), layers.frequencies(rope, 16)
    kinds = []
    for f, g in zip(plain.astype(float), found):
        wave = 2 * math.pi / f
        if wave < 100 / 4:
            kinds.append("short")
            assert g == np.float32(f)
        elif wave > 100 / 2:
            kinds.append("long")
            assert g == np.float32(f / 8)
        else:
            kinds.append("between")
            s = (100 / wave - 2) / (4 - 2)
            np.testing.assert_allclose(g, (1 - s) * f / 8 + s * f, rtol=1e-6)
    assert set(kinds) == {"short", "between", "long"} and found.dtype == np.float32


def test_norms():
    x, scale, bias = 3 * normal(0, 2, 4, 6) + 1, normal(1, 6), normal(2, 6)
    wide = x.astype(float)
    root = scale * wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + 0.1)
    found = layers.rms_norm({"scale": jnp.asarray(scale)}, jnp.asarray(x), 0.1)
    np.testing.assert_allclose(found, root, rtol=0, atol=2e-6)
    centred = (wide - wide.mean(-1, keepdims=True)) / np.sqrt(wide.var(-1, keepdims=True) + 0.1)
    np.testing.assert_allclose(layers.layer_norm({}, jnp.asarray(x), 0.1), centred, rtol=0, atol=2e-6)
    both = {"scale": jnp.asarray(scale), "bias": jnp.asarray(bias)}
    found = layers.layer_norm(both, jnp.asarray(x), 0.1)
    np.testing.assert_allclose(found, centred * scale + bias, rtol=0, atol=2e-6)


def test_the_default_epsilon_of_the_layer_norm_is_torchs():
    x = jnp.asarray(1e-3 * normal(0, 1, 5))
    wide = np.asarray(x, float)
    wanted = (wide - wide.mean()) / np.sqrt(wide.var() + 1e-5)
    np.testing.assert_allclose(layers.layer_norm({}, x), wanted, rtol=1e-5)


def test_norms_are_float32_inside():
    """A sum of squares of float16 numbers above 256 is infinite in float16."""
    x = jnp.full((1, 8), 1000.0, jnp.float16)
    ones = {"scale": jnp.ones(8, jnp.float16)}
    assert layers.rms_norm(ones, x, 1e-6).tolist() == [[1.0] * 8]
    assert layers.layer_norm({}, x).tolist() == [[0.0] * 8] and layers.layer_norm({}, x).dtype == jnp.float16


def test_a_linear_layer_takes_the_dtype_of_its_input():
    x, kernel, bias = normal(0, 2, 3), normal(1, 3, 4), normal(2, 4)
    layer = {"kernel": jnp.asarray(kernel), "bias": jnp.asarray(bias)}
    np.testing.assert_allclose(layers.linear(layer, jnp.asarray(x)), x @ kernel + bias, atol=1e-6)
    assert layers.linear(layer, jnp.asarray(x, jnp.bfloat16)).dtype == jnp.bfloat16


def test_activations():
    x = jnp.asarray([-2.0, -0.5, 0.0, 1.5])
    values = [float(one) for one in x]
    gelu = [value * (1 + math.erf(value / math.sqrt(2))) / 2 for value in values]
    np.testing.assert_allclose(layers.activate("gelu", x), gelu, atol=1e-12)
    np.testing.assert_allclose(layers.activate("silu", x), [v / (1 + math.exp(-v)) for v in values], atol=1e-12)
    assert layers.activate("relu", x).tolist() == [0.0, 0.0, 0.0, 1.5]
