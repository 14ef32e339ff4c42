"""Checkpoints: one safetensors file with a state, the metrics so far, and the identity of the run.

The file holds a digest of its content, which is checked when it is read.  Nothing is unpickled.  Only one process at a
time can write a checkpoint.
"""

import errno
import hashlib
import json
import math
import os
import re
import secrets
import socket
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from commjax.core import signals
from commjax.core.base import Key

_FORMAT = "commjax-checkpoint-2"


class CheckpointError(ValueError):
    """A checkpoint cannot be read or written, or it belongs to another run."""


def digest(tree: PyTree) -> str:
    """Hash a tree of arrays and texts.

    Args:
        tree: the tree.

    Returns:
        16 hex digits that depend on every bit, shape, dtype and name in the tree.

    >>> digest({"x": np.zeros(2)}) == digest({"x": np.zeros(2)})
    True
    >>> digest({"x": np.zeros(2)}) == digest({"x": np.zeros(3)})
    False
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
    """The hash of a large array, computed once per process: a JAX array cannot change, and many runs share one."""
    if id(leaf) not in _seen or _seen[id(leaf)][0]() is not leaf:
        number = id(leaf)  # the weak reference removes the entry when the array is deleted
        _seen[number] = weakref.ref(leaf, lambda _: _seen.pop(number, None)), hashlib.sha256(array.tobytes()).digest()
    return _seen[id(leaf)][1]


def fingerprint(key: Key, hparams: Any, **parts: PyTree) -> dict[str, str]:
    """The identity of a run: what must be the same for a checkpoint to be continued.

    Args:
        key: key of the run.
        hparams: hyperparameters of the run.
        **parts: by name, trees of arrays and texts of which only a digest is stored.

    Returns:
        Texts by name.  An error can show those of the hyperparameters and the key.
    """
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


def _target(path: str | Path) -> Path:
    """The file that a chain of symbolic links leads to.  It need not exist."""
    target = Path(os.path.realpath(path))
    if target.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    return target


def _try_flock(handle: int) -> bool:
    """Lock an open file for this process.

    False if another process holds the lock; OSError if the file system has no locks.
    """
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove_orphans(path: Path) -> None:
    """Remove the temporary files that killed writers of `path` left.  A running writer holds a lock on its file."""
    pattern = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{8}}")
    for entry in os.scandir(path.parent):
        if pattern.fullmatch(entry.name) and entry.is_file(follow_symlinks=False):
            with suppress(OSError), open(entry.path, "rb") as file:
                if _try_flock(file.fileno()):
                    os.unlink(entry.path)


def write_atomically(path: str | Path, data: bytes) -> None:
    """Write a file so that a reader finds either the old or the new content, even after a power cut.

    Temporary files that killed writers of the same path left are removed.

    Args:
        path: The file to write.  If it is a symbolic link, the file that it leads to is replaced.
        data: The new content.

    Returns:
        None.
    """
    path = _target(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_orphans(path)
    # Files of `tempfile` would be readable by their owner only.
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(temporary, "xb") as file:
            with suppress(OSError):  # the file system may have no locks
                _try_flock(file.fileno())
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


def _acquire(lock: Path, path: Path) -> int | None:
    """Open and lock the lock file.

    Returns the handle, or None if nobody can write or lock there.  CheckpointError if another process holds the lock.
    """
    while True:
        try:
            handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            if lock.exists() or error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise CheckpointError(f"{path}: its lock file {lock} cannot be opened: {error}") from error
            return None  # nobody can write into this folder; `save` raises the error
        try:
            if not _try_flock(handle):
                holder = os.pread(handle, 200, 0).decode(errors="replace").strip() or "another process"
                raise CheckpointError(f"{path} is being written by {holder}; allowed: one writer at a time")
            if lock.exists() and os.path.samestat(os.fstat(handle), os.stat(lock)):
                with suppress(OSError):  # on a full disk the lock holds without the text
                    os.ftruncate(handle, 0)
                    os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
                return handle
        except FileNotFoundError:
            pass  # the last holder has just removed it: try again
        except OSError as error:
            os.close(handle)
            warnings.warn(
                f"{path}: no lock on this file system ({error}); a second writer is not noticed", stacklevel=4
            )
            return None
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


@contextmanager
def writing(path: str | Path | None, lock: bool = True) -> Iterator[signals.Deferred]:
    """Be the only writer of a checkpoint, and hold SIGTERM and SIGINT back until it is written.

    The lock is on a file `.NAME.lock` beside the checkpoint.  It ends with the process, even if that is killed; a lock
    file that is left over does no harm.

    Args:
        path: The checkpoint, which need not exist.  None takes no lock and holds no signal back.
        lock: False in the processes of a job that do not write.

    Returns:
        A context that yields a `signals.Deferred`: call its `act` after each save.  A second writer gets a
        CheckpointError that names the first.
    """
    if path is None:
        yield signals.Deferred()
        return
    with _locked(_target(path)) if lock else nullcontext(), signals.deferred() as deferred:
        yield deferred


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = path.with_name(f".{path.name}.lock")
    handle = _acquire(lock, path)
    try:
        _remove_orphans(path)
        yield
    finally:
        if handle is not None:
            lock.unlink(missing_ok=True)
            os.close(handle)


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

    arrays = {f"state/{p}": _raw(np.asarray(leaf)) for p, leaf in _leaves(state).items()}
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
                        raise unreadable(f"tensor {_short(name)!r} is {dtype}, expected {wanted or 'no such tensor'}")
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
        like: A state of the wanted structure; the loaded leaves are placed on its devices.
        identity: Entries that the stored identity must have; None checks none.

    Returns:
        (state, history).  CheckpointError if the file is damaged or truncated, or has another format, structure or run.
    """
    return load_all(path, like, identity)[:2]


def load_all(
    path: str | Path, like: PyTree, identity: dict[str, str] | None = None
) -> tuple[PyTree, dict[str, np.ndarray], dict[str, str]]:
    """Read a checkpoint with its stored identity.

    Args:
        path: The file.
        like: A state of the wanted structure; the loaded leaves are placed on its devices.
        identity: Entries that the stored identity must have; None checks none.

    Returns:
        (state, history, identity).  CheckpointError as in `load`.
    """
    arrays, metadata = _read(path)
    found, stored, wanted = _texts(path, metadata, "structure"), _texts(path, metadata, "identity"), _structure(like)
    if found != wanted:
        leaf = next(name for name in {**wanted, **found} if found.get(name) != wanted.get(name))
        there, here = (_short(texts.get(leaf, "absent")) for texts in (found, wanted))
        raise CheckpointError(f"{path} is of another structure: {_short(leaf)} is {there} there, {here} here")
    check_identity(path, stored, identity or {})
    leaves = []
    for name, leaf in _leaves(like).items():
        dtype, shape = jnp.asarray(leaf).dtype, jnp.shape(leaf)
        raw = arrays.pop(f"state/{name}", None)
        if raw is None or raw.size != dtype.itemsize * math.prod(shape):
            size = "absent" if raw is None else f"{raw.size} bytes"
            raise CheckpointError(
                f"{path} is not a readable checkpoint: {name} is {size}, expected {dtype}{list(shape)}"
            )
        array = np.frombuffer(raw.tobytes(), dtype).reshape(shape)
        placed = isinstance(leaf, jax.Array) and leaf.committed
        leaves.append(jax.device_put(array, leaf.sharding) if placed else jnp.asarray(array))
    unknown = next((name for name in arrays if not name.startswith("history/")), None)
    if unknown is not None:
        raise CheckpointError(
            f"{path} is not a readable checkpoint: tensor {_short(unknown)!r} has no place in its structure"
        )
    history = {name.removeprefix("history/"): values for name, values in arrays.items()}
    return jax.tree.unflatten(jax.tree.structure(like), leaves), history, stored


def check_identity(path: str | Path, stored: dict[str, str], identity: dict[str, str]) -> None:
    """Refuse a checkpoint of another run.

    Args:
        path: The file, for the error text.
        stored: The identity in the file.
        identity: The entries that it must have.

    Returns:
        None.  CheckpointError that names the first entry that differs.
    """
    for name, value in identity.items():
        if stored.get(name) != value:
            there, here = _short(str(stored.get(name))), _short(value)
            raise CheckpointError(f"{path} belongs to another run: {name} is {there} there, {here} here")


def _short(text: str) -> str:
    return text if len(text) <= 200 else f"{text[:200]}..."
