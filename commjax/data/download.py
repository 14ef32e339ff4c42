"""Download a data file once and check its sha256. An incomplete file never appears under the final name.

The sha256 of the text is known (`TEXT_SHA256`, or an argument), or the caller trusts the first download. In the second
case the sha256 of the first download is stored beside the file, in NAME.sha256. A cached file is checked against its
sha256 once per process, before it is read.
"""

import functools
import hashlib
import http.client
import os
import queue
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

from commjax.data import bounded

LIBSVM_URL = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary/"

# The sha256 of the unpacked text, so that the same number holds for NAME, NAME.bz2 and NAME.xz.
# Other sets, for example a6a, need trust_first_use.
TEXT_SHA256 = {
    "mushrooms": "f39a4eb628dc61a7d43760815b061c9e497aa728ce1ad8bde57a09ef6043b538",
    "phishing": "0cf66ef36604c393da9359b2e5d894a2df8aee31fd184633cefa138add2ef08a",
    "a1a": "eb54c45f1bdb51286f803dd092eb8202b44637a858fc6c4e533a2d64a0d94b4e",
    "a5a": "5cb3a6603de0a0eb43afcdd45b1820c71ee7f20da1c09f054696bb71cbc45ad8",
    "a7a": "c7f1518e3876c4065588436cd46514dcbcea59bf92e139ac6b2a241f283db0e9",
    "a9a.t": "1f448a153f0320399a7e40836eb207655b0bde0f21fc941cc472193daa9f5de9",
    "w8a.t": "618929ecb01bebb841daec4cae4aa07b97832d29b08652452775598929547fde",
    "a9a": "f5d5ffd8d865ff41328e7ee043e4b020816914ff6843ff15b98905ddbedce906",
    "w8a": "6a9fa8fd5f524303240a5db07d4b3d4a51e8b7b4b20a914105d8e3e8c81640f2",
    "ijcnn1": "16506cad788cf7c9607454150ed1994788204bac2ff4c9cb3b320036b6950d3f",
}

MOST_BYTES = 2**32  # limit of a download
DEADLINE = 3600.0  # seconds for a whole download
TRUST = "COMMJAX_TRUST_FIRST_USE"  # environment variable; the value 1 means trust_first_use=True
_open_url = functools.partial(urllib.request.urlopen, timeout=60)


def sha256_of_text(path: str | os.PathLike, suffix: str | None = None) -> str:
    """Compute the sha256 of the unpacked content of a file.

    Args:
        path: The file.
        suffix: The packing, as in `bounded.unpacked`. The default is the suffix of `path`.

    Returns:
        The sha256 as a hexadecimal string.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "empty")
    ...     _ = path.write_bytes(b"")
    ...     print(sha256_of_text(path)[:8])
    e3b0c442
    """
    with bounded.unpacked(path, suffix) as text:
        return hashlib.file_digest(text, "sha256").hexdigest()  # pyright: ignore[reportArgumentType]


def _receive(url: str, opener: Callable[[str], Any], give: Callable[[Any], None], stopped: threading.Event) -> None:
    """Download in a thread. ``give`` gets the announced length, then every chunk, and last None or the exception."""
    try:
        with opener(url) as response:
            announced = response.headers.get("Content-Length")
            give(int(announced) if announced is not None and announced.isdecimal() else -1)
            # read1 returns the bytes that have arrived; read would wait for 64 KiB.
            read = getattr(response, "read1", response.read)
            while not stopped.is_set() and (chunk := read(1 << 16)):
                give(chunk)
        give(None)
    except Exception as error:
        if isinstance(error, urllib.error.HTTPError):
            error.close()
        give(error)


def _chunks(url: str, opener: Callable[[str], Any], most: int, deadline: float) -> Iterator[bytes]:
    """Iterate over the bytes of ``url``. Every failure of the network becomes a ConnectionError."""
    ends, stopped = time.monotonic() + deadline, threading.Event()
    arrived: queue.Queue = queue.Queue(16)

    def give(item: Any) -> None:
        while not stopped.is_set():
            try:
                return arrived.put(item, timeout=0.1)
            except queue.Full:
                continue

    # Only a thread bounds the time of a slow name server, or of headers that arrive byte by byte.
    threading.Thread(target=_receive, args=(url, opener, give, stopped), daemon=True).start()
    received, announced = 0, -1
    try:
        while True:
            try:
                item = arrived.get(timeout=max(0.0, ends - time.monotonic()))
            except queue.Empty:
                _fail(url, f"it took longer than deadline={deadline:g} seconds ({received} bytes came)")
            if isinstance(item, int):
                announced = item
            elif isinstance(item, bytes):
                received += len(item)
            if max(received, announced) > most:
                raise ValueError(f"{url} sends {max(received, announced)} bytes or more; allowed: most={most} bytes")
            if item is None:
                break
            if isinstance(item, Exception):
                _fail(url, _reason(item))
            if isinstance(item, bytes):
                yield item
    finally:
        stopped.set()
    # A sized read does not notice a connection that was cut short, so compare the lengths.
    if announced not in (-1, received):
        _fail(url, f"got {received} of {announced} bytes")


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"HTTP {error.code} {error.reason}"
    if not isinstance(error, OSError | http.client.HTTPException):
        raise error
    return repr(error)


def _fail(url: str, reason: str) -> NoReturn:
    raise ConnectionError(
        f"could not download {url}: {reason}. Without a network, put the file (plain, .xz, .gz or .bz2) "
        "in a folder and name that folder in the environment variable COMMJAX_DATA."
    )


def fetch(
    url: str,
    path: str | os.PathLike,
    sha256: str | None = None,
    *,
    trust_first_use: bool = False,
    accept: Callable[[Path], None] = lambda path: None,
    opener: Callable[[str], Any] = _open_url,
    most: int = MOST_BYTES,
    deadline: float = DEADLINE,
) -> Path:
    """Download ``url`` to ``path`` and return the path.

    The bytes go to a temporary file in the same folder. The temporary file is moved to ``path`` only when it is
    complete and checked. A failure leaves nothing behind and an older file untouched.

    Args:
        url: The address of the file.
        path: The destination. Its suffix says how the file is packed.
        sha256: The sha256 of the *unpacked* text, so that one number serves every packing of a data set.
        trust_first_use: Without a sha256, accept the download, write its sha256 to ``path`` + ".sha256" and report it
            on stderr.
        accept: Function of the path of the temporary file, whose suffix is that of ``path``. It raises an error if the
            content is not of the expected kind.
        opener: Function of the url that returns a response with ``headers`` and ``read``, usable as a context manager.
        most: The largest number of bytes. A longer download is refused.
        deadline: The time limit of the whole download in seconds, including the name server and the headers.

    Returns:
        The path.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     source = Path(folder, "source")
    ...     _ = source.write_text("+1 1:2")
    ...     fetch(source.as_uri(), Path(folder, "copy"), sha256_of_text(source)).read_text()
    '+1 1:2'
    """
    path = Path(path)
    if sha256 is None and not trust_first_use:
        raise ValueError(
            f"{url}: no sha256 is known; allowed: sha256=..., or trust_first_use=True ({TRUST}=1 in the environment), "
            "which keeps the sha256 of the first download, or the file in the folder of COMMJAX_DATA"
        )
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=path.suffix)
    try:
        with open(handle, "wb") as file:
            for chunk in _chunks(url, opener, most, deadline):
                file.write(chunk)
        try:
            got = sha256_of_text(temporary)
        except ValueError as error:
            got = f"a file that does not unpack as {path.suffix} ({error})".replace(temporary, path.name)
            if sha256 is None:
                raise ValueError(f"{url} is {got}") from error
        if sha256 not in (None, got):
            raise ValueError(f"{url}: expected sha256 {sha256} of the unpacked text, got {got}")
        accept(Path(temporary))
        os.chmod(temporary, 0o644)  # mkstemp makes a file that only its owner may read
        if sha256 is None:
            _record(path, got, url)
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return path


def _recorded(path: Path) -> Path:
    return path.with_name(f"{path.name}.sha256")


def _record(path: Path, sha256: str, source: str | os.PathLike) -> None:
    _recorded(path).write_text(f"{sha256}\n", encoding="ascii")
    print(f"commjax: no sha256 of {source} is known; {sha256} is kept in {_recorded(path)}", file=sys.stderr)


def check_cached(path: str | os.PathLike, sha256: str | None = None, *, trust_first_use: bool = False) -> None:
    """Raise a ValueError if a cached file is not the one that was downloaded. A file is hashed once per process.

    Args:
        path: The cached file.
        sha256: The sha256 of its unpacked text, if known. The default is the one that `fetch` stored beside the file.
        trust_first_use: If there is neither, store the present sha256 of the file and report it on stderr.
    """
    path = Path(path)
    beside = _recorded(path)
    if sha256 is None and beside.is_file():
        sha256 = beside.read_text(encoding="ascii", errors="replace").strip()
    status = path.stat()
    got = _hash_once(str(path.resolve()), status.st_size, status.st_mtime_ns, status.st_ino)
    if sha256 is None:
        if not trust_first_use:
            raise ValueError(
                f"{path}: no sha256 of this cached file is known; allowed: trust_first_use=True "
                f"({TRUST}=1 in the environment), which keeps its present sha256, or remove the file"
            )
        _record(path, got, path)
    elif got != sha256:
        raise ValueError(
            f"{path}: expected sha256 {sha256} of the unpacked text, got {got}; remove it to download it again"
        )


@functools.lru_cache(256)
def _hash_once(path: str, size: int, time_ns: int, number: int) -> str:
    """The sha256 of a file, cached as long as its size, time and inode stay the same."""
    return sha256_of_text(path)
