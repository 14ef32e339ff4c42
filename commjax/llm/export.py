"""Write model folders.

A folder is written under a temporary name and then renamed, so a folder with the final name is complete.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from commjax.core.files import replaced, temporary, write_atomically
from commjax.llm import config as configs
from commjax.llm import names
from commjax.llm.base import Model, Params
from commjax.llm.checkpoints import INDEX, TOKENIZER, WEIGHTS

SHARD = 5 * 10**9  # bytes
# Pairs (name in NumPy, name in safetensors), in the order in which safetensors sorts dtypes.
_DTYPES = (
    ("bool", "BOOL"),
    ("uint8", "U8"),
    ("int8", "I8"),
    ("int16", "I16"),
    ("uint16", "U16"),
    ("float16", "F16"),
    ("bfloat16", "BF16"),
    ("int32", "I32"),
    ("uint32", "U32"),
    ("float32", "F32"),
    ("float64", "F64"),
    ("int64", "I64"),
    ("uint64", "U64"),
)
_BESIDE = (".json", ".txt", ".model", ".jinja")


def save(folder: str | os.PathLike, model: Model, params: Params, *, shard_bytes: int = SHARD) -> None:
    """Write a model to a new folder that transformers can load, atomically.

    The dtype in config.json becomes that of the embedding.

    Args:
        folder: The new folder. An existing one raises a ValueError.
        model: The model.
        params: Its weights.
        shard_bytes: The largest size of a shard. A larger tensor gets its own shard.
    """
    if shard_bytes < 1:
        raise ValueError(f"shard_bytes={shard_bytes}; allowed: at least 1")
    with writing(folder) as temporary:
        write_model(temporary, model, params, shard_bytes=shard_bytes)


def write_model(folder: Path, model: Model, params: Params, *, shard_bytes: int = SHARD) -> None:
    """Write the files of `save` into an existing folder.

    Args:
        folder: The folder.
        model: The model.
        params: Its weights.
        shard_bytes: The largest size of a shard. A larger tensor gets its own shard.
    """
    count = model.config.num_hidden_layers
    if len(params.blocks) != count:
        raise ValueError(f"params has {len(params.blocks)} blocks; allowed: num_hidden_layers={count}")
    tensors = names.outer_tensors(model, params.outer)
    for i, block in enumerate(params.blocks):
        tensors |= names.block_tensors(model, i, block)
    shards: list[dict[str, np.ndarray]] = [{}]
    for name, tensor in tensors.items():
        if shards[-1] and _size(shards[-1]) + tensor.nbytes > shard_bytes:
            shards.append({})
        shards[-1][name] = tensor
    dtype: Any = str(params.outer["embed_tokens"]["embedding"].dtype)
    write_json(folder / "config.json", configs.to_json(model.config._replace(dtype=dtype)))
    if len(shards) == 1:
        write_tensors(folder / WEIGHTS, shards[0])
        return
    files = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    for file, shard in zip(files, shards):
        write_tensors(folder / file, shard)
    write_index(folder, {name: file for file, shard in zip(files, shards) for name in shard}, _size(tensors))


@contextmanager
def writing(folder: str | os.PathLike) -> Iterator[Path]:
    """Make a hidden folder beside `folder`. It is renamed to `folder` at the end, or deleted if anything fails.

    Args:
        folder: The final name. An existing folder raises a ValueError.

    Returns:
        A context manager that gives the hidden folder.
    """
    folder = Path(folder)
    refuse_existing(folder)
    folder.parent.mkdir(parents=True, exist_ok=True)
    new = temporary(folder)
    new.mkdir()
    try:
        yield new
        publish(new, folder)
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise


def refuse_existing(folder: str | os.PathLike) -> None:
    """Raise a ValueError if a file or folder exists at `folder`.

    Args:
        folder: The path.
    """
    if os.path.lexists(folder):
        raise ValueError(f"folder={os.fspath(folder)!r} exists; allowed: a new folder")


def publish(new: Path, folder: str | os.PathLike) -> None:
    """Rename a finished folder to its final name, in one step.

    Args:
        new: The finished folder.
        folder: The final name. An existing folder raises a ValueError.
    """
    refuse_existing(folder)
    os.rename(new, folder)


def copy_beside(source: Path, folder: Path, omit: Sequence[str] = ()) -> None:
    """Copy the config, the tokenizer and other files that are not weights from one model folder to another.

    Args:
        source: The folder to copy from.
        folder: The folder to copy to.
        omit: The names of files that are not copied.
    """
    for file in sorted(source.iterdir()):
        if file.is_file() and file.name not in (INDEX, *omit) and (file.suffix in _BESIDE or file.name == TOKENIZER):
            with _named(folder / file.name):
                shutil.copyfile(file, folder / file.name)


def write_tensors(path: Path, tensors: Mapping[str, np.ndarray]) -> str:
    """Write one safetensors file, atomically.

    The bytes are those of `safetensors.numpy.save_file`, which leaves temporary files behind when it is killed.

    Args:
        path: The file.
        tensors: Name -> array, of any strides.

    Returns:
        The sha256 of the file.
    """
    # safetensors orders tensors by dtype, the widest first, and then by name.
    order = sorted(tensors, key=lambda name: (-_DTYPES.index(_dtype(name, tensors[name])), name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name in order:
        begin, end = end, end + tensors[name].nbytes
        header[name] = {
            "dtype": _dtype(name, tensors[name])[1],
            "shape": list(tensors[name].shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    sha = hashlib.sha256()
    with _named(path), replaced(path) as file:
        # One tensor is copied at a time.
        for part in chain((len(text).to_bytes(8, "little"), text), (_memory(tensors[name]) for name in order)):
            sha.update(part)
            file.write(part)
    return sha.hexdigest()


def _memory(tensor: np.ndarray) -> Any:
    """The bytes of an array, row by row."""
    return np.ascontiguousarray(tensor).reshape(-1).view(np.uint8).data


def _dtype(name: str, tensor: np.ndarray) -> tuple[str, str]:
    for pair in _DTYPES:
        if pair[0] == str(tensor.dtype):
            return pair
    raise ValueError(f"{name} has dtype {tensor.dtype}; allowed: {', '.join(dtype for dtype, _ in _DTYPES)}")


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """Add the name of the file to an OSError that lacks it."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error


def write_index(folder: Path, files: Mapping[str, str], total_size: int) -> None:
    """Write the index of a folder with shards.

    Args:
        folder: The folder.
        files: Tensor -> name of its file.
        total_size: The bytes of all tensors.
    """
    write_json(folder / INDEX, {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(files.items()))})


def write_json(path: Path, content: Any) -> None:
    """Write an indented JSON file with a line feed at the end, atomically.

    Args:
        path: The file.
        content: The value.
    """
    with _named(path):
        write_atomically(path, (json.dumps(content, indent=2) + "\n").encode())


def _size(tensors: Mapping[str, np.ndarray]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
