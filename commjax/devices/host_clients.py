"""More clients than fit on a device: rows stay on the host, and only those of a round's cohort go to the device.

The rows are in memory or in files.  Memory and time of a round depend on the size of the cohort, not on n.

If only m of n clients take part, an invariant such as h = mean_i h_i may break.  Two kinds of methods are allowed:

- methods with cohorts (`fedavg(..., cohort=m)`, `scaffold(..., cohort=m)`);
- methods whose theory holds for any compressor C (`ef_bv`).  A cohort of m is then the compressor m-nice(m, C): absent
  clients send 0 and keep their h_i.  C must be independent over clients.  Choose the stepsizes with the constants
  `compressors.m_nice(m, C).constants(d, n)`.
"""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, PyTree

from commjax.core import checkpoint, checks, rounds, runner, tree
from commjax.core.base import Algorithm, Exchange, Key, Message, Metrics, Params, State
from commjax.core.runner import DivergedError

# (key, round, n, size) -> ids of the cohort, as `members`
Draw = Callable[[Key, int, int, int], np.ndarray]


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


class StoppedError(RuntimeError):
    """An error or an interrupt stopped a run.

    The federation that was given to `run` is no longer valid, because its rows were written in place.  Continue with
    `federation`.

    Attributes:
        federation: the federation after the last whole round.
        metrics: metrics of the rounds that were finished.
    """

    federation: Federation
    metrics: Metrics


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
    with checkpoint.writing(folder / _SERVER):
        # A `start` that was killed leaves these files and no server file; it can be repeated.
        known = {path.name for path, _ in _files(folder, first)} | {f".{_SERVER}.lock"}
        if not {path.name for path in folder.iterdir()} <= known:
            raise ValueError(f"folder: {folder} is not empty; allowed: a new one (to go on with this one, see reopen)")
        rows = [
            _filled(np.lib.format.open_memmap(path, "w+", row.dtype, (n, *row.shape)), row)
            for path, row in _files(folder, first)
        ]
        federation = Federation(server, jax.tree.unflatten(jax.tree.structure(first), rows), n, folder)
        nobody = jax.tree.map(lambda row: np.zeros((0, *row.shape), row.dtype), first)
        _log(federation, server, np.zeros(0, np.int32), nobody, _start_identity(algorithm, server, first, n))
    return federation


def reopen(algorithm: Algorithm, params: Params, n: int, folder: str | Path, **per_client: Any) -> Federation:
    """Open the folder of a federation, in the state after its last whole round.

    This works even if the process was killed in the middle of a round.

    This function checks the digest of the server file, which also holds the rows of the last cohort; structure, dtype,
    shape and exact size of each client file; n, the name of the compressor and the first state.  `run` then checks that
    key, hyperparameters and program (loss, compressor, cohort size) are those of the run in the folder.

    The content of the client files is not checked, because they are too large to read in each round.  The data of
    `fetch` is not checked either.  After a power cut, rows may be older than the server state.

    Args:
        algorithm: The algorithm that was given to `start`.
        params: The model that was given to `start`.
        n: The number of clients that was given to `start`.
        folder: The folder.
        **per_client: The further arguments that were given to `start`.

    Returns:
        The federation.  CheckpointError if the folder belongs to another run or a file is damaged; no file is then
        changed.
    """
    folder, (server, first) = Path(folder), _first(algorithm, params, n, per_client)
    path = folder / _SERVER
    if not path.exists():
        raise checkpoint.CheckpointError(f"{path} does not exist; allowed: a folder that start has made")
    with checkpoint.writing(path):
        server, log = checkpoint.load(path, server, _start_identity(algorithm, server, first, n))
        files = _files(folder, first)
        for file, row in files:
            _check_file(file, row, n)
        rows = [np.lib.format.open_memmap(file, "r+").view(row.dtype) for file, row in files]
        federation = Federation(server, jax.tree.unflatten(jax.tree.structure(first), rows), n, folder)
        _put(federation.rows, *_last_cohort(path, log, [row for _, row in files], n))
    return federation


def _last_cohort(path: Path, log: dict[str, np.ndarray], rows: list[np.ndarray], n: int) -> tuple[Any, Any]:
    """Ids and rows of the last cohort, from the server file."""
    ids, new = log.get("ids", np.zeros(())), [log.get(f"rows {i}", np.zeros(())) for i in range(len(rows))]
    fits = ids.ndim == 1 and all(one.shape == (len(ids), *row.shape) for one, row in zip(new, rows))
    if not fits or not np.all((ids >= 0) & (ids < n) & (ids % 1 == 0)):
        raise checkpoint.CheckpointError(f"{path} has no rows of the last cohort that fit {n} clients")
    return ids.astype(np.int32), new


def _check_file(path: Path, row: np.ndarray, n: int) -> None:
    """CheckpointError unless the file holds exactly n rows like `row`.  It is opened for reading only."""
    try:
        found = np.lib.format.open_memmap(path, "r")
    except Exception as error:  # NumPy's parser of headers may raise several types
        raise checkpoint.CheckpointError(f"{path} is not a readable client file: {error!r}") from error
    # A file of bfloat16 has the dtype void.
    dtype = row.dtype if found.dtype == np.dtype((np.void, row.dtype.itemsize)) else found.dtype
    if (found.shape, dtype) != ((n, *row.shape), row.dtype):
        raise checkpoint.CheckpointError(f"{path} is {dtype}{list(found.shape)}, expected {row.dtype}{[n, *row.shape]}")
    size = path.stat().st_size
    if found.nbytes and size != found.offset + found.nbytes:
        raise checkpoint.CheckpointError(f"{path} has {size} bytes, expected {found.offset + found.nbytes}")


def _start_identity(algorithm: Algorithm, server: Any, first: Any, n: int) -> dict[str, str]:
    compressor = algorithm.exchange.compressor if algorithm.exchange is not None else None
    return {
        "n": str(n),
        "compressor": compressor.name if compressor is not None else "none",
        "start": checkpoint.digest((server, first)),
    }


def _run_identity(federation: Federation, key: Key, hparams: Any) -> dict[str, str]:
    """The stored identity of the run in the folder, with key and hyperparameters.

    CheckpointError if these differ from the stored ones, or if another process has added rounds.
    """
    if federation.folder is None:
        return {}
    path = federation.folder / _SERVER
    server, _, stored = checkpoint.load_all(path, federation.server)
    if checkpoint.digest(server) != checkpoint.digest(federation.server):
        raise checkpoint.CheckpointError(
            f"{path} has another server, in round {int(server.round)}, than the federation, in round "
            f"{int(federation.server.round)}; allowed: the federation of the last run, or that of reopen"
        )
    given = checkpoint.fingerprint(key, hparams)
    checkpoint.check_identity(path, stored, {name: text for name, text in given.items() if name in stored})
    return {**stored, **given}


def _program_identity(path: Path, stored: dict[str, str], step: Any, inputs: tuple[Any, ...]) -> dict[str, str]:
    """Add the program to the stored identity, traced for the batch shapes of the first round in the folder.

    CheckpointError if the stored program is another one.
    """
    key, hparams, server, rows, batch = inputs
    types = [jax.typeof(leaf) for leaf in jax.tree.leaves(batch)]
    identity = {"batch": json.dumps([f"{one.dtype}, {one.ndim} axes" for one in types])}
    checkpoint.check_identity(path, stored, {name: text for name, text in identity.items() if name in stored})
    shapes = json.loads(stored.get("batch shapes", json.dumps([one.shape[1:] for one in types])))
    like = [jax.ShapeDtypeStruct((len(rows.id), *shape), one.dtype) for shape, one in zip(shapes, types, strict=True)]
    strong = jax.tree.map(np.asarray, (hparams, server))
    traced = step.trace(key, *strong, rows, jax.tree.unflatten(jax.tree.structure(batch), like))
    identity |= {"program": checkpoint.digest(runner.program(traced.jaxpr)), "batch shapes": json.dumps(shapes)}
    checkpoint.check_identity(path, stored, {name: text for name, text in identity.items() if name in stored})
    return {**stored, **identity}


_SERVER = "server.safetensors"


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


def _log(federation: Federation, server: Any, ids: np.ndarray, rows: PyTree, identity: dict[str, str]) -> None:
    """Save the server state with the cohort's new rows, before the rows are written to their files.

    If that writing is interrupted, `reopen` repeats it.  Rows are stored as float64.
    """
    if federation.folder is not None:
        history = {"ids": ids} | {f"rows {i}": leaf for i, leaf in enumerate(jax.tree.leaves(rows))}
        checkpoint.save(federation.folder / _SERVER, server, history, identity)


def members(key: Key, round: int, n: int, size: int) -> Int[np.ndarray, "m"]:
    """Draw the cohort of a round, uniformly without replacement.  The work grows with `size`, not with n.

    Args:
        key: key of the run.
        round: number of the round.
        n: number of clients.
        size: number of members.

    Returns:
        The ids of the members, in ascending order.

    >>> members(jax.random.key(0), 3, 100_000, 4).shape
    (4,)
    """
    words = np.asarray(jax.random.key_data(key)).ravel().tolist()
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence([*words, round])))
    return np.sort(rng.choice(n, size, replace=False, shuffle=False)).astype(np.int32)


def _size(algorithm: Algorithm, n: int, size: int | None) -> tuple[int, bool]:
    """The size of the cohort, and whether the cohort is that of a compressor (m-nice)."""
    exchange = algorithm.exchange
    if exchange is None or exchange.server_step is None:
        raise ValueError(
            "algorithm: it does not exchange once a round, or its server makes more of the messages than a mean; "
            "allowed: rounds.federated"
        )
    own = exchange.cohort_size
    if own is None and exchange.compressor is None:
        raise ValueError(
            "algorithm: neither cohorts of its own nor a compressor; absent clients would break its invariant.  "
            "Allowed: methods built with cohort=m, and those with a compressor"
        )
    if own is None and exchange.reduce is not None:
        raise ValueError(
            f"algorithm: {exchange.reduce.name} of a cohort of the compressor would not count the absent clients, who "
            "send 0; allowed: methods built with cohort=m, or reduce=None"
        )
    if own is not None and size not in (None, own):
        raise ValueError(f"size={size}, but the algorithm was built with cohort={own}")
    found = own if own is not None else size
    if found is None or not 1 <= found <= n:
        raise ValueError(f"size must be between 1 and the number of clients n = {n}, got {found}")
    return found, own is None


@cache
def cohort_step(algorithm: Algorithm, n: int, size: int | None = None) -> Callable[..., tuple[Any, Any, Metrics, Any]]:
    """Compile a round of one cohort.

    Args:
        algorithm: an algorithm that allows cohorts (see the module).
        n: number of clients.
        size: number of members; None if the algorithm was built with a cohort.

    Returns:
        A jitted function (key, hparams, server, rows, batch) -> (server, rows, metrics, accepted).  `rows` (with ids)
        and `batch` have a leading axis of the members.  The loss is the mean over the cohort; bits are means over all n
        clients.  `accepted` says for each member whether its message is `rounds.acceptable` and its loss finite.
    """
    m, joint = _size(algorithm, n, size)
    exchange = algorithm.exchange
    assert exchange is not None
    exchange = _sent_by_members(exchange, n, m) if joint else exchange

    def step(
        key: Key, hparams: Any, server: Any, rows: Any, batch: PyTree
    ) -> tuple[Any, Any, Metrics, Bool[Array, "m"]]:
        result = rounds.exchange_round(exchange, key, hparams, State(server, rows), batch, population=n)
        accepted = jax.vmap(rounds.acceptable)(result.values) & jnp.isfinite(result.losses)
        return result.state.server, result.state.clients, result.metrics, accepted

    return jax.jit(step)


def _sent_by_members(exchange: Exchange, n: int, m: int) -> Exchange:
    """The exchange whose m members send what they send under `m_nice(m, C)`; absent clients send 0.

    The mean over all n clients is m/n times the mean over the members.
    """
    compressor, server_step = exchange.compressor, exchange.server_step
    assert compressor is not None and server_step is not None

    def compress(key: Key, x: PyTree, id: Any = 0, n: int = n) -> Message:
        value, bits = compressor.compress(jax.random.split(key)[1], x, id, n)  # the key that `m_nice` gives to C
        return Message(tree.scale(n / m, value), bits)

    def joint_step(hparams: Any, server: Any, value: PyTree) -> Any:
        return server_step(hparams, server, tree.scale(m / n, value))

    return exchange._replace(compressor=compressor._replace(compress=compress), server_step=joint_step)


def run(
    key: Key,
    algorithm: Algorithm,
    hparams: Any,
    federation: Federation,
    fetch: Callable[[np.ndarray], PyTree],
    num_rounds: int,
    size: int | None = None,
    draw: Draw = members,
) -> tuple[Federation, Metrics]:
    """Run `num_rounds` rounds, each with a cohort.

    The randomness of round t depends on (key, t) only, as in `runner.run`.  An error or an interrupt raises a
    `StoppedError`, which holds the federation after the last whole round.  If a member's message is not
    `rounds.acceptable`, or the model is not finite, its cause is a `DivergedError` that names the clients and the
    round, and that round is not written.  A robust reducer drops such messages instead.

    A folder holds one run.  Another key, other hyperparameters, another program or a second process raise a
    CheckpointError.  SIGTERM and SIGINT wait until the running round is saved in the folder, and then act as usual
    (exit status 143, KeyboardInterrupt); continue with `reopen`.  A second signal acts immediately.

    Args:
        key: key of the run.
        algorithm: an algorithm that allows cohorts (see the module).
        hparams: hyperparameters of this algorithm.
        federation: the federation of `start`, `reopen` or an earlier `run`.  Its rows are written in place.
        fetch: (ids [m]) -> data of these clients, with a leading axis of m.
        num_rounds: number of rounds, at least 0.
        size: number of members m; None if the algorithm was built with a cohort.
        draw: (key, round, n, size) -> ids of the cohort.

    Returns:
        The federation after the last round, and metrics with one float64 entry per round.
    """
    with checkpoint.writing(None if federation.folder is None else federation.folder / _SERVER) as signals:
        return _rounds(signals, key, algorithm, hparams, federation, fetch, num_rounds, size, draw)


def _rounds(signals, key, algorithm, hparams, federation, fetch, num_rounds, size, draw):
    server, store, n, folder = federation
    m, _ = _size(algorithm, n, size)
    _check_independent(algorithm, server, n)
    checks.key_of(key)
    checks.rounds_of(num_rounds)
    checks.server_of(algorithm, server)
    checks.hparams_of(algorithm, hparams, n)
    step = cohort_step(algorithm, n, size)
    first, seen, writing = int(server.round), [], None
    identity, plain = _run_identity(federation, key, hparams), False
    try:
        for number in range(first, first + num_rounds):
            ids = draw(key, number, n, m)
            rows = jax.tree.map(lambda leaf, ids=ids: leaf[ids], store)._replace(id=ids)
            batch = fetch(ids)
            if folder is not None and number == first:
                plain = True  # an error of the next line is raised without a StoppedError
                identity = _program_identity(folder / _SERVER, identity, step, (key, hparams, server, rows, batch))
                plain = False
            after, rows, metrics, accepted = step(key, hparams, server, rows, batch)
            signals.wait(metrics)
            _check_finite(algorithm, number, ids[~np.asarray(accepted)], after)
            rows = jax.device_get(rows._replace(id=()))
            _log(federation, after, ids, rows, identity)
            writing = (ids, rows, after, metrics)
            _put(store, ids, rows)
            server, writing = after, None
            seen.append(metrics)
            plain = True  # the exception of a signal is, too
            signals.act(f"{folder} is saved in round {int(server.round)}; reopen it to continue")
            plain = False
    except (Exception, KeyboardInterrupt) as error:
        if plain:
            raise
        if writing is not None:  # rows were being written: write them again
            ids, rows, server, metrics = writing
            _put(store, ids, rows)
            seen.append(metrics)
        stopped = StoppedError(f"round {int(server.round)}: {type(error).__name__}: {error}")
        stopped.federation, stopped.metrics = Federation(server, store, n, folder), _columns(seen)
        raise stopped from error
    return Federation(server, store, n, folder), _columns(seen)


def _check_finite(algorithm: Algorithm, number: int, refused: np.ndarray, after: Any) -> None:
    """DivergedError if messages were refused and there is no robust reducer, or if the params are not finite."""
    assert algorithm.exchange is not None
    if len(refused) and algorithm.exchange.reduce is None:
        raise DivergedError(
            f"round {number}: the messages or losses of clients {refused.tolist()} are not finite or too large "
            "(rounds.acceptable)"
        )
    if not checks.finite_tree(after.params):
        raise DivergedError(f"round {number}: the server's params are not finite")


def _columns(seen: list[Metrics]) -> Metrics:
    history = jax.device_get(seen)
    columns: Any = [np.array([one[i] for one in history], np.float64) for i in range(len(Metrics._fields))]
    return Metrics(*columns)


def _put(store: PyTree, ids: np.ndarray, rows: PyTree) -> None:
    for leaf, new in zip(jax.tree.leaves(store), jax.tree.leaves(rows), strict=True):
        leaf[ids] = new


def _check_independent(algorithm: Algorithm, server: Any, n: int) -> None:
    """ValueError for a joint compressor.  Only one that is independent over clients has omega_ran = omega / n."""
    assert algorithm.exchange is not None
    compressor = algorithm.exchange.compressor
    if compressor is not None and n > 1:
        _, omega, omega_ran = compressor.constants(tree.size(server.params), n)
        if abs(omega_ran - omega / n) > 1e-9 * omega:
            raise ValueError(
                f"algorithm: {compressor.name} joins the clients (omega_ran = {omega_ran:g}, not omega / n = "
                f"{omega / n:g}), and the absent ones would be missing; allowed: one that is independent over clients, "
                "as the C of m_nice(size, C)"
            )
