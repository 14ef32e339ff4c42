"""Tiny random checkpoints of every kind, and the logits that transformers' torch models gave for them.

`goldens.json` has each config and the shapes of its tensors, `goldens.npz` the logits; the weights come from NumPy's
frozen legacy generator, so that they need not be stored.  `make_goldens.py` wrote both.
"""

import functools
import json
import zlib
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent

_LLAMA = {
    "model_type": "llama",
    "vocab_size": 29,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}
_OPT = {
    "model_type": "opt",
    "vocab_size": 29,
    "hidden_size": 16,
    "ffn_dim": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 24,
    "pad_token_id": None,
}
_LONG = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
CASES: dict[str, dict[str, Any]] = {
    "llama multi-head": _LLAMA,
    "llama grouped queries": _LLAMA | {"num_key_value_heads": 2, "rms_norm_eps": 1e-3},
    "llama theta 5e5": _LLAMA | {"num_key_value_heads": 1, "rope_theta": 5e5},
    "llama linear scaling": _LLAMA | {"rope_scaling": {"type": "linear", "factor": 2.5}},
    # Wavelengths of 6 to 2000 tokens around an original length of 40: every branch of the scaling is taken.
    "llama llama3 scaling": _LLAMA
    | {"head_dim": 16, "rope_theta": 1e3, "rope_scaling": _LONG | {"original_max_position_embeddings": 40}},
    "llama tied": _LLAMA | {"tie_word_embeddings": True},
    "llama head_dim": _LLAMA | {"num_key_value_heads": 2, "head_dim": 6},
    "llama biases": _LLAMA | {"attention_bias": True, "mlp_bias": True, "hidden_act": "gelu"},
    "opt pre-norm": _OPT,
    "opt post-norm": _OPT | {"do_layer_norm_before": False},
    "opt projections": _OPT | {"do_layer_norm_before": False, "word_embed_proj_dim": 10},
    "opt projections pre-norm": _OPT | {"word_embed_proj_dim": 20, "activation_function": "gelu"},
    "opt bare": _OPT | {"enable_bias": False, "layer_norm_elementwise_affine": False, "tie_word_embeddings": False},
    "opt no final norm": _OPT | {"_remove_final_layer_norm": True},
}


def weights(shapes: dict[str, list[int]]) -> dict[str, np.ndarray]:
    """Random float32 tensors, large enough that attention is not flat and norms and biases matter."""

    def one(name: str, shape: list[int]) -> np.ndarray:
        noise = np.random.RandomState(zlib.crc32(name.encode())).standard_normal(shape)
        if len(shape) == 2:
            return (1.5 * noise / np.sqrt(shape[1])).astype(np.float32)
        return ((0.5 if name.endswith("bias") else 1.0) + 0.3 * noise).astype(np.float32)

    return {name: one(name, shape) for name, shape in sorted(shapes.items())}


def tokens(case: str) -> np.ndarray:
    """Two rows of 24 tokens."""
    return np.random.RandomState(zlib.crc32(case.encode())).randint(0, 29, (2, 24)).astype(np.int32)


def write(folder: Path, config: dict[str, Any], tensors: dict[str, np.ndarray]) -> Path:
    """A model folder as anybody would write it, without commjax."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


@functools.cache
def goldens() -> dict[str, dict[str, Any]]:
    """case -> config, as transformers 5 wrote it, and shapes of the tensors."""
    return json.loads((HERE / "goldens.json").read_text())


def logits(case: str) -> np.ndarray:
    """What torch gave, float32 [2, 24, 29]."""
    return np.load(HERE / "goldens.npz")[case]


def golden(folder: Path, case: str) -> Path:
    """The checkpoint of a case, as a folder."""
    return write(folder, goldens()[case]["config"], weights(goldens()[case]["tensors"]))
