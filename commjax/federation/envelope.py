"""What is around a message when it leaves the process: who sent it, when, how long it is, and a checksum.

    magic | version | kind | run | round | client | counted | loss | length | checksum || payload

44 bytes before the payload.  The payload is exactly what an encoder emits, and it alone is what the ledger counts
(`Metrics.bits_up`, `bits_down`); the header, like the transport's own, is reported apart.  Nothing in a header makes the
receiver allocate: `length` is compared with what has arrived and with what is expected, and the payload is a slice.

The checksum (CRC-32) finds accidents.  It does not stop somebody who computes it anew: that is the transport's part, TLS and
authentication (BUILD.md).
"""

import struct
import zlib
from typing import NamedTuple

MAGIC = b"cmjx"
VERSION = 1
KINDS = ("hello", "down", "up")
_HEADER = struct.Struct("<4sHHQIIidI")  # all but the checksum
_CHECKSUM = struct.Struct("<I")
HEADER_BYTES = _HEADER.size + _CHECKSUM.size
MAX_BYTES = (1 << 32) - 1  # of a payload


class RefusedError(ValueError):
    """A message that is not opened; the text says why."""


class Header(NamedTuple):
    kind: str  # one of KINDS
    run: int  # 64 bits that name the run: a message of another one is foreign
    round: int
    client: int
    counted: int = -1  # down: the last round in which the server counted this client; -1: none yet
    loss: float = 0.0  # up: f_i at the params received, a report that the ledger does not count


def seal(header: Header, payload: bytes) -> bytes:
    """The bytes that travel.

    >>> data = seal(Header("up", run=7, round=3, client=1), b"payload")
    >>> len(data) - HEADER_BYTES
    7
    """
    if len(payload) > MAX_BYTES:
        raise ValueError(f"payload must have at most {MAX_BYTES} bytes, got {len(payload)}")
    kind, run, round, client, counted, loss = header
    if kind not in KINDS:
        raise ValueError(f"kind must be one of {KINDS}, got {kind!r}")
    head = _HEADER.pack(MAGIC, VERSION, KINDS.index(kind), run, round, client, counted, loss, len(payload))
    return head + _CHECKSUM.pack(zlib.crc32(payload, zlib.crc32(head))) + payload


def unseal(data: bytes, *, kind: str, run: int, limit: int) -> tuple[Header, bytes]:
    """Header and payload, or a `RefusedError`; `limit` is the longest payload expected.

    >>> unseal(seal(Header("up", 7, 3, 1), b"payload"), kind="up", run=7, limit=7)[1]
    b'payload'
    >>> unseal(seal(Header("up", 7, 3, 1), b"payload"), kind="up", run=8, limit=7)
    Traceback (most recent call last):
    commjax.federation.envelope.RefusedError: foreign: a message of run 0000000000000007, not of 0000000000000008
    """
    if len(data) > HEADER_BYTES + limit:
        raise RefusedError(f"oversized: {len(data)} bytes, at most {HEADER_BYTES} + {limit} were expected")
    if len(data) < HEADER_BYTES:
        raise RefusedError(f"malformed: {len(data)} bytes, a header alone has {HEADER_BYTES}")
    magic, version, number, found, round, client, counted, loss, length = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise RefusedError(f"foreign: begins with {magic!r}, not {MAGIC!r}")
    if version != VERSION:
        raise RefusedError(f"foreign: version {version}, this side speaks version {VERSION}")
    if length != len(data) - HEADER_BYTES:
        raise RefusedError(f"malformed: the header says {length} bytes, {len(data) - HEADER_BYTES} have arrived")
    (checksum,) = _CHECKSUM.unpack_from(data, _HEADER.size)
    payload = bytes(data[HEADER_BYTES:])
    if checksum != zlib.crc32(payload, zlib.crc32(data[: _HEADER.size])):
        raise RefusedError("malformed: the checksum is wrong")
    if number >= len(KINDS) or KINDS[number] != kind:
        raise RefusedError(f"foreign: a message of kind {number}, {kind!r} was expected")
    if found != run:
        raise RefusedError(f"foreign: a message of run {found:016x}, not of {run:016x}")
    return Header(kind, found, round, client, counted, loss), payload
