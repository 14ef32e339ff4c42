"""FedP3: each client trains some layers, receives the others pruned, and uploads only the layers that it trains."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int, PyTree

from commjax.algorithms.fedavg import HParams, Server, check, server_step
from commjax.algorithms.fedp3 import aggregation, layers, local_pruning, submodels, wire
from commjax.algorithms.fedp3.aggregation import Aggregation, Loss, Uploads
from commjax.algorithms.fedp3.client import (
    Client,
    ClientSide,
    Download,
    LocalWork,
    Others,
    Over,
    batch_rows,
    check_rows,
    client_keys,
)
from commjax.algorithms.fedp3.layers import Assignment, Plan
from commjax.algorithms.fedp3.local_pruning import LocalPruning, fixed
from commjax.algorithms.fedp3.submodels import Pruning
from commjax.core import checks, local, rounds, tree
from commjax.core.base import Algorithm, AxisName, Key, Metrics, Params, Spec, State
from commjax.core.local import Sample

__all__ = ["Client", "HParams", "Messages", "Method", "Server", "deployed", "fedp3", "ledger", "released"]


class Messages(NamedTuple):
    """What the server and one client send each other in one round.

    Attributes:
        down: the download.
        up: the upload.
    """

    down: bytes
    up: bytes


@dataclass(frozen=True, eq=False)
class Method(ClientSide):
    """FedP3 with its options: the round of all clients.

    `fedp3` explains the options; `algorithm` makes the `Algorithm`.

    Attributes:
        aggregate: the weights a_il.
        cohort: number of clients that take part in a round; None is all of them.
    """

    aggregate: Aggregation = field(default_factory=aggregation.simple, kw_only=True)
    cohort: int | None = field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        """Raise a ValueError for an option that is not allowed."""
        super().__post_init__()
        rounds.check_cohort(self.cohort)

    def algorithm(self) -> Algorithm:
        """The pair of functions `init` and `step`, with the exchange for remote clients."""
        from commjax.algorithms.fedp3 import remote  # which needs this class

        spec = Spec(HParams, Server, Client, check)
        return Algorithm(checks.checked_init(self.init), self.step, remote.exchange(self), spec)

    def init(self, params: Params, ids: Int[Array, "n"], data: PyTree = None, plan: Plan | None = None) -> State:
        """The state before the first round.

        Args:
            params: W.
            ids: numbers of the clients: all of them, or one remote client.
            data: the data of all clients; if given, the batch size is checked against every client's rows.
            plan: the plan of this run, if it is not that of the method.  Its layer sets and keep ratios must be among
                those of the method's plan.  One compiled program then serves several plans (`plans.kinds`).

        Returns:
            The state.
        """
        run = self.plan if plan is None else plan
        # A remote client calls init with its id alone (`commjax.federation.exchange`), so one id is always allowed.
        if len(ids) != 1:
            layers.check_clients(run, len(ids))
        leaves = jax.tree.leaves(params)
        if len(self.plan.layers.of) != len(leaves):
            raise ValueError(f"params have {len(leaves)} leaves, the plan's layers {len(self.plan.layers.of)}")
        submodels.check(self.plan, self.pruning, params)
        if data is not None:
            local.check_batch(batch_rows(self.sample, data), data)
        low = local_pruning.low_numbers(self.local_pruning, self.plan, run)
        logits = None
        if self.aggregate.steps:
            logits = jnp.asarray(self.aggregate.logits(run.trained), leaves[0].dtype)[ids]
        head = tree.repeat(layers.head(self.plan.layers, params), len(ids)) if self.local_head else None
        clients = Client(ids, layers.assigned(self.plan, run, low, ids), head, logits)
        return State(Server(jnp.zeros((), jnp.int32), params), clients)

    def step(
        self, key: Key, hparams: Any, state: State, batch: PyTree, *, axis_name: AxisName = None
    ) -> tuple[State, Metrics]:
        """One round of all clients: (key of the run, hparams, state, data) -> (state, metrics)."""
        check_rows(self.sample, batch)
        server, n = state.server, rounds.count(state.clients.id, axis_name)
        keys = rounds.keys(key, server.round, n)
        cohort = rounds.cohort(keys.cohort, state.clients.id, self.cohort, axis_name)
        download = rounds.broadcast(self._download(keys, server.params), axis_name)

        def client_round(client: Client, data: PyTree) -> tuple[Client, Params, Array]:
            model, loss = self.train(keys.client(client.id), hparams, download, client, data)
            return client._replace(head=self.head(model)), tree.sub(model, download.params), loss

        present = cohort.take(state.clients)
        clients, updates, losses = self.over(client_round)(present, cohort.take(batch))
        members = n if self.cohort is None else self.cohort
        uploads = Uploads(updates, present.plan.trained, self.logits(present), axis_name, cohort.weights, members)
        move, logits = aggregation.aggregated(self.aggregate, self.loss, self.plan.layers, server.params, uploads)
        if self.aggregate.steps:
            clients = clients._replace(logits=logits)
        bits = submodels.bit_tables(self.plan, server.params, **self.format_options())
        metrics = aggregation.mean_metrics(losses, bits, present.plan, uploads, n)
        after = rounds.next_round(server, server_step(hparams, server, move))
        return State(after, cohort.put(state.clients, clients)), metrics

    def logits(self, clients: Client) -> Float[Array, "m l"]:
        """The aggregation logits of clients, one row for each."""
        if self.aggregate.steps:
            return clients.logits
        table = self.aggregate.logits(layers.layer_sets(self.plan))
        return jnp.asarray(table, jnp.zeros(()).dtype)[clients.plan.layer_set]

    def _download(self, keys: rounds.RoundKeys, params: Params) -> Download:
        return Download(params, submodels.server_masks(self.plan, self.pruning, keys.server, params))

    def messages(self, key: Key, hparams: Any, state: State, data: PyTree, client: int) -> Messages:
        """The download and the upload of one client in the next round, computed on the host.

        `wire.read_down` and `wire.read_up` read them.  Their lengths, times 8, are the bits of `ledger`.

        Args:
            key: key of the run.
            hparams: the hyperparameters.
            state: the state before the round.
            data: the data of this client, without a client axis.
            client: the row of the client in `state.clients`.

        Returns:
            The two messages.
        """
        params, keys = state.server.params, rounds.keys(key, state.server.round, len(state.clients.id))
        row = jax.tree.map(lambda leaf: leaf[client], state.clients)
        mine, key_client = np.asarray(row.plan.trained), keys.client(row.id)
        download = self._download(keys, params)
        work = LocalWork(client_keys(key_client, self.steps), hparams, download, row, data)
        sent, masks = submodels.sent(self.plan, mine, work.keys.masks, row.plan.ratio, params, download.masks)
        model = self.trained_layers(mine, self.local_update(mine, mine, work)[0], params)
        format = self.format(row.plan, params)
        return Messages(wire.write_down(format, sent, masks), wire.write_up(format, model))

    def format(self, assignment: Assignment, params: Params) -> submodels.Format:
        """The format of the messages of one client, from its part of the plan, without a client axis."""
        kind = (assignment.layer_set, assignment.ratio, assignment.low)
        return submodels.kind_format(self.plan, kind, params, **self.format_options())

    def format_options(self) -> dict[str, Any]:
        """The options of `submodels.format_of`, `kind_format` and `bit_tables`."""
        return {"pruning": self.pruning, "local": self.local_pruning, "local_head": self.local_head}

    def local_models(
        self,
        key: Key,
        hparams: Any,
        state: State,
        data: PyTree,
        *,
        use: Callable[[Params, Any], Any] = lambda model, data: model,
    ) -> Any:
        """Apply a function to the model that each client itself has after a round.

        This model is W_i after the local steps.  The layers outside L_i are kept as they were sent, or trained if
        `others` says so.  The model is then pruned by Q_i at its smallest ratio.  The released code reports the
        accuracy of these models.

        Args:
            key: key of the run.
            hparams: the hyperparameters.
            state: the state before the round.
            data: the data of all clients, leading axis n.
            use: `use(model, data)` takes the model and the data of one client and returns a pytree, for example an
                accuracy.

        Returns:
            What `use` returned, with a leading axis n.

        Differs: F23.
        """
        keys = rounds.keys(key, state.server.round, len(state.clients.id))
        download = self._download(keys, state.server.params)
        every, least = np.ones(len(self.plan.layers.names), bool), local_pruning.least(self.local_pruning)

        def client_model(client: Client, data: PyTree) -> Any:
            mine, derived = client.plan.trained, client_keys(keys.client(client.id), self.steps)
            model, _ = self.local_update(mine, every, LocalWork(derived, hparams, download, client, data))
            cut = local_pruning.local_submodel(self.plan, least, derived.least, client.plan.low, mine, model)
            return use(cut, data)

        return self.over(client_model)(state.clients, data)

    def ledger(self, params: Params) -> dict[str, Float[np.ndarray, "n"]]:
        """Bits of every client in a round in which it takes part: {"up": [n], "down": [n]}."""
        return ledger(self.plan, params, self.pruning, self.local_head, self.local_pruning)


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
    over: Over = rounds.one_by_one,
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
        local_pruning: q, the pruning inside a local step; None is `local_pruning.fixed()`, no pruning.
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
        The algorithm, `Method(...).algorithm()`.  Its `init` is `Method.init`.

    Thesis: Alg. 5 (FedP3), Alg. 6 (LocalUpdate), Alg. 7 (Aggregation).
    Holds if: all layers, no pruning: FedAvg.
    Differs: F8 (weights), F9 (W_{t,k}; layers outside L_i are trained in Sec. 4.2 and not in Alg. 6: `others`), F23
    (the released code).
    """
    return Method(
        loss,
        plan,
        sample,
        steps=steps,
        pruning=pruning or submodels.magnitude(),
        local_pruning=local_pruning or fixed(),
        aggregate=aggregate or aggregation.simple(),
        others=others,
        local_head=local_head,
        cohort=cohort,
        over=over,
    ).algorithm()


def deployed(server: Any, client: Any) -> Params:
    """The model that a client deploys: the global model, with the client's own head if it has one.

    Args:
        server: the server's state.
        client: one client's row, without a client axis.

    Returns:
        The params.
    """
    return server.params if client.head is None else layers.join(client.head, server.params)


def released(loss: Loss, plan: Plan, sample: Sample, *, steps: int, **options: Any) -> Algorithm:
    """FedP3 with the setting of the released code: pruning that training does not enforce, and local heads.

    The released code has the plan `plans.consecutive(layers, n, count, keep=0.9)` and magnitude pruning.

    Args:
        loss: as in `fedp3`.
        plan: as in `fedp3`.
        sample: as in `fedp3`.
        steps: as in `fedp3`.
        **options: other arguments of `fedp3`.

    Returns:
        The algorithm.

    Differs: F23.
    """
    return fedp3(loss, plan, sample, steps=steps, others="free", local_head=True, **options)


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
    form = partial(submodels.format_of, pruning=pruning or submodels.magnitude(), local_head=local_head)
    bits = [submodels.bits(form(plan, i, params, local=local_pruning)) for i in range(len(plan.keep))]
    return {way: np.array(column, np.float64) for way, column in zip(("up", "down"), zip(*bits))}
