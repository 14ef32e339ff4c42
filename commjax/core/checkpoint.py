"""Checkpoints: one safetensors file with a state, the metrics so far, and the identity of the run.

The file holds a digest of its content, which is checked when it is read.  Nothing is unpickled.  Only one process at a
time can write a checkpoint (`files.writing`).
"""

import hashlib
import json
import math
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from commjax.core.files import CheckpointError, write_atomically
from commjax.core.identity import check_identity, leaves_by_name, short

_FORMAT = "commjax-checkpoint-2"


def _structure(tree: PyTree) -> dict[str, str]:
    avals = {path: jax.typeof(leaf) for path, leaf in leaves_by_name(tree).items()}
    return {path: f"{aval.dtype}{list(aval.shape)}" for path, aval in avals.items()}


def _content_digest(arrays: dict[str, np.ndarray], metadata: dict[str, str]) -> str:
    """The sha256 of the metadata (without the digest itself) and of the name, dtype, shape and bytes of each tensor."""
    told = {name: text for name, text in metadata.items() if name != "sha256"}
    sha = hashlib.sha256(json.dumps(told, sort_keys=True).encode())
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        sha.update(json.dumps([name, array.dtype.str, array.shape]).encode())
        sha.update(hashlib.sha256(array.reshape(-1).view(np.uint8).data).digest())
    return sha.hexdigest()


def save(path: str | Path, state: PyTree, history: dict[str, np.ndarray], identity: dict[str, str]) -> None:
    """Write a checkpoint atomically.  Leaves are stored as raw bytes, so every dtype is kept.

    Args:
        path: The file; a symbolic link is followed.
        state: A tree of arrays.
        history: Metrics so far, by name, stored as float64.
        identity: The identity of the run, as `fingerprint` gives it.

    Returns:
        None.
    """
    from safetensors.numpy import save as to_bytes

    arrays = {f"state/{p}": _raw(np.asarray(leaf)) for p, leaf in leaves_by_name(state).items()}
    arrays |= {f"history/{name}": np.asarray(values, np.float64) for name, values in history.items()}
    metadata = {
        "format": _FORMAT,
        "structure": json.dumps(_structure(state)),
        "identity": json.dumps(identity),
    }
    metadata["sha256"] = _content_digest(arrays, metadata)
    write_atomically(path, to_bytes(arrays, metadata))


def _raw(array: np.ndarray) -> np.ndarray:
    return np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)


def _read(path: str | Path) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Read tensors and metadata of a file, and check its digest."""
    from safetensors import SafetensorError, safe_open

    def unreadable(reason: object) -> CheckpointError:
        return CheckpointError(f"{path} is not a readable checkpoint: {reason}")

    try:
        with safe_open(path, "numpy") as file:
            metadata = file.metadata() or {}
            names = list(file.keys())
            if metadata.get("format") == _FORMAT:
                for name in names:
                    wanted = {"state": "U8", "history": "F64"}.get(name.partition("/")[0])
                    dtype = file.get_slice(name).get_dtype()
                    if wanted != dtype:
                        raise unreadable(f"tensor {short(name)!r} is {dtype}, expected {wanted or 'no such tensor'}")
                arrays = {name: file.get_tensor(name) for name in names}
            else:
                arrays = {}
    except (SafetensorError, OSError) as error:
        raise unreadable(error) from error
    if metadata.get("format") == "commjax-checkpoint-1":
        raise CheckpointError(
            f"{path} has format 'commjax-checkpoint-1', which has no checksum, expected {_FORMAT!r}; finish that run "
            "with the version that began it, or remove the file to begin again"
        )
    if metadata.get("format") != _FORMAT:
        raise CheckpointError(f"{path} has format {metadata.get('format')!r}, expected {_FORMAT!r}")
    if metadata.get("sha256") != _content_digest(arrays, metadata):
        raise unreadable(
            "its content does not have the sha256 that was stored with it; the file was damaged or changed"
        )
    return arrays, metadata


def _texts(path: str | Path, metadata: dict[str, str], name: str) -> dict[str, str]:
    """Read a JSON object of texts from the metadata."""
    try:
        content = json.loads(metadata[name])
    except (KeyError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a readable checkpoint: it has no usable {name}: {error!r}") from error
    if not isinstance(content, dict) or not all(isinstance(text, str) for text in content.values()):
        raise CheckpointError(f"{path} is not a readable checkpoint: its {name} is not a JSON object of texts")
    return content


def load(
    path: str | Path, like: PyTree, identity: dict[str, str] | None = None
) -> tuple[PyTree, dict[str, np.ndarray]]:
    """Read a checkpoint that `save` wrote.

    Args:
        path: The file.
        like: A state of the wanted structure; the loaded leaves are placed on its devices.  Leaves that are
            `jax.ShapeDtypeStruct` are loaded as NumPy arrays.
        identity: Entries that the stored identity must have; None checks none.

    Returns:
        (state, history).  Raises a CheckpointError if the file is damaged or truncated, or if it has another format or
        structure or belongs to another run.
    """
    return load_all(path, like, identity)[:2]


def _placed_like(array: np.ndarray, leaf: Any) -> jax.Array:
    committed = isinstance(leaf, jax.Array) and leaf.committed
    return jax.device_put(array, leaf.sharding) if committed else jnp.asarray(array)


def load_all(
    path: str | Path, like: PyTree, identity: dict[str, str] | None = None
) -> tuple[PyTree, dict[str, np.ndarray], dict[str, str]]:
    """Read a checkpoint with its stored identity.

    Args:
        path: The file.
        like: A state of the wanted structure; the loaded leaves are placed on its devices.  Leaves that are
            `jax.ShapeDtypeStruct` are loaded as NumPy arrays.
        identity: Entries that the stored identity must have; None checks none.

    Returns:
        (state, history, identity).  Raises a CheckpointError in the cases of `load`.
    """
    arrays, metadata = _read(path)
    structure, stored = _texts(path, metadata, "structure"), _texts(path, metadata, "identity")
    if structure != (wanted := _structure(like)):
        leaf = next(name for name in {**wanted, **structure} if structure.get(name) != wanted.get(name))
        stored_text, given_text = (short(texts.get(leaf, "absent")) for texts in (structure, wanted))
        raise CheckpointError(
            f"{path} is of another structure: {short(leaf)} is {stored_text} there, {given_text} here"
        )
    check_identity(path, stored, identity or {})
    leaves: list[Any] = []
    for name, leaf in leaves_by_name(like).items():
        dtype, shape = jax.typeof(leaf).dtype, jnp.shape(leaf)
        raw = arrays.pop(f"state/{name}", None)
        if raw is None or raw.size != dtype.itemsize * math.prod(shape):
            size = "absent" if raw is None else f"{raw.size} bytes"
            raise CheckpointError(
                f"{path} is not a readable checkpoint: {name} is {size}, expected {dtype}{list(shape)}"
            )
        array = np.frombuffer(raw.tobytes(), dtype).reshape(shape)
        leaves.append(array if isinstance(leaf, jax.ShapeDtypeStruct) else _placed_like(array, leaf))
    unknown = next((name for name in arrays if not name.startswith("history/")), None)
    if unknown is not None:
        raise CheckpointError(
            f"{path} is not a readable checkpoint: tensor {short(unknown)!r} has no place in its structure"
        )
    history = {name.removeprefix("history/"): values for name, values in arrays.items()}
    return jax.tree.unflatten(jax.tree.structure(like), leaves), history, stored
