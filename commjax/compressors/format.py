"""Test whether the bytes of a compressor agree with its `compress`."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from commjax.core.base import Compressor, Key


class WireFormatError(ValueError):
    """`encode`, `decode` and `compress` of one compressor disagree."""


def _inputs(like: PyTree, seed: int) -> dict[str, PyTree]:
    """Return vectors with the form and dtypes of `like`: generic, tied, sparse, and zeros of both signs."""
    leaves, treedef = jax.tree.flatten(like)
    size = sum(leaf.size for leaf in leaves)
    rng = np.random.default_rng(seed)
    flat = {
        "Gaussian": rng.standard_normal(size) * np.exp(rng.standard_normal(size)),
        "ties": rng.choice([-1.0, -0.75, 0.75, 1.0], size),
        "one entry": np.where(np.arange(size) == seed % size, -3.0, 0.0),
        "zeros": np.where(np.arange(size) % 2 == 0, 0.0, -0.0),
    }
    ends = np.cumsum([leaf.size for leaf in leaves])

    def on_leaves(values: np.ndarray) -> PyTree:
        parts = np.split(values, ends[:-1])
        return treedef.unflatten([jnp.asarray(p.reshape(l.shape), l.dtype) for p, l in zip(parts, leaves)])

    return {name: on_leaves(values) for name, values in flat.items()}


def _same_form(name: str, source: str, value: PyTree, like: PyTree) -> None:
    """Raise a WireFormatError if the structure, a shape or a dtype of `value` differs from that of `like`."""
    have, want = jax.tree.structure(value), jax.tree.structure(like)
    if have != want:
        raise WireFormatError(f"{name}: structure: {source} gave {have}, the input has {want}")
    for number, (leaf, wanted) in enumerate(zip(jax.tree.leaves(value), jax.tree.leaves(like))):
        for field in ("shape", "dtype"):
            if getattr(leaf, field) != getattr(wanted, field):
                raise WireFormatError(
                    f"{name}: {field}: {source} gave {getattr(leaf, field)} for leaf {number}, "
                    f"the input has {getattr(wanted, field)}"
                )


def _same_bits(name: str, decoded: PyTree, compressed: PyTree, case: str) -> None:
    for number, (ours, theirs) in enumerate(zip(jax.tree.leaves(decoded), jax.tree.leaves(compressed))):
        ours, theirs = np.asarray(ours).reshape(-1), np.asarray(theirs).reshape(-1)
        words = f"u{ours.dtype.itemsize}"
        if len(different := np.flatnonzero(ours.view(words) != theirs.view(words))):
            at = different[0]
            raise WireFormatError(
                f"{name}: value: decode(encode(x)) has {ours[at]!r} at position {at} of leaf {number}, compress(x) has"
                f" {theirs[at]!r}; {len(different)} of {len(ours)} entries differ ({case})"
            )


def check(
    compressor: Compressor,
    like: PyTree,
    n: int | Sequence[int] = (2, 3),
    *,
    key: Key | None = None,
    keys: int = 2,
) -> None:
    """Raise an error if the bytes of a compressor disagree with its compiled `compress`.

        bits       compress(x).bits = 8 len(encode(x))
        value      decode(encode(x)) = compress(x).value, bit for bit
        structure, shape, dtype   both values have those of x

    The test uses several keys and kinds of vectors, and goes through the clients in turn.  It is a test, not a proof.

    Args:
        compressor: the compressor to test.
        like: a pytree of floating-point arrays, or of `jax.ShapeDtypeStruct`; only shapes and dtypes are used.
        n: number of clients, or several numbers that are tested one after another.
        key: random key; `jax.random.key(0)` if None.
        keys: number of keys that are derived from `key` for each number of clients.

    Raises:
        WireFormatError: names what differs and shows both values.

    >>> from commjax.compressors import top_k
    >>> check(top_k(2), {"w": jnp.zeros((3, 4)), "b": jnp.zeros(3)})
    """
    key = jax.random.key(0) if key is None else key
    zeros = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), like)
    compress = jax.jit(compressor.compress, static_argnums=3)
    for count in (n,) if isinstance(n, int) else n:
        inputs = [(number, *pair) for number in range(keys) for pair in _inputs(zeros, number).items()]
        for turn, (number, kind, x) in enumerate(inputs):
            round_key, id = jax.random.fold_in(key, number), turn % count
            case = f"key {number}, client {id} of {count}, {kind}"
            message, data = compress(round_key, x, id, count), compressor.encode(round_key, x, id, count)
            if float(message.bits) != 8 * len(data):
                raise WireFormatError(
                    f"{compressor.name}: bits: compress counts {float(message.bits):.17g},"
                    f" encode gave {len(data)} bytes = {8 * len(data)} bits ({case})"
                )
            decoded = compressor.decode(round_key, data, zeros, id, count)
            _same_form(compressor.name, "compress", message.value, x)
            _same_form(compressor.name, "decode", decoded, x)
            _same_bits(compressor.name, decoded, message.value, case)
