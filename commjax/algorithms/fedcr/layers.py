"""FedCR on layers (the thesis's FedCR-OPU3): a client trains some layers of the shared body and uploads only those."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from commjax.algorithms.fedcr import method
from commjax.algorithms.fedcr.method import HParams, Network, Server, check
from commjax.algorithms.fedp3 import aggregation, layers, submodels
from commjax.algorithms.fedp3 import wire as fedp3_wire
from commjax.algorithms.fedp3.plans import Plan, check_rows
from commjax.algorithms.fedp3.submodels import Pruning
from commjax.core import checks, local, rounds, tree
from commjax.core.base import Algorithm, Metrics, Params, Spec, State
from commjax.core.local import Sample

__all__ = ["Client", "HParams", "fedcr_layers", "ledger"]


class Client(NamedTuple):
    """What each client remembers.

    Attributes:
        id: number of the client.
        head: the client's head.
        row: the client's row of the plan.
    """

    id: Int[Array, "*n"]
    head: PyTree
    row: Int[Array, "*n"]


def fedcr_layers(
    network: Network,
    plan: Plan,
    sample: Sample = local.all_rows,
    *,
    steps: int,
    pruning: Pruning | None = None,
    cohort: int | None = None,
    over: Callable = jax.vmap,
) -> Algorithm:
    r"""FedP3's layers with FedCR's objective.

        down:           W^l for l in L_i,  P_i (.) W^l for the others
        `steps` times:  FedCR's step on the client's own head and on the layers of L_i
        up:             the layers of L_i, without the head
        W^l <- the mean over the clients that train layer l

    The class distributions are sent up and down as in `fedcr`.

    Args:
        network: the network.
        plan: the layers L_i and the keep ratio of each client, for params {"body", "head"}.  The final layer is the
            head.
        sample: `sample(key, data)` returns the rows of one client's data for one step.
        steps: number of local steps in a round.
        pruning: P_i; None is `submodels.magnitude()`.
        cohort: number of clients that take part in a round, drawn at random; None is all of them.
        over: maps the local training over the clients: `jax.vmap`, or `rounds.one_by_one` for large models.

    Returns:
        The algorithm.  Its `init(params, ids, rows=None)` takes `rows` as that of `fedp3` does.

    Thesis: Fig. 4.2 (right).
    Holds if: all layers are trained: FedCR.
    Differs: the thesis says nothing of how the two are joined; this is `fedcr` where gradients outside L_i are dropped.
    """
    rounds.check_cohort(cohort)
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    cut = pruning or submodels.magnitude()

    def init(params: Params, ids: Int[Array, "n"], rows: Any = None) -> State:
        server = method.blank(network, params)
        if plan.layers.of.count(len(plan.layers.names) - 1) != len(jax.tree.leaves(params["head"])):
            raise ValueError(
                f"plan: the final layer {plan.layers.names[-1]!r} is not the head; allowed: the head alone"
            )
        check_rows(plan, len(ids), rows)
        submodels.check(plan, cut, submodels.fixed(), params)
        return State(
            server, Client(ids, tree.repeat(params["head"], len(ids)), ids if rows is None else jnp.asarray(rows))
        )

    def step(key, hparams, state, batch, *, axis_name=None):
        server, n = state.server, rounds.count(state.clients.id, axis_name)
        key_round = jax.random.fold_in(key, server.round)
        here = rounds.cohort(jax.random.fold_in(key_round, n), state.clients.id, cohort, axis_name)
        made = submodels.server_masks(plan, cut, jax.random.fold_in(key_round, n + 1), server.params)
        received, made = rounds.broadcast((server, made), axis_name)
        members = n if cohort is None else cohort

        def one(client, data):
            key_own = jax.random.fold_in(key_round, client.id)
            mine = jnp.asarray(plan.trained)[client.row]
            key_masks = jax.random.fold_in(key_own, steps)
            sent, _ = fedp3_wire.sent(plan, mine, key_masks, client.row, received.params, made)
            start, moves = {**sent, "head": client.head}, layers.by_leaf(plan.layers, server.params, mine)
            model, losses = method.train(network, sample, steps, key_own, hparams, received.classes, start, data, moves)
            experts = method.experts_of(network, model, data)
            # The mean gives the layers outside L_i the weight 0, so that they need not be removed here.
            return client._replace(head=model["head"]), tree.sub(model, received.params), experts, losses[0]

        present = here.take(state.clients)
        rows, updates, experts, losses = over(one)(present, here.take(batch))
        holds = jnp.asarray(plan.trained)[present.row]
        weight = aggregation.weights(jnp.zeros(holds.shape, jnp.zeros(()).dtype), holds)
        move = aggregation.joined(plan.layers, updates, weight, axis_name, here.weights)
        params = {**server.params, "body": tree.add(server.params["body"], move["body"])}
        total = rounds.mean(tree.scale(members, experts), axis_name, here.weights)
        bits = ledger(plan, server, cut)
        up, down = (jnp.asarray(bits[way], jnp.zeros(()).dtype)[present.row] for way in ("up", "down"))
        loss, up, down = rounds.mean((losses, up, down), axis_name, here.weights)
        new = Server(server.round + 1, params, method.known(hparams, server.classes, total))
        share = members / n
        return State(new, here.put(state.clients, rows)), Metrics(loss, share * up, share * down)

    return Algorithm(checks.checked_init(init), step, spec=Spec(HParams, Server, Client, check))


def ledger(plan: Plan, server: Server, pruning: Pruning | None = None) -> dict[str, Float[np.ndarray, "n"]]:
    """Bits of every client in a round in which it takes part.

    A client uploads its layers of the body and downloads the pruned body.  Both directions have the class
    distributions; heads are never sent.

    Args:
        plan: as in `fedcr_layers`.
        server: the server's state.
        pruning: as in `fedcr_layers`.

    Returns:
        {"up": bits up [n], "down": bits down [n]}.
    """
    up, down = fedp3_wire.prices(plan, pruning or submodels.magnitude(), server.params, local_head=True)
    classes = rounds.dense_bits(server.classes)
    return {"up": up - rounds.dense_bits(server.params["head"]) + classes, "down": down + classes}
