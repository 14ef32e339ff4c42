"""A real process, killed in mid-run and started again, ends where an uninterrupted one does: bit for bit."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys, time
import jax
jax.config.update("jax_enable_x64", True)
import jax.numpy as jnp
from commjax import checkpoint, compressors, runner
from commjax.algorithms import ef_bv
from commjax.problems import quadratic

folder, pause = sys.argv[1], float(sys.argv[2])
problem = quadratic.random(0, 4, 6, mu=0.5, L=2.0)
compressor = compressors.comp(1, 3)
hparams = ef_bv.theoretical(compressor.constants(6, 4), quadratic.constants(problem))
algorithm = ef_bv.ef_bv(jax.value_and_grad(quadratic.loss), compressor)
state = algorithm.init(jnp.ones(6), jnp.arange(4))

def evaluate(state):
    time.sleep(pause)
    return {"norm": float(jnp.linalg.norm(state.server.params))}

state, record = runner.loop(
    jax.random.key(1), algorithm, hparams, state, jax.tree.map(jnp.asarray, problem), 120,
    chunk=3, evaluate=evaluate, checkpoint=f"{folder}/run.ckpt", progress=False,
)
record.save(f"{folder}/record")
checkpoint.save(f"{folder}/final", state, {}, {})
"""


def start(folder, pause):
    folder.mkdir(exist_ok=True)
    (folder / "script.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    arguments = [sys.executable, str(folder / "script.py"), str(folder), str(pause)]
    return subprocess.Popen(arguments, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def finish(process):
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors.decode()[-2000:]


def kill_after_writes(folder, writes):
    """SIGKILL as soon as the checkpoint has been rewritten `writes` times; how many rounds it then holds."""
    process, path, seen = start(folder, pause=0.05), folder / "run.ckpt", set()
    deadline = time.monotonic() + 120
    while len(seen) < writes:
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            pytest.fail(f"no {writes} checkpoints: {process.communicate()[1].decode()[-2000:]}")
        if path.exists():
            seen.add(path.stat().st_mtime_ns)
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=60)
    process.stderr.close()
    assert process.returncode == -signal.SIGKILL and not (folder / "final").exists()


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    finish(start(folder, pause=0))
    return folder


@pytest.mark.parametrize("writes", [2, 12])
def test_a_killed_and_restarted_run_is_the_uninterrupted_one_bit_for_bit(tmp_path, uninterrupted, writes):
    kill_after_writes(tmp_path, writes)
    half = (tmp_path / "run.ckpt").read_bytes()
    finish(start(tmp_path, pause=0))
    assert (tmp_path / "run.ckpt").read_bytes() != half
    found, wanted = (load_file(folder / "final") for folder in (tmp_path, uninterrupted))
    assert found.keys() == wanted.keys() and len(found) == 5
    assert all(found[name].tobytes() == wanted[name].tobytes() for name in wanted)
    with np.load(tmp_path / "record.npz") as found, np.load(uninterrupted / "record.npz") as wanted:
        assert sorted(found.files) == sorted(wanted.files)
        assert found["metrics/loss"].shape == (120,) and found["evaluations/round"].tolist() == list(range(0, 121, 3))
        for name in wanted.files:
            assert found[name].tobytes() == wanted[name].tobytes(), name
    assert (tmp_path / "record.json").read_text() == (uninterrupted / "record.json").read_text()
