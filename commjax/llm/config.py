"""Read and write the `config.json` of a Llama or OPT model of Hugging Face."""

import os
from pathlib import Path
from typing import Any, Literal, NamedTuple

from commjax.data import bounded
from commjax.llm.entries import MOST, one_of, positive, switch, whole

_CLASSES = {"llama": "LlamaForCausalLM", "opt": "OPTForCausalLM"}
_DTYPES = ("float32", "float16", "bfloat16")
_ACTIVATIONS = ("silu", "relu", "gelu")
_ROPES = ("default", "linear", "llama3")


class Rope(NamedTuple):
    """Rotary positions: pair i at position t is rotated by the angle t theta^(-2i/head_dim), scaled as `kind` says.

    See `layers.frequencies` for the formulas.

    Attributes:
        theta: The base of the frequencies.
        kind: The scaling of the frequencies.
        factor: The factor of all wavelengths (linear), or of the long wavelengths (llama3).
        low_freq_factor: llama3: wavelengths above original_length / low_freq_factor are long.
        high_freq_factor: llama3: wavelengths below original_length / high_freq_factor are not changed.
        original_length: llama3: the entry original_max_position_embeddings of `config.json`.
    """

    theta: float = 10000.0
    kind: Literal["default", "linear", "llama3"] = "default"
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_length: int = 8192


class Config(NamedTuple):
    """The sizes and switches of a model, with the names and meanings of Hugging Face.

    Fields that an architecture does not have stay at their defaults.

    Attributes:
        architecture: "llama" or "opt".
        vocab_size: The number of ids.
        hidden_size: The width of the hidden states.
        intermediate_size: The width of the MLP. OPT calls it ffn_dim.
        num_hidden_layers: The number of blocks.
        num_attention_heads: The heads of queries.
        num_key_value_heads: The heads of keys and values, a divisor of num_attention_heads.
        head_dim: The width of a head.
        max_position_embeddings: The longest window.
        activation: The activation of the MLP.
        tie_word_embeddings: Whether the head is the transposed embedding.
        dtype: The dtype that the file states. The tensors keep their own dtype.
        rms_norm_eps: Llama: the constant under the root of the norms.
        rope: Llama: the rotary positions.
        attention_bias: Llama: whether the layers of attention have biases.
        mlp_bias: Llama: whether the layers of the MLP have biases.
        word_embed_proj_dim: The width of OPT's embedding. If it is hidden_size, there are no projections.
        do_layer_norm_before: OPT: whether the norms come before attention and MLP, or after the sums.
        final_layer_norm: OPT: whether there is a norm before the head.
        enable_bias: OPT: whether the layers of a block have biases.
        layer_norm_elementwise_affine: OPT: whether the norms have a scale and a bias.

    >>> Config("llama", vocab_size=512, hidden_size=64, intermediate_size=172, num_hidden_layers=5,
    ...        num_attention_heads=8, num_key_value_heads=4, head_dim=8, max_position_embeddings=512).rope.theta
    10000.0
    """

    architecture: Literal["llama", "opt"]
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    max_position_embeddings: int
    activation: Literal["silu", "relu", "gelu"] = "silu"
    tie_word_embeddings: bool = False
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    # Llama
    rms_norm_eps: float = 1e-6
    rope: Rope = Rope()
    attention_bias: bool = False
    mlp_bias: bool = False
    # OPT
    word_embed_proj_dim: int = 0
    do_layer_norm_before: bool = True
    final_layer_norm: bool = True
    enable_bias: bool = True
    layer_norm_elementwise_affine: bool = True


def load(folder: str | os.PathLike) -> Config:
    """Read the `config.json` of a model folder.

    Args:
        folder: The model folder.

    Returns:
        The config, checked.

    >>> import pathlib, tempfile
    >>> content = '{"model_type": "opt", "hidden_size": 128, "num_attention_heads": 4}'
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = pathlib.Path(folder, "config.json").write_text(content)
    ...     load(folder).head_dim
    32
    """
    path = Path(folder) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(
            f"no {path}; allowed: a model folder of Hugging Face, with config.json and *.safetensors"
        )
    content = bounded.read_json(path)
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}; allowed: a JSON object")
    try:
        return from_json(content)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def from_json(content: dict[str, Any]) -> Config:
    """Convert a parsed `config.json` to a Config.

    The spellings of transformers 4 (rope_theta, rope_scaling, torch_dtype) and 5 (rope_parameters, dtype) are read.
    Absent or null entries take the defaults of transformers. Options that these models do not implement, and entries
    that contradict each other, raise a ValueError.

    Args:
        content: The parsed JSON object.

    Returns:
        The config, checked.

    >>> new = {"model_type": "llama", "rope_parameters": {"rope_theta": 5e5}}
    >>> from_json({"model_type": "llama", "rope_theta": 5e5}) == from_json(new)
    True
    """
    kind = content.get("model_type")
    if not isinstance(kind, str) or kind not in _CLASSES:
        raise ValueError(f"model_type={kind!r}; allowed: {', '.join(map(repr, _CLASSES))}")
    classes = content.get("architectures") or [_CLASSES[kind]]
    if classes != [_CLASSES[kind]]:
        raise ValueError(f"architectures={classes!r} with model_type={kind!r}; allowed: [{_CLASSES[kind]!r}]")
    if content.get("quantization_config") is not None:
        raise ValueError("quantization_config is set; allowed: a checkpoint in float32, float16 or bfloat16")
    config = (_llama if kind == "llama" else _opt)(content)
    return check(config)


def check(config: Config) -> Config:
    """Check that the sizes of a config fit together.

    Args:
        config: The config.

    Returns:
        The same config. Sizes that do not fit, or exceed `MOST`, raise a ValueError.
    """
    for name, most in MOST.items():
        if getattr(config, name, 0) > most:
            raise ValueError(f"{name}={getattr(config, name)}; allowed: {most} at most")
    heads, kv = config.num_attention_heads, config.num_key_value_heads
    if heads % kv:
        raise ValueError(f"num_key_value_heads={kv}; allowed: a divisor of num_attention_heads={heads}")
    if config.architecture == "llama" and config.head_dim % 2:
        raise ValueError(f"head_dim={config.head_dim}; allowed: an even number, since rotary positions turn pairs")
    if config.architecture == "opt" and config.head_dim * heads != config.hidden_size:
        raise ValueError(
            f"head_dim={config.head_dim}; allowed: hidden_size / num_attention_heads = {config.hidden_size}/{heads}"
        )
    if config.architecture == "opt" and config.word_embed_proj_dim < 1:
        raise ValueError(
            f"word_embed_proj_dim={config.word_embed_proj_dim}; allowed: at least 1, hidden_size by default"
        )
    return config


def to_json(config: Config) -> dict[str, Any]:
    """Convert a Config to a `config.json` that transformers 4.57 and 5 both read.

    Args:
        config: The config.

    Returns:
        The JSON object.

    >>> from_json(to_json(from_json({"model_type": "llama", "head_dim": 64}))).head_dim
    64
    """
    shared = (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "max_position_embeddings",
        "tie_word_embeddings",
    )
    content: dict[str, Any] = {"architectures": [_CLASSES[config.architecture]], "model_type": config.architecture}
    content |= {name: getattr(config, name) for name in shared} | {"torch_dtype": config.dtype}
    if config.architecture == "opt":
        switches = ("word_embed_proj_dim", "do_layer_norm_before", "enable_bias", "layer_norm_elementwise_affine")
        content |= {name: getattr(config, name) for name in switches}
        content |= {"ffn_dim": config.intermediate_size, "activation_function": config.activation}
        return content | {"_remove_final_layer_norm": config.do_layer_norm_before and not config.final_layer_norm}
    llama = ("intermediate_size", "num_key_value_heads", "head_dim", "rms_norm_eps", "attention_bias", "mlp_bias")
    content |= {name: getattr(config, name) for name in llama} | {
        "hidden_act": config.activation,
        "rope_theta": config.rope.theta,
    }
    return content | {"rope_scaling": _scaling(config.rope)}


def _scaling(rope: Rope) -> dict[str, Any] | None:
    if rope.kind == "default":
        return None
    if rope.kind == "linear":
        return {"rope_type": "linear", "factor": rope.factor}
    return {
        "rope_type": "llama3",
        "factor": rope.factor,
        "low_freq_factor": rope.low_freq_factor,
        "high_freq_factor": rope.high_freq_factor,
        "original_max_position_embeddings": rope.original_length,
    }


def _llama(content: dict[str, Any]) -> Config:
    hidden, heads = whole(content, "hidden_size", 4096), whole(content, "num_attention_heads", 32)
    length = whole(content, "max_position_embeddings", 2048)
    return Config(
        architecture="llama",
        vocab_size=whole(content, "vocab_size", 32000),
        hidden_size=hidden,
        intermediate_size=whole(content, "intermediate_size", 11008),
        num_hidden_layers=whole(content, "num_hidden_layers", 32),
        num_attention_heads=heads,
        num_key_value_heads=whole(content, "num_key_value_heads", heads),
        head_dim=whole(content, "head_dim", None) or _share(hidden, heads),
        max_position_embeddings=length,
        activation=one_of(content, "hidden_act", "silu", _ACTIVATIONS),
        tie_word_embeddings=switch(content, "tie_word_embeddings", False),
        dtype=_dtype(content),
        rms_norm_eps=positive(content, "rms_norm_eps", 1e-6),
        rope=_rope(content, length),
        attention_bias=switch(content, "attention_bias", False),
        mlp_bias=switch(content, "mlp_bias", False),
    )


def _opt(content: dict[str, Any]) -> Config:
    hidden, heads = whole(content, "hidden_size", 768), whole(content, "num_attention_heads", 12)
    before = switch(content, "do_layer_norm_before", True)
    return Config(
        architecture="opt",
        vocab_size=whole(content, "vocab_size", 50272),
        hidden_size=hidden,
        intermediate_size=whole(content, "ffn_dim", 3072),
        num_hidden_layers=whole(content, "num_hidden_layers", 12),
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=_share(hidden, heads),
        max_position_embeddings=whole(content, "max_position_embeddings", 2048),
        activation=one_of(content, "activation_function", "relu", _ACTIVATIONS),
        tie_word_embeddings=switch(content, "tie_word_embeddings", True),
        dtype=_dtype(content),
        word_embed_proj_dim=whole(content, "word_embed_proj_dim", hidden),
        do_layer_norm_before=before,
        final_layer_norm=before and not switch(content, "_remove_final_layer_norm", False),
        enable_bias=switch(content, "enable_bias", True),
        layer_norm_elementwise_affine=switch(content, "layer_norm_elementwise_affine", True),
    )


def _rope(content: dict[str, Any], length: int) -> Rope:
    """Merge both spellings. Entries that occur twice must agree."""
    said = [part for name in ("rope_scaling", "rope_parameters") if (part := content.get(name)) is not None]
    if not all(isinstance(part, dict) for part in said):
        raise ValueError(f"rope_scaling, rope_parameters: {said!r}; allowed: JSON objects")
    pairs = [pair for part in said for pair in part.items()]
    pairs += [(key, content.get(key)) for key in ("rope_theta", "partial_rotary_factor")]
    merged: dict[str, Any] = {}
    for key, value in pairs:
        key = "rope_type" if key == "type" else key  # very old files have "type"
        if value is not None and merged.setdefault(key, value) != value:
            raise ValueError(f"{key} is {merged[key]!r} and {value!r} in two places; allowed: the same twice, or once")
    if merged.get("partial_rotary_factor") not in (None, 1):
        raise ValueError(f"partial_rotary_factor={merged['partial_rotary_factor']!r}; allowed: 1")
    kind = one_of(merged, "rope_type", "default", _ROPES)
    rope = Rope(theta=positive(merged, "rope_theta", 10000.0), kind=kind)
    if kind == "default":
        return rope
    rope = rope._replace(factor=positive(merged, "factor", None))
    if kind == "linear":
        return rope
    rope = rope._replace(
        low_freq_factor=positive(merged, "low_freq_factor", None),
        high_freq_factor=positive(merged, "high_freq_factor", None),
        original_length=whole(merged, "original_max_position_embeddings", length),
    )
    if not rope.low_freq_factor < rope.high_freq_factor:
        raise ValueError(
            f"low_freq_factor={rope.low_freq_factor}; allowed: less than high_freq_factor={rope.high_freq_factor}"
        )
    return rope


def _dtype(content: dict[str, Any]) -> Any:
    entries = (content.get(name) for name in ("dtype", "torch_dtype"))
    said = {str(entry).removeprefix("torch.") for entry in entries if entry is not None}
    if len(said) > 1 or not said <= set(_DTYPES):
        raise ValueError(f"dtype, torch_dtype: {sorted(said)}; allowed: one of {', '.join(_DTYPES)}")
    return said.pop() if said else "float32"


def _share(hidden: int, heads: int) -> int:
    if hidden % heads:
        raise ValueError(
            f"hidden_size={hidden}; allowed: a multiple of num_attention_heads={heads}, or a head_dim beside it"
        )
    return hidden // heads
