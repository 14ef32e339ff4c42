"""What FedP3 sends, as bytes, and its bits.

A message is the leaves one after another, in the order of the params.  Both sides know the plan, so the message does
not say which leaves it contains.  A pruned leaf is the set of its kept positions (`wire.index_code`) and the kept
values.  Positions that are drawn from a key are not sent, because both sides know the key.  Ordered dropout with one
ratio uses only a block of a leaf; if P_i does not prune the leaf, only this block is sent.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Bool, PyTree

from commjax.algorithms.fedp3 import local_pruning
from commjax.algorithms.fedp3.layers import Layers
from commjax.algorithms.fedp3.local_pruning import LocalPruning
from commjax.algorithms.fedp3.plans import Plan, kept, layer_sets, ratios
from commjax.algorithms.fedp3.submodels import Masks, Pruning
from commjax.compressors import wire
from commjax.core.base import Params


class Format(NamedTuple):
    """What server and client know about the messages of one client.

    Attributes:
        layers: the layers of the params.
        trained: L_i, a bool for each layer.
        keep: keep ratio of the layers outside L_i.
        positions: whether the positions of the kept weights are sent.  They are not if both sides draw them.
        local_head: whether the client keeps its own final layer, which is then not downloaded.
        blocks: for each leaf the mask of the part that the client uses; None is all of it.
    """

    layers: Layers
    trained: Bool[np.ndarray, "l"]
    keep: float
    positions: bool
    local_head: bool
    blocks: list[np.ndarray | None]


def format_of(
    plan: Plan,
    client: int,
    params: Params,
    *,
    pruning: Pruning,
    local: LocalPruning | None = None,
    local_head: bool = False,
) -> Format:
    """The format of the messages of one client.

    Args:
        plan: the plan.
        client: the client's row of the plan.
        params: the params, or their shapes and dtypes.
        pruning: P_i.
        local: Q_i; None is no local pruning.
        local_head: whether each client keeps its own final layer.

    Returns:
        The format.
    """
    blocks = local_pruning.fixed_blocks(plan, local or local_pruning.fixed(), client, params)
    final = len(plan.layers.names) - 1
    # A head that stays with its client is used whole, since the server does not have the rest of it.
    parts = zip(blocks, plan.layers.of, strict=True)
    used = [None if local_head and layer == final else block for block, layer in parts]
    positions = pruning.score is not None
    return Format(plan.layers, plan.trained[client], float(plan.keep[client]), positions, local_head, used)


class Bits(NamedTuple):
    """Bits of the two messages of a client.

    Attributes:
        up: bits of the upload.
        down: bits of the download.
    """

    up: int
    down: int


def bits(format: Format, params: Params) -> Bits:
    """Bits of the messages of one client, from shapes alone.

    Args:
        format: the format of its messages.
        params: the params, or their shapes and dtypes.

    Returns:
        The bits of the upload and of the download.
    """
    parts = list(_parts(format, params))
    up = sum(8 * part.itemsize * part.size for part in parts if part.trained)
    return Bits(up, sum(part.bits_down for part in parts if not part.skipped))


class _Part(NamedTuple):
    """One leaf of a message.

    Attributes:
        leaf: the leaf of the params.
        block: the part of it that is used; None is all of it.
        trained: whether the client trains and uploads it.
        skipped: whether it is not downloaded.
        kept: number of weights that P_i keeps; None if it does not prune the leaf.
        positions: whether the positions of the kept weights are sent.
    """

    leaf: Any
    block: np.ndarray | None
    trained: bool
    skipped: bool
    kept: int | None
    positions: bool

    @property
    def size(self) -> int:
        """Number of weights that are used."""
        return math.prod(self.leaf.shape) if self.block is None else int(self.block.sum())

    @property
    def dtype(self) -> np.dtype[Any]:
        """Type of the numbers."""
        return np.dtype(self.leaf.dtype)

    @property
    def itemsize(self) -> int:
        """Bytes of a number."""
        return self.dtype.itemsize

    @property
    def bits_down(self) -> int:
        """Bits of the leaf in a download."""
        if self.kept is None:
            return 8 * self.itemsize * self.size
        size = math.prod(self.leaf.shape)
        positions = wire.whole_bytes(wire.index_code(size, self.kept).bits) if self.positions else 0
        return 8 * self.itemsize * self.kept + positions


def _parts(format: Format, params: Params) -> Iterator[_Part]:
    leaves, final = jax.tree.leaves(params), len(format.layers.names) - 1
    for leaf, layer, block in zip(leaves, format.layers.of, format.blocks, strict=True):
        trained = bool(format.trained[layer])
        pruned = not trained and len(leaf.shape) > 1 and format.keep < 1
        number = kept(math.prod(leaf.shape), format.keep) if pruned else None
        yield _Part(leaf, block, trained, format.local_head and layer == final, number, format.positions)


def write_up(format: Format, model: Params) -> bytes:
    """The upload of one client: the layers of L_i.

    Args:
        format: the format of its messages.
        model: the client's model.

    Returns:
        The bytes.
    """
    return b"".join(_values(part) for part in _parts(format, model) if part.trained)


def _values(part: _Part) -> bytes:
    values = np.asarray(part.leaf)
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
    for part in _parts(format, like):
        if not part.trained:
            leaves.append(None)
            continue
        stop = start + part.size * part.itemsize
        values = wire.decode_values(data[start:stop], part.size, part.dtype)
        leaves.append(_filled(values, part, part.leaf))
        start = stop
    _check_end("up", data, start)
    return jax.tree.structure(like).unflatten(leaves)


def _filled(values: np.ndarray, part: _Part, rest: Any) -> jax.Array:
    """An array with `values` in the part's block and `rest` elsewhere."""
    if part.block is None:
        return jnp.asarray(values.reshape(part.leaf.shape))
    whole = np.array(np.broadcast_to(np.asarray(rest), part.leaf.shape))
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
    for part, mask in zip(_parts(format, sent), masks, strict=True):
        if part.skipped:
            continue
        if part.kept is None:
            pieces.append(_values(part))
            continue
        flat = np.asarray(part.leaf).reshape(-1)
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
    drawn = [None for _ in format.layers.of] if masks is None else masks
    for part, mask in zip(_parts(format, like), drawn, strict=True):
        stop = start + (0 if part.skipped else part.bits_down // 8)
        leaf, stay = _read_leaf(part, data[start:stop], mask)
        leaves.append(leaf)
        stays.append(stay)
        start = stop
    _check_end("down", data, start)
    return jax.tree.structure(like).unflatten(leaves), stays


def _read_leaf(part: _Part, data: bytes, mask: Any) -> tuple[jax.Array | None, jax.Array | None]:
    """A leaf of a download and its mask, None if it is sent whole."""
    if part.skipped:
        return None, None
    if part.kept is None:
        values = wire.decode_values(data, len(data) // part.itemsize, part.dtype)
        return _filled(values, part, np.zeros((), part.dtype)), None
    size, cut = math.prod(part.leaf.shape), len(data) - part.kept * part.itemsize
    if part.positions:
        at = wire.decode_indices(data[:cut], size, part.kept)
    else:
        assert mask is not None
        at = np.flatnonzero(np.asarray(mask).reshape(-1))
    flat, stays = np.zeros(size, part.dtype), np.zeros(size, bool)
    stays[at] = True
    flat[at] = wire.decode_values(data[cut:], part.kept, part.dtype)
    return jnp.asarray(flat.reshape(part.leaf.shape)), jnp.asarray(stays.reshape(part.leaf.shape))


def tables(
    plan: Plan, params: Params, *, pruning: Pruning, local: LocalPruning | None = None, local_head: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Bits of every kind of client that a program for `plan` can have.

    Args:
        plan: the plan.
        params: the params, or their shapes and dtypes.
        pruning: P_i.
        local: Q_i; None is no local pruning.
        local_head: whether each client keeps its own final layer.

    Returns:
        Bits up and bits down, [layer sets, keep ratios, smallest ratios of local pruning] each.  The fields of
        `plans.Assignment` are the indices.
    """
    local = local or local_pruning.fixed()
    sets, keeps, lows = layer_sets(plan), ratios(plan), local_pruning.lows(local, plan)
    up, down = np.zeros((2, len(sets), len(keeps), len(lows)))
    for place in np.ndindex(up.shape):
        trained, keep, low = (values[number] for values, number in zip((sets, keeps, lows), place, strict=True))
        kind, pruned = Plan(plan.layers, trained[None], keep[None]), local._replace(low=float(low))
        format = format_of(kind, 0, params, pruning=pruning, local=pruned, local_head=local_head)
        up[place], down[place] = bits(format, params)
    return up, down
