"""Files of a pruned model: one shard for every block, and one for the tensors outside of the blocks."""

import hashlib
from collections.abc import Iterable
from pathlib import Path

from commjax.llm import checkpoints, names
from commjax.llm.base import Layers
from commjax.llm.checkpoints import Checkpoint


def tensor_bytes(path: Path) -> int:
    """Return the number of bytes of the tensors of a file, without its header.

    Args:
        path: A safetensors file.

    Returns:
        The number of bytes.
    """
    with open(path, "rb") as file:
        return path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")


def file_name(checkpoint: Checkpoint, number: int) -> str:
    """Return the file name of a shard.  Shard 0 has the tensors outside of the blocks, shard i + 1 those of block i.

    Args:
        checkpoint: The source.
        number: Number of the shard.

    Returns:
        The name.
    """
    return f"model-{number + 1:05d}-of-{checkpoint.model.config.num_hidden_layers + 1:05d}.safetensors"


def tensor_names(checkpoint: Checkpoint, block: int | None) -> Iterable[str]:
    """Return the names of the tensors of a block.

    Args:
        checkpoint: The source.
        block: Number of the block; None: the tensors outside of the blocks.

    Returns:
        The names.
    """
    model = checkpoint.model
    if block is None:
        return names.leaves(model.outer_shapes, model.outer_prefixes)
    return names.leaves(model.block_shapes, names.block_prefixes(model, block))


def read_block(checkpoint: Checkpoint, partial: Path, number: int) -> Layers:
    """Read the pruned parameters of a block.

    Args:
        checkpoint: The source.
        partial: Folder of the unfinished run.
        number: Number of the block.

    Returns:
        The parameters.
    """
    path = partial / file_name(checkpoint, number + 1)
    tensors = {name: (path, name) for name in tensor_names(checkpoint, number)}
    return checkpoints.read_block(checkpoint._replace(tensors=tensors), number)


# Size, time of the last change and number of a file.
Stamps = dict[Path, tuple[int, int, int]]


def _sources(checkpoint: Checkpoint) -> list[Path]:
    """config.json and every file of weights."""
    return sorted({checkpoint.folder / "config.json", *(path for path, _ in checkpoint.tensors.values())})


def stamps(checkpoint: Checkpoint) -> Stamps:
    """Return the stamps of the files of the source."""
    return {path: _stamp(path) for path in _sources(checkpoint)}


def _stamp(path: Path) -> tuple[int, int, int]:
    now = path.stat()
    return now.st_size, now.st_mtime_ns, now.st_ino


def check_unchanged(stamps: Stamps) -> None:
    """Raise a ValueError if a file of the source was written or replaced since its stamp."""
    for path, stamp in stamps.items():
        if _stamp(path) != stamp:
            raise ValueError(f"{path} was written while it was read; nothing is published; start again")


def fingerprint(checkpoint: Checkpoint) -> dict[str, str | None]:
    """Compute the sha256 of config.json and of every file of weights.

    Args:
        checkpoint: The source.

    Returns:
        The hashes, by file name.
    """
    return {path.name: sha256(path) for path in _sources(checkpoint)}


def sha256(path: Path) -> str | None:
    """Compute the sha256 of a file, which is read in pieces.

    Args:
        path: The file.

    Returns:
        The hash; None if there is no such file.
    """
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return None
