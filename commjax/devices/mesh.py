"""Run an algorithm on several devices: the client axis is split over a mesh axis.

`shard_step` (shard_map), `pmap_step` and `jit_step` (sharded jit) give the same trajectory.  If the number of devices
does not divide the number of clients, the rows are padded with copies of the last one.  Padding takes no part in any
mean, and it is cut off again.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from commjax.core import checks, runner
from commjax.core.base import Algorithm, Key, State, StepFn
from commjax.core.rounds import PaddedAxis

AXIS = "clients"


def client_mesh(num_devices: int | None = None) -> Mesh:
    """Make a mesh with the one axis `AXIS`.

    Args:
        num_devices: number of devices over all processes, the same number from each; None is all devices.

    Returns:
        The mesh.
    """
    num_devices = jax.device_count() if num_devices is None else num_devices
    _check_devices(num_devices)
    processes = jax.process_count()
    if num_devices % processes:
        raise ValueError(f"num_devices must be a multiple of the {processes} processes, got {num_devices}")
    each = num_devices // processes
    devices = [one for process in range(processes) for one in jax.devices() if one.process_index == process]
    chosen = [one for i, one in enumerate(devices) if i % (len(devices) // processes) < each]
    return Mesh(np.array(chosen), (AXIS,), axis_types=(AxisType.Auto,))


def _check_devices(num_devices: int) -> None:
    available = jax.device_count()
    if not 1 <= num_devices <= available:
        raise ValueError(f"num_devices must be between 1 and the {available} available, got {num_devices}")


def _check_mesh(mesh: Mesh) -> None:
    if mesh.axis_names != (AXIS,):
        raise ValueError(f"mesh must have the one axis {AXIS!r} (see client_mesh), got {mesh.axis_names}")


def padded_axis(n: int) -> PaddedAxis:
    """Name the device axis of n clients whose last rows are padding.

    Args:
        n: number of clients.

    Returns:
        The name, with the attribute `n`.  It contains n, because programs for different n differ.
    """
    axis = PaddedAxis(f"{AXIS} (of {n})")
    axis.n = n
    return axis


def pad_rows(rows: PyTree, num_devices: int) -> PyTree:
    """Repeat the last row until the number of rows is a multiple of the number of devices.

    Args:
        rows: a pytree whose leaves have the same leading axis.
        num_devices: number of devices.

    Returns:
        The pytree with the padded leading axis.

    >>> pad_rows(jnp.arange(3), 2).tolist()
    [0, 1, 2, 2]
    """

    def one(leaf):
        more = -len(leaf) % num_devices
        return jnp.concatenate([leaf, jnp.repeat(leaf[-1:], more, axis=0)]) if more else leaf

    return jax.tree.map(one, rows)


def _cut(rows: PyTree, n: int) -> PyTree:
    return jax.tree.map(lambda leaf: leaf if len(leaf) == n else leaf[:n], rows)


def _on_shards(function: Callable, mesh: Mesh, key, hparams, state: State, data: PyTree, n: int | None = None):
    """Call `function(key, hparams, state, data, axis_name=...)` under `shard_map`.

    The first n rows are clients, the others are padding; None: all rows are clients.
    """
    rows = len(state.clients.id)
    n = rows if n is None else n
    if not 1 <= n <= rows:
        raise ValueError(f"n must be between 1 and the {rows} rows, got {n}")
    padded = rows + -rows % mesh.size
    axis = AXIS if padded == n else padded_axis(n)
    prefix = State(server=P(), clients=P(axis))
    mapped = jax.shard_map(
        partial(function, axis_name=axis),
        mesh=Mesh(mesh.devices, (axis,), axis_types=mesh.axis_types),
        in_specs=(P(), P(), prefix, P(axis)),
        out_specs=(prefix, P()),
    )
    clients, data = pad_rows((state.clients, data), mesh.size)
    (server, clients), metrics = mapped(key, hparams, State(state.server, clients), data)
    return State(server, _cut(clients, rows)), metrics


def shard_step(algorithm: Algorithm, mesh: Mesh) -> StepFn:
    """`algorithm.step` under `shard_map`: the server is replicated, the clients are split over the mesh.

    Args:
        algorithm: the algorithm.
        mesh: mesh of `client_mesh`.

    Returns:
        A jitted step (key, hparams, state, batch) -> (State, metrics).
    """
    _check_mesh(mesh)
    if mesh.size == 1:  # an axis of one device would still call collectives
        return jit_step(algorithm, mesh)

    @partial(jax.jit, static_argnames="axis_name")
    def step(key, hparams, state, batch, *, axis_name=None):
        return _on_shards(algorithm.step, mesh, key, hparams, state, batch)

    return step


def _rounds(key, algorithm, hparams, state, data, num_rounds, mesh, batch_fn=runner.full_batch, n=None):
    """`run` without its checks, not compiled."""

    def rounds(key, hparams, state, data, axis_name):
        return runner.compiled_run(key, algorithm, hparams, state, data, num_rounds, batch_fn, axis_name)

    return _on_shards(rounds, mesh, key, hparams, state, data, n)


# `run` without its checks, with the methods `trace` and `lower` of a jitted function.
compiled_run = jax.jit(_rounds, static_argnames=("algorithm", "num_rounds", "mesh", "batch_fn", "n"))


def run(
    key: Key,
    algorithm: Algorithm,
    hparams: Any,
    state: State,
    data: PyTree,
    num_rounds: int,
    mesh: Mesh,
    batch_fn: runner.BatchFn = runner.full_batch,
    n: int | None = None,
) -> tuple[State, Any]:
    """`runner.run` under `shard_map`.  Rows are padded once, and all rounds run on the devices.

    Args:
        key: key of the run.
        algorithm: an algorithm of `commjax.algorithms`.
        hparams: hyperparameters of this algorithm.
        state: the result of `algorithm.init` or of an earlier run.
        data: pytree whose leaves have a leading client axis.
        num_rounds: number of rounds, at least 0.
        mesh: mesh of `client_mesh`.
        batch_fn: as that of `runner.run`.
        n: number of clients: the rows from n on are padding (`pad_rows`).  None: all rows are clients.

    Returns:
        The state after the last round, and the metrics.  `runner.DivergedError` if the loss or the params are not
        finite, except inside `jit`, where there are no numbers to check.
    """
    _check_mesh(mesh)
    checks.entry(key, algorithm, hparams, state, num_rounds, n=n)
    start = state.server.round
    after, metrics = compiled_run(key, algorithm, hparams, state, data, num_rounds, mesh, batch_fn, n)
    if not any(isinstance(leaf, Tracer) for leaf in jax.tree.leaves((after.server, metrics.loss))):
        bad = runner.first_bad_round({"loss": np.asarray(metrics.loss)}, after, int(start))
        if bad is not None:
            raise runner.DivergedError(f"the loss is not finite in round {bad} with {hparams}")
    return after, metrics


def sweep(
    keys: Key,
    algorithm: Algorithm,
    hparams: Any,
    state: State,
    data: PyTree,
    num_rounds: int,
    mesh: Mesh,
    batch_fn: runner.BatchFn = runner.full_batch,
    at_once: int | None = None,
) -> tuple[State, Any]:
    """`runner.sweep` with the settings split over the devices; each device has all clients and all keys.

    No device waits for the inner loops of another.  Only the results are communicated, once.  Device j of p gets the
    settings j, j + p, j + 2p, ..., so if the settings are sorted by their work, all devices get about the same.

    Args:
        keys: s keys, as of `jax.random.split`.
        algorithm: an algorithm of `commjax.algorithms`.
        hparams: hyperparameters whose leaves have a leading axis of h settings.
        state: the state with which every run begins.
        data: pytree whose leaves have a leading client axis.
        num_rounds: number of rounds, at least 0.
        mesh: mesh of `client_mesh`.
        batch_fn: as that of `runner.run`.
        at_once: number of settings of one key that one device computes in parallel; None is all.

    Returns:
        The states and the metrics of `runner.sweep`, with leading axes [h, s].
    """
    _check_mesh(mesh)
    runner.check_sweep(hparams, keys, at_once)
    checks.entry(keys, algorithm, hparams, state, num_rounds, swept=True)
    return compiled_sweep(keys, algorithm, hparams, state, data, num_rounds, mesh, batch_fn, at_once)


@partial(jax.jit, static_argnames=("algorithm", "num_rounds", "mesh", "batch_fn", "at_once"))
def compiled_sweep(keys, algorithm, hparams, state, data, num_rounds, mesh, batch_fn=runner.full_batch, at_once=None):
    """`sweep` without its checks, with the methods `trace` and `lower` of a jitted function."""
    settings = runner.check_sweep(hparams, keys, at_once)

    def one(keys, hparams, state, data):
        return runner.sweep(keys, algorithm, hparams, state, data, num_rounds, batch_fn, at_once)

    mapped = jax.shard_map(
        one,
        mesh=mesh,
        in_specs=(P(), P(AXIS), P(), P()),
        out_specs=P(AXIS),
        check_vma=False,  # there are no collectives
    )
    dealt = _transposed(pad_rows(hparams, mesh.size), mesh.size)
    found = mapped(keys, dealt, state, data)
    return _cut(_transposed(found, -(-settings // mesh.size)), settings)


def _transposed(rows: PyTree, columns: int) -> PyTree:
    """Transpose a table whose entries are the rows, with the given number of columns.

    >>> _transposed(jnp.arange(6), 2).tolist()
    [0, 2, 4, 1, 3, 5]
    """

    def one(leaf):
        table = leaf.reshape(len(leaf) // columns, columns, *leaf.shape[1:])
        return jnp.swapaxes(table, 0, 1).reshape(leaf.shape)

    return jax.tree.map(one, rows)


def pmap_step(algorithm: Algorithm, num_devices: int) -> StepFn:
    """`algorithm.step` under `pmap`.

    Args:
        algorithm: the algorithm.
        num_devices: number of devices.

    Returns:
        A jitted step (key, hparams, state, batch) -> (State, metrics).  Like that of `shard_step`, it takes and returns
        states that are not split.
    """
    _check_devices(num_devices)
    if num_devices == 1:
        return jit_step(algorithm, client_mesh(1))
    prefix = State(server=None, clients=0)

    @partial(jax.jit, static_argnames="axis_name")
    def step(key, hparams, state, batch, *, axis_name=None):
        n = len(state.clients.id)
        axis = padded_axis(n) if n % num_devices else AXIS
        mapped = jax.pmap(
            partial(algorithm.step, axis_name=axis),
            axis_name=axis,
            in_axes=(None, None, prefix, 0),
            out_axes=(prefix, None),
            devices=jax.devices()[:num_devices],
        )
        rows, data = split_rows(pad_rows((state.clients, batch), num_devices), num_devices)
        (server, rows), metrics = mapped(key, hparams, State(state.server, rows), data)
        return State(server, _cut(merge_rows(rows), n)), metrics

    return step


def jit_step(algorithm: Algorithm, mesh: Mesh) -> StepFn:
    """`algorithm.step` under `jit` with sharded clients: the compiler splits the work, and pads if it must.

    Args:
        algorithm: the algorithm.
        mesh: mesh of `client_mesh`.

    Returns:
        A jitted step (key, hparams, state, batch) -> (State, metrics).
    """
    _check_mesh(mesh)

    def on(tree: PyTree, spec: P) -> PyTree:
        return jax.lax.with_sharding_constraint(tree, NamedSharding(mesh, spec))

    def split(rows: PyTree, n: int) -> PyTree:
        return _cut(on(pad_rows(rows, mesh.size), P(AXIS)), n)

    @partial(jax.jit, static_argnames="axis_name")
    def step(key, hparams, state, batch, *, axis_name=None):
        n = len(state.clients.id)
        placed = State(on(state.server, P()), split(state.clients, n))
        (server, rows), metrics = algorithm.step(key, hparams, placed, split(batch, n))
        return State(on(server, P()), split(rows, n)), on(metrics, P())

    return step


def split_rows(rows: PyTree, num_devices: int) -> PyTree:
    """Reshape leaves [n, ...] to [devices, n / devices, ...].  ValueError unless the devices divide n."""

    def one(leaf):
        if len(leaf) % num_devices:
            raise ValueError(f"{len(leaf)} rows do not divide over {num_devices} devices; see pad_rows")
        return leaf.reshape(num_devices, -1, *leaf.shape[1:])

    return jax.tree.map(one, rows)


def merge_rows(rows: PyTree) -> PyTree:
    """Reshape leaves [devices, n / devices, ...] to [n, ...]."""
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), rows)


def shard_rows(rows: PyTree, mesh: Mesh) -> PyTree:
    """Place rows on the mesh: split if the devices divide their number, else replicated."""
    _check_mesh(mesh)

    def one(leaf):
        spec = P() if len(leaf) % mesh.size else P(AXIS)
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    return jax.tree.map(one, rows)


def shard(state: State, mesh: Mesh) -> State:
    """Place a state on the mesh: the server replicated, the clients as `shard_rows` places them."""
    _check_mesh(mesh)
    server = jax.device_put(state.server, NamedSharding(mesh, P()))
    return State(server, shard_rows(state.clients, mesh))
