"""Time: a run is one `scan`, a sweep its `vmap`, and a long run a loop over compiled chunks that can be watched and killed."""

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
from commjax.core.base import Algorithm, Key, Metrics, State
from commjax.core.progress import progress_bar
from commjax.core.records import Record, environment

BatchFn = Callable[[Key, Shaped[Array, "n"], PyTree], PyTree]


class DivergedError(FloatingPointError):
    """A run whose loss or parameters are no longer finite."""


def full_batch(key: Key, ids: Shaped[Array, "n"], data: PyTree) -> PyTree:
    """All the data in every round: exact gradients."""
    return data


def minibatches(size: int) -> BatchFn:
    """`local.minibatch(size)` of each client in every round, the same on any number of devices.

    Args:
        size: rows of a minibatch, at most the rows that every client has (padding counts as rows here).

    Returns:
        A `batch_fn`; it raises a ValueError for a `size` above the rows of the data.
    """
    draw = local.minibatch(size)

    def batch(key, ids, data):
        checks.minibatch_of(size, data)
        return jax.vmap(lambda id, rows: draw(jax.random.fold_in(key, id), rows))(ids, data)

    return batch


def _rounds(key, algorithm, hparams, state, data, num_rounds, batch_fn=full_batch, axis_name=None):
    """`run` without its checks, not compiled"""
    key_step, key_batch = jax.random.split(key)

    def one_round(state, _):
        batch = batch_fn(jax.random.fold_in(key_batch, state.server.round), state.clients.id, data)
        after, metrics = algorithm.step(key_step, hparams, state, batch, axis_name=axis_name)
        return after._replace(server=rounds.next_round(state.server, after.server)), metrics

    return jax.lax.scan(one_round, state, None, length=num_rounds)


_STATIC = ("algorithm", "num_rounds", "batch_fn", "axis_name")
compiled_run = jax.jit(_rounds, static_argnames=_STATIC)  # has `trace` and `lower`; arguments as those of `run`


def run(
    key: Key,
    algorithm: Algorithm,
    hparams: Any,
    state: State,
    data: PyTree,
    num_rounds: int,
    batch_fn: BatchFn = full_batch,
    axis_name: str | None = None,
) -> tuple[State, Any]:
    """`num_rounds` rounds as one compiled program; the second result is `Metrics` (see also `observe`), one row per round.

    The arguments are checked first (`checks.entry`).  After that nothing is looked at before the end, NaN included (`loop` stops
    there).  What happens in round t depends on (key, t) only, so run(a + b) = run(b) after run(a).

    Args:
        key: of the run.
        algorithm: what `commjax.algorithms` makes.
        hparams: of this algorithm.
        state: what `algorithm.init` made, or an earlier run.
        data: with a leading client axis.
        num_rounds: at least 0.
        batch_fn: `full_batch`, `minibatches(size)`, or (key, ids, data) -> batch.
        axis_name: the device axis, where `run` is called inside `shard_map` or `pmap`.

    Returns:
        The state after the last round, and the metrics.
    """
    checks.entry(key, algorithm, hparams, state, num_rounds, n=rounds.count(_ids(state), axis_name))
    return compiled_run(key, algorithm, hparams, state, data, num_rounds, batch_fn, axis_name)


def _ids(state: Any) -> Any:
    """The ids of a state, none if it is not one: `checks.entry` says so"""
    return getattr(getattr(state, "clients", None), "id", np.zeros(0, np.int32))


def _sweep_rounds(keys, algorithm, hparams, states, data, num_rounds, batch_fn, at_once=None):
    ids = states.clients.id[0, 0]

    def from_round(round, number):
        # All runs are in the same round and have the same clients.  Saying so keeps what a key and a round determine (coins,
        # cohorts and their data, candidates) the same for all hparams, and it is computed once.
        def one(key, hparams, state):
            state = State(state.server._replace(round=round), state.clients._replace(id=ids))
            return compiled_run(key, algorithm, hparams, state, data, number, batch_fn)

        return one

    if at_once is None:
        seeds = jax.vmap(from_round(states.server.round[0, 0], num_rounds), in_axes=(0, None, 0))
        return jax.vmap(seeds, in_axes=(None, 0, 0))(keys, hparams, states)

    # Round by round and key by key: what these two determine is computed once for all settings and stays in the cache.
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

# For `loop`, whose states nobody else holds: a chunk writes its end over its beginning, so that n x d shifts exist once.
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
    """Every hparams (leading axis h of its leaves) with every key (leading axis s): results have axes [h, s, ...].

    One program: the data is read once for all of them.  `at_once` settings of one key are computed side by side, the others in the
    same program after them: less memory, and settings whose inner loops are long do not hold up those whose loops are short (sort
    them).
    """
    settings = check_sweep(hparams, keys, at_once)
    checks.entry(keys, algorithm, hparams, state, num_rounds, swept=True)
    states = tree.repeat(tree.repeat(state, len(keys)), settings)
    return _sweep_from(keys, algorithm, hparams, states, data, num_rounds, batch_fn, at_once)


def check_sweep(hparams: Any, keys: Key, at_once: int | None = None) -> int:
    """The number of settings in `hparams`; a ValueError unless they have one leading axis, keys are a row and at_once >= 1."""
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
    """The same algorithm with more metrics: each `measure(state, batch)` is taken at the state with which a round begins.

    What the step computes as well (a gradient, say) the compiler computes once.  Under `shard_map` or `pmap` a measure sees the
    clients of its own device only.
    """

    def step(key, hparams, state, batch, *, axis_name=None):
        seen = {name: measure(state, batch) for name, measure in measures.items()}
        state, metrics = algorithm.step(key, hparams, state, batch, axis_name=axis_name)
        return state, _metrics_type((*metrics._fields, *measures))(*metrics, *seen.values())

    return algorithm._replace(step=step)


def stack(trees: list[Any]) -> Any:
    """A list of equal pytrees as one with a leading axis, for `sweep`.

    >>> stack([(1.0, 2.0), (3.0, 4.0)])[0].tolist()
    [1.0, 3.0]
    """
    return jax.tree.map(lambda *leaves: jnp.stack([jnp.asarray(leaf) for leaf in leaves]), *trees)


def first_bad_round(metrics: dict[str, np.ndarray], state: State, start: int) -> int | None:
    """The first round that does not end in finite numbers.

    Args:
        metrics: `loss` of each round, from round `start` on.
        state: after the last of them.
        start: number of the first.

    Returns:
        The number of a round whose loss is not finite; the number after the last if only the params are not; None if all is finite.
    """
    bad = np.flatnonzero(~np.isfinite(metrics["loss"]))
    if len(bad):
        return start + int(bad[0])
    return None if checks.finite_tree(state.server.params) else start + len(metrics["loss"])


def program(jaxpr) -> tuple[str, list[Any]]:
    """Two methods may have equal states and hparams and differ in a compressor only: their programs differ."""
    return re.sub(r"0x[0-9a-f]+", "", str(jaxpr)), list(jaxpr.consts)  # addresses change from process to process


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
    """The same run in chunks; between them it evaluates `evaluate(state)`, shows progress and writes the checkpoint.

    The run ends at round `num_rounds`.  If the checkpoint exists, it goes on from there, bit for bit as if it had never
    stopped; a checkpoint of another program, start, data, key or hparams is refused.  A run that diverges raises
    `DivergedError` and leaves the last good one in place.  A second process that writes the same checkpoint is refused.
    SIGTERM and SIGINT wait for the running chunk and its checkpoint, then act as usual (exit status 143, KeyboardInterrupt); a
    second signal acts at once.

    A chunk writes over the state of the one before: `evaluate` may read the state it gets and not keep it.

    With an array of keys it is a `sweep` in chunks: hparams have a leading axis, metrics have axes [h, s, round], `evaluate`
    sees all states at once, and a setting that diverges does not stop the others; `at_once` as there.
    """
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")
    swept = checks.typed_key(key) and key.ndim == 1
    if at_once is not None and not (swept and at_once >= 1):
        raise ValueError(f"at_once={at_once}; allowed: at least 1, with an array of keys")
    many = check_sweep(hparams, key) if swept else 0
    checks.entry(key, algorithm, hparams, state, num_rounds, swept=swept)
    advance_by = partial(_sweep_in_place, at_once=at_once) if swept else _run_in_place
    state = jax.tree.map(jnp.array, tree.repeat(tree.repeat(state, len(key)), many) if swept else state)  # a copy
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
