"""The few functions that Llama and OPT are made of, in the dtype of their inputs; norms and softmax are float32 inside."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from commjax.llm.config import Rope

Layer = dict[str, Array]  # "kernel" [in, out], "bias" [out], "scale" [d] or "embedding" [ids, d]

# Scores held at once by `attention`, in float32: 64 MB.
_SCORES = 2**24


def _along_last(vector: Float[Array, "d"], x: Float[Array, "... d"]) -> Float[Array, "... d"]:
    return jax.lax.expand_dims(vector, range(x.ndim - 1)).astype(x.dtype)


def linear(layer: Layer, x: Float[Array, "... in"]) -> Float[Array, "... out"]:
    """x W + b, where W is [in, out] and b may be absent.

    >>> linear({"kernel": jnp.eye(2, 3)}, jnp.ones((1, 2))).tolist()
    [[1.0, 1.0, 0.0]]
    """
    y = x @ layer["kernel"].astype(x.dtype)
    return y + _along_last(layer["bias"], y) if "bias" in layer else y


def rms_norm(layer: Layer, x: Float[Array, "... d"], eps: float) -> Float[Array, "... d"]:
    """scale * x / sqrt(mean(x^2) + eps); the scale multiplies after the rounding to x's dtype, as in transformers.

    >>> rms_norm({"scale": jnp.array([1.0, 10.0])}, jnp.array([[2.0, 2.0]]), 0.0).round(3).tolist()
    [[1.0, 10.0]]
    """
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return wide.astype(x.dtype) * _along_last(layer["scale"], x)


def layer_norm(layer: Layer, x: Float[Array, "... d"], eps: float = 1e-5) -> Float[Array, "... d"]:
    """scale * (x - mean(x)) / sqrt(var(x) + eps) + bias; an empty `layer` neither scales nor shifts.

    >>> layer_norm({}, jnp.array([[1.0, 3.0]]), 0.0).tolist()
    [[-1.0, 1.0]]
    """
    wide = x.astype(jnp.float32)
    wide = wide - jnp.mean(wide, axis=-1, keepdims=True)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    if layer:
        wide = wide * _along_last(layer["scale"], wide) + _along_last(layer["bias"], wide)
    return wide.astype(x.dtype)


def activate(name: str, x: Float[Array, "..."]) -> Float[Array, "..."]:
    """silu, relu, or gelu with the error function.

    >>> activate("relu", jnp.array([-1.0, 2.0])).tolist()
    [0.0, 2.0]
    """
    if name == "silu":
        return jax.nn.silu(x)
    return jax.nn.relu(x) if name == "relu" else jax.nn.gelu(x, approximate=False)


def frequencies(rope: Rope, head_dim: int) -> Float[np.ndarray, "half"]:
    """Angles turned per position, f_i = theta^(-2i/head_dim), then by `rope.kind`:

        linear:  f / factor
        llama3:  f for wavelengths 2 pi/f < original_length / high_freq_factor,  f / factor for those > original_length /
                 low_freq_factor,  between them (1 - s) f / factor + s f,
                 s = (original_length f / (2 pi) - low_freq_factor) / (high_freq_factor - low_freq_factor)

    >>> frequencies(Rope(theta=100.0), 4).tolist()
    [1.0, 0.10000000149011612]
    """
    plain = rope.theta ** -(np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    if rope.kind == "default":
        return plain.astype(np.float32)
    if rope.kind == "linear":
        return (plain / rope.factor).astype(np.float32)
    turns = rope.original_length * plain / (2 * np.pi)
    # Clipped to [0, 1], the ramp is 1 for short wavelengths and 0 for long ones.
    s = np.clip((turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor), 0, 1)
    return ((1 - s) * plain / rope.factor + s * plain).astype(np.float32)


def rotate(x: Float[Array, "b t heads head_dim"], rope: Rope) -> Float[Array, "b t heads head_dim"]:
    """Turn the pair (x_i, x_{i + head_dim/2}) of the token at position t by the angle t f_i, positions from 0.

    >>> [f"{value:.2f}" for value in rotate(jnp.ones((1, 2, 1, 2)), Rope())[0, 1, 0]]
    ['-0.30', '1.38']
    """
    time, half = x.shape[1], x.shape[3] // 2
    angles = jnp.outer(jnp.arange(time, dtype=jnp.float32), jnp.asarray(frequencies(rope, x.shape[3])))
    cos, sin = (f(angles).astype(x.dtype)[None, :, None, :] for f in (jnp.cos, jnp.sin))
    first, second = x[..., :half], x[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def attention(
    q: Float[Array, "b t heads head_dim"], k: Float[Array, "b t kv head_dim"], v: Float[Array, "b t kv head_dim"]
) -> Float[Array, "b t width"]:
    """softmax(q k' / sqrt(head_dim)) v over the tokens up to each one; head i reads keys and values of i // (heads / kv).

    >>> x = jnp.ones((1, 3, 2, 4))
    >>> attention(x, x, x).shape
    (1, 3, 8)
    """
    batch, time, heads, size = q.shape
    kv = k.shape[2]
    step = max(64, -(-time // 4))

    def part(start: int, q, k, v):
        """Of `step` queries, over the keys up to the last of them: four parts do 5/8 of the work, and fit the cache."""
        end = min(start + step, time)
        scores = jnp.einsum("gqd,kd->gqk", q[:, start:end], k[:end], preferred_element_type=jnp.float32) * size**-0.5
        before = jnp.tril(jnp.ones((end - start, end), bool), start)[None]
        weights = jax.nn.softmax(jnp.where(before, scores, -jnp.inf), axis=-1)
        return jnp.einsum("gqk,kd->gqd", weights.astype(v.dtype), v[:end])

    def one(group):
        return jnp.concatenate([part(start, *group) for start in range(0, time, step)], axis=1)

    def split(x, *shape):
        return jnp.moveaxis(x.reshape(batch, time, kv, *shape), 1, -2).reshape(batch * kv, *shape[:-1], time, size)

    groups = split(q, heads // kv, size), split(k, size), split(v, size)
    at_once = max(1, _SCORES // (heads // kv * step * time))
    y = jax.vmap(one)(groups) if at_once >= batch * kv else jax.lax.map(one, groups, batch_size=at_once)
    return jnp.moveaxis(y.reshape(batch, heads, time, size), 1, 2).reshape(batch, time, heads * size)
