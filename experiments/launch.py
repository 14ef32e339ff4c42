"""Run EF-BV on every host of a job. Start this command on each host.

    python -m experiments.launch --local 2                      2 processes on this machine, 1 minute
    srun python -m experiments.launch --cluster                 SLURM; also MPI, GKE and TPU slices
    python -m experiments.launch --coordinator HOST:PORT --num-processes 2 --process-id 0
                                                                by hand, with another id on each host

With --cluster, JAX finds the other processes itself. Each process parses and keeps only the rows of its own clients,
and computes only their L_i. It counts the lines of a LibSVM file once, so that all processes agree on the split, and
skips the rows of other clients. (The embedded data set has 569 rows and is loaded whole.)

To resume a job that wrote a --checkpoint, give the same command again. The number of hosts and devices may differ.
Process 0 prints the table and writes the record.

Expected (breast_cancer, 100 clients, 2000 rounds): the loss of a run with one process, up to rounding. BUILD.md says
what is promised.
"""

import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
import tyro
from jax.experimental import multihost_utils

from commjax import compressors
from commjax.algorithms import ef_bv
from commjax.core import runner
from commjax.data import stacked
from commjax.data.libsvm import Dataset
from commjax.data.local_rows import local_rows
from commjax.data.partition import Rows
from commjax.devices import hosts
from commjax.devices.mesh import client_mesh
from commjax.problems import constants, logistic
from commjax.problems.constants import Smoothness


@dataclass(frozen=True)
class Settings:
    dataset: str = "breast_cancer"  # breast_cancer (embedded) or the name of a LibSVM data set
    clients: int = 100
    k: int = 1  # the compressor is comp-(k, d/2)
    mu: float = 0.1  # strength of the regularizer
    rounds: int = 2000
    chunk: int = 200  # rounds between checkpoints
    seed: int = 0
    checkpoint: str = ""  # file to write and to resume from; empty for none
    out: str = ""  # path of the record without suffix; empty for none
    # Ask the cluster for the addresses of the other processes. Without it and without a coordinator, the process runs
    # alone.
    cluster: bool = False
    coordinator: str = ""  # host:port of process 0
    num_processes: int = 1
    process_id: int = 0
    devices: int = 0  # simulated CPU devices of a process; 0: the devices of the machine
    timeout: int = 60  # seconds to wait for the other processes at the start
    heartbeat: int = 30  # seconds of silence after which a process counts as dead and the job stops
    local: int = 0  # start this many processes on this machine, and wait for them
    progress: bool = True


def join(settings: Settings) -> None:
    """Configure JAX and connect this process to the other processes of the job."""
    if settings.cluster and settings.coordinator:
        raise ValueError(f"cluster and coordinator={settings.coordinator!r}: allowed is one of them")
    jax.config.update("jax_enable_x64", True)
    if settings.devices:
        jax.config.update("jax_num_cpu_devices", settings.devices)
    start = partial(hosts.start, timeout=settings.timeout, heartbeat=settings.heartbeat)
    if settings.coordinator:
        start(settings.coordinator, settings.num_processes, settings.process_id)
    elif settings.cluster:
        start()


def smoothness(dataset: Dataset, local: Rows, n: int, mu: float) -> Smoothness:
    """Compute the L_i of the local clients and gather those of all processes.

    The returned L is L_tilde, an upper bound of the exact L. The exact L would need the rows of all clients. A sum over
    processes would round differently on another number of processes, and then no checkpoint would fit.

    Args:
        dataset: The data set with the local rows.
        local: The rows of each local client.
        n: Number of clients in all processes.
        mu: Strength of the regularizer.
    """
    mine = logistic.constants(dataset, local, mu).L_i
    return constants.smoothness(np.asarray(multihost_utils.process_allgather(mine, tiled=True))[:n], mu=mu)


def main(settings: Settings) -> None:
    """Run one process of the job."""
    join(settings)
    mesh, n = client_mesh(), settings.clients
    dataset, mine, longest = local_rows(settings.dataset, n, hosts.local_ids(n, mesh), settings.seed)
    d = dataset.features.shape[1]
    compressor = compressors.comp(settings.k, max(settings.k, d // 2))
    hparams = ef_bv.theoretical(compressor.constants(d, n), smoothness(dataset, mine, n, settings.mu))
    algorithm = ef_bv.ef_bv(jax.value_and_grad(partial(logistic.loss, mu=settings.mu)), compressor)

    # Every process pads to the longest part of all processes, so that the shapes agree.
    data = hosts.rows(stacked.stack(dataset, mine, longest), n, mesh)
    state = hosts.init(algorithm, np.zeros(d), n, mesh)
    state, record = runner.loop(
        jax.random.key(settings.seed),
        algorithm,
        hparams,
        state,
        data,
        settings.rounds,
        mesh=mesh,
        n=n,
        chunk=settings.chunk,
        checkpoint=settings.checkpoint or None,
        progress=settings.progress,
    )
    if jax.process_index() == 0:
        print(f"{n} clients on {jax.device_count()} devices of {jax.process_count()} processes")
        print(record.table())
        if settings.out:
            record.save(settings.out)
            np.save(f"{settings.out}.params.npy", np.asarray(state.server.params))


def free_port() -> int:
    """Return a TCP port of this machine that is free now."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


def command(settings: Settings) -> list[str]:
    """Return the command line that gives these settings."""
    words = [sys.executable, "-m", "experiments.launch"]
    for name, value in vars(settings).items():
        flag = name.replace("_", "-")
        words += ([f"--{flag}"] if value else [f"--no-{flag}"]) if isinstance(value, bool) else [f"--{flag}={value}"]
    return words


def start_local(settings: Settings) -> int:
    """Start `local` processes on this machine and wait for them.

    If a process fails, the others end within the heartbeat; 15 seconds later they are killed. SIGTERM and SIGINT are
    passed on to all processes, which save a checkpoint and end.

    Args:
        settings: What every process runs.

    Returns:
        The exit status: 0; 128 + the number of the signal if there was one; 1 if a process failed.
    """
    if settings.local < 1:
        raise ValueError(f"local must be at least 1 process (or 0 for none), got {settings.local}")
    if settings.cluster or settings.coordinator:
        raise ValueError("local processes find one another; allowed: neither cluster nor coordinator with it")
    address = f"127.0.0.1:{free_port()}"
    each = replace(settings, local=0, coordinator=address, num_processes=settings.local)
    # Each process gets its own session. Ctrl-C in a terminal then reaches only the launcher, which passes it on once.
    running = [
        subprocess.Popen(command(replace(each, process_id=i)), start_new_session=True) for i in range(settings.local)
    ]
    received: list[int] = []

    def pass_on(signum: int, frame: object) -> None:
        received.append(signum)
        for process in running:
            process.send_signal(signum)

    for number in (signal.SIGTERM, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN:  # ignored signals stay ignored, as in the processes
            signal.signal(number, pass_on)
    deadline = None
    while any(process.poll() is None for process in running):
        if deadline is None and any(process.returncode for process in running):
            deadline = time.monotonic() + settings.heartbeat + 15
        if deadline is not None and time.monotonic() > deadline:
            for process in running:
                process.kill()
        time.sleep(0.1)
    failed = {i: process.returncode for i, process in enumerate(running) if process.returncode}
    if failed:
        resume = f"; the same command goes on from {Path(settings.checkpoint)}" if settings.checkpoint else ""
        print(f"launch: processes ended with {failed}{resume}", file=sys.stderr)
    if failed and received:
        return 128 + received[0]
    return 1 if failed else 0


if __name__ == "__main__":
    chosen = tyro.cli(Settings)
    if chosen.local:
        sys.exit(start_local(chosen))
    main(chosen)
