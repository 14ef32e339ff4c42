"""Build compressors of pytrees from maps on R^d."""

import math
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, PyTree

from commjax.compressors.exact_laws import Law
from commjax.core import tree
from commjax.core.base import ClientId, Compressor, Constants, Key, Message

# (key, x [d], id, n) -> value [d]
OnVector = Callable[[Key, Array, ClientId, int], Array]
# (key, x [d], id, n) -> bytes
Pack = Callable[[Key, Array, ClientId, int], bytes]
# (key, compressed value [d], id, n) -> bytes
PackValue = Callable[[Key, np.ndarray, ClientId, int], bytes]


def check_k(name: str, k: int, d: int, argument: str = "k") -> None:
    """Raise a ValueError if k > d.

    The check is here because d is known only when the vector is.

    Args:
        name: name of the compressor, for the error message.
        k: the number to check.
        d: dimension.
        argument: name of the argument that holds k, for the error message.
    """
    if k > d:
        raise ValueError(f"{name}: {argument} must be at most the dimension d = {d}, got {k}")


def check_count(name: str, argument: str, value: object) -> None:
    """Raise a ValueError unless `value` is an int of at least 1.

    Args:
        name: name of the compressor, for the error message.
        argument: name of the argument, for the error message.
        value: the value to check.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"{name}: {argument} must be an integer of at least 1, got {value!r}")


def value_bits(dtype: Any) -> int:
    """Return the number of bits of one number on the wire.

    Args:
        dtype: dtype of the number.

    Returns:
        8 times the size of the dtype in bytes.
    """
    return 8 * np.dtype(dtype).itemsize


def independent(n: int, eta: float, omega: float) -> Constants:
    """Return the constants of mutually independent compressors: omega_ran = omega / n (thesis: Sec. 2.2.2).

    Args:
        n: number of clients.
        eta: relative bias of each compressor.
        omega: relative variance of each compressor.

    Returns:
        Constants(eta, omega, omega / n).
    """
    return Constants(float(eta), float(omega), float(omega) / n)


def from_value(compress: OnVector, pack_value: PackValue) -> Pack:
    """Build a `pack` for `on_vectors` from an encoder of the compressed value.

    Args:
        compress: (key, x [d], id, n) -> value [d].
        pack_value: (key, value: np.ndarray [d], id, n) -> bytes.

    Returns:
        (key, x [d], id, n) -> bytes: compresses x, then encodes the value.
    """
    return lambda key, x, id, n: pack_value(key, np.asarray(compress(key, x, id, n)), id, n)


def on_vectors(
    name: str,
    *,
    compress: OnVector,
    bits: Callable[[Key, int, Any, ClientId, int], int | Array],
    pack: Pack,
    unpack: Callable[[Key, bytes, int, Any, ClientId, int], np.ndarray | Array],
    constants: Callable[[int, int], Constants],
    kept: Callable[[int, int], int | float],
    outcomes: Callable[[np.ndarray], Law] | None,
) -> Compressor:
    """Build a compressor of pytrees that treats the pytree as one long vector of R^d.

    Args:
        name: name of the compressor.
        compress: (key, x [d], id, n) -> value [d], pure and jittable.
        bits: (key, d, dtype, id, n) -> length of the message in bits, a multiple of 8.
        pack: (key, x [d], id, n) -> bytes that are sent for x; see `from_value`.
        unpack: (key, data, d, dtype, id, n) -> value [d].
        constants: (d, n) -> Constants.
        kept: (d, n) -> number of values in a message.
        outcomes: (xs [n, d]) -> the joint law of the n clients; see `exact_laws`.

    Returns:
        A compressor of pytrees.
    """

    def on_tree(key: Key, x: PyTree, id: ClientId = 0, n: int = 1) -> Message:
        flat, unravel = ravel_pytree(x)
        flat = tree.once(flat)
        length = jnp.asarray(bits(key, flat.size, flat.dtype, id, n), jnp.zeros(()).dtype)
        return Message(unravel(compress(key, flat, id, n)), length)

    def encode(key: Key, x: PyTree, id: ClientId = 0, n: int = 1) -> bytes:
        flat, _ = ravel_pytree(x)
        return pack(key, flat, id, n)

    def decode(key: Key, data: bytes, like: PyTree, id: ClientId = 0, n: int = 1) -> PyTree:
        leaves, treedef = jax.tree.flatten(like)
        dtype = leaves[0].dtype if len(leaves) == 1 else jnp.result_type(*leaves)
        flat = np.asarray(unpack(key, data, tree.size(like), dtype, id, n))
        # `ravel_pytree`'s inverse in NumPy, because a server decodes many small messages, and every JAX operation has
        # an overhead.
        ends = [*accumulate(leaf.size for leaf in leaves)]
        parts = [flat[end - leaf.size : end].reshape(leaf.shape) for leaf, end in zip(leaves, ends)]
        return treedef.unflatten([part.astype(leaf.dtype, copy=False) for part, leaf in zip(parts, leaves)])

    def length(key: Key, like: PyTree, id: ClientId = 0, n: int = 1) -> int:
        dtypes = [leaf.dtype for leaf in jax.tree.leaves(like)]
        dtype = dtypes[0] if len(dtypes) == 1 else jnp.result_type(*dtypes)
        return int(bits(key, tree.size(like), dtype, id, n)) // 8

    def constants_of(d: int, n: int = 1) -> Constants:
        return constants(d, n)

    def kept_of(d: int, n: int = 1) -> int | float:
        return kept(d, n)

    return Compressor(
        name,
        on_tree,
        constants_of,
        encode,
        decode,
        kept_of,
        outcomes,
        length=length,
    )


def payload_bytes(compressor: Compressor, key: Key, like: PyTree, id: ClientId = 0, n: int = 1) -> int:
    """Return the length of a message in bytes, computed on the host.

    Args:
        compressor: the compressor of the message.
        key: key of the round.
        like: pytree of arrays or `jax.ShapeDtypeStruct` with the shapes and dtypes of x.
        id: number of the client.
        n: number of clients.

    Returns:
        The exact length from `compressor.length`.  For a compressor without `length`, the length comes from the bits
        that `compress` counts in float32; from 2^24 bits on it is an upper bound.
    """
    if compressor.length is not None:
        return compressor.length(key, like, id, n)
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)
    bits = np.asarray(compressor.compress(key, zeros, id, n).bits)
    return int(bits if bits < 2**24 else np.nextafter(bits, np.inf, dtype=bits.dtype)) // 8


def leafwise(compressor: Compressor | Callable[[int], Compressor]) -> Compressor:
    """Compress each leaf as a separate vector with separate randomness.

        C(x)_l = C_l(x_l)  for every leaf l

    Both squared errors are sums over leaves, so the result is in C(max_l eta_l, max_l omega_l).

    Args:
        compressor: a compressor, or a function that maps a leaf's size to a compressor
            (`lambda d: top_k(max(1, d // 100))`).

    Returns:
        A compressor whose `constants` and `kept` take the list of leaf sizes instead of d.
    """

    @cache
    def at(d: int) -> Compressor:
        return compressor if isinstance(compressor, Compressor) else compressor(d)

    @partial(jax.jit, static_argnames="count")
    def keys_of(key: Key, count: int) -> list[Key]:
        """Return the key of each leaf, with one program for all leaves."""
        return [jax.random.fold_in(key, i) for i in range(count)]

    def lengths(key: Key, like: PyTree, id: ClientId, n: int) -> tuple[list[Key], list[int]]:
        """Return the key of each leaf and the exact length of its message, which may depend on the round."""
        flat = jax.tree.leaves(like)
        keys = keys_of(key, len(flat))
        return keys, [payload_bytes(at(tree.size(leaf)), k, leaf, id, n) for k, leaf in zip(keys, flat)]

    def length(key: Key, like: PyTree, id: ClientId = 0, n: int = 1) -> int:
        return sum(lengths(key, like, id, n)[1])

    def leaves(key: Key, x: PyTree) -> tuple[list[tuple[Key, Any, Compressor]], Any]:
        flat, treedef = jax.tree.flatten(x)
        return [(jax.random.fold_in(key, i), leaf, at(math.prod(leaf.shape))) for i, leaf in enumerate(flat)], treedef

    def compress(key: Key, x: PyTree, id: ClientId = 0, n: int = 1) -> Message:
        parts, treedef = leaves(key, x)
        messages = [at_leaf.compress(k, leaf, id, n) for k, leaf, at_leaf in parts]
        return Message(
            treedef.unflatten([m.value for m in messages]), sum((m.bits for m in messages), start=jnp.zeros(()))
        )

    def constants(sizes: int | Sequence[int], n: int = 1) -> Constants:
        sizes = [sizes] if isinstance(sizes, int) else sizes
        return Constants(*(max(values) for values in zip(*(at(d).constants(d, n) for d in sizes))))

    def encode(key: Key, x: PyTree, id: ClientId = 0, n: int = 1) -> bytes:
        # No length prefix: the receiver computes the length of each leaf's message with `lengths`.
        return b"".join(at_leaf.encode(k, leaf, id, n) for k, leaf, at_leaf in leaves(key, x)[0])

    def decode(key: Key, data: bytes, like: PyTree, id: ClientId = 0, n: int = 1) -> PyTree:
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
