"""Read files within limits: how much a packed file may unpack to, how long a line may be, how large a JSON text may be.

A file that was made to exhaust memory is refused with an error that names the file, the value and what is allowed.
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
# Packed texts are 5 to 30 times smaller.  A file that unpacks to more than this, beyond 64 MiB, is refused.
MOST_RATIO = 100
ALWAYS_ALLOWED = 2**26  # bytes, whatever the ratio


class _Counted(io.RawIOBase):
    """A reader that refuses to give more than `most` bytes."""

    def __init__(self, file: Any, path: str | os.PathLike, most: int, allowed: str):
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
    """A binary reader of the text inside a file; a damaged or oversized file is a ValueError that names it.

    Args:
        path: The file.
        suffix: How it is packed: ".gz", ".bz2", ".xz", other: not at all.  By default the suffix of the path.
        most: Bytes that may be read; None: no limit but that of the ratio.
    Returns:
        A context that gives the reader.

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
            # bz2 says "Invalid data stream" in an OSError without a number.
            if error.errno is not None or suffix not in _UNPACK:
                raise
            raise ValueError(f"{path} cannot be unpacked as {suffix}: {error}") from error


def lines(path: str | os.PathLike) -> Iterator[bytes]:
    """The lines of a text file, plain or packed, one at a time; only one of them is in memory."""
    with unpacked(path) as file:
        while line := file.readline(MOST_LINE + 1):
            if len(line) > MOST_LINE:
                raise ValueError(f"{path} has a line of more than {MOST_LINE} bytes; allowed: {MOST_LINE} at most")
            yield line


def text(path: str | os.PathLike) -> str:
    """All of a UTF-8 text, plain or packed."""
    with unpacked(path, most=MOST_TEXT) as file:
        content = file.read()
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}; allowed: UTF-8") from error


def parse_json(content: str | bytes, path: str | os.PathLike) -> Any:
    """The value of a JSON text; ValueError, with the name of its file, if it is not JSON or nested too deeply.

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
    """The value in a JSON file of at most 256 MiB."""
    with unpacked(path, "", MOST_JSON) as file:
        return parse_json(file.read(), path)


def check_array(path: str | os.PathLike, shape: tuple[int, ...], itemsize: int) -> int:
    """The bytes of an array that a file's header announces; ValueError if they are too many to be meant.

    >>> check_array("a", (2, 3), 8)
    48
    """
    size = itemsize
    for length in shape:
        size *= max(length, 1)
    if size > MOST_ARRAY:
        raise ValueError(f"{path} announces an array of shape {shape}, {size} bytes; allowed: {MOST_ARRAY} at most")
    return 0 if 0 in shape else size
