"""Digits of any base, packed into whole bytes."""

import math

import numpy as np


def radix_block(base: int) -> tuple[int, int]:
    """Return the best block for packing digits of a base into whole bytes: the one that wastes the fewest bits.

    Args:
        base: base of the digits.

    Returns:
        (digits, bytes) of the block, at most 8 bytes.

    >>> radix_block(3), radix_block(256)
    ((5, 1), (1, 1))
    """
    blocks = [(int(8 * size / math.log2(base) + 1e-12), size) for size in range(1, 9)]
    blocks = [(digits, size) for digits, size in blocks if digits and base**digits <= 1 << 8 * size]
    return min(blocks, key=lambda block: (block[1] / block[0], block[1]))


def radix_bits(d: int, base: int) -> int:
    """Return the number of bits of d digits; see `radix_block`.

    Args:
        d: number of digits.
        base: base of the digits.

    Returns:
        The number of bits, a multiple of 8.
    """
    digits, size = radix_block(base)
    return 8 * size * -(-d // digits)


def encode_digits(values: np.ndarray, base: int) -> bytes:
    """Pack digits of a base into whole bytes; see `radix_block`.

    Args:
        values: digits [d], 0 <= digit < base.
        base: base of the digits.

    Returns:
        `radix_bits(d, base) / 8` bytes.
    """
    digits, size = radix_block(base)
    padded = np.zeros(-(-len(values) // digits) * digits, np.uint64)
    padded[: len(values)] = values
    words = padded.reshape(-1, digits) @ (np.uint64(base) ** np.arange(digits, dtype=np.uint64))
    return words.astype("<u8").view(np.uint8).reshape(-1, 8)[:, :size].tobytes()


def decode_digits(data: bytes, d: int, base: int) -> np.ndarray:
    """Invert `encode_digits`.

    Args:
        data: the bytes.
        d: number of digits.
        base: base of the digits.

    Returns:
        Digits [d].  A ValueError is raised if the length of `data` is wrong, if a block is too large or if the padding
        is not zero.
    """
    digits, size = radix_block(base)
    if 8 * len(data) != radix_bits(d, base):
        raise ValueError(f"{d} digits of base {base} have {radix_bits(d, base) // 8} bytes, got {len(data)}")
    words = np.zeros((len(data) // size, 8), np.uint8)
    words[:, :size] = np.frombuffer(data, np.uint8).reshape(-1, size)
    words = words.view("<u8").reshape(-1, 1)
    if base**digits < 1 << 8 * size and np.any(words >= np.uint64(base**digits)):
        raise ValueError(f"a block of {digits} digits of base {base} must be below {base**digits}, got {words.max()}")
    rest = words // (np.uint64(base) ** np.arange(digits, dtype=np.uint64))
    values = (rest % np.uint64(base)).reshape(-1).astype(np.int64)
    if np.any(values[d:]):
        raise ValueError(f"{d} digits of base {base} must be filled up with zeros, got {values[d:].tolist()}")
    return values[:d]
