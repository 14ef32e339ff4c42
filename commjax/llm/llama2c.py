"""Read Llama models in the `.bin` format (version 0) of llama2.c, for which small pretrained models exist."""

import os
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from commjax.data import bounded
from commjax.llm import architectures, export
from commjax.llm.base import Layers, Model, Params
from commjax.llm.checkpoints import TOKENIZER
from commjax.llm.config import Config, check
from commjax.llm.layers import Layer

# The header: int32 dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size, seq_len.
# A negative vocab_size means that the head is stored, because it is not the embedding.
_HEADER = 7


def read(path: str | os.PathLike) -> tuple[Model, Params]:
    """Read a model from a llama2.c file of version 0, whose weights are float32.

    After the header the file holds: embedding, attention norm, wq, wk, wv, wo, ffn norm, w1, w2, w3 (each stacked over
    blocks, matrices [out, in]), last norm, cos and sin tables that follow from the header, and the head if it is not
    the embedding. llama2.c rotates the neighbours (2i, 2i+1). The outputs of wq and wk are reordered, so that the
    rotated pairs are (i, i + head_dim/2), as `layers.rotate` expects.

    Args:
        path: The file.

    Returns:
        The model and its weights.
    """
    path = Path(path)
    size = path.stat().st_size
    if size % 4 or size < 4 * _HEADER:
        raise ValueError(
            f"{path} has {size} bytes; allowed: a llama2.c file, at least {4 * _HEADER} and a multiple of 4"
        )
    header = np.fromfile(path, "<i4", _HEADER).tolist()
    config = _config(path, header)
    wanted = _lengths(config)
    if size // 4 - _HEADER != sum(wanted.values()):
        raise ValueError(
            f"{path} holds {size // 4 - _HEADER} numbers; allowed by its header {header}: {sum(wanted.values())}"
        )
    values = np.fromfile(path, "<f4", offset=4 * _HEADER)
    parts = dict(zip(wanted, np.split(values, np.cumsum(list(wanted.values()))[:-1])))
    return architectures.model(config), Params(_outer(config, parts), tuple(_blocks(config, parts)))


def to_hugging_face(
    path: str | os.PathLike, folder: str | os.PathLike, tokenizer: str | os.PathLike | None = None
) -> None:
    """Convert a llama2.c model to a new model folder of Hugging Face.

    Args:
        path: The llama2.c file.
        folder: The new folder.
        tokenizer: The llama2.c tokenizer, which is copied into the folder for `tokens.load`. None copies nothing.
    """
    model, params = read(path)
    with export.writing(folder) as temporary:
        export.write_model(temporary, model, params)
        if tokenizer is not None:
            (temporary / TOKENIZER).write_bytes(bounded.content(tokenizer))


def _config(path: Path, header: list[int]) -> Config:
    dim, inner, blocks, heads, kv, vocab, length = header
    if min(dim, inner, blocks, heads, kv, abs(vocab), length) < 1 or dim % heads:
        raise ValueError(
            f"{path} begins with {header}; allowed: dim, hidden_dim, n_layers, n_heads, n_kv_heads, vocab_size, "
            "seq_len of llama2.c's version 0, with dim a multiple of n_heads"
        )
    config = Config(
        architecture="llama",
        vocab_size=abs(vocab),
        hidden_size=dim,
        intermediate_size=inner,
        num_hidden_layers=blocks,
        num_attention_heads=heads,
        num_key_value_heads=kv,
        head_dim=dim // heads,
        max_position_embeddings=length,
        tie_word_embeddings=vocab > 0,
        rms_norm_eps=1e-5,
    )
    try:
        return check(config)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def _lengths(config: Config) -> dict[str, int]:
    dim, inner, blocks = config.hidden_size, config.intermediate_size, config.num_hidden_layers
    keys, table = config.num_key_value_heads * config.head_dim, config.max_position_embeddings * config.head_dim // 2
    return {
        "embedding": config.vocab_size * dim,
        "attention norm": blocks * dim,
        "wq": blocks * dim * dim,
        "wk": blocks * dim * keys,
        "wv": blocks * dim * keys,
        "wo": blocks * dim * dim,
        "ffn norm": blocks * dim,
        "w1": blocks * dim * inner,
        "w2": blocks * dim * inner,
        "w3": blocks * dim * inner,
        "last norm": dim,
        "cos": table,
        "sin": table,
        "head": 0 if config.tie_word_embeddings else config.vocab_size * dim,
    }


def _outer(config: Config, parts: dict[str, np.ndarray]) -> Layers:
    shape = config.vocab_size, config.hidden_size
    outer = {
        "embed_tokens": {"embedding": jnp.asarray(parts["embedding"].reshape(shape))},
        "norm": {"scale": jnp.asarray(parts["last norm"])},
    }
    return (
        outer
        if config.tie_word_embeddings
        else outer | {"lm_head": {"kernel": jnp.asarray(parts["head"].reshape(shape).T)}}
    )


def _blocks(config: Config, parts: dict[str, np.ndarray]) -> list[Layers]:
    blocks, dim, inner = config.num_hidden_layers, config.hidden_size, config.intermediate_size

    def kernels(name: str, width: int = dim) -> np.ndarray:
        return np.swapaxes(parts[name].reshape(blocks, -1, width), 1, 2)

    def split_pairs(stacked: np.ndarray) -> np.ndarray:
        pairs = stacked.reshape(blocks, dim, -1, config.head_dim // 2, 2)
        return np.swapaxes(pairs, 3, 4).reshape(stacked.shape)

    def layer(kind: str, leaf: np.ndarray) -> Layer:
        return {kind: jnp.asarray(leaf)}

    stacked = {
        "self_attn.q_proj": split_pairs(kernels("wq")),
        "self_attn.k_proj": split_pairs(kernels("wk")),
        "self_attn.v_proj": kernels("wv"),
        "self_attn.o_proj": kernels("wo"),
        "mlp.gate_proj": kernels("w1"),
        "mlp.up_proj": kernels("w3"),
        "mlp.down_proj": kernels("w2", inner),
    }
    norms = {"input_layernorm": "attention norm", "post_attention_layernorm": "ffn norm"}
    return [
        {name: layer("kernel", leaf[i]) for name, leaf in stacked.items()}
        | {name: layer("scale", parts[part].reshape(blocks, dim)[i]) for name, part in norms.items()}
        for i in range(blocks)
    ]
