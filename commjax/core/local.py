"""What a client does by itself between two exchanges: pick rows, take steps."""

from collections.abc import Callable
from typing import Any

import jax
from jaxtyping import Array, PyTree

from commjax.core import tree
from commjax.core.base import Key, Params

Sample = Callable[[Key, PyTree], PyTree]  # (key, data of one client) -> batch
ValueAndGrad = Callable[[Params, Any], tuple[Array, Params]]


def all_rows(key: Key, data: PyTree) -> PyTree:
    """Exact gradients."""
    return data


def _weights(data: PyTree) -> Array | None:
    return data.get("weights") if isinstance(data, dict) else getattr(data, "weights", None)


def _with_weights(data: PyTree, weights: Array) -> PyTree:
    return {**data, "weights": weights} if isinstance(data, dict) else data._replace(weights=weights)


def minibatch(size: int) -> Sample:
    """`size` of the client's rows, drawn uniformly with replacement.

    Data with `weights` (a field or a key; padding has weight 0 and stands last, see `data.partition`) is drawn from the rows
    that count, and reweighted so that the gradient is unbiased.
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
        picked = jax.random.randint(key, (size,), 0, rows)
        taken = jax.tree.map(lambda leaf: leaf[picked], data)
        if weights is None:
            return taken
        return _with_weights(taken, weights[picked] * (rows / size).astype(weights.dtype))

    return draw


def check_batch(size: int, data: PyTree) -> None:
    """ValueError unless every client (leading axis) has `size` rows, padding not counted; on the host, before a run.

    `minibatch` itself draws with replacement, and would not notice.
    """
    weights = _weights(data)
    rows = [jax.tree.leaves(data)[0].shape[1]] if weights is None else (weights > 0).sum(axis=1).tolist()
    fewest = min(range(len(rows)), key=lambda client: rows[client])
    if not 1 <= size <= rows[fewest]:
        raise ValueError(
            f"batch={size}, but client {fewest} has {rows[fewest]} rows; allowed: 1 to {rows[fewest]}, the rows of the smallest client"
        )


def sgd(value_and_grad: ValueAndGrad, sample: Sample, steps: int) -> Callable[..., tuple[Params, Array]]:
    """`train(key, stepsize, params, data, correction=None) -> (params, loss at the first step)`: `steps` times

    x <- x - stepsize (grad f(x; rows) + correction(x))
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")

    def train(key, stepsize, params, data, correction: Callable[[Params], Params] | None = None):
        def one(params, number):
            loss, grad = value_and_grad(params, sample(jax.random.fold_in(key, number), data))
            grad = grad if correction is None else tree.add(grad, correction(params))
            return tree.add_scaled(params, -stepsize, grad), loss

        params, losses = jax.lax.scan(one, params, jax.numpy.arange(steps))
        return params, losses[0]

    return train
