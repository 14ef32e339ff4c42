"""Ditto: FedAvg for the global model, and beside it a personal model of each client, pulled to the global one."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from commjax.algorithms.fedavg import Server, bits_down, server_step
from commjax.core import checks, local, rounds, tree
from commjax.core.base import Algorithm, Params, Reducer, Spec, State
from commjax.core.local import Sample, ValueAndGrad


class HParams(NamedTuple):
    """stepsize: of the global model's local steps; personal: of the personal model's; lam (lambda): weight of the pull."""

    stepsize: Any
    personal: Any
    lam: Any
    server: Any = 1.0


class Client(NamedTuple):
    id: Int[Array, "*n"]
    model: PyTree  # v_i, what the client deploys


def check(hparams: HParams, n: int) -> None:
    """ValueError unless both stepsizes are positive, lam >= 0 and the server's step is finite."""
    checks.scalars(hparams)
    checks.positive("stepsize", hparams.stepsize)
    checks.positive("personal", hparams.personal)
    checks.at_least_zero("lam", hparams.lam)
    checks.finite("server", hparams.server)


def ditto(
    value_and_grad: ValueAndGrad,
    sample: Sample = local.all_rows,
    *,
    steps: int,
    cohort: int | None = None,
    over: Callable = jax.vmap,
    reduce: Reducer | None = None,
) -> Algorithm:
    r"""Ditto (Li et al., 2021).  Costs two gradients a local step; the personal models never travel.

        v_i:  `steps` times:  v_i <- v_i - personal (grad f_i(v_i) + lambda (v_i - x))
        x:    FedAvg

    `reduce`: a reducer of `commjax.core.robust` instead of FedAvg's mean.

    Thesis: table of baselines (L3789).  Holds if: lambda = 0 is local training, lambda -> inf FedAvg's model.
    """
    train = local.sgd(value_and_grad, sample, steps)

    def init(params: Params, ids: Int[Array, "n"], model: PyTree | None = None) -> State:
        rows = tree.repeat(params, len(ids)) if model is None else model
        return State(Server(jnp.zeros((), jnp.int32), params), Client(ids, rows))

    def client_step(round, hparams, server, client, data):
        def pull(model):
            return tree.scale(hparams.lam, tree.sub(model, server.params))

        key, key_personal = jax.random.split(round.own_key)
        shared, loss = train(key, hparams.stepsize, server.params, data)
        personal, _ = train(key_personal, hparams.personal, client.model, data, pull)
        update = tree.sub(shared, server.params)
        return Client(client.id, personal), round.send(update), loss

    spec = Spec(HParams, Server, Client, check)
    return rounds.federated(init, client_step, server_step, bits_down, cohort, over, reduce=reduce, spec=spec)
