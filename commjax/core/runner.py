"""Run many rounds of an algorithm, on one device or on a mesh of devices.

run      all rounds as one compiled `scan`
sweep    several hyperparameters and keys at once: a `vmap` of `run`
loop     a long run as compiled chunks on the host, with evaluation, tracker, progress and checkpoints in between
"""

from collections import namedtuple
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jaxtyping import Array, PyTree

from commjax.core import checks, chunked, compiled, placement, rounds, shards, tree
from commjax.core.base import Algorithm, AxisName, Key, Metrics, State
from commjax.core.batches import BatchFn, full_batch, minibatches
from commjax.core.loop import DivergedError, Evaluate, History, drive
from commjax.core.records import Record, environment
from commjax.core.trackers import Tracker

__all__ = [
    "BatchFn",
    "DivergedError",
    "check_sweep",
    "full_batch",
    "loop",
    "minibatches",
    "observe",
    "run",
    "stack",
    "sweep",
]


def run(
    key: Key,
    algorithm: Algorithm,
    hparams: Any,
    state: State,
    data: PyTree,
    num_rounds: int,
    *,
    batch_fn: BatchFn = full_batch,
    axis_name: AxisName = None,
    mesh: Mesh | None = None,
    n: int | None = None,
) -> tuple[State, Any]:
    """Run `num_rounds` rounds as one compiled program.

    The arguments are validated first (`checks.entry`).  A run that diverges is not stopped (`loop` stops it).  The
    randomness of round t depends on (key, t) only, so 3 rounds followed by 4 rounds give the same as 7 rounds.

    Args:
        key: key of the run.
        algorithm: an algorithm of `commjax.algorithms`.
        hparams: hyperparameters of this algorithm.
        state: the result of `algorithm.init` or of an earlier run.
        data: pytree whose leaves have a leading client axis.
        num_rounds: number of rounds, at least 0.
        batch_fn: `full_batch`, `minibatches(size)`, or a function (key, ids [n], data) -> batch with a leading client
            axis.
        axis_name: the device axis, if `run` is called inside `shard_map` or `pmap`.
        mesh: mesh of `devices.mesh.client_mesh`, over which the clients are split; None is one device.  Rows are padded
            once, and the trajectory is the same up to rounding.
        n: number of clients, if rows were padded already (with `mesh` only): the rows from n on are padding.  None:
            all rows are clients.

    Returns:
        The state after the last round, with as many rows as were given, and `Metrics` (with more fields after
        `observe`) whose leaves have one row per round.
    """
    if mesh is not None:
        shards.check_mesh(mesh)
    elif n is not None:
        raise ValueError(f"n={n} without a mesh; allowed: n with mesh=, for rows that are padded")
    clients = rounds.count(_ids(state), axis_name) if mesh is None else n
    checks.entry(key, algorithm, hparams, state, num_rounds, n=clients)
    return compiled.compiled_run(
        key, algorithm, hparams, state, data, num_rounds, batch_fn=batch_fn, axis_name=axis_name, mesh=mesh, n=n
    )


def _ids(state: Any) -> Any:
    """The client ids of a state.  They are empty if `state` is no State, which `checks.entry` then reports."""
    return getattr(getattr(state, "clients", None), "id", np.zeros(0, np.int32))


def sweep(
    keys: Key,
    algorithm: Algorithm,
    hparams: Any,
    state: State,
    data: PyTree,
    num_rounds: int,
    *,
    batch_fn: BatchFn = full_batch,
    at_once: int | None = None,
    mesh: Mesh | None = None,
) -> tuple[State, Any]:
    """Run every setting of `hparams` with every key, as one compiled program that reads the data once.

    Args:
        keys: s keys, as of `jax.random.split`.
        algorithm: an algorithm of `commjax.algorithms`.
        hparams: hyperparameters whose leaves have a leading axis of h settings, as `stack` makes them.
        state: the state with which every run begins.
        data: pytree whose leaves have a leading client axis.
        num_rounds: number of rounds, at least 0.
        batch_fn: as that of `run`.
        at_once: number of settings of one key that one device computes in parallel; None is all settings and keys.  A
            small number takes less memory.  If the settings are sorted by the length of their inner loops, short ones
            do not wait for long ones.
        mesh: mesh of `devices.mesh.client_mesh`, over which the settings are split; each device has all clients.
            Device j of p gets the settings j, j + p, j + 2p, ..., so if the settings are sorted by their work, all
            devices get about the same.  No device waits for the inner loops of another.

    Returns:
        The states and the metrics of `run`, with leading axes [h, s].
    """
    settings = check_sweep(hparams, keys, at_once)
    checks.entry(keys, algorithm, hparams, state, num_rounds, swept=True)
    if mesh is None:
        states = tree.repeat(tree.repeat(state, len(keys)), settings)
        return compiled.compiled_sweep(
            keys, algorithm, hparams, states, data, num_rounds, batch_fn=batch_fn, at_once=at_once
        )
    shards.check_mesh(mesh)
    place = placement.Settings(mesh, settings, len(keys))
    inputs = keys, algorithm, place.deal(hparams), place.start(state), place.data(data), num_rounds
    return place.whole(compiled.compiled_sweep(*inputs, batch_fn=batch_fn, at_once=at_once, mesh=mesh))


def check_sweep(hparams: Any, keys: Key, at_once: int | None = None) -> int:
    """Validate the arguments of a sweep and count its settings.

    Args:
        hparams: hyperparameters, all leaves with the same leading axis of settings.
        keys: a vector of typed keys.
        at_once: at least 1, or None.

    Returns:
        The number of settings.  Raises a ValueError or TypeError if an argument is not allowed.
    """
    if at_once is not None and at_once < 1:
        raise ValueError(f"at_once={at_once}; allowed: at least 1, or None for all settings and keys")
    shapes = [jnp.shape(leaf) for leaf in jax.tree.leaves(hparams)]
    if len({shape[:1] for shape in shapes}) != 1 or not shapes[0]:
        raise ValueError(
            f"hparams has leaves of shapes {shapes}; allowed: one leading axis for all, as `runner.stack` makes it"
        )
    checks.key_of(keys, swept=True)
    return shapes[0][0]


@cache
def _metrics_type(fields: tuple[str, ...]) -> Any:
    return namedtuple("Metrics", fields)  # pyright: ignore[reportUntypedNamedTuple]


def observe(algorithm: Algorithm, **measures: Callable[[State, PyTree], Array]) -> Algorithm:
    """Add metrics to an algorithm.

    If a measure and the step compute the same thing, such as a gradient, the compiler computes it once.

    Args:
        algorithm: the algorithm.
        **measures: by name, functions (state, batch) -> array of the state with which a round begins.  Under
            `shard_map` or `pmap` a measure sees the clients of its own device only.

    Returns:
        The algorithm, whose metrics have one more field for each measure.
    """

    def step(key: Key, hparams: Any, state: State, batch: PyTree, *, axis_name: AxisName = None) -> tuple[State, Any]:
        seen = {name: measure(state, batch) for name, measure in measures.items()}
        state, metrics = algorithm.step(key, hparams, state, batch, axis_name=axis_name)
        return state, _metrics_type((*metrics._fields, *measures))(*metrics, *seen.values())

    return algorithm._replace(step=step)


def stack(trees: Sequence[Any]) -> Any:
    """Stack pytrees of equal structure along a new leading axis, for `sweep`.

    Args:
        trees: the pytrees, such as one HParams for each setting.

    Returns:
        One pytree whose leaves have a leading axis of length `len(trees)`.

    >>> stack([(1.0, 2.0), (3.0, 4.0)])[0].tolist()
    [1.0, 3.0]
    """
    return jax.tree.map(lambda *leaves: jnp.stack([jnp.asarray(leaf) for leaf in leaves]), *trees)


def loop(
    key: Key,
    algorithm: Algorithm,
    hparams: Any,
    state: State,
    data: PyTree,
    num_rounds: int,
    *,
    batch_fn: BatchFn = full_batch,
    chunk: int = 100,
    evaluate: Evaluate | None = None,
    checkpoint: str | Path | None = None,
    tracker: Tracker | None = None,
    config: dict[str, Any] | None = None,
    bits_init: float | int = 0.0,
    label: str = "rounds",
    progress: bool = True,
    at_once: int | None = None,
    mesh: Mesh | None = None,
    n: int | None = None,
) -> tuple[State, Record]:
    """Run up to round `num_rounds` in compiled chunks; evaluate, show progress and save a checkpoint after each chunk.

    If the checkpoint exists, the run continues from it, on the same devices bit for bit as if it had never stopped.  It
    may continue on another number of devices or processes: the identity of a run does not depend on them.  A checkpoint
    of another program, first state, data, key or hparams is refused.  A second process that writes the same checkpoint
    is refused.  SIGTERM and SIGINT wait until the running chunk is finished and saved, and then act as usual (exit
    status 143, KeyboardInterrupt).  A second signal acts immediately.

    With a vector of keys this is a `sweep` in chunks: hparams have a leading axis, metrics have axes [h, s, round],
    `evaluate` gets all states at once, and a setting that diverges does not stop the others.

    If the devices of `mesh` belong to several processes, every process makes the same call, with a state of
    `devices.hosts.init` and data of `devices.hosts.rows`.  Process 0 reads and writes the checkpoint, calls the tracker
    and shows progress.  If one process receives a signal, all processes end after the same chunk.

    Args:
        key: key of the run, or a vector of s keys for a sweep.
        algorithm: an algorithm of `commjax.algorithms`.
        hparams: hyperparameters of this algorithm; in a sweep with a leading axis of h settings.
        state: the result of `algorithm.init` or of an earlier run.
        data: pytree whose leaves have a leading client axis.
        num_rounds: number of the round at which the run ends, counted from the first round of `algorithm.init`.
        batch_fn: as that of `run`.
        chunk: number of rounds in a compiled chunk.
        evaluate: (state) -> dictionary of numbers (in a sweep: arrays [h, s]), called before the first round and after
            each chunk with all clients and no padding.  The next chunk overwrites the state, so `evaluate` must not
            keep it.
        checkpoint: file of the checkpoint; None writes none.
        tracker: gets the metrics and evaluations of each round, as `trackers.json_lines(path)` does.
        config: settings to store in the record, besides `num_rounds` and `hparams`.
        bits_init: bits that one client sent before the first round, for the record.
        label: text of the progress bar.
        progress: whether to show the progress bar.
        at_once: as that of `sweep`.
        mesh: mesh of `devices.mesh.client_mesh`: the clients (in a sweep: the settings) are split over it; None is one
            device.
        n: number of clients if state and data have padded rows, as those of `devices.hosts` have.

    Returns:
        The last state, with as many rows as were given, and the record of the run.  Raises a `DivergedError` if the
        loss or the params are not finite; the last good checkpoint is kept.
    """
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")
    swept = checks.typed_key(key) and key.ndim == 1
    if at_once is not None and not (swept and at_once >= 1):
        raise ValueError(f"at_once={at_once}; allowed: at least 1, with an array of keys")
    settings = check_sweep(hparams, key) if swept else 0
    checks.entry(key, algorithm, hparams, state, num_rounds, n=n, swept=swept)
    inputs = chunked.RunInputs(key, algorithm, hparams, state, data, batch_fn, settings)
    place, clients = chunked.placed(inputs, mesh, n)
    like, identity = (None, {}) if checkpoint is None else chunked.identified(inputs, clients)
    path = None if checkpoint is None else Path(checkpoint)
    job = chunked.ChunkedRun(place, chunked.chunks(inputs, place, at_once), path, identity, hparams, swept)
    loaded = job.load(like)
    history = History(loaded[1] if loaded else None, swept=swept)
    last = place.restore(loaded[0]) if loaded else place.start(state)
    done = int(np.max(shards.to_host(last.server.round)))
    if done > num_rounds:
        raise ValueError(f"num_rounds is {num_rounds}, but {checkpoint or 'the state'} is in round {done} already")
    last = drive(
        job,
        last,
        history,
        (done, num_rounds),
        chunk=chunk,
        evaluate=evaluate,
        tracker=tracker,
        label=label,
        progress=progress,
    )
    if swept or len(state.clients.id) == clients:
        last = place.whole(last)  # as many rows as were given
    devices = {} if mesh is None else {"devices": mesh.size, "processes": jax.process_count()}
    settings_of_run = {"num_rounds": num_rounds, "hparams": hparams, **devices, **(config or {})}
    metrics = {name: np.zeros(0) for name in Metrics._fields} | history.metrics()
    return last, Record(settings_of_run, environment(), metrics, history.evaluations(), float(bits_init))
