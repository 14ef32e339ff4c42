"""The functions of which Llama and OPT consist, in the dtype of their inputs. Norms and softmax compute in float32."""

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from commjax.llm.config import Rope

Layer = dict[str, Array]  # "kernel" [in, out], "bias" [out], "scale" [d] or "embedding" [ids, d]

# The number of float32 scores that `attention` holds at once: 64 MB.
_SCORES = 2**24


def _along_last(vector: Float[Array, "d"], x: Float[Array, "... d"]) -> Float[Array, "... d"]:
    return jax.lax.expand_dims(vector, range(x.ndim - 1)).astype(x.dtype)


def linear(layer: Layer, x: Float[Array, "... in"]) -> Float[Array, "... out"]:
    """Apply a dense layer: x W + b.

    Args:
        layer: "kernel" W [in, out] and, optionally, "bias" b [out].
        x: The inputs.

    Returns:
        The outputs.

    >>> linear({"kernel": jnp.eye(2, 3)}, jnp.ones((1, 2))).tolist()
    [[1.0, 1.0, 0.0]]
    """
    y = x @ layer["kernel"].astype(x.dtype)
    return y + _along_last(layer["bias"], y) if "bias" in layer else y


def linear_shapes(shape: tuple[int, int], biased: bool) -> dict[str, tuple[int, ...]]:
    """The shapes of a dense layer.

    Args:
        shape: (in, out).
        biased: Whether the layer has a bias.

    Returns:
        {"kernel": (in, out)}, and "bias" if there is one.
    """
    return {"kernel": shape, "bias": shape[1:]} if biased else {"kernel": shape}


def logits(outer: dict[str, Layer], h: Float[Array, "... d"], tied: bool) -> Float[Array, "... vocab"]:
    """Apply the head of a language model.

    Args:
        outer: The layers outside of the blocks: "embed_tokens", and "lm_head" if the head is not tied.
        h: The inputs.
        tied: Whether the head is the transposed embedding.

    Returns:
        One number for each entry of the vocabulary.
    """
    return h @ outer["embed_tokens"]["embedding"].T.astype(h.dtype) if tied else linear(outer["lm_head"], h)


def rms_norm(layer: Layer, x: Float[Array, "... d"], eps: float) -> Float[Array, "... d"]:
    """Apply an RMS norm: scale * x / sqrt(mean(x^2) + eps).

    The scale multiplies after the rounding to x's dtype, as in transformers.

    Args:
        layer: "scale" [d].
        x: The inputs.
        eps: The constant under the root.

    Returns:
        The outputs.

    >>> rms_norm({"scale": jnp.array([1.0, 10.0])}, jnp.array([[2.0, 2.0]]), 0.0).round(3).tolist()
    [[1.0, 10.0]]
    """
    wide = x.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
    return wide.astype(x.dtype) * _along_last(layer["scale"], x)


def layer_norm(layer: Layer, x: Float[Array, "... d"], eps: float = 1e-5) -> Float[Array, "... d"]:
    """Apply a layer norm: scale * (x - mean(x)) / sqrt(var(x) + eps) + bias.

    Args:
        layer: "scale" [d] and "bias" [d]. An empty layer neither scales nor shifts.
        x: The inputs.
        eps: The constant under the root.

    Returns:
        The outputs.

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
    """Apply an activation function.

    Args:
        name: "silu", "relu", or "gelu" (with the error function).
        x: The inputs.

    Returns:
        The outputs.

    >>> activate("relu", jnp.array([-1.0, 2.0])).tolist()
    [0.0, 2.0]
    """
    if name == "silu":
        return jax.nn.silu(x)
    return jax.nn.relu(x) if name == "relu" else jax.nn.gelu(x, approximate=False)


def frequencies(rope: Rope, head_dim: int) -> Float[np.ndarray, "half"]:
    """Compute the angle f_i by which rotary positions rotate pair i per position.

        default:  f_i = theta^(-2i/head_dim)
        linear:   f_i / factor
        llama3:   f_i                                  for wavelengths 2 pi/f_i < original_length / high_freq_factor
                  f_i / factor                         for wavelengths 2 pi/f_i > original_length / low_freq_factor
                  (1 - s) f_i / factor + s f_i         between them, with
                  s = (original_length f_i / (2 pi) - low_freq_factor) / (high_freq_factor - low_freq_factor)

    Args:
        rope: The parameters.
        head_dim: The width of a head, even.

    Returns:
        The angles f_0, ..., f_{head_dim/2 - 1}.

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
    """Rotate the pair (x_i, x_{i + head_dim/2}) of the token at position t by the angle t f_i, positions from 0.

    Args:
        x: Queries or keys.
        rope: The parameters of `frequencies`.

    Returns:
        The rotated vectors.

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
    """Compute causal attention: each token attends to itself and to the tokens before it.

        softmax(q k' / sqrt(head_dim)) v

    Args:
        q: The queries.
        k: The keys. Query head i uses head i // (heads / kv) of keys and values.
        v: The values.

    Returns:
        The outputs of all heads side by side; width = heads * head_dim.

    >>> x = jnp.ones((1, 3, 2, 4))
    >>> attention(x, x, x).shape
    (1, 3, 8)
    """
    batch, time, heads, size = q.shape
    kv = k.shape[2]
    step = max(64, -(-time // 4))

    def part(
        start: int, q: Float[Array, "g t d"], k: Float[Array, "t d"], v: Float[Array, "t d"]
    ) -> Float[Array, "g s d"]:
        """Attend from `step` queries to the keys up to the last. Four parts do 5/8 of the work and fit the cache."""
        end = min(start + step, time)
        scores = jnp.einsum("gqd,kd->gqk", q[:, start:end], k[:end], preferred_element_type=jnp.float32) * size**-0.5
        before = jnp.tril(jnp.ones((end - start, end), bool), start)[None]
        weights = jax.nn.softmax(jnp.where(before, scores, -jnp.inf), axis=-1)
        return jnp.einsum("gqk,kd->gqd", weights.astype(v.dtype), v[:end])

    def attend(group: tuple[Array, Array, Array]) -> Float[Array, "g t d"]:
        return jnp.concatenate([part(start, *group) for start in range(0, time, step)], axis=1)

    def split(x: Float[Array, "b t _ d"], *shape: int) -> Float[Array, "n *g t d"]:
        return jnp.moveaxis(x.reshape(batch, time, kv, *shape), 1, -2).reshape(batch * kv, *shape[:-1], time, size)

    groups = split(q, heads // kv, size), split(k, size), split(v, size)
    at_once = max(1, _SCORES // (heads // kv * step * time))
    y = jax.vmap(attend)(groups) if at_once >= batch * kv else jax.lax.map(attend, groups, batch_size=at_once)
    return jnp.moveaxis(y.reshape(batch, heads, time, size), 1, 2).reshape(batch, time, heads * size)
