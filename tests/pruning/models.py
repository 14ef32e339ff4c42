"""Small random models, their folders and calibration windows, for the tests of streaming, command line and zero-
shot."""

import hashlib
import struct
from pathlib import Path

import jax
import numpy as np

from commjax import llm
from commjax.llm import config

_SIZES = {
    "vocab_size": 61,
    "hidden_size": 16,
    "num_attention_heads": 4,
    "num_hidden_layers": 3,
    "max_position_embeddings": 32,
}
# "square" has one shape of layer, so that there is little to compile.
CONFIGS = {
    "llama": {"model_type": "llama", "intermediate_size": 24, "num_key_value_heads": 2, "pad_token_id": None, **_SIZES},
    "opt": {"model_type": "opt", "ffn_dim": 24, "pad_token_id": None, **_SIZES},
    "square": {"model_type": "llama", "intermediate_size": 16, "pad_token_id": None, **_SIZES},
}


def folder(path: Path, kind: str = "square", dtype: str = "float32", **changes) -> Path:
    """A random model of weights large enough to matter, in two shards or more, with a file beside them."""
    model = llm.model(config.from_json(CONFIGS[kind] | changes))
    params = llm.init(jax.random.key(7), model, dtype, scale=0.3)
    llm.save(path, model, params, shard_bytes=9000)
    (path / "tokenizer_config.json").write_text('{"beside": "the weights"}')
    return path


def windows(count: int = 4, length: int = 12) -> np.ndarray:
    return np.random.default_rng(3).integers(0, 61, (count, length)).astype(np.int32)


def files(path: Path) -> dict[str, str]:
    """Every file of a folder, by the hash of its bytes."""
    return {one.name: hashlib.sha256(one.read_bytes()).hexdigest() for one in sorted(path.iterdir())}


def kernels(params: llm.Params, model: llm.Model) -> dict[tuple[int, str], np.ndarray]:
    """(block, layer) -> its weights."""
    linear = [(i, name) for i in range(len(params.blocks)) for name in model.linear]
    return {(i, name): np.asarray(params.blocks[i][name]["kernel"], np.float64) for i, name in linear}


def tokenizer(path: Path) -> Path:
    """A llama2.c tokenizer of 259 tokens: bytes only."""
    pieces = [b"<unk>", b"<s>", b"</s>", *(b"<0x%02X>" % i for i in range(256))]
    path.write_bytes(struct.pack("<i", 6) + b"".join(struct.pack("<fi", 0, len(one)) + one for one in pieces))
    return path
