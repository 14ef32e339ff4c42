"""Q_i, the pruning inside a local step: at random, or ordered dropout.

The pruned layers act as q (.) W, where the ratio q is drawn anew in every local step.
"""

from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, Float, Int, PyTree, Shaped

from commjax.algorithms.fedp3.layers import Plan, ratios
from commjax.core import random_words
from commjax.core.base import Key, Params

Mask = Bool[Array, "..."]
Low = ArrayLike | Literal["keep"]


class LocalPruning(NamedTuple):
    """Q_i, the pruning inside a local step.

    In every local step a ratio q is drawn from `levels` numbers, evenly spaced in [low, 1].

    Attributes:
        kind: "fixed" (no pruning), "uniform" or "ordered".
        low: the smallest ratio, one number or one per client; "keep" is the client's keep ratio in the plan.
        levels: number of ratios; with 1 the ratio is always `low`.
        everywhere: whether all layers are pruned; otherwise only those outside L_i.
    """

    kind: Literal["fixed", "uniform", "ordered"]
    low: Any
    levels: int
    everywhere: bool


def fixed() -> LocalPruning:
    """No local pruning.  Thesis: Sec. 4.2."""
    return LocalPruning("fixed", 1.0, 1, False)


def uniform(low: Low, levels: int = 5, *, everywhere: bool = False) -> LocalPruning:
    """Local pruning in which each weight stays with probability q.

    Args:
        low: the smallest ratio q, one number or one per client; "keep" is the client's keep ratio in the plan.
        levels: number of ratios.
        everywhere: whether the layers of L_i are pruned as well.

    Returns:
        The local pruning.

    Thesis: Sec. 4.2.  Differs: F9 (the law of q is ours).
    """
    return _checked(LocalPruning("uniform", low, levels, everywhere))


def ordered(low: Low, levels: int = 5, *, everywhere: bool = False) -> LocalPruning:
    """Ordered dropout keeps the first ceil(q d_in) inputs and ceil(q d_out) outputs of a layer, and as many biases.

    After a flattened image the inputs are grouped by channel.  The first channels stay, at every place of the image.
    The inputs of the first layer and the outputs of the final one stay whole.

    With `everywhere` and all layers trained, this is the submodel of FjORD (a new q in every step) or of HeteroFL
    (`levels` = 1, `low` is the client's width; then only the submodel is sent).  Weights outside the submodel are not
    changed by the client, and count in the mean.

    Args:
        low: as in `uniform`.
        levels: number of ratios.
        everywhere: whether the layers of L_i are pruned as well.

    Returns:
        The local pruning.

    Thesis: Sec. 4.2.  Differs: F9 (rounding, ends).
    Holds if: layers are in the order of computation, and an image is flattened with its channels last.
    """
    return _checked(LocalPruning("ordered", low, levels, everywhere))


def _checked(pruning: LocalPruning) -> LocalPruning:
    if pruning.levels < 1:
        raise ValueError(f"levels={pruning.levels}; allowed: at least 1")
    if isinstance(pruning.low, str):
        if pruning.low != "keep":
            raise ValueError(f"low={pruning.low!r}; allowed: 'keep', or numbers")
        return pruning
    low = np.asarray(pruning.low, np.float64)
    if low.ndim > 1 or not np.all((low > 0) & (low <= 1)):
        raise ValueError(f"low={pruning.low}; allowed: 0 < low <= 1, one number or one for each client")
    return pruning._replace(low=low if low.ndim else float(low))


def least(pruning: LocalPruning) -> LocalPruning:
    """The same pruning with the ratio always at its smallest value: the submodel that a client can always hold."""
    return pruning._replace(levels=1)


def lows(pruning: LocalPruning, plan: Plan) -> Float[np.ndarray, "w"]:
    """The distinct smallest ratios of the clients, in ascending order."""
    return ratios(plan) if isinstance(pruning.low, str) else np.unique(np.atleast_1d(pruning.low))


def low_numbers(pruning: LocalPruning, compiled: Plan, plan: Plan) -> Int[np.ndarray, "n"]:
    """For each client the number of its smallest ratio in `lows`.

    Args:
        pruning: Q_i.
        compiled: the plan of the method, whose ratios `lows` lists.
        plan: the plan of the run.

    Returns:
        One number per client of `plan`.
    """
    n = len(plan.keep)
    if np.ndim(pruning.low) and len(pruning.low) != n:
        raise ValueError(
            f"low: {len(pruning.low)} ratios of local pruning; allowed: one number or one for each of {n} clients"
        )
    low = plan.keep if isinstance(pruning.low, str) else np.broadcast_to(pruning.low, (n,))
    return np.searchsorted(lows(pruning, compiled), low)


def _grid(pruning: LocalPruning, plan: Plan) -> Float[np.ndarray, "w levels"]:
    """The ratios that can be drawn, one row for each of `lows`."""
    low = lows(pruning, plan)[:, None]
    return low if pruning.levels == 1 else low + (1 - low) * np.linspace(0, 1, pruning.levels)[None]


def _level(pruning: LocalPruning, key: Key) -> Any:
    """The column of `_grid` with the ratio of this step."""
    return 0 if pruning.levels == 1 else jax.random.randint(key, (), 0, pruning.levels)


def local_submodel(
    plan: Plan, pruning: LocalPruning, key: Key, low: Any, mine: Any, params: Params
) -> PyTree[Shaped[Array, "..."]]:
    """The model of one local step: q (.) W for the layers that Q_i prunes, W for the others.

    Args:
        plan: the plan.
        pruning: Q_i.
        key: the client's key of this step.
        low: number of the client's smallest ratio in `lows`.
        mine: L_i, a bool for each layer.
        params: W_i.

    Returns:
        A pytree like `params`.
    """
    if pruning.kind == "fixed":
        return params
    key_ratio, key_coins = jax.random.split(key)
    leaves, structure = jax.tree.flatten(params)
    channels, grid, level = _kept_channels(plan, leaves), _grid(pruning, plan), _level(pruning, key_ratio)

    def leaf_mask(position: int, leaf: Array) -> Mask:
        if pruning.kind == "uniform":
            q = jnp.asarray(grid, jnp.zeros(()).dtype)[low, level]
            return _coins(jax.random.fold_in(key_coins, position), leaf.shape, q)
        return _block(leaf.shape, channels[position], lambda size: jnp.asarray(_first(grid, size))[low, level], jnp)

    def pruned(position: int, leaf: Array, layer: int) -> Array:
        if pruning.kind == "uniform" and leaf.ndim < 2:
            return leaf
        stays = leaf_mask(position, leaf)
        stays = stays if pruning.everywhere else stays | jnp.asarray(mine[layer])
        return jnp.where(stays, leaf, jnp.zeros((), leaf.dtype))

    return structure.unflatten(
        [pruned(i, leaf, layer) for i, (leaf, layer) in enumerate(zip(leaves, plan.layers.of, strict=True))]
    )


def fixed_blocks(plan: Plan, pruning: LocalPruning, client: int, params: Params) -> list[np.ndarray | None]:
    """The part of each leaf that a client ever uses.

    Args:
        plan: the plan.
        pruning: Q_i.
        client: the client's row of the plan.
        params: the params.

    Returns:
        For each leaf a mask of its shape, if the pruning is ordered dropout with one ratio; None for a leaf that is
        used whole.
    """
    leaves = jax.tree.leaves(params)
    if pruning.kind != "ordered" or pruning.levels > 1:
        return [None for _ in leaves]
    q = lows(pruning, plan)[low_numbers(pruning, plan, plan)[client]]
    return [
        _block(leaf.shape, channels, lambda size: int(_first(q, size)), np)
        if pruning.everywhere or not plan.trained[client, layer]
        else None
        for leaf, channels, layer in zip(leaves, _kept_channels(plan, leaves), plan.layers.of, strict=True)
    ]


def _coins(key: Key, shape: tuple[int, ...], q: Array) -> Mask:
    """True with probability q, rounded to a multiple of 2^-16.

    Every random word gives two coins, because drawing the words takes most of the time.
    """
    size = int(np.prod(shape))
    words = random_words.bits(key, (-(-size // 2),), jnp.uint32)
    numbers = jax.lax.bitcast_convert_type(words, jnp.uint16).reshape(-1)[:size].reshape(shape)
    return numbers.astype(jnp.int32) < jnp.round(q * 65536).astype(jnp.int32)


def _first(q: Any, size: int) -> np.ndarray:
    # The small number absorbs rounding: a product such as 7.000000001 has to give 7.
    return np.asarray(np.ceil(np.asarray(q) * size - 1e-9), np.int32)


class _Channels(NamedTuple):
    """The numbers of inputs and outputs of which a share stays; None: all of them stay.

    If a leaf has more inputs than `inputs`, the pattern repeats.
    """

    inputs: int | None
    outputs: int | None


def _kept_channels(plan: Plan, leaves: list[Any]) -> list[_Channels]:
    last = len(plan.layers.names) - 1
    # Number of outputs of each layer.
    widths = {layer: leaf.shape[-1] for leaf, layer in zip(leaves, plan.layers.of, strict=True) if len(leaf.shape) > 1}

    def leaf_channels(leaf: Any, layer: int) -> _Channels:
        outputs = None if layer == last else leaf.shape[-1]
        if layer == 0 or len(leaf.shape) < 2:
            return _Channels(None, outputs)
        inputs, before = leaf.shape[-2], widths.get(layer - 1, leaf.shape[-2])
        # A flattened image has its channels last: input j belongs to channel j mod (channels).
        return _Channels(before if len(leaf.shape) == 2 and inputs % before == 0 else inputs, outputs)

    return [leaf_channels(leaf, layer) for leaf, layer in zip(leaves, plan.layers.of, strict=True)]


def _block(shape: tuple[int, ...], channels: _Channels, first: Callable[[int], Any], xp: Any) -> Any:
    """The mask of the first inputs (last axis but one) and outputs (last axis); `xp` is numpy or jax.numpy."""
    stays = xp.ones(shape, bool)
    if channels.outputs is not None:
        outputs = xp.arange(shape[-1], dtype=np.int32) < first(channels.outputs)
        stays = stays & outputs.reshape(*[1] * (len(shape) - 1), -1)
    if channels.inputs is not None:
        inputs = xp.arange(shape[-2], dtype=np.int32) % channels.inputs < first(channels.inputs)
        stays = stays & inputs.reshape(*[1] * (len(shape) - 2), -1, 1)
    return stays
