"""The wire format: encoders, decoders, and the number of bits of a message before it is encoded.

The number of bits is a function of shapes only, so it can be computed inside jit.  Every encoder emits exactly this
many bits (the last byte is padded).  All integers are little-endian.

bit_fields      integers of a fixed width
index_codes     sets of positions
digits          digits of any base

This module encodes arrays and pytrees, and re-exports the names of the other three modules.
"""

from itertools import accumulate, pairwise

import jax
import numpy as np
from jaxtyping import PyTree

from commjax.compressors.bit_fields import Bits, from_bytes, pack_integers, to_bytes, unpack_integers, whole_bytes
from commjax.compressors.digits import decode_digits, encode_digits, radix_bits, radix_block
from commjax.compressors.index_codes import (
    IndexCode,
    decode_indices,
    encode_indices,
    index_code,
    information_floor,
    low_bits,
    sparse_bits,
)

__all__ = [
    "Bits",
    "IndexCode",
    "decode_digits",
    "decode_indices",
    "decode_tree",
    "decode_values",
    "encode_digits",
    "encode_indices",
    "encode_tree",
    "encode_values",
    "from_bytes",
    "index_code",
    "information_floor",
    "low_bits",
    "pack_integers",
    "radix_bits",
    "radix_block",
    "sparse_bits",
    "support",
    "to_bytes",
    "unpack_integers",
    "whole_bytes",
]


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
    """Read a tree from the bytes that `encode_tree` wrote.

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
