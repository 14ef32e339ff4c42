"""FedP3 between machines: each client gets a download of its own and uploads the layers that it trains."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Int

from commjax.algorithms.fedavg import server_step
from commjax.algorithms.fedp3 import aggregation, layers, submodels, wire
from commjax.algorithms.fedp3.aggregation import Aggregation
from commjax.algorithms.fedp3.plans import Plan
from commjax.algorithms.fedp3.submodels import LocalPruning, Pruning
from commjax.core.base import Codec, Exchange, Key, Params, State


class Halves(NamedTuple):
    """What the client step and the server step have in common.

    Attributes:
        plan: the plan.
        pruning: P_i.
        local: Q_i.
        steps: number of local steps in a round.
        train: `train(key of the client, hparams, params, masks of the server, client, data)` returns the client's model
            and its loss.
        how: the aggregation.
        loss: `loss(params, rows)` returns a scalar.
    """

    plan: Plan
    pruning: Pruning
    local: LocalPruning
    steps: int
    train: Callable[..., Any]
    how: Aggregation
    loss: Callable[..., Array]


class Apart(NamedTuple):
    """What a remote server remembers.

    Attributes:
        round: number of rounds so far.
        params: W.
        logits: [n, layers], the aggregation logits if the server learns them.
    """

    round: Int[Array, ""]
    params: Params
    logits: Any = None


def exchange(halves: Halves, table: np.ndarray, local_head: bool, cohort: int | None) -> Exchange:
    """The client step and the server step of FedP3 for remote clients.

    The download is P_i (.) W with its masks, the upload the layers of L_i, both as `commjax.algorithms.fedp3.wire`
    writes them.

    Args:
        halves: what both sides have in common.
        table: logits of an aggregation that is not learned, [n, layers].
        local_head: whether each client keeps its own final layer.
        cohort: number of clients that take part in a round; None is all of them.

    Returns:
        The exchange.
    """
    plan, pruning, how = halves.plan, halves.pruning, halves.how

    def start(state: State) -> State:
        server, rows = state
        if rows.row is not None:
            raise ValueError("rows: clients in other places have the rows of the plan with their ids; allowed: None")
        return State(Apart(server.round, server.params, rows.logits), rows._replace(logits=None))

    def blocks_of(params: Params, id: int) -> list:
        return wire.used(plan, halves.local, id, params, local_head)

    def pruned(key: Key, id: int, params: Params, made: list) -> tuple[Params, list]:
        key_masks = jax.random.fold_in(jax.random.fold_in(key, id), halves.steps + 1)
        return wire.sent(plan, plan.trained[id], key_masks, id, params, made)

    def write_down(key: Key, server: Any, ids: list[int], n: int) -> list[bytes]:
        params = server.params
        made = submodels.server_masks(plan, pruning, jax.random.fold_in(key, n + 1), params)

        def one(id: int) -> bytes:
            sent, masks = pruned(key, id, params, made)
            return wire.write_down(plan, pruning, id, sent, masks, local_head, blocks_of(params, id))

        return [one(id) for id in ids]

    def read_down(key: Key, data: bytes, server: Any, id: int, n: int) -> tuple[Params, list]:
        """The params, and the masks in the form of `submodels.server_masks`, the same for all ratios."""
        params, drawn = server.params, None
        if pruning.score is None:
            drawn = pruned(key, id, params, [None for _ in plan.layers.of])[1]
        sent, masks = wire.read_sent(plan, pruning, id, data, params, drawn, local_head, blocks_of(params, id))
        # Drawn masks are drawn again in the local training.
        if pruning.score is None:
            return sent, [None for _ in masks]
        ratios = len(np.unique(plan.keep))
        wanted = zip(masks, submodels.pruned_leaves(plan, params), jax.tree.leaves(params), strict=True)
        whole = [jnp.ones(leaf.shape, bool) if yes and mask is None else mask for mask, yes, leaf in wanted]
        return sent, [None if mask is None else jnp.stack([mask] * ratios) for mask in whole]

    def write_up(key: Key, model: Params, id: int, n: int) -> bytes:
        return wire.write_up(plan, id, model, blocks_of(model, id))

    def read_up(key: Key, data: bytes, server: Any, id: int, n: int) -> Params:
        found = wire.read_up(plan, id, data, server.params, blocks_of(server.params, id))
        return layers.join(found, server.params)

    def client_step(round, hparams, server, client, data):
        params, made = server.params
        # The download has no head if the client keeps its own.
        params = params if client.head is None else layers.join(client.head, params)
        model, loss = halves.train(round.client_key, hparams, params, made, client, data)
        head = wire.head(plan, model) if local_head else None
        return client._replace(head=head), round.send(model), loss

    def joined(key, hparams, server, ids, models):
        updates = jax.tree.map(lambda rows, leaf: rows - leaf[None], models, server.params)
        holds, kept = jnp.asarray(plan.trained)[ids], server.logits
        if how.steps:
            logits = aggregation.learned(
                how, halves.loss, plan.layers, server.params, updates, kept[ids], holds, members=len(ids)
            )
            kept = kept.at[ids].set(logits)
        else:
            logits = jnp.asarray(table, jnp.zeros(()).dtype)[ids]
        move = aggregation.joined(plan.layers, updates, aggregation.weights(logits, holds))
        return server_step(hparams, server, move)._replace(logits=kept)

    @cache
    def prices(shapes: tuple, structure: Any) -> tuple[np.ndarray, np.ndarray]:
        like = structure.unflatten([jax.ShapeDtypeStruct(*one) for one in shapes])
        return wire.prices(plan, pruning, like, local_head, halves.local)

    def price(way: int, server: Any, id: int) -> float:
        leaves, structure = jax.tree.flatten(server.params)
        return float(prices(tuple((leaf.shape, np.dtype(leaf.dtype)) for leaf in leaves), structure)[way][id])

    def bits_down(server: Any) -> float:
        return float(np.mean([price(1, server, id) for id in range(len(plan.keep))]))

    download, upload = Codec(partial(price, 1), write_down, read_down), Codec(partial(price, 0), write_up, read_up)
    return Exchange(
        client_step,
        None,
        bits_down,
        ("params",),
        None,
        cohort,
        download=download,
        upload=upload,
        joined=joined,
        start=start,
    )
