"""Many clients, few at a time: their rows live on the host, in memory or in files, and only a cohort's go to the device.

Memory and time of a round depend on the cohort, not on n.  A cohort is not free (gathering m of n rows breaks an invariant such as
h = mean_i h_i), so it is open to two kinds of methods only:
    those that have cohorts of their own (`fedavg(..., cohort=m)`, `scaffold(..., cohort=m)`), and
    those whose theory speaks of any compressor (`ef_bv`): there a cohort of m is the compressor m-nice(m, C), whose absent clients
    send 0 and keep their h_i.  C must be independent over clients.  Tune with `compressors.m_nice(m, C).constants(d, n)`.
"""

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, PyTree

from commjax.core import checkpoint, checks, rounds, runner, tree
from commjax.core.base import Algorithm, Key, Message, Metrics, Params, Round
from commjax.core.runner import DivergedError

Draw = Callable[[Key, int, int, int], np.ndarray]


class Federation(NamedTuple):
    """`server` on the device; `rows` on the host, one a client, *written in place* by `run`; their id is their position."""

    server: Any
    rows: Any
    n: int
    folder: Path | None = None  # where the rows are files, and the server is beside them


class StoppedError(RuntimeError):
    """A run that an error or an interrupt ended between two rounds: `federation` is as the last whole one left it, `metrics` are of
    those that were done.  The rows of the federation that was given to `run` have gone on, so go on from this one."""

    federation: Federation
    metrics: Metrics


def start(
    algorithm: Algorithm, params: Params, n: int, folder: str | Path | None = None, **per_client: Any
) -> Federation:
    """Every client begins with the same row: what `algorithm.init` gives one client.  With a new `folder`, rows are files in it.

    Rows of zeros take no memory and no disk until they are written.
    """
    server, first = _first(algorithm, params, n, per_client)
    if folder is None:
        return Federation(
            server, jax.tree.map(lambda row: _filled(np.zeros((n, *row.shape), row.dtype), row), first), n
        )
    folder = Path(folder)
    with checkpoint.writing(folder / _SERVER):
        # A `start` that was killed leaves files of these names and no server.
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
    """Open what `start` made in `folder`, as the last whole round left it, also where the process was killed in the midst of one.

    Checked: the digest of the server's file with the last cohort's rows; structure, dtype, shape and exact size of each client
    file; n, the compressor's name and the first state.  `run` then checks the key, the hyperparameters and the program (loss,
    compressor, cohort size) against those of the run that the folder holds.  Not checked: the content of client files, which are
    too large to read in each round, and the data behind `fetch`, of which a run sees a cohort at a time.  After a power cut, rows
    may be older than their server.

    Args:
        algorithm: As `start` had it.
        params: As `start` had it.
        n: As `start` had it.
        folder: The folder.
        **per_client: As `start` had it.

    Returns:
        The federation.  A folder of another run, or with a file that is damaged, raises CheckpointError and stays as it is.
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
    """The ids and rows in the server's file."""
    ids, new = log.get("ids", np.zeros(())), [log.get(f"rows {i}", np.zeros(())) for i in range(len(rows))]
    fits = ids.ndim == 1 and all(one.shape == (len(ids), *row.shape) for one, row in zip(new, rows))
    if not fits or not np.all((ids >= 0) & (ids < n) & (ids % 1 == 0)):
        raise checkpoint.CheckpointError(f"{path} has no rows of the last cohort that fit {n} clients")
    return ids.astype(np.int32), new


def _check_file(path: Path, row: np.ndarray, n: int) -> None:
    """A client file of exactly n such rows, opened so that it cannot change."""
    try:
        found = np.lib.format.open_memmap(path, "r")
    except Exception as error:  # also what NumPy's parser of headers may raise
        raise checkpoint.CheckpointError(f"{path} is not a readable client file: {error!r}") from error
    # A file does not know bfloat16.
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
    """What the folder's file says about its run; another key or other hyperparameters, and rounds that another process added, are
    refused."""
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
    """`stored` with the program, which is traced for the batch shapes of the folder's first round; another program is refused."""
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
    """The server, and a client's row; the id is its position and is not stored"""
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    server, rows = algorithm.init(params, jnp.zeros(1, jnp.int32), **tree.repeat(per_client, 1))
    return server, jax.tree.map(lambda leaf: np.asarray(leaf)[0], rows._replace(id=()))


def _filled(many: np.ndarray, row: np.ndarray) -> np.ndarray:
    if row.any():
        many[:] = row
    return many


def _files(folder: Path, first: Any) -> list[tuple[Path, np.ndarray]]:
    """Numbered, for two names may differ in what no file's name can hold"""
    named = [(jax.tree_util.keystr(path), leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(first)[0]]
    plain = ["".join(c if c.isalnum() else "_" for c in name) for name, _ in named]
    return [(folder / f"{i:03}{name}.npy", leaf) for i, (name, (_, leaf)) in enumerate(zip(plain, named))]


def _log(federation: Federation, server: Any, ids: np.ndarray, rows: PyTree, identity: dict[str, str]) -> None:
    """Before rows are written: if that is interrupted, `reopen` does it again.  float64 holds every other dtype."""
    if federation.folder is not None:
        history = {"ids": ids} | {f"rows {i}": leaf for i, leaf in enumerate(jax.tree.leaves(rows))}
        checkpoint.save(federation.folder / _SERVER, server, history, identity)


def members(key: Key, round: int, n: int, size: int) -> Int[np.ndarray, "m"]:
    """`size` of n clients in the cohort of a round, uniform without replacement, in ascending order; the work grows with `size`.

    >>> members(jax.random.key(0), 3, 100_000, 4).shape
    (4,)
    """
    words = np.asarray(jax.random.key_data(key)).ravel().tolist()
    rng = np.random.Generator(np.random.Philox(np.random.SeedSequence([*words, round])))
    return np.sort(rng.choice(n, size, replace=False, shuffle=False)).astype(np.int32)


def _size(algorithm: Algorithm, n: int, size: int | None) -> tuple[int, bool]:
    """The cohort's size, and whether it is a compressor's"""
    exchange = algorithm.exchange
    if exchange is None or exchange.server_step is None:
        raise ValueError(
            "algorithm: it does not exchange once a round, or its server makes more of the messages than a mean; allowed: clients.federated"
        )
    own = exchange.cohort_size
    if own is None and exchange.compressor is None:
        raise ValueError(
            "algorithm: neither cohorts of its own nor a compressor; absent clients would break its invariant.  Allowed: "
            "methods built with cohort=m, and those with a compressor"
        )
    if own is None and exchange.reduce is not None:
        raise ValueError(
            f"algorithm: {exchange.reduce.name} of a cohort of the compressor would not count the absent clients, who send 0; allowed: "
            "methods built with cohort=m, or reduce=None"
        )
    if own is not None and size not in (None, own):
        raise ValueError(f"size={size}, but the algorithm was built with cohort={own}")
    found = own if own is not None else size
    if found is None or not 1 <= found <= n:
        raise ValueError(f"size must be between 1 and the number of clients n = {n}, got {found}")
    return found, own is None


@cache
def cohort_step(algorithm: Algorithm, n: int, size: int | None = None) -> Callable[..., tuple[Any, Any, Metrics, Any]]:
    """(key, hparams, server, rows, batch) -> (server, rows, metrics, accepted), where rows (with their ids) and batch are the cohort's.

    The loss is the mean over the cohort; bits are means over all n clients.  `accepted` says of each member whether its message is
    `clients.acceptable`, and its loss finite.
    """
    m, joint = _size(algorithm, n, size)
    exchange = algorithm.exchange
    assert exchange is not None and exchange.server_step is not None
    server_step = exchange.server_step

    def step(key, hparams, server, rows, batch):
        key_round = jax.random.fold_in(key, server.round)
        key_message = jax.random.split(key_round)[1] if joint else key_round  # the one that `m_nice` gives to C

        def one(client, data):
            def send(x):
                value, bits = rounds.message_of(exchange, key_message, x, client.id, n)
                return Message(tree.scale(n / m, value) if joint else value, bits)

            return exchange.client_step(Round(key_round, client.id, n, send, run=key), hparams, server, client, data)

        rows, (value, bits), loss = jax.vmap(one)(rows, batch)
        accepted = jax.vmap(rounds.acceptable)(value) & jnp.isfinite(loss)
        value, loss = rounds.reduced(exchange.reduce, value, loss)
        value = tree.scale(m / n, value) if joint else value  # the others sent 0
        down = jnp.asarray(m / n * exchange.bits_down(server), bits.dtype)
        after = rounds.next_round(server, server_step(hparams, server, value))
        return after, rows, Metrics(loss, m / n * jnp.mean(bits), down), accepted

    return jax.jit(step)


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
    """`num_rounds` rounds; `fetch(ids)` gives the cohort's data with a leading axis, from wherever it is.

    The second result has one float64 entry a round.  What happens in round t depends on (key, t) only, as in `runner.run`.  An error
    or an interrupt on the way is a `StoppedError`, which has the federation as it is then.  So is a member's message that is not finite
    or absurdly large (`clients.acceptable`), and a model that is not finite: the cause is a `DivergedError` that names the clients and
    the round, and that round is not written.  A robust reducer leaves such messages out instead.

    A folder holds one run: another key, other hyperparameters or another program raise CheckpointError, and so does a second
    process.  SIGTERM and SIGINT wait for the running round, which the folder then holds, and act as usual (exit status 143,
    KeyboardInterrupt): continue with `reopen`.  A second signal acts at once.
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
                plain = True  # its error is raised as it is
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
            plain = True  # so is a signal's
            signals.act(f"{folder} is saved in round {int(server.round)}; reopen it to continue")
            plain = False
    except (Exception, KeyboardInterrupt) as error:
        if plain:
            raise
        if writing is not None:  # interrupted in the midst of it: again
            ids, rows, server, metrics = writing
            _put(store, ids, rows)
            seen.append(metrics)
        stopped = StoppedError(f"round {int(server.round)}: {type(error).__name__}: {error}")
        stopped.federation, stopped.metrics = Federation(server, store, n, folder), _columns(seen)
        raise stopped from error
    return Federation(server, store, n, folder), _columns(seen)


def _check_finite(algorithm: Algorithm, number: int, refused: np.ndarray, after: Any) -> None:
    """DivergedError for messages that a server would refuse, unless a reducer left them out, and for params that are not finite"""
    assert algorithm.exchange is not None
    if len(refused) and algorithm.exchange.reduce is None:
        raise DivergedError(
            f"round {number}: the messages or losses of clients {refused.tolist()} are not finite or too large (clients.acceptable)"
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
    """omega_ran = omega / n is what independence over clients gives, and no joint compressor has"""
    assert algorithm.exchange is not None
    compressor = algorithm.exchange.compressor
    if compressor is not None and n > 1:
        _, omega, omega_ran = compressor.constants(tree.size(server.params), n)
        if abs(omega_ran - omega / n) > 1e-9 * omega:
            raise ValueError(
                f"algorithm: {compressor.name} joins the clients (omega_ran = {omega_ran:g}, not omega / n = {omega / n:g}), and the "
                "absent ones would be missing; allowed: one that is independent over clients, as the C of m_nice(size, C)"
            )
