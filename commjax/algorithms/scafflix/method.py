"""Scafflix: local training with control variates (Scaffnew) and one stepsize per client, on the FLIX objective."""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, PyTree, Shaped

from commjax.algorithms.scafflix import remote
from commjax.algorithms.scafflix.communication import (
    Client,
    Run,
    Server,
    after_round,
    close,
    keys_of,
    next_move,
    upload,
)
from commjax.algorithms.scafflix.shifts import initializer
from commjax.core import checks, local, rounds
from commjax.core.base import Algorithm, AxisName, Key, Spec, State
from commjax.core.local import Over, Sample, ValueAndGrad


class HParams(NamedTuple):
    """Hyperparameters of Scafflix.

    Attributes:
        gamma: stepsize, one number or one per client (indexed by id).
        alpha: weight of the global model, one number or one per client (indexed by id).
        p: probability that an iteration ends with a communication.
    """

    gamma: Any
    alpha: Any
    p: Any


def check(hparams: HParams, n: int) -> None:
    """Raise a ValueError unless gamma > 0, alpha in [0, 1] and p in (0, 1].

    Args:
        hparams: the hyperparameters; gamma and alpha are one number or one per client.  Traced values are skipped.
        n: number of clients.
    """
    checks.per_client("gamma", hparams.gamma, n)
    checks.positive("gamma", hparams.gamma)
    checks.per_client("alpha", hparams.alpha, n)
    checks.share("alpha", hparams.alpha)
    checks.scalars(hparams._replace(gamma=0.0, alpha=0.0))
    checks.probability("p", hparams.p)


SPEC = Spec(HParams, Server, Client, check)


class Metrics(NamedTuple):
    """What one step reports.

    Attributes:
        loss: mean of f_i(xtilde_i) at the models with which the step began.
        bits_up: bits that one client sent, mean over clients.
        bits_down: bits that one client received, mean over clients.
        iterations: local steps of a participating client in this step.
    """

    loss: Shaped[Array, "..."]
    bits_up: Shaped[Array, "..."]
    bits_down: Shaped[Array, "..."]
    iterations: Shaped[Array, "..."]


def _bits(run: Run, server: Server, n: int, cohort: int | None) -> tuple[Array, Array]:
    """Bits up and down of one communication, mean over clients.

    The cohort sends and receives.  A member that was not in the last cohort has to receive xbar before it can start.
    """
    dense = rounds.bits_of(server.params)
    if cohort is None or cohort == n:
        return dense, dense
    everyone = jnp.arange(n)
    now = rounds.cohort_members(run.cohort_key(server.communications), everyone, n, cohort)
    before = rounds.cohort_members(run.cohort_key(server.communications - 1), everyone, n, cohort)
    newcomers = jnp.where(server.communications > 0, jnp.sum(now & ~before), 0)
    return cohort / n * dense, (cohort + newcomers) / n * dense


def scafflix(
    value_and_grad: ValueAndGrad,
    sample: Sample = local.all_rows,
    *,
    cohort: int | None = None,
    over: Over = jax.vmap,
    personal: bool = True,
) -> Algorithm:
    r"""Scafflix, where one step is one communication round of K ~ Geometric(p) local steps, the same K for all clients.

        K times:     xtilde_i <- xtilde_i - gamma_i (g_i - h_i)
        then:        xbar      = sum_i (alpha_i/gamma_i) (xtilde_i - (1 - alpha_i) x_i*) / sum_i alpha_i^2/gamma_i
                     h_i      <- h_i + (p/gamma_i) (alpha_i xbar + (1 - alpha_i) x_i* - xtilde_i)
                     xtilde_i <- alpha_i xbar + (1 - alpha_i) x_i*

    xbar is the server's model.  Client i has the local model xtilde_i, the gradient g_i of f_i at xtilde_i, the control
    variate h_i, and the minimiser x_i* of f_i.

    The code stores e_i = xtilde_i - alpha_i xbar - (1 - alpha_i) x_i* instead of xtilde_i.  It is 0 at the start of
    every round, and it needs no division by alpha_i.  Before the first round each client tells the server
    alpha_i^2/gamma_i.

    Args:
        value_and_grad: `value_and_grad(params, rows)` of one client returns the loss (a scalar) and the gradient (a
            pytree like `params`).
        sample: `sample(key, data)` returns the rows of one client's data for one gradient.
        cohort: number of clients that take part in a round, drawn at random; None is all of them.  Only they train,
            send and update h_i, and the weights are normalised over them.
        over: maps the local training over the clients: `jax.vmap`, or `rounds.one_by_one` for large models.
        personal: whether clients mix xbar with x_i*.  If False, alpha = 1 and no x_i* is needed.

    Returns:
        The algorithm.  Its `init(params, ids, optimum=None, shift=None, alpha=None)` takes x_i* with one row per client
        (`flix.local_optima`), which it needs if `personal`.  `shift` is h_i^0 with one row per client; None is zeros.
        With `shift`, a personal method also needs `alpha`, to check the invariant.

    Thesis: Alg. 4, Thm 3.2.3.
    Holds if: f_i mu_i-strongly convex, gamma_i <= 1/A_i, x_i* exact, all clients take part.
    Differs (docs/errata.md): S1 (the invariant is sum_i alpha_i h_i = 0, not sum_i h_i = 0), S2 (h_i = grad f_i is no
    start), S3 (index of the weights), S4 (no division by alpha_i), S8 (cohorts, for which no rate is known).
    """
    rounds.check_cohort(cohort)

    def step(
        key: Key, hparams: HParams, state: State, batch: PyTree, *, axis_name: AxisName = None
    ) -> tuple[State, Metrics]:
        server, run = state.server, Run(value_and_grad, sample, hparams, keys_of(key))
        members = rounds.cohort(run.cohort_key(server.communications), state.clients.id, cohort, axis_name)
        last = run.last_iteration(server.iterations)
        received = rounds.broadcast(server.params, axis_name)

        def train(client: Client, data: PyTree) -> tuple[Client, PyTree, Any, Array]:
            client, loss = run.train(received, client, data, begin=server.iterations, last=last)
            return client, *upload(hparams, client), loss

        rows, up, weight, loss = over(train)(members.take(state.clients), members.take(batch))
        move = next_move(*rounds.mean((up, weight), axis_name, members.weights))
        rows = jax.vmap(partial(close, hparams, rounds.broadcast(move, axis_name)))(rows)
        clients = state.clients._replace(shift=members.put(state.clients.shift, rows.shift))
        loss = rounds.mean(loss, axis_name, members.weights)
        bits_up, bits_down = _bits(run, server, rounds.count(state.clients.id, axis_name), cohort)
        metrics = Metrics(loss, bits_up, bits_down, iterations=last + 1 - server.iterations)
        return State(after_round(server, move, last), clients), metrics

    exchange = remote.exchange(value_and_grad, sample, personal) if cohort is None else None
    return Algorithm(checks.checked_init(initializer(personal, by_rounds=True)), step, exchange, SPEC)


def iterations(
    value_and_grad: ValueAndGrad,
    sample: Sample = local.all_rows,
    *,
    cohort: int | None = None,
    personal: bool = True,
) -> Algorithm:
    """Scafflix, where one step is one iteration, after which a coin decides whether to communicate.

    The coins and the models are those of `scafflix`.  A step is an iteration of Alg. 4 of the thesis, which Thm 3.2.3
    counts.  `scafflix` is faster: here each step computes the iteration with and without a communication, for all
    clients, so that a cohort saves no time.

    Args:
        value_and_grad: as in `scafflix`.
        sample: as in `scafflix`.
        cohort: as in `scafflix`.
        personal: as in `scafflix`.

    Returns:
        The algorithm; `init` as in `scafflix`.
    """
    rounds.check_cohort(cohort)

    def step(
        key: Key, hparams: HParams, state: State, batch: PyTree, *, axis_name: AxisName = None
    ) -> tuple[State, Metrics]:
        server, run = state.server, Run(value_and_grad, sample, hparams, keys_of(key))
        n = rounds.count(state.clients.id, axis_name)
        size = n if cohort is None else cohort
        member = rounds.cohort_members(run.cohort_key(server.communications), state.clients.id, n, size)
        weights = jnp.where(member, n / size, 0.0)
        heads = run.communicates(server.iterations)
        received = rounds.broadcast(server.params, axis_name)

        def train(client: Client, data: PyTree) -> tuple[Client, PyTree, Any, Array]:
            client, loss = run.local_step(received, client, data, server.iterations)
            return client, *upload(hparams, client), loss

        moved, up, weight, loss = jax.vmap(train)(state.clients, batch)
        move = next_move(*rounds.mean((up, weight), axis_name, weights))
        closed = jax.vmap(partial(close, hparams, rounds.broadcast(move, axis_name)))(moved)
        rows = jax.tree.map(lambda a, b: jnp.where(heads, a, b), closed, moved)
        clients = rounds.Members(member, None, weights).put(state.clients, rows)
        advanced = Server(
            round=server.round + 1,
            params=jax.tree.map(lambda x, step: jnp.where(heads, x + step, x), server.params, move),
            iterations=server.iterations + 1,
            communications=server.communications + heads.astype(jnp.int32),
        )
        loss = rounds.mean(loss, axis_name, weights)
        bits_up, bits_down = (jnp.where(heads, bits, 0) for bits in _bits(run, server, n, cohort))
        return State(advanced, clients), Metrics(loss, bits_up, bits_down, iterations=jnp.ones((), jnp.int32))

    return Algorithm(checks.checked_init(initializer(personal, by_rounds=False)), step, spec=SPEC)


def i_scaffnew(
    value_and_grad: ValueAndGrad,
    sample: Sample = local.all_rows,
    *,
    cohort: int | None = None,
    over: Over = jax.vmap,
) -> Algorithm:
    """Scafflix without personalization: alpha = 1, and no x_i* is needed.

    Args:
        value_and_grad: as in `scafflix`.
        sample: as in `scafflix`.
        cohort: as in `scafflix`.
        over: as in `scafflix`.

    Returns:
        The algorithm.

    Thesis: Alg. 9, Sec. B.1.
    """
    return scafflix(value_and_grad, sample, cohort=cohort, over=over, personal=False)
