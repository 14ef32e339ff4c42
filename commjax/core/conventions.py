"""The bits that other programs and papers count for a message, to match the axis of a published figure."""

from collections.abc import Callable

# Bits for k of d float32 values.  The first two are less than any encoding of values and positions needs.
LEGACY: dict[str, Callable[[int, float], float]] = {
    "32k": lambda d, k: 32 * k,  # experiments of EF21 and EF-BV, figures of the thesis
    "32k+log d": lambda d, k: 32 * k + (d - 1).bit_length(),  # one position for all values
    "k(32+log d)": lambda d, k: k * (32 + (d - 1).bit_length()),  # textbooks
    "64k": lambda d, k: 64 * k,  # 32-bit positions
    "96k": lambda d, k: 96 * k,  # 64-bit positions
    "d+32k": lambda d, k: d + 32 * k,  # bitmap
}


def legacy_bits(convention: str, d: int, k: int | float) -> int | float:
    """Bits of a message of k of d values, as another paper counts them.

    Args:
        convention: a name in `LEGACY`.
        d: number of coordinates.
        k: number of values that are sent; a mean need not be an integer.

    Returns:
        The number of bits.

    >>> legacy_bits("32k", 112, 2)
    64
    """
    if convention not in LEGACY:
        raise ValueError(f"convention must be one of {list(LEGACY)}, got {convention!r}")
    return LEGACY[convention](d, k)
