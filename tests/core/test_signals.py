"""SIGTERM and SIGINT: the running chunk is finished, its checkpoint is written, and then the signal acts as usual."""

import os
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import jax.numpy as jnp
import pytest
from safetensors.numpy import load_file

from commjax.core import files, signals

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]


@pytest.fixture
def handlers():
    """Python's own handlers, and afterwards those of before."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def now():
    return [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]


USUAL = [signal.SIG_DFL, signal.default_int_handler]


def test_a_signal_waits_until_it_may_act_and_is_said_in_one_line(handlers, capsys):
    with pytest.raises(SystemExit) as stop, signals.deferred() as waiting:
        waiting.act("nothing has happened")
        os.kill(os.getpid(), signal.SIGTERM)
        assert waiting.signum == signal.SIGTERM
        waiting.act("run is saved in round 7")
        pytest.fail("it went on")
    assert stop.value.code == 143 and now() == USUAL
    assert capsys.readouterr() == ("", "commjax: SIGTERM: run is saved in round 7\n")
    with pytest.raises(KeyboardInterrupt), signals.deferred() as waiting:
        os.kill(os.getpid(), signal.SIGINT)
        waiting.act("")
    assert now() == USUAL and capsys.readouterr() == ("", "")


def test_a_signal_that_never_could_act_does_so_at_the_end_also_after_an_error(handlers):
    with pytest.raises(KeyboardInterrupt), signals.deferred():
        os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(SystemExit, match="143") as stop, signals.deferred():
        os.kill(os.getpid(), signal.SIGTERM)
        raise ValueError("diverged")
    assert isinstance(stop.value.__context__, ValueError) and now() == USUAL
    with pytest.raises(ValueError, match="diverged"), signals.deferred():
        raise ValueError("diverged")
    assert now() == USUAL


def test_a_second_signal_acts_at_once(handlers):
    with pytest.raises(KeyboardInterrupt), signals.deferred() as waiting:
        os.kill(os.getpid(), signal.SIGINT)
        assert waiting.signum == signal.SIGINT and now() == USUAL
        waiting.signum = None  # nothing is left for the end of the block
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(5)
        pytest.fail("it waited")


def test_a_user_s_handler_is_called_when_all_is_saved_and_may_let_the_run_continue(handlers, capsys):
    calls = []

    def mine(number, frame):
        calls.append((number, frame.f_code.co_name))

    signal.signal(signal.SIGTERM, mine)
    with signals.deferred() as waiting:
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGTERM)
            saved = len(calls)
            waiting.act("saved")
            assert len(calls) == saved + 1 and waiting.signum is None and mine not in now()
        other = lambda number, frame: None  # noqa: E731
        signal.signal(signal.SIGINT, other)  # of the run itself: it stays
    assert now() == [mine, other] and [number for number, _ in calls] == [signal.SIGTERM] * 2
    assert capsys.readouterr().err == 2 * "commjax: SIGTERM: saved\n"


def test_ignored_signals_stay_ignored_and_other_threads_handle_none(handlers):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with signals.deferred() as waiting:
        os.kill(os.getpid(), signal.SIGINT)
        assert waiting.signum is None and signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    found = []

    def other():
        with signals.deferred() as waiting:
            found.append(now())
            waiting.act("nothing")

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    assert found == [[signal.SIG_DFL, signal.SIG_IGN]]


def test_the_signal_of_another_process_of_the_job_acts_too(handlers, capsys):
    with pytest.raises(SystemExit, match="143"), signals.deferred() as waiting:
        waiting.act("saved", signal.SIGTERM)
    with pytest.raises(SystemExit, match="143"):
        signals.Deferred().act("", signal.SIGTERM)  # also where signals are not handled
    with pytest.raises(KeyboardInterrupt), signals.deferred() as waiting:
        waiting.act("", signal.SIGINT)
    assert capsys.readouterr().err == "commjax: SIGTERM: saved\n"


def test_waiting_for_a_program_ends_when_it_is_ready():
    class Result:
        def __init__(self, after):
            self.left = after

        def is_ready(self):
            self.left -= 1
            return self.left < 0

    results = [Result(3), Result(0)]
    with signals.deferred() as waiting:
        waiting.wait(results)
        waiting.wait(jnp.ones(2))
    assert results[0].left == -1
    signals.Deferred().wait(Result(10**9))  # without a checkpoint


CHILD = """
import os, signal, time
from commjax.core import signals
with signals.deferred() as waiting:
    if child := os.fork():
        time.sleep(0.2)
        os.kill(child, signal.SIGTERM)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), waiting.signum)
    else:
        time.sleep(20)
"""
JOB = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # it may be ignored where the tests run in the background
from pathlib import Path
import jax
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_num_cpu_devices", 2)
from tests.core import kills
print("ready", flush=True)
kills.JOBS[sys.argv[1]](Path(sys.argv[2]), 100_000)
"""


def python(code, *arguments):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def test_a_child_that_was_forked_meanwhile_is_ended_at_once():
    out, errors = python(CHILD).communicate(timeout=60)
    assert out == "-15 None\n", errors


@pytest.mark.parametrize(
    "job, number, status",
    [("loop", signal.SIGTERM, 143), ("mesh", signal.SIGTERM, 143), ("federation", signal.SIGINT, -signal.SIGINT)],
)
def test_a_job_is_saved_says_so_and_ends_with_the_usual_status(tmp_path, job, number, status):
    path = tmp_path / ("rows/server.safetensors" if job == "federation" else "file")
    process = python(JOB, job, tmp_path)
    deadline, seen = time.monotonic() + 60, set()
    while len(seen) < 2 and time.monotonic() < deadline:  # written twice
        time.sleep(0.005)
        seen |= {path.stat().st_mtime_ns} if path.exists() else set()
    process.send_signal(number)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == status, errors
    said = re.findall(rf"^commjax: {number.name}: .*is saved in round (\d+); .*continue.*$", errors, re.M)
    stored = load_file(path)["state/.round" if job == "federation" else "state/.server.round"]
    assert [int(number) for number in said] == stored.view("int32").tolist(), errors
    assert "Traceback" not in errors or number == signal.SIGINT
    assert not list(tmp_path.rglob(".*"))  # no lock, no temporary file


SLOW = """
import sys
import jax, jax.numpy as jnp
from commjax.core import files
work = jax.jit(lambda x: jax.lax.fori_loop(0, 2**30, lambda i, x: jnp.tanh(x @ x), x))
with files.writing(sys.argv[1]) as waiting:
    result = work(jnp.ones((200, 200)))
    print("ready", flush=True)
    waiting.wait(result)
"""


def test_a_second_signal_ends_a_compiled_program_that_runs(tmp_path):
    process = python(SLOW, tmp_path / "file")
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    assert process.poll() is None
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=10)
    assert process.returncode == -signal.SIGTERM
    with files.writing(tmp_path / "file"):  # the lock went with it
        pass
