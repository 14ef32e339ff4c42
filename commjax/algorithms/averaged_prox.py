"""FedProx-SPPM-AS and FedAvg-SPPM-AS: the mean of the proxes of a cohort's clients."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree

from commjax.algorithms.sppm_as import Client, Server, check, flat_metrics, init, refused
from commjax.core import checks, rounds
from commjax.core.base import Algorithm, Spec, State
from commjax.prox import cohort, solvers
from commjax.prox.solvers.base import BROKE_DOWN, Solver
from commjax.sampling.samplings import Sampling
from commjax.theory import sppm as theory


class HParams(NamedTuple):
    """Hyperparameters of FedProx-SPPM-AS and FedAvg-SPPM-AS.

    Attributes:
        gamma: parameter of the prox.
        rounds: K, the number of local rounds.
        tolerance: the solver of a client's prox stops where |grad| is at most this.
        alpha: prox parameter of one local round; only FedAvg-SPPM-AS uses it.
        most: largest number of iterations of a client's solver.
    """

    gamma: Any
    rounds: Any
    tolerance: Any
    alpha: Any = 1.0
    most: Any = 10_000


def check_hparams(hparams: HParams, n: int) -> None:
    """Raise a ValueError unless gamma, alpha > 0, rounds and most are whole numbers >= 1, and tolerance >= 0.

    Args:
        hparams: the hyperparameters.  Traced values are skipped.
        n: number of clients; not used.
    """
    checks.scalars(hparams)
    checks.positive("gamma", hparams.gamma)
    checks.positive("alpha", hparams.alpha)
    checks.count("rounds", hparams.rounds)
    checks.count("most", hparams.most)
    checks.at_least_zero("tolerance", hparams.tolerance)


def _averaged_prox(loss, sampling, inner, center_of) -> Algorithm:
    """Average the clients' proxes K times.

        x_k <- (1/|S|) sum_{i in S} prox_{step f_i}(center),    (step, center) = center_of(hparams, x_t, x_k)

    The residual and the code of a round are the largest of all members in all local rounds, so that one breakdown is
    reported.
    """

    def step(key, hparams, state, batch, *, axis_name=None):
        check(gamma=hparams.gamma, rounds=hparams.rounds, alpha=hparams.alpha)
        server = state.server
        draw, n = cohort.draw_of(key, sampling, state, axis_name)
        draw = draw._replace(weights=cohort.shares(draw))
        members = cohort.gather(draw, state.clients.id, batch, axis_name)
        anchor, unravel = ravel_pytree(server.params)
        share = members.weights.astype(anchor.dtype)

        def prox(gamma, center, data):
            alone = cohort.Cohort(jax.tree.map(lambda leaf: leaf[None], data), jnp.ones(1, anchor.dtype))
            oracle = cohort.prox_oracle(loss, unravel, alone, center, gamma)
            return inner(hparams._replace(gamma=gamma))(oracle, center, hparams.most, hparams.tolerance)

        def one(number, carry):
            x, residual, code = carry
            gamma, center = center_of(hparams, anchor, x)
            center = rounds.broadcast(center, axis_name)
            found = jax.vmap(prox, in_axes=(None, None, 0))(gamma, center, members.data)
            worst = (cohort.largest(rows, members, axis_name) for rows in (found.residual, found.code))
            x = cohort.add_up(found.params, members, share, axis_name)
            return x, *map(jnp.maximum, (residual, code), worst)

        start = anchor, jnp.zeros((), anchor.dtype), jnp.zeros((), jnp.int32)
        x, residual, code = jax.lax.fori_loop(0, hparams.rounds, one, start)
        bad = refused(gamma=hparams.gamma, rounds=hparams.rounds, alpha=hparams.alpha)
        params = rounds.broadcast(server.params, axis_name)
        values = jax.vmap(loss, in_axes=(None, 0))(params, members.data)
        metrics = flat_metrics(
            cohort.add_up(values, members, share, axis_name),
            cohort.upload_bits(draw, n, server.params),
            hparams.rounds,
            hparams.rounds,
            residual,
            jnp.where(bad, BROKE_DOWN, code),
        )
        return State(Server(server.round + 1, unravel(jnp.where(bad, anchor, x))), state.clients), metrics

    return Algorithm(checks.checked_init(init), step, spec=Spec(HParams, Server, Client, check_hparams))


def fedprox_sppm_as(
    loss: Callable, sampling: Sampling, inner: Callable[[Any], Solver] = lambda hparams: solvers.aicn()
) -> Algorithm:
    """FedProx-SPPM-AS: repeated means of the clients' proxes.

        K times:  x <- mean_{i in S} prox_{gamma f_i}(x)

    A client's prox costs no communication.

    Args:
        loss: `loss(params, data)` returns the loss of one client, a scalar.
        sampling: draws the cohort S.
        inner: `inner(hparams)` returns the solver of a client's prox.

    Returns:
        The algorithm.

    Thesis: Alg. 12, Thm D.2.1 for K = 1.  Differs: it does not approach prox_{gamma f_S} as K grows (P2).
    """
    return _averaged_prox(loss, sampling, inner, lambda hparams, anchor, x: (jnp.asarray(hparams.gamma, x.dtype), x))


def fedavg_sppm_as(
    loss: Callable, sampling: Sampling, inner: Callable[[Any], Solver] = lambda hparams: solvers.aicn()
) -> Algorithm:
    """FedAvg-SPPM-AS: repeated means of proxes that are anchored at the start of the round.

        K times:  x_k <- mean_{i in S} prox_{alpha ftilde_i}(x_k),   ftilde_i = f_i + |. - x_t|^2 / (2 gamma)

    Args:
        loss: `loss(params, data)` returns the loss of one client, a scalar.
        sampling: draws the cohort S.
        inner: `inner(hparams)` returns the solver of a client's prox.

    Returns:
        The algorithm.

    Thesis: Alg. 13.
    Differs: P2: the inner prox has two anchors, prox of f_i with parameter alpha gamma / (alpha + gamma) at
    (alpha x_t + gamma x_k) / (alpha + gamma); the text drops the first, which makes it FedProx-SPPM-AS.
    """

    def center_of(hparams, anchor, x):
        alpha, gamma = (jnp.asarray(number, x.dtype) for number in (hparams.alpha, hparams.gamma))
        return theory.two_anchor(alpha, gamma, anchor, x)

    return _averaged_prox(loss, sampling, inner, center_of)
