"""Writing a checkpoint: atomic, one writer at a time, links kept, what a killed writer left is removed."""

import errno
import fcntl
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

from commjax.core import checkpoint, files
from commjax.core.checkpoint import CheckpointError
from tests.core.checkpoint_cases import HISTORY, IDENTITY, LIKE, saved, state

ROOT = Path(__file__).parents[2]


def test_a_symbolic_link_stays_a_link_and_its_target_is_replaced(tmp_path):
    (tmp_path / "far").mkdir()
    first, second = tmp_path / "first", tmp_path / "second"
    second.symlink_to("far/run")  # there is no file yet
    first.symlink_to(second)
    for number in (1, 2):
        checkpoint.save(first, {"x": jnp.ones(2) * number}, {}, {})
        assert first.is_symlink() and second.is_symlink()
        assert [one.name for one in (tmp_path / "far").iterdir()] == ["run"]
        assert checkpoint.load(tmp_path / "far" / "run", LIKE)[0]["x"].tolist() == [number] * 2
    (tmp_path / "a").symlink_to("b")
    (tmp_path / "b").symlink_to("a")
    with pytest.raises(OSError, match="symbolic links"):
        checkpoint.save(tmp_path / "a", {}, {}, {})
    assert (tmp_path / "a").is_symlink()


def test_temporary_files_of_a_killed_writer_of_the_same_path_are_removed(tmp_path, monkeypatch):
    names, replace = [], os.replace
    monkeypatch.setattr(os, "replace", lambda source, target: names.append(source.name) or replace(source, target))
    files.write_atomically(tmp_path / "run", b"old")
    ours = [
        ".run.0123abcd.commjax-partial",
        ".run.ffffffff.commjax-partial",
        *names,
    ]  # the last one is what a kill before `replace` leaves
    others = [
        ".run.deadbeef",  # a user's
        ".run.0123abc.commjax-partial",
        ".run.0123ABCD.commjax-partial",
        "run.0123abcd.commjax-partial",
        ".run2.0123abcd.commjax-partial",
        ".r.n.0123abcd.commjax-partial",
        ".run.0123abcd.commjax-partial2",
        ".run",
    ]
    living = tmp_path / ".run.00000000.commjax-partial"
    for name in (*ours, *others, living.name):
        (tmp_path / name).write_bytes(b"half")
    (tmp_path / ".run.11111111.commjax-partial").mkdir()
    with open(living, "rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # its writer lives
        files.write_atomically(tmp_path / "run", b"whole")
        assert living.exists()
    found = {one.name for one in tmp_path.iterdir()}
    assert found == {"run", ".run.11111111.commjax-partial", living.name, *others}
    with files.writing(tmp_path / "run"):
        assert not living.exists()


LOCKED = (
    "from commjax.core import files; import sys, time\n"
    "with files.writing(sys.argv[1]):\n print(1, flush=True); time.sleep(60)"
)


def test_a_second_writer_is_refused_until_the_first_is_gone_however_it_went(tmp_path):
    path, link = tmp_path / "new" / "run", tmp_path / "link"
    link.symlink_to(path)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    first = subprocess.Popen([sys.executable, "-c", LOCKED, str(path)], stdout=subprocess.PIPE, env=environment)
    try:
        assert first.stdout is not None and first.stdout.readline() == b"1\n"
        message = rf"new/run is being written by process {first.pid} on .*allowed: one writer at a time"
        for name in (path, link):
            with pytest.raises(CheckpointError, match=message), files.writing(name):
                pytest.fail("two writers")
        with files.writing(path, lock=False), files.writing(None):
            pass
    finally:
        first.kill()
        first.communicate()
    lock = path.with_name(".run.commjax-lock")
    assert lock.exists()
    with files.writing(path):
        assert lock.read_text() == f"process {os.getpid()} on {socket.gethostname()}\n"
        with pytest.raises(CheckpointError, match=f"written by process {os.getpid()} "), files.writing(link):
            pytest.fail("two writers in one process")
    assert not any(path.parent.iterdir())


def test_a_file_system_without_locks_is_said_and_a_lock_that_another_removed_is_taken_again(tmp_path, monkeypatch):
    path, lock, calls = tmp_path / "run", tmp_path / ".run.commjax-lock", []

    def removed_once(handle):
        calls.append(handle)
        if len(calls) < 3:  # the holder before went away: this file is no longer the lock
            lock.unlink()
        if len(calls) == 2:
            lock.write_text("another's")
        return True

    monkeypatch.setattr(files, "_try_flock", removed_once)
    with files.writing(path):
        assert len(calls) == 3 and lock.exists()

    def none(handle):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(files, "_try_flock", none)
    with (
        pytest.warns(UserWarning, match=r"run: no lock on this file system .*No locks available"),
        files.writing(path),
    ):
        checkpoint.save(path, LIKE, {}, {})
    monkeypatch.undo()
    lock.unlink(missing_ok=True)
    lock.mkdir()
    with (
        pytest.raises(CheckpointError, match=r"its lock file .*\.run\.commjax-lock cannot be opened"),
        files.writing(path),
    ):
        pass


@pytest.mark.parametrize("broken", ["replace", "fsync"])
def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path, monkeypatch, broken):
    path = saved(tmp_path / "run")
    before = path.read_bytes()

    def fail(*arguments):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, broken, fail)
    with pytest.raises(OSError, match="no space left"):
        checkpoint.save(path, jax.tree.map(jnp.zeros_like, state()), HISTORY, IDENTITY)
    monkeypatch.undo()
    assert path.read_bytes() == before and [one.name for one in tmp_path.iterdir()] == ["run"]


def test_the_new_file_is_complete_on_disk_before_it_takes_the_name(tmp_path, monkeypatch):
    events, fsync, replace = [], os.fsync, os.replace

    def spy_fsync(handle):
        kind = "folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else f"file of {os.fstat(handle).st_size}"
        events.append(kind)
        fsync(handle)

    def spy_replace(source, target):
        events.append("replace")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(os, "replace", spy_replace)
    files.write_atomically(tmp_path / "file", b"12345")
    assert events == ["file of 5", "replace", "folder"]


def test_folders_are_made_and_files_have_ordinary_permissions(tmp_path):
    path = tmp_path / "new" / "deeper" / "file"
    files.write_atomically(path, b"content")
    (tmp_path / "plain").write_bytes(b"")
    assert path.read_bytes() == b"content" and path.stat().st_mode == (tmp_path / "plain").stat().st_mode
    files.write_atomically(str(path), b"other")
    assert path.read_bytes() == b"other" and len(list(path.parent.iterdir())) == 1
