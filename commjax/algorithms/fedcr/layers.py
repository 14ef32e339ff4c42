"""FedCR on layers: each client trains some of the layers of the shared body, and sends only those (the thesis's FedCR-OPU3)."""

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
    id: Int[Array, "*n"]
    head: PyTree
    row: Int[Array, "*n"]  # of the plan


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
    r"""FedP3's layers with FedCR's objective: client i has a head of its own, is sent W^l for l in L_i and P_i (.) W^l for the others,
    takes FedCR's steps on its head and on the layers of L_i, and sends those of the body; the server takes the mean over the holders
    of a layer.  Class distributions go up and down as in `fedcr`.

    `plan`: of all params {"body", "head"}, the head being the final layer.  `init(params, ids, rows=None)`; `rows` as `fedp3`'s.

    Thesis: right of Fig. L1810.
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
            # What is outside L_i has weight 0 in the mean.
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
    """Bits up and down of every client in a round in which it takes part: its layers of the body, or the body pruned, and the
    class distributions; heads never travel."""
    up, down = fedp3_wire.prices(plan, pruning or submodels.magnitude(), server.params, local_head=True)
    classes = rounds.dense_bits(server.classes)
    return {"up": up - rounds.dense_bits(server.params["head"]) + classes, "down": down + classes}
