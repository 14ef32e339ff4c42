"""Fields of bits: integers of a fixed width, packed into whole bytes, the low bit first."""

import numpy as np

# Arrays of 0 and 1, dtype uint8.
Bits = np.ndarray


def whole_bytes(bits: int) -> int:
    """Round a number of bits up to a multiple of 8, because messages consist of whole bytes.

    Args:
        bits: number of bits.

    Returns:
        The multiple of 8.
    """
    return 8 * -(-bits // 8)


def pack_integers(values: np.ndarray, width: int) -> Bits:
    """Write each value as `width` bits, the low bit first.

    Args:
        values: nonnegative integers [k].
        width: number of bits of each value.

    Returns:
        Bits [k * width].
    """
    return (
        ((np.asarray(values).astype(np.uint64)[:, None] >> np.arange(width, dtype=np.uint64)) & np.uint64(1))
        .astype(np.uint8)
        .reshape(-1)
    )


def unpack_integers(bits: Bits, width: int) -> np.ndarray:
    """Invert `pack_integers`.

    Args:
        bits: bits [k * width].
        width: number of bits of each value.

    Returns:
        Integers [k], dtype uint64.
    """
    rows = bits.reshape(-1, width).astype(np.uint64)
    return (rows << np.arange(width, dtype=np.uint64)).sum(axis=1, dtype=np.uint64)


def to_bytes(bits: Bits) -> bytes:
    """Pack bits into bytes, the low bit first; the last byte is padded with zeros.

    Args:
        bits: array of 0 and 1.

    Returns:
        The bytes.
    """
    return np.packbits(bits, bitorder="little").tobytes()


def from_bytes(data: bytes, count: int) -> Bits:
    """Invert `to_bytes`.

    Args:
        data: the bytes.
        count: number of bits.

    Returns:
        Bits [count].  A ValueError is raised if the length of `data` is wrong or the padding is not zero.
    """
    if len(data) != whole_bytes(count) // 8:
        raise ValueError(f"a field of {count} bits has {whole_bytes(count) // 8} bytes, got {len(data)}")
    bits = np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little")
    if np.any(bits[count:]):
        raise ValueError(f"a field of {count} bits must be filled up with zeros, got {bits[count:].tolist()}")
    return bits[:count]
