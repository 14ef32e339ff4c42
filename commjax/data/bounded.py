"""Read files within limits on the unpacked size, the length of a line and the size of a JSON text.

A file that was made to exhaust memory is refused. The error names the file, the value and the limit.
"""

import bz2
import gzip
import io
import json
import lzma
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

_UNPACK = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
PACKED_SUFFIXES = tuple(_UNPACK)
MOST_TEXT = 2**30  # bytes of a text that is held in memory
MOST_LINE = 2**26  # bytes of a line
MOST_JSON = 2**28  # bytes of a JSON file
MOST_ARRAY = 2**32  # bytes of an array that a header announces
# Real texts unpack to 5 to 30 times their packed size. A file that unpacks to more than MOST_RATIO times its size,
# and to more than ALWAYS_ALLOWED bytes, is refused.
MOST_RATIO = 100
ALWAYS_ALLOWED = 2**26  # bytes


class _Counted(io.RawIOBase):
    """A reader that raises a ValueError after more than `most` bytes."""

    def __init__(self, file: Any, path: str | os.PathLike, most: int, allowed: str) -> None:
        self._file, self._path, self._most, self._allowed, self._given = file, path, most, allowed, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._file.read(min(len(buffer), 1 << 16))
        self._given += len(data)
        if self._given > self._most:
            raise ValueError(f"{self._path} holds more than {self._most} bytes of text; allowed: {self._allowed}")
        buffer[: len(data)] = data
        return len(data)


@contextmanager
def unpacked(
    path: str | os.PathLike, suffix: str | None = None, most: int | None = None
) -> Iterator[io.BufferedReader]:
    """Open a file, compressed or plain, and read its uncompressed bytes.

    A damaged or oversized file raises a ValueError that names the file.

    Args:
        path: The file.
        suffix: The kind of compression: ".gz", ".bz2" or ".xz"; any other value means a plain file. The default is the
            suffix of `path`.
        most: The number of bytes that may be read. None sets no limit except the ratio of unpacked to packed size.

    Returns:
        A context manager that gives the reader.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "text.gz")
    ...     _ = path.write_bytes(gzip.compress(b"+1 1:2"))
    ...     with unpacked(path) as file:
    ...         file.read()
    b'+1 1:2'
    """
    suffix = Path(path).suffix if suffix is None else suffix
    with open(path, "rb") as raw:
        limits = [] if most is None else [(most, f"{most} bytes at most")]
        text: Any = raw
        if suffix in _UNPACK:
            text = _UNPACK[suffix](raw, "rb")
            packed = os.fstat(raw.fileno()).st_size
            several = f"{MOST_RATIO} times the {packed} bytes that it has packed, or {ALWAYS_ALLOWED} bytes, at most"
            limits.append((max(ALWAYS_ALLOWED, MOST_RATIO * packed), several))
        least = min(limits, default=(2**63, ""))
        try:
            yield io.BufferedReader(_Counted(text, path, *least), 1 << 16)
        except (gzip.BadGzipFile, EOFError, lzma.LZMAError, zlib.error) as error:
            raise ValueError(f"{path} cannot be unpacked as {suffix}: {error or 'it ends too early'}") from error
        except OSError as error:
            # bz2 reports an invalid stream as an OSError without an error number.
            if error.errno is not None and error.filename is None:
                raise OSError(error.errno, error.strerror, str(path)) from error
            if error.errno is not None or suffix not in _UNPACK:
                raise
            raise ValueError(f"{path} cannot be unpacked as {suffix}: {error}") from error


def lines(path: str | os.PathLike) -> Iterator[bytes]:
    """Iterate over the lines of a text file, plain or packed. Only one line is in memory at a time.

    Args:
        path: The file. A line of more than `MOST_LINE` bytes raises a ValueError.

    Returns:
        An iterator of the lines, each with its line feed.
    """
    with unpacked(path) as file:
        while line := file.readline(MOST_LINE + 1):
            if len(line) > MOST_LINE:
                raise ValueError(f"{path} has a line of more than {MOST_LINE} bytes; allowed: {MOST_LINE} at most")
            yield line


def text(path: str | os.PathLike) -> str:
    """Read a whole UTF-8 text, plain or packed.

    Args:
        path: The file. More than `MOST_TEXT` bytes, or bytes that are not UTF-8, raise a ValueError.

    Returns:
        The text.
    """
    with unpacked(path, most=MOST_TEXT) as file:
        content = file.read()
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}; allowed: UTF-8") from error


def content(path: str | os.PathLike) -> bytes:
    """Read a whole file that is not packed, of at most 256 MiB (`MOST_JSON`)."""
    with unpacked(path, "", MOST_JSON) as file:
        return file.read()


def parse_json(content: str | bytes, path: str | os.PathLike) -> Any:
    """Parse a JSON text.

    Args:
        content: The text.
        path: The file that the text comes from. The error message names it.

    Returns:
        The parsed value. A text that is not JSON, or is nested too deeply, raises a ValueError.

    >>> parse_json('{"a": [1]}', "a.json")
    {'a': [1]}
    """
    try:
        return json.loads(content)
    except RecursionError as error:
        raise ValueError(f"{path} is not JSON: nested too deeply; allowed: a few levels") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error


def read_json(path: str | os.PathLike) -> Any:
    """Read and parse a JSON file of at most 256 MiB (`MOST_JSON`).

    Args:
        path: The file, not packed.

    Returns:
        The parsed value.
    """
    return parse_json(content(path), path)


def check_array(path: str | os.PathLike, shape: tuple[int, ...], itemsize: int) -> int:
    """Check the size of an array that the header of a file announces, before memory is allocated for it.

    Args:
        path: The file. The error message names it.
        shape: The announced shape.
        itemsize: The bytes of one number.

    Returns:
        The size in bytes. A size above `MOST_ARRAY` raises a ValueError.

    >>> check_array("a", (2, 3), 8)
    48
    """
    size = itemsize
    for length in shape:
        size *= max(length, 1)
    if size > MOST_ARRAY:
        raise ValueError(f"{path} announces an array of shape {shape}, {size} bytes; allowed: {MOST_ARRAY} at most")
    return 0 if 0 in shape else size
