"""Run one program in several processes on several machines; each process has its own clients.

JAX's runtime connects the processes (gloo on CPU, NCCL or ICI elsewhere).

    hosts.start("10.0.0.1:1234", num_processes=2, process_id=0)    # no arguments under SLURM, GKE, TPU pods
    mesh = client_mesh()                                           # all devices of all processes
    data = hosts.rows(load(hosts.local_ids(n, mesh)), n, mesh)     # a process loads only its own clients
    state = hosts.init(algorithm, params, n, mesh)
    state, record = runner.loop(key, algorithm, hparams, state, data, 1000, mesh=mesh, n=n, checkpoint="run.ckpt")

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
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from jaxtyping import Int, PyTree

from commjax.core.base import Algorithm, Params, State
from commjax.core.placement import Clients
from commjax.core.shards import AXIS, check_rows, cut_rows, pad_rows, padded, to_host


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


def local_ids(n: int, mesh: Mesh) -> Int[np.ndarray, "m"]:
    """Return the ids of the clients on the devices of this process.

    Args:
        n: number of clients.
        mesh: mesh of `client_mesh`.

    Returns:
        The ids, one for each row.  If the number of devices does not divide n, the last client is repeated as padding.
    """
    each = padded(n, mesh) // mesh.size
    mine = [i for i, device in enumerate(mesh.devices.flat) if device.process_index == jax.process_index()]
    rows = np.concatenate([np.arange(i * each, (i + 1) * each) for i in mine])
    return np.minimum(rows, n - 1)


def rows(local: PyTree, n: int, mesh: Mesh) -> PyTree:
    """Make arrays over the mesh from the rows that each process has.

    Args:
        local: pytree whose leaves have a leading axis, one row for each of `local_ids(n, mesh)`.
        n: number of clients.
        mesh: mesh of `client_mesh`.

    Returns:
        The pytree with the rows of all processes.
    """
    total, mine, where = padded(n, mesh), len(local_ids(n, mesh)), NamedSharding(mesh, P(AXIS))

    def joined(leaf: Any) -> jax.Array:
        leaf = np.asarray(leaf)
        if len(leaf) != mine:
            raise ValueError(f"rows: this process has {mine} of {n} clients (see local_ids), got {len(leaf)} rows")
        return jax.make_array_from_process_local_data(where, leaf, (total, *leaf.shape[1:]))

    return jax.tree.map(joined, local)


def init(algorithm: Algorithm, params: Params, n: int, mesh: Mesh, **per_client: PyTree) -> State:
    """Make the first state of an algorithm on the mesh.

    Args:
        algorithm: the algorithm.
        params: the first model, the same in every process.
        n: number of clients.
        mesh: mesh of `client_mesh`.
        **per_client: arguments of `algorithm.init` with a leading client axis (`optimum` of Scafflix, `shift` of EF21),
            as `rows` makes them.

    Returns:
        The state: the server is replicated, and each process holds the rows of its own clients only.
    """
    where = State(NamedSharding(mesh, P()), NamedSharding(mesh, P(AXIS)))
    check_rows("per_client", per_client, n, mesh)

    def first(params: Params, per_client: dict[str, PyTree]) -> State:
        # Padding must not count in a mean.
        server, clients = algorithm.init(params, jnp.arange(n), **cut_rows(per_client, n))
        return State(server, pad_rows(clients, mesh.size))

    return jax.jit(first, out_shardings=where)(jax.tree.map(np.asarray, params), per_client)


def gathered(state: State, n: int) -> State:
    """Collect the whole state in the host memory of every process, without padding.

    Args:
        state: a state on the mesh.
        n: number of clients.

    Returns:
        The state as NumPy arrays with n client rows.
    """
    server, clients = to_host(state)
    return State(server, cut_rows(clients, n))


def scattered(state: State, n: int, mesh: Mesh) -> State:
    """Place a whole state on a mesh, the inverse of `gathered`.

    Args:
        state: a state with n client rows, the same in every process.
        n: number of clients.
        mesh: mesh of `client_mesh`.

    Returns:
        The state on the mesh, padded.
    """
    if (rows := len(state.clients.id)) != n:
        raise ValueError(f"n is {n} clients, the state has {rows}")
    return Clients(mesh, n).restore(state)
