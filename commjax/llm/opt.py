"""OPT as pure functions: learned positions, attention and an MLP, each with a layer norm before or after."""

from jaxtyping import Array, Float, Int

from commjax.llm import layers
from commjax.llm.base import Hidden, Layers, Model, Shapes
from commjax.llm.config import Config

LINEAR = ("self_attn.k_proj", "self_attn.v_proj", "self_attn.q_proj", "self_attn.out_proj", "fc1", "fc2")
NORMS = ("self_attn_layer_norm", "final_layer_norm")
OFFSET = 2  # the first two rows of the position embeddings are never used


def model(config: Config) -> Model:
    r"""Make the functions of an OPT.

        h <- h + out(attention(q norm(h), k norm(h), v norm(h)))
        h <- h + fc2(act(fc1 norm(h)))

    h are the hidden states; q, k, v, out, fc1 and fc2 are the linear layers of a block.  If
    `config.do_layer_norm_before` is False (OPT-350m), the norms come after the sums instead.

    Args:
        config: The config, with architecture "opt".

    Returns:
        The model.

    >>> config = Config("opt", vocab_size=9, hidden_size=8, intermediate_size=12, num_hidden_layers=1,
    ...                 num_attention_heads=2, num_key_value_heads=2, head_dim=4, max_position_embeddings=16,
    ...                 word_embed_proj_dim=8, activation="relu")
    >>> model(config).block_shapes["fc1"]
    {'kernel': (8, 12), 'bias': (12,)}
    """
    if config.architecture != "opt":
        raise ValueError(f"config.architecture={config.architecture!r}; allowed: 'opt'")
    projected = config.word_embed_proj_dim != config.hidden_size

    def embed(outer: Layers, tokens: Int[Array, "b t"]) -> Hidden:
        time = tokens.shape[1]
        if time > config.max_position_embeddings:
            raise ValueError(
                f"tokens has {time} positions; allowed: max_position_embeddings={config.max_position_embeddings}"
            )
        h = outer["embed_tokens"]["embedding"][tokens]
        h = layers.linear(outer["project_in"], h) if projected else h
        return h + outer["embed_positions"]["embedding"][None, OFFSET : OFFSET + time].astype(h.dtype)

    def block(params: Layers, h: Hidden) -> tuple[Hidden, dict[str, Hidden]]:
        def norm(name: str, x: Hidden, applied: bool) -> Hidden:
            return layers.layer_norm(params.get(name, {}), x) if applied else x

        def project(name: str, x: Hidden) -> Float[Array, "b t heads head_dim"]:
            return layers.linear(params[name], x).reshape(*x.shape[:2], -1, config.head_dim)

        before, after = config.do_layer_norm_before, not config.do_layer_norm_before
        a = norm("self_attn_layer_norm", h, before)
        k, v, q = (project(name, a) for name in LINEAR[:3])
        read = layers.attention(q, k, v)
        h = norm("self_attn_layer_norm", h + layers.linear(params["self_attn.out_proj"], read), after)

        m = norm("final_layer_norm", h, before)
        inner = layers.activate(config.activation, layers.linear(params["fc1"], m))
        h = norm("final_layer_norm", h + layers.linear(params["fc2"], inner), after)
        return h, dict(zip(LINEAR, (a, a, a, read, m, inner)))

    def head(outer: Layers, h: Hidden) -> Float[Array, "b t vocab"]:
        h = layers.layer_norm(outer.get("final_layer_norm", {}), h) if config.final_layer_norm else h
        h = layers.linear(outer["project_out"], h) if projected else h
        return layers.logits(outer, h, config.tie_word_embeddings)

    shapes = outer_shapes(config)
    prefixes = {name: name if name == "lm_head" else f"model.decoder.{name}" for name in shapes}
    return Model(config, embed, block, head, LINEAR, block_shapes(config), shapes, "model.decoder.layers.{}.", prefixes)


def block_shapes(config: Config) -> Shapes:
    """The shapes of the layers of a block.

    Args:
        config: The config.

    Returns:
        Layer -> {"kernel": (in, out), ...}.
    """
    hidden, inner = config.hidden_size, config.intermediate_size
    ends = ((hidden, hidden),) * 4 + ((hidden, inner), (inner, hidden))

    norms: Shapes = {name: _norm(config) for name in NORMS if config.layer_norm_elementwise_affine}
    return {name: layers.linear_shapes(shape, config.enable_bias) for name, shape in zip(LINEAR, ends)} | norms


def outer_shapes(config: Config) -> Shapes:
    """The shapes of the layers outside of the blocks.

    Args:
        config: The config.

    Returns:
        Layer -> {"kernel": (in, out), ...}.
    """
    hidden, words, vocab = config.hidden_size, config.word_embed_proj_dim, config.vocab_size
    shapes: Shapes = {
        "embed_tokens": {"embedding": (vocab, words)},
        "embed_positions": {"embedding": (config.max_position_embeddings + OFFSET, hidden)},
    }
    if words != hidden:
        shapes |= {"project_in": {"kernel": (words, hidden)}, "project_out": {"kernel": (hidden, words)}}
    if config.final_layer_norm and config.layer_norm_elementwise_affine:
        shapes |= {"final_layer_norm": _norm(config)}
    return shapes if config.tie_word_embeddings else shapes | {"lm_head": {"kernel": (words, vocab)}}


def _norm(config: Config) -> dict[str, tuple[int, ...]]:
    return {"scale": (config.hidden_size,), "bias": (config.hidden_size,)}
