"""The same step on several devices: the client axis is a mesh axis.

Three ways to the same trajectory: `shard_step` (shard_map), `pmap_step`, `jit_step` (sharded jit).  Where the devices do not divide
the clients, rows are padded with copies of the last one, which take no part in any mean, and cut off again.
"""

import math
import re
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

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
    """`num_devices` devices in a row (all of all processes by default), each with its share of the clients.

    With several processes each gives the same number of its devices.
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
    """A name for the axis of n clients and some rows that are none; it differs with n, as the programs do"""
    axis = PaddedAxis(f"{AXIS} (of {n})")
    axis.n = n
    return axis


def pad_rows(rows: PyTree, num_devices: int) -> PyTree:
    """The last row again and again, up to a multiple of the devices.

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
    """`function(key, hparams, state, data, axis_name=...)` under `shard_map`; n of the rows are clients, by default all"""
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
    """`step` under `shard_map`: the server replicated, the clients split over the mesh."""
    _check_mesh(mesh)
    if mesh.size == 1:  # an axis of one would still wait for a collective
        return jit_step(algorithm, mesh)

    @partial(jax.jit, static_argnames="axis_name")
    def step(key, hparams, state, batch, *, axis_name=None):
        return _on_shards(algorithm.step, mesh, key, hparams, state, batch)

    return step


def _rounds(key, algorithm, hparams, state, data, num_rounds, mesh, batch_fn=runner.full_batch, n=None):
    """`run` without its checks, not compiled"""

    def rounds(key, hparams, state, data, axis_name):
        return runner.compiled_run(key, algorithm, hparams, state, data, num_rounds, batch_fn, axis_name)

    return _on_shards(rounds, mesh, key, hparams, state, data, n)


# Has `trace` and `lower`; arguments as those of `run`.
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
    """`runner.run` under `shard_map`: rows are padded once, and the rounds run where the clients are.

    Args:
        key: of the run; this and the other arguments are checked as `runner.run` does.
        algorithm: what `commjax.algorithms` makes.
        hparams: of this algorithm.
        state: what `algorithm.init` made, or an earlier run.
        data: with a leading client axis.
        num_rounds: at least 0.
        mesh: of `client_mesh`.
        batch_fn: as that of `runner.run`.
        n: the first n rows are clients, the others fill up the devices (`pad_rows`); by default all rows are.

    Returns:
        The state after the last round, and the metrics.  A loss or params that are not finite are a `runner.DivergedError`; the
        caller still has the state that he gave.  (Inside `jit` there are no numbers to check.)
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
    """`runner.sweep` with the settings dealt out to the devices, each of which has all clients and all keys.

    No device waits for another's inner loops; only the results travel, once, to be put in order.  Settings that were sorted by
    the work they make are dealt like cards, so that every device gets as much; `at_once` of them are computed side by side on one
    device.
    """
    _check_mesh(mesh)
    runner.check_sweep(hparams, keys, at_once)
    checks.entry(keys, algorithm, hparams, state, num_rounds, swept=True)
    return compiled_sweep(keys, algorithm, hparams, state, data, num_rounds, mesh, batch_fn, at_once)


@partial(jax.jit, static_argnames=("algorithm", "num_rounds", "mesh", "batch_fn", "at_once"))
def compiled_sweep(
    keys, algorithm, hparams, state, data, num_rounds, mesh, batch_fn=runner.full_batch, at_once=None
):  # fmt: skip
    """`sweep` without its checks; has `trace` and `lower`."""
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
    """Rows that were read line by line from a table, read column by column

    >>> _transposed(jnp.arange(6), 2).tolist()
    [0, 2, 4, 1, 3, 5]
    """

    def one(leaf):
        table = leaf.reshape(len(leaf) // columns, columns, *leaf.shape[1:])
        return jnp.swapaxes(table, 0, 1).reshape(leaf.shape)

    return jax.tree.map(one, rows)


def pmap_step(algorithm: Algorithm, num_devices: int) -> StepFn:
    """`step` under `pmap`; takes and returns unsplit states, like `shard_step`."""
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
    """`step` as it is, on rows that lie on the mesh: the compiler splits the work, and pads where it must."""
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
    """[n, ...] -> [devices, n / devices, ...]"""

    def one(leaf):
        if len(leaf) % num_devices:
            raise ValueError(f"{len(leaf)} rows do not divide over {num_devices} devices; see pad_rows")
        return leaf.reshape(num_devices, -1, *leaf.shape[1:])

    return jax.tree.map(one, rows)


def merge_rows(rows: PyTree) -> PyTree:
    """[devices, n / devices, ...] -> [n, ...]"""
    return jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), rows)


def shard_rows(rows: PyTree, mesh: Mesh) -> PyTree:
    """Place rows on the mesh, split where the devices divide them, else whole on each"""
    _check_mesh(mesh)

    def one(leaf):
        spec = P() if len(leaf) % mesh.size else P(AXIS)
        return jax.device_put(leaf, NamedSharding(mesh, spec))

    return jax.tree.map(one, rows)


def shard(state: State, mesh: Mesh) -> State:
    """Place a state on the mesh: the server everywhere, each client on one device (see `shard_rows`)."""
    _check_mesh(mesh)
    server = jax.device_put(state.server, NamedSharding(mesh, P()))
    return State(server, shard_rows(state.clients, mesh))


class Collectives(NamedTuple):
    """What a compiled program moves between devices: how often each operation stands in it, and the bytes that go in."""

    counts: dict[str, int]
    bytes: int


_OPERATION = re.compile(
    r"= (?P<type>\(?\(?[a-z0-9]+\[.*?) (?P<name>all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute)(?P<start>-start)?\("
)
_ARRAY = re.compile(r"\b(pred|token|[a-z]+(\d+)[a-z0-9]*)\[([\d,]*)\]")  # f32, bf16, f8e4m3fn, s4


def collectives(compiled: Any) -> Collectives:
    """Of `jax.jit(f).lower(...).compile()`: operations between devices and the bytes of their results on one device.

    A loop's body counts once.
    """
    counts: Counter[str] = Counter()
    total = 0
    for found in _OPERATION.finditer(compiled.as_text()):
        counts[found["name"]] += 1
        arrays = _ARRAY.findall(found["type"])
        if found["start"] and found["name"] in ("all-gather", "collective-permute"):
            # An asynchronous one is (operands, results, and for a permutation perhaps contexts): the second half without these.
            arrays = [one for one in arrays if one[0] != "u32" or one[2]]
            arrays = arrays[len(arrays) // 2 :]
        for kind, width, shape in arrays:
            bits = {"pred": 8, "token": 0}.get(kind) or int(width or 0)
            total += -(-bits * math.prod(int(one) for one in shape.split(",") if one) // 8)
    return Collectives(dict(counts), total)


def bytes_up(algorithm: Algorithm, hparams: Any, state: State, batch: PyTree) -> int:
    """What a round of a method that exchanges once has to reduce over devices: one message, its price and one loss.

    On p devices a ring moves 2 (p - 1)/p times as many bytes a device; on one device, nothing.
    """
    if algorithm.exchange is None or algorithm.exchange.server_step is None:
        raise ValueError("algorithm: it exchanges more than once a round, or more than a mean: its bytes are its own")
    loss = jax.eval_shape(partial(algorithm.step, jax.random.key(0)), hparams, state, batch)[1]
    down: Any = {name: getattr(state.server, name) for name in algorithm.exchange.down}
    sent = 0
    if algorithm.exchange.reply is not None:  # a message that is not like what came down
        down, sent = (), int(algorithm.exchange.reply.bits(state.server, 0)) // 8
    scalars = (loss.loss, loss.bits_up)
    return sent + sum(leaf.dtype.itemsize * math.prod(leaf.shape) for leaf in jax.tree.leaves((down, scalars)))
