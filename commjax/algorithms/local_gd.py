"""LocalGD on a sampled cohort, a baseline of SPPM-AS."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Float, PyTree

from commjax.algorithms.fedavg import Client, Server, bits_down, init
from commjax.algorithms.sppm_as import Metrics, flat_metrics
from commjax.core import checks, rounds
from commjax.core.base import Algorithm, AxisName, Exchange, Key, Params, Round, Spec, State
from commjax.core.local import ClientResult, ValueAndGrad
from commjax.prox import cohort
from commjax.prox.solvers.base import BROKE_DOWN, CONVERGED
from commjax.sampling.samplings import Sampling


class HParams(NamedTuple):
    """Hyperparameters of LocalGD.

    Attributes:
        stepsize: stepsize of the local gradient steps.
        steps: number of local steps.  It may be traced, so that a grid over it is one program.
    """

    stepsize: Any
    steps: Any


def check(hparams: HParams, n: int) -> None:
    """Raise a ValueError unless stepsize > 0 and steps is a whole number >= 1.

    Args:
        hparams: the hyperparameters.  Traced values are skipped.
        n: number of clients; not used.
    """
    checks.scalars(hparams)
    checks.positive("stepsize", hparams.stepsize)
    checks.count("steps", hparams.steps)


def mb_local_gd(value_and_grad: ValueAndGrad, sampling: Sampling) -> Algorithm:
    """LocalGD (FedAvg) on a sampled cohort S; with steps = 1 it is MB-GD.

        x_i <- x;  `steps` times:  x_i <- x_i - stepsize grad f_i(x_i)        for i in S
        x   <- (1/|S|) sum_{i in S} x_i

    A round costs one aggregation.  A round whose mean is not finite leaves x unchanged, and its code is `BROKE_DOWN`.

    Args:
        value_and_grad: `value_and_grad(params, data)` of one client returns the loss (a scalar) and the gradient (a
            pytree like `params`).
        sampling: draws the cohort S.

    Returns:
        The algorithm.

    Thesis: LocalGD, MB-GD and MB-LocalGD (Fig. 5.2, Fig. 5.4).
    Differs (docs/errata.md): P3 (the members have the weights 1/|S|).
    """

    def trained(hparams: HParams, params: Params, data: PyTree) -> tuple[Array, Array]:
        """A member's model after its steps, as one vector, and its first loss."""
        x, unravel = ravel_pytree(params)

        def gradient_step(_: Array, x: Array) -> Array:
            grad = ravel_pytree(value_and_grad(unravel(x), data)[1])[0]
            return x - jnp.asarray(hparams.stepsize, x.dtype) * grad

        return jax.lax.fori_loop(0, hparams.steps, gradient_step, x), value_and_grad(unravel(x), data)[0]

    def step(
        key: Key, hparams: HParams, state: State, batch: PyTree, *, axis_name: AxisName = None
    ) -> tuple[State, Metrics]:
        draw, n = cohort.draw_of(key, sampling, state, axis_name)
        check(hparams, n)
        draw = draw._replace(weights=cohort.shares(draw))
        members = cohort.gather(draw, state.clients.id, batch, axis_name)
        received = rounds.broadcast(state.server.params, axis_name)
        models, losses = jax.vmap(partial(trained, hparams, received))(members.data)
        mean, loss = cohort.add_up((models, losses), members, members.weights.astype(models.dtype), axis_name)
        server, code = _advanced(hparams, state.server, mean)
        vector_bits = cohort.upload_bits(draw, n, server.params)
        metrics = flat_metrics(loss, vector_bits, rounds=1, iterations=hparams.steps, code=code)
        return State(server, state.clients), metrics

    def client_step(round: Round, hparams: HParams, server: Server, client: Client, data: PyTree) -> ClientResult:
        check(hparams, sampling.n)
        model, loss = trained(hparams, server.params, data)
        return client, round.send(ravel_pytree(server.params)[1](model)), loss

    def members_of(key: Key, round: int, n: int) -> np.ndarray:
        if sampling.n != n:
            raise ValueError(f"sampling is over {sampling.n} clients, the contract has {n}")
        draw = sampling.sample(rounds.keys(key, round, n).shared)
        return np.unique(draw.ids[draw.mask])

    def server_step(key: Key, hparams: HParams, server: Server, ids: Array, models: PyTree) -> Server:
        """Average the models in the order in which the simulation draws the members; an empty slot has weight 0."""
        draw = sampling.sample(rounds.keys(key, server.round, sampling.n).shared)
        rows = jax.vmap(lambda model: ravel_pytree(model)[0])(models)
        slots = rows[jnp.minimum(jnp.searchsorted(ids, draw.ids), len(ids) - 1)]
        shares = cohort.shares(draw).astype(rows.dtype)
        return _advanced(hparams, server, cohort.add_up(slots, cohort.Cohort(None, shares), shares, None))[0]

    exchange = Exchange(
        client_step,
        server_step=None,
        bits_down=bits_down,
        down=("params",),
        compressor=None,
        cohort_size=None,
        members=members_of,
        joined=server_step,
    )
    return Algorithm(checks.checked_init(init), step, exchange, Spec(HParams, Server, Client, check))


def _advanced(hparams: HParams, server: Server, mean: Array) -> tuple[Server, Array]:
    """Return the server with the next x, and the code of the round; x stays unchanged if the mean is not finite."""
    stepsize, steps = (jnp.asarray(value).astype(float) for value in hparams)
    bad = ~(checks.is_positive(stepsize) & checks.is_count(steps)) | ~jnp.all(jnp.isfinite(mean))
    before, unravel = ravel_pytree(server.params)
    code = jnp.where(bad, BROKE_DOWN, CONVERGED)
    return Server(server.round + 1, unravel(jnp.where(bad, before, mean))), code


def theoretical(sampling: Sampling, L_i: Float[np.ndarray, "n"], steps: int = 1) -> HParams:
    """Hyperparameters with the largest stepsize that theory allows for MB-GD (steps = 1) or MB-LocalGD.

        MB-GD:       1 / (2 L_AS),   L_AS = max_i E [sum_{j in S} L_j / (n p_j) | i in S]      (`Sampling.smoothness`)
        LocalGD:     min(1 / (2 L_AS), 1 / (4 L), 1 / (8 L (steps - 1))),   L = max_i L_i

    p_j is the probability that client j is in S.  L_AS is a constant of expected smoothness:
    E |grad f_S(x) - grad f_S(x*)|^2 <= 2 L_AS (f(x) - f(x*)) (Gower et al., 2019, Thm 3.1).  For nice sampling of tau
    clients it is n (tau - 1) / (tau (n - 1)) mean L_i + (n - tau) / (tau (n - 1)) max L_i.  The bounds with local steps
    are those of Khaled, Mishchenko and Richtarik (2020) for clients with different data.

    Args:
        sampling: draws the cohort S.
        L_i: smoothness constants of the f_i, [n].
        steps: number of local steps.

    Returns:
        The hyperparameters.

    Thesis: the "optimal" rates of Sec. 5.4.2 and Sec. 5.4.4.
    Holds if: f_i convex and L_i-smooth; for MB-GD also f strongly convex, and a sampling in which all clients have the
    same share of the mean over S.  LocalGD's theorem needs all clients in every round; with cohorts, 1 / (2 L_AS) is a
    rule of thumb.

    >>> from commjax.sampling import samplings
    >>> theoretical(samplings.nice(2, 1), np.array([1.0, 2.0])), theoretical(
    ...     samplings.full(2), np.array([1.0, 2.0]), steps=5
    ... )
    (HParams(stepsize=0.25, steps=1), HParams(stepsize=0.015625, steps=5))
    """
    checks.count("steps", steps)
    if not np.allclose(sampling.shares, 1 / sampling.n):
        raise ValueError(
            f"sampling={sampling.name} gives clients unequal shares of a mean over the cohort, "
            f"from {sampling.shares.min():.3g} to {sampling.shares.max():.3g}; "
            "allowed: 1/n for each (clusters of equal size)"
        )
    stepsize = 1 / (2 * sampling.smoothness(L_i))
    if steps > 1:
        L = float(np.max(L_i))
        stepsize = min(stepsize, 1 / (4 * L), 1 / (8 * L * (steps - 1)))
    return HParams(stepsize, steps)
