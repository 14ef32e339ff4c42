"""What Llama and OPT have in common: an embedding, blocks of one shape, a head."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from commjax.core.base import Key
from commjax.llm.config import Config
from commjax.llm.layers import Layer

Layers = dict[str, Layer]  # "self_attn.q_proj" -> {"kernel": [in, out], "bias": [out]}
Shapes = dict[str, dict[str, tuple[int, ...]]]
Hidden = Float[Array, "b t d"]


class Params(NamedTuple):
    """outer: all that is not in a block; blocks: their layers under the names of Hugging Face.  Kernels are [in, out]."""

    outer: Layers
    blocks: Sequence[Layers]


class Model(NamedTuple):
    """Pure functions of one architecture and config.

    `block` also gives what enters each of the `linear` layers, [b, t, in] under the layer's name, for calibration; under
    jit, inputs that nobody reads cost nothing.
    """

    config: Config
    embed: Callable[[Layers, Int[Array, "b t"]], Hidden]
    block: Callable[[Layers, Hidden], tuple[Hidden, dict[str, Hidden]]]
    head: Callable[[Layers, Hidden], Float[Array, "b t vocab"]]
    linear: tuple[str, ...]  # the prunable layers of a block
    block_shapes: Shapes
    outer_shapes: Shapes
    block_prefix: str  # in a checkpoint, "model.layers.{}."
    outer_prefixes: dict[str, str]  # "norm" -> "model.norm"


def forward(model: Model, params: Params, tokens: Int[Array, "b t"]) -> Float[Array, "b t vocab"]:
    """Logits of the next token at each position, in the dtype of the weights.

    >>> from commjax.llm import llama
    >>> tiny = Config("llama", vocab_size=5, hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2,
    ...               num_key_value_heads=1, head_dim=4, max_position_embeddings=16)
    >>> model = llama.model(tiny)
    >>> forward(model, init(jax.random.key(0), model), jnp.array([[1, 2, 3]], jnp.int32)).shape
    (1, 3, 5)
    """
    h = model.embed(params.outer, tokens)
    for block in params.blocks:
        h, _ = model.block(block, h)
    return model.head(params.outer, h)


@partial(jax.jit, static_argnames="embed")
def embed_once(embed: Callable, outer: Layers, tokens: Int[Array, "b t"]) -> Hidden:
    """`model.embed`, one compiled program for all batches of a shape."""
    return embed(outer, tokens)


@partial(jax.jit, static_argnames="block", donate_argnames="h")
def advance_once(block: Callable, params: Layers, h: Hidden) -> Hidden:
    """What leaves a block: one compiled program for all blocks.  h is used up."""
    return block(params, h)[0]


def init(key: Key, model: Model, dtype: DTypeLike = jnp.float32, scale: float = 0.02) -> Params:
    """Normal kernels and embeddings of deviation `scale`, biases 0, scales 1, as transformers begins."""
    outer = init_layers(jax.random.fold_in(key, 0), model.outer_shapes, dtype, scale)
    keys = (jax.random.fold_in(key, i + 1) for i in range(model.config.num_hidden_layers))
    return Params(outer, tuple(init_layers(one, model.block_shapes, dtype, scale) for one in keys))


def init_layers(key: Key, shapes: Shapes, dtype: DTypeLike = jnp.float32, scale: float = 0.02) -> Layers:
    """The part of `init` for a block, or for what is outside of them.

    >>> init_layers(jax.random.key(0), {"norm": {"scale": (2,)}})["norm"]["scale"].tolist()
    [1.0, 1.0]
    """

    def leaf(key: Key, kind: str, shape: tuple[int, ...]) -> Array:
        if kind in ("scale", "bias"):
            return jnp.full(shape, kind == "scale", dtype)
        return (scale * jax.random.normal(key, shape, jnp.float32)).astype(dtype)

    keys = iter(jax.random.split(key, sum(map(len, shapes.values()))))
    return {
        name: {kind: leaf(next(keys), kind, shape) for kind, shape in layer.items()} for name, layer in shapes.items()
    }
