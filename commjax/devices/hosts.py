"""Run one program in several processes on several machines; each process has its own clients.

JAX's runtime connects the processes (gloo on CPU, NCCL or ICI elsewhere).

    hosts.start("10.0.0.1:1234", num_processes=2, process_id=0)       # no arguments under SLURM, GKE, TPU pods
    mesh = client_mesh()                                           # all devices of all processes
    data = hosts.rows(load(hosts.local_ids(n, mesh)), n, mesh)    # a process loads only its own clients
    state = hosts.init(algorithm, params, n, mesh)
    state, record = hosts.loop(key, algorithm, hparams, state, data, 1000, mesh, n, checkpoint="run.ckpt")

If a process dies, JAX stops the others after `heartbeat` seconds and names the dead one.  To resume the job, start it
again with the same checkpoint.  The checkpoint does not depend on devices, so the number of processes and devices may
differ.
"""

import os
import re
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Int, PyTree

from commjax.core import checkpoint as checkpoints
from commjax.core import checks, runner
from commjax.core.base import Algorithm, Key, Params, State
from commjax.core.records import Record, environment
from commjax.devices.mesh import AXIS, compiled_run, pad_rows


def start(
    coordinator: str | None = None,
    num_processes: int | None = None,
    process_id: int | None = None,
    *,
    timeout: int = 60,
    heartbeat: int = 30,
) -> None:
    """Connect to the other processes.  Call it before any other use of JAX.

    Without `coordinator`, `num_processes` and `process_id`, JAX asks the cluster (SLURM, GKE, TPU, MPI).  A process
    that is alone on its host uses all devices there.  If a host has several processes, the cluster assigns the devices.

    Args:
        coordinator: "host:port" of process 0.
        num_processes: number of processes.
        process_id: number of this process, from 0 to num_processes - 1.
        timeout: seconds to wait for the coordinator and for the other processes.
        heartbeat: seconds without a sign of life after which a process counts as dead.
    """
    given = (coordinator, num_processes, process_id)
    if coordinator is not None and num_processes is not None and process_id is not None:
        host, _, port = coordinator.rpartition(":")
        if not host or not port.isdigit():
            raise ValueError(f"coordinator must be host:port, got {coordinator!r}")
        if not 0 <= process_id < num_processes:
            raise ValueError(f"process_id must be from 0 to num_processes - 1 = {num_processes - 1}, got {process_id}")
        if process_id > 0:
            _await(host.strip("[]"), int(port), timeout)
        else:
            _say(f"waiting for {num_processes} processes at {coordinator}, {timeout} s at most")
    elif given != (None, None, None):
        raise ValueError(f"coordinator, num_processes and process_id go together, got {given}")
    else:
        _say(f"asking the cluster for the other processes, {timeout} s at most")
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    try:
        jax.distributed.initialize(
            *given,
            # Under SLURM or MPI, None gives a process one GPU only; an empty list gives it all of them.
            local_device_ids=[] if _alone_on_host(os.environ) else None,
            initialization_timeout=timeout,
            heartbeat_timeout_seconds=heartbeat,
            shutdown_timeout_seconds=heartbeat,
        )
    except ValueError as error:
        if coordinator is None:
            raise ValueError(
                f"JAX found no cluster here ({error}); allowed: under srun, mpirun, GKE, Kubernetes with its package, "
                "on a TPU slice, or with coordinator, num_processes and process_id"
            ) from error
        raise


def _say(text: str) -> None:
    print(f"commjax: {text}", file=sys.stderr, flush=True)


def _alone_on_host(environ: Mapping[str, str]) -> bool:
    """Whether SLURM (texts such as "1(x4)" or "8(x3),4") or Open MPI says that every host has one process."""
    per_node = environ.get("SLURM_STEP_TASKS_PER_NODE") or environ.get("SLURM_TASKS_PER_NODE")
    per_node = per_node or environ.get("OMPI_COMM_WORLD_LOCAL_SIZE") or ""
    return re.fullmatch(r"1(\(x\d+\))?(,1(\(x\d+\))?)*", per_node) is not None


def _await(host: str, port: int, timeout: int) -> None:
    """Wait for the coordinator.  Without this, JAX would end the process without an exception."""
    end = time.monotonic() + timeout
    while True:
        try:
            socket.create_connection((host, port), timeout=max(0.1, end - time.monotonic())).close()
            return
        except OSError as error:
            if time.monotonic() + 0.2 > end:
                raise TimeoutError(f"coordinator {host}:{port} did not answer within {timeout} s: {error}") from error
            time.sleep(0.2)


def _padded(n: int, mesh: Mesh) -> int:
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    return n + -n % mesh.size


def local_ids(n: int, mesh: Mesh) -> Int[np.ndarray, "m"]:
    """The clients on the devices of this process.

    Args:
        n: number of clients.
        mesh: mesh of `parallel.client_mesh`.

    Returns:
        Their ids, one for each row.  If the number of devices does not divide n, the last client is repeated as
        padding.
    """
    each = _padded(n, mesh) // mesh.size
    mine = [i for i, device in enumerate(mesh.devices.flat) if device.process_index == jax.process_index()]
    rows = np.concatenate([np.arange(i * each, (i + 1) * each) for i in mine])
    return np.minimum(rows, n - 1)


def rows(own: PyTree, n: int, mesh: Mesh) -> PyTree:
    """Make arrays over the mesh from the rows that each process has.

    Args:
        own: pytree whose leaves have a leading axis, one row for each of `local_ids(n, mesh)`.
        n: number of clients.
        mesh: mesh of `parallel.client_mesh`.

    Returns:
        The pytree with the rows of all processes.
    """
    total, mine, where = _padded(n, mesh), len(local_ids(n, mesh)), NamedSharding(mesh, P(AXIS))

    def one(leaf):
        leaf = np.asarray(leaf)
        if len(leaf) != mine:
            raise ValueError(f"rows: this process has {mine} of {n} clients (see local_ids), got {len(leaf)} rows")
        return jax.make_array_from_process_local_data(where, leaf, (total, *leaf.shape[1:]))

    return jax.tree.map(one, own)


def _place(tree: PyTree, sharding: NamedSharding) -> PyTree:
    def one(leaf):
        leaf = np.asarray(leaf)
        return jax.make_array_from_callback(leaf.shape, sharding, lambda index: leaf[index])

    return jax.tree.map(one, tree)


def init(algorithm: Algorithm, params: Params, n: int, mesh: Mesh, **per_client: PyTree) -> State:
    """Make the first state of an algorithm on the mesh.

    Args:
        algorithm: the algorithm.
        params: the first model, the same in every process.
        n: number of clients.
        mesh: mesh of `parallel.client_mesh`.
        **per_client: arguments of `algorithm.init` with a leading client axis (`optimum` of Scafflix, `shift` of EF21),
            as `rows` makes them.

    Returns:
        The state: the server is replicated, and each process holds the rows of its own clients only.
    """
    where = State(NamedSharding(mesh, P()), NamedSharding(mesh, P(AXIS)))
    _check_rows("per_client", per_client, n, mesh)

    def first(params, per_client):
        own = jax.tree.map(lambda leaf: leaf[:n], per_client)  # padding must not count in a mean
        server, clients = algorithm.init(params, jax.numpy.arange(n, dtype=np.int32), **own)
        return State(server, pad_rows(clients, mesh.size))

    return jax.jit(first, out_shardings=where)(jax.tree.map(np.asarray, params), per_client)


def _check_rows(name: str, tree: PyTree, n: int, mesh: Mesh) -> None:
    for leaf in jax.tree.leaves(tree):
        if len(leaf) != _padded(n, mesh):
            raise ValueError(f"{name} has {len(leaf)} rows, {n} clients on {mesh.size} devices are {_padded(n, mesh)}")


def gathered(state: State, n: int) -> State:
    """Collect the whole state in the host memory of every process, without padding.

    Args:
        state: a state on the mesh.
        n: number of clients.

    Returns:
        The state as NumPy arrays with n client rows.
    """
    clients = multihost_utils.process_allgather(state.clients, tiled=True)
    return State(jax.tree.map(np.asarray, state.server), jax.tree.map(lambda leaf: np.asarray(leaf)[:n], clients))


def scattered(state: State, n: int, mesh: Mesh) -> State:
    """Place a whole state on a mesh, the inverse of `gathered`.

    Args:
        state: a state with n client rows, the same in every process.
        n: number of clients.
        mesh: mesh of `parallel.client_mesh`.

    Returns:
        The state on the mesh, padded.
    """
    found = len(state.clients.id)
    if found != n:
        raise ValueError(f"n is {n} clients, the state has {found}")
    clients = jax.tree.map(
        lambda leaf: np.concatenate([leaf, np.repeat(leaf[-1:], _padded(n, mesh) - n, axis=0)]), state.clients
    )
    placed = _place(clients, NamedSharding(mesh, P(AXIS)))
    return State(_place(state.server, NamedSharding(mesh, P())), placed)


def _identity(key, algorithm, hparams, state, data, n, batch_fn) -> dict[str, str]:
    """The identity of a run, for its checkpoint.  It does not depend on the mesh.

    Each process computes the digests of its own clients: one for the data and the first row of each.
    """

    def shape(tree: PyTree, rows: bool) -> PyTree:
        return jax.tree.map(
            lambda leaf: jax.ShapeDtypeStruct((n, *leaf.shape[1:]) if rows else leaf.shape, leaf.dtype), tree
        )

    abstract = State(shape(state.server, False), shape(state.clients, True))
    strong = jax.tree.map(np.asarray, hparams)
    traced = runner.compiled_run.trace(key, algorithm, strong, abstract, shape(data, True), 1, batch_fn)
    local = [
        np.concatenate(
            [np.asarray(one.data) for one in sorted(leaf.addressable_shards, key=lambda one: one.index[0].start or 0)]
        )
        for leaf in jax.tree.leaves((data, state.clients))
    ]
    digests = [bytes.fromhex(checkpoints.digest([leaf[i] for leaf in local])) for i in range(len(local[0]))]
    own = np.frombuffer(b"".join(digests), np.uint8).reshape(len(digests), -1)
    everyone = np.asarray(multihost_utils.process_allgather(own, tiled=True)).reshape(-1, own.shape[1])[:n]
    # The rest of the server state is left out: a mean over clients is rounded differently on another mesh.
    start = jax.tree.map(np.asarray, (state.server.round, state.server.params))
    return checkpoints.fingerprint(key, hparams, start=start, data=everyone, program=runner.program(traced.jaxpr))


def loop(
    key: Key,
    algorithm: Algorithm,
    hparams: Any,
    state: State,
    data: PyTree,
    num_rounds: int,
    mesh: Mesh,
    n: int,
    *,
    batch_fn: runner.BatchFn = runner.full_batch,
    chunk: int = 100,
    checkpoint: str | Path | None = None,
    config: dict[str, Any] | None = None,
    progress: bool = True,
) -> tuple[State, Record]:
    """`runner.loop` on the devices of all processes.

    Process 0 reads and writes the checkpoint.  If one process receives SIGTERM or SIGINT, all processes end after the
    same chunk, with the same exit status.

    Args:
        key: key of the run.
        algorithm: an algorithm of `commjax.algorithms`.
        hparams: hyperparameters of this algorithm.
        state: state of `init`, or of an earlier `loop`.
        data: data of the clients, as `rows` makes them.
        num_rounds: number of the round at which the run ends.
        mesh: mesh of `parallel.client_mesh`.
        n: number of clients.
        batch_fn: as that of `runner.run`.
        chunk: number of rounds in a compiled chunk.
        checkpoint: file of the checkpoint; None writes none.
        config: settings to store in the record.
        progress: whether process 0 prints a line after each chunk.

    Returns:
        The last state on the mesh, and the record.  After a resume, only process 0 has the metrics of the earlier
        rounds.  `runner.DivergedError` if the loss or the params are not finite.
    """
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")
    checks.entry(key, algorithm, hparams, state, num_rounds, n=n)
    _check_rows("state", state.clients, n, mesh)
    _check_rows("data", data, n, mesh)
    first, history, identity = jax.process_index() == 0, {}, {}
    if checkpoint is not None:
        identity = _identity(key, algorithm, hparams, state, data, n, batch_fn)
        if multihost_utils.broadcast_one_to_all(np.asarray(first and Path(checkpoint).exists())):
            whole = gathered(state, n)
            if first:
                loaded, history = checkpoints.load(checkpoint, whole, identity)
                whole = jax.tree.map(np.asarray, loaded)
            state = scattered(multihost_utils.broadcast_one_to_all(whole), n, mesh)
    done = int(state.server.round)
    if done > num_rounds:
        raise ValueError(f"num_rounds is {num_rounds}, but {checkpoint or 'the state'} is in round {done} already")
    written = checkpoint if done < num_rounds else None
    with checkpoints.writing(written, lock=first) as signals:
        while done < num_rounds:
            length = min(chunk, num_rounds - done)
            state, metrics = compiled_run(key, algorithm, hparams, state, data, length, mesh, batch_fn, n)
            signals.wait(metrics)
            found = {name: np.asarray(values, np.float64) for name, values in metrics._asdict().items()}
            bad = runner.first_bad_round(found, state, done)  # the same in all processes
            if bad is not None:
                kept = f"; {checkpoint} is that of round {done}" if checkpoint and history else ""
                raise runner.DivergedError(f"the loss is not finite in round {bad} with {hparams}{kept}")
            history = {name: np.concatenate([history.get(name, np.zeros(0)), values]) for name, values in found.items()}
            done += length
            if checkpoint is not None:
                whole = gathered(state, n)
                if first:
                    checkpoints.save(checkpoint, whole, history, identity)
            if progress and first:
                print(f"round {done} of {num_rounds}, loss {found['loss'][-1]:.6g}", file=sys.stderr, flush=True)
            if checkpoint is not None:
                number = int(np.max(multihost_utils.process_allgather(np.int32(signals.signum or 0))))
                # A signal that arrives after this exchange waits for the next chunk, so all processes stop together.
                if number:
                    text = f"{checkpoint} is saved in round {done}; the same call continues there" if first else ""
                    signals.act(text, number)
    settings = {"num_rounds": num_rounds, "hparams": hparams, "processes": jax.process_count(), **(config or {})}
    return state, Record(settings, environment(), history)
