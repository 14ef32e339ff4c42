"""FedP3 as its theory describes it: global pruning and personalised aggregation are random diagonal matrices."""

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
from commjax.core.base import Algorithm, Codec, Compressor, Key, Message, Params, Round, Spec, State
from commjax.core.local import ValueAndGrad
from commjax.theory import fedp3 as theory


class HParams(NamedTuple):
    """Hyperparameters of the sketched FedP3.

    Attributes:
        gamma: stepsize.
    """

    gamma: Any


def check(hparams: HParams, n: int) -> None:
    """Raise a ValueError unless gamma > 0.

    Args:
        hparams: the hyperparameters.  Traced values are skipped.
        n: number of clients; not used.
    """
    checks.scalars(hparams)
    checks.positive("gamma", hparams.gamma)


class Server(NamedTuple):
    """What the server remembers.

    Attributes:
        round: number of rounds so far.
        params: w, the model.
    """

    round: Int[Array, ""]
    params: Params


class Client(NamedTuple):
    """The clients, which keep no state.

    Attributes:
        id: number of the client.
    """

    id: Int[Array, "*n"]


class Pruning(NamedTuple):
    """The diagonal of P_i: the coordinates that a client works with.

    Attributes:
        mask: `mask(key, d)` returns a bool for each of d coordinates.
        kept: `kept(d)` returns the number of coordinates inside the mask.
    """

    mask: Callable[[Key, int], Bool[Array, "d"]]
    kept: Callable[[int], int]


def whole() -> Pruning:
    """No pruning: P = I.

    >>> whole().kept(7)
    7
    """
    return Pruning(lambda key, d: jnp.ones(d, bool), lambda d: d)


def uniform(keep: float) -> Pruning:
    """Pruning that keeps ceil(keep d) coordinates, drawn uniformly and not scaled, so that P is biased.

    Thesis: Def. 4.3.1.

    >>> uniform(0.5).mask(jax.random.key(0), 6).sum().item()
    3
    """
    if not 0 < keep <= 1:
        raise ValueError(f"keep={keep}; allowed: 0 < keep <= 1")

    def kept(d: int) -> int:
        return int(np.ceil(keep * d))

    return Pruning(lambda key, d: jax.random.permutation(key, d) < kept(d), kept)


def use_key(client_key: Key, use: int) -> Key:
    """A client's key for one use.

    Uses count from 2.  Since fold_in(key, i) = split(key)[i], the uses 0 and 1 could equal keys that perm-k and a
    permutation split off the same parents.  What is drawn here would then depend on which client owns which coordinate.

    Args:
        client_key: the client's key of the round.
        use: number of the use, at least 2.

    Returns:
        The key.
    """
    if use < 2:
        raise ValueError(f"use={use}; allowed: at least 2")
    return jax.random.fold_in(client_key, use)


def check_dimension(sketch: Compressor, d: int, n: int) -> None:
    """Raise a ValueError if perm-k has more clients than coordinates.

    (1/n) sum_i S_i = I needs an owner for every coordinate and a coordinate for every client.

    Args:
        sketch: S_i.
        d: number of params.
        n: number of clients.
    """
    if sketch.name == "perm-k" and d < n:
        raise ValueError(f"{n} clients share out d = {d} coordinates; allowed: at most d clients")


def sketched(
    value_and_grad: ValueAndGrad, prune: Pruning | None = None, sketch: Compressor | None = None, *, steps: int = 1
) -> Algorithm:
    r"""FedP3 with sketches, the theoretical framework.

        u_i <- P_i w;  `steps` times:  u_i <- u_i - gamma P_i grad f_i(u_i)
        w   <- (1/n) sum_i S_i u_i

    Args:
        value_and_grad: `value_and_grad(params, data)` of one client returns the loss (a scalar) and the gradient (a
            pytree like `params`).
        prune: P_i, which each client draws; None is I.
        sketch: S_i; None is perm-k, which splits the coordinates among the clients by one permutation per round that
            all clients know.  Then (1/n) sum_i S_i = I and S_i S_j = 0.  `compressors.identity()` is S = I.
        steps: number of local steps in a round.

    Returns:
        The algorithm.

    Thesis: Alg. 10, Def. 4.3.1 and 4.3.2.
    Holds if: the theorem on model aggregation (Sec. 4.3) for P = I; Thm C.3.5 for S = I, steps = 1.
    Differs: F10 (the permutation is shared; d need not be a multiple of n), F11 (a noise floor between clients that
    differ).
    """
    prune, sketch = prune or whole(), sketch or perm_k()
    if steps < 1:
        raise ValueError(f"steps={steps}; allowed: at least 1")

    def init(params: Params, ids: Int[Array, "n"]) -> State:
        check_dimension(sketch, tree.size(params), len(ids))
        return State(Server(jnp.zeros((), jnp.int32), params), Client(ids))

    def client_step(
        round: Round, hparams: Any, server: Server, client: Client, data: Any
    ) -> tuple[Client, Message, Array]:
        flat, unravel = ravel_pytree(server.params)
        mask = prune.mask(use_key(round.client_key, 2), flat.size)

        def pruned(params: Params) -> Params:
            return unravel(jnp.where(mask, ravel_pytree(params)[0], jnp.zeros((), flat.dtype)))

        def local_step(params: Params, _: None) -> tuple[Params, Array]:
            loss, grad = rounds.evaluated(value_and_grad, params, data)
            return tree.add_scaled(params, -hparams.gamma, pruned(grad)), loss

        model, losses = jax.lax.scan(local_step, pruned(server.params), None, length=steps)
        return client, round.send(model), losses[0]

    def bits_down(server: Server) -> int:
        """The kept coordinates; which they are follows from the round's key."""
        # The params are sent as one vector, which has one dtype.
        flat = jax.eval_shape(lambda params: ravel_pytree(params)[0], server.params)
        return 8 * flat.dtype.itemsize * prune.kept(flat.size)

    def mask_of(key: Key, id: int, d: int) -> np.ndarray:
        # The inner key is the client's `client_key`.
        return np.asarray(prune.mask(use_key(jax.random.fold_in(key, id), 2), d))

    def write(key: Key, server: Server, ids: list[int], n: int) -> list[bytes]:
        flat = np.asarray(ravel_pytree(server.params)[0])
        return [wire.encode_values(flat[mask_of(key, id, flat.size)]) for id in ids]

    def read(key: Key, data: bytes, server: Server, id: int, n: int) -> Params:
        like, unravel = ravel_pytree(server.params)
        mask, flat = mask_of(key, id, like.size), np.zeros(like.shape, like.dtype)
        flat[mask] = wire.decode_values(data, int(mask.sum()), flat.dtype)
        return unravel(jnp.asarray(flat))

    download = Codec(lambda server, id: bits_down(server), write, read)
    spec = Spec(HParams, Server, Client, check)
    return rounds.federated(init, client_step, server_step, bits_down, compressor=sketch, download=download, spec=spec)


def server_step(hparams: Any, server: Server, params: Params) -> Server:
    """w <- (1/n) sum_i S_i u_i.

    Args:
        hparams: the hyperparameters; not used.
        server: the server's state.
        params: the mean of the messages, (1/n) sum_i S_i u_i.

    Returns:
        The server's state with the new w.
    """
    return server._replace(params=params)


def theoretical(L: np.ndarray, rounds: int) -> HParams:
    """gamma = min(1 / L_max, 1 / sqrt(Lbar L_max K)) for K rounds.

    Args:
        L: smoothness constants L_i of the clients, [n].
        rounds: K.

    Returns:
        The hyperparameters.

    Thesis: Sec. 4.3 (theorem on personalized model aggregation).  Differs: F12.

    >>> theoretical(np.array([2.0, 8.0]), 10)
    HParams(gamma=0.05)
    """
    smoothness = np.asarray(L, np.float64)
    if rounds < 1 or not np.all(smoothness > 0):
        raise ValueError(f"rounds={rounds}, L={smoothness}; allowed: at least 1 round, positive constants")
    return HParams(theory.aggregation_stepsize(smoothness, rounds))
