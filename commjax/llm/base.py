"""The common parts of Llama and OPT: an embedding, blocks of one shape, a head."""

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
    """The weights of a model. Kernels are [in, out].

    Attributes:
        outer: The layers outside of the blocks: embeddings, last norm, head.
        blocks: The layers of each block, under the names of Hugging Face.
    """

    outer: Layers
    blocks: Sequence[Layers]


class Model(NamedTuple):
    """The pure functions of one architecture and config, and the names and shapes of its layers.

    Attributes:
        config: The config.
        embed: Function (outer layers, tokens [b, t]) -> hidden states [b, t, d].
        block: Function (layers of a block, hidden states) -> (hidden states, inputs). `inputs` maps the name of each
            `linear` layer to the input of this layer, [b, t, in], for calibration. Under jit, inputs that are not used
            cost nothing.
        head: Function (outer layers, hidden states) -> logits [b, t, vocab].
        linear: The names of the prunable layers of a block.
        block_shapes: The shapes of the layers of a block: layer -> {"kernel": (in, out), ...}.
        outer_shapes: The shapes of the layers outside of the blocks.
        block_prefix: The prefix of a block's tensors in a checkpoint, such as "model.layers.{}.".
        outer_prefixes: Outer layer -> prefix of its tensors in a checkpoint, such as "norm" -> "model.norm".
    """

    config: Config
    embed: Callable[[Layers, Int[Array, "b t"]], Hidden]
    block: Callable[[Layers, Hidden], tuple[Hidden, dict[str, Hidden]]]
    head: Callable[[Layers, Hidden], Float[Array, "b t vocab"]]
    linear: tuple[str, ...]
    block_shapes: Shapes
    outer_shapes: Shapes
    block_prefix: str
    outer_prefixes: dict[str, str]


def forward(model: Model, params: Params, tokens: Int[Array, "b t"]) -> Float[Array, "b t vocab"]:
    """Compute the logits of the next token at each position.

    Args:
        model: The model.
        params: Its weights.
        tokens: The ids of the tokens.

    Returns:
        The logits, in the dtype of the weights.

    >>> from commjax.llm import llama
    >>> tiny = Config("llama", vocab_size=5, hidden_size=8, intermediate_size=12, num_hidden_layers=1,
    ...               num_attention_heads=2, num_key_value_heads=1, head_dim=4, max_position_embeddings=16)
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
    """Apply `model.embed` under jit: one compiled program for all batches of a shape.

    Args:
        embed: The function `model.embed`.
        outer: The outer layers.
        tokens: The ids of the tokens.

    Returns:
        The hidden states.
    """
    return embed(outer, tokens)


@partial(jax.jit, static_argnames="block", donate_argnames="h")
def advance_once(block: Callable, params: Layers, h: Hidden) -> Hidden:
    """Apply `model.block` under jit: one compiled program for all blocks.

    Args:
        block: The function `model.block`.
        params: The layers of the block.
        h: The hidden states. The buffer is donated, so `h` cannot be used afterwards.

    Returns:
        The hidden states after the block.
    """
    return block(params, h)[0]


def init(key: Key, model: Model, dtype: DTypeLike = jnp.float32, scale: float = 0.02) -> Params:
    """Initialise the weights as transformers does: normal kernels and embeddings, biases 0, scales 1.

    Args:
        key: The random key.
        model: The model.
        dtype: The dtype of the weights.
        scale: The standard deviation of kernels and embeddings.

    Returns:
        The weights.
    """
    outer = init_layers(jax.random.fold_in(key, 0), model.outer_shapes, dtype, scale)
    keys = (jax.random.fold_in(key, i + 1) for i in range(model.config.num_hidden_layers))
    return Params(outer, tuple(init_layers(block_key, model.block_shapes, dtype, scale) for block_key in keys))


def init_layers(key: Key, shapes: Shapes, dtype: DTypeLike = jnp.float32, scale: float = 0.02) -> Layers:
    """Initialise the layers of one block, or the outer layers, as `init` does.

    Args:
        key: The random key.
        shapes: The shapes of the layers.
        dtype: The dtype of the weights.
        scale: The standard deviation of kernels and embeddings.

    Returns:
        The layers.

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
