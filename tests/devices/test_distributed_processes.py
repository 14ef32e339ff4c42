"""Several processes are one; one that dies stops the others; the job goes on from its checkpoint."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from commjax.core import runner
from commjax.data import libsvm, partition
from commjax.data.local_rows import local_rows
from commjax.devices import hosts
from experiments import launch
from tests.devices import pair
from tests.registry import KINDS, build

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
KEY = jax.random.key(3)


@pytest.mark.parametrize(
    "environ, alone",
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x4)"}, True),
        ({"SLURM_STEP_TASKS_PER_NODE": "1", "SLURM_TASKS_PER_NODE": "8"}, True),
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x4)"}, False),
        ({"SLURM_TASKS_PER_NODE": "1(x2),4"}, False),
        ({"SLURM_TASKS_PER_NODE": "11"}, False),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "1"}, True),
        ({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"}, False),
        ({}, False),
    ],
)
def test_a_process_that_is_alone_on_its_host_has_all_its_devices(environ, alone):
    assert hosts._alone_on_host(environ) == alone


def test_under_slurm_a_task_a_node_sees_all_gpus_and_a_task_a_gpu_its_own():
    code = (
        "from commjax.devices import hosts; hosts.start(timeout=20); "
        "from jax._src.xla_bridge import CUDA_VISIBLE_DEVICES; "
        "print(CUDA_VISIBLE_DEVICES.value)"
    )
    quiet = {
        name: value for name, value in os.environ.items() if not name.startswith(("SLURM_", "OMPI_", "KUBERNETES_"))
    }

    def started(**slurm):
        environment = {**quiet, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **slurm}
        return subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
        )

    for tasks, wanted in (("1", "all"), ("2", "0")):  # JAX would say 0 to both
        done = started(
            SLURM_JOB_ID="1",
            SLURM_STEP_NODELIST="localhost",
            SLURM_NTASKS="1",
            SLURM_PROCID="0",
            SLURM_LOCALID="0",
            SLURM_STEP_TASKS_PER_NODE=tasks,
            JAX_COORDINATOR_PORT=str(launch.free_port()),
        )
        assert done.returncode == 0 and done.stdout.strip() == wanted, done.stderr[-2000:]
        assert "asking the cluster for the other processes" in done.stderr
    done = started(SLURM_JOB_ID="1")  # sbatch without srun
    assert done.returncode == 1 and re.search(
        "JAX found no cluster here .*allowed: under srun, mpirun, GKE", done.stderr
    )


def test_two_ways_to_find_the_others_are_refused(tmp_path):
    with pytest.raises(ValueError, match="cluster and coordinator='a:1': allowed is one of them"):
        launch.join(settings(tmp_path, cluster=True, coordinator="a:1"))
    with pytest.raises(ValueError, match=r"local must be at least 1 process .*got -1"):
        launch.start_local(settings(tmp_path, local=-1))
    with pytest.raises(ValueError, match="neither cluster nor coordinator"):
        launch.start_local(settings(tmp_path, local=2, cluster=True))


def test_an_unreachable_coordinator_is_named_after_the_time_out():
    address = f"127.0.0.1:{launch.free_port()}"
    began = time.monotonic()
    with pytest.raises(TimeoutError, match=f"coordinator {address} did not answer within 1 s"):
        hosts.start(address, 2, 1, timeout=1)
    assert 0.5 < time.monotonic() - began < 5


def test_arguments_of_processes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="coordinator must be host:port, got 'here'"):
        hosts.start("here", 2, 1)
    for number in (-1, 2):
        with pytest.raises(ValueError, match=f"process_id must be from 0 to num_processes - 1 = 1, got {number}"):
            hosts.start("127.0.0.1:1", 2, number)
    with pytest.raises(ValueError, match="coordinator, num_processes and process_id go together"):
        hosts.start("127.0.0.1:1", 2)


@pytest.fixture(scope="session")
def file(tmp_path_factory):
    """Ninety rows of a LibSVM file; the labels of most clients are of one kind."""
    rng = np.random.default_rng(0)
    features = np.where(rng.random((90, 12)) < 0.5, rng.standard_normal((90, 12)), 0.0)
    path = tmp_path_factory.mktemp("data") / "ninety"
    libsvm.write(path, libsvm.Dataset(features, np.where(np.arange(90) < 70, 1.0, -1.0), "ninety"))
    return path


def settings(folder, **how):
    return launch.Settings(
        **{
            "clients": 9,
            "rounds": 40,
            "chunk": 2,
            "heartbeat": 10,
            "checkpoint": str(folder / "run.ckpt"),
            "out": str(folder / "record"),
            "progress": True,
            **how,
        }
    )


# SIGINT may be ignored where the tests run in the background.
USUAL_SIGNALS = """
import os, signal, sys
signal.signal(signal.SIGINT, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
"""


def spawn(chosen, **more):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", **more}
    return subprocess.Popen(
        [sys.executable, "-c", USUAL_SIGNALS, *launch.command(chosen)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process, seconds=240):
    out, errors = process.communicate(timeout=seconds)
    assert process.returncode == 0, errors[-3000:]
    return out


@pytest.fixture(scope="module")
def alone(tmp_path_factory, file):
    """The result of one process with one device."""
    folder = tmp_path_factory.mktemp("alone")
    finish(spawn(settings(folder, dataset=str(file), checkpoint="")))
    return np.load(folder / "record.params.npy"), np.load(folder / "record.npz")["metrics/loss"]


def equal(folder, alone):
    np.testing.assert_allclose(np.load(folder / "record.params.npy"), alone[0], rtol=1e-10)
    np.testing.assert_allclose(np.load(folder / "record.npz")["metrics/loss"], alone[1], rtol=1e-10)


def spoiled(file, own, path, n=9):
    """The file with rubbish for a value in every row that is not a row of the clients `own`."""
    lines = file.read_text().splitlines()
    parts = partition.blocks(len(lines), n, seed=0)
    for i in set(range(n)) - set(own):
        for row in parts[i]:
            label, *pairs = lines[row].split()
            lines[row] = " ".join([label, *(f"{pair}rubbish" for pair in pairs)])
    path.write_text("\n".join(lines))
    return path


@pytest.mark.parametrize("own", [[0, 1, 2, 3, 4, 5], [6, 7, 8, 8, 8, 8]], ids=str)
def test_a_process_parses_the_rows_of_its_own_clients_only_and_they_are_the_rows(tmp_path, file, own):
    whole = libsvm.load(file)
    parts = partition.blocks(90, 9, seed=0)
    dataset, mine, longest = local_rows(str(spoiled(file, own, tmp_path / "spoiled")), 9, np.array(own), 0)
    assert len(dataset.labels) == 10 * len(set(own)) and longest == 10
    for found, i in zip(mine, own, strict=True):
        np.testing.assert_array_equal(dataset.features[found], whole.features[parts[i]])
        np.testing.assert_array_equal(dataset.labels[found], whole.labels[parts[i]])
    with pytest.raises(ValueError, match="a finite number"):  # the next process's rows are rubbish
        local_rows(str(tmp_path / "spoiled"), 9, np.array([(own[-1] + 1) % 9]), 0)


@pytest.mark.long
def test_two_processes_on_loopback_are_one_and_a_job_of_two_goes_on_as_two(tmp_path, alone, file):
    out = finish(spawn(settings(tmp_path, dataset=str(file), local=2, devices=2, chunk=20, rounds=20)))
    assert "9 clients on 4 devices of 2 processes" in out
    # Each process with a file in which the other's rows cannot be parsed.
    address = f"127.0.0.1:{launch.free_port()}"
    both = settings(tmp_path, coordinator=address, num_processes=2, devices=2, chunk=20)
    files = [spoiled(file, own, tmp_path / f"{own[0]}") for own in (range(6), range(6, 9))]
    started = [spawn(launch.replace(both, process_id=i, dataset=str(path))) for i, path in enumerate(files)]
    assert "9 clients on 4 devices of 2 processes" in "".join(map(finish, started))
    equal(tmp_path, alone)


@pytest.mark.long
def test_every_algorithm_is_the_same_on_two_processes(tmp_path):
    address = f"127.0.0.1:{launch.free_port()}"
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    files = [tmp_path / f"{process}.npz" for process in range(2)]
    both = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.devices.pair", address, str(process), str(file)],
            env=environment,
            stderr=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            text=True,
        )
        for process, file in enumerate(files)
    ]
    try:
        names = KINDS
        cases = [build(name) for name in names]
        runs = [runner.run(KEY, case.algorithm, case.hparams, case.init(), case.data, pair.ROUNDS) for case in cases]
        for process in both:
            finish(process)
    finally:
        for process in both:
            process.kill()
    found = [dict(np.load(file)) for file in files]
    for name, (state, metrics) in zip(names, jax.device_get(runs)):
        for i, leaf in enumerate(jax.tree.leaves(state.server)):
            for process in found:
                np.testing.assert_allclose(process[f"{name}/server/{i}"], leaf, rtol=1e-10, atol=1e-12, err_msg=name)
        for i, leaf in enumerate(jax.tree.leaves(state.clients)):
            rows = np.concatenate([process[f"{name}/clients/{i}"] for process in found])
            np.testing.assert_allclose(rows, leaf, rtol=1e-10, atol=1e-12, err_msg=name)
        np.testing.assert_allclose(found[0][f"{name}/loss"], metrics.loss, rtol=1e-10, err_msg=name)


def deaths(folder, killed, file):
    """What the other process says when one of two is killed in mid-run, and the round of the checkpoint."""
    address = f"127.0.0.1:{launch.free_port()}"
    long = settings(folder, dataset=str(file), coordinator=address, num_processes=2, rounds=100_000)
    processes = [spawn(launch.replace(long, process_id=i)) for i in range(2)]
    try:
        assert processes[0].stderr is not None
        lines = iter(processes[0].stderr.readline, "")
        assert next(lines).startswith(f"commjax: waiting for 2 processes at {address}, 60 s")
        assert any((found := re.match(r"rounds: (\d+)/", line)) and int(found[1]) >= 2 for line in lines)
        processes[killed].send_signal(signal.SIGKILL)
        died = time.monotonic()
        _, errors = processes[1 - killed].communicate(timeout=180)
        assert processes[1 - killed].returncode != 0 and time.monotonic() - died < 120
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert not (folder / "record.npz").exists()
    from safetensors.numpy import load_file

    stored = load_file(folder / "run.ckpt")["state/.server.round"].tobytes()
    return errors, int(np.frombuffer(stored, np.int32)[0])


@pytest.mark.long
def test_a_process_that_is_killed_stops_the_other_and_the_job_goes_on_elsewhere(tmp_path, file):
    errors, done = deaths(tmp_path, 1, file)
    assert "stopped sending heartbeats" in errors or "Connection" in errors, errors[-3000:]
    rounds = done + 6
    finish(spawn(settings(tmp_path, dataset=str(file), devices=3, rounds=rounds)))
    folder = tmp_path / "whole"
    folder.mkdir()
    finish(spawn(settings(folder, dataset=str(file), rounds=rounds, chunk=1000)))
    equal(tmp_path, (np.load(folder / "record.params.npy"), np.load(folder / "record.npz")["metrics/loss"]))


@pytest.mark.long
def test_a_coordinator_that_is_killed_stops_the_other_too(tmp_path, file):
    errors, done = deaths(tmp_path, 0, file)
    assert done >= 2 and ("the coordination service" in errors or "Connection" in errors), errors[-3000:]


@pytest.mark.long
def test_a_signal_to_one_process_saves_and_ends_both_with_the_usual_status(tmp_path, file):
    address = f"127.0.0.1:{launch.free_port()}"
    long = settings(tmp_path, dataset=str(file), coordinator=address, num_processes=2, rounds=100_000)
    processes = [spawn(launch.replace(long, process_id=i)) for i in range(2)]
    try:
        assert processes[0].stderr is not None
        assert any(line.startswith("rounds: ") for line in iter(processes[0].stderr.readline, ""))
        processes[1].send_signal(signal.SIGTERM)
        errors = [process.communicate(timeout=120)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert [process.returncode for process in processes] == [143, 143], errors
    assert len(re.findall(r"^commjax: SIGTERM: .*run.ckpt is saved in round \d+; ", errors[0], re.M)) == 1
    assert "is saved" not in errors[1] and sorted(path.name for path in tmp_path.iterdir()) == ["run.ckpt"]


@pytest.mark.long
@pytest.mark.parametrize("number, status", [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_to_the_launcher_saves_and_ends_its_processes(tmp_path, file, number, status):
    launcher = spawn(settings(tmp_path, dataset=str(file), local=2, rounds=100_000))
    assert launcher.stderr is not None
    assert any(line.startswith("rounds: ") for line in iter(launcher.stderr.readline, ""))
    launcher.send_signal(number)
    _, errors = launcher.communicate(timeout=120)  # returns when all who write to stderr have ended: the processes, too
    assert launcher.returncode == status, errors
    assert len(re.findall(rf"^commjax: {number.name}: .*run.ckpt is saved in round \d+; ", errors, re.M)) == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.ckpt"]


@pytest.mark.long
def test_the_launcher_reports_processes_that_failed(tmp_path, file):
    finish(spawn(settings(tmp_path, dataset=str(file), rounds=2)))
    bad = spawn(settings(tmp_path, dataset=str(file), local=2, clients=7))  # the checkpoint is of 9 clients
    _, errors = bad.communicate(timeout=300)
    assert bad.returncode == 1 and "is of another structure" in errors
    assert "launch: processes ended with" in errors and "the same command goes on from" in errors


def test_the_command_line_of_settings_gives_these_settings(tmp_path):
    import tyro

    chosen = settings(tmp_path, process_id=1, progress=False)
    assert tyro.cli(launch.Settings, args=launch.command(chosen)[3:]) == chosen
    assert launch.command(chosen)[:3] == [sys.executable, "-m", "experiments.launch"]
