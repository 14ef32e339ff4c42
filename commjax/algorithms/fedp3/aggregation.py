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

from commjax.algorithms.fedp3.layers import Layers, by_leaf
from commjax.algorithms.fedp3.plans import Plan
from commjax.core import rounds, tree
from commjax.core.base import AxisName, Params

# Logits are clipped to [-MOST, MOST], so that no exponential overflows.
MOST = 20.0


class Aggregation(NamedTuple):
    """A rule for the weights a_il.  The functions of this module make it.

    Attributes:
        name: name of the rule.
        logits: `logits(plan)` returns b, [n, layers].  If b is learned, these are the first ones.
        held: batch of the server on which b is learned; None if b is not learned.
        steps: gradient steps on b in every round; 0 if b is not learned.
        stepsize: stepsize of these steps.
    """

    name: str
    logits: Callable[[Plan], np.ndarray]
    held: PyTree = None
    steps: int = 0
    stepsize: float = 0.0


def _zeros(plan: Plan) -> np.ndarray:
    return np.zeros(plan.trained.shape)


def _log_layers(plan: Plan) -> np.ndarray:
    return np.broadcast_to(np.log(plan.trained.sum(axis=1, keepdims=True)), plan.trained.shape)


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
    here = jnp.where(rounds.real(len(weights), axis_name)[:, None], weights, 0)
    here = here if present is None else here * present[:, None].astype(here.dtype)
    total = rounds.mean(jnp.sum(here, axis=0)[None], axis_name)

    def one(rows: Array, weight: Array, total: Array) -> Array:
        scale = jnp.where(total > 0, 1 / jnp.where(total > 0, total, 1), 0)
        here = jnp.tensordot(weight.astype(rows.dtype), rows, 1, precision=jax.lax.Precision.HIGHEST)
        return rounds.mean(here[None], axis_name) * scale.astype(rows.dtype)

    structure = jax.tree.map(lambda leaf: leaf[0], updates)
    return jax.tree.map(one, updates, by_leaf(layers, structure, here.T), by_leaf(layers, structure, total))


def learned(
    how: Aggregation,
    loss: Callable[[Params, Any], Array],
    layers: Layers,
    params: Params,
    updates: PyTree,
    logits: Float[Array, "m l"],
    holds: Bool[Array, "m l"],
    axis_name: AxisName = None,
    present: Shaped[Array, "m"] | None = None,
    members: int = 1,
) -> Float[Array, "m l"]:
    """Gradient steps on the logits.

        U_i = W_i - W,   U^l = sum_i a_il U_i^l
        `steps` times:  b_il <- b_il - stepsize a_il <grad_l loss(W + U; held), U_i^l - U^l>

    Args:
        how: the rule, with `held`, `steps` and `stepsize`.
        loss: `loss(params, held)` returns a scalar.
        layers: the layers of the params.
        params: W.
        updates: U_i, a pytree like the params with a leading axis of m clients.
        logits: b, one row per client.
        holds: whether the client trains the layer.
        axis_name: name of the device axis, if the clients are on several devices.
        present: weight of each client in the cohort, 0 for a client outside it; None if all m clients take part.
        members: number of clients that take part, on all devices.

    Returns:
        The new logits, clipped to [-20, 20].
    """
    for _ in range(how.steps):
        weight = weights(logits, holds)
        move = joined(layers, updates, weight, axis_name, present)
        slope = jax.grad(loss)(tree.add(params, move), how.held)
        along = [
            jnp.tensordot(rows.reshape(len(rows), -1), grad.reshape(-1), 1) - jnp.vdot(grad, mean)[None]
            for rows, grad, mean in zip(*map(jax.tree.leaves, (updates, slope, move)))
        ]
        inner = jnp.stack(
            [
                sum(
                    (one for one, layer in zip(along, layers.of) if layer == number),
                    jnp.zeros(len(logits), logits.dtype),
                )
                for number in range(len(layers.names))
            ],
            axis=1,
        )
        total = members * rounds.mean(weight, axis_name, present)
        share = weight / jnp.where(total > 0, total, 1)[None]
        logits = jnp.clip(logits - jnp.asarray(how.stepsize, logits.dtype) * share * inner, -MOST, MOST)
    return logits
