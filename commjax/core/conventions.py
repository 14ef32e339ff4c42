"""What other codes and papers charge for a message, to match a published axis."""

from collections.abc import Callable

# What other codes and papers charge for k of d float32 values.  The first two are below what any code can do.
LEGACY: dict[str, Callable[[int, float], float]] = {
    "32k": lambda d, k: 32 * k,  # EF21 and EF-BV experiments, the thesis's plots
    "32k+log d": lambda d, k: 32 * k + (d - 1).bit_length(),  # positions charged once
    "k(32+log d)": lambda d, k: k * (32 + (d - 1).bit_length()),  # textbooks
    "64k": lambda d, k: 64 * k,  # 32-bit positions
    "96k": lambda d, k: 96 * k,  # 64-bit positions
    "d+32k": lambda d, k: d + 32 * k,  # bitmap
}


def legacy_bits(convention: str, d: int, k: int | float) -> int | float:
    """A message of k of d values under somebody else's convention, to match a published axis.

    >>> legacy_bits("32k", 112, 2)
    64
    """
    if convention not in LEGACY:
        raise ValueError(f"convention must be one of {list(LEGACY)}, got {convention!r}")
    return LEGACY[convention](d, k)
