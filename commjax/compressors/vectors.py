"""From maps on R^d to compressors of pytrees."""

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import accumulate

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from commjax.core import tree
from commjax.core.base import Compressor, Constants, Message


def check_k(name: str, k: int, d: int, argument: str = "k") -> None:
    """1 <= k <= d, known only when the vector is"""
    if k > d:
        raise ValueError(f"{name}: {argument} must be at most the dimension d = {d}, got {k}")


def check_count(name: str, argument: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}: {argument} must be an integer of at least 1, got {value!r}")


def value_bits(dtype) -> int:
    """Bits of one number on the wire"""
    return 8 * np.dtype(dtype).itemsize


def independent(n: int, eta: float, omega: float) -> Constants:
    """Mutually independent compressors: omega_ran = omega / n (L816)."""
    return Constants(float(eta), float(omega), float(omega) / n)


def from_value(compress: Callable, pack_value: Callable) -> Callable:
    """pack for a message that can be read off its own value: compress first, then (key, value: np.ndarray, id, n) -> bytes"""
    return lambda key, x, id, n: pack_value(key, np.asarray(compress(key, x, id, n)), id, n)


def on_vectors(
    name: str,
    *,
    compress: Callable,  # (key, x [d], id, n) -> value [d]
    bits: Callable,  # (key, d, dtype, id, n) -> price
    pack: Callable,  # (key, x [d], id, n) -> what is sent for x; see `from_value`
    unpack: Callable,  # (key, data, d, dtype, id, n) -> value [d]
    constants: Callable,  # (d, n) -> Constants
    kept: Callable,  # (d, n) -> values in a message
    outcomes: Callable,  # (xs [n, d]) -> the joint law; see `laws`
) -> Compressor:
    """A compressor of pytrees, taken as one long vector."""

    def on_tree(key, x, id=0, n=1):
        flat, unravel = ravel_pytree(x)
        flat = tree.once(flat)
        price = jnp.asarray(bits(key, flat.size, flat.dtype, id, n), jnp.zeros(()).dtype)
        return Message(unravel(compress(key, flat, id, n)), price)

    def encode(key, x, id=0, n=1):
        flat, _ = ravel_pytree(x)
        return pack(key, flat, id, n)

    def decode(key, data, like, id=0, n=1):
        leaves, treedef = jax.tree.flatten(like)
        dtype = leaves[0].dtype if len(leaves) == 1 else jnp.result_type(*leaves)
        flat = np.asarray(unpack(key, data, tree.size(like), dtype, id, n))
        # `ravel_pytree`'s inverse in NumPy: a server decodes many small messages, and every operation of JAX has its price.
        ends = [*accumulate(leaf.size for leaf in leaves)]
        parts = [flat[end - leaf.size : end].reshape(leaf.shape) for leaf, end in zip(leaves, ends)]
        return treedef.unflatten([part.astype(leaf.dtype, copy=False) for part, leaf in zip(parts, leaves)])

    def length(key, like, id=0, n=1):
        dtypes = [leaf.dtype for leaf in jax.tree.leaves(like)]
        dtype = dtypes[0] if len(dtypes) == 1 else jnp.result_type(*dtypes)
        return int(bits(key, tree.size(like), dtype, id, n)) // 8

    return Compressor(
        name,
        on_tree,
        lambda d, n=1: constants(d, n),
        encode,
        decode,
        lambda d, n=1: kept(d, n),
        outcomes,
        length=length,
    )


def payload_bytes(compressor: Compressor, key, like, id=0, n: int = 1) -> int:
    """The length of a message on the host, an exact integer at any size.

    Args:
        compressor: whose message it is.
        key: of the round.
        like: arrays or `jax.ShapeDtypeStruct`s of the shapes and dtypes of x.
        id: of the client.
        n: number of clients.

    Returns:
        `compressor.length`; for a compressor without it the bits of `compress`, and above 2^24 of them the next float32 number.
    """
    if compressor.length is not None:
        return compressor.length(key, like, id, n)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)
    bits = np.asarray(compressor.compress(key, zeros, id, n).bits)
    return int(bits if bits < 2**24 else np.nextafter(bits, np.inf, dtype=bits.dtype)) // 8


def leafwise(compressor: Compressor | Callable[[int], Compressor]) -> Compressor:
    """Leaf by leaf: each leaf is a vector of its own, with its own randomness.

    Takes a compressor, or a function of the leaf's size (`lambda d: top_k(max(1, d // 100))`).  `constants` and `kept` take
    the list of leaf sizes.  In C(max eta, max omega), since both squared errors are sums over leaves.
    """

    @cache
    def at(d: int) -> Compressor:
        return compressor if isinstance(compressor, Compressor) else compressor(d)

    @partial(jax.jit, static_argnames="count")
    def keys_of(key, count):
        """The key of each leaf: one program for all leaves."""
        return [jax.random.fold_in(key, i) for i in range(count)]

    def lengths(key, like, id, n):
        """The keys of the leaves, and the exact length of the message of each, which may depend on the round"""
        flat = jax.tree.leaves(like)
        keys = keys_of(key, len(flat))
        return keys, [payload_bytes(at(tree.size(leaf)), k, leaf, id, n) for k, leaf in zip(keys, flat)]

    def length(key, like, id=0, n=1):
        return sum(lengths(key, like, id, n)[1])

    def leaves(key, x):
        flat, treedef = jax.tree.flatten(x)
        return [(jax.random.fold_in(key, i), leaf, at(math.prod(leaf.shape))) for i, leaf in enumerate(flat)], treedef

    def compress(key, x, id=0, n=1):
        parts, treedef = leaves(key, x)
        messages = [one.compress(k, leaf, id, n) for k, leaf, one in parts]
        return Message(
            treedef.unflatten([m.value for m in messages]), sum((m.bits for m in messages), start=jnp.zeros(()))
        )

    def constants(sizes: int | Sequence[int], n: int = 1) -> Constants:
        sizes = [sizes] if isinstance(sizes, int) else sizes
        return Constants(*(max(values) for values in zip(*(at(d).constants(d, n) for d in sizes))))

    def encode(key, x, id=0, n=1):
        # Each leaf's length is known to the receiver, except where a client is silent: a length prefix would be a bit too many.
        return b"".join(one.encode(k, leaf, id, n) for k, leaf, one in leaves(key, x)[0])

    def decode(key, data, like, id=0, n=1):
        flat, treedef = jax.tree.flatten(like)
        keys, sizes = lengths(key, like, id, n)
        ends = [*accumulate(sizes)]
        if ends[-1] != len(data):
            raise ValueError(f"{name}: a message of {ends[-1]} bytes was expected, got {len(data)}")
        return treedef.unflatten(
            [
                at(leaf.size).decode(k, data[start:stop], leaf, id, n)
                for k, leaf, start, stop in zip(keys, flat, [0, *ends], ends)
            ]
        )

    def kept(sizes: int | Sequence[int], n: int = 1) -> float:
        return float(sum(at(d).kept(d, n) for d in ([sizes] if isinstance(sizes, int) else sizes)))

    name = f"leafwise({compressor.name if isinstance(compressor, Compressor) else 'function of size'})"
    return Compressor(name, compress, constants, encode, decode, kept, length=length)
