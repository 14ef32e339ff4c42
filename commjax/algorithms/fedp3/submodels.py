"""What a client is sent: P_i, the pruning of the layers that a client does not train, and the bits of its messages.

Only arrays with at least two axes are pruned.  The pruning Q_i of a local step is in `local_pruning`.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from commjax.algorithms.fedp3 import local_pruning
from commjax.algorithms.fedp3.layers import Plan, check_names, kept, layer_sets, paths_of, ratios
from commjax.algorithms.fedp3.local_pruning import LocalPruning, fixed
from commjax.compressors import random_sets, wire
from commjax.core.base import Key, Params
from commjax.pruning import masks, scores
from commjax.pruning.scores import Score
from commjax.pruning.statistics import Statistics

# For each leaf: one mask per distinct keep ratio, [ratios, ...], and the mask of one client; None if it is sent whole.
ServerMasks = Sequence[Array | None]
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
        ratio: number of the client's keep ratio in `layers.ratios`.
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
        return random_sets.random_mask(key, leaf.size, kept(leaf.size, value)).reshape(leaf.shape)

    if len(values) == 1:
        return draw(values[0], key)
    return jax.lax.switch(ratio, [partial(draw, value) for value in values], key)


def sent(plan: Plan, mine: Any, key: Key, ratio: Any, params: Params, server: ServerMasks) -> tuple[Params, Masks]:
    """What a client receives: W^l for l in L_i, P_i (.) W^l for the others.

    Args:
        plan: the plan.
        mine: L_i, a bool for each layer; a NumPy array if it is static.
        key: the client's key of the masks in this round.
        ratio: number of the client's keep ratio in `layers.ratios`.
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


class LeafFormat(NamedTuple):
    """What server and client know about one leaf of their messages.

    Attributes:
        shape: shape of the leaf.
        dtype: type of its numbers.
        block: mask of the part that the client uses; None is all of it.
        trained: whether the client trains and uploads the leaf.
        downloaded: whether the server sends the leaf.
        kept: number of weights that P_i keeps; None if it does not prune the leaf.
        positions: whether the positions of the kept weights are sent.  They are not if both sides draw them.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    block: np.ndarray | None
    trained: bool
    downloaded: bool
    kept: int | None
    positions: bool

    @property
    def size(self) -> int:
        """Number of weights that are used."""
        return math.prod(self.shape) if self.block is None else int(self.block.sum())

    @property
    def bits_up(self) -> int:
        """Bits of the leaf in an upload."""
        return 8 * self.dtype.itemsize * self.size if self.trained else 0

    @property
    def bits_down(self) -> int:
        """Bits of the leaf in a download."""
        if not self.downloaded:
            return 0
        if self.kept is None:
            return 8 * self.dtype.itemsize * self.size
        positions = wire.whole_bytes(wire.index_code(math.prod(self.shape), self.kept).bits) if self.positions else 0
        return 8 * self.dtype.itemsize * self.kept + positions


# The format of the messages of one client: one entry for each leaf of the params.
Format = Sequence[LeafFormat]


def format_of(
    plan: Plan,
    client: int,
    params: Params,
    *,
    pruning: Pruning,
    local: LocalPruning | None = None,
    local_head: bool = False,
) -> Format:
    """The format of the messages of one client, from shapes alone.

    Args:
        plan: the plan.
        client: the client's row of the plan.
        params: the params, or their shapes and dtypes.
        pruning: P_i.
        local: Q_i; None is no local pruning.
        local_head: whether each client keeps its own final layer, which is then not downloaded.

    Returns:
        The format.
    """
    blocks = local_pruning.fixed_blocks(plan, local or fixed(), client, params)
    keep, final = float(plan.keep[client]), len(plan.layers.names) - 1

    def leaf_format(leaf: Any, layer: int, block: np.ndarray | None) -> LeafFormat:
        trained, stays = bool(plan.trained[client, layer]), local_head and layer == final
        pruned = not trained and len(leaf.shape) > 1 and keep < 1
        number = kept(math.prod(leaf.shape), keep) if pruned else None
        # A head that stays with its client is used whole, since the server does not have the rest of it.
        used = None if stays else block
        return LeafFormat(leaf.shape, np.dtype(leaf.dtype), used, trained, not stays, number, pruning.score is not None)

    return [leaf_format(*leaf) for leaf in zip(jax.tree.leaves(params), plan.layers.of, blocks, strict=True)]


def bits(format: Format) -> tuple[int, int]:
    """Bits of the upload and of the download of one client."""
    return sum(leaf.bits_up for leaf in format), sum(leaf.bits_down for leaf in format)


def kind_format(
    plan: Plan, kind: Sequence[Any], params: Params, *, pruning: Pruning, local: LocalPruning, local_head: bool
) -> Format:
    """The format of the messages of a kind of client.

    Args:
        plan: the plan.
        kind: numbers of the layer set, the keep ratio and the smallest local ratio, as in `layers.Assignment`.
        params: as in `format_of`.
        pruning: as in `format_of`.
        local: as in `format_of`.
        local_head: as in `format_of`.

    Returns:
        The format.
    """
    tables = (layer_sets(plan), ratios(plan), local_pruning.lows(local, plan))
    trained, keep, low = (values[int(number)] for values, number in zip(tables, kind, strict=True))
    row, local = Plan(plan.layers, trained[None], keep[None]), local._replace(low=float(low))
    return format_of(row, 0, params, pruning=pruning, local=local, local_head=local_head)


def bit_tables(
    plan: Plan, params: Params, *, pruning: Pruning, local: LocalPruning | None = None, local_head: bool = False
) -> tuple[np.ndarray, np.ndarray]:
    """Bits of every kind of client that a program for `plan` can have.

    Args:
        plan: the plan.
        params: as in `format_of`.
        pruning: as in `format_of`.
        local: as in `format_of`.
        local_head: as in `format_of`.

    Returns:
        Bits up and bits down, [layer sets, keep ratios, smallest ratios of local pruning] each.  The fields of
        `layers.Assignment` are the indices.
    """
    local = local or fixed()
    up, down = np.zeros((2, len(layer_sets(plan)), len(ratios(plan)), len(local_pruning.lows(local, plan))))
    for kind in np.ndindex(up.shape):
        format = kind_format(plan, kind, params, pruning=pruning, local=local, local_head=local_head)
        up[kind], down[kind] = bits(format)
    return up, down
