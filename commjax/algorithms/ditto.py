"""Ditto: FedAvg for the global model, and a personal model of each client that is pulled towards the global one."""

from typing import Any, NamedTuple

import jax
from jaxtyping import Array, Int, PyTree

from commjax.algorithms import fedavg
from commjax.algorithms.fedavg import Server, bits_down, server_step
from commjax.core import checks, local, rounds, tree
from commjax.core.base import Algorithm, Params, Reducer, Round, Spec, State
from commjax.core.local import ClientResult, Over, Sample, ValueAndGrad


class HParams(NamedTuple):
    """Hyperparameters of Ditto.

    Attributes:
        stepsize: stepsize of the local steps of the global model.
        personal: stepsize of the personal model.
        lam: lambda, the weight of the pull towards the global model.
        server: stepsize of the server along the mean update.
    """

    stepsize: Any
    personal: Any
    lam: Any
    server: Any = 1.0


class Client(NamedTuple):
    """What each client remembers.

    Attributes:
        id: number of the client.
        model: v_i, the personal model, which the client deploys.
    """

    id: Int[Array, "*n"]
    model: PyTree


def check(hparams: HParams, n: int) -> None:
    """Raise a ValueError unless both stepsizes are positive, lam >= 0 and the server's stepsize is finite.

    Args:
        hparams: the hyperparameters.  Traced values are skipped.
        n: number of clients; not used.
    """
    fedavg.check(hparams, n)
    checks.positive("personal", hparams.personal)
    checks.at_least_zero("lam", hparams.lam)


def ditto(
    value_and_grad: ValueAndGrad,
    sample: Sample = local.all_rows,
    *,
    steps: int,
    cohort: int | None = None,
    over: Over = jax.vmap,
    reduce: Reducer | None = None,
) -> Algorithm:
    r"""Ditto (Li et al., 2021): FedAvg for the global model x, and a personal model v_i that is pulled towards x.

        v_i:  `steps` times:  v_i <- v_i - personal (grad f_i(v_i) + lambda (v_i - x))
        x:    a round of FedAvg

    A local step computes two gradients, one for x and one for v_i.  The personal models are never sent.  With
    lambda = 0 the v_i are trained locally only; as lambda grows, they approach x.

    Args:
        value_and_grad: as in `fedavg`.
        sample: as in `fedavg`.
        steps: as in `fedavg`.
        cohort: as in `fedavg`.
        over: as in `fedavg`.
        reduce: a reducer of `commjax.core.robust` that replaces FedAvg's mean; None is the mean.

    Returns:
        The algorithm.  Its `init(params, ids, model=None)` takes the first v_i with one row per client; None is
        `params`.

    Thesis: baselines (Fig. B.3).
    """
    train = local.sgd(value_and_grad, sample, steps)

    def init(params: Params, ids: Int[Array, "n"], model: PyTree | None = None) -> State:
        rows = tree.repeat(params, len(ids)) if model is None else model
        return State(fedavg.first(params), Client(ids, rows))

    def client_step(round: Round, hparams: HParams, server: Server, client: Client, data: PyTree) -> ClientResult:
        def pull(model: Params) -> Params:
            return tree.scale(hparams.lam, tree.sub(model, server.params))

        key, key_personal = jax.random.split(round.client_key)
        shared, loss = train(key, hparams.stepsize, server.params, data)
        personal, _ = train(key_personal, hparams.personal, client.model, data, pull)
        update = tree.sub(shared, server.params)
        return Client(client.id, personal), round.send(update), loss

    spec = Spec(HParams, Server, Client, check)
    return rounds.federated(init, client_step, server_step, bits_down, cohort, over, reduce=reduce, spec=spec)
