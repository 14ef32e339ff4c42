"""The same step on several devices: the client axis is a mesh axis."""

from functools import partial

import jax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from commjax.base import Algorithm, State, StepFn

AXIS = "clients"


def client_mesh(num_devices: int | None = None) -> Mesh:
    """The first `num_devices` devices in a row, each with its share of the clients."""
    num_devices = jax.device_count() if num_devices is None else num_devices
    _check_devices(num_devices)
    return jax.make_mesh((num_devices,), (AXIS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:num_devices])


def _check_devices(num_devices: int) -> None:
    available = jax.device_count()
    if not 1 <= num_devices <= available:
        raise ValueError(f"num_devices must be between 1 and the {available} available, got {num_devices}")


def _check(state: State, devices: int) -> None:
    n = state.clients.id.shape[0]
    if n % devices:
        raise ValueError(f"{n} clients do not divide over {devices} devices")


def shard_step(algorithm: Algorithm, mesh: Mesh) -> StepFn:
    """`step` under `shard_map`: the server replicated, the clients split over the mesh."""
    state = State(server=P(), clients=P(AXIS))
    mapped = jax.jit(
        jax.shard_map(
            partial(algorithm.step, axis_name=AXIS),
            mesh=mesh,
            in_specs=(P(), P(), state, P(AXIS)),
            out_specs=(state, P()),
        )
    )

    def step(key, hparams, state, batch, *, axis_name=None):
        _check(state, mesh.size)
        return mapped(key, hparams, state, batch)

    return step


def pmap_step(algorithm: Algorithm, num_devices: int) -> StepFn:
    """`step` under `pmap`; takes and returns unsplit states, like `shard_step`."""
    _check_devices(num_devices)
    prefix = State(server=None, clients=0)
    mapped = jax.pmap(
        partial(algorithm.step, axis_name=AXIS),
        axis_name=AXIS,
        in_axes=(None, None, prefix, 0),
        out_axes=(prefix, None),
        devices=jax.devices()[:num_devices],
    )

    def step(key, hparams, state, batch, *, axis_name=None):
        _check(state, num_devices)
        out, metrics = mapped(
            key,
            hparams,
            state._replace(clients=split_rows(state.clients, num_devices)),
            split_rows(batch, num_devices),
        )
        return out._replace(clients=merge_rows(out.clients)), metrics

    return step


def split_rows(rows, num_devices: int):
    """[n, ...] -> [devices, n / devices, ...]"""
    return jax.tree.map(lambda leaf: leaf.reshape(num_devices, -1, *leaf.shape[1:]), rows)


def merge_rows(rows):
    """[devices, n / devices, ...] -> [n, ...]"""
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), rows)


def shard(state: State, mesh: Mesh) -> State:
    """Place a state for sharded jit: `jax.jit(algorithm.step)` then runs where its clients are."""
    _check(state, mesh.size)
    place = State(NamedSharding(mesh, P()), NamedSharding(mesh, P(AXIS)))
    return State(jax.device_put(state.server, place.server), jax.device_put(state.clients, place.clients))
