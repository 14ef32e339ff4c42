"""FedProx-SPPM-AS and FedAvg-SPPM-AS: the mean of the proxes of a cohort's clients."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, PyTree

from commjax.algorithms.fedavg import Client, Server, init
from commjax.algorithms.sppm_as import Metrics, flat_metrics
from commjax.core import checks, rounds
from commjax.core.base import Algorithm, AxisName, Key, Params, Spec, State
from commjax.prox import cohort, solvers
from commjax.prox.solvers.base import BROKE_DOWN, Result, Solver
from commjax.sampling.samplings import Sampling
from commjax.theory import sppm as theory

# (params, data of one client) -> loss, a scalar
Loss = Callable[[Params, Any], Array]
# (hyperparameters) -> the solver of a client's prox
MakeSolver = Callable[[Any], Solver]
# (hyperparameters, x_t, x_k) -> parameter and center of the clients' proxes
CenterOf = Callable[[Any, Array, Array], tuple[Array, Array]]


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


def check(hparams: HParams, n: int) -> None:
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


def _averaged_prox(loss: Loss, sampling: Sampling, inner: MakeSolver, center_of: CenterOf) -> Algorithm:
    """Average the clients' proxes K times.

        x_k <- (1/|S|) sum_{i in S} prox_{step f_i}(center),    (step, center) = center_of(hparams, x_t, x_k)

    The reported residual and code of a round are the largest over all members and local rounds, so that a single
    breakdown is visible.
    """

    def step(
        key: Key, hparams: HParams, state: State, batch: PyTree, *, axis_name: AxisName = None
    ) -> tuple[State, Metrics]:
        server = state.server
        draw, n = cohort.draw_of(key, sampling, state, axis_name)
        check(hparams, n)
        draw = draw._replace(weights=cohort.shares(draw))
        members = cohort.gather(draw, state.clients.id, batch, axis_name)
        anchor, unravel = ravel_pytree(server.params)
        share = members.weights.astype(anchor.dtype)

        def prox(gamma: Array, center: Array, data: PyTree) -> Result:
            """The prox of one client, computed as that of a cohort with this one member."""
            alone = cohort.Cohort(jax.tree.map(lambda leaf: leaf[None], data), jnp.ones(1, anchor.dtype))
            oracle = cohort.prox_oracle(loss, unravel, alone, center, gamma)
            return inner(hparams._replace(gamma=gamma))(oracle, center, hparams.most, hparams.tolerance)

        def local_round(_: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            x, residual, code = carry
            gamma, center = center_of(hparams, anchor, x)
            center = rounds.broadcast(center, axis_name)
            results = jax.vmap(prox, in_axes=(None, None, 0))(gamma, center, members.data)
            x = cohort.add_up(results.params, members, share, axis_name)
            residual = jnp.maximum(residual, cohort.largest(results.residual, members, axis_name))
            return x, residual, jnp.maximum(code, cohort.largest(results.code, members, axis_name))

        start = anchor, jnp.zeros((), anchor.dtype), jnp.zeros((), jnp.int32)
        x, residual, code = jax.lax.fori_loop(0, hparams.rounds, local_round, start)
        params = rounds.broadcast(server.params, axis_name)
        values = jax.vmap(loss, in_axes=(None, 0))(params, members.data)
        gamma, K, alpha = (jnp.asarray(value).astype(float) for value in (hparams.gamma, hparams.rounds, hparams.alpha))
        bad = ~(checks.is_positive(gamma) & checks.is_count(K) & checks.is_positive(alpha))
        metrics = flat_metrics(
            cohort.add_up(values, members, share, axis_name),
            cohort.upload_bits(draw, n, server.params),
            rounds=hparams.rounds,
            iterations=hparams.rounds,
            residual=residual,
            code=jnp.where(bad, BROKE_DOWN, code),
        )
        return State(Server(server.round + 1, unravel(jnp.where(bad, anchor, x))), state.clients), metrics

    return Algorithm(checks.checked_init(init), step, spec=Spec(HParams, Server, Client, check))


def fedprox_sppm_as(loss: Loss, sampling: Sampling, inner: MakeSolver = lambda hparams: solvers.aicn()) -> Algorithm:
    """FedProx-SPPM-AS: in each of K local rounds, replace the model x by the mean of the cohort's proxes.

        K times:  x <- mean_{i in S} prox_{gamma f_i}(x)

    f_i is the loss of client i; gamma and K are `HParams.gamma` and `HParams.rounds`.  A client computes its prox
    without communication.

    Args:
        loss: `loss(params, data)` returns the loss of one client, a scalar.
        sampling: draws the cohort S.
        inner: `inner(hparams)` returns the solver of a client's prox.

    Returns:
        The algorithm.

    Thesis: Alg. 12, Thm D.2.1 for K = 1.
    Differs (docs/errata.md): P2 (as K grows, x does not approach prox_{gamma f_S}(x_t)).
    """

    def center_of(hparams: HParams, anchor: Array, x: Array) -> tuple[Array, Array]:
        return jnp.asarray(hparams.gamma, x.dtype), x

    return _averaged_prox(loss, sampling, inner, center_of)


def fedavg_sppm_as(loss: Loss, sampling: Sampling, inner: MakeSolver = lambda hparams: solvers.aicn()) -> Algorithm:
    """FedAvg-SPPM-AS: like FedProx-SPPM-AS, but the proxes also pull towards the model at the start of the round.

        K times:  x_k <- mean_{i in S} prox_{alpha ftilde_i}(x_k),   ftilde_i = f_i + |. - x_t|^2 / (2 gamma)

    f_i is the loss of client i, x_t the model at the start of the round, and x_k the model of local round k.

    Args:
        loss: `loss(params, data)` returns the loss of one client, a scalar.
        sampling: draws the cohort S.
        inner: `inner(hparams)` returns the solver of a client's prox.

    Returns:
        The algorithm.

    Thesis: Alg. 13.
    Differs (docs/errata.md): P2 (the prox of f_i has parameter alpha gamma / (alpha + gamma) and center
    (alpha x_t + gamma x_k) / (alpha + gamma); the thesis drops x_t, which makes it FedProx-SPPM-AS).
    """

    def center_of(hparams: HParams, anchor: Array, x: Array) -> tuple[Array, Array]:
        alpha, gamma = (jnp.asarray(number, x.dtype) for number in (hparams.alpha, hparams.gamma))
        return theory.two_anchor(alpha, gamma, anchor, x)

    return _averaged_prox(loss, sampling, inner, center_of)
