"""A run that was killed, signalled or that failed goes on to the same bits, and never looks complete before it is."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file

from commjax.cli import main
from commjax.cli.signals import stopping
from commjax.llm import checkpoints, export, tokens
from commjax.pruning import stream
from tests.cli.cases import prune
from tests.pruning import models
from tests.pruning.interrupted_cases import WANDA, failing

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
SCRIPT = """
import sys, time
from commjax.llm import export
from commjax.pruning import scores, stream
from commjax.pruning.recipe import Recipe, choose
import numpy as np

source, out, pause = sys.argv[1], sys.argv[2], float(sys.argv[3])
write_tensors = export.write_tensors

def slowly(path, tensors):
    time.sleep(pause)
    sha256 = write_tensors(path, tensors)
    time.sleep(pause)
    return sha256

export.write_tensors = slowly
recipe = Recipe(sparsity=0.5, score=choose(scores.stoch_ria, beta=0.5))
windows = np.random.default_rng(0).integers(0, 61, (4, 12)).astype(np.int32)
stream.prune_folder(source, out, windows, recipe, batch_size=2, progress=False)
"""


def start(source, out, pause=0.0):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    # What one process compiled the next ones find.
    environment |= {
        "JAX_COMPILATION_CACHE_DIR": str(source.parent / "cache"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    arguments = [sys.executable, "-c", SCRIPT, str(source), str(out), str(pause)]
    return subprocess.Popen(arguments, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)


def finish(process):
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors.decode()[-2000:]


def kill_when(source, out, condition):
    process, deadline = start(source, out, 0.3), time.monotonic() + 120
    while not condition():
        if process.poll() is not None or time.monotonic() > deadline:
            process.kill()
            pytest.fail(process.communicate()[1].decode()[-2000:])
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait(timeout=60)
    process.communicate()
    assert process.returncode == -signal.SIGKILL and not out.exists()


def test_a_killed_run_goes_on_to_the_same_bits(tmp_path):
    source, partial = models.folder(tmp_path / "source"), tmp_path / "out.partial"
    finish(start(source, tmp_path / "whole"))

    def blocks():
        return len(stream.read_manifest(partial)["blocks"]) if (partial / stream.MANIFEST).exists() else -1

    # First with a shard that the manifest does not know, then between two blocks.
    kill_when(source, tmp_path / "out", lambda: (partial / "model-00002-of-00004.safetensors").exists())
    assert blocks() == 0
    kill_when(source, tmp_path / "out", lambda: blocks() == 2)
    (partial / ".model-00004-of-00004.safetensors.12345678.commjax-partial").write_bytes(b"torn")
    with pytest.raises(FileNotFoundError, match=r"no model\.safetensors"):
        checkpoints.open_folder(partial)
    half = (partial / "model-00002-of-00004.safetensors").stat().st_mtime_ns
    finish(start(source, tmp_path / "out"))
    assert not list((tmp_path / "out").glob(".*"))
    assert models.files(tmp_path / "out") == models.files(tmp_path / "whole") and not partial.exists()
    assert (tmp_path / "out" / "model-00002-of-00004.safetensors").stat().st_mtime_ns == half


@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_failed_run_leaves_nothing_that_looks_complete_and_goes_on(at, tmp_path, monkeypatch):
    source = models.folder(tmp_path / "source")
    before = models.files(source)
    stream.prune_folder(source, tmp_path / "whole", models.windows(), WANDA, progress=False)
    with monkeypatch.context() as patch:
        failing(patch, at)
        with pytest.raises(OSError, match="no space left"):
            stream.prune_folder(source, tmp_path / "out", models.windows(), WANDA, progress=False)
    assert not (tmp_path / "out").exists() and models.files(source) == before
    with pytest.raises(FileNotFoundError):
        checkpoints.open_folder(tmp_path / "out.partial")
    layers = stream.prune_folder(source, tmp_path / "out", models.windows(), WANDA, progress=False)
    assert models.files(tmp_path / "out") == models.files(tmp_path / "whole") and len(layers) == 21


def test_a_run_killed_before_its_last_step_only_takes_its_name(tmp_path, monkeypatch):
    source = models.folder(tmp_path / "source")
    stream.prune_folder(source, tmp_path / "whole", models.windows(), WANDA, progress=False)
    with monkeypatch.context() as patch:
        patch.setattr(
            export,
            "publish",
            lambda partial, out: (
                None if ".partial" not in partial.name or partial.name[0] != "." else os.rename(partial, out)
            ),
        )
        stream.prune_folder(source, tmp_path / "out", models.windows(), WANDA, progress=False)
    assert not (tmp_path / "out").exists()
    stream.prune_folder(source, tmp_path / "out", models.windows(), WANDA, progress=False)
    assert models.files(tmp_path / "out") == models.files(tmp_path / "whole")


@pytest.mark.parametrize("what", ["recipe", "calibration", "source"])
def test_an_unfinished_run_of_something_else_is_refused(what, tmp_path, monkeypatch):
    source = models.folder(tmp_path / "source")
    with monkeypatch.context() as patch:
        failing(patch, 2)
        with pytest.raises(OSError, match="no space left"):
            stream.prune_folder(source, tmp_path / "out", models.windows(), WANDA, progress=False)
    before = models.files(tmp_path / "out.partial")
    windows, recipe = models.windows(), WANDA
    if what == "recipe":
        recipe = WANDA._replace(seed=1)
    elif what == "calibration":
        windows = windows[:, ::-1].copy()
    else:
        for path in source.glob("*.safetensors"):
            save_file({name: -one for name, one in load_file(path).items()}, path, {"format": "pt"})
    with pytest.raises(ValueError, match=f"out.partial is of another run: {what} is .* there, .* here; remove it"):
        stream.prune_folder(source, tmp_path / "out", windows, recipe, progress=False)
    assert models.files(tmp_path / "out.partial") == before


def test_what_a_kill_leaves_beside_a_run_is_removed_and_what_is_not_ours_stays(tmp_path, monkeypatch):
    source = models.folder(tmp_path / "source")
    torn, other = tmp_path / ".out.partial.0123abcd.commjax-partial", tmp_path / ".out.partial.mine"
    for path in (torn, other):
        path.mkdir()
        (path / "config.json").write_text("{")
    with monkeypatch.context() as patch:
        failing(patch, 1)
        with pytest.raises(OSError, match="no space left"):
            stream.prune_folder(source, tmp_path / "out", models.windows(), WANDA, progress=False)
    assert not torn.exists() and other.exists()
    partial = tmp_path / "out.partial"
    (partial / ".ipynb_checkpoints").mkdir()
    (partial / ".manifest.json.0123abcd.commjax-partial").write_text("{")
    stream.prune_folder(source, tmp_path / "out", models.windows(), WANDA, progress=False)
    hidden = [path.name for path in (tmp_path / "out").glob(".*")]
    assert hidden == [".ipynb_checkpoints"] and not partial.exists() and other.exists()


def test_a_foreign_folder_in_the_way_is_refused(tmp_path):
    source = models.folder(tmp_path / "source")
    (tmp_path / "out.partial").mkdir()
    (tmp_path / "out.partial" / "mine").write_text("precious")
    with pytest.raises(ValueError, match=r"out\.partial exists and is no unfinished run"):
        stream.prune_folder(source, tmp_path / "out", models.windows(), WANDA, progress=False)
    assert (tmp_path / "out.partial" / "mine").read_text() == "precious"


def signalling(patch, place, name, at, *numbers):
    """Call number `at` of a function sends signals to this process."""
    real, calls = getattr(place, name), []

    def called(*arguments, **more):
        calls.append(name)
        for number in numbers if len(calls) == at else ():
            signal.raise_signal(number)
            time.sleep(0.05)  # the handler runs in this thread, soon
        return real(*arguments, **more)

    patch.setattr(place, name, called)


PRUNE = prune("magnitude", model="source")


def stopped(capsys):
    """Exit code of the command, and its lines on stderr without those of the progress."""
    with pytest.raises(SystemExit) as stop:
        main.main(PRUNE)
    lines = capsys.readouterr().err.splitlines(keepends=True)
    return stop.value.code, "".join(line for line in lines if not line.startswith("pruning: "))


@pytest.fixture
def interruptible():
    """SIGINT as in a terminal: a job in the background, which CI may be, ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_a_signal_stops_the_command_after_the_block_and_the_same_command_continues(tmp_path, monkeypatch, capsys):
    source = models.folder(tmp_path / "source", vocab_size=259)
    models.tokenizer(source / "tokenizer.bin")
    (tmp_path / "text.txt").write_text("A text that nobody has to read. " * 9)
    monkeypatch.chdir(tmp_path)
    handlers = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    main.main([word if word != "out" else "whole" for word in PRUNE])
    capsys.readouterr()
    again = "the same command again continues"
    with monkeypatch.context() as patch:  # before any block: at once
        signalling(patch, tokens, "load", 1, signal.SIGTERM)
        assert stopped(capsys) == (143, f"commjax: SIGTERM: stopped; {again} or begins anew\n")
    assert not (tmp_path / "out.partial").exists()
    with monkeypatch.context() as patch:  # while block 0 is computed
        signalling(patch, checkpoints, "read_block", 1, signal.SIGTERM)
        assert stopped(capsys) == (143, f"commjax: SIGTERM: stopped with 1 of 3 blocks in out.partial; {again}\n")
    with monkeypatch.context() as patch:  # while block 1 is computed, after block 0 was read again
        signalling(patch, checkpoints, "read_block", 2, signal.SIGINT)
        assert stopped(capsys) == (130, f"commjax: SIGINT: stopped with 2 of 3 blocks in out.partial; {again}\n")
    with monkeypatch.context() as patch:  # twice: at once
        signalling(patch, checkpoints, "read_block", 3, signal.SIGINT, signal.SIGINT)
        assert stopped(capsys) == (130, f"commjax: SIGINT: stopped; {again} or begins anew\n")
    assert len(stream.read_manifest("out.partial")["blocks"]) == 2
    with monkeypatch.context() as patch:  # while the last block is computed: it is the end anyway
        signalling(patch, checkpoints, "read_block", 3, signal.SIGTERM)
        main.main(PRUNE)
    assert models.files(tmp_path / "out") == models.files(tmp_path / "whole")
    assert handlers == (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM))


def test_a_signal_that_was_switched_off_stays_off(interruptible):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with stopping() as stop:
        signal.raise_signal(signal.SIGINT)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN and not stop()
