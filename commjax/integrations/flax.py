"""A language model as a Flax module, with `init` and `apply`."""

from collections.abc import Mapping

import flax.linen as nn
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree

from commjax.llm import architectures
from commjax.llm.base import Params, forward, init_layers
from commjax.llm.config import Config


class CausalLM(nn.Module):
    """Llama or OPT as a Flax module: tokens [b, t] -> logits [b, t, vocab].

    `variables` makes its variables from the params of a checkpoint.

    Attributes:
        config: configuration of the model.
        dtype: dtype of the weights that `init` draws.

    >>> import jax
    >>> from commjax.llm import config
    >>> sizes = {"vocab_size": 7, "hidden_size": 8, "ffn_dim": 12, "num_attention_heads": 2, "num_hidden_layers": 1}
    >>> module, tokens = CausalLM(config.from_json({"model_type": "opt", **sizes})), jnp.ones((2, 3), jnp.int32)
    >>> found = module.init(jax.random.key(0), tokens)
    >>> module.apply(found, tokens).shape, found["params"]["block_0"]["fc1"]["kernel"].shape
    ((2, 3, 7), (8, 12))
    """

    config: Config
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, tokens: Int[Array, "b t"]) -> Float[Array, "b t vocab"]:
        """Return the logits of the next token at each position."""
        model = architectures.model(self.config)
        outer = self.param("outer", init_layers, model.outer_shapes, self.dtype)
        numbers = range(self.config.num_hidden_layers)
        blocks = [self.param(f"block_{i}", init_layers, model.block_shapes, self.dtype) for i in numbers]
        return forward(model, Params(outer, blocks), tokens)


def variables(params: Params) -> dict[str, PyTree]:
    """Convert params to the variables that `CausalLM.apply` takes.

    >>> variables(Params({}, ({}, {})))
    {'params': {'outer': {}, 'block_0': {}, 'block_1': {}}}
    """
    return {"params": {"outer": params.outer} | {f"block_{i}": block for i, block in enumerate(params.blocks)}}


def params(variables: Mapping[str, PyTree]) -> Params:
    """Convert variables to params, the inverse of `variables`, for `export.save` after training.

    >>> params({"params": {"outer": {}, "block_0": {}}})
    Params(outer={}, blocks=({},))
    """
    parts = variables["params"]
    return Params(parts["outer"], tuple(parts[f"block_{i}"] for i in range(len(parts) - 1)))
