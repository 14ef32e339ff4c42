"""Codes for sets of positions: rank, bitmap and Elias-Fano, whichever is shortest for d and k."""

import math
from functools import cache
from typing import NamedTuple

import numpy as np

from commjax.compressors.bit_fields import from_bytes, pack_integers, to_bytes, unpack_integers, whole_bytes

# Largest number of positions that is coded as a rank: the time grows with its square.
_MOST_RANKED = 64


class IndexCode(NamedTuple):
    """A code for a set of k positions below d.

    Attributes:
        name: "all", "rank", "bitmap" or "elias-fano"; see `index_code`.
        bits: length of the code in bits.
    """

    name: str
    bits: int


def low_bits(d: int, k: int) -> int:
    """Return l = max(0, floor(log2(d / k))), the number of low bits that Elias-Fano writes unchanged.

    Args:
        d: number of positions to choose from.
        k: number of chosen positions.

    Returns:
        l.
    """
    return max(0, (d // k).bit_length() - 1)


@cache
def index_code(d: int, k: int) -> IndexCode:
    """Return the code for k positions below d.  It depends on d and k only, so no message names it.

    all: k = d, nothing is sent.
    rank: up to 64 positions.  The rank of the set among all C(d, k) sets is sent: no code of whole bytes is shorter.
    bitmap, elias-fano: more positions.  The shorter code is used: d bits, or about k (2 + log2(d / k)) bits.  With
    float32 values the message is at most 3.2 % longer than the information bound.

    Args:
        d: number of positions to choose from.
        k: number of chosen positions, 1 <= k <= d.

    Returns:
        The name of the code and its length in bits.

    >>> index_code(112, 1), index_code(112, 84), index_code(1_663_370, 16_634)
    (IndexCode(name='rank', bits=7), IndexCode(name='bitmap', bits=112), IndexCode(name='elias-fano', bits=142429))
    """
    if k == d:
        return IndexCode("all", 0)
    if k <= _MOST_RANKED:
        return IndexCode("rank", (math.comb(d, k) - 1).bit_length())
    l = low_bits(d, k)
    return min(IndexCode("bitmap", d), IndexCode("elias-fano", k * l + k + -(-d >> l)), key=lambda code: code.bits)


def sparse_bits(d: int, k: int, value_bits: int) -> int:
    """Return the bits of k values and their positions among d: two fields, each of whole bytes.

    Args:
        d: number of positions.
        k: number of values.
        value_bits: bits of one value.

    Returns:
        The number of bits.
    """
    return k * value_bits + whole_bytes(index_code(d, k).bits)


def _rank(indices: np.ndarray) -> int:
    """Return the rank of an increasing set in the combinatorial number system: sum of C(index_j, j) over j = 1..k."""
    return sum(math.comb(index, j) for j, index in enumerate(indices.tolist(), 1))


def _unrank(rank: int, d: int, k: int) -> np.ndarray:
    """Invert `_rank`: from the last position to the first, take the largest with C(position, j) <= the rest."""
    if rank >= math.comb(d, k):
        raise ValueError(f"an index field of {k} positions below {d} must be below {math.comb(d, k)}, got {rank}")
    indices = np.zeros(k, np.int64)
    for j in range(k, 0, -1):
        # C(c, j) is about (c - (j - 1) / 2)^j / j!, so the first guess is at most a few steps off.
        guess = j - 1
        if rank > 0:
            guess = max(guess, int(math.exp((math.log(rank) + math.lgamma(j + 1)) / j) + (j - 1) / 2))
        size = math.comb(guess, j)
        while size > rank:
            size, guess = size * (guess - j) // guess, guess - 1
        while (larger := math.comb(guess + 1, j) if size == 0 else size * (guess + 1) // (guess + 1 - j)) <= rank:
            size, guess = larger, guess + 1
        indices[j - 1], rank = guess, rank - size
    return indices


def encode_indices(indices: np.ndarray, d: int) -> bytes:
    """Write a set of positions below d in the code that `index_code` names.

    Args:
        indices: increasing positions [k].
        d: number of positions to choose from.

    Returns:
        The bytes.
    """
    indices = np.asarray(indices, np.int64)
    k = len(indices)
    name, count = index_code(d, k)
    if name == "all":
        return b""
    if name == "rank":
        return _rank(indices).to_bytes(whole_bytes(count) // 8, "little")
    if name == "bitmap":
        bitmap = np.zeros(d, np.uint8)
        bitmap[indices] = 1
        return to_bytes(bitmap)
    # Elias-Fano: the low l bits unchanged; the high bits in unary, with the i-th 1 at (index >> l) + i.
    l = low_bits(d, k)
    bits = np.zeros(count, np.uint8)
    bits[: k * l] = pack_integers(indices & ((1 << l) - 1), l)
    bits[k * l + (indices >> l) + np.arange(k)] = 1
    return to_bytes(bits)


def decode_indices(data: bytes, d: int, k: int) -> np.ndarray:
    """Invert `encode_indices`.

    Args:
        data: the bytes.
        d: number of positions to choose from.
        k: number of chosen positions.

    Returns:
        Increasing positions [k].  A ValueError is raised if the bytes are no set of k positions below d.
    """
    name, count = index_code(d, k)
    bits = from_bytes(data, count)
    if name == "all":
        return np.arange(d)
    if name == "rank":
        return _unrank(int.from_bytes(data, "little"), d, k)
    if name == "bitmap":
        indices = np.flatnonzero(bits)
    else:
        l = low_bits(d, k)
        ones = np.flatnonzero(bits[k * l :])
        if len(ones) != k:
            raise ValueError(f"an index field of {k} positions has {len(ones)}")
        low = unpack_integers(bits[: k * l], l).astype(np.int64)  # l > 0, else a bitmap would be shorter
        indices = ((ones - np.arange(k)) << l) | low
    if len(indices) != k or np.any(indices >= d) or np.any(np.diff(indices) <= 0):
        raise ValueError(f"an index field must hold {k} increasing positions below {d}, got {indices[:8].tolist()}...")
    return indices


def information_floor(d: int, k: int, value_bits: int = 32) -> float:
    """Return value_bits k + log2 C(d, k): no code is shorter for all messages of k of d values.

    Args:
        d: number of positions.
        k: number of values.
        value_bits: bits of one value.

    Returns:
        The number of bits, not rounded.
    """
    log_choose = math.lgamma(d + 1) - math.lgamma(k + 1) - math.lgamma(d - k + 1)
    return value_bits * k + log_choose / math.log(2)
