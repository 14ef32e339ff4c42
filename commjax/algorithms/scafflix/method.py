"""Scafflix: local training with control variates (Scaffnew) and one stepsize per client, on the FLIX objective."""

import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike
from jaxtyping import Array, Float, Int, PyTree, Shaped

from commjax.algorithms.flix import checked_alpha, checked_optimum
from commjax.algorithms.scafflix import communication, remote
from commjax.algorithms.scafflix.communication import (
    Client,
    Server,
    close,
    first_heads,
    keys_of,
    local_step,
    next_move,
    train,
    upload,
)
from commjax.core import checks, local, rounds, tree
from commjax.core.base import Algorithm, Params, Spec, State
from commjax.core.local import Sample, ValueAndGrad
from commjax.theory import scafflix as theory


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


def _traffic(key, communications, n, cohort, params):
    """Bits up and down of one communication, mean over clients.

    The cohort sends and receives.  A member that was not in the last cohort has to receive xbar before it can start.
    """
    dense = rounds.bits_of(params)
    if cohort is None or cohort == n:
        return dense, dense
    everyone = jnp.arange(n)
    now = rounds.cohort_members(jax.random.fold_in(key, communications), everyone, n, cohort)
    before = rounds.cohort_members(jax.random.fold_in(key, communications - 1), everyone, n, cohort)
    newcomers = jnp.where(communications > 0, jnp.sum(now & ~before), 0)
    return cohort / n * dense, (cohort + newcomers) / n * dense


def _init(personal: bool, by_rounds: bool):
    def init(
        params: Params,
        ids: Int[Array, "n"],
        optimum: PyTree | None = None,
        shift: PyTree | None = None,
        alpha: ArrayLike | None = None,
    ) -> State:
        zeros = tree.repeat(tree.zeros_like(params), len(ids))
        if shift is not None:
            found = jax.tree.map(jnp.shape, shift)
            if found != jax.tree.map(jnp.shape, zeros):
                raise ValueError(
                    f"shift must have one row of the params for each of {len(ids)} clients, got shapes {found}"
                )
            check_shift(shift, ids, alpha if personal else 1.0)
        rows = Client(
            id=ids,
            drift=None if by_rounds else zeros,
            shift=zeros if shift is None else shift,
            optimum=checked_optimum(params, ids, optimum) if personal else None,
        )
        counter = jnp.zeros((), jnp.int32)
        return State(Server(counter, params, counter, counter), rows)

    return init


def check_shift(shift: PyTree, ids: Array, alpha: ArrayLike | None) -> None:
    """Raise a ValueError unless sum_i alpha_i h_i^0 = 0, up to rounding.

    Args:
        shift: h_i^0, with one row per client.
        ids: numbers of the clients, [n].
        alpha: weight of the global model, one number or one per client (indexed by id).
    """
    if alpha is None:
        raise ValueError("init with shift= needs alpha= as well, to check that sum_i alpha_i h_i = 0")
    weights = np.broadcast_to(checked_alpha(alpha), (len(ids),)) if np.ndim(alpha) == 0 else checked_alpha(alpha)[ids]
    for leaf in map(np.asarray, jax.tree.leaves(shift)):
        total = np.tensordot(weights, leaf.astype(np.float64), axes=1)
        scale = np.tensordot(weights, np.abs(leaf.astype(np.float64)), axes=1)
        if not np.all(np.abs(total) <= 8 * len(ids) * jnp.finfo(leaf.dtype).eps * scale):
            worst = float(np.max(np.abs(total)))
            raise ValueError(
                f"shift: sum_i alpha_i h_i must be 0 and is {worst:.3g} in some coordinate; allowed: zeros, or rows "
                "made by scafflix.admissible_shift (h_i = grad f_i alone would make the start a fixed point)"
            )


def admissible_shift(gradients: PyTree, alpha: ArrayLike) -> PyTree:
    """Control variates to start with, which satisfy sum_i alpha_i h_i = 0.

        h_i^0 = grad f_i(xtilde_i^0) - sum_j alpha_j grad f_j(xtilde_j^0) / sum_j alpha_j

    The sum costs one extra aggregation.

    Args:
        gradients: grad f_i(xtilde_i^0), with one row per client.
        alpha: weight of the global model, one number or one per client.

    Returns:
        h_i^0, a pytree like `gradients`.

    Thesis: Sec. 3.2.  Differs: S2 (the thesis takes grad f_i alone, from where the method never moves).
    """
    weights = np.broadcast_to(checked_alpha(alpha), (len(jax.tree.leaves(gradients)[0]),))
    share = weights / weights.sum()

    def one(leaf: Array) -> Array:
        return leaf - jnp.tensordot(jnp.asarray(share, leaf.dtype), leaf, axes=1)[None]

    return jax.tree.map(one, gradients)


def scafflix(
    value_and_grad: ValueAndGrad,
    sample: Sample = local.all_rows,
    *,
    cohort: int | None = None,
    over: Callable = jax.vmap,
    personal: bool = True,
) -> Algorithm:
    r"""Scafflix; one step is one communication round, with K ~ Geometric(p) local steps that all clients share.

        K times:     xtilde_i <- xtilde_i - gamma_i (g_i - h_i)
        then:        xbar      = sum_i (alpha_i/gamma_i) (xtilde_i - (1 - alpha_i) x_i*) / sum_i alpha_i^2/gamma_i
                     h_i      <- h_i + (p/gamma_i) (alpha_i xbar + (1 - alpha_i) x_i* - xtilde_i)
                     xtilde_i <- alpha_i xbar + (1 - alpha_i) x_i*

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
    Differs: S1 (the invariant is sum_i alpha_i h_i = 0, not sum_i h_i), S2, S3 (index), S4 (no division by alpha_i), S8
    (cohort).
    """
    rounds.check_cohort(cohort)

    def step(key, hparams, state, batch, *, axis_name=None):
        keys, server = keys_of(key), state.server
        n = rounds.count(state.clients.id, axis_name)
        here = rounds.cohort(
            jax.random.fold_in(keys.cohort, server.communications), state.clients.id, cohort, axis_name
        )
        last = first_heads(keys.coin, hparams.p, server.iterations)
        received = rounds.broadcast(server.params, axis_name)

        def one(client, data):
            begin = server.iterations
            client, loss = train(value_and_grad, sample, keys, hparams, received, begin, last, client, data)
            return client, *upload(hparams, client), loss

        rows, up, weight, loss = over(one)(here.take(state.clients), here.take(batch))
        move = next_move(*rounds.mean((up, weight), axis_name, here.weights))
        rows = jax.vmap(lambda client: close(hparams, rounds.broadcast(move, axis_name), client))(rows)
        shift = here.put(state.clients.shift, rows.shift)
        bits_up, bits_down = _traffic(keys.cohort, server.communications, n, cohort, server.params)
        advanced = Server(
            round=server.round + 1,
            params=tree.add(server.params, move),
            iterations=last + 1,
            communications=server.communications + 1,
        )
        metrics = Metrics(
            rounds.mean(loss, axis_name, here.weights),
            bits_up,
            bits_down,
            last + 1 - server.iterations,
        )
        return State(advanced, state.clients._replace(shift=shift)), metrics

    exchange = remote.exchange(value_and_grad, sample, personal) if cohort is None else None
    return Algorithm(checks.checked_init(_init(personal, by_rounds=True)), step, exchange, SPEC)


def iterations(
    value_and_grad: ValueAndGrad,
    sample: Sample = local.all_rows,
    *,
    cohort: int | None = None,
    personal: bool = True,
) -> Algorithm:
    """Scafflix; one step is one iteration, after which a coin decides whether to communicate.

    The coins and the trajectory are those of `scafflix`.  The steps follow Alg. 4 of the thesis line by line and are
    what Thm 3.2.3 counts.  `scafflix` is faster: each step here computes the iteration with and without a
    communication, for all clients, so that a cohort saves no time.

    Args:
        value_and_grad: as in `scafflix`.
        sample: as in `scafflix`.
        cohort: as in `scafflix`.
        personal: as in `scafflix`.

    Returns:
        The algorithm; `init` as in `scafflix`.
    """
    rounds.check_cohort(cohort)

    def step(key, hparams, state, batch, *, axis_name=None):
        keys, server = keys_of(key), state.server
        n = rounds.count(state.clients.id, axis_name)
        heads = communication.coin(keys.coin, hparams.p, server.iterations)
        received = rounds.broadcast(server.params, axis_name)
        size = n if cohort is None else cohort
        draw = jax.random.fold_in(keys.cohort, server.communications)
        member = rounds.cohort_members(draw, state.clients.id, n, size)
        weights = jnp.where(member, n / size, 0.0)

        def train(client, data):
            client, loss = local_step(
                value_and_grad, sample, keys.rows, hparams, received, client, data, server.iterations
            )
            return client, *upload(hparams, client), loss

        moved, up, weight, loss = jax.vmap(train)(state.clients, batch)
        move = next_move(*rounds.mean((up, weight), axis_name, weights))
        closed = jax.vmap(lambda client: close(hparams, rounds.broadcast(move, axis_name), client))(moved)
        rows = jax.tree.map(lambda a, b: jnp.where(heads, a, b), closed, moved)
        rows = rounds.Members(member, None, weights).put(state.clients, rows)
        bits_up, bits_down = _traffic(keys.cohort, server.communications, n, cohort, server.params)
        advanced = Server(
            round=server.round + 1,
            params=jax.tree.map(lambda x, step: jnp.where(heads, x + step, x), server.params, move),
            iterations=server.iterations + 1,
            communications=server.communications + heads.astype(jnp.int32),
        )
        metrics = Metrics(
            rounds.mean(loss, axis_name, weights),
            jnp.where(heads, bits_up, 0),
            jnp.where(heads, bits_down, 0),
            jnp.ones((), jnp.int32),
        )
        return State(advanced, rows), metrics

    return Algorithm(checks.checked_init(_init(personal, by_rounds=False)), step, spec=SPEC)


def i_scaffnew(value_and_grad: ValueAndGrad, sample: Sample = local.all_rows, **how: Any) -> Algorithm:
    """Scafflix without personalization: alpha = 1, and no x_i* is needed.

    Args:
        value_and_grad: as in `scafflix`.
        sample: as in `scafflix`.
        **how: `cohort` and `over` of `scafflix`.

    Returns:
        The algorithm.

    Thesis: Alg. 9, Sec. B.1.
    """
    return scafflix(value_and_grad, sample, personal=False, **how)


def hparams(gamma: ArrayLike, alpha: ArrayLike, p: float) -> HParams:
    """Hyperparameters that were validated: gamma > 0, alpha in [0, 1], p in (0, 1].

    Args:
        gamma: stepsize, one number or one per client.
        alpha: weight of the global model, one number or one per client.
        p: probability that an iteration ends with a communication.

    Returns:
        The hyperparameters, gamma and alpha in float64.
    """
    gamma, alpha = np.asarray(gamma, np.float64), checked_alpha(alpha)
    if gamma.ndim > 1 or not np.all(np.isfinite(gamma) & (gamma > 0)):
        raise ValueError(f"gamma={gamma}; allowed: one positive number, or one for each client")
    if not 0 < p <= 1:
        raise ValueError(f"p={p}; allowed: 0 < p <= 1")
    return HParams(gamma, alpha, float(p))


def theoretical(
    A: Float[np.ndarray, "n"],
    mu: ArrayLike,
    alpha: ArrayLike = 1.0,
    *,
    C: Float[np.ndarray, "n"] | None = None,
    epsilon: float | None = None,
    gamma: ArrayLike | None = None,
    p: float | None = None,
    strict: bool = False,
) -> HParams:
    """The theorem's hyperparameters: gamma_i = 1/A_i and p = sqrt(min_i gamma_i mu_i).

    With exact gradients A_i = L_i.  With stochastic gradients and a target accuracy, gamma_i is that of Cor. 3.2.5.

    Args:
        A: smoothness constants A_i, [n].
        mu: strong convexity constants mu_i, one number or [n]; 0 < mu_i <= A_i.
        alpha: weight of the global model, one number or one per client.
        C: variance constants C_i of stochastic gradients, [n] (`theory.expected_smoothness`).  Needs `epsilon`.
        epsilon: target accuracy with stochastic gradients.  Needs `C`.
        gamma: replaces the theorem's stepsizes.  The theorem does not cover values above 1/A_i: they cause a warning.
        p: replaces the theorem's p.
        strict: whether gamma_i > 1/A_i is a ValueError instead of a warning.

    Returns:
        The hyperparameters.

    Thesis: Cor. 3.2.4, Cor. 3.2.5.  Differs: S6 (A_i is that of f_i, without alpha_i^2).

    >>> theoretical(np.array([2.0, 8.0, 1.0]), np.array([0.5, 1.0, 0.1])).gamma.tolist()
    [0.5, 0.125, 1.0]
    """
    A = np.asarray(A, np.float64)
    mu = np.broadcast_to(np.asarray(mu, np.float64), A.shape)
    if not np.all((A > 0) & (mu > 0) & (mu <= A * (1 + 1e-9))):
        raise ValueError(f"A={A}, mu={mu}; allowed: 0 < mu_i <= A_i")
    if (C is None) != (epsilon is None):
        raise ValueError(f"C={C}, epsilon={epsilon}; allowed: both (stochastic gradients) or neither (exact ones)")
    if gamma is None:
        gamma = 1 / A if C is None or epsilon is None else theory.stepsizes_for(epsilon, A, mu, C)
    gamma = np.broadcast_to(np.asarray(gamma, np.float64), A.shape)
    if np.any(gamma > (1 + 1e-9) / A):
        i = int(np.argmax(gamma * A))
        message = f"gamma_{i} = {gamma[i]:.4g} is above 1/A_{i} = {1 / A[i]:.4g}, which the theorem does not cover"
        if strict:
            raise ValueError(message)
        warnings.warn(message, stacklevel=2)
    return hparams(gamma, alpha, min(1.0, theory.best_probability(gamma, mu)) if p is None else p)


def scaffnew(A: Float[np.ndarray, "n"], mu: ArrayLike, p: float | None = None) -> HParams:
    """Hyperparameters of Scaffnew (Mishchenko et al., 2022) for `i_scaffnew`: one stepsize 1/max_i A_i, and alpha = 1.

    Args:
        A: smoothness constants A_i, [n].
        mu: strong convexity constants, one number or [n].
        p: probability of a communication; None is that of `theoretical`.

    Returns:
        The hyperparameters.
    """
    A = np.asarray(A, np.float64)
    return theoretical(A, mu, gamma=1 / A.max(), p=p)
