"""FedP3: each client trains some layers, receives the others pruned, and uploads only the layers that it trains."""

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
    """What each client remembers.

    Attributes:
        id: number of the client.
        head: the client's own final layer with `local_head`, as a part of the params; None without.
        logits: [n, layers], the client's aggregation logits if the server learns them; None otherwise.
        row: the client's row of the plan; None if that is its id.
    """

    id: Int[Array, "*n"]
    head: PyTree = None
    logits: Any = None
    row: Any = None

    @property
    def planned(self) -> Int[Array, "*n"]:
        """The client's row of the plan."""
        return self.id if self.row is None else self.row


class _Method(NamedTuple):
    """What a client needs to know to take part: the arguments of `fedp3`."""

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
    r"""FedP3 with any plan, pruning and aggregation.

    For each client i of the cohort, with its layers L_i and its masks P_i:

        W_i^l <- W^l for l in L_i,  P_i (.) W^l for the others                             down
        `steps` times:  W_i^l <- W_i^l - stepsize grad_l f_i(W_i; q (.) W_i outside L_i)   for l in L_i
        W^l   <- W^l + server sum_i a_il (W_i^l - W^l)                                     up: l in L_i only

    Args:
        loss: `loss(params, rows)` returns the loss of one client, a scalar.  It is not a `value_and_grad`, because only
            the layers that a client trains are differentiated.
        plan: the layers L_i and the keep ratio of each client (`commjax.algorithms.fedp3.plans`).
        sample: `sample(key, data)` returns the rows of one client's data for one step.
        steps: number of local steps in a round.
        pruning: P_i (`submodels`); None is `submodels.magnitude()`.
        local_pruning: q, the pruning inside a local step (`submodels`); None is `submodels.fixed()`, no pruning.
        aggregate: the weights a_il (`aggregation`); None is `aggregation.simple()`.
        others: what happens to the layers outside L_i during local training.  "frozen": they stay as they were sent.
            "masked": they are trained inside their masks, and the result is discarded.  "free": they are trained
            without the masks, and the result is discarded.
        local_head: whether each client keeps its own final layer.  The client still uploads it, but does not download
            it.
        cohort: number of clients that take part in a round, drawn at random; None is all of them.
        over: maps the local training over the clients.  `rounds.one_by_one` compiles a branch for each distinct L_i.
            `jax.vmap` would run all branches; with it every gradient is computed and those of frozen layers are
            dropped.  The trajectory is the same, at FedAvg's computing cost.

    Returns:
        The algorithm.  Its `init(params, ids, data=None, rows=None)` checks the batch size against every client's rows
        if it gets the data (leading axis n).  `rows` ([n]) has the client's row of the plan where that is not its id:
        one compiled program then serves several stacked plans.

    Thesis: Alg. 5 (FedP3), Alg. 6 (LocalUpdate), Alg. 7 (Aggregation).
    Holds if: all layers, no pruning: FedAvg.
    Differs: F8 (weights), F9 (W_{t,k}; layers outside L_i are trained in Sec. 4.2 and not in Alg. 6: `others`), F23
    (the released code).
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
        # A remote client calls init with its id alone (`commjax.federation.exchange`), so one id is always allowed.
        if rows is not None or len(ids) != 1:
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
    """Number of rows of a minibatch, from shapes alone."""
    row = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), data)
    shapes = [leaf.shape for leaf in jax.tree.leaves(jax.eval_shape(sample, jax.random.key(0), row))]
    return max((shape[0] for shape in shapes if shape), default=0)


def _check_rows(sample: Sample, data: PyTree) -> None:
    """Raise a ValueError if a minibatch has more rows than the arrays of a client.

    Padding counts as rows here: only `init` knows which rows are padding.
    """
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
    """The client's model after `steps` local steps, which equals `params` outside L_i, and its first loss."""
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
    """LocalUpdate: the client's whole model, and its first loss.

    `mine` is L_i.  `differentiated` is static and contains L_i.  The keys of the rows are those of FedAvg.
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
    # The layers outside L_i are discarded: the server's values replace them, and no message contains them.
    if isinstance(mine, np.ndarray):
        return layers.join(layers.split(plan.layers, trained, mine)[0], params), loss
    keeps = layers.by_leaf(plan.layers, params, mine)
    return jax.tree.map(lambda yes, new, old: jnp.where(yes, new, old), keeps, trained, params), loss


class Messages(NamedTuple):
    """What the server and one client send each other in one round.

    Attributes:
        down: the download.
        up: the upload.
    """

    down: bytes
    up: bytes


def messages(
    key: Key,
    hparams: Any,
    state: State,
    data: PyTree,
    id: int,
    loss: Loss,
    plan: Plan,
    sample: Sample = local.all_rows,
    *,
    steps: int,
    pruning: Pruning | None = None,
    local_pruning: LocalPruning | None = None,
    others: Others = "frozen",
) -> Messages:
    """The download and the upload of client `id` in the next round, computed on the host.

    `wire.read_down` and `wire.read_up` read them.  Their lengths, times 8, are the bits of `ledger`.

    Args:
        key: key of the run.
        hparams: the hyperparameters.
        state: the state before the round.
        data: the data of this client, without a client axis.
        id: number of the client.
        loss: as in `fedp3`.
        plan: as in `fedp3`.
        sample: as in `fedp3`.
        steps: as in `fedp3`.
        pruning: as in `fedp3`.
        local_pruning: as in `fedp3`.
        others: as in `fedp3`.

    Returns:
        The two messages.
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
    key: Key,
    hparams: Any,
    state: State,
    data: PyTree,
    loss: Loss,
    plan: Plan,
    sample: Sample = local.all_rows,
    *,
    steps: int,
    pruning: Pruning | None = None,
    local_pruning: LocalPruning | None = None,
    others: Others = "frozen",
    over: Callable = rounds.one_by_one,
    use: Callable[[Params, Any], Any] = lambda model, data: model,
) -> Any:
    """Apply a function to the model that each client itself has after a round.

    This model is W_i after the local steps.  The layers outside L_i are kept as they were sent, or trained if `others`
    says so.  The model is then pruned by Q_i at its smallest ratio.  The released code reports the accuracy of these
    models.

    Args:
        key: key of the run.
        hparams: the hyperparameters.
        state: the state before the round.
        data: the data of all clients, leading axis n.
        loss: as in `fedp3`.
        plan: as in `fedp3`.
        sample: as in `fedp3`.
        steps: as in `fedp3`.
        pruning: as in `fedp3`.
        local_pruning: as in `fedp3`.
        others: as in `fedp3`.
        over: maps the computation over the clients.
        use: `use(model, data)` takes the model and the data of one client and returns a pytree, for example an
            accuracy.

    Returns:
        What `use` returned, with a leading axis n.

    Differs: F23.
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
    """The model that a client deploys: the global model, with the client's own head if it has one.

    Args:
        plan: not used.
        server: the server's state.
        client: one client's row, without a client axis.

    Returns:
        The params.
    """
    return server.params if client.head is None else layers.join(client.head, server.params)


def released(loss: Loss, plan: Plan, sample: Sample, *, steps: int, **how: Any) -> Algorithm:
    """FedP3 with the setting of the released code: pruning that training does not enforce, and local heads.

    The released code has the plan `plans.consecutive(layers, n, count, keep=0.9)` and magnitude pruning.

    Args:
        loss: as in `fedp3`.
        plan: as in `fedp3`.
        sample: as in `fedp3`.
        steps: as in `fedp3`.
        **how: other arguments of `fedp3`.

    Returns:
        The algorithm.

    Differs: F23.
    """
    return fedp3(loss, plan, sample, steps=steps, others="free", local_head=True, **how)


def ledger(
    plan: Plan,
    params: Params,
    pruning: Pruning | None = None,
    local_head: bool = False,
    local_pruning: LocalPruning | None = None,
) -> dict[str, Float[np.ndarray, "n"]]:
    """Bits of every client in a round in which it takes part.

    Args:
        plan: as in `fedp3`.
        params: the params, or their shapes and dtypes.
        pruning: as in `fedp3`.
        local_head: as in `fedp3`.
        local_pruning: as in `fedp3`.

    Returns:
        {"up": bits up [n], "down": bits down [n]}.
    """
    up, down = wire.prices(plan, pruning or submodels.magnitude(), params, local_head, local_pruning)
    return {"up": up, "down": down}
