"""The rows of clients on the host, in memory or in files, and the folder from which a run continues."""

import json
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from commjax.core import checkpoint, code, files, identity, tree
from commjax.core.base import Algorithm, Key, Params
from commjax.core.files import CheckpointError

SERVER = "server.safetensors"


class Federation(NamedTuple):
    """The state of n clients on the host.

    Attributes:
        server: server state, on the device.
        rows: client states on the host, with a leading axis of n rows; `run` *writes them in place*.  The id of a
            client is the position of its row.
        n: number of clients.
        folder: folder of the files that hold the rows and the server state; None if all is in memory.
    """

    server: Any
    rows: Any
    n: int
    folder: Path | None = None


def start(
    algorithm: Algorithm, params: Params, n: int, folder: str | Path | None = None, **per_client: Any
) -> Federation:
    """Make a federation in which every client begins with the same row.

    Rows of zeros take no memory and no disk space until they are written.

    Args:
        algorithm: the algorithm.
        params: the first model.
        n: number of clients.
        folder: a new folder for the rows; None keeps them in memory.
        **per_client: arguments of `algorithm.init` for one client, without a client axis.

    Returns:
        The federation.
    """
    server, first = _first(algorithm, params, n, per_client)
    if folder is None:
        return Federation(
            server, jax.tree.map(lambda row: _filled(np.zeros((n, *row.shape), row.dtype), row), first), n
        )
    folder = Path(folder)
    with files.writing(folder / SERVER):
        # A `start` that was killed leaves these files and no server file; it can be repeated.
        known = {path.name for path, _ in _files(folder, first)} | {files.lock_file(folder / SERVER).name}
        if not {path.name for path in folder.iterdir()} <= known:
            raise ValueError(f"folder: {folder} is not empty; allowed: a new one (to go on with this one, see reopen)")
        rows = [
            _filled(np.lib.format.open_memmap(path, "w+", row.dtype, (n, *row.shape)), row)
            for path, row in _files(folder, first)
        ]
        federation = Federation(server, jax.tree.unflatten(jax.tree.structure(first), rows), n, folder)
        nobody = jax.tree.map(lambda row: np.zeros((0, *row.shape), row.dtype), first)
        log(federation, np.zeros(0, np.int32), nobody, _start_identity(algorithm, server, first, n))
    return federation


def reopen(algorithm: Algorithm, params: Params, n: int, folder: str | Path, **per_client: Any) -> Federation:
    """Open the folder of a federation, in the state after its last whole round.

    This works even if the process was killed in the middle of a round.

    This function checks the digest of the server file, which also holds the rows of the last cohort.  It checks the
    structure, dtype, shape and exact size of each client file, and n, the name of the compressor and the first state.
    `run` then checks that key, hyperparameters and program (loss, compressor, cohort size) are those of the run in the
    folder.

    The content of the client files is not checked, because they are too large to read in each round.  The data of
    `fetch` is not checked either.  After a power cut, rows may be older than the server state.

    Args:
        algorithm: The algorithm that was given to `start`.
        params: The model that was given to `start`.
        n: The number of clients that was given to `start`.
        folder: The folder.
        **per_client: The further arguments that were given to `start`.

    Returns:
        The federation.  Raises a CheckpointError if the folder belongs to another run or a file is damaged; no file is
        changed in that case.
    """
    folder, (server, first) = Path(folder), _first(algorithm, params, n, per_client)
    path = folder / SERVER
    if not path.exists():
        raise CheckpointError(f"{path} does not exist; allowed: a folder that start has made")
    with files.writing(path):
        server, log_of_round = checkpoint.load(path, server, _start_identity(algorithm, server, first, n))
        leaf_files = _files(folder, first)
        for file, row in leaf_files:
            _check_file(file, row, n)
        rows = [np.lib.format.open_memmap(file, "r+").view(row.dtype) for file, row in leaf_files]
        federation = Federation(server, jax.tree.unflatten(jax.tree.structure(first), rows), n, folder)
        put(federation.rows, *_last_cohort(path, log_of_round, [row for _, row in leaf_files], n))
    return federation


def _last_cohort(path: Path, log: dict[str, np.ndarray], rows: list[np.ndarray], n: int) -> tuple[Any, Any]:
    """Ids and rows of the last cohort, from the server file."""
    ids, new = log.get("ids", np.zeros(())), [log.get(f"rows {i}", np.zeros(())) for i in range(len(rows))]
    fits = ids.ndim == 1 and all(leaf.shape == (len(ids), *row.shape) for leaf, row in zip(new, rows))
    if not fits or not np.all((ids >= 0) & (ids < n) & (ids % 1 == 0)):
        raise CheckpointError(f"{path} has no rows of the last cohort that fit {n} clients")
    return ids.astype(np.int32), new


def _check_file(path: Path, row: np.ndarray, n: int) -> None:
    """Raise a CheckpointError unless the file holds exactly n rows like `row`.  It is opened for reading only."""
    try:
        stored = np.lib.format.open_memmap(path, "r")
    except Exception as error:  # NumPy's parser of headers may raise several types
        raise CheckpointError(f"{path} is not a readable client file: {error!r}") from error
    # A file of bfloat16 has the dtype void.
    dtype = row.dtype if stored.dtype == np.dtype((np.void, row.dtype.itemsize)) else stored.dtype
    if (stored.shape, dtype) != ((n, *row.shape), row.dtype):
        raise CheckpointError(f"{path} is {dtype}{list(stored.shape)}, expected {row.dtype}{[n, *row.shape]}")
    size = path.stat().st_size
    if stored.nbytes and size != stored.offset + stored.nbytes:
        raise CheckpointError(f"{path} has {size} bytes, expected {stored.offset + stored.nbytes}")


def _start_identity(algorithm: Algorithm, server: Any, first: Any, n: int) -> dict[str, str]:
    compressor = algorithm.exchange.compressor if algorithm.exchange is not None else None
    return {
        "n": str(n),
        "compressor": compressor.name if compressor is not None else "none",
        "start": identity.digest((server, first)),
    }


def run_identity(federation: Federation, key: Key, hparams: Any) -> dict[str, str]:
    """Return the stored identity of the run in the folder, with key and hyperparameters.

    Raises a CheckpointError if the given key or hyperparameters differ from the stored ones, or if another process has
    added rounds.
    """
    if federation.folder is None:
        return {}
    path = federation.folder / SERVER
    server, _, stored = checkpoint.load_all(path, federation.server)
    if identity.digest(server) != identity.digest(federation.server):
        raise CheckpointError(
            f"{path} has another server, in round {int(server.round)}, than the federation, in round "
            f"{int(federation.server.round)}; allowed: the federation of the last run, or that of reopen"
        )
    given = identity.fingerprint(key, hparams)
    identity.check_identity(path, stored, {name: text for name, text in given.items() if name in stored})
    return {**stored, **given}


def program_identity(path: Path, stored: dict[str, str], step: Any, inputs: tuple[Any, ...]) -> dict[str, str]:
    """Add the program to the stored identity, traced for the batch shapes of the first round in the folder.

    Raises a CheckpointError if the stored program is another one.
    """
    key, hparams, server, rows, batch = inputs
    types = [jax.typeof(leaf) for leaf in jax.tree.leaves(batch)]
    about = {"batch": json.dumps([f"{aval.dtype}, {aval.ndim} axes" for aval in types])}
    identity.check_identity(path, stored, {name: text for name, text in about.items() if name in stored})
    shapes = json.loads(stored.get("batch shapes", json.dumps([aval.shape[1:] for aval in types])))
    like = [jax.ShapeDtypeStruct((len(rows.id), *shape), aval.dtype) for shape, aval in zip(shapes, types, strict=True)]
    strong = jax.tree.map(np.asarray, (hparams, server))
    traced = step.trace(key, *strong, rows, jax.tree.unflatten(jax.tree.structure(batch), like))
    about |= {"program": identity.digest(code.of_program(traced.jaxpr)), "batch shapes": json.dumps(shapes)}
    identity.check_identity(path, stored, {name: text for name, text in about.items() if name in stored})
    return {**stored, **about}


def _first(algorithm: Algorithm, params: Params, n: int, per_client: Any) -> tuple[Any, Any]:
    """The first server state, and the first row of a client.  Ids are not stored: they are positions."""
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    server, rows = algorithm.init(params, jnp.zeros(1, jnp.int32), **tree.repeat(per_client, 1))
    return server, jax.tree.map(lambda leaf: np.asarray(leaf)[0], rows._replace(id=()))


def _filled(many: np.ndarray, row: np.ndarray) -> np.ndarray:
    if row.any():
        many[:] = row
    return many


def _files(folder: Path, first: Any) -> list[tuple[Path, np.ndarray]]:
    """File and first row of each leaf.  Files are numbered, because two leaves may have the same plain name."""
    named = [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(first)[0]]
    plain = ["".join(c if c.isalnum() else "_" for c in name) for name, _ in named]
    return [(folder / f"{i:03}{name}.npy", leaf) for i, (name, (_, leaf)) in enumerate(zip(plain, named))]


def log(federation: Federation, ids: np.ndarray, rows: PyTree, about: dict[str, str]) -> None:
    """Save the server state with the cohort's new rows, before the rows are written to their files.

    If that writing is interrupted, `reopen` repeats it.  Rows are stored as float64.

    Args:
        federation: the federation with the new server state.
        ids: numbers of the cohort's clients, [m].
        rows: their new rows, leaves [m, ...].
        about: the identity of the run, as texts by name.
    """
    if federation.folder is not None:
        history = {"ids": ids} | {f"rows {i}": leaf for i, leaf in enumerate(jax.tree.leaves(rows))}
        checkpoint.save(federation.folder / SERVER, federation.server, history, about)


def put(store: PyTree, ids: np.ndarray, rows: PyTree) -> None:
    """Write the rows of the clients `ids` in place."""
    for leaf, new in zip(jax.tree.leaves(store), jax.tree.leaves(rows), strict=True):
        leaf[ids] = new
