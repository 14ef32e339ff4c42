"""What FedP3 sends, as bytes, and its bits.

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
from jaxtyping import Float, PyTree

from commjax.algorithms.fedp3 import layers, submodels
from commjax.algorithms.fedp3.plans import Plan, kept
from commjax.algorithms.fedp3.submodels import LocalPruning, Pruning
from commjax.compressors import wire
from commjax.core.base import Key, Params


def sent(plan: Plan, mine: Any, key: Key, row: Any, params: Params, made: list) -> tuple[Params, list]:
    """What a client receives: W^l for l in L_i, P_i (.) W^l for the others.

    Args:
        plan: the plan.
        mine: L_i, a bool for each layer; a NumPy array if it is static.
        key: the client's key of the masks in this round.
        row: the client's row of the plan.
        params: W.
        made: the server's masks (`submodels.server_masks`).

    Returns:
        The params and a mask for each leaf, None for a leaf that is sent whole.
    """
    static, wanted = isinstance(mine, np.ndarray), submodels.pruned_leaves(plan, params)

    def mask(position, leaf):
        number = plan.layers.of[position]
        if not wanted[position] or (static and mine[number]):
            return None
        found = submodels.client_mask(plan, key, row, position, leaf, made[position])
        return found if static else found | mine[number]

    masks = [mask(i, leaf) for i, leaf in enumerate(jax.tree.leaves(params))]
    return masked(params, masks), masks


def head(plan: Plan, params: Params) -> PyTree:
    """The final layer, as a part of the tree."""
    return layers.split(plan.layers, params, layers.chosen(plan.layers, plan.layers.names[-1:]))[0]


def masked(model: Params, masks: list) -> Params:
    """The model with 0 outside the masks; the mask None keeps a leaf whole."""
    leaves, structure = jax.tree.flatten(model)
    zero = [jnp.zeros((), leaf.dtype) for leaf in leaves]
    return structure.unflatten(
        [leaf if mask is None else jnp.where(mask, leaf, none) for leaf, mask, none in zip(leaves, masks, zero)]
    )


def _shape(leaf) -> tuple[int, np.dtype]:
    return math.prod(leaf.shape), np.dtype(leaf.dtype)


def _masked(plan: Plan, id: int, layer: int, leaf) -> bool:
    """Whether P_i prunes this leaf."""
    return not plan.trained[id, layer] and len(leaf.shape) > 1 and bool(plan.keep[id] < 1)


def _leaf_bits(plan: Plan, pruning: Pruning, id: int, layer: int, leaf, block) -> int:
    """Bits down of one leaf."""
    size, dtype = _shape(leaf)
    if not _masked(plan, id, layer, leaf):
        return 8 * dtype.itemsize * (size if block is None else int(block.sum()))
    k = kept(size, plan.keep[id])
    positions = 0 if pruning.score is None else wire.whole_bytes(wire.index_code(size, k).bits)
    return 8 * dtype.itemsize * k + positions


def used(plan: Plan, local: LocalPruning | None, id: int, params: Params, local_head: bool = False) -> list:
    """The part of each leaf that a client uses (`submodels.fixed_blocks`).

    A head that stays with its client is used whole, since the server does not have the rest of it.

    Args:
        plan: the plan.
        local: Q_i; None is no local pruning.
        id: the client's row of the plan.
        params: the params.
        local_head: whether each client keeps its own final layer.

    Returns:
        For each leaf a mask of its shape, or None for a leaf that is used whole.
    """
    found = submodels.fixed_blocks(plan, local or submodels.fixed(), id, params)
    final = len(plan.layers.names) - 1
    return [None if local_head and layer == final else one for one, layer in zip(found, plan.layers.of, strict=True)]


def prices(
    plan: Plan, pruning: Pruning, params: Params, local_head: bool = False, local: LocalPruning | None = None
) -> tuple[Float[np.ndarray, "n"], Float[np.ndarray, "n"]]:
    """Bits up and bits down of each client, from shapes alone.

    Args:
        plan: the plan.
        pruning: P_i.
        params: the params, or their shapes and dtypes.
        local_head: whether each client keeps its own final layer.
        local: Q_i; None is no local pruning.

    Returns:
        Bits up [n] and bits down [n].
    """
    leaves, final = jax.tree.leaves(params), len(plan.layers.names) - 1
    up, down = np.zeros(len(plan.keep)), np.zeros(len(plan.keep))
    for id, mine in enumerate(plan.trained):
        blocks = used(plan, local, id, params, local_head)
        for leaf, layer, block in zip(leaves, plan.layers.of, blocks, strict=True):
            size, dtype = _shape(leaf)
            up[id] += 8 * dtype.itemsize * (size if block is None else block.sum()) * mine[layer]
            down[id] += 0 if local_head and layer == final else _leaf_bits(plan, pruning, id, layer, leaf, block)
    return up, down


def write_up(plan: Plan, id: int, model: Params, blocks: list | None = None) -> bytes:
    """The upload of one client: the layers of L_i.

    Args:
        plan: the plan.
        id: the client's row of the plan.
        model: the client's model.
        blocks: the part of each leaf that the client uses (`used`); None is all of it.

    Returns:
        The bytes.
    """
    leaves = jax.tree.leaves(model)
    parts = zip(leaves, plan.layers.of, blocks or [None] * len(leaves), strict=True)
    return b"".join(
        wire.encode_values(np.asarray(leaf) if block is None else np.asarray(leaf)[block])
        for leaf, layer, block in parts
        if plan.trained[id, layer]
    )


def read_up(plan: Plan, id: int, data: bytes, like: Params, blocks: list | None = None) -> PyTree:
    """Read an upload.  A ValueError for a message of another length.

    Args:
        plan: the plan.
        id: the client's row of the plan.
        data: the bytes.
        like: the server's params, which also fill the leaves outside `blocks`.
        blocks: as in `write_up`.

    Returns:
        The layers of L_i, as a part of the tree.
    """
    leaves, structure = jax.tree.flatten(like)
    found, start = [], 0
    for leaf, layer, block in zip(leaves, plan.layers.of, blocks or [None] * len(leaves), strict=True):
        size, dtype = _shape(leaf)
        if not plan.trained[id, layer]:
            found.append(None)
            continue
        stop = start + (size if block is None else int(block.sum())) * dtype.itemsize
        values = wire.decode_values(data[start:stop], (stop - start) // dtype.itemsize, dtype)
        found.append(_filled(values, leaf, block, leaf))
        start = stop
    _check_end("up", data, start)
    return structure.unflatten(found)


def _filled(values: np.ndarray, like, block, rest) -> jax.Array:
    """An array with `values` in `block` and `rest` elsewhere."""
    if block is None:
        return jnp.asarray(values.reshape(like.shape))
    whole = np.array(np.broadcast_to(np.asarray(rest), like.shape))
    whole[block] = values
    return jnp.asarray(whole)


def _check_end(way: str, data: bytes, end: int) -> None:
    if len(data) != end:
        raise ValueError(f"a message {way} of {end} bytes was expected, got {len(data)}")


def write_down(
    plan: Plan,
    pruning: Pruning,
    id: int,
    sent: Params,
    masks: list,
    local_head: bool = False,
    blocks: list | None = None,
) -> bytes:
    """The download of one client.

    Args:
        plan: the plan.
        pruning: P_i.
        id: the client's row of the plan.
        sent: W^l for l in L_i, P_i (.) W^l for the others (`sent`).
        masks: the masks of P_i, None for a leaf that is sent whole.
        local_head: whether each client keeps its own final layer, which is then not sent.
        blocks: the part of each leaf that the client uses (`used`); None is all of it.

    Returns:
        The bytes.
    """
    final, parts = len(plan.layers.names) - 1, []
    leaves = jax.tree.leaves(sent)
    for leaf, layer, mask, block in zip(leaves, plan.layers.of, masks, blocks or [None] * len(leaves), strict=True):
        if local_head and layer == final:
            continue
        if not _masked(plan, id, layer, leaf):
            parts.append(wire.encode_values(np.asarray(leaf) if block is None else np.asarray(leaf)[block]))
            continue
        flat = np.asarray(leaf).reshape(-1)
        at = np.flatnonzero(np.asarray(mask).reshape(-1))
        positions = b"" if pruning.score is None else wire.encode_indices(at, flat.size)
        parts += [positions, wire.encode_values(flat[at])]
    return b"".join(parts)


def read_down(
    plan: Plan,
    pruning: Pruning,
    id: int,
    data: bytes,
    like: Params,
    masks: list | None = None,
    local_head: bool = False,
    blocks: list | None = None,
) -> PyTree:
    """Read a download.  A ValueError for a message of another length.

    Args:
        plan: the plan.
        pruning: P_i.
        id: the client's row of the plan.
        data: the bytes.
        like: params of the same shapes and dtypes.
        masks: the masks of P_i, needed only if they are drawn from the key and thus not sent.
        local_head: as in `write_down`.
        blocks: as in `write_down`.

    Returns:
        The params with which the client starts: 0 outside the masks and `blocks`, and None for a head that is not sent.
    """
    return read_sent(plan, pruning, id, data, like, masks, local_head, blocks)[0]


def read_sent(
    plan: Plan,
    pruning: Pruning,
    id: int,
    data: bytes,
    like: Params,
    masks: list | None = None,
    local_head: bool = False,
    blocks: list | None = None,
) -> tuple[PyTree, list]:
    """Read a download, as `read_down` does, and return the masks as well.

    Args:
        plan: the plan.
        pruning: P_i.
        id: the client's row of the plan.
        data: the bytes.
        like: params of the same shapes and dtypes.
        masks: as in `read_down`.
        local_head: as in `write_down`.
        blocks: as in `write_down`.

    Returns:
        The params, and the masks of P_i, None for a leaf that is sent whole.
    """
    leaves, structure = jax.tree.flatten(like)
    found, start, final = [], 0, len(plan.layers.names) - 1
    stays: list = [None] * len(leaves)
    blocks = blocks or [None] * len(leaves)
    for position, (leaf, layer, block) in enumerate(zip(leaves, plan.layers.of, blocks, strict=True)):
        if local_head and layer == final:
            found.append(None)
            continue
        size, dtype = _shape(leaf)
        stop = start + _leaf_bits(plan, pruning, id, layer, leaf, block) // 8
        part, start = data[start:stop], stop
        if not _masked(plan, id, layer, leaf):
            values = wire.decode_values(part, len(part) // dtype.itemsize, dtype)
            found.append(_filled(values, leaf, block, np.zeros((), dtype)))
            continue
        k = kept(size, plan.keep[id])
        cut = len(part) - k * dtype.itemsize
        if pruning.score is None:
            assert masks is not None
            at = np.flatnonzero(np.asarray(masks[position]).reshape(-1))
        else:
            at = wire.decode_indices(part[:cut], size, k)
        flat, here = np.zeros(size, dtype), np.zeros(size, bool)
        here[at] = True
        stays[position] = jnp.asarray(here.reshape(leaf.shape))
        flat[at] = wire.decode_values(part[cut:], k, dtype)
        found.append(jnp.asarray(flat.reshape(leaf.shape)))
    _check_end("down", data, start)
    return structure.unflatten(found), stays
