"""The wire format: encoders, decoders, and the number of bits of a message before it is encoded.

The number of bits is a function of shapes only, so it can be computed inside jit.  Every encoder emits exactly this
many bits (the last byte is padded).  All integers are little-endian.
"""

import math
from functools import cache
from itertools import accumulate, pairwise
from typing import NamedTuple

import jax
import numpy as np
from jaxtyping import PyTree

# Arrays of 0 and 1, dtype uint8.
Bits = np.ndarray
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


def whole_bytes(bits: int) -> int:
    """Round a number of bits up to a multiple of 8, which is what is sent.

    Args:
        bits: number of bits.

    Returns:
        The multiple of 8.
    """
    return 8 * -(-bits // 8)


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


def encode_values(values: np.ndarray) -> bytes:
    """Return the bytes of an array, in its own dtype.

    Args:
        values: an array of any shape.

    Returns:
        The bytes.
    """
    return np.ascontiguousarray(values).tobytes()


def decode_values(data: bytes, k: int, dtype: np.dtype) -> np.ndarray:
    """Invert `encode_values`.

    Args:
        data: the bytes.
        k: number of values.
        dtype: dtype of the values.

    Returns:
        Array [k].  A ValueError is raised if the length of `data` is wrong.
    """
    dtype = np.dtype(dtype)
    if len(data) != k * dtype.itemsize:
        raise ValueError(f"{k} values of {dtype} have {k * dtype.itemsize} bytes, got {len(data)}")
    return np.frombuffer(data, dtype)


def encode_tree(tree: PyTree) -> bytes:
    """Write the leaves of a tree uncompressed, one after another: `rounds.dense_bits` bits.

    Args:
        tree: pytree of arrays.

    Returns:
        The bytes.

    >>> encode_tree({"b": np.float32(1), "a": np.zeros(2, np.int8)}).hex()
    '00000000803f'
    """
    return b"".join(encode_values(np.asarray(leaf)) for leaf in jax.tree.leaves(tree))


def decode_tree(data: bytes, like: PyTree) -> PyTree:
    """Invert `encode_tree`.

    Args:
        data: the bytes.
        like: tree of arrays with the shapes and dtypes of the result.

    Returns:
        A tree of NumPy arrays.  A ValueError is raised if the length of `data` is wrong.
    """
    leaves, treedef = jax.tree.flatten(like)
    cuts = [*accumulate((leaf.size * np.dtype(leaf.dtype).itemsize for leaf in leaves), initial=0)]
    if len(data) != cuts[-1]:
        raise ValueError(f"a tree of {cuts[-1]} bytes was expected, got {len(data)}")
    parts = (data[start:end] for start, end in pairwise(cuts))
    return treedef.unflatten(
        [decode_values(part, leaf.size, leaf.dtype).reshape(leaf.shape) for part, leaf in zip(parts, leaves)]
    )


def support(value: np.ndarray, k: int) -> np.ndarray:
    """Return k sorted positions that include every entry whose bits are not all zero.

    Args:
        value: vector [d].
        k: number of positions.

    Returns:
        Positions [k].  If fewer than k entries are nonzero, the first zeros fill up.  A ValueError is raised if more
        than k entries are nonzero.
    """
    nonzero = np.flatnonzero(value.view(f"u{value.dtype.itemsize}"))
    if len(nonzero) > k:
        raise ValueError(f"a message of at most {k} values has {len(nonzero)}")
    if len(nonzero) < k:
        spare = np.setdiff1d(np.arange(len(value)), nonzero, assume_unique=True)[: k - len(nonzero)]
        nonzero = np.sort(np.concatenate([nonzero, spare]))
    return nonzero


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
    found = (rest % np.uint64(base)).reshape(-1).astype(np.int64)
    if np.any(found[d:]):
        raise ValueError(f"{d} digits of base {base} must be filled up with zeros, got {found[d:].tolist()}")
    return found[:d]


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
