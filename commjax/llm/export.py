"""Model folders out: written beside their place and renamed, so that what has the name is complete."""

import json
import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from commjax.checkpoint import write_atomically
from commjax.llm import config as configs
from commjax.llm import names
from commjax.llm.base import Model, Params
from commjax.llm.checkpoints import INDEX, WEIGHTS


def save(folder: str | os.PathLike, model: Model, params: Params, *, shard_bytes: int = 5 * 10**9) -> None:
    """A new folder that transformers loads as it is; shards of at most `shard_bytes` (or one tensor), atomically.

    The config's dtype becomes that of the embedding.
    """
    count = model.config.num_hidden_layers
    if len(params.blocks) != count:
        raise ValueError(f"params has {len(params.blocks)} blocks; allowed: num_hidden_layers={count}")
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes={shard_bytes}; allowed: at least 1")
    tensors = dict(names.outer_tensors(model, params.outer))
    for i, block in enumerate(params.blocks):
        tensors |= names.block_tensors(model, i, block)
    shards: list[dict[str, np.ndarray]] = [{}]
    for name, tensor in tensors.items():
        if shards[-1] and sum(one.nbytes for one in shards[-1].values()) + tensor.nbytes > shard_bytes:
            shards.append({})
        shards[-1][name] = tensor
    config = model.config._replace(dtype=str(params.outer["embed_tokens"]["embedding"].dtype))
    with writing(folder) as temporary:
        write_json(temporary / "config.json", configs.to_json(config))
        if len(shards) == 1:
            write_tensors(temporary / WEIGHTS, shards[0])
            return
        files = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
        for file, shard in zip(files, shards):
            write_tensors(temporary / file, shard)
        write_index(
            temporary,
            {name: file for file, shard in zip(files, shards) for name in shard},
            sum(tensor.nbytes for tensor in tensors.values()),
        )


@contextmanager
def writing(folder: str | os.PathLike) -> Iterator[Path]:
    """A hidden folder beside `folder`, which takes its name at the end, or vanishes if anything fails."""
    folder = Path(folder)
    refuse_existing(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    temporary = folder.with_name(f".{folder.name}.{secrets.token_hex(4)}")
    temporary.mkdir()
    try:
        yield temporary
        publish(temporary, folder)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise


def refuse_existing(folder: str | os.PathLike) -> None:
    """ValueError if there is something at `folder`."""
    if os.path.lexists(folder):
        raise ValueError(f"folder={os.fspath(folder)!r} exists; allowed: a new folder")


def publish(temporary: Path, folder: str | os.PathLike) -> None:
    """Give a finished folder its name, in one step."""
    refuse_existing(folder)
    os.rename(temporary, folder)


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    """One safetensors file, atomically."""
    from safetensors.numpy import save as to_bytes

    # safetensors writes the memory of an array as it lies, whatever its strides.
    dense = {name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}
    write_atomically(path, to_bytes(dense, {"format": "pt"}))


def write_index(folder: Path, files: Mapping[str, str], total_size: int) -> None:
    """The index of a folder in shards: tensor -> name of its file."""
    write_json(folder / INDEX, {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(files.items()))})


def write_json(path: Path, content: Any) -> None:
    """Indented, with a line feed at the end, atomically."""
    write_atomically(path, (json.dumps(content, indent=2) + "\n").encode())
