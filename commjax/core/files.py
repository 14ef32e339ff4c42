"""Files that are written atomically, by one process at a time."""

import errno
import os
import re
import secrets
import socket
import warnings
from collections.abc import Generator, Iterator
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import BinaryIO

from commjax.core import signals


class CheckpointError(ValueError):
    """A checkpoint cannot be read or written, or it belongs to another run."""


def _target(path: str | Path) -> Path:
    """The file that a chain of symbolic links leads to.  It need not exist."""
    target = Path(os.path.realpath(path))
    if target.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    return target


def temporary(path: Path) -> Path:
    """A hidden name beside `path`, for a file or folder that is being written; nobody else gives such names.

    >>> is_temporary(temporary(Path("run.ckpt")).name, "run.ckpt"), is_temporary(".run.ckpt.deadbeef")
    (True, False)
    """
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}.commjax-partial")


def is_temporary(name: str, target: str | None = None) -> bool:
    """Whether this is a name of `temporary`, for the file or folder `target` if that is given."""
    middle = ".+" if target is None else re.escape(target)
    return re.fullmatch(rf"\.{middle}\.[0-9a-f]{{8}}\.commjax-partial", name) is not None


def lock_file(path: Path) -> Path:
    """The file beside a checkpoint that its writer locks."""
    return path.with_name(f".{path.name}.commjax-lock")


def _try_flock(handle: int) -> bool:
    """Lock an open file for this process.

    Returns False if another process holds the lock.  Raises an OSError if the file system has no locks.
    """
    import fcntl

    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _remove_orphans(path: Path) -> None:
    """Remove the temporary files that killed writers of `path` left.  A running writer holds a lock on its file."""
    for entry in os.scandir(path.parent):
        if is_temporary(entry.name, path.name) and entry.is_file(follow_symlinks=False):
            with suppress(OSError), open(entry.path, "rb") as file:
                if _try_flock(file.fileno()):
                    os.unlink(entry.path)


@contextmanager
def replaced(path: Path) -> Iterator[BinaryIO]:
    """Write a new file beside `path` that replaces it at the end of the block; an error removes the new file.

    Args:
        path: The file to replace.

    Yields:
        The new file, open for writing.
    """
    # Files of `tempfile` would be readable by their owner only.
    new = temporary(path)
    try:
        with open(new, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            os.replace(new, path)
    except BaseException:
        new.unlink(missing_ok=True)
        raise


def write_atomically(path: str | Path, data: bytes) -> None:
    """Write a file so that a reader finds either the old or the new content, even after a power cut.

    Temporary files that killed writers of the same path left are removed.

    Args:
        path: The file to write.  If it is a symbolic link, the file that it leads to is replaced.
        data: The new content.

    Returns:
        None.
    """
    path = _target(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    _remove_orphans(path)
    with replaced(path) as file:
        with suppress(OSError):  # the file system may have no locks
            _try_flock(file.fileno())
        file.write(data)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _acquire(lock: Path, path: Path) -> int | None:
    """Open and lock the lock file.

    Returns the handle, or None if nobody can write or lock there.  Raises a CheckpointError if another process holds
    the lock.
    """
    while True:
        try:
            handle = os.open(lock, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            if lock.exists() or error.errno not in (errno.EACCES, errno.EPERM, errno.EROFS):
                raise CheckpointError(f"{path}: its lock file {lock} cannot be opened: {error}") from error
            return None  # nobody can write into this folder; `save` raises the error
        try:
            if not _try_flock(handle):
                holder = os.pread(handle, 200, 0).decode(errors="replace").strip() or "another process"
                raise CheckpointError(f"{path} is being written by {holder}; allowed: one writer at a time")
            if lock.exists() and os.path.samestat(os.fstat(handle), os.stat(lock)):
                with suppress(OSError):  # on a full disk the lock holds without the text
                    os.ftruncate(handle, 0)
                    os.pwrite(handle, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
                return handle
        except FileNotFoundError:
            pass  # the last holder has just removed it: try again
        except OSError as error:
            os.close(handle)
            warnings.warn(
                f"{path}: no lock on this file system ({error}); a second writer is not noticed", stacklevel=4
            )
            return None
        except BaseException:
            os.close(handle)
            raise
        os.close(handle)


@contextmanager
def writing(path: str | Path | None, lock: bool = True) -> Generator[signals.Deferred, None, None]:
    """Be the only writer of a checkpoint, and hold SIGTERM and SIGINT back until it is written.

    The lock is on the file `lock_file` beside the checkpoint.  It ends with the process, even if that is killed; a lock
    file that is left over does no harm.

    Args:
        path: The checkpoint, which need not exist.  None takes no lock and holds no signal back.
        lock: False in the processes of a job that do not write.

    Returns:
        A context that yields a `signals.Deferred`: call its `act` after each save.  A second writer gets a
        CheckpointError that names the first.
    """
    if path is None:
        yield signals.Deferred()
        return
    with _locked(_target(path)) if lock else nullcontext(), signals.deferred() as deferred:
        yield deferred


@contextmanager
def _locked(path: Path) -> Generator[None, None, None]:
    path.parent.mkdir(parents=True, exist_ok=True)
    lock = lock_file(path)
    handle = _acquire(lock, path)
    try:
        _remove_orphans(path)
        yield
    finally:
        if handle is not None:
            lock.unlink(missing_ok=True)
            os.close(handle)
