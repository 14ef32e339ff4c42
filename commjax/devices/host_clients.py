"""More clients than fit on a device: rows stay on the host, and only those of a round's cohort go to the device.

The rows are in memory or in files.  Memory and time of a round depend on the size of the cohort, not on n.

If only m of n clients take part, an invariant such as h = mean_i h_i may break.  Two kinds of methods are allowed:

- methods with cohorts (`fedavg(..., cohort=m)`, `scaffold(..., cohort=m)`);
- methods whose theory holds for any compressor C (`ef_bv`).  A cohort of m is then the compressor m-nice(m, C): absent
  clients send 0 and keep their h_i.  C must be independent over clients.  Choose the stepsizes with the constants
  `compressors.m_nice(m, C).constants(d, n)`.
"""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Int, PyTree

from commjax.core import checks, rounds, tree
from commjax.core.base import Algorithm, Exchange, Key, Message, Metrics, State
from commjax.core.loop import DivergedError, History, drive
from commjax.core.trackers import Tracker
from commjax.devices import host_storage
from commjax.devices.host_storage import SERVER, Federation, reopen, start

__all__ = ["Draw", "Federation", "Fetch", "StoppedError", "cohort_step", "members", "reopen", "run", "start"]


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
    """Return the size of the cohort, and whether it comes from a compressor (m-nice) instead of the method."""
    exchange = algorithm.exchange
    if exchange is None or exchange.server_step is None:
        raise ValueError(
            "algorithm: it does not exchange once a round, or its server makes more of the messages than a mean; "
            "allowed: rounds.federated"
        )
    built_size = exchange.cohort_size
    if built_size is None and exchange.compressor is None:
        raise ValueError(
            "algorithm: neither cohorts of its own nor a compressor; absent clients would break its invariant.  "
            "Allowed: methods built with cohort=m, and those with a compressor"
        )
    if built_size is None and exchange.reduce is not None:
        raise ValueError(
            f"algorithm: {exchange.reduce.name} of a cohort of the compressor would not count the absent clients, who "
            "send 0; allowed: methods built with cohort=m, or reduce=None"
        )
    if built_size is not None and size not in (None, built_size):
        raise ValueError(f"size={size}, but the algorithm was built with cohort={built_size}")
    chosen = built_size if built_size is not None else size
    if chosen is None or not 1 <= chosen <= n:
        raise ValueError(f"size must be between 1 and the number of clients n = {n}, got {chosen}")
    return chosen, built_size is None


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


@runtime_checkable
class Fetch(Protocol):
    """Loads the data of a cohort."""

    def __call__(self, ids: Int[np.ndarray, "m"], /) -> PyTree:
        """Return the data of the clients `ids`, with a leading axis of m."""
        ...


@runtime_checkable
class Draw(Protocol):
    """Draws the cohort of a round."""

    def __call__(self, key: Key, round: int, n: int, size: int, /) -> Int[np.ndarray, "m"]:
        """Return the ids of the members, in ascending order."""
        ...


class _Cohorts:
    """The job of `run`: a chunk is the round of one cohort, and saving is writing its rows.

    Attributes:
        federation: the federation after the last whole round.
        saved: whether everything is saved, so that an exception needs no `StoppedError`.
    """

    def __init__(
        self, key: Key, algorithm: Algorithm, hparams: Any, federation: Federation, fetch: Fetch, draw: Draw
    ) -> None:
        self.inputs, self.algorithm, self.fetch, self.draw = (key, hparams), algorithm, fetch, draw
        self.federation, self.writes, self.saved = federation, True, True
        self.path = None if federation.folder is None else federation.folder / SERVER
        self.size: int | None = None
        self.identity: dict[str, str] | None = None
        self.cohort: Any = ()  # ids, new rows, and whether each message is accepted
        self.logged: Federation | None = None  # the federation whose new rows are in the server file only

    def advance(self, state: Federation, length: int) -> tuple[Federation, Metrics]:
        """Run the round of one cohort."""
        (key, hparams), first = self.inputs, self.identity is None
        if self.identity is None:
            self.identity = host_storage.run_identity(state, key, hparams)
        m, _ = _size(self.algorithm, state.n, self.size)
        ids = _members_of(self.draw(key, int(state.server.round), state.n, m), state.n, m)
        self.saved = False
        rows = jax.tree.map(lambda leaf: leaf[ids], state.rows)._replace(id=ids)
        step, inputs = cohort_step(self.algorithm, state.n, self.size), (state.server, rows, self.fetch(ids))
        if first and self.path is not None:
            self.saved = True  # nothing is written yet: the error of another run is raised as it is
            self.identity = host_storage.program_identity(self.path, self.identity, step, (key, hparams, *inputs))
            self.saved = False
        server, rows, metrics, accepted = step(key, hparams, *inputs)
        self.cohort = ids, rows._replace(id=()), accepted
        return state._replace(server=server), jax.tree.map(lambda value: value[None], metrics)

    def check(self, state: Federation, metrics: Mapping[str, np.ndarray], start: int) -> None:
        """Raise a DivergedError that names the clients if a message is not acceptable or the model is not finite."""
        ids, _, accepted = self.cohort
        _check_finite(self.algorithm, start, ids[~np.asarray(accepted)], state.server)

    def whole(self, state: Federation) -> Federation:
        """The federation itself."""
        return state

    def save(self, state: Federation, history: History) -> None:
        """Write the server with the new rows, then the rows to their places."""
        ids, rows, accepted = self.cohort
        rows = jax.device_get(rows)
        host_storage.log(state, ids, rows, self.identity or {})
        self.cohort, self.logged = (ids, rows, accepted), state
        host_storage.put(state.rows, ids, rows)
        self.federation, self.logged, self.saved = state, None, self.path is not None

    def agreed(self, signum: int | None) -> int | None:
        """The signal of this process."""
        return signum

    def resume_text(self, done: int) -> str:
        """One line that says how to continue the run."""
        return f"{self.federation.folder} is saved in round {done}; reopen it to continue"

    def last_whole(self) -> Federation:
        """The federation after the last whole round; rows that were being written are written again."""
        if self.logged is not None:
            host_storage.put(self.logged.rows, *self.cohort[:2])
            self.federation = self.logged
        return self.federation


def run(
    key: Key,
    algorithm: Algorithm,
    hparams: Any,
    federation: Federation,
    fetch: Fetch,
    num_rounds: int,
    *,
    size: int | None = None,
    draw: Draw = members,
    tracker: Tracker | None = None,
    progress: bool = False,
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
        tracker: gets the metrics of each round, as that of `runner.loop`.
        progress: whether to show a progress bar.

    Returns:
        The federation after the last round, and metrics with one float64 entry per round.
    """
    _size(algorithm, federation.n, size)
    _check_independent(algorithm, federation.server, federation.n)
    checks.key_of(key)
    checks.rounds_of(num_rounds)
    checks.server_of(algorithm, federation.server)
    checks.hparams_of(algorithm, hparams, federation.n)
    job, history, first = _Cohorts(key, algorithm, hparams, federation, fetch, draw), History(), federation.server.round
    job.size, first = size, int(first)
    try:
        drive(job, federation, history, (first, first + num_rounds), tracker=tracker, progress=progress)
    except (Exception, KeyboardInterrupt) as error:
        if job.saved:
            raise
        last = job.last_whole()
        done = int(last.server.round)
        stopped = StoppedError(f"round {done}: {type(error).__name__}: {error}")
        stopped.federation, stopped.metrics = last, _metrics(history, done - first)
        raise stopped from error
    return job.federation, _metrics(history, num_rounds)


def _metrics(history: History, number: int) -> Metrics:
    """The metrics of the first rounds, in float64."""
    columns: Any = [history.arrays().get(name, np.zeros(0))[:number] for name in Metrics._fields]
    return Metrics(*columns)


def _members_of(ids: Any, n: int, size: int) -> np.ndarray:
    """The ids of a cohort as `draw` returned them.  Raises a ValueError unless they are `size` different clients."""
    ids = np.asarray(ids)
    integers = ids.ndim == 1 and np.issubdtype(ids.dtype, np.integer)
    if not integers or len(np.unique(ids)) != size or len(ids) != size or ids.min() < 0 or ids.max() >= n:
        raise ValueError(f"draw returned {ids.tolist()}; allowed: {size} different client numbers from 0 to {n - 1}")
    return ids


def _check_finite(algorithm: Algorithm, number: int, refused: np.ndarray, after: Any) -> None:
    """Raise a DivergedError if messages were refused and no robust reducer is set, or if params are not finite."""
    assert algorithm.exchange is not None
    if len(refused) and algorithm.exchange.reduce is None:
        raise DivergedError(
            f"round {number}: the messages or losses of clients {refused.tolist()} are not finite or too large "
            "(rounds.acceptable)"
        )
    if not checks.finite_tree(after.params):
        raise DivergedError(f"round {number}: the server's params are not finite")


def _check_independent(algorithm: Algorithm, server: Any, n: int) -> None:
    """Raise a ValueError for a compressor that is not independent over clients: its omega_ran is not omega / n."""
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
