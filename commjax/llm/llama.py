"""Llama as pure functions: grouped-query attention with rotary positions, a gated MLP, and an RMS norm before each."""

from jaxtyping import Array, Float, Int

from commjax.llm import layers
from commjax.llm.base import Hidden, Layers, Model, Shapes
from commjax.llm.config import Config

LINEAR = (
    "self_attn.q_proj",
    "self_attn.k_proj",
    "self_attn.v_proj",
    "self_attn.o_proj",
    "mlp.gate_proj",
    "mlp.up_proj",
    "mlp.down_proj",
)


def model(config: Config) -> Model:
    r"""Make the functions of a Llama.

        a = norm(h);  h <- h + o(attention(rotate(q a), rotate(k a), v a))
        m = norm(h);  h <- h + down(act(gate m) * up m)

    h are the hidden states; q, k, v, o, gate, up and down are the linear layers of a block.

    Args:
        config: The config, with architecture "llama".

    Returns:
        The model.

    >>> config = Config("llama", vocab_size=9, hidden_size=8, intermediate_size=12, num_hidden_layers=1,
    ...                 num_attention_heads=2, num_key_value_heads=1, head_dim=4, max_position_embeddings=16)
    >>> model(config).block_shapes["self_attn.k_proj"]
    {'kernel': (8, 4)}
    """
    if config.architecture != "llama":
        raise ValueError(f"config.architecture={config.architecture!r}; allowed: 'llama'")
    eps, size = config.rms_norm_eps, config.head_dim

    def embed(outer: Layers, tokens: Int[Array, "b t"]) -> Hidden:
        return outer["embed_tokens"]["embedding"][tokens]

    def block(params: Layers, h: Hidden) -> tuple[Hidden, dict[str, Hidden]]:
        def project(name: str, x: Hidden) -> Float[Array, "b t heads head_dim"]:
            y = layers.linear(params[name], x)
            return y.reshape(*y.shape[:2], -1, size)

        a = layers.rms_norm(params["input_layernorm"], h, eps)
        q, k, v = (project(name, a) for name in LINEAR[:3])
        read = layers.attention(layers.rotate(q, config.rope), layers.rotate(k, config.rope), v)
        h = h + layers.linear(params["self_attn.o_proj"], read)

        m = layers.rms_norm(params["post_attention_layernorm"], h, eps)
        gate = layers.activate(config.activation, layers.linear(params["mlp.gate_proj"], m))
        gated = gate * layers.linear(params["mlp.up_proj"], m)
        h = h + layers.linear(params["mlp.down_proj"], gated)
        return h, dict(zip(LINEAR, (a, a, a, read, m, m, gated)))

    def head(outer: Layers, h: Hidden) -> Float[Array, "b t vocab"]:
        return layers.logits(outer, layers.rms_norm(outer["norm"], h, eps), config.tie_word_embeddings)

    return Model(
        config, embed, block, head, LINEAR, block_shapes(config), outer_shapes(config), "model.layers.{}.", _PREFIXES
    )


_PREFIXES = {"embed_tokens": "model.embed_tokens", "norm": "model.norm", "lm_head": "lm_head"}


def block_shapes(config: Config) -> Shapes:
    """The shapes of the layers of a block.

    Args:
        config: The config.

    Returns:
        Layer -> {"kernel": (in, out), ...}.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    ends = (
        (hidden, queries),
        (hidden, keys),
        (hidden, keys),
        (queries, hidden),
        (hidden, inner),
        (hidden, inner),
        (inner, hidden),
    )

    def kernel(name: str, shape: tuple[int, int]) -> dict[str, tuple[int, ...]]:
        return layers.linear_shapes(shape, config.mlp_bias if name.startswith("mlp") else config.attention_bias)

    norms: Shapes = {name: {"scale": (hidden,)} for name in ("input_layernorm", "post_attention_layernorm")}
    return {name: kernel(name, shape) for name, shape in zip(LINEAR, ends)} | norms


def outer_shapes(config: Config) -> Shapes:
    """The shapes of the layers outside of the blocks.

    Args:
        config: The config.

    Returns:
        Layer -> {"kernel": (in, out), ...}.
    """
    shapes: Shapes = {
        "embed_tokens": {"embedding": (config.vocab_size, config.hidden_size)},
        "norm": {"scale": (config.hidden_size,)},
    }
    return (
        shapes
        if config.tie_word_embeddings
        else shapes | {"lm_head": {"kernel": (config.hidden_size, config.vocab_size)}}
    )
