"""The header of a message between processes: run, round, client, length and a checksum.

    magic | version | kind | run | round | client | counted | loss | length | checksum || payload

The header has 44 bytes.  The payload is exactly what an encoder returns, and `Metrics.bits_up` and `bits_down` count
the payload only.  The bytes of headers are reported separately.  No number in a header makes the receiver allocate
memory: `length` is compared with what has arrived and with what is expected, and the payload is a slice.

The checksum (CRC-32) finds accidental damage.  It does not stop an attacker, who can compute it; TLS and authentication
of the transport do (BUILD.md).
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
    """A message is refused; the text says why."""


class Header(NamedTuple):
    """The header of a message.

    Attributes:
        kind: one of `KINDS`.
        run: 64 bits that identify the run (`contract.fingerprint`); a message of another run is refused.
        round: number of the round.
        client: id of the client that receives a download or sends an upload.
        counted: in a download, the last round in which the server counted an upload of this client; -1 if none.
        loss: in an upload, f_i at the params received.  Its bits are not counted.
    """

    kind: str
    run: int
    round: int
    client: int
    counted: int = -1
    loss: float = 0.0


def seal(header: Header, payload: bytes) -> bytes:
    """Put a header before a payload.

    Args:
        header: the header.
        payload: at most `MAX_BYTES` bytes.

    Returns:
        The bytes to send.

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
    """Split a message into header and payload, and validate it.

    Args:
        data: the bytes that arrived.
        kind: the expected kind.
        run: the expected run.
        limit: largest number of bytes of the payload.

    Returns:
        Header and payload.  Raises a RefusedError if the message is damaged, too long, or of another kind or run.

    >>> unseal(seal(Header("up", 7, 3, 1), b"payload"), kind="up", run=7, limit=7)[1]
    b'payload'
    >>> unseal(seal(Header("up", 7, 3, 1), b"payload"), kind="up", run=8, limit=7)
    Traceback (most recent call last):
    commjax.federation.envelope.RefusedError: of another run: 0000000000000007, not 0000000000000008
    """
    if len(data) > HEADER_BYTES + limit:
        raise RefusedError(f"oversized: {len(data)} bytes, at most {HEADER_BYTES} + {limit} were expected")
    if len(data) < HEADER_BYTES:
        raise RefusedError(f"malformed: {len(data)} bytes, a header alone has {HEADER_BYTES}")
    magic, version, number, sender, round, client, counted, loss, length = _HEADER.unpack_from(data)
    if magic != MAGIC:
        raise RefusedError(f"not of commjax: begins with {magic!r}, not {MAGIC!r}")
    if version != VERSION:
        raise RefusedError(f"of another version: {version}, this side speaks version {VERSION}")
    if length != len(data) - HEADER_BYTES:
        raise RefusedError(f"malformed: the header says {length} bytes, {len(data) - HEADER_BYTES} have arrived")
    (checksum,) = _CHECKSUM.unpack_from(data, _HEADER.size)
    payload = bytes(data[HEADER_BYTES:])
    if checksum != zlib.crc32(payload, zlib.crc32(data[: _HEADER.size])):
        raise RefusedError("malformed: the checksum is wrong")
    if number >= len(KINDS) or KINDS[number] != kind:
        raise RefusedError(f"of another kind: {number}, {kind!r} was expected")
    if sender != run:
        raise RefusedError(f"of another run: {sender:016x}, not {run:016x}")
    return Header(kind, sender, round, client, counted, loss), payload
