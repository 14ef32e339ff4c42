"""Rows of clients on the devices of a mesh: padding, `shard_map`, and arrays that several processes share.

The mesh has the one axis `AXIS`.  If the number of devices does not divide the number of clients, the rows are padded
with copies of the last one.  Padding takes no part in any mean.
"""

import io
from functools import partial
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import PyTree

from commjax.core.base import Axis, AxisName, Key, State

AXIS = "clients"


def check_mesh(mesh: Mesh) -> None:
    """Raise a ValueError unless the mesh has the one axis `AXIS`."""
    if mesh.axis_names != (AXIS,):
        raise ValueError(f"mesh must have the one axis {AXIS!r} (see client_mesh), got {mesh.axis_names}")


def padded(n: int, mesh: Mesh) -> int:
    """Return the number of rows of n clients on a mesh: n rounded up to a multiple of the number of devices."""
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    return n + -n % mesh.size


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

    def padded_leaf(leaf: Any) -> Any:
        more = -len(leaf) % num_devices
        numpy = np if isinstance(leaf, np.ndarray) else jnp
        return numpy.concatenate([leaf, numpy.repeat(leaf[-1:], more, axis=0)]) if more else leaf

    return jax.tree.map(padded_leaf, rows)


def cut_rows(rows: PyTree, n: int) -> PyTree:
    """Return the first n rows of each leaf."""
    return jax.tree.map(lambda leaf: leaf if len(leaf) == n else leaf[:n], rows)


def check_rows(name: str, rows: PyTree, n: int, mesh: Mesh) -> None:
    """Raise a ValueError unless every leaf has one row for each of n clients, padded for the mesh."""
    for leaf in jax.tree.leaves(rows):
        if len(leaf) != padded(n, mesh):
            raise ValueError(f"{name} has {len(leaf)} rows, {n} clients on {mesh.size} devices are {padded(n, mesh)}")


class Inputs(NamedTuple):
    """The arguments of a step or of a run on a mesh."""

    key: Key
    hparams: Any
    state: State
    data: PyTree


@runtime_checkable
class ShardFn(Protocol):
    """A step or a run, called for the rows of one device."""

    def __call__(
        self, key: Key, hparams: Any, state: State, data: PyTree, /, *, axis_name: AxisName
    ) -> tuple[State, Any]:
        """Return the state and the metrics."""
        ...


def on_shards(function: ShardFn, mesh: Mesh, inputs: Inputs, n: int | None = None) -> tuple[State, Any]:
    """Call a function under `shard_map`: the server is replicated, the client rows are split over the mesh.

    Args:
        function: (key, hparams, state, data, axis_name=...) -> (state, metrics).
        mesh: mesh with the one axis `AXIS`.
        inputs: its arguments.  Rows are padded if the devices do not divide their number.
        n: the first n rows are clients, the others are padding; None: all rows are clients.

    Returns:
        The state with as many rows as were given, and the metrics.
    """
    key, hparams, state, data = inputs
    rows = len(state.clients.id)
    n = rows if n is None else n
    if not 1 <= n <= rows:
        raise ValueError(f"n must be between 1 and the {rows} rows, got {n}")
    axis = AXIS if rows + -rows % mesh.size == n else Axis(AXIS, n)
    prefix = State(server=P(), clients=P(AXIS))
    mapped = jax.shard_map(
        partial(function, axis_name=axis),
        mesh=mesh,
        in_specs=(P(), P(), prefix, P(AXIS)),
        out_specs=(prefix, P()),
    )
    clients, data = pad_rows((state.clients, data), mesh.size)
    (server, clients), metrics = mapped(key, hparams, State(state.server, clients), data)
    return State(server, cut_rows(clients, rows)), metrics


def over_processes(mesh: Mesh | None) -> bool:
    """Whether the devices of a mesh belong to several processes."""
    return mesh is not None and len({device.process_index for device in mesh.devices.flat}) > 1


def spread(leaves: PyTree, sharding: NamedSharding) -> PyTree:
    """Place arrays on a mesh.

    Args:
        leaves: pytree of arrays.  An array that is placed already stays as it is.  If the mesh belongs to several
            processes, any other array must be the same in every process.
        sharding: where to place them.

    Returns:
        The pytree of arrays on the mesh.
    """

    def placed(leaf: Any) -> jax.Array:
        if isinstance(leaf, jax.Array) and leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
            return leaf
        if sharding.is_fully_addressable:
            return jax.device_put(leaf, sharding)
        host = np.asarray(leaf)
        return jax.make_array_from_callback(host.shape, sharding, lambda index: host[index])

    return jax.tree.map(placed, leaves)


def to_host(leaves: PyTree) -> PyTree:
    """Copy arrays to NumPy arrays in every process.  All processes of the arrays' mesh call together."""

    def hosted(leaf: Any) -> np.ndarray:
        if isinstance(leaf, jax.Array) and not (leaf.is_fully_addressable or leaf.is_fully_replicated):
            return np.asarray(multihost_utils.process_allgather(leaf, tiled=True))
        return np.asarray(leaf)

    return jax.tree.map(hosted, leaves)


def shared(leaves: PyTree) -> PyTree:
    """Give the NumPy arrays of process 0 to all processes, bit for bit.

    Args:
        leaves: pytree of arrays.  The other processes pass arrays of the same shapes and dtypes.

    Returns:
        The pytree of process 0.
    """

    def of_first(leaf: Any) -> np.ndarray:
        array = np.ascontiguousarray(leaf)
        content = multihost_utils.broadcast_one_to_all(array.reshape(-1).view(np.uint8))
        return np.asarray(content).view(array.dtype).reshape(np.shape(leaf))

    return jax.tree.map(of_first, leaves)


def shared_arrays(arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Give the named arrays of process 0 to all processes; unlike `shared`, only process 0 knows names and shapes."""
    buffer = io.BytesIO()
    np.savez(buffer, allow_pickle=False, **arrays)
    content = np.frombuffer(buffer.getvalue(), np.uint8)
    size = int(shared(np.asarray(len(content), np.int32)))
    with np.load(io.BytesIO(shared(np.resize(content, size)).tobytes()), allow_pickle=False) as stored:
        return {name: stored[name] for name in stored.files}
