"""Scaffold: local steps whose drift is corrected by control variates."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from commjax.core import checks, local, rounds, tree
from commjax.core.base import Algorithm, Params, Reducer, Spec, State
from commjax.core.local import Sample, ValueAndGrad


class HParams(NamedTuple):
    """stepsize: of the local steps; server: of the server's step along the mean update."""

    stepsize: Any
    server: Any = 1.0


def check(hparams: HParams, n: int) -> None:
    """ValueError unless stepsize > 0 and the server's step is finite."""
    checks.scalars(hparams)
    checks.positive("stepsize", hparams.stepsize)
    checks.finite("server", hparams.server)


class Server(NamedTuple):
    round: Int[Array, ""]
    params: Params  # x
    shift: Params  # c = mean_i c_i


class Client(NamedTuple):
    id: Int[Array, "*n"]
    shift: PyTree  # c_i


def scaffold(
    value_and_grad: ValueAndGrad,
    sample: Sample = local.all_rows,
    *,
    steps: int,
    cohort: int | None = None,
    over: Callable = jax.vmap,
    reduce: Reducer | None = None,
) -> Algorithm:
    r"""Scaffold (option II of Karimireddy et al., 2020).  Model and control variate travel both ways: twice FedAvg's bits.

        x_i <- x;  `steps` times:  x_i <- x_i - stepsize (grad f_i(x_i) - c_i + c)
        c_i' = c_i - c + (x - x_i) / (steps stepsize)
        x   <- x + server mean_{i in S} (x_i - x)      c <- c + (|S|/n) mean_{i in S} (c_i' - c_i)

    `reduce`: a reducer of `commjax.core.robust` instead of the means; c = mean_i c_i then no longer holds.

    Holds if: c = mean_i c_i at the start (zeros by default), which the steps keep, cohorts included.
    """
    train = local.sgd(value_and_grad, sample, steps)

    def init(params: Params, ids: Int[Array, "n"], shift: PyTree | None = None) -> State:
        rows = tree.repeat(tree.zeros_like(params), len(ids)) if shift is None else shift
        return State(Server(jnp.zeros((), jnp.int32), params, rounds.mean(rows)), Client(ids, rows))

    def client_step(round, hparams, server, client, data):
        correction = tree.sub(server.shift, client.shift)
        model, loss = train(round.own_key, hparams.stepsize, server.params, data, lambda model: correction)
        update = tree.sub(model, server.params)
        change = tree.sub(tree.scale(-1 / (steps * hparams.stepsize), update), server.shift)
        share = (round.n if cohort is None else cohort) / round.n
        message = round.send((update, tree.scale(share, change)))
        return Client(client.id, tree.add(client.shift, change)), message, loss

    def server_step(hparams, server, message):
        update, change = message
        return server._replace(
            params=tree.add_scaled(server.params, hparams.server, update),
            shift=tree.add(server.shift, change),
        )

    def bits_down(server):
        return rounds.dense_bits((server.params, server.shift))

    return rounds.federated(
        init, client_step, server_step, bits_down, cohort, over, down=("params", "shift"), reduce=reduce,
        spec=Spec(HParams, Server, Client, check),
    )  # fmt: skip
