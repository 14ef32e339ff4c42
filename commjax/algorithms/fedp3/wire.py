"""What FedP3 sends, as bytes.  `submodels` counts their bits.

A message is the leaves one after another, in the order of the params.  Both sides know the plan, so the message does
not say which leaves it contains.  A pruned leaf is the set of its kept positions (`wire.index_code`) and the kept
values.  Positions that are drawn from a key are not sent, because both sides know the key.  Ordered dropout with one
ratio uses only a block of a leaf; if P_i does not prune the leaf, only this block is sent.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from commjax.algorithms.fedp3.submodels import Format, LeafFormat, Masks, format_of
from commjax.compressors import wire
from commjax.core.base import Params

__all__ = ["format_of", "read_down", "read_sent", "read_up", "write_down", "write_up"]


def write_up(format: Format, model: Params) -> bytes:
    """The upload of one client: the layers of L_i.

    Args:
        format: the format of its messages.
        model: the client's model.

    Returns:
        The bytes.
    """
    parts = zip(format, jax.tree.leaves(model), strict=True)
    return b"".join(_values(part, leaf) for part, leaf in parts if part.trained)


def _values(part: LeafFormat, leaf: Any) -> bytes:
    values = np.asarray(leaf)
    return wire.encode_values(values if part.block is None else values[part.block])


def read_up(format: Format, data: bytes, like: Params) -> PyTree:
    """Read an upload.  A ValueError for a message of another length.

    Args:
        format: the format of the client's messages.
        data: the bytes.
        like: the server's params, which also fill the leaves outside the blocks.

    Returns:
        The layers of L_i, as a part of the tree.
    """
    leaves: list[Any] = []
    start = 0
    for part, leaf in zip(format, jax.tree.leaves(like), strict=True):
        stop = start + part.bits_up // 8
        values = wire.decode_values(data[start:stop], part.size, part.dtype) if part.trained else None
        leaves.append(None if values is None else _filled(values, part, leaf))
        start = stop
    _check_end("up", data, start)
    return jax.tree.structure(like).unflatten(leaves)


def _filled(values: np.ndarray, part: LeafFormat, rest: Any) -> jax.Array:
    """An array with `values` in the part's block and `rest` elsewhere."""
    if part.block is None:
        return jnp.asarray(values.reshape(part.shape))
    whole = np.array(np.broadcast_to(np.asarray(rest), part.shape))
    whole[part.block] = values
    return jnp.asarray(whole)


def _check_end(way: str, data: bytes, end: int) -> None:
    if len(data) != end:
        raise ValueError(f"a message {way} of {end} bytes was expected, got {len(data)}")


def write_down(format: Format, sent: Params, masks: Masks) -> bytes:
    """The download of one client.

    Args:
        format: the format of its messages.
        sent: W^l for l in L_i, P_i (.) W^l for the others (`submodels.sent`).
        masks: the masks of P_i, None for a leaf that is sent whole.

    Returns:
        The bytes.
    """
    pieces: list[bytes] = []
    for part, leaf, mask in zip(format, jax.tree.leaves(sent), masks, strict=True):
        if not part.downloaded:
            continue
        if part.kept is None:
            pieces.append(_values(part, leaf))
            continue
        flat = np.asarray(leaf).reshape(-1)
        at = np.flatnonzero(np.asarray(mask).reshape(-1))
        pieces += [wire.encode_indices(at, flat.size) if part.positions else b"", wire.encode_values(flat[at])]
    return b"".join(pieces)


def read_down(format: Format, data: bytes, like: Params, masks: Masks | None = None) -> PyTree:
    """Read a download.  A ValueError for a message of another length.

    Args:
        format: the format of the client's messages.
        data: the bytes.
        like: params of the same shapes and dtypes.
        masks: the masks of P_i, needed only if they are drawn from the key and thus not sent.

    Returns:
        The params with which the client starts: 0 outside the masks and blocks, and None for a head that is not sent.
    """
    return read_sent(format, data, like, masks)[0]


def read_sent(format: Format, data: bytes, like: Params, masks: Masks | None = None) -> tuple[PyTree, Masks]:
    """Read a download, as `read_down` does, and return the masks as well.

    Args:
        format: the format of the client's messages.
        data: the bytes.
        like: params of the same shapes and dtypes.
        masks: as in `read_down`.

    Returns:
        The params, and the masks of P_i, None for a leaf that is sent whole.
    """
    leaves: list[Any] = []
    stays: list[Any] = []
    start = 0
    drawn = [None for _ in format] if masks is None else masks
    for part, mask in zip(format, drawn, strict=True):
        stop = start + part.bits_down // 8
        leaf, stay = _read_leaf(part, data[start:stop], mask)
        leaves.append(leaf)
        stays.append(stay)
        start = stop
    _check_end("down", data, start)
    return jax.tree.structure(like).unflatten(leaves), stays


def _read_leaf(part: LeafFormat, data: bytes, mask: Any) -> tuple[jax.Array | None, jax.Array | None]:
    """A leaf of a download and its mask, None if it is sent whole."""
    if not part.downloaded:
        return None, None
    if part.kept is None:
        values = wire.decode_values(data, len(data) // part.dtype.itemsize, part.dtype)
        return _filled(values, part, np.zeros((), part.dtype)), None
    size, cut = math.prod(part.shape), len(data) - part.kept * part.dtype.itemsize
    if part.positions:
        at = wire.decode_indices(data[:cut], size, part.kept)
    else:
        assert mask is not None
        at = np.flatnonzero(np.asarray(mask).reshape(-1))
    flat, stays = np.zeros(size, part.dtype), np.zeros(size, bool)
    stays[at] = True
    flat[at] = wire.decode_values(data[cut:], part.kept, part.dtype)
    return jnp.asarray(flat.reshape(part.shape)), jnp.asarray(stays.reshape(part.shape))
