"""Each long job, killed with SIGKILL at random moments and started again, against an uninterrupted one.

python -m tests.core.kills FOLDER KILLS [JOB...]            prints a report; `test_kill` runs it with few kills

This process imports everything and never starts a JAX backend, so that it has one thread and a fork of it is as good
as a new process.
"""

import json
import os
import random
import signal
import sys
import threading
import time
import traceback
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from commjax import compressors
from commjax.algorithms import ef_bv
from commjax.core import checkpoint, runner
from commjax.devices import host_clients, hosts
from commjax.devices.mesh import client_mesh
from commjax.problems import quadratic

D, N = 6, 4


def method():
    problem = quadratic.random(0, N, D, mu=0.5, L=2.0)
    compressor = compressors.comp(1, 3)
    hparams = ef_bv.theoretical(compressor.constants(D, N), quadratic.constants(problem))
    return ef_bv.ef_bv(jax.value_and_grad(quadratic.loss), compressor), hparams, problem


def norm(state):
    return {"norm": jnp.linalg.norm(state.server.params, axis=-1)}


def loop(folder, rounds, keys=None):
    algorithm, hparams, problem = method()
    state, data = algorithm.init(jnp.ones(D), jnp.arange(N)), jax.tree.map(jnp.asarray, problem)
    state, record = runner.loop(
        jax.random.key(1) if keys is None else keys,
        algorithm,
        hparams if keys is None else runner.stack([hparams, hparams._replace(gamma=hparams.gamma / 2)]),
        state,
        data,
        3 * rounds,
        chunk=3,
        evaluate=norm,
        checkpoint=folder / "file",
        progress=False,
    )
    return state, record.metrics, record.evaluations


def sweep(folder, rounds):
    return loop(folder, rounds, jax.random.split(jax.random.key(1), 3))


def mesh(folder, rounds):
    algorithm, hparams, problem = method()
    devices = client_mesh(2)
    state = hosts.init(algorithm, np.ones(D), N, devices)
    data = hosts.rows(problem, N, devices)
    key = jax.random.key(1)
    state, record = runner.loop(
        key,
        algorithm,
        hparams,
        state,
        data,
        3 * rounds,
        mesh=devices,
        n=N,
        chunk=3,
        checkpoint=folder / "file",
        progress=False,
    )
    return hosts.gathered(state, N), record.metrics


def on_host(folder, rounds):
    def fetch(ids):
        return ids[:, None] * np.ones(D)

    gradient = ef_bv.ef_bv(lambda x, data: (jnp.sum((x - data) ** 2), 2 * (x - data)), compressors.top_k(2))
    use = host_clients.reopen if (folder / "rows" / "server.safetensors").exists() else host_clients.start
    many = use(gradient, jnp.ones(D), 50, folder / "rows")
    hparams = ef_bv.HParams(0.01, 0.1, 0.5)
    many, _ = host_clients.run(
        jax.random.key(1), gradient, hparams, many, fetch, rounds - int(many.server.round), size=20
    )
    return many.server, many.rows


JOBS = {"loop": loop, "sweep": sweep, "mesh": mesh, "federation": on_host}
FILES = {"federation": "rows/server.safetensors"}


def slowed(job, folder, rounds):
    """The job with pauses between its writes; it only reads cached programs, for those are not written atomically."""
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e9)
    save = checkpoint.save

    def save_and_rest(*arguments):
        save(*arguments)
        time.sleep(0.02)

    checkpoint.save = save_and_rest
    return JOBS[job](folder, rounds)


def fork(job, folder, rounds, slow):
    """A process that does the job and writes its results, as bytes, into `final`."""
    if number := os.fork():
        return number
    try:
        results = slowed(job, folder, rounds) if slow else JOBS[job](folder, rounds)
        leaves = jax.tree.leaves(jax.device_get(results))
        (folder / "final").write_bytes(b"".join(np.asarray(leaf).tobytes() for leaf in leaves))
        os._exit(0)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(1)


def finish(job, folder, rounds):
    _, status = os.waitpid(fork(job, folder, rounds, slow=False), 0)
    if status:
        raise SystemExit(f"{job}: ended with {os.waitstatus_to_exitcode(status)}")
    return (folder / "final").read_bytes()


def kill(job, folder, rounds, delay, after_a_write):
    """SIGKILL `delay` seconds after the start, or after the first new checkpoint."""
    path = folder / FILES.get(job, "file")

    def written():
        return path.stat().st_mtime_ns if path.exists() else 0

    before, child = written(), fork(job, folder, rounds, slow=True)
    deadline = time.monotonic() + 60
    while after_a_write and written() == before and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(delay)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(status) != -signal.SIGKILL:
        raise SystemExit(f"{job}: ended with {os.waitstatus_to_exitcode(status)} before it was killed")
    return written() != before


def attack(job, folder, kills, rng):
    rounds, whole, target = 40 + 40 * kills, folder / "whole", folder / "killed"
    for path in (whole, target):
        path.mkdir(parents=True)
    wanted, progress = finish(job, whole, rounds), 0
    for i in range(kills):
        after_a_write = i % 2 == 0
        progress += kill(job, target, rounds, rng.uniform(0, 0.06 if after_a_write else 1.5), after_a_write)
    equal = finish(job, target, rounds) == wanted
    hidden = sorted(path.name for path in target.rglob(".*"))
    return {"kills": kills, "with progress": progress, "bytes": len(wanted), "equal": equal, "left": hidden}


def main(folder, kills, jobs):
    jax.config.update("jax_enable_x64", True)
    jax.config.update("jax_num_cpu_devices", 2)
    jax.config.update("jax_compilation_cache_dir", str(folder / "cache"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    assert threading.active_count() == 1
    report = {job: attack(job, folder / job, kills, random.Random(job)) for job in jobs or JOBS}
    print(json.dumps(report))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:])
