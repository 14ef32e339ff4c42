"""Download a data file once: checked, and in its place whole or not at all."""

import bz2
import functools
import gzip
import hashlib
import http.client
import io
import lzma
import os
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

LIBSVM_URL = "https://www.csie.ntu.edu.tw/~cjlin/libsvmtools/datasets/binary/"

# Of the text inside, so the same number holds for NAME, NAME.bz2 and NAME.xz.  Other sets, a6a among them, are taken as they come.
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

_UNPACK = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
PACKED_SUFFIXES = tuple(_UNPACK)
_open_url = functools.partial(urllib.request.urlopen, timeout=60)


def unpack(file: io.IOBase, suffix: str) -> io.IOBase:
    """A binary reader of the text inside ``file``, packed as ``suffix`` (".gz", ".bz2", ".xz", other) says.

    >>> unpack(io.BytesIO(gzip.compress(b"+1 1:2")), ".gz").read()
    b'+1 1:2'
    """
    return _UNPACK[suffix](file, "rb") if suffix in _UNPACK else file


def sha256_of_text(path: str | os.PathLike, suffix: str | None = None) -> str:
    """Hash of the unpacked content of ``path``.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "empty")
    ...     _ = path.write_bytes(b"")
    ...     print(sha256_of_text(path)[:8])
    e3b0c442
    """
    with open(path, "rb") as raw:
        text: Any = unpack(raw, Path(path).suffix if suffix is None else suffix)
        return hashlib.file_digest(text, "sha256").hexdigest()


def _chunks(url: str, opener: Callable[[str], Any]) -> Iterator[bytes]:
    """The bytes of ``url``; every failure of the network becomes one ConnectionError."""
    received = 0
    try:
        with opener(url) as response:
            announced = response.headers.get("Content-Length")
            while chunk := response.read(1 << 16):
                received += len(chunk)
                yield chunk
    except urllib.error.HTTPError as error:
        error.close()
        reason = f"HTTP {error.code} {error.reason}"
    except (OSError, http.client.HTTPException) as error:
        reason = repr(error)
    else:
        # A sized read does not notice a connection that was cut short, so compare.
        if announced is None or int(announced) == received:
            return
        reason = f"got {received} of {announced} bytes"
    raise ConnectionError(
        f"could not download {url}: {reason}. Without a network, put the file (plain, .xz, .gz or .bz2) "
        "in a folder and name that folder in the environment variable COMMJAX_DATA."
    )


def fetch(
    url: str,
    path: str | os.PathLike,
    sha256: str | None = None,
    *,
    opener: Callable[[str], Any] = _open_url,
) -> Path:
    """Download ``url`` to ``path`` and return the path.

    The bytes go to a temporary file in the same folder, which is moved into place only when complete and
    checked; a failure leaves nothing behind and an older file untouched. ``sha256`` is of the *unpacked* text
    (the suffix of ``path`` tells the packing), so that one number serves every packing of a data set.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     source = Path(folder, "source")
    ...     _ = source.write_text("+1 1:2")
    ...     fetch(source.as_uri(), Path(folder, "copy")).read_text()
    '+1 1:2'
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with open(handle, "wb") as file:
            for chunk in _chunks(url, opener):
                file.write(chunk)
        if sha256 is not None:
            try:
                got = sha256_of_text(temporary, path.suffix)
            except (OSError, EOFError, lzma.LZMAError) as error:
                got = f"a file that does not unpack as {path.suffix} ({error})"
            if got != sha256:
                raise ValueError(f"{url}: expected sha256 {sha256} of the unpacked text, got {got}")
        os.chmod(temporary, 0o644)  # mkstemp makes a file that only its owner may read
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)
    return path
