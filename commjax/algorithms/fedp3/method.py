"""FedP3: each client trains some of the layers, is sent the others pruned, and sends back only what it trains."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from commjax.algorithms.fedavg import HParams, Server, check, server_step
from commjax.algorithms.fedp3 import aggregation, layers, remote, submodels, wire
from commjax.algorithms.fedp3.aggregation import Aggregation
from commjax.algorithms.fedp3.plans import Plan, check_rows
from commjax.algorithms.fedp3.submodels import LocalPruning, Pruning
from commjax.core import checks, local, rounds, tree
from commjax.core.base import Algorithm, Key, Metrics, Params, Spec, State
from commjax.core.local import Sample

__all__ = ["Client", "HParams", "Server", "deployed", "fedp3", "ledger", "local_models", "messages", "released"]

Loss = Callable[[Params, Any], Array]
Others = Literal["frozen", "masked", "free"]


class Client(NamedTuple):
    id: Int[Array, "*n"]
    head: PyTree = None  # the final layer, where it is the client's own
    logits: Any = None  # [n, layers], where the server learns them
    row: Any = None  # its row of the plan, where that is not its id

    @property
    def planned(self) -> Int[Array, "*n"]:
        """Where the plan says what it trains."""
        return self.id if self.row is None else self.row


class _Method(NamedTuple):
    """What a client needs to know to take part."""

    loss: Loss
    plan: Plan
    pruning: Pruning
    local: LocalPruning
    others: Others
    sample: Sample
    steps: int


def fedp3(
    loss: Loss,
    plan: Plan,
    sample: Sample = local.all_rows,
    *,
    steps: int,
    pruning: Pruning | None = None,
    local_pruning: LocalPruning | None = None,
    aggregate: Aggregation | None = None,
    others: Others = "frozen",
    local_head: bool = False,
    cohort: int | None = None,
    over: Callable = rounds.one_by_one,
) -> Algorithm:
    r"""FedP3.  For each client i of the cohort, with its layers L_i and its masks P_i:

        W_i^l <- W^l for l in L_i,  P_i (.) W^l for the others                          down
        `steps` times:  W_i^l <- W_i^l - stepsize grad_l f_i(W_i; q (.) W_i outside L_i)       for l in L_i
        W^l   <- W^l + server sum_i a_il (W_i^l - W^l)                                  up: l in L_i only

    `loss(params, rows)` (not its gradient: what a client does not train is not differentiated).  `plan`: `commjax.algorithms.fedp3.plans`; `pruning`
    P_i (magnitude), `local_pruning` q (none): `submodels`; `aggregate` (simple): `aggregation`.

    `others`: layers outside L_i stay as they were sent ("frozen"), are trained inside their masks and then thrown away ("masked"), or
    without the masks ("free").  `local_head`: the final layer is sent up, but each client goes on with its own.

    `init(params, ids, data=None, rows=None)`; with the data, batches are checked against every client's rows.  `rows` says which row
    of the plan is a client's, if it is not that of its id: one compiled program then serves several plans, one beneath the other.

    `over=clients.one_by_one` compiles a branch for each distinct L_i; under `jax.vmap`, where all branches would run, every gradient
    is computed and those of frozen layers are dropped: the same trajectory at FedAvg's price.

    Thesis: Alg. FedP3 (L1657), LocalUpdate (L1710), Aggregation (L1733).
    Holds if: all layers, no pruning: FedAvg.
    Differs: F8 (weights), F9 (W_{t,k}; layers outside L_i are trained in L1707 and not in L1715: `others`), F23 (the released code).
    """
    rounds.check_cohort(cohort)
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    if others not in ("frozen", "masked", "free"):
        raise ValueError(f"others={others!r}; allowed: 'frozen', 'masked', 'free'")
    method = _Method(
        loss, plan, pruning or submodels.magnitude(), local_pruning or submodels.fixed(), others, sample, steps
    )
    how = aggregate or aggregation.simple()
    table = how.logits(plan)

    def init(params: Params, ids: Int[Array, "n"], data: PyTree = None, rows: Any = None) -> State:
        if rows is not None or len(ids) != 1:  # 1: a client by itself (`commjax.federation.exchange`)
            check_rows(plan, len(ids), rows)
        if len(plan.layers.of) != len(jax.tree.leaves(params)):
            raise ValueError(
                f"params have {len(jax.tree.leaves(params))} leaves, the plan's layers {len(plan.layers.of)}"
            )
        submodels.check(plan, method.pruning, method.local, params)
        if data is not None:
            local.check_batch(_batch_rows(sample, data), data)
        dtype = jax.tree.leaves(params)[0].dtype
        logits = jnp.asarray(table, dtype)[ids if rows is None else rows] if how.steps else None
        head = tree.repeat(wire.head(plan, params), len(ids)) if local_head else None
        return State(
            Server(jnp.zeros((), jnp.int32), params),
            Client(ids, head, logits, None if rows is None else jnp.asarray(rows)),
        )

    def step(key, hparams, state, batch, *, axis_name=None):
        _check_rows(sample, batch)
        server, n = state.server, rounds.count(state.clients.id, axis_name)
        key_round = jax.random.fold_in(key, server.round)
        here = rounds.cohort(jax.random.fold_in(key_round, n), state.clients.id, cohort, axis_name)
        made = submodels.server_masks(plan, method.pruning, jax.random.fold_in(key_round, n + 1), server.params)
        params, made = rounds.broadcast((server.params, made), axis_name)

        def one(client, data):
            key_own = jax.random.fold_in(key_round, client.id)
            model, loss = _client(method, over is not jax.vmap, key_own, hparams, params, made, client, data)
            head = wire.head(plan, model) if local_head else None
            return client._replace(head=head), tree.sub(model, params), loss

        present = here.take(state.clients)
        rows, updates, losses = over(one)(present, here.take(batch))
        holds = jnp.asarray(plan.trained)[present.planned]
        members = n if cohort is None else cohort
        if how.steps:
            logits = aggregation.learned(
                how, loss, plan.layers, server.params, updates, present.logits, holds, axis_name, here.weights, members
            )
            rows = rows._replace(logits=logits)
        else:
            logits = jnp.asarray(table, jnp.zeros(()).dtype)[present.planned]
        weight = aggregation.weights(logits, holds)
        move = aggregation.joined(plan.layers, updates, weight, axis_name, here.weights)
        metrics = _metrics(method, local_head, server.params, present.planned, losses, axis_name, here, members / n)
        after = rounds.next_round(server, server_step(hparams, server, move))
        return State(after, here.put(state.clients, rows)), metrics

    halves = remote.Halves(plan, method.pruning, method.local, steps, partial(_client, method, True), how, loss)
    exchange = remote.exchange(halves, table, local_head, cohort)
    return Algorithm(checks.checked_init(init), step, exchange, Spec(HParams, Server, Client, check))


def _batch_rows(sample: Sample, data: PyTree) -> int:
    """Rows of a minibatch, from shapes alone."""
    row = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), data)
    shapes = [leaf.shape for leaf in jax.tree.leaves(jax.eval_shape(sample, jax.random.key(0), row))]
    return max((shape[0] for shape in shapes if shape), default=0)


def _check_rows(sample: Sample, data: PyTree) -> None:
    """ValueError for a minibatch larger than what every client has; padding, which only `init` can look at, counts here."""
    if sample is local.all_rows:
        return
    rows = max((leaf.shape[1] for leaf in jax.tree.leaves(data) if leaf.ndim > 1), default=0)
    if (size := _batch_rows(sample, data)) > rows:
        raise ValueError(f"sample draws batches of {size}, but a client has {rows} rows; allowed: at most {rows}")


def _metrics(method, local_head, params, planned, losses, axis_name, here, share):
    up, down = wire.prices(method.plan, method.pruning, params, local_head, method.local)
    kind = jnp.zeros(()).dtype
    bits = (jnp.asarray(up, kind)[planned], jnp.asarray(down, kind)[planned])
    loss, bits_up, bits_down = rounds.mean((losses, *bits), axis_name, here.weights)
    return Metrics(loss, share * bits_up, share * bits_down)


def _client(method, branches, key, hparams, params, made, client, data):
    """The client's model after `steps` local steps, equal to `params` outside L_i; and its first loss."""
    sets, rank = np.unique(method.plan.trained, axis=0, return_inverse=True)

    def one(mine, differentiated):
        def run(key, client, data):
            return _train(method, mine, differentiated, key, hparams, params, made, client, data)

        return run

    if len(sets) == 1:
        return one(sets[0], sets[0])(key, client, data)
    if not branches:
        return one(jnp.asarray(method.plan.trained)[client.planned], sets.any(axis=0))(key, client, data)
    which = jnp.asarray(rank.reshape(-1), jnp.int32)[client.planned]
    return jax.lax.switch(which, [one(mine, mine) for mine in sets], key, client, data)


def _local(method, mine, differentiated, key, hparams, params, made, client, data):
    """LocalUpdate: the client's whole model, and its first loss.  `mine` is L_i; `differentiated` (static) has L_i inside.

    Keys of the rows are FedAvg's.
    """
    plan, static = method.plan, isinstance(mine, np.ndarray)
    key_masks, key_steps = (jax.random.fold_in(key, method.steps + more) for more in (1, 2))
    start = params if client.head is None else layers.join(client.head, params)
    start, masks = wire.sent(plan, mine, key_masks, client.planned, start, made)
    if method.others != "frozen":
        differentiated = np.ones(len(plan.layers.names), bool)
    own, rest = layers.split(plan.layers, start, differentiated)

    def value(own, number, rows):
        model = layers.join(own, rest)
        if method.others == "masked":
            model = wire.masked(model, masks)
        key_step = jax.random.fold_in(key_steps, number)
        return method.loss(submodels.local_submodel(plan, method.local, key_step, client.planned, mine, model), rows)

    moves = layers.split(plan.layers, layers.by_leaf(plan.layers, params, mine), differentiated)[0]

    def one(own, number):
        rows = method.sample(jax.random.fold_in(key, number), data)
        loss, grad = jax.value_and_grad(value)(own, number, rows)
        if not static and method.others == "frozen":
            grad = jax.tree.map(lambda g, yes: jnp.where(yes, g, jnp.zeros((), g.dtype)), grad, moves)
        return tree.add_scaled(own, -hparams.stepsize, grad), loss

    own, losses = jax.lax.scan(one, own, jnp.arange(method.steps))
    trained = layers.join(own, rest)
    return wire.masked(trained, masks) if method.others == "masked" else trained, losses[0]


def _train(method, mine, differentiated, key, hparams, params, made, client, data):
    plan = method.plan
    trained, loss = _local(method, mine, differentiated, key, hparams, params, made, client, data)
    # What is outside L_i is not looked at again: the server's value stands in its place, and it never enters a message.
    if isinstance(mine, np.ndarray):
        return layers.join(layers.split(plan.layers, trained, mine)[0], params), loss
    keeps = layers.by_leaf(plan.layers, params, mine)
    return jax.tree.map(lambda yes, new, old: jnp.where(yes, new, old), keeps, trained, params), loss


class Messages(NamedTuple):
    """What goes over the wire between the server and one client in one round."""

    down: bytes
    up: bytes


def messages(
    key: Key, hparams: Any, state: State, data: PyTree, id: int, loss: Loss, plan: Plan, sample: Sample = local.all_rows, *,
    steps: int, pruning: Pruning | None = None, local_pruning: LocalPruning | None = None, others: Others = "frozen",
) -> Messages:  # fmt: skip
    """The two messages of client `id` (whose row of the data is `data`) in the coming round, on the host; arguments as `fedp3`'s.

    `fedp3_wire.read_up` and `read_down` read them back; their lengths are the ledger's, 8 bits a byte.
    """
    method = _Method(
        loss, plan, pruning or submodels.magnitude(), local_pruning or submodels.fixed(), others, sample, steps
    )
    params, n = state.server.params, len(state.clients.id)
    client = jax.tree.map(lambda leaf: leaf[id], state.clients)
    key_round = jax.random.fold_in(key, state.server.round)
    key_own, id = jax.random.fold_in(key_round, id), int(client.planned)
    made = submodels.server_masks(plan, method.pruning, jax.random.fold_in(key_round, n + 1), params)
    mine = plan.trained[id]
    sent, masks = wire.sent(plan, mine, jax.random.fold_in(key_own, steps + 1), id, params, made)
    model, _ = _train(method, mine, mine, key_own, hparams, params, made, client, data)
    local_head = state.clients.head is not None
    blocks = wire.used(plan, method.local, id, params, local_head)
    down = wire.write_down(plan, method.pruning, id, sent, masks, local_head, blocks)
    return Messages(down, wire.write_up(plan, id, model, blocks))


def local_models(
    key: Key, hparams: Any, state: State, data: PyTree, loss: Loss, plan: Plan, sample: Sample = local.all_rows, *,
    steps: int, pruning: Pruning | None = None, local_pruning: LocalPruning | None = None, others: Others = "frozen",
    over: Callable = rounds.one_by_one, use: Callable[[Params, Any], Any] = lambda model, data: model,
) -> Any:  # fmt: skip
    """`use(model, data)` of what each client has itself after a round that begins at `state`: arguments as `fedp3`'s.

    That is W_i after its local steps, the layers outside L_i as they were sent (and perhaps trained) and not thrown away, and cut
    down by Q_i to the least of its ratios.  The released code reports the accuracy of these.  Differs: F23.
    """
    method = _Method(
        loss, plan, pruning or submodels.magnitude(), local_pruning or submodels.fixed(), others, sample, steps
    )
    params, n = state.server.params, len(state.clients.id)
    key_round = jax.random.fold_in(key, state.server.round)
    made = submodels.server_masks(plan, method.pruning, jax.random.fold_in(key_round, n + 1), params)
    every = np.ones(len(plan.layers.names), bool)

    def one(client, data):
        mine, key_own = jnp.asarray(plan.trained)[client.planned], jax.random.fold_in(key_round, client.id)
        model, _ = _local(method, mine, every, key_own, hparams, params, made, client, data)
        least, key_least = submodels.least(method.local), jax.random.fold_in(key_own, steps)
        return use(submodels.local_submodel(plan, least, key_least, client.planned, mine, model), data)

    return over(one)(state.clients, data)


def deployed(plan: Plan, server: Any, client: Any) -> Params:
    """What a client deploys: the global model, with its own head where it has one."""
    return server.params if client.head is None else layers.join(client.head, server.params)


def released(loss: Loss, plan: Plan, sample: Sample, *, steps: int, **how: Any) -> Algorithm:
    """The setting of the released code: magnitude pruning that is not enforced while training, and local heads.

    Its plan is `plans.consecutive(layers, n, count, keep=0.9)`.  Differs: F23.
    """
    return fedp3(loss, plan, sample, steps=steps, others="free", local_head=True, **how)


def ledger(
    plan: Plan,
    params: Params,
    pruning: Pruning | None = None,
    local_head: bool = False,
    local_pruning: LocalPruning | None = None,
) -> dict[str, Float[np.ndarray, "n"]]:
    """Bits up and down of every client in a round in which it takes part."""
    up, down = wire.prices(plan, pruning or submodels.magnitude(), params, local_head, local_pruning)
    return {"up": up, "down": down}
