"""The parts of a round of Scafflix: coins, local steps, uploads, control variates."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from commjax.algorithms.flix import client_value, mixture
from commjax.core import rounds, tree
from commjax.core.base import Key, Params
from commjax.core.local import Sample, ValueAndGrad

# Limit on the local steps of one round, so that a tiny p cannot make a loop that never ends.
MOST_STEPS = 1_000_000


class Server(NamedTuple):
    """What the server remembers.

    Attributes:
        round: number of steps of the algorithm so far.
        params: xbar of the last communication.
        iterations: t, the number of local iterations so far.
        communications: number of communications so far.
    """

    round: Int[Array, ""]
    params: Params
    iterations: Int[Array, ""]
    communications: Int[Array, ""]


class Client(NamedTuple):
    """What each client remembers.

    Attributes:
        id: number of the client.
        drift: e_i = xtilde_i - (alpha_i xbar + (1 - alpha_i) x_i*), the local change since the last communication.  It
            is None between rounds if a step is a whole round, because it is 0 then.
        shift: h_i, the control variate.
        optimum: x_i*, or None without personalization (alpha = 1).
    """

    id: Int[Array, "*n"]
    drift: PyTree
    shift: PyTree
    optimum: PyTree


class Keys(NamedTuple):
    """The keys of a run.

    Attributes:
        coin: draws the coins that decide when to communicate.
        cohort: draws the cohorts.
        rows: draws the rows of stochastic gradients.
    """

    coin: Key
    cohort: Key
    rows: Key


def keys_of(key: Key) -> Keys:
    """Derive the keys of the coins, the cohorts and the rows from the key of the run."""
    return Keys(*jax.random.split(key, 3))


class Run(NamedTuple):
    """What all clients and the server of one run know, and what they compute from it.

    Attributes:
        value_and_grad: (params, rows) -> (loss, gradient) of one client.
        sample: (key, data) -> rows of one client.
        hparams: the hyperparameters.
        keys: the keys of the run.
    """

    value_and_grad: ValueAndGrad
    sample: Sample
    hparams: Any
    keys: Keys

    def communicates(self, t: Array) -> Array:
        """Whether iteration t ends with a communication."""
        return coin(self.keys.coin, self.hparams.p, t)

    def last_iteration(self, begin: Array) -> Array:
        """The first iteration from `begin` on that ends with a communication."""
        return first_heads(self.keys.coin, self.hparams.p, begin)

    def cohort_key(self, communications: Array) -> Key:
        """Key that draws the cohort of a communication, given the number of communications before it."""
        return jax.random.fold_in(self.keys.cohort, communications)

    def local_step(self, params: Params, client: Client, data: PyTree, t: Array) -> tuple[Client, Array]:
        """One local step of a client.

            g_i = grad f_i(alpha_i xbar + (1 - alpha_i) x_i* + e_i)
            e_i <- e_i - gamma_i (g_i - h_i)

        Args:
            params: xbar.
            client: the client's row, with e_i in `drift`.
            data: the client's data.
            t: number of the iteration.

        Returns:
            The client after the step, and the loss before it.
        """
        start = params if client.optimum is None else mixture(alpha_of(self.hparams, client), params, client.optimum)
        model = tree.add(start, client.drift)
        rows = self.sample(jax.random.fold_in(jax.random.fold_in(self.keys.rows, t), client.id), data)
        loss, grad = rounds.evaluated(self.value_and_grad, model, rows)
        step = tree.sub(grad, client.shift)
        return client._replace(drift=tree.add_scaled(client.drift, -gamma_of(self.hparams, client), step)), loss

    def train(self, params: Params, client: Client, data: PyTree, *, begin: Array, last: Array) -> tuple[Client, Array]:
        """The local steps `begin` to `last` of one client, from e_i = 0.

        Args:
            params: xbar.
            client: the client's row.
            data: the client's data.
            begin: number of the first iteration.
            last: number of the last iteration.

        Returns:
            The client's row with e_i in `drift`, and the loss at the first step.
        """

        def iteration(t: Array, carry: tuple[Client, Array]) -> tuple[Client, Array]:
            client, first = carry
            client, loss = self.local_step(params, client, data, t)
            return client, jnp.where(t == begin, loss, first)

        first = jax.eval_shape(self.value_and_grad, params, self.sample(self.keys.rows, data))[0]
        zeros = (tree.zeros_like(params), jnp.zeros(first.shape, first.dtype))
        drift, zero = tree.varying_like(zeros, client.id)
        return jax.lax.fori_loop(begin, last + 1, iteration, (client._replace(drift=drift), zero))


def alpha_of(hparams: Any, client: Client) -> Any:
    """Return alpha_i, a client's weight of the global model; 1 for a client without x_i*, whatever `hparams` says."""
    return 1.0 if client.optimum is None else client_value(hparams.alpha, client.id)


def gamma_of(hparams: Any, client: Client) -> Array:
    """Return gamma_i, the stepsize of a client."""
    return client_value(hparams.gamma, client.id)


def upload(hparams: Any, client: Client) -> tuple[PyTree, Any]:
    """Return what a client sends: (alpha_i / gamma_i) e_i, where e_i is its local change since the last communication.

    Args:
        hparams: the hyperparameters.
        client: the client's row, with e_i in `drift`.

    Returns:
        What the client sends, and its weight alpha_i^2 / gamma_i, which the server already knows.
    """
    alpha, gamma = alpha_of(hparams, client), gamma_of(hparams, client)
    return tree.scale(alpha / gamma, client.drift), alpha**2 / gamma


def close(hparams: Any, move: Params, client: Client) -> Client:
    """Finish a round at a client, after a communication.

        h_i <- h_i + (p / gamma_i) (alpha_i (xbar - previous xbar) - e_i)
        e_i <- 0

    Args:
        hparams: the hyperparameters.
        move: xbar - (previous xbar).
        client: the client's row, with the e_i that it sent.

    Returns:
        The client's row with the new h_i, and with e_i = 0.
    """
    surprise = tree.sub(tree.scale(alpha_of(hparams, client), move), client.drift)
    shift = tree.add_scaled(client.shift, hparams.p / gamma_of(hparams, client), surprise)
    return client._replace(drift=tree.zeros_like(client.drift), shift=shift)


def next_move(up: PyTree, weight: Array) -> PyTree:
    """Compute the change of the server's model xbar from the means of the uploads and of their weights.

        xbar - (previous xbar) = sum_i (alpha_i / gamma_i) e_i / sum_i alpha_i^2 / gamma_i

    The change is 0 if every alpha_i is 0.

    Args:
        up: mean of (alpha_i / gamma_i) e_i, a pytree like xbar.
        weight: mean of alpha_i^2 / gamma_i.

    Returns:
        A pytree like xbar.
    """
    return tree.scale(jnp.where(weight > 0, 1 / jnp.where(weight > 0, weight, 1), 0), up)


def after_round(server: Any, move: Params, last: Array) -> Server:
    """Return the server's state after a communication.

    Args:
        server: the state before the communication: a `Server`, or a `RemoteServer` of `remote`.
        move: xbar - (previous xbar).
        last: number of the round's last iteration.

    Returns:
        The server with the new xbar and the new counters.
    """
    return Server(
        round=server.round + 1,
        params=tree.add(server.params, move),
        iterations=last + 1,
        communications=server.communications + 1,
    )


def coin(key: Key, p: Any, t: Any) -> Array:
    """Whether iteration t ends with a communication: true with probability p.

    Args:
        key: key of the coins for the whole run.
        p: probability.
        t: number of the iteration.

    Returns:
        A bool.
    """
    return jax.random.bernoulli(jax.random.fold_in(key, t), p)


def first_heads(key: Key, p: Any, start: Array) -> Array:
    """The first iteration from `start` on that ends with a communication.

    Args:
        key: key of the coins for the whole run.
        p: probability of a communication.
        start: number of the iteration with which the search begins.

    Returns:
        The number of the iteration, at most `start` + `MOST_STEPS`.
    """
    return jax.lax.while_loop(lambda t: ~coin(key, p, t) & (t - start < MOST_STEPS), lambda t: t + 1, start)
