"""Read and write the `config.json` of a Llama or OPT model of Hugging Face."""

import os
from pathlib import Path
from typing import Any, Literal, NamedTuple

from commjax.data import bounded

_CLASSES = {"llama": "LlamaForCausalLM", "opt": "OPTForCausalLM"}
_DTYPES = ("float32", "float16", "bfloat16")
_ACTIVATIONS = ("silu", "relu", "gelu")
_ROPES = ("default", "linear", "llama3")
# The largest sizes that are accepted: 8 to 100 times those of a Llama with 405 billion parameters.
MOST = {
    "vocab_size": 2**22,
    "hidden_size": 2**17,
    "intermediate_size": 2**20,
    "ffn_dim": 2**20,
    "num_hidden_layers": 2**12,
    "num_attention_heads": 2**12,
    "num_key_value_heads": 2**12,
    "head_dim": 2**14,
    "max_position_embeddings": 2**27,
    "original_max_position_embeddings": 2**27,
    "word_embed_proj_dim": 2**17,
}


_LARGEST = 1e30  # limit of rope_theta and similar numbers, which are computed in float32


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
    found = bounded.read_json(path)
    if not isinstance(found, dict):
        raise ValueError(f"{path} holds a {type(found).__name__}; allowed: a JSON object")
    try:
        return from_json(found)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def from_json(found: dict[str, Any]) -> Config:
    """Convert a parsed `config.json` to a Config.

    The spellings of transformers 4 (rope_theta, rope_scaling, torch_dtype) and 5 (rope_parameters, dtype) are read.
    Absent or null entries take the defaults of transformers. Options that these models do not implement, and entries
    that contradict each other, are a ValueError.

    Args:
        found: The parsed JSON object.

    Returns:
        The config, checked.

    >>> new = {"model_type": "llama", "rope_parameters": {"rope_theta": 5e5}}
    >>> from_json({"model_type": "llama", "rope_theta": 5e5}) == from_json(new)
    True
    """
    kind = found.get("model_type")
    if not isinstance(kind, str) or kind not in _CLASSES:
        raise ValueError(f"model_type={kind!r}; allowed: {', '.join(map(repr, _CLASSES))}")
    classes = found.get("architectures") or [_CLASSES[kind]]
    if classes != [_CLASSES[kind]]:
        raise ValueError(f"architectures={classes!r} with model_type={kind!r}; allowed: [{_CLASSES[kind]!r}]")
    if found.get("quantization_config") is not None:
        raise ValueError("quantization_config is set; allowed: a checkpoint in float32, float16 or bfloat16")
    config = (_llama if kind == "llama" else _opt)(found)
    return check(config)


def check(config: Config) -> Config:
    """Check that the sizes of a config fit together.

    Args:
        config: The config.

    Returns:
        The same config. Sizes that do not fit, or exceed `MOST`, are a ValueError.
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
    found: dict[str, Any] = {"architectures": [_CLASSES[config.architecture]], "model_type": config.architecture}
    found |= {name: getattr(config, name) for name in shared} | {"torch_dtype": config.dtype}
    if config.architecture == "opt":
        switches = ("word_embed_proj_dim", "do_layer_norm_before", "enable_bias", "layer_norm_elementwise_affine")
        found |= {name: getattr(config, name) for name in switches}
        found |= {"ffn_dim": config.intermediate_size, "activation_function": config.activation}
        return found | {"_remove_final_layer_norm": config.do_layer_norm_before and not config.final_layer_norm}
    own = ("intermediate_size", "num_key_value_heads", "head_dim", "rms_norm_eps", "attention_bias", "mlp_bias")
    found |= {name: getattr(config, name) for name in own} | {
        "hidden_act": config.activation,
        "rope_theta": config.rope.theta,
    }
    return found | {"rope_scaling": _scaling(config.rope)}


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


def _llama(found: dict[str, Any]) -> Config:
    hidden, heads = _whole(found, "hidden_size", 4096), _whole(found, "num_attention_heads", 32)
    length = _whole(found, "max_position_embeddings", 2048)
    return Config(
        architecture="llama",
        vocab_size=_whole(found, "vocab_size", 32000),
        hidden_size=hidden,
        intermediate_size=_whole(found, "intermediate_size", 11008),
        num_hidden_layers=_whole(found, "num_hidden_layers", 32),
        num_attention_heads=heads,
        num_key_value_heads=_whole(found, "num_key_value_heads", heads),
        head_dim=_whole(found, "head_dim", None) or _share(hidden, heads),
        max_position_embeddings=length,
        activation=_one_of(found, "hidden_act", "silu", _ACTIVATIONS),
        tie_word_embeddings=_switch(found, "tie_word_embeddings", False),
        dtype=_dtype(found),
        rms_norm_eps=_positive(found, "rms_norm_eps", 1e-6),
        rope=_rope(found, length),
        attention_bias=_switch(found, "attention_bias", False),
        mlp_bias=_switch(found, "mlp_bias", False),
    )


def _opt(found: dict[str, Any]) -> Config:
    hidden, heads = _whole(found, "hidden_size", 768), _whole(found, "num_attention_heads", 12)
    before = _switch(found, "do_layer_norm_before", True)
    return Config(
        architecture="opt",
        vocab_size=_whole(found, "vocab_size", 50272),
        hidden_size=hidden,
        intermediate_size=_whole(found, "ffn_dim", 3072),
        num_hidden_layers=_whole(found, "num_hidden_layers", 12),
        num_attention_heads=heads,
        num_key_value_heads=heads,
        head_dim=_share(hidden, heads),
        max_position_embeddings=_whole(found, "max_position_embeddings", 2048),
        activation=_one_of(found, "activation_function", "relu", _ACTIVATIONS),
        tie_word_embeddings=_switch(found, "tie_word_embeddings", True),
        dtype=_dtype(found),
        word_embed_proj_dim=_whole(found, "word_embed_proj_dim", hidden),
        do_layer_norm_before=before,
        final_layer_norm=before and not _switch(found, "_remove_final_layer_norm", False),
        enable_bias=_switch(found, "enable_bias", True),
        layer_norm_elementwise_affine=_switch(found, "layer_norm_elementwise_affine", True),
    )


def _rope(found: dict[str, Any], length: int) -> Rope:
    """Merge both spellings. Entries that occur twice must agree."""
    said = [part for name in ("rope_scaling", "rope_parameters") if (part := found.get(name)) is not None]
    if not all(isinstance(part, dict) for part in said):
        raise ValueError(f"rope_scaling, rope_parameters: {said!r}; allowed: JSON objects")
    pairs = [pair for part in said for pair in part.items()]
    pairs += [(key, found.get(key)) for key in ("rope_theta", "partial_rotary_factor")]
    merged: dict[str, Any] = {}
    for key, value in pairs:
        key = "rope_type" if key == "type" else key  # very old files have "type"
        if value is not None and merged.setdefault(key, value) != value:
            raise ValueError(f"{key} is {merged[key]!r} and {value!r} in two places; allowed: the same twice, or once")
    if merged.get("partial_rotary_factor") not in (None, 1):
        raise ValueError(f"partial_rotary_factor={merged['partial_rotary_factor']!r}; allowed: 1")
    kind = _one_of(merged, "rope_type", "default", _ROPES)
    rope = Rope(theta=_positive(merged, "rope_theta", 10000.0), kind=kind)
    if kind == "default":
        return rope
    rope = rope._replace(factor=_positive(merged, "factor", None))
    if kind == "linear":
        return rope
    rope = rope._replace(
        low_freq_factor=_positive(merged, "low_freq_factor", None),
        high_freq_factor=_positive(merged, "high_freq_factor", None),
        original_length=_whole(merged, "original_max_position_embeddings", length),
    )
    if not rope.low_freq_factor < rope.high_freq_factor:
        raise ValueError(
            f"low_freq_factor={rope.low_freq_factor}; allowed: less than high_freq_factor={rope.high_freq_factor}"
        )
    return rope


def _dtype(found: dict[str, Any]) -> Any:
    said = {str(found[name]).removeprefix("torch.") for name in ("dtype", "torch_dtype") if found.get(name) is not None}
    if len(said) > 1 or not said <= set(_DTYPES):
        raise ValueError(f"dtype, torch_dtype: {sorted(said)}; allowed: one of {', '.join(_DTYPES)}")
    return said.pop() if said else "float32"


def _whole(found: dict[str, Any], name: str, default: int | None) -> Any:
    value = default if found.get(name) is None else found[name]
    if value is not None and (type(value) is not int or value < 1):
        raise ValueError(f"{name}={value!r}; allowed: a whole number of at least 1")
    if value is not None and value > MOST[name]:
        raise ValueError(f"{name}={_shown(value)}; allowed: 1 to {MOST[name]}")
    return value


def _shown(value: int) -> str:
    """A readable form of a number. Python refuses to print very long integers."""
    return str(value) if abs(value) < 10**30 else f"a number of {value.bit_length()} bits"


def _positive(found: dict[str, Any], name: str, default: float | None) -> float:
    value = default if found.get(name) is None else found[name]
    if not isinstance(value, int | float) or isinstance(value, bool):
        raise ValueError(f"{name}={value!r}; allowed: a positive number")
    if not 0 < value <= _LARGEST:
        shown = _shown(value) if isinstance(value, int) else repr(value)
        raise ValueError(f"{name}={shown}; allowed: a positive number, {_LARGEST:g} at most")
    return float(value)


def _switch(found: dict[str, Any], name: str, default: bool) -> bool:
    value = default if found.get(name) is None else found[name]
    if not isinstance(value, bool):
        raise ValueError(f"{name}={value!r}; allowed: true or false")
    return value


def _one_of(found: dict[str, Any], name: str, default: str, allowed: tuple[str, ...]) -> Any:
    value = default if found.get(name) is None else found[name]
    if value not in allowed:
        raise ValueError(f"{name}={value!r}; allowed: {', '.join(map(repr, allowed))}")
    return value


def _share(hidden: int, heads: int) -> int:
    if hidden % heads:
        raise ValueError(
            f"hidden_size={hidden}; allowed: a multiple of num_attention_heads={heads}, or a head_dim beside it"
        )
    return hidden // heads
