"""What is left of a layer: the pruning P_i from server to client, and the pruning Q_i of a local step.

Only arrays with at least two axes are pruned.  Biases and the scales of norms are sent whole.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Bool, PyTree, Shaped

from commjax.algorithms.fedp3.layers import check_names, paths_of
from commjax.algorithms.fedp3.plans import Plan, kept
from commjax.compressors import selection
from commjax.core.base import Key, Params
from commjax.pruning import masks, scores
from commjax.pruning.scores import Score
from commjax.pruning.statistics import Statistics

# params -> statistics by the path of a kernel, such as "fc1/kernel"
StatisticsOf = Callable[[Params], Mapping[str, Statistics]]


class Pruning(NamedTuple):
    """P_i, the pruning of the layers that a client does not train.

    A mask that is drawn differs from client to client.  It costs no bits, since both sides know the key.  A mask that
    is made from the weights is the same for all clients with the same keep ratio, and has to be sent.

    Attributes:
        name: name of the pruning.
        score: the weights with the smallest scores are removed.  One score for all layers or one per layer; None draws
            the mask at random.
        statistics: `statistics(params)` returns the activation statistics that the scores need, by the path of a kernel
            ("fc1/kernel").  It is called in every round.  None if the scores need none.
    """

    name: str
    score: Score | Mapping[str, Score] | None
    statistics: StatisticsOf | None = None


def random() -> Pruning:
    """Pruning at random: every set of `keep` weights of a tensor is equally likely, and drawn anew in every round.

    Thesis: Def. 4.3.1.
    """
    return Pruning("random", None)


def magnitude() -> Pruning:
    """Pruning that keeps the largest weights of each tensor.

    Differs: F7 (the thesis never says how it prunes; the released code does this).
    """
    return Pruning("magnitude", scores.magnitude())


def by_score(
    score: Score | Mapping[str, Score], name: str = "score", statistics: StatisticsOf | None = None
) -> Pruning:
    """Pruning by any score of `pruning.scores`.

    `magnitude()`, `ri()`, `symmetric()`, `stoch_ria(alpha=0)` and `general(X, Y)` need the weights alone.  `wanda()`,
    `owanda()`, `symwanda()` and `ria()` need activations.

    Args:
        score: one score for all layers, or one for each layer that is pruned.
        name: name of the pruning.
        statistics: `statistics(params)` returns the activation statistics of every pruned kernel, on a batch that the
            server holds.  `commjax.models.layered.statistics(module, held)` makes it for the networks of Chapter 4.

    Returns:
        The pruning.
    """
    return Pruning(name, score, statistics)


def _matrix(leaf: Array) -> Array:
    """[in, out]; the window of a convolution counts with the inputs."""
    return leaf.reshape(-1, leaf.shape[-1])


def pruned_leaves(plan: Plan, params: Params) -> list[bool]:
    """Whether some client receives only a part of the leaf, for each leaf of the params."""
    partial = [bool(np.any(~held & (plan.keep < 1))) for held in plan.trained.T]
    return [
        leaf.ndim > 1 and partial[number] for leaf, number in zip(jax.tree.leaves(params), plan.layers.of, strict=True)
    ]


def check(plan: Plan, pruning: Pruning, local: "LocalPruning", params: Params) -> None:
    """Raise a ValueError if a pruned layer has no score, or if local pruning has ratios for another number of clients.

    Args:
        plan: the plan.
        pruning: P_i.
        local: Q_i.
        params: the params.
    """
    if isinstance(pruning.score, Mapping):
        check_names(plan.layers.names, pruning.score, "score")
        wanted = {plan.layers.names[number] for number, yes in zip(plan.layers.of, pruned_leaves(plan, params)) if yes}
        for name in sorted(wanted - set(pruning.score)):
            raise ValueError(
                f"score: none for layer {name!r}, which is pruned; allowed: one for each of {sorted(wanted)}"
            )
    if np.ndim(local.low) and len(local.low) != len(plan.keep):
        raise ValueError(
            f"low: {len(local.low)} ratios of local pruning; "
            f"allowed: one number or one for each of {len(plan.keep)} clients"
        )


def server_masks(plan: Plan, pruning: Pruning, key: Key, params: Params) -> list[Bool[Array, "r ..."] | None]:
    """The masks that are made from the weights.

    Args:
        plan: the plan.
        pruning: P_i.
        key: key of the scores in this round.
        params: W.

    Returns:
        For each leaf one mask per distinct keep ratio, [ratios, ...]; None for a leaf that is not pruned, or if masks
        are drawn.
    """
    if pruning.score is None:
        return [None for _ in plan.layers.of]

    paths = paths_of(params)
    stats = {} if pruning.statistics is None else pruning.statistics(params)

    def one(position: int, leaf: Array) -> Array:
        name, path = plan.layers.names[plan.layers.of[position]], paths[position]
        if pruning.statistics is not None and path not in stats:
            raise ValueError(f"statistics has none of {path!r}; allowed: of every pruned kernel, got {sorted(stats)}")
        score: Any = pruning.score[name] if isinstance(pruning.score, Mapping) else pruning.score
        found = score(_matrix(leaf), stats.get(path), jax.random.fold_in(key, position))
        return jnp.stack([_best(found, ratio).reshape(leaf.shape) for ratio in np.unique(plan.keep)])

    wanted = pruned_leaves(plan, params)
    return [one(i, leaf) if wanted[i] else None for i, leaf in enumerate(jax.tree.leaves(params))]


def _best(found: Array, ratio: float) -> Array:
    # The mask keeps exactly the k that the ledger counts.  A ratio would not do: a large k is lost in 1 - k / size.
    return masks.largest(found, kept(found.size, ratio))


def client_mask(
    plan: Plan, key: Key, id: Any, position: int, leaf: Array, made: Bool[Array, "r ..."] | None
) -> Bool[Array, "..."]:
    """P_i of one leaf for one client.

    Args:
        plan: the plan.
        key: the client's key of the masks in this round.
        id: the client's row of the plan.
        position: number of the leaf.
        leaf: the leaf.
        made: the server's masks of this leaf (`server_masks`); None draws the mask from the key.

    Returns:
        The mask, of the shape of the leaf.
    """
    ratios = np.unique(plan.keep)
    rank = jnp.asarray(np.searchsorted(ratios, plan.keep), jnp.int32)[id]
    if made is not None:
        return made[0] if len(ratios) == 1 else made[rank]
    key = jax.random.fold_in(key, position)

    def draw(ratio: float) -> Callable[[Key], Array]:
        return lambda key: selection.random_mask(key, leaf.size, kept(leaf.size, ratio)).reshape(leaf.shape)

    return draw(ratios[0])(key) if len(ratios) == 1 else jax.lax.switch(rank, [draw(r) for r in ratios], key)


class LocalPruning(NamedTuple):
    """Q_i, the pruning inside a local step.

    In every local step a ratio q is drawn from `levels` numbers, evenly spaced in [low, 1].  The pruned layers act as
    q (.) W.

    Attributes:
        kind: "fixed" (no pruning), "uniform" or "ordered".
        low: the smallest ratio, one number or one per client.
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


def uniform(low: ArrayLike, levels: int = 5, *, everywhere: bool = False) -> LocalPruning:
    """Local pruning in which each weight stays with probability q.

    Args:
        low: the smallest ratio q, one number or one per client.
        levels: number of ratios.
        everywhere: whether the layers of L_i are pruned as well.

    Returns:
        The local pruning.

    Thesis: Sec. 4.2.  Differs: F9 (the law of q is ours).
    """
    return _checked(LocalPruning("uniform", low, levels, everywhere))


def ordered(low: ArrayLike, levels: int = 5, *, everywhere: bool = False) -> LocalPruning:
    """Ordered dropout keeps the first ceil(q d_in) inputs and ceil(q d_out) outputs of a layer, and as many biases.

    After a flattened image the inputs are grouped by channel.  The first channels stay, at every place of the image.
    The inputs of the first layer and the outputs of the final one stay whole.

    With `everywhere` and all layers trained, this is the submodel of FjORD (a new q in every step) or of HeteroFL
    (`levels` = 1, `low` is the client's width; then only the submodel is sent).  Weights outside the submodel are not
    changed by the client, and count in the mean.

    Args:
        low: the smallest ratio q, one number or one per client.
        levels: number of ratios.
        everywhere: whether the layers of L_i are pruned as well.

    Returns:
        The local pruning.

    Thesis: Sec. 4.2.  Differs: F9 (rounding, ends).
    Holds if: layers are in the order of computation, and an image is flattened with its channels last.
    """
    return _checked(LocalPruning("ordered", low, levels, everywhere))


def _checked(pruning: LocalPruning) -> LocalPruning:
    low = np.asarray(pruning.low, np.float64)
    if low.ndim > 1 or not np.all((low > 0) & (low <= 1)):
        raise ValueError(f"low={pruning.low}; allowed: 0 < low <= 1, one number or one for each client")
    if pruning.levels < 1:
        raise ValueError(f"levels={pruning.levels}; allowed: at least 1")
    return pruning._replace(low=low if low.ndim else float(low))


def _grid(pruning: LocalPruning) -> np.ndarray:
    """The ratios that can be drawn, [clients (or 1), levels]."""
    low = np.atleast_1d(np.asarray(pruning.low, np.float64))[:, None]
    return low if pruning.levels == 1 else low + (1 - low) * np.linspace(0, 1, pruning.levels)[None]


def _drawn(pruning: LocalPruning, key: Key, id: Any) -> tuple[Any, Any]:
    """The row and the column of `_grid` with the ratio of this client in this step."""
    row = id if np.ndim(pruning.low) else 0
    return row, 0 if pruning.levels == 1 else jax.random.randint(key, (), 0, pruning.levels)


def _ratio(pruning: LocalPruning, key: Key, id: Any) -> Array:
    return jnp.asarray(_grid(pruning), jnp.zeros(()).dtype)[_drawn(pruning, key, id)]


def local_submodel(
    plan: Plan, pruning: LocalPruning, key: Key, id: Any, mine: Any, params: Params
) -> PyTree[Shaped[Array, "..."]]:
    """The model of one local step: q (.) W for the layers that Q_i prunes, W for the others.

    Args:
        plan: the plan.
        pruning: Q_i.
        key: the client's key of this step.
        id: the client's row of the plan.
        mine: L_i, a bool for each layer.
        params: W_i.

    Returns:
        A pytree like `params`.
    """
    if pruning.kind == "fixed":
        return params
    key_ratio, key_coins = jax.random.split(key)
    leaves, structure = jax.tree.flatten(params)
    kept = _kept_channels(plan, leaves)

    def one(position: int, leaf: Array, layer: int) -> Array:
        if pruning.kind == "uniform" and leaf.ndim < 2:
            return leaf
        if pruning.kind == "uniform":
            stays = _coins(jax.random.fold_in(key_coins, position), leaf.shape, _ratio(pruning, key_ratio, id))
        else:
            at = _drawn(pruning, key_ratio, id)
            stays = _block(leaf.shape, kept[position], lambda size: jnp.asarray(_first(_grid(pruning), size))[at], jnp)
        stays = stays if pruning.everywhere else stays | jnp.asarray(mine[layer])
        return jnp.where(stays, leaf, jnp.zeros((), leaf.dtype))

    return structure.unflatten(
        [one(i, leaf, layer) for i, (leaf, layer) in enumerate(zip(leaves, plan.layers.of, strict=True))]
    )


def least(pruning: LocalPruning) -> LocalPruning:
    """The same pruning with the ratio always at its smallest value: the submodel that a client can always hold."""
    return pruning._replace(levels=1)


def fixed_blocks(plan: Plan, pruning: LocalPruning, id: int, params: Params) -> list[Bool[np.ndarray, "..."] | None]:
    """The part of each leaf that a client ever uses.

    Args:
        plan: the plan.
        pruning: Q_i.
        id: the client's row of the plan.
        params: the params.

    Returns:
        For each leaf a mask of its shape, if the pruning is ordered dropout with one ratio; None for a leaf that is
        used whole.
    """
    leaves = jax.tree.leaves(params)
    if pruning.kind != "ordered" or pruning.levels > 1:
        return [None for _ in leaves]
    q = _grid(pruning)[id if np.ndim(pruning.low) else 0, 0]
    return [
        _block(leaf.shape, channels, lambda size: int(_first(q, size)), np)
        if pruning.everywhere or not plan.trained[id, layer]
        else None
        for leaf, channels, layer in zip(leaves, _kept_channels(plan, leaves), plan.layers.of, strict=True)
    ]


def _coins(key: Key, shape: tuple[int, ...], q: Array) -> Bool[Array, "..."]:
    """True with probability q, rounded to a multiple of 2^-16.

    Every random word gives two coins, because drawing the words takes most of the time.
    """
    size = int(np.prod(shape))
    words = jax.random.bits(key, (-(-size // 2),), jnp.uint32)
    halves = jax.lax.bitcast_convert_type(words, jnp.uint16).reshape(-1)[:size].reshape(shape)
    return halves.astype(jnp.int32) < jnp.round(q * 65536).astype(jnp.int32)


def _first(q: Any, size: int) -> np.ndarray:
    # The small number absorbs rounding: a product such as 7.000000001 has to give 7.
    return np.asarray(np.ceil(np.asarray(q) * size - 1e-9), np.int32)


class _Channels(NamedTuple):
    """The numbers of inputs and outputs of which a share stays; None: all of them stay.

    If a leaf has more inputs than `inputs`, the pattern repeats.
    """

    inputs: int | None
    outputs: int | None


def _kept_channels(plan: Plan, leaves: list) -> list[_Channels]:
    last = len(plan.layers.names) - 1
    # Number of outputs of each layer.
    widths = {layer: leaf.shape[-1] for leaf, layer in zip(leaves, plan.layers.of, strict=True) if len(leaf.shape) > 1}

    def one(leaf: Any, layer: int) -> _Channels:
        outputs = None if layer == last else leaf.shape[-1]
        if layer == 0 or len(leaf.shape) < 2:
            return _Channels(None, outputs)
        inputs, before = leaf.shape[-2], widths.get(layer - 1, leaf.shape[-2])
        # A flattened image has its channels last: input j belongs to channel j mod (channels).
        return _Channels(before if len(leaf.shape) == 2 and inputs % before == 0 else inputs, outputs)

    return [one(leaf, layer) for leaf, layer in zip(leaves, plan.layers.of, strict=True)]


def _block(shape: tuple[int, ...], channels: _Channels, first: Callable[[int], Any], xp: Any) -> Any:
    """The mask of the first inputs (last axis but one) and outputs (last axis); `xp` is numpy or jax.numpy."""
    stays = xp.ones(shape, bool)
    if channels.outputs is not None:
        stays = stays & (xp.arange(shape[-1], dtype=np.int32) < first(channels.outputs)).reshape(
            *[1] * (len(shape) - 1), -1
        )
    if channels.inputs is not None:
        here = xp.arange(shape[-2], dtype=np.int32) % channels.inputs < first(channels.inputs)
        stays = stays & here.reshape(*[1] * (len(shape) - 2), -1, 1)
    return stays
