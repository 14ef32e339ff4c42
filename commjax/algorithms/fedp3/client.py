"""The client's part of a FedP3 round: LocalUpdate on the layers that the client trains."""

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from commjax.algorithms.fedp3 import layers, local_pruning, submodels
from commjax.algorithms.fedp3.aggregation import Loss
from commjax.algorithms.fedp3.layers import Assignment, Plan
from commjax.algorithms.fedp3.local_pruning import LocalPruning
from commjax.algorithms.fedp3.submodels import Pruning, ServerMasks
from commjax.core import local, rounds, tree
from commjax.core.base import Key, Params
from commjax.core.local import Sample

Others = Literal["frozen", "masked", "free"]
# Maps a function of one client over the clients: `jax.vmap` or `rounds.one_by_one`.
Over = Callable[[Callable[..., Any]], Callable[..., Any]]


class Client(NamedTuple):
    """What each client remembers.

    Attributes:
        id: number of the client.
        plan: what the plan tells the client.
        head: the client's own final layer with `local_head`, as a part of the params; None without.
        logits: [n, layers], the client's aggregation logits if the server learns them; None otherwise.
    """

    id: Int[Array, "*n"]
    plan: Assignment
    head: PyTree = None
    logits: Any = None


class Download(NamedTuple):
    """What the server makes for all clients of a round.

    Attributes:
        params: W.
        masks: the masks that are made from W (`submodels.server_masks`).
    """

    params: Params
    masks: ServerMasks


class ClientKeys(NamedTuple):
    """The keys of one client in one round.

    Attributes:
        rows: local step k draws its rows from fold_in(rows, k), as in FedAvg.
        least: key of the submodel that the client has after the round (`Method.local_models`).
        masks: key of the masks that are drawn.
        pruning: local step k prunes with fold_in(pruning, k).
    """

    rows: Key
    least: Key
    masks: Key
    pruning: Key


def client_keys(key: Key, steps: int) -> ClientKeys:
    """Derive the keys of a client from its key of the round; `steps` is the number of local steps."""
    return ClientKeys(key, *(jax.random.fold_in(key, steps + use) for use in range(3)))


class LocalWork(NamedTuple):
    """What one client works with in one round.

    Attributes:
        keys: its keys.
        hparams: the hyperparameters.
        download: what the server made.
        client: the client's row.
        data: the client's data.
    """

    keys: ClientKeys
    hparams: Any
    download: Download
    client: Client
    data: PyTree


@dataclass(frozen=True, eq=False)
class ClientSide:
    """What a client needs to know to take part.

    Attributes:
        loss: `loss(params, rows)` returns a scalar.
        plan: the layers L_i and the keep ratio of each client.
        sample: `sample(key, data)` returns the rows for one step.
        steps: number of local steps in a round.
        pruning: P_i.
        local_pruning: Q_i.
        others: what happens to the layers outside L_i during local training.
        local_head: whether each client keeps its own final layer.
        over: maps the local training over the clients.
    """

    loss: Loss
    plan: Plan
    sample: Sample = local.all_rows
    _: KW_ONLY
    steps: int
    pruning: Pruning = field(default_factory=submodels.magnitude)
    local_pruning: LocalPruning = field(default_factory=local_pruning.fixed)
    others: Others = "frozen"
    local_head: bool = False
    over: Over = rounds.one_by_one

    def __post_init__(self) -> None:
        """Raise a ValueError for an option that is not allowed."""
        if self.steps < 1:
            raise ValueError(f"steps must be at least 1, got {self.steps}")
        if self.others not in ("frozen", "masked", "free"):
            raise ValueError(f"others={self.others!r}; allowed: 'frozen', 'masked', 'free'")

    def head(self, model: Params) -> PyTree:
        """The final layer that a client keeps, as a part of the tree; None without `local_head`."""
        return layers.head(self.plan.layers, model) if self.local_head else None

    def train(
        self, key: Key, hparams: Any, download: Download, client: Client, data: PyTree
    ) -> tuple[Params, Float[Array, ""]]:
        """Local training of one client.

        Args:
            key: the client's key of the round.
            hparams: the hyperparameters.
            download: W and the server's masks.
            client: the client's row.
            data: the client's data.

        Returns:
            The model, which equals W outside L_i, and the loss of the first step.
        """
        sets = layers.layer_sets(self.plan)

        def branch(mine: Any, differentiated: np.ndarray, key: Key, client: Client, data: PyTree) -> Any:
            work = LocalWork(client_keys(key, self.steps), hparams, download, client, data)
            model, loss = self.local_update(mine, differentiated, work)
            return self.trained_layers(mine, model, download.params), loss

        if len(sets) == 1:
            return branch(sets[0], sets[0], key, client, data)
        if self.over is jax.vmap:
            return branch(client.plan.trained, np.asarray(sets.any(axis=0)), key, client, data)
        branches = [partial(branch, mine, mine) for mine in sets]
        return jax.lax.switch(client.plan.layer_set, branches, key, client, data)

    def local_update(self, mine: Any, differentiated: np.ndarray, work: LocalWork) -> tuple[Params, Array]:
        """LocalUpdate of one client.

        Args:
            mine: L_i, a bool for each layer; a NumPy array if it is static.
            differentiated: static; the layers whose gradients are computed, which contain L_i.
            work: what the client works with.

        Returns:
            The client's whole model after the local steps, and the loss of the first step.
        """
        plan, keys, client, params = self.plan, work.keys, work.client, work.download.params
        start = params if client.head is None else layers.join(client.head, params)
        start, masks = submodels.sent(plan, mine, keys.masks, client.plan.ratio, start, work.download.masks)
        if self.others != "frozen":
            differentiated = np.ones(len(plan.layers.names), bool)
        free, frozen = layers.split(plan.layers, start, differentiated)
        moves = layers.split(plan.layers, layers.by_leaf(plan.layers, params, mine), differentiated)[0]

        def value(free: PyTree, number: Array, rows: PyTree) -> Array:
            model = layers.join(free, frozen)
            if self.others == "masked":
                model = submodels.masked(model, masks)
            key = jax.random.fold_in(keys.pruning, number)
            pruned = local_pruning.local_submodel(plan, self.local_pruning, key, client.plan.low, mine, model)
            return self.loss(pruned, rows)

        def local_step(free: PyTree, number: Array) -> tuple[PyTree, Array]:
            rows = self.sample(jax.random.fold_in(keys.rows, number), work.data)
            loss, grad = jax.value_and_grad(value)(free, number, rows)
            if not isinstance(mine, np.ndarray) and self.others == "frozen":
                grad = jax.tree.map(lambda g, yes: jnp.where(yes, g, jnp.zeros((), g.dtype)), grad, moves)
            return tree.add_scaled(free, -work.hparams.stepsize, grad), loss

        free, losses = jax.lax.scan(local_step, free, jnp.arange(self.steps))
        model = layers.join(free, frozen)
        return submodels.masked(model, masks) if self.others == "masked" else model, losses[0]

    def trained_layers(self, mine: Any, model: Params, params: Params) -> Params:
        """The model inside L_i and W outside: the other layers are discarded, and no message contains them."""
        if isinstance(mine, np.ndarray):
            return layers.join(layers.split(self.plan.layers, model, mine)[0], params)
        keeps = layers.by_leaf(self.plan.layers, params, mine)
        return jax.tree.map(lambda yes, new, old: jnp.where(yes, new, old), keeps, model, params)


def batch_rows(sample: Sample, data: PyTree) -> int:
    """Number of rows of a minibatch, from shapes alone."""
    row = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), data)
    shapes = [leaf.shape for leaf in jax.tree.leaves(jax.eval_shape(sample, jax.random.key(0), row))]
    return max((shape[0] for shape in shapes if shape), default=0)


def check_rows(sample: Sample, data: PyTree) -> None:
    """Raise a ValueError if a minibatch has more rows than the arrays of a client.

    Padding counts as rows here: only `init` knows which rows are padding.
    """
    if sample is local.all_rows:
        return
    rows = max((leaf.shape[1] for leaf in jax.tree.leaves(data) if leaf.ndim > 1), default=0)
    if (size := batch_rows(sample, data)) > rows:
        raise ValueError(f"sample draws batches of {size}, but a client has {rows} rows; allowed: at most {rows}")
