"""The data of a round: all rows of each client, or a minibatch of them."""

from typing import Protocol, runtime_checkable

import jax
from jaxtyping import Array, PyTree, Shaped

from commjax.core import checks, local
from commjax.core.base import Key


@runtime_checkable
class BatchFn(Protocol):
    """A function that chooses the data of a round."""

    def __call__(self, key: Key, ids: Shaped[Array, "n"], data: PyTree, /) -> PyTree:
        """Return the batch of the clients `ids` [n], with a leading client axis, from their rows `data`."""
        ...


def full_batch(key: Key, ids: Shaped[Array, "n"], data: PyTree) -> PyTree:
    """Return `data` unchanged: every round uses all rows, for exact gradients."""
    return data


def minibatches(size: int) -> BatchFn:
    """Draw a `local.minibatch(size)` for each client in every round, the same on any number of devices.

    Args:
        size: rows of a minibatch, at most the number of rows of each client.  Padding counts as rows here.

    Returns:
        A `batch_fn` for `run`.  It raises a ValueError if the data has fewer than `size` rows.
    """
    draw = local.minibatch(size)

    def batch(key: Key, ids: Shaped[Array, "n"], data: PyTree) -> PyTree:
        checks.minibatch_of(size, data)
        return jax.vmap(lambda client, rows: draw(jax.random.fold_in(key, client), rows))(ids, data)

    return batch
