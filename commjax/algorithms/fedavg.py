"""FedAvg: local steps, then the mean of the models."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from commjax.core import checks, local, rounds, tree
from commjax.core.base import Algorithm, Params, Reducer, Round, Spec, State
from commjax.core.local import ClientResult, Over, Sample, ValueAndGrad


class HParams(NamedTuple):
    """Hyperparameters of FedAvg.

    Attributes:
        stepsize: stepsize of the local steps.
        server: stepsize of the server along the mean update; 1 is the mean of the models.
    """

    stepsize: Any
    server: Any = 1.0


def check(hparams: Any, n: int) -> None:
    """Raise a ValueError unless every value is one number, stepsize > 0 and the server's stepsize is finite.

    Args:
        hparams: hyperparameters with `stepsize` and `server`, such as those of FedProx.  Traced values are skipped.
        n: number of clients; not used.
    """
    checks.scalars(hparams)
    checks.positive("stepsize", hparams.stepsize)
    checks.finite("server", hparams.server)


class Server(NamedTuple):
    """What the server remembers.

    Attributes:
        round: number of rounds so far.
        params: x, the model.
    """

    round: Int[Array, ""]
    params: Params


class Client(NamedTuple):
    """The clients, which keep no state.

    Attributes:
        id: number of the client.
    """

    id: Int[Array, "*n"]


def fedavg(
    value_and_grad: ValueAndGrad,
    sample: Sample = local.all_rows,
    *,
    steps: int,
    cohort: int | None = None,
    over: Over = jax.vmap,
    reduce: Reducer | None = None,
) -> Algorithm:
    r"""FedAvg: every client takes local steps from the server's model, and the server averages the models.

        x_i <- x;  `steps` times:  x_i <- x_i - stepsize grad f_i(x_i)
        x   <- x + server mean_i (x_i - x)

    x is the server's model, x_i the model and f_i the loss of client i.  With exact gradients this is LocalGD.

    Args:
        value_and_grad: `value_and_grad(params, rows)` of one client returns the loss (a scalar) and the gradient (a
            pytree like `params`).
        sample: `sample(key, data)` returns the rows of one client's data for one step.
        steps: number of local steps in a round.
        cohort: number of clients that take part in a round, drawn at random; None is all of them.
        over: maps the local training over the clients: `jax.vmap`, or `rounds.one_by_one` for large models.
        reduce: a reducer of `commjax.core.robust` that replaces the mean; None is the mean.

    Returns:
        The algorithm.

    Thesis: baseline of Ch. 3 to 5.
    Holds if: all f_i have the same minimiser.  Otherwise x converges only to a neighbourhood of the minimiser of f,
    which grows with `steps`.
    Differs: f = mean_i f_i, so clients are not weighted by their numbers of rows.
    """
    train = local.sgd(value_and_grad, sample, steps)

    def client_step(round: Round, hparams: HParams, server: Server, client: Client, data: PyTree) -> ClientResult:
        model, loss = train(round.client_key, hparams.stepsize, server.params, data)
        update = tree.sub(model, server.params)
        return client, round.send(update), loss

    spec = Spec(HParams, Server, Client, check)
    return rounds.federated(init, client_step, server_step, bits_down, cohort, over, reduce=reduce, spec=spec)


def first(params: Params) -> Server:
    """Return the server's state before the first round, with `params` as the model x."""
    return Server(jnp.zeros((), jnp.int32), params)


def init(params: Params, ids: Int[Array, "n"]) -> State:
    """Return the state before the first round, for methods whose clients keep no state.

    Args:
        params: x, the model.
        ids: numbers of the clients, [n].

    Returns:
        The state.
    """
    return State(first(params), Client(ids))


def server_step(hparams: Any, server: Any, update: Params) -> Any:
    """Move the model along the mean update: x <- x + server update.

    Args:
        hparams: hyperparameters with `server`.
        server: the server's state.
        update: mean_i (x_i - x).

    Returns:
        The server's state with the new x.
    """
    return server._replace(params=tree.add_scaled(server.params, hparams.server, update))


def bits_down(server: Any) -> int:
    """Bits of a download: x, uncompressed."""
    return rounds.dense_bits(server.params)
