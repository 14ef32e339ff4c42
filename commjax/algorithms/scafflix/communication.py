"""The pieces of a round of Scafflix: coins, local steps, what goes up, and what a client makes of the answer."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int, PyTree

from commjax.algorithms.flix import mixture, own
from commjax.core import rounds, tree
from commjax.core.base import Key, Params

MOST_STEPS = 1_000_000  # of one round, so that no p can make a program that does not end


class Server(NamedTuple):
    round: Int[Array, ""]
    params: Params  # xbar of the last communication
    iterations: Int[Array, ""]  # t
    communications: Int[Array, ""]


class Client(NamedTuple):
    id: Int[Array, "*n"]
    drift: PyTree  # e_i = xtilde_i - (alpha_i xbar + (1 - alpha_i) x_i*), since the last communication; None if 0
    shift: PyTree  # h_i
    optimum: PyTree  # x_i*, or None where alpha = 1


class Keys(NamedTuple):
    coin: Key
    cohort: Key
    rows: Key


def keys_of(key: Key) -> Keys:
    """From the key of the run"""
    return Keys(*jax.random.split(key, 3))


def local_step(value_and_grad, sample, key, hparams, params, client, data, t):
    """e <- e - gamma_i (g_i - h_i) with g_i = grad f_i(alpha_i xbar + (1 - alpha_i) x_i* + e)"""
    model = tree.add(_start(hparams, params, client), client.drift)
    rows = sample(jax.random.fold_in(jax.random.fold_in(key, t), client.id), data)
    loss, grad = rounds.evaluated(value_and_grad, model, rows)
    step = tree.sub(grad, client.shift)
    return client._replace(drift=tree.add_scaled(client.drift, -own(hparams.gamma, client.id), step)), loss


def _start(hparams, params, client):
    return params if client.optimum is None else mixture(_alpha(hparams, client), params, client.optimum)


def _alpha(hparams, client):
    """1 where there is no x_i* to mix with, whatever hparams say"""
    return 1.0 if client.optimum is None else own(hparams.alpha, client.id)


def upload(hparams, client):
    """(alpha_i / gamma_i) e_i, and alpha_i^2 / gamma_i, which the server knows"""
    alpha, gamma = _alpha(hparams, client), own(hparams.gamma, client.id)
    return tree.scale(alpha / gamma, client.drift), alpha**2 / gamma


def next_move(up, weight):
    """xbar - (the last xbar) = sum_i (alpha_i/gamma_i) e_i / sum_i alpha_i^2/gamma_i; nobody moves it if every alpha_i is 0"""
    return tree.scale(jnp.where(weight > 0, 1 / jnp.where(weight > 0, weight, 1), 0), up)


def close(hparams, move, client):
    """h_i <- h_i + (p/gamma_i) (alpha_i (xbar - last xbar) - e_i), e_i <- 0"""
    alpha, gamma = _alpha(hparams, client), own(hparams.gamma, client.id)
    surprise = tree.sub(tree.scale(alpha, move), client.drift)
    shift = tree.add_scaled(client.shift, hparams.p / gamma, surprise)
    return client._replace(drift=tree.zeros_like(client.drift), shift=shift)


def train(value_and_grad, sample, keys, hparams, received, begin, last, client, data):
    """Local steps `begin` to `last` from e_i = 0, and the loss of the first"""

    def one(t, carry):
        client, first = carry
        client, loss = local_step(value_and_grad, sample, keys.rows, hparams, received, client, data, t)
        return client, jnp.where(t == begin, loss, first)

    first = jax.eval_shape(value_and_grad, received, sample(keys.rows, data))[0]
    zeros = (tree.zeros_like(received), jnp.zeros(first.shape, first.dtype))
    drift, zero = tree.varying_like(zeros, client.id)
    return jax.lax.fori_loop(begin, last + 1, one, (client._replace(drift=drift), zero))


def coin(key: Key, p: Any, t: Any) -> Array:
    return jax.random.bernoulli(jax.random.fold_in(key, t), p)


def first_heads(key: Key, p: Any, start: Array) -> Array:
    """The first iteration from `start` on whose coin says: communicate"""
    return jax.lax.while_loop(lambda t: ~coin(key, p, t) & (t - start < MOST_STEPS), lambda t: t + 1, start)
