"""Many clients, few at a time: their rows live on the host, in memory or in files, and only a cohort's go to the device.

Memory and time of a round depend on the cohort, not on n.  A cohort is not free (gathering m of n rows breaks an invariant such as
h = mean_i h_i), so it is open to two kinds of methods only:
    those that have cohorts of their own (`fedavg(..., cohort=m)`, `scaffold(..., cohort=m)`), and
    those whose theory speaks of any compressor (`ef_bv`): there a cohort of m is the compressor m-nice(m, C), whose absent clients
    send 0 and keep their h_i.  C must be independent over clients.  Tune with `compressors.m_nice(m, C).constants(d, n)`.
"""

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Int, PyTree

from commjax import checkpoint, checks, clients, tree
from commjax.base import Algorithm, Key, Message, Metrics, Params, Round
from commjax.runner import DivergedError

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
    if folder.exists() and any(folder.iterdir()):
        raise ValueError(f"folder: {folder} is not empty; allowed: a new one (to go on with this one, see reopen)")
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        _filled(np.lib.format.open_memmap(path, "w+", row.dtype, (n, *row.shape)), row)
        for path, row in _files(folder, first)
    ]
    federation = Federation(server, jax.tree.unflatten(jax.tree.structure(first), rows), n, folder)
    _log(
        federation, server, np.zeros(0, np.int32), jax.tree.map(lambda row: np.zeros((0, *row.shape), row.dtype), first)
    )
    return federation


def reopen(algorithm: Algorithm, params: Params, n: int, folder: str | Path, **per_client: Any) -> Federation:
    """What `start` made in `folder` with these arguments, as the last whole round left it, also where the process was killed in the
    midst of one (after a power cut, rows may be older than their server)."""
    folder, (server, first) = Path(folder), _first(algorithm, params, n, per_client)
    server, log = checkpoint.load(folder / _SERVER, server, {"n": str(n)})
    rows = []
    for path, row in _files(folder, first):
        found = np.lib.format.open_memmap(path, "r+")
        if found.dtype == np.dtype((np.void, row.dtype.itemsize)):  # a file does not know bfloat16
            found = found.view(row.dtype)
        if (found.shape, found.dtype) != ((n, *row.shape), row.dtype):
            raise ValueError(f"{path} is {found.dtype}{list(found.shape)}, expected {row.dtype}{[n, *row.shape]}")
        rows.append(found)
    federation = Federation(server, jax.tree.unflatten(jax.tree.structure(first), rows), n, folder)
    _put(federation.rows, log["ids"].astype(np.int32), [log[f"rows {i}"] for i in range(len(rows))])
    return federation


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


def _log(federation: Federation, server: Any, ids: np.ndarray, rows: PyTree) -> None:
    """Before rows are written: if that is interrupted, `reopen` does it again.  float64 holds every other dtype."""
    if federation.folder is not None:
        history = {"ids": ids} | {f"rows {i}": leaf for i, leaf in enumerate(jax.tree.leaves(rows))}
        checkpoint.save(federation.folder / _SERVER, server, history, {"n": str(federation.n)})


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
                value, bits = clients.message_of(exchange, key_message, x, client.id, n)
                return Message(tree.scale(n / m, value) if joint else value, bits)

            return exchange.client_step(Round(key_round, client.id, n, send, run=key), hparams, server, client, data)

        rows, (value, bits), loss = jax.vmap(one)(rows, batch)
        accepted = jax.vmap(clients.acceptable)(value) & jnp.isfinite(loss)
        value, loss = clients.reduced(exchange.reduce, value, loss)
        value = tree.scale(m / n, value) if joint else value  # the others sent 0
        down = jnp.asarray(m / n * exchange.bits_down(server), bits.dtype)
        after = clients.next_round(server, server_step(hparams, server, value))
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
    """
    server, store, n, folder = federation
    m, _ = _size(algorithm, n, size)
    _check_independent(algorithm, server, n)
    checks.key_of(key)
    checks.rounds_of(num_rounds)
    checks.server_of(algorithm, server)
    checks.hparams_of(algorithm, hparams, n)
    step = cohort_step(algorithm, n, size)
    first, seen, writing = int(server.round), [], None
    try:
        for number in range(first, first + num_rounds):
            ids = draw(key, number, n, m)
            rows = jax.tree.map(lambda leaf, ids=ids: leaf[ids], store)._replace(id=ids)
            after, rows, metrics, accepted = step(key, hparams, server, rows, fetch(ids))
            _check_finite(algorithm, number, ids[~np.asarray(accepted)], after)
            rows = jax.device_get(rows._replace(id=()))
            _log(federation, after, ids, rows)
            writing = (ids, rows, after, metrics)
            _put(store, ids, rows)
            server, writing = after, None
            seen.append(metrics)
    except (Exception, KeyboardInterrupt) as error:
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
