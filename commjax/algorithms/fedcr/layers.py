"""FedCR on layers (the thesis's FedCR-OPU3): a client trains some layers of the shared body and uploads only those."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from commjax.algorithms.fedcr import method
from commjax.algorithms.fedcr.distributions import Experts, known
from commjax.algorithms.fedcr.method import HParams, Local, Network, Over, Server, check
from commjax.algorithms.fedp3 import aggregation, layers, submodels
from commjax.algorithms.fedp3.aggregation import Uploads
from commjax.algorithms.fedp3.layers import Assignment, Plan
from commjax.algorithms.fedp3.submodels import Pruning
from commjax.core import checks, local, rounds, tree
from commjax.core.base import Algorithm, AxisName, Key, Metrics, Params, Spec, State
from commjax.core.local import Sample

__all__ = ["Client", "HParams", "fedcr_layers", "ledger"]


class Client(NamedTuple):
    """What each client remembers.

    Attributes:
        id: number of the client.
        head: the client's head.
        plan: the client's entry of the plan: the layers that it trains, and its keep ratio.
    """

    id: Int[Array, "*n"]
    head: PyTree
    plan: Assignment


def fedcr_layers(
    network: Network,
    plan: Plan,
    sample: Sample = local.all_rows,
    *,
    steps: int,
    pruning: Pruning | None = None,
    cohort: int | None = None,
    over: Over = jax.vmap,
) -> Algorithm:
    r"""FedCR in which client i trains only the layers L_i of the shared body, as in FedP3, and uploads only those.

        down:           W^l for l in L_i,  P_i (.) W^l for the other layers l of the body
        `steps` times:  FedCR's step on the client's head and on the layers of L_i
        up:             the layers of L_i, without the head
        W^l <- the mean over the clients that train layer l

    W^l are the weights of layer l, and P_i is the pruning mask of client i.  The class distributions are sent up and
    down as in `fedcr`.  If every client trains all layers, this is FedCR.

    Args:
        network: the network.
        plan: the layers L_i and the keep ratio of each client, for params {"body", "head"}.  The final layer is the
            head.
        sample: `sample(key, data)` returns the rows of one client's data for one step.
        steps: number of local steps in a round.
        pruning: makes the masks P_i; None is `submodels.magnitude()`.
        cohort: number of clients that take part in a round, drawn at random; None is all of them.
        over: maps the local training over the clients: `jax.vmap`, or `rounds.one_by_one` for large models.

    Returns:
        The algorithm.  Its `init(params, ids, plan=None)` takes the plan of the run, as that of `fedp3` does.

    Thesis: Fig. 4.2 (right), FedCR-OPU3.
    Differs: the thesis does not say how the two methods are combined.  Here `fedcr` drops the gradients outside L_i.
    """
    rounds.check_cohort(cohort)
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    compiled, cut = plan, pruning or submodels.magnitude()

    def init(params: Params, ids: Int[Array, "n"], plan: Plan | None = None) -> State:
        return _init(network, compiled, cut, params, ids, plan=plan)

    def step(
        key: Key, hparams: Any, state: State, batch: PyTree, *, axis_name: AxisName = None
    ) -> tuple[State, Metrics]:
        server, n = state.server, rounds.count(state.clients.id, axis_name)
        keys = rounds.keys(key, server.round, n)
        drawn = rounds.cohort(keys.cohort, state.clients.id, cohort, axis_name)
        masks = submodels.server_masks(compiled, cut, keys.server, server.params)
        received, masks = rounds.broadcast((server, masks), axis_name)

        def client_round(client: Client, data: Any) -> tuple[Client, Params, Experts, Array]:
            key, mine = keys.client(client.id), client.plan.trained
            key_masks = jax.random.fold_in(key, steps)
            sent, _ = submodels.sent(compiled, mine, key_masks, client.plan.ratio, received.params, masks)
            moves = layers.by_leaf(compiled.layers, server.params, mine)
            work = Local(key, hparams, received.classes, {**sent, "head": client.head}, data, moves)
            model, losses = method.train(network, sample, steps, work)
            # The mean gives the layers outside L_i the weight 0, so that they need not be removed here.
            update = tree.sub(model, received.params)
            return client._replace(head=model["head"]), update, method.experts_of(network, model, data), losses[0]

        present = drawn.take(state.clients)
        clients, updates, experts, losses = over(client_round)(present, drawn.take(batch))
        trained, members = present.plan.trained, n if cohort is None else cohort
        logits = jnp.zeros(trained.shape, jnp.zeros(()).dtype)
        uploads = Uploads(updates, trained, logits, axis_name, drawn.weights, members)
        move = aggregation.mean_move(compiled.layers, uploads)
        params = {**server.params, "body": tree.add(server.params["body"], move["body"])}
        total = rounds.mean(tree.scale(members, experts), axis_name, drawn.weights)
        metrics = aggregation.mean_metrics(losses, _tables(compiled, server, cut), present.plan, uploads, n)
        after = Server(server.round + 1, params, known(hparams, server.classes, total))
        return State(after, drawn.put(state.clients, clients)), metrics

    return Algorithm(checks.checked_init(init), step, spec=Spec(HParams, Server, Client, check))


def _init(
    network: Network, compiled: Plan, pruning: Pruning, params: Params, ids: Int[Array, "n"], *, plan: Plan | None
) -> State:
    server = method.blank(network, params)
    if compiled.layers.of.count(len(compiled.layers.names) - 1) != len(jax.tree.leaves(params["head"])):
        raise ValueError(
            f"plan: the final layer {compiled.layers.names[-1]!r} is not the head; allowed: the head alone"
        )
    run = compiled if plan is None else plan
    layers.check_clients(run, len(ids))
    submodels.check(compiled, pruning, params)
    rows = layers.assigned(compiled, run, np.zeros(len(run.keep), int), ids)
    return State(server, Client(ids, tree.repeat(params["head"], len(ids)), rows))


def _tables(plan: Plan, server: Server, pruning: Pruning) -> tuple[np.ndarray, np.ndarray]:
    """Bits up and bits down of every kind of client (`submodels.bit_tables`)."""
    up, down = submodels.bit_tables(plan, server.params, pruning=pruning, local_head=True)
    classes = rounds.dense_bits(server.classes)
    return up - rounds.dense_bits(server.params["head"]) + classes, down + classes


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
    up, down = _tables(plan, server, pruning or submodels.magnitude())
    rows = layers.assigned(plan, plan, np.zeros(len(plan.keep), int), jnp.arange(len(plan.keep)))
    kind = tuple(np.asarray(column) for column in (rows.layer_set, rows.ratio, rows.low))
    return {"up": up[kind], "down": down[kind]}
