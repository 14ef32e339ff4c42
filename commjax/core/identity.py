"""The identity of a run: what must be the same for a checkpoint to be continued."""

import hashlib
import json
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jaxtyping import PyTree, UInt8

from commjax.core.base import Key, State
from commjax.core.files import CheckpointError


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
    for path, leaf in leaves_by_name(tree).items():
        is_key = isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key)
        array = np.asarray(jax.random.key_data(leaf) if is_key else leaf)
        large = isinstance(leaf, jax.Array) and array.nbytes > _LARGE
        content = _large(leaf, "whole", partial(_sha, array)) if large else array.tobytes()
        sha.update(f"{path} {array.dtype}{array.shape} ".encode() + content)
    return sha.hexdigest()[:16]


def _sha(array: np.ndarray) -> bytes:
    return hashlib.sha256(array.tobytes()).digest()


_LARGE = 2**22  # bytes
_seen: dict[int, tuple[weakref.ref[jax.Array], dict[str, bytes]]] = {}


def _large(leaf: jax.Array, kind: str, compute: Callable[[], bytes]) -> bytes:
    """The hash of a large array, computed once per process: a JAX array cannot change, and many runs share one."""
    if id(leaf) not in _seen or _seen[id(leaf)][0]() is not leaf:
        number = id(leaf)  # the weak reference removes the entry when the array is deleted
        _seen[number] = weakref.ref(leaf, lambda _: _seen.pop(number, None)), {}
    hashes = _seen[id(leaf)][1]
    if kind not in hashes:
        hashes[kind] = compute()
    return hashes[kind]


def _host_rows(leaf: Any) -> np.ndarray:
    """The rows of an array that this process has, in their order."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        return np.asarray(leaf)
    shards = sorted(leaf.addressable_shards, key=lambda shard: shard.index[0].start or 0)
    return np.concatenate([np.asarray(shard.data) for shard in shards])


def row_digests(leaf: Any, n: int) -> UInt8[np.ndarray, "n 16"]:
    """Hash each of the first n rows of an array, the same on any number of devices and processes.

    Args:
        leaf: An array with at least n rows.  Each process may have a part of the rows; all processes call together.
        n: The number of rows.

    Returns:
        The first 16 bytes of the sha256 of each row.
    """

    def compute() -> bytes:
        rows = _host_rows(leaf)
        content, size = memoryview(rows.tobytes()), rows.nbytes // max(1, len(rows))
        return b"".join(hashlib.sha256(content[i * size : (i + 1) * size]).digest()[:16] for i in range(len(rows)))

    large = isinstance(leaf, jax.Array) and leaf.is_fully_addressable and leaf.size * leaf.dtype.itemsize > _LARGE
    digests = np.frombuffer(_large(leaf, "rows", compute) if large else compute(), np.uint8).reshape(-1, 16)
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        digests = np.asarray(multihost_utils.process_allgather(digests, tiled=True)).reshape(-1, 16)
    return digests[:n]


def of_run(key: Key, hparams: Any, state: State, data: PyTree, *, n: int, program: Any) -> dict[str, str]:
    """Return the identity of a run, which does not depend on the devices on which it runs.

    The identity contains only the round and the params of the first server state: other fields may be means over
    clients, which are rounded differently on another number of devices.

    Args:
        key: Key of the run, or the keys of a sweep.
        hparams: Hyperparameters of the run.
        state: The first state; its client rows from n on are padding.
        data: Data of the clients, with as many rows as `state.clients`.
        n: The number of clients.
        program: The program of a round, as `code.of_program` identifies it.

    Returns:
        Texts by name, as `fingerprint` gives them.
    """
    rows = len(state.clients.id)

    def by_client(tree: PyTree) -> dict[str, Any]:
        parts: dict[str, Any] = {}
        for name, leaf in leaves_by_name(tree).items():
            per_client = np.ndim(leaf) > 0 and len(leaf) == rows
            parts[name] = (f"{jax.typeof(leaf).dtype}", row_digests(leaf, n)) if per_client else leaf
        return parts

    start = jax.tree.map(np.asarray, (state.server.round, state.server.params))
    return fingerprint(
        key, hparams, start=start, clients=by_client(state.clients), data=by_client(data), program=program
    )


def fingerprint(key: Key, hparams: Any, **parts: PyTree) -> dict[str, str]:
    """Return the identity of a run: what must be the same for a checkpoint to be continued.

    Args:
        key: key of the run.
        hparams: hyperparameters of the run.
        **parts: trees of arrays and texts, by name; only their digests are stored.

    Returns:
        Texts by name.  The hyperparameters and the key are stored in full, so that an error can show them.
    """
    kind = type(hparams)
    return {
        "hparams type": f"{kind.__module__}.{kind.__qualname__}",
        "hparams": json.dumps([np.asarray(leaf, np.float64).tolist() for leaf in jax.tree.leaves(hparams)]),
        "key": np.asarray(jax.random.key_data(key)).tobytes().hex(),
        **{name: digest(part) for name, part in parts.items()},
    }


def leaves_by_name(tree: PyTree) -> dict[str, Any]:
    """The leaves of a tree by their paths, such as `.server.params`."""
    return {jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def check_identity(path: str | Path, stored: dict[str, str], identity: dict[str, str]) -> None:
    """Refuse a checkpoint of another run.

    Args:
        path: The file, for the error text.
        stored: The identity in the file.
        identity: The entries that it must have.

    Returns:
        None.  Raises a CheckpointError that names the first entry that differs.
    """
    if {"start", "data"} <= stored.keys() and "clients" in identity and "clients" not in stored:
        raise CheckpointError(
            f"{path} was written by an earlier version, whose identity of a run depended on its devices; finish that "
            "run with the version that began it, or remove the file to begin again"
        )
    for name, value in identity.items():
        if stored.get(name) != value:
            stored_text, given_text = short(str(stored.get(name))), short(value)
            raise CheckpointError(f"{path} belongs to another run: {name} is {stored_text} there, {given_text} here")


def short(text: str) -> str:
    """The first 200 characters of a text, for an error."""
    return text if len(text) <= 200 else f"{text[:200]}..."
