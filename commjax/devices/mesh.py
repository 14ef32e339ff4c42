"""A mesh of devices, and one step of an algorithm on it: the client axis is split over the mesh axis.

`runner.run`, `runner.sweep` and `runner.loop` take the mesh as their argument `mesh`.

`shard_step` (shard_map), `pmap_step` and `jit_step` (sharded jit) give the same trajectory.  If the number of devices
does not divide the number of clients, the rows are padded with copies of the last one.  Padding takes no part in any
mean, and it is cut off again.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from commjax.core.base import Algorithm, Axis, AxisName, Key, State, StepFn
from commjax.core.shards import AXIS, Inputs, check_mesh, cut_rows, on_shards, pad_rows

__all__ = [
    "AXIS",
    "client_mesh",
    "jit_step",
    "merge_rows",
    "pad_rows",
    "pmap_step",
    "shard",
    "shard_rows",
    "shard_step",
    "split_rows",
]


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
    devices = [device for process in range(processes) for device in jax.devices() if device.process_index == process]
    chosen = [device for i, device in enumerate(devices) if i % (len(devices) // processes) < each]
    return Mesh(np.array(chosen), (AXIS,), axis_types=(AxisType.Auto,))


def _check_devices(num_devices: int) -> None:
    available = jax.device_count()
    if not 1 <= num_devices <= available:
        raise ValueError(f"num_devices must be between 1 and the {available} available, got {num_devices}")


def _jitted(compute: Callable[[Inputs], tuple[State, Any]]) -> StepFn:
    """A function of `Inputs` as a jitted step.  The step has an `axis_name` like every step, and ignores it."""

    @partial(jax.jit, static_argnames="axis_name")
    def step(key: Key, hparams: Any, state: State, batch: PyTree, *, axis_name: AxisName = None) -> tuple[State, Any]:
        return compute(Inputs(key, hparams, state, batch))

    return step


def shard_step(algorithm: Algorithm, mesh: Mesh) -> StepFn:
    """Compile `algorithm.step` with `shard_map`: the server is replicated, the clients are split over the mesh.

    Args:
        algorithm: the algorithm.
        mesh: mesh of `client_mesh`.

    Returns:
        A jitted step (key, hparams, state, batch) -> (State, metrics).
    """
    check_mesh(mesh)
    if mesh.size == 1:  # an axis of one device would still call collectives
        return jit_step(algorithm, mesh)

    return _jitted(lambda inputs: on_shards(algorithm.step, mesh, inputs))


def pmap_step(algorithm: Algorithm, num_devices: int) -> StepFn:
    """Compile `algorithm.step` with `pmap`: the server is replicated, the clients are split over the devices.

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

    def mapped_step(inputs: Inputs) -> tuple[State, Any]:
        key, hparams, state, batch = inputs
        n = len(state.clients.id)
        axis = Axis(AXIS, n) if n % num_devices else AXIS
        mapped = jax.pmap(
            partial(algorithm.step, axis_name=axis),
            axis_name=AXIS,
            in_axes=(None, None, prefix, 0),
            out_axes=(prefix, None),
            devices=jax.devices()[:num_devices],
        )
        rows, data = split_rows(pad_rows((state.clients, batch), num_devices), num_devices)
        (server, rows), metrics = mapped(key, hparams, State(state.server, rows), data)
        return State(server, cut_rows(merge_rows(rows), n)), metrics

    return _jitted(mapped_step)


def jit_step(algorithm: Algorithm, mesh: Mesh) -> StepFn:
    """Compile `algorithm.step` with `jit` for sharded clients: the compiler splits the work, and pads if it must.

    Args:
        algorithm: the algorithm.
        mesh: mesh of `client_mesh`.

    Returns:
        A jitted step (key, hparams, state, batch) -> (State, metrics).
    """
    check_mesh(mesh)

    def on(tree: PyTree, spec: P) -> PyTree:
        return jax.lax.with_sharding_constraint(tree, NamedSharding(mesh, spec))

    def split(rows: PyTree, n: int) -> PyTree:
        return cut_rows(on(pad_rows(rows, mesh.size), P(AXIS)), n)

    def sharded_step(inputs: Inputs) -> tuple[State, Any]:
        key, hparams, state, batch = inputs
        n = len(state.clients.id)
        placed = State(on(state.server, P()), split(state.clients, n))
        (server, rows), metrics = algorithm.step(key, hparams, placed, split(batch, n))
        return State(on(server, P()), split(rows, n)), on(metrics, P())

    return _jitted(sharded_step)


def split_rows(rows: PyTree, num_devices: int) -> PyTree:
    """Reshape leaves [n, ...] to [devices, n / devices, ...].  Raises a ValueError unless the devices divide n."""

    def split_leaf(leaf: Any) -> Any:
        if len(leaf) % num_devices:
            raise ValueError(f"{len(leaf)} rows do not divide over {num_devices} devices; see pad_rows")
        return leaf.reshape(num_devices, -1, *leaf.shape[1:])

    return jax.tree.map(split_leaf, rows)


def merge_rows(rows: PyTree) -> PyTree:
    """Reshape leaves [devices, n / devices, ...] to [n, ...]."""
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), rows)


def shard_rows(rows: PyTree, mesh: Mesh) -> PyTree:
    """Place rows on the mesh: split if the devices divide their number, else replicated."""
    check_mesh(mesh)

    def placed(leaf: Any) -> jax.Array:
        spec = P() if len(leaf) % mesh.size else P(AXIS)
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    return jax.tree.map(placed, rows)


def shard(state: State, mesh: Mesh) -> State:
    """Place a state on the mesh: the server replicated, the clients as `shard_rows` places them."""
    check_mesh(mesh)
    server = jax.device_put(state.server, NamedSharding(mesh, P()))
    return State(server, shard_rows(state.clients, mesh))
