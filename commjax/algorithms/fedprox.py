"""FedProx: FedAvg with local steps that are pulled towards the server's model."""

from typing import Any, NamedTuple

import jax
from jaxtyping import PyTree

from commjax.algorithms import fedavg
from commjax.algorithms.fedavg import Client, Server, bits_down, init, server_step
from commjax.core import checks, local, rounds, tree
from commjax.core.base import Algorithm, Params, Reducer, Round, Spec
from commjax.core.local import ClientResult, Over, Sample, ValueAndGrad


class HParams(NamedTuple):
    """Hyperparameters of FedProx.

    Attributes:
        stepsize: stepsize of the local steps.
        mu: weight of the proximal term.
        server: stepsize of the server along the mean update.
    """

    stepsize: Any
    mu: Any
    server: Any = 1.0


def check(hparams: HParams, n: int) -> None:
    """Raise a ValueError unless stepsize > 0, mu >= 0 and the server's stepsize is finite.

    Args:
        hparams: the hyperparameters.  Traced values are skipped.
        n: number of clients; not used.
    """
    fedavg.check(hparams, n)
    checks.at_least_zero("mu", hparams.mu)


def fedprox(
    value_and_grad: ValueAndGrad,
    sample: Sample = local.all_rows,
    *,
    steps: int,
    cohort: int | None = None,
    over: Over = jax.vmap,
    reduce: Reducer | None = None,
) -> Algorithm:
    r"""FedProx: `steps` local steps on f_i(x_i) + mu/2 |x_i - x|^2.

        x_i <- x;  `steps` times:  x_i <- x_i - stepsize (grad f_i(x_i) + mu (x_i - x))
        x   <- x + server mean_i (x_i - x)

    Args:
        value_and_grad: as in `fedavg`.
        sample: as in `fedavg`.
        steps: as in `fedavg`.
        cohort: as in `fedavg`.
        over: as in `fedavg`.
        reduce: as in `fedavg`.

    Returns:
        The algorithm.

    With mu = 0 this is FedAvg.

    Thesis: baseline of Ch. 3 to 5 (Li et al., 2020).
    """
    train = local.sgd(value_and_grad, sample, steps)

    def client_step(round: Round, hparams: HParams, server: Server, client: Client, data: PyTree) -> ClientResult:
        def pull(model: Params) -> Params:
            return tree.scale(hparams.mu, tree.sub(model, server.params))

        model, loss = train(round.client_key, hparams.stepsize, server.params, data, pull)
        update = tree.sub(model, server.params)
        return client, round.send(update), loss

    spec = Spec(HParams, Server, Client, check)
    return rounds.federated(init, client_step, server_step, bits_down, cohort, over, reduce=reduce, spec=spec)
