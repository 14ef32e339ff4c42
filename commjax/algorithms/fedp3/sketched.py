"""FedP3 as its theory sees it: global pruning and personalised aggregation as random diagonal matrices."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Int

from commjax.compressors import wire
from commjax.compressors.joint import perm_k
from commjax.core import checks, rounds, tree
from commjax.core.base import Algorithm, Codec, Compressor, Key, Params, Spec, State
from commjax.core.local import ValueAndGrad
from commjax.theory import fedp3 as theory


class HParams(NamedTuple):
    """gamma: stepsize."""

    gamma: Any


def check(hparams: HParams, n: int) -> None:
    """ValueError unless gamma > 0."""
    checks.scalars(hparams)
    checks.positive("gamma", hparams.gamma)


class Server(NamedTuple):
    round: Int[Array, ""]
    params: Params  # w


class Client(NamedTuple):
    id: Int[Array, "*n"]


class Pruning(NamedTuple):
    """The diagonal of P_i: which of d coordinates a client works with, and how many these are."""

    mask: Callable[[Key, int], Bool[Array, "d"]]  # (key, d)
    kept: Callable[[int], int]  # (d)


def whole() -> Pruning:
    """P = I

    >>> whole().kept(7)
    7
    """
    return Pruning(lambda key, d: jnp.ones(d, bool), lambda d: d)


def uniform(keep: float) -> Pruning:
    """ceil(keep d) coordinates, drawn uniformly, not scaled: biased.  Thesis: Def. L1757.

    >>> uniform(0.5).mask(jax.random.key(0), 6).sum().item()
    3
    """
    if not 0 < keep <= 1:
        raise ValueError(f"keep={keep}; allowed: 0 < keep <= 1")

    def kept(d: int) -> int:
        return int(np.ceil(keep * d))

    return Pruning(lambda key, d: jax.random.permutation(key, d) < kept(d), kept)


def use_key(own_key: Key, use: int) -> Key:
    """A client's key for one use.  Uses count from 2: fold_in(key, i) = split(key)[i], so that 0 and 1 may meet the keys that
    perm-k and a permutation split off the same parents, and what is drawn here would depend on who owns which coordinate."""
    if use < 2:
        raise ValueError(f"use={use}; allowed: at least 2")
    return jax.random.fold_in(own_key, use)


def check_dimension(sketch: Compressor, d: int, n: int) -> None:
    """(1/n) sum_i S_i = I needs an owner for every coordinate and a coordinate for every client."""
    if sketch.name == "perm-k" and d < n:
        raise ValueError(f"{n} clients share out d = {d} coordinates; allowed: at most d clients")


def sketched(
    value_and_grad: ValueAndGrad, prune: Pruning | None = None, sketch: Compressor | None = None, *, steps: int = 1
) -> Algorithm:
    r"""FedP3 with sketches, the theoretical framework.

        u_i <- P_i w;  `steps` times:  u_i <- u_i - gamma P_i grad f_i(u_i)
        w   <- (1/n) sum_i S_i u_i

    S (`sketch`, by default perm-k) shares out the coordinates by one permutation a round that all clients know, so that
    (1/n) sum_i S_i = I and S_i S_j = 0; `compressors.identity()` is S = I.  P (`prune`, by default I) is drawn by each client.

    Thesis: Alg. L4077, Def. L1757 and L1763.  Holds if: Thm L1770 for P = I; Thm L4270 for S = I, steps = 1.
    Differs: F10 (the permutation is shared; d need not be a multiple of n), F11 (a noise floor between clients that differ).
    """
    prune, sketch = prune or whole(), sketch or perm_k()
    if steps < 1:
        raise ValueError(f"steps={steps}; allowed: at least 1")

    def init(params: Params, ids: Int[Array, "n"]) -> State:
        check_dimension(sketch, tree.size(params), len(ids))
        return State(Server(jnp.zeros((), jnp.int32), params), Client(ids))

    def client_step(round, hparams, server, client, data):
        flat, unravel = ravel_pytree(server.params)
        mask = prune.mask(use_key(round.own_key, 2), flat.size)

        def pruned(params: Params) -> Params:
            return unravel(jnp.where(mask, ravel_pytree(params)[0], jnp.zeros((), flat.dtype)))

        def one(params, _):
            loss, grad = rounds.evaluated(value_and_grad, params, data)
            return tree.add_scaled(params, -hparams.gamma, pruned(grad)), loss

        model, losses = jax.lax.scan(one, pruned(server.params), None, length=steps)
        return client, round.send(model), losses[0]

    def bits_down(server) -> int:
        """The kept coordinates; which they are follows from the round's key."""
        flat = jax.eval_shape(lambda params: ravel_pytree(params)[0], server.params)  # they travel as one vector
        return 8 * flat.dtype.itemsize * prune.kept(flat.size)

    def mask_of(key: Key, id: int, d: int) -> np.ndarray:
        return np.asarray(prune.mask(use_key(jax.random.fold_in(key, id), 2), d))  # the client's `own_key`

    def write(key: Key, server: Server, ids: list[int], n: int) -> list[bytes]:
        flat = np.asarray(ravel_pytree(server.params)[0])
        return [wire.encode_values(flat[mask_of(key, id, flat.size)]) for id in ids]

    def read(key: Key, data: bytes, server: Server, id: int, n: int) -> Params:
        like, unravel = ravel_pytree(server.params)
        mask, flat = mask_of(key, id, like.size), np.zeros(like.shape, like.dtype)
        flat[mask] = wire.decode_values(data, int(mask.sum()), flat.dtype)
        return unravel(jnp.asarray(flat))

    letter = Codec(lambda server, id: bits_down(server), write, read)
    spec = Spec(HParams, Server, Client, check)
    return rounds.federated(init, client_step, server_step, bits_down, compressor=sketch, letter=letter, spec=spec)


def server_step(hparams: Any, server: Server, params: Params) -> Server:
    """w <- (1/n) sum_i S_i u_i"""
    return server._replace(params=params)


def theoretical(L: np.ndarray, rounds: int) -> HParams:
    """gamma = min(1 / L_max, 1 / sqrt(Lbar L_max K)) from the clients' constants L_i.  Thesis: Thm L1770; Differs: F12.

    >>> theoretical(np.array([2.0, 8.0]), 10)
    HParams(gamma=0.05)
    """
    L = np.asarray(L, np.float64)
    if rounds < 1 or not np.all(L > 0):
        raise ValueError(f"rounds={rounds}, L={L}; allowed: at least 1 round, positive constants")
    return HParams(theory.aggregation_stepsize(L, rounds))
