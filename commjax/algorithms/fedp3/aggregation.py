"""How the server averages the layers that it received.

The three rules are one formula.  H_l are the clients of this round that train layer l, and every client has a logit
b_il for every layer:

    W^l <- W^l + sum_{i in H_l} a_il (W_i^l - W^l),        a_il = exp(b_il) / sum_{j in H_l} exp(b_jl)

simple: b = 0.  weighted: b_il = log |L_i|.  attention: b is learned.  A layer that no client trained keeps its value.

Thesis: Alg. 7, Sec. 4.4.3.
Differs: F8 (the weights are normalised over the holders of a layer; as printed they sum to less than 1).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PyTree, Shaped

from commjax.algorithms.fedp3.layers import Assignment, Layers, by_leaf
from commjax.core import rounds, tree
from commjax.core.base import AxisName, Metrics, Params

Loss = Callable[[Params, Any], Array]

# Logits are clipped to [-MOST, MOST], so that no exponential overflows.
MOST = 20.0


class Aggregation(NamedTuple):
    """A rule for the weights a_il.  The functions of this module make it.

    Attributes:
        name: name of the rule.
        logits: `logits(trained)` returns b, [m, layers], for clients that train the layers `trained`, [m, layers].
            If b is learned, these are the first ones.
        held: batch of the server on which b is learned; None if b is not learned.
        steps: gradient steps on b in every round; 0 if b is not learned.
        stepsize: stepsize of these steps.
    """

    name: str
    logits: Callable[[np.ndarray], np.ndarray]
    held: PyTree = None
    steps: int = 0
    stepsize: float = 0.0


def _zeros(trained: np.ndarray) -> np.ndarray:
    return np.zeros(trained.shape)


def _log_layers(trained: np.ndarray) -> np.ndarray:
    return np.broadcast_to(np.log(trained.sum(axis=1, keepdims=True)), trained.shape)


def simple() -> Aggregation:
    """The mean over the clients that train a layer.  Thesis: Sec. 4.2."""
    return Aggregation("simple", _zeros)


def weighted() -> Aggregation:
    """A mean in which clients that train more layers count more.

        a_il = |L_i| / sum_{j in H_l} |L_j|

    Thesis: Sec. 4.2.
    """
    return Aggregation("weighted", _log_layers)


def attention(held: PyTree, *, steps: int = 3, stepsize: float = 1.0, start: Aggregation | None = None) -> Aggregation:
    """Logits that the server learns on a batch of its own.

    In every round the server takes `steps` gradient steps on the loss of the averaged model on the batch `held`.  The
    logits are kept from round to round.

    Args:
        held: the server's batch, as the loss takes it.
        steps: gradient steps in every round, at least 0.
        stepsize: stepsize of these steps.
        start: rule of the first logits; None is `simple()`.

    Returns:
        The rule.

    Thesis: Sec. 4.2, Sec. 4.4.3.
    Differs: neither the mapping h nor its data is given there; this is the least that has simple and weighted averaging
    as special cases.
    """
    if steps < 0 or not stepsize > 0:
        raise ValueError(f"steps={steps}, stepsize={stepsize}; allowed: at least 0, and > 0")
    first = simple() if start is None else start
    return Aggregation("attention", first.logits, held, steps, float(stepsize))


def weights(logits: Float[Array, "m l"], holds: Bool[Array, "m l"]) -> Float[Array, "m l"]:
    """exp(b_il) for the clients that train a layer, 0 for the others: the a_il before they are normalised.

    Args:
        logits: b, one row for each of m clients.
        holds: whether the client trains the layer.

    Returns:
        The weights, not normalised.
    """
    return jnp.where(holds, jnp.exp(logits), 0)


def joined(
    layers: Layers,
    updates: PyTree,
    weights: Float[Array, "m l"],
    axis_name: AxisName = None,
    present: Shaped[Array, "m"] | None = None,
) -> Params:
    """The step of the server.

        sum_i a_il (W_i^l - W^l),   0 for a layer that no client trained

    Args:
        layers: the layers of the params.
        updates: W_i - W, a pytree like the params with a leading axis of m clients.
        weights: weights of the clients, which need not be normalised; 0 for a layer that a client does not train.
        axis_name: name of the device axis, if the clients are on several devices.
        present: weight of each client in the cohort, 0 for a client outside it; None if all m clients take part.

    Returns:
        A pytree like the params, in the dtypes of `updates`.

    >>> rows = jnp.array([10.0, 20.0, 99.0])
    >>> float(joined(Layers(("l",), (0,)), rows, jnp.array([[1.0], [3.0], [0.0]])))
    17.5
    """
    # The sums are matrix products, because XLA's CPU reduction along the first axis takes 500 times as long.
    shares = jnp.where(rounds.real(len(weights), axis_name)[:, None], weights, 0)
    shares = shares if present is None else shares * present[:, None].astype(shares.dtype)
    total = rounds.mean(jnp.sum(shares, axis=0)[None], axis_name)

    def leaf_mean(rows: Array, share: Array, total: Array) -> Array:
        scale = jnp.where(total > 0, 1 / jnp.where(total > 0, total, 1), 0)
        local_sum = jnp.tensordot(share.astype(rows.dtype), rows, 1, precision=jax.lax.Precision.HIGHEST)
        return rounds.mean(local_sum[None], axis_name) * scale.astype(rows.dtype)

    structure = jax.tree.map(lambda leaf: leaf[0], updates)
    return jax.tree.map(leaf_mean, updates, by_leaf(layers, structure, shares.T), by_leaf(layers, structure, total))


class Uploads(NamedTuple):
    """What the server has of the clients of a round.

    Attributes:
        updates: U_i = W_i - W, a pytree like the params with a leading axis of m clients.
        trained: whether the client trains the layer, [m, layers].
        logits: b, [m, layers].
        axis_name: name of the device axis, if the clients are on several devices.
        present: weight of each client in the cohort, 0 for a client outside it; None if all m clients take part.
        members: number of clients that take part, on all devices.
    """

    updates: PyTree
    trained: Bool[Array, "m l"]
    logits: Float[Array, "m l"]
    axis_name: AxisName = None
    present: Shaped[Array, "m"] | None = None
    members: int = 1


def aggregated(rule: Aggregation, loss: Loss, layers: Layers, params: Params, uploads: Uploads) -> tuple[Params, Array]:
    """Learn the logits, if the rule says so, and average the layers.

    Args:
        rule: the rule.
        loss: `loss(params, held)` returns a scalar; used only if the logits are learned.
        layers: the layers of the params.
        params: W.
        uploads: what the clients sent.

    Returns:
        The step of the server, sum_i a_il (W_i^l - W^l), a pytree like the params; and b after the round, [m, layers].
    """
    logits = learned(rule, loss, layers, params, uploads)
    return mean_move(layers, uploads._replace(logits=logits)), logits


def mean_move(layers: Layers, uploads: Uploads) -> Params:
    """The step of the server with the given logits: sum_i a_il U_i^l."""
    weight = weights(uploads.logits, uploads.trained)
    return joined(layers, uploads.updates, weight, uploads.axis_name, uploads.present)


def learned(rule: Aggregation, loss: Loss, layers: Layers, params: Params, uploads: Uploads) -> Float[Array, "m l"]:
    """Gradient steps on the logits.

        U^l = sum_i a_il U_i^l
        `steps` times:  b_il <- b_il - stepsize a_il <grad_l loss(W + U; held), U_i^l - U^l>

    Args:
        rule: the rule, with `held`, `steps` and `stepsize`.
        loss: `loss(params, held)` returns a scalar.
        layers: the layers of the params.
        params: W.
        uploads: U_i and b.

    Returns:
        The new logits, clipped to [-20, 20].
    """
    updates, _, logits, axis_name, present, members = uploads
    for _ in range(rule.steps):
        weight = weights(logits, uploads.trained)
        move = joined(layers, updates, weight, axis_name, present)
        slope = jax.grad(loss)(tree.add(params, move), rule.held)
        along = [
            jnp.tensordot(rows.reshape(len(rows), -1), grad.reshape(-1), 1) - jnp.vdot(grad, mean)[None]
            for rows, grad, mean in zip(*map(jax.tree.leaves, (updates, slope, move)), strict=True)
        ]
        none = jnp.zeros(len(logits), logits.dtype)
        by_layer = [
            sum((product for product, layer in zip(along, layers.of, strict=True) if layer == number), none)
            for number in range(len(layers.names))
        ]
        total = members * rounds.mean(weight, axis_name, present)
        share = weight / jnp.where(total > 0, total, 1)[None]
        stepsize = jnp.asarray(rule.stepsize, logits.dtype)
        logits = jnp.clip(logits - stepsize * share * jnp.stack(by_layer, axis=1), -MOST, MOST)
    return logits


def mean_metrics(
    losses: Float[Array, "m"], bits: tuple[np.ndarray, np.ndarray], plan: Assignment, uploads: Uploads, n: int
) -> Metrics:
    """The mean loss over the clients of a round, and the mean bits over all n clients.

    Args:
        losses: one for each client of the round.
        bits: bits up and bits down of every kind of client (`submodels.bit_tables`).
        plan: what the plan tells the clients of the round.
        uploads: which clients take part, and on which device axis they are.
        n: number of clients.

    Returns:
        The metrics.
    """
    dtype, kind = jnp.zeros(()).dtype, (plan.layer_set, plan.ratio, plan.low)
    up, down = (jnp.asarray(table, dtype)[kind] for table in bits)
    loss, bits_up, bits_down = rounds.mean((losses, up, down), uploads.axis_name, uploads.present)
    share = uploads.members / n
    return Metrics(loss, share * bits_up, share * bits_down)
