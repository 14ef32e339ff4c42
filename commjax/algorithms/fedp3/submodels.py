"""What is left of a layer: P_i, the pruning of the layers that a client does not train.

Only arrays with at least two axes are pruned.  Biases and the scales of norms are sent whole.  The pruning Q_i of a
local step is in `local_pruning`; its constructors `fixed`, `uniform` and `ordered` are also here.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from commjax.algorithms.fedp3.layers import check_names, paths_of
from commjax.algorithms.fedp3.local_pruning import LocalPruning, fixed, local_submodel, ordered, uniform
from commjax.algorithms.fedp3.plans import Plan, kept, ratios
from commjax.compressors import selection
from commjax.core.base import Key, Params
from commjax.pruning import masks, scores
from commjax.pruning.scores import Score
from commjax.pruning.statistics import Statistics

__all__ = [
    "LocalPruning",
    "Pruning",
    "by_score",
    "check",
    "client_mask",
    "fixed",
    "local_submodel",
    "magnitude",
    "masked",
    "ordered",
    "pruned_leaves",
    "random",
    "sent",
    "server_masks",
    "uniform",
]

# For each leaf one mask per distinct keep ratio, [ratios, ...]; None for a leaf without.
ServerMasks = Sequence[Array | None]
# For each leaf the mask of one client; None for a leaf that is sent whole.
Masks = Sequence[Array | None]
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
    pruned = [bool(np.any(~trained & (plan.keep < 1))) for trained in plan.trained.T]
    leaves = jax.tree.leaves(params)
    return [leaf.ndim > 1 and pruned[number] for leaf, number in zip(leaves, plan.layers.of, strict=True)]


def check(plan: Plan, pruning: Pruning, params: Params) -> None:
    """Raise a ValueError if a pruned layer has no score.

    Args:
        plan: the plan.
        pruning: P_i.
        params: the params.
    """
    if not isinstance(pruning.score, Mapping):
        return
    check_names(plan.layers.names, pruning.score, "score")
    pruned = zip(plan.layers.of, pruned_leaves(plan, params), strict=True)
    wanted = {plan.layers.names[number] for number, yes in pruned if yes}
    for name in sorted(wanted - set(pruning.score)):
        raise ValueError(f"score: none for layer {name!r}, which is pruned; allowed: one for each of {sorted(wanted)}")


def server_masks(plan: Plan, pruning: Pruning, key: Key, params: Params) -> ServerMasks:
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

    def leaf_masks(position: int, leaf: Array) -> Array:
        name, path = plan.layers.names[plan.layers.of[position]], paths[position]
        if pruning.statistics is not None and path not in stats:
            raise ValueError(f"statistics has none of {path!r}; allowed: of every pruned kernel, got {sorted(stats)}")
        score: Any = pruning.score[name] if isinstance(pruning.score, Mapping) else pruning.score
        scored = score(_matrix(leaf), stats.get(path), jax.random.fold_in(key, position))
        return jnp.stack([_best(scored, ratio).reshape(leaf.shape) for ratio in ratios(plan)])

    wanted = pruned_leaves(plan, params)
    return [leaf_masks(i, leaf) if wanted[i] else None for i, leaf in enumerate(jax.tree.leaves(params))]


def _best(scored: Array, ratio: float) -> Array:
    # The mask keeps exactly the k that the ledger counts.  A ratio would not do: a large k is lost in 1 - k / size.
    return masks.largest(scored, kept(scored.size, ratio))


def client_mask(
    plan: Plan, key: Key, ratio: Any, position: int, leaf: Array, leaf_masks: Bool[Array, "r ..."] | None
) -> Bool[Array, "..."]:
    """P_i of one leaf for one client.

    Args:
        plan: the plan.
        key: the client's key of the masks in this round.
        ratio: number of the client's keep ratio in `plans.ratios`.
        position: number of the leaf.
        leaf: the leaf.
        leaf_masks: the server's masks of this leaf (`server_masks`); None draws the mask from the key.

    Returns:
        The mask, of the shape of the leaf.
    """
    values = ratios(plan)
    if leaf_masks is not None:
        return leaf_masks[0] if len(values) == 1 else leaf_masks[ratio]
    key = jax.random.fold_in(key, position)

    def draw(value: float, key: Key) -> Array:
        return selection.random_mask(key, leaf.size, kept(leaf.size, value)).reshape(leaf.shape)

    if len(values) == 1:
        return draw(values[0], key)
    return jax.lax.switch(ratio, [partial(draw, value) for value in values], key)


def sent(plan: Plan, mine: Any, key: Key, ratio: Any, params: Params, server: ServerMasks) -> tuple[Params, Masks]:
    """What a client receives: W^l for l in L_i, P_i (.) W^l for the others.

    Args:
        plan: the plan.
        mine: L_i, a bool for each layer; a NumPy array if it is static.
        key: the client's key of the masks in this round.
        ratio: number of the client's keep ratio in `plans.ratios`.
        params: W.
        server: the server's masks (`server_masks`).

    Returns:
        The params and a mask for each leaf, None for a leaf that is sent whole.
    """
    static, wanted = isinstance(mine, np.ndarray), pruned_leaves(plan, params)

    def leaf_mask(position: int, leaf: Array) -> Array | None:
        number = plan.layers.of[position]
        if not wanted[position] or (static and mine[number]):
            return None
        mask = client_mask(plan, key, ratio, position, leaf, server[position])
        return mask if static else mask | mine[number]

    client = [leaf_mask(i, leaf) for i, leaf in enumerate(jax.tree.leaves(params))]
    return masked(params, client), client


def masked(model: Params, masks: Masks) -> Params:
    """The model with 0 outside the masks; the mask None keeps a leaf whole."""
    leaves, structure = jax.tree.flatten(model)
    zeros = [jnp.zeros((), leaf.dtype) for leaf in leaves]
    return structure.unflatten(
        [
            leaf if mask is None else jnp.where(mask, leaf, zero)
            for leaf, mask, zero in zip(leaves, masks, zeros, strict=True)
        ]
    )
