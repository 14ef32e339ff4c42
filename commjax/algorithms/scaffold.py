"""Scaffold: local steps whose drift is corrected by control variates."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from commjax.algorithms import fedavg
from commjax.core import local, rounds, tree
from commjax.core.base import Algorithm, Params, Reducer, Round, Spec, State
from commjax.core.local import ClientResult, Over, Sample, ValueAndGrad


class HParams(NamedTuple):
    """Hyperparameters of Scaffold.

    Attributes:
        stepsize: stepsize of the local steps.
        server: stepsize of the server along the mean update.
    """

    stepsize: Any
    server: Any = 1.0


class Server(NamedTuple):
    """What the server remembers.

    Attributes:
        round: number of rounds so far.
        params: x, the model.
        shift: c = mean_i c_i.
    """

    round: Int[Array, ""]
    params: Params
    shift: Params


class Client(NamedTuple):
    """What each client remembers.

    Attributes:
        id: number of the client.
        shift: c_i, the control variate.
    """

    id: Int[Array, "*n"]
    shift: PyTree


def scaffold(
    value_and_grad: ValueAndGrad,
    sample: Sample = local.all_rows,
    *,
    steps: int,
    cohort: int | None = None,
    over: Over = jax.vmap,
    reduce: Reducer | None = None,
) -> Algorithm:
    r"""Scaffold (option II of Karimireddy et al., 2020).

        x_i <- x;  `steps` times:  x_i <- x_i - stepsize (grad f_i(x_i) - c_i + c)
        c_i' = c_i - c + (x - x_i) / (steps stepsize)
        x   <- x + server mean_{i in S} (x_i - x)      c <- c + (|S|/n) mean_{i in S} (c_i' - c_i)

    x is the model, c_i the control variate of client i, c the mean of the c_i, and S the cohort.  The model and the
    control variate are sent in both directions, which is twice FedAvg's bits.

    Args:
        value_and_grad: as in `fedavg`.
        sample: as in `fedavg`.
        steps: as in `fedavg`.
        cohort: |S|, as in `fedavg`.
        over: as in `fedavg`.
        reduce: a reducer of `commjax.core.robust` that replaces the means; c = mean_i c_i then no longer holds.

    Returns:
        The algorithm.  Its `init(params, ids, shift=None)` takes the first c_i with one row per client; None is zeros.

    Holds if: c = mean_i c_i at the start, as with zeros.  The rounds preserve this equality, with cohorts too.
    """
    train = local.sgd(value_and_grad, sample, steps)

    def init(params: Params, ids: Int[Array, "n"], shift: PyTree | None = None) -> State:
        rows = tree.repeat(tree.zeros_like(params), len(ids)) if shift is None else shift
        return State(Server(jnp.zeros((), jnp.int32), params, rounds.mean(rows)), Client(ids, rows))

    def client_step(round: Round, hparams: HParams, server: Server, client: Client, data: PyTree) -> ClientResult:
        correction = tree.sub(server.shift, client.shift)
        model, loss = train(round.client_key, hparams.stepsize, server.params, data, lambda model: correction)
        update = tree.sub(model, server.params)
        change = tree.sub(tree.scale(-1 / (steps * hparams.stepsize), update), server.shift)
        share = (round.n if cohort is None else cohort) / round.n
        message = round.send((update, tree.scale(share, change)))
        return Client(client.id, tree.add(client.shift, change)), message, loss

    def server_step(hparams: HParams, server: Server, message: tuple[Params, Params]) -> Server:
        update, change = message
        return fedavg.server_step(hparams, server, update)._replace(shift=tree.add(server.shift, change))

    def bits_down(server: Server) -> int:
        return rounds.dense_bits((server.params, server.shift))

    down, spec = ("params", "shift"), Spec(HParams, Server, Client, fedavg.check)
    return rounds.federated(
        init, client_step, server_step, bits_down, cohort, over, down=down, reduce=reduce, spec=spec
    )
