"""The job of `runner.loop`: a run in compiled chunks, its placement, its identity and its checkpoint."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from jaxtyping import PyTree

from commjax.core import checkpoint as checkpoints
from commjax.core import code, compiled, identity, placement, shards, tree
from commjax.core.base import Algorithm, Key, State
from commjax.core.batches import BatchFn
from commjax.core.loop import DivergedError, History, first_bad_round
from commjax.core.placement import Placement


@runtime_checkable
class Chunk(Protocol):
    """A compiled chunk of rounds."""

    def __call__(self, state: Any, length: int, /) -> tuple[Any, Any]:
        """Run `length` rounds and return the state and the metrics.  The given state is overwritten."""
        ...


@dataclass(frozen=True)
class ChunkedRun:
    """A run as `runner.loop` advances it: compiled chunks, a placement and a checkpoint.

    Attributes:
        place: where the state lives.
        chunk: (state, number of rounds) -> (state, metrics).
        path: file of the checkpoint; None writes none.
        identity: the identity of the run.
        hparams: hyperparameters, for an error.
        swept: whether this is a sweep, in which a setting may diverge.
    """

    place: Placement
    chunk: Chunk
    path: Path | None
    identity: dict[str, str]
    hparams: Any
    swept: bool

    @property
    def writes(self) -> bool:
        """Whether this process is the one that writes."""
        return not shards.over_processes(self.place.mesh) or jax.process_index() == 0

    def advance(self, state: Any, length: int) -> tuple[Any, Any]:
        """Run one compiled chunk."""
        return self.chunk(state, length)

    def whole(self, state: Any) -> Any:
        """The state without padding."""
        return self.place.whole(state)

    def check(self, state: Any, metrics: Mapping[str, np.ndarray], start: int) -> None:
        """Raise a DivergedError if the loss or the params are not finite, except in a sweep."""
        bad = None if self.swept else first_bad_round(metrics, state.server.params, start)
        if bad is not None:
            kept = f"; {self.path} is that of round {start}" if self.path is not None and self.path.exists() else ""
            raise DivergedError(f"the loss is not finite in round {bad} with {self.hparams}{kept}")

    def save(self, state: Any, history: History) -> None:
        """Write the checkpoint.  All processes gather the state; process 0 writes."""
        if self.path is not None:
            whole = shards.to_host(self.place.whole(state))
            if self.writes:
                checkpoints.save(self.path, whole, history.arrays(), self.identity)

    def load(self, like: Any) -> tuple[Any, dict[str, np.ndarray]] | None:
        """The state and the history of the checkpoint, the same in all processes; None if there is no checkpoint."""
        if self.path is None:
            return None
        if not shards.over_processes(self.place.mesh):
            return checkpoints.load(self.path, like, self.identity) if self.path.exists() else None
        if not shards.shared(np.asarray(self.path.exists())):
            return None
        whole, history = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), like), {}
        if self.writes:
            whole, history = checkpoints.load(self.path, like, self.identity)
        return shards.shared(whole), shards.shared_arrays(history)

    def agreed(self, signum: int | None) -> int | None:
        """The largest signal number that any process received; None if no process received a signal."""
        if self.path is None or not shards.over_processes(self.place.mesh):
            return signum
        return int(np.max(multihost_utils.process_allgather(np.int32(signum or 0)))) or None

    def resume_text(self, done: int) -> str:
        """One line that says how to continue the run; empty in processes that do not write."""
        return f"{self.path} is saved in round {done}; the same call continues there" if self.writes else ""


class RunInputs(NamedTuple):
    """The arguments of `runner.loop` that define a run.

    Attributes:
        key: key of the run, or the keys of a sweep.
        algorithm: the algorithm.
        hparams: its hyperparameters; in a sweep with a leading axis of settings.
        state: the first state.
        data: data of the clients.
        batch_fn: chooses the data of a round.
        settings: number of settings of a sweep; 0 if this is one run.
    """

    key: Key
    algorithm: Algorithm
    hparams: Any
    state: State
    data: PyTree
    batch_fn: BatchFn
    settings: int

    @property
    def swept(self) -> bool:
        """Whether this is a sweep."""
        return self.settings > 0


def placed(inputs: RunInputs, mesh: Mesh | None, n: int | None) -> tuple[Placement, int]:
    """Choose the placement of a run.

    Args:
        inputs: the run.
        mesh: its devices; None is one device.
        n: number of clients, if rows are padded; None: all rows are clients.

    Returns:
        The placement and the number of clients.  Raises a ValueError if `n` or the rows do not fit.
    """
    rows, keys = len(inputs.state.clients.id), len(inputs.key) if inputs.swept else 0
    if mesh is not None:
        shards.check_mesh(mesh)
    if (mesh is None or inputs.swept) and n not in (None, rows):
        raise ValueError(f"n={n}, but the state has {rows} rows; allowed: None, or padded rows and a mesh")
    if mesh is None:
        return placement.OneDevice(inputs.state, (inputs.settings, keys) if inputs.swept else None), rows
    if inputs.swept:
        return placement.Settings(mesh, inputs.settings, keys), rows
    if n is not None:
        shards.check_rows("state", inputs.state.clients, n, mesh)
        shards.check_rows("data", inputs.data, n, mesh)
    clients = rows if n is None else n
    return placement.Clients(mesh, clients), clients


def chunks(inputs: RunInputs, place: Placement, at_once: int | None) -> Chunk:
    """Make the function that advances a run.

    Args:
        inputs: the run.
        place: where its state lives.
        at_once: number of settings of a sweep that are computed in parallel; None is all.

    Returns:
        (state, number of rounds) -> (state, metrics), which compiles once for each number of rounds.
    """
    key, algorithm, hparams, _, data, batch_fn, _ = inputs
    data = place.data(data)
    if isinstance(place, placement.Settings):
        hparams = place.deal(hparams)

    def run_chunk(state: State, length: int) -> tuple[State, Any]:
        options = {"batch_fn": batch_fn, "mesh": place.mesh, "n": getattr(place, "n", None)}
        return compiled.run_in_place(key, algorithm, hparams, state, data, length, **options)

    def sweep_chunk(states: Any, length: int) -> tuple[Any, Any]:
        options = {"batch_fn": batch_fn, "mesh": place.mesh, "at_once": at_once}
        states, metrics = compiled.sweep_in_place(key, algorithm, hparams, states, data, length, **options)
        return states, place.whole(metrics)

    return sweep_chunk if inputs.swept else run_chunk


def _abstract(leaves: PyTree, rows: int, n: int) -> PyTree:
    """Shapes and dtypes of a tree, with n rows where it has `rows`."""

    def shape_of(leaf: Any) -> jax.ShapeDtypeStruct:
        shape, dtype = jnp.shape(leaf), jax.typeof(leaf).dtype
        return jax.ShapeDtypeStruct((n, *shape[1:]) if shape[:1] == (rows,) else shape, dtype)

    return jax.tree.map(shape_of, leaves)


def identified(inputs: RunInputs, n: int) -> tuple[Any, dict[str, str]]:
    """Identify a run.  The identity does not depend on devices.

    Args:
        inputs: the run.
        n: number of clients; further rows are padding.

    Returns:
        Shapes and dtypes of its state without padding, and its identity.
    """
    key, algorithm, hparams, state, data, batch_fn, settings = inputs
    rows = len(state.clients.id)
    like: Any = State(_abstract(state.server, -1, n), _abstract(state.clients, rows, n))
    trace = compiled.compiled_run.trace
    if inputs.swept:
        like = jax.eval_shape(lambda state: tree.repeat(tree.repeat(state, len(key)), settings), like)
        trace = compiled.compiled_sweep.trace
    strong = jax.tree.map(np.asarray, hparams)
    traced = trace(key, algorithm, strong, like, _abstract(data, rows, n), 1, batch_fn=batch_fn)
    program = code.of_program(traced.jaxpr)
    return like, identity.of_run(key, hparams, state, data, n=n, program=program)
