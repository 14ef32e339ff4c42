"""Local computations of a client between two communications: draw rows, take gradient steps."""

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
from jaxtyping import Array, PyTree

from commjax.core import random_words, tree
from commjax.core.base import Key, Message, Over, Params, ValueAndGrad

__all__ = ["ClientResult", "Over", "Sample", "Train", "ValueAndGrad", "all_rows", "check_batch", "minibatch", "sgd"]

# (key, data of one client) -> batch
Sample = Callable[[Key, PyTree], PyTree]
# What a client step returns: the client's new state, its message, its loss
ClientResult = tuple[Any, Message, Array]


@runtime_checkable
class Train(Protocol):
    """The local training of one client, as `sgd` makes it."""

    def __call__(
        self,
        key: Key,
        stepsize: Any,
        params: Params,
        data: PyTree,
        correction: Callable[[Params], Params] | None = None,
    ) -> tuple[Params, Array]:
        """Return the trained params and the loss at the first step."""
        ...


def all_rows(key: Key, data: PyTree) -> PyTree:
    """Return `data` unchanged: a step uses all rows of the client, for exact gradients."""
    return data


def _weights(data: PyTree) -> Array | None:
    return data.get("weights") if isinstance(data, dict) else getattr(data, "weights", None)


def _with_weights(data: PyTree, weights: Array) -> PyTree:
    return {**data, "weights": weights} if isinstance(data, dict) else data._replace(weights=weights)


def minibatch(size: int) -> Sample:
    """Draw `size` of a client's rows, uniformly with replacement.

    If the data has `weights` (a field, or a key of a dictionary), only rows of positive weight are drawn, and their
    weights are scaled by N_i / size, so that the gradient is unbiased.  Padding must have weight 0 and be last, as in
    `data.partition`.

    Args:
        size: number of rows, at least 1.

    Returns:
        A function (key, data of one client) -> batch.  The leaves of the data are [rows, ...], those of the batch
        [size, ...].
    """
    if size < 1:
        raise ValueError(f"minibatches: size must be at least 1, got {size}")

    def draw(key: Key, data: PyTree) -> PyTree:
        counts = {leaf.shape[0] if leaf.ndim else 0 for leaf in jax.tree.leaves(data)}
        if len(counts) != 1 or 0 in counts:
            shapes = [leaf.shape for leaf in jax.tree.leaves(data)]
            raise ValueError(f"minibatches: every leaf of a client's data must be [rows, ...], got shapes {shapes}")
        weights = _weights(data)
        rows: Any = counts.pop() if weights is None else (weights > 0).sum()
        picked = random_words.randint(key, (size,), 0, rows)
        taken = jax.tree.map(lambda leaf: leaf[picked], data)
        if weights is None:
            return taken
        return _with_weights(taken, weights[picked] * (rows / size).astype(weights.dtype))

    return draw


def check_batch(size: int, data: PyTree) -> None:
    """Raise a ValueError unless every client has at least `size` rows.

    `minibatch` cannot check this itself: it draws with replacement.  Call this function on the host, before a run.

    Args:
        size: number of rows of a minibatch.
        data: leaves [n, rows, ...].  Rows of weight 0 are padding and do not count.
    """
    weights = _weights(data)
    rows = [jax.tree.leaves(data)[0].shape[1]] if weights is None else (weights > 0).sum(axis=1).tolist()
    fewest = min(range(len(rows)), key=lambda client: rows[client])
    if not 1 <= size <= rows[fewest]:
        raise ValueError(
            f"batch={size}, but client {fewest} has {rows[fewest]} rows; allowed: 1 to {rows[fewest]}, the rows of the "
            "smallest client"
        )


def sgd(value_and_grad: ValueAndGrad, sample: Sample, steps: int) -> Train:
    """Make a function that takes gradient steps on one client.

        x <- x - stepsize (grad f(x; sample) + correction(x))

    Args:
        value_and_grad: (params, batch) -> (loss, gradient like params).
        sample: (key, data of one client) -> batch, drawn anew for each step.
        steps: number of steps, at least 1.

    Returns:
        train(key, stepsize, params, data, correction=None) -> (params, loss at the first step).  `correction` is a
        function params -> a pytree like params; None adds nothing.
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")

    def train(
        key: Key,
        stepsize: Any,
        params: Params,
        data: PyTree,
        correction: Callable[[Params], Params] | None = None,
    ) -> tuple[Params, Array]:
        def gradient_step(params: Params, number: Array) -> tuple[Params, Array]:
            loss, grad = value_and_grad(params, sample(jax.random.fold_in(key, number), data))
            grad = grad if correction is None else tree.add(grad, correction(params))
            return tree.add_scaled(params, -stepsize, grad), loss

        params, losses = jax.lax.scan(gradient_step, params, jax.numpy.arange(steps))
        return params, losses[0]

    return train
