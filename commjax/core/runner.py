"""Run many rounds of an algorithm.

run      all rounds as one compiled `scan`
sweep    several hyperparameters and keys at once: a `vmap` of `run`
loop     a long run as compiled chunks on the host, with evaluation, progress and checkpoints in between
"""

import re
from collections import namedtuple
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PyTree, Shaped

from commjax.core import checkpoint as checkpoints
from commjax.core import checks, local, rounds, tree
from commjax.core.base import Algorithm, AxisName, Key, Metrics, State
from commjax.core.progress import progress_bar
from commjax.core.records import Record, environment

# (key, ids [n], data with a leading client axis) -> batch with a leading client axis
BatchFn = Callable[[Key, Shaped[Array, "n"], PyTree], PyTree]


class DivergedError(FloatingPointError):
    """The loss or the parameters of a run are no longer finite."""


def full_batch(key: Key, ids: Shaped[Array, "n"], data: PyTree) -> PyTree:
    """Use all data in every round, for exact gradients."""
    return data


def minibatches(size: int) -> BatchFn:
    """Draw a `local.minibatch(size)` for each client in every round, the same on any number of devices.

    Args:
        size: rows of a minibatch, at most the number of rows of each client.  Padding counts as rows here.

    Returns:
        A `batch_fn` for `run`.  It raises a ValueError if the data has fewer than `size` rows.
    """
    draw = local.minibatch(size)

    def batch(key, ids, data):
        checks.minibatch_of(size, data)
        return jax.vmap(lambda id, rows: draw(jax.random.fold_in(key, id), rows))(ids, data)

    return batch


def _rounds(key, algorithm, hparams, state, data, num_rounds, batch_fn=full_batch, axis_name=None):
    """`run` without its checks, not compiled."""
    key_step, key_batch = jax.random.split(key)

    def one_round(state, _):
        batch = batch_fn(jax.random.fold_in(key_batch, state.server.round), state.clients.id, data)
        after, metrics = algorithm.step(key_step, hparams, state, batch, axis_name=axis_name)
        return after._replace(server=rounds.next_round(state.server, after.server)), metrics

    return jax.lax.scan(one_round, state, None, length=num_rounds)


_STATIC = ("algorithm", "num_rounds", "batch_fn", "axis_name")
# `run` without its checks, with the methods `trace` and `lower` of a jitted function.
compiled_run = jax.jit(_rounds, static_argnames=_STATIC)


def run(
    key: Key,
    algorithm: Algorithm,
    hparams: Any,
    state: State,
    data: PyTree,
    num_rounds: int,
    batch_fn: BatchFn = full_batch,
    axis_name: AxisName = None,
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

    Returns:
        The state after the last round, and `Metrics` (with more fields after `observe`) whose leaves have one row per
        round.
    """
    checks.entry(key, algorithm, hparams, state, num_rounds, n=rounds.count(_ids(state), axis_name))
    return compiled_run(key, algorithm, hparams, state, data, num_rounds, batch_fn, axis_name)


def _ids(state: Any) -> Any:
    """The client ids of a state.  They are empty if `state` is no State, which `checks.entry` then reports."""
    return getattr(getattr(state, "clients", None), "id", np.zeros(0, np.int32))


def _sweep_rounds(keys, algorithm, hparams, states, data, num_rounds, batch_fn, at_once=None):
    ids = states.clients.id[0, 0]

    def from_round(round, number):
        # All runs are in the same round and have the same clients.  With one shared round and id array, the compiler
        # computes what depends on key and round only (coins, cohorts and their data, candidates) once for all hparams.
        def one(key, hparams, state):
            state = State(state.server._replace(round=round), state.clients._replace(id=ids))
            return compiled_run(key, algorithm, hparams, state, data, number, batch_fn)

        return one

    if at_once is None:
        seeds = jax.vmap(from_round(states.server.round[0, 0], num_rounds), in_axes=(0, None, 0))
        return jax.vmap(seeds, in_axes=(None, 0, 0))(keys, hparams, states)

    # The outer loops go over rounds and keys: what depends on these two only is computed once for all settings and
    # stays in the cache.
    def one_round(states, _):
        one = from_round(states.server.round[0, 0], 1)

        def of_key(inputs):
            key, states = inputs
            return jax.lax.map(lambda inputs: one(key, *inputs), (hparams, states), batch_size=at_once)

        return jax.lax.map(of_key, (keys, states))

    def swapped(rows):
        return jax.tree.map(lambda leaf: jnp.swapaxes(leaf, 0, 1), rows)

    states, metrics = jax.lax.scan(one_round, swapped(states), None, length=num_rounds)
    return swapped(states), swapped(jax.tree.map(lambda leaf: jnp.moveaxis(leaf[:, :, :, 0], 0, 2), metrics))


_sweep_from = jax.jit(_sweep_rounds, static_argnames=("algorithm", "num_rounds", "batch_fn", "at_once"))

# For `loop`, which owns its states: a chunk overwrites the state that it began with, so the n x d shifts are in memory
# once.
_run_in_place = jax.jit(
    _rounds,
    static_argnames=_STATIC,
    donate_argnames="state",
)
_sweep_in_place = jax.jit(
    _sweep_rounds,
    static_argnames=("algorithm", "num_rounds", "batch_fn", "at_once"),
    donate_argnames="states",
)


def sweep(
    keys: Key,
    algorithm: Algorithm,
    hparams: Any,
    state: State,
    data: PyTree,
    num_rounds: int,
    batch_fn: BatchFn = full_batch,
    at_once: int | None = None,
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
        at_once: number of settings of one key that are computed in parallel; None is all settings and keys.  A small
            number takes less memory.  If the settings are sorted by the length of their inner loops, short ones do not
            wait for long ones.

    Returns:
        The states and the metrics of `run`, with leading axes [h, s].
    """
    settings = check_sweep(hparams, keys, at_once)
    checks.entry(keys, algorithm, hparams, state, num_rounds, swept=True)
    states = tree.repeat(tree.repeat(state, len(keys)), settings)
    return _sweep_from(keys, algorithm, hparams, states, data, num_rounds, batch_fn, at_once)


def check_sweep(hparams: Any, keys: Key, at_once: int | None = None) -> int:
    """Validate the arguments of a sweep and count its settings.

    Args:
        hparams: hyperparameters, all leaves with the same leading axis of settings.
        keys: a vector of typed keys.
        at_once: at least 1, or None.

    Returns:
        The number of settings.  ValueError or TypeError if an argument is not allowed.
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
    return namedtuple("Metrics", fields)


def observe(algorithm: Algorithm, **measures: Callable[[State, PyTree], Array]) -> Algorithm:
    """Add metrics to an algorithm.

    If a measure and the step compute the same thing, such as a gradient, the compiler computes it once.

    Args:
        algorithm: the algorithm.
        **measures: by name, functions (state, batch) -> array of the state with which a round begins.  Under
            `shard_map` or `pmap` a measure sees the clients of its own device only.

    Returns:
        The algorithm whose metrics have a field more for each measure.
    """

    def step(key, hparams, state, batch, *, axis_name=None):
        seen = {name: measure(state, batch) for name, measure in measures.items()}
        state, metrics = algorithm.step(key, hparams, state, batch, axis_name=axis_name)
        return state, _metrics_type((*metrics._fields, *measures))(*metrics, *seen.values())

    return algorithm._replace(step=step)


def stack(trees: list[Any]) -> Any:
    """Stack pytrees of equal structure along a new leading axis, for `sweep`.

    Args:
        trees: the pytrees, such as one HParams for each setting.

    Returns:
        One pytree whose leaves have a leading axis of length `len(trees)`.

    >>> stack([(1.0, 2.0), (3.0, 4.0)])[0].tolist()
    [1.0, 3.0]
    """
    return jax.tree.map(lambda *leaves: jnp.stack([jnp.asarray(leaf) for leaf in leaves]), *trees)


def first_bad_round(metrics: dict[str, np.ndarray], state: State, start: int) -> int | None:
    """Find the first round with a loss that is not finite.

    Args:
        metrics: has `loss`, one number for each round from `start` on.
        state: state after the last of these rounds.
        start: number of the first of these rounds.

    Returns:
        The number of the first round whose loss is not finite.  If all losses are finite and the params of `state` are
        not, the number of the round after the last.  None if all are finite.
    """
    bad = np.flatnonzero(~np.isfinite(metrics["loss"]))
    if len(bad):
        return start + int(bad[0])
    return None if checks.finite_tree(state.server.params) else start + len(metrics["loss"])


def program(jaxpr) -> tuple[str, list[Any]]:
    """Identify a traced program, for the identity of a checkpoint.

    Two methods may have equal states and hparams and differ in a compressor only; then their programs differ.

    Args:
        jaxpr: the closed jaxpr of the program.

    Returns:
        Its text and its constants.  Memory addresses are removed from the text, because they change from process to
        process.
    """
    return re.sub(r"0x[0-9a-f]+", "", str(jaxpr)), list(jaxpr.consts)


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
    evaluate: Callable[[State], dict[str, Any]] | None = None,
    checkpoint: str | Path | None = None,
    config: dict[str, Any] | None = None,
    bits_init: float | int = 0.0,
    label: str = "rounds",
    progress: bool = True,
    at_once: int | None = None,
) -> tuple[State, Record]:
    """Run up to round `num_rounds` in compiled chunks; evaluate, show progress and save a checkpoint after each chunk.

    If the checkpoint exists, the run continues from it, bit for bit as if it had never stopped.  A checkpoint of
    another program, first state, data, key or hparams is refused.  A second process that writes the same checkpoint is
    refused.  SIGTERM and SIGINT wait until the running chunk is finished and saved, and then act as usual (exit status
    143, KeyboardInterrupt).  A second signal acts immediately.

    With a vector of keys this is a `sweep` in chunks: hparams have a leading axis, metrics have axes [h, s, round],
    `evaluate` gets all states at once, and a setting that diverges does not stop the others.

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
            each chunk.  The next chunk overwrites the state, so `evaluate` must not keep it.
        checkpoint: file of the checkpoint; None writes none.
        config: settings to store in the record, besides `num_rounds` and `hparams`.
        bits_init: bits that one client sent before the first round, for the record.
        label: text of the progress bar.
        progress: whether to show the progress bar.
        at_once: as that of `sweep`.

    Returns:
        The last state, and the record of the run.  `DivergedError` if the loss or the params are not finite; the last
        good checkpoint is kept.
    """
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")
    swept = checks.typed_key(key) and key.ndim == 1
    if at_once is not None and not (swept and at_once >= 1):
        raise ValueError(f"at_once={at_once}; allowed: at least 1, with an array of keys")
    many = check_sweep(hparams, key) if swept else 0
    checks.entry(key, algorithm, hparams, state, num_rounds, swept=swept)
    advance_by = partial(_sweep_in_place, at_once=at_once) if swept else _run_in_place
    state = jax.tree.map(
        jnp.array, tree.repeat(tree.repeat(state, len(key)), many) if swept else state
    )  # a copy: chunks overwrite it
    history: dict[str, np.ndarray] = {}
    if checkpoint is not None:
        strong = jax.tree.map(np.asarray, hparams)
        traced = (_sweep_from if swept else compiled_run).trace(key, algorithm, strong, state, data, 1, batch_fn)
        identity = checkpoints.fingerprint(key, hparams, start=state, data=data, program=program(traced.jaxpr))
        if Path(checkpoint).exists():
            state, history = checkpoints.load(checkpoint, state, identity)
    done = int(jnp.max(state.server.round))
    if done > num_rounds:
        raise ValueError(f"num_rounds is {num_rounds}, but {checkpoint or 'the state'} is in round {done} already")

    def extend(name: str, values: np.ndarray) -> None:
        if values.ndim not in ((1, 3) if swept else (1,)):
            raise ValueError(f"{name} must be one number a time (in a sweep: [h, s] of them), got shape {values.shape}")
        history[name] = np.concatenate([history[name], values], axis=-1) if name in history else values

    def evaluated() -> None:
        if evaluate is None:
            return
        values = evaluate(state)
        if "round" in values:
            raise ValueError("evaluate must not return 'round', which is kept beside its values")
        for name, value in {**values, "round": done}.items():
            extend(f"eval/{name}", np.asarray(value, np.float64)[..., None])

    if not history:
        evaluated()
    written = checkpoint if done < num_rounds else None
    with checkpoints.writing(written) as signals, progress_bar(label, num_rounds, done, enabled=progress) as advance:
        while done < num_rounds:
            length = min(chunk, num_rounds - done)
            state, metrics = advance_by(key, algorithm, hparams, state, data, length, batch_fn)
            signals.wait(metrics)
            rows = {name: np.asarray(values, np.float64) for name, values in metrics._asdict().items()}
            bad = None if swept else first_bad_round(rows, state, done)
            if bad is not None:
                kept = f"; {checkpoint} is that of round {done}" if checkpoint and Path(checkpoint).exists() else ""
                raise DivergedError(f"the loss is not finite in round {bad} with {hparams}{kept}")
            for name, values in rows.items():
                extend(name, values)
            done += length
            evaluated()
            if checkpoint is not None:
                checkpoints.save(checkpoint, state, history, identity)
            advance(done, {"loss": float(rows["loss"][..., -1].mean())})
            signals.act(f"{checkpoint} is saved in round {done}; the same call continues there")
    history = {name: np.zeros(0) for name in Metrics._fields if name not in history} | history
    per_round = {name: values for name, values in history.items() if not name.startswith("eval/")}
    evaluations = {name.removeprefix("eval/"): values for name, values in history.items() if name.startswith("eval/")}
    settings = {"num_rounds": num_rounds, "hparams": hparams, **(config or {})}
    return state, Record(settings, environment(), per_round, evaluations, float(bits_init))
