"""One safetensors file: a state, what was recorded so far, and what it belongs to.  Nothing is ever unpickled."""

import hashlib
import json
import os
import secrets
import weakref
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


def digest(tree: PyTree) -> str:
    """A few hex digits that change with any bit, shape, dtype or name of a tree of arrays and texts.

    >>> digest({"x": np.zeros(2)}) == digest({"x": np.zeros(2)}), digest({"x": np.zeros(2)}) == digest({"x": np.zeros(3)})
    (True, False)
    """
    sha = hashlib.sha256()
    for path, leaf in _leaves(tree).items():
        is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        array = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
        content = _large(leaf, array) if isinstance(leaf, jax.Array) and array.nbytes > _LARGE else array.tobytes()
        sha.update(f"{path} {array.dtype}{array.shape} ".encode() + content)
    return sha.hexdigest()[:16]


_LARGE = 2**22  # bytes
_seen: dict[int, tuple[weakref.ref, bytes]] = {}


def _large(leaf: jax.Array, array: np.ndarray) -> bytes:
    """The digest of a data set, read once a process: a JAX array cannot change, and many runs share one."""
    if id(leaf) not in _seen or _seen[id(leaf)][0]() is not leaf:
        number = id(leaf)  # an array that is gone takes its entry along
        _seen[number] = weakref.ref(leaf, lambda _: _seen.pop(number, None)), hashlib.sha256(array.tobytes()).digest()
    return _seen[id(leaf)][1]


def fingerprint(key: Key, hparams: Any, **parts: PyTree) -> dict[str, str]:
    """What a run is besides its state: hyperparameters and key, which an error can show, and a digest of each of `parts`."""
    kind = type(hparams)
    return {
        "hparams type": f"{kind.__module__}.{kind.__qualname__}",
        "hparams": json.dumps([np.asarray(leaf, np.float64).tolist() for leaf in jax.tree.leaves(hparams)]),
        "key": np.asarray(jax.random.key_data(key)).tobytes().hex(),
        **{name: digest(part) for name, part in parts.items()},
    }


def _leaves(tree: PyTree) -> dict[str, Any]:
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def _structure(tree: PyTree) -> dict[str, str]:
    return {path: f"{jnp.asarray(leaf).dtype}{list(jnp.shape(leaf))}" for path, leaf in _leaves(tree).items()}


def write_atomically(path: str | Path, data: bytes) -> None:
    """The old file or the new one, never a torn one, even after a power cut."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Not `tempfile`, whose files nobody else may read.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
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
    metadata = {
        "format": _FORMAT,
        "structure": json.dumps(_structure(state)),
        "identity": json.dumps(identity),
    }
    write_atomically(path, to_bytes(arrays, metadata))


def _raw(array: np.ndarray) -> np.ndarray:
    return np.frombuffer(np.ascontiguousarray(array).tobytes(), np.uint8)


def load(
    path: str | Path, like: PyTree, identity: dict[str, str] | None = None
) -> tuple[PyTree, dict[str, np.ndarray]]:
    """(state, history) for a state of the structure of `like`, placed on its devices; anything else is refused."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "numpy") as file:
            metadata = file.metadata() or {}
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  not a dict
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} is not a readable checkpoint: {error}") from error
    if metadata.get("format") != _FORMAT:
        raise CheckpointError(f"{path} has format {metadata.get('format')!r}, expected {_FORMAT!r}")
    wanted = _structure(like)
    try:
        found, stored = json.loads(metadata["structure"]), json.loads(metadata["identity"])
        raw = {name: arrays[f"state/{name}"].tobytes() for name in found}
    except (KeyError, ValueError) as error:
        raise CheckpointError(f"{path} is not a readable checkpoint: it has no usable {error}") from error
    if found != wanted:
        leaf = next(name for name in {**wanted, **found} if found.get(name) != wanted.get(name))
        raise CheckpointError(
            f"{path} is of another structure: {leaf} is {found.get(leaf, 'absent')} there, {wanted.get(leaf, 'absent')} here"
        )
    for name, value in (identity or {}).items():
        if stored.get(name) != value:
            there, here = (
                text if len(text) <= 200 else f"{text[:200]}..." for text in (str(stored.get(name)), str(value))
            )
            raise CheckpointError(f"{path} belongs to another run: {name} is {there} there, {here} here")
    leaves = []
    for name, leaf in _leaves(like).items():
        array = np.frombuffer(raw[name], jnp.asarray(leaf).dtype).reshape(jnp.shape(leaf))
        placed = isinstance(leaf, jax.Array) and leaf.committed
        leaves.append(jax.device_put(array, leaf.sharding) if placed else jnp.asarray(array))
    history = {name.removeprefix("history/"): values for name, values in arrays.items() if name.startswith("history/")}
    return jax.tree.unflatten(jax.tree.structure(like), leaves), history
