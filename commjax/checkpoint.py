"""One safetensors file: a state, what was recorded so far, and what it belongs to.  Nothing is ever unpickled."""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from commjax.base import Key

_FORMAT = "commjax-checkpoint-1"


class CheckpointError(ValueError):
    """A checkpoint that cannot be read, or that belongs to another run."""


def fingerprint(key: Key, hparams: Any) -> dict[str, str]:
    """What a run is besides its state: the kind of algorithm, its hyperparameters, its key."""
    kind = type(hparams)
    return {
        "hparams type": f"{kind.__module__}.{kind.__qualname__}",
        "hparams": json.dumps([np.asarray(leaf, np.float64).tolist() for leaf in jax.tree.leaves(hparams)]),
        "key": np.asarray(jax.random.key_data(key)).tobytes().hex(),
    }


def _leaves(tree: PyTree) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def _structure(tree: PyTree) -> dict[str, str]:
    return {path: f"{jnp.asarray(leaf).dtype}{list(jnp.shape(leaf))}" for path, leaf in _leaves(tree).items()}


def write_atomically(path: str | Path, data: bytes) -> None:
    """The old file or the new one, never a torn one, even after a power cut."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def save(path: str | Path, state: PyTree, history: dict[str, np.ndarray], identity: dict[str, str]) -> None:
    """Write atomically; bfloat16 and other exotic leaves travel as raw bytes."""
    from safetensors.numpy import save as to_bytes

    arrays = {f"state/{p}": _raw(np.asarray(leaf)) for p, leaf in _leaves(state).items()}
    arrays |= {f"history/{name}": np.asarray(values, np.float64) for name, values in history.items()}
    metadata = {"format": _FORMAT, "structure": json.dumps(_structure(state)), "identity": json.dumps(identity)}
    write_atomically(path, to_bytes(arrays, metadata))


def _raw(array: np.ndarray) -> np.ndarray:
    return np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)


def load(
    path: str | Path, like: PyTree, identity: dict[str, str] | None = None
) -> tuple[PyTree, dict[str, np.ndarray]]:
    """(state, history) for a state of the structure of `like`; anything else is refused and nothing is changed."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "numpy") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dict
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a readable checkpoint: {error}") from error
    if metadata.get("format") != _FORMAT:
        raise CheckpointError(f"{path} has format {metadata.get('format')!r}, expected {_FORMAT!r}")
    found, wanted = json.loads(metadata["structure"]), _structure(like)
    if found != wanted:
        leaf = next(name for name in {**wanted, **found} if found.get(name) != wanted.get(name))
        raise CheckpointError(
            f"{path} is of another structure: {leaf} is {found.get(leaf, 'absent')} there, {wanted.get(leaf, 'absent')} here"
        )
    stored = json.loads(metadata["identity"])
    for name, value in (identity or stored).items():
        if stored.get(name) != value:
            raise CheckpointError(f"{path} belongs to another run: {name} is {stored.get(name)} there, {value} here")
    paths, treedef = jax.tree_util.tree_flatten_with_path(like)
    leaves = []
    for path_, leaf in paths:
        array = jnp.asarray(leaf)
        raw = arrays[f"state/{jax.tree_util.keystr(path_)}"]
        leaves.append(jnp.asarray(np.frombuffer(raw.tobytes(), array.dtype).reshape(array.shape)))
    history = {name.removeprefix("history/"): values for name, values in arrays.items() if name.startswith("history/")}
    return treedef.unflatten(leaves), history
