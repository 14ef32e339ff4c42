"""The rows of all clients in one array with a leading client axis."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, PyTree, Shaped

from commjax.data.libsvm import Dataset
from commjax.data.partition import Rows


class ClientData(NamedTuple):
    """The rows of all n clients, padded to m rows each.

    ``jax.vmap`` passes one client's slice (no axis ``n``) to a loss. The loss of a client is
    ``sum(weights * loss of each row)``.

    Attributes:
        features: The features, 0 on padding.
        labels: The labels, -1 or +1; +1 on padding.
        weights: 1/N_i on the N_i rows of client i, 0 on padding.

    >>> ClientData(np.ones((3, 2, 5)), np.ones((3, 2)), np.full((3, 2), 0.5)).labels.shape
    (3, 2)
    """

    features: Float[Any, "n m d"]
    labels: Float[Any, "n m"]
    weights: Float[Any, "n m"]

    def times(self, x: Float[Array, "d"]) -> Float[Array, "m"]:
        """Multiply the features of one client by x."""
        return self.features @ x


class Columns(NamedTuple):
    """One client's data with the features stored by column.

    On a CPU, products of the features, or of their transpose, with many vectors are faster in this layout.

    Attributes:
        columns: The transposed features.
        labels: The labels, -1 or +1.
        weights: The weight of each row in the loss.

    >>> data = Columns(jnp.array([[1.0, 3.0], [2.0, 4.0]]), jnp.ones(2), jnp.ones(2))
    >>> data.times(jnp.array([1.0, -1.0])).tolist(), data.features.tolist()
    ([-1.0, -1.0], [[1.0, 2.0], [3.0, 4.0]])
    """

    columns: Float[Any, "d m"]
    labels: Float[Any, "m"]
    weights: Float[Any, "m"]

    @property
    def features(self) -> Float[Any, "m d"]:
        """The features by row, as in ``ClientData``."""
        return self.columns.T

    def times(self, x: Float[Array, "d"]) -> Float[Array, "m"]:
        """Multiply the features by x."""
        return x @ self.columns


class Examples(NamedTuple):
    """Like ``ClientData``, for networks: inputs and targets of any shape and dtype.

    Attributes:
        inputs: The inputs of the network. Padding repeats the client's first row.
        targets: The targets: a class, or an array of classes such as the next characters. Padded like `inputs`.
        weights: 1/N_i on the N_i rows of client i, 0 on padding.

    >>> Examples(np.ones((3, 2, 8, 8, 1)), np.ones((3, 2), np.int32), np.full((3, 2), 0.5)).targets.shape
    (3, 2)
    """

    inputs: Shaped[Any, "n m ..."]
    targets: Shaped[Any, "n m ..."]
    weights: Float[Any, "n m"]


def _check_rows(rows: Rows, num_rows: int, name: str) -> None:
    if len(rows) == 0:
        raise ValueError("rows is empty; allowed: one array of row ids for each of at least one client")
    for i, ids in enumerate(rows):
        if len(ids) == 0:
            raise ValueError(f"client {i} has no rows; allowed: at least one")
        low, high = int(ids.min()), int(ids.max())
        if low < 0 or high >= num_rows:
            raise ValueError(f"client {i} has a row id outside {name}'s 0..{num_rows - 1}: {low} to {high}")


def check(dataset: Dataset, rows: Rows) -> None:
    """Raise a ValueError unless features are finite, labels are -1 or +1, and every client has rows of the data set.

    Args:
        dataset: The data set.
        rows: The row ids of each client.

    >>> check(Dataset(np.eye(2), np.array([-1.0, 1.0]), "two"), [np.array([0]), np.array([2])])
    Traceback (most recent call last):
        ...
    ValueError: client 1 has a row id outside two's 0..1: 2 to 2
    """
    _check_rows(rows, len(dataset.features), dataset.name)
    bad = np.flatnonzero(~np.isfinite(dataset.features).all(axis=1) | (np.abs(dataset.labels) != 1.0))
    if bad.size:
        raise ValueError(f"{dataset.name}: row {bad[0]} has a non-finite feature or a label that is not -1 or +1")


def stack(dataset: Dataset, rows: Rows, longest: int | None = None) -> ClientData:
    """Gather the rows of each client and pad them to the same length.

    A padded row has features 0, label +1 and weight 0. Padding costs memory: with
    ``partition.blocks(remainder="last")`` every client is as long as the last one.

    Args:
        dataset: The data set.
        rows: The row ids of each client.
        longest: The number of rows per client after padding. The default is the size of the largest client.

    Returns:
        The data of all clients.

    >>> two = Dataset(np.eye(2), np.array([-1.0, 1.0]), "two")
    >>> stack(two, [np.array([0, 1]), np.array([1])]).weights
    array([[0.5, 0.5],
           [1. , 0. ]])
    """
    check(dataset, rows)
    n, needed = len(rows), max(map(len, rows))
    longest = needed if longest is None else longest
    if longest < needed:
        raise ValueError(f"longest={longest}; allowed: at least the {needed} rows of the longest client")
    features = np.zeros((n, longest, dataset.features.shape[1]))
    labels = np.ones((n, longest))
    weights = np.zeros((n, longest))
    for i, ids in enumerate(rows):
        features[i, : len(ids)] = dataset.features[ids]
        labels[i, : len(ids)] = dataset.labels[ids]
        weights[i, : len(ids)] = 1 / len(ids)
    return ClientData(features, labels, weights)


def stack_rows(
    arrays: PyTree[Shaped[np.ndarray, "_ ..."]], rows: Rows, *, dtype: DTypeLike = np.float32
) -> tuple[PyTree[Shaped[np.ndarray, "n m ..."]], Float[np.ndarray, "n m"]]:
    """Gather the rows of each client from every array and pad them to the largest client.

    A padded row repeats the client's first row, so that integers stay valid, and has weight 0. Dtypes stay as they are.

    Args:
        arrays: A pytree of arrays with the same number of rows.
        rows: The row ids of each client.
        dtype: The dtype of the weights.

    Returns:
        The pytree with arrays [n, m, ...], and the weights [n, m]: 1/N_i on the N_i rows of client i, 0 on padding.

    >>> images, weights = stack_rows(np.arange(3, dtype=np.uint8), [np.array([0, 1]), np.array([2])])
    >>> images.tolist(), weights.tolist()
    ([[0, 1], [2, 2]], [[0.5, 0.5], [1.0, 0.0]])
    """
    lengths = {len(leaf) for leaf in jax.tree.leaves(arrays)}
    if len(lengths) != 1:
        raise ValueError(f"arrays have {sorted(lengths)} rows; allowed: the same number in each of at least one array")
    _check_rows(rows, lengths.pop(), "the data")
    sizes = np.array([len(ids) for ids in rows])
    column = np.arange(sizes.max())
    index = np.stack([ids[np.where(column < len(ids), column, 0)] for ids in rows])
    weights = np.where(column < sizes[:, None], 1 / sizes[:, None], 0).astype(dtype)
    return jax.tree.map(lambda leaf: leaf[index], arrays), weights


def examples(
    inputs: Shaped[np.ndarray, "_ ..."],
    targets: Shaped[np.ndarray, "_ ..."],
    rows: Rows,
    *,
    dtype: DTypeLike = np.float32,
) -> Examples:
    """Apply ``stack_rows`` to inputs and targets, for ``models.networks`` and ``runner.minibatches``.

    Args:
        inputs: The inputs, one example a row.
        targets: The targets, one a row.
        rows: The row ids of each client.
        dtype: The dtype of the weights.

    Returns:
        The examples of all clients.

    >>> examples(np.ones((5, 8, 8, 1)), np.arange(5), [np.arange(3), np.arange(3, 5)]).inputs.shape
    (2, 3, 8, 8, 1)
    """
    (inputs, targets), weights = stack_rows((inputs, targets), rows, dtype=dtype)
    return Examples(inputs, targets, weights)


def row_weights(rows: Rows, num_rows: int) -> Float[np.ndarray, "N"]:
    """Compute the weight of each row in f = (1/n) sum_i f_i.

        weight of a row = sum of 1/(n N_i) over the clients i that hold the row

    Args:
        rows: The row ids of each client.
        num_rows: The number N of rows of the data set.

    Returns:
        The weight of each row.

    >>> row_weights([np.array([0, 1]), np.array([1])], 3)
    array([0.25, 0.75, 0.  ])
    """
    share = np.repeat([1 / (len(rows) * len(ids)) for ids in rows], [len(ids) for ids in rows])
    return np.bincount(np.concatenate(rows), weights=share, minlength=num_rows)


def pool(size: int) -> Callable[[ClientData, Float[Array, "m"]], Columns]:
    """Make a function that merges the data of a cohort into the data of one client, without padding.

    For a loss that is a weighted sum over rows plus a regulariser, and shares that add up to 1,

        loss(x, pool(size)(data, shares)) = sum_i shares_i loss(x, data_i).

    Args:
        size: The number of rows of the merged data. A cohort with more rows gets NaN weights: no row is dropped
            silently.

    Returns:
        A function of the cohort's ClientData (m clients) and of the shares [m], which returns the merged Columns.

    >>> two = ClientData(jnp.ones((2, 3, 1)), jnp.ones((2, 3)), jnp.array([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]))
    >>> pool(3)(two, jnp.array([0.25, 0.75])).weights.tolist()
    [0.125, 0.125, 0.75]
    """
    if size < 1:
        raise ValueError(f"size={size}; allowed: at least 1 row")

    def pooled(data: ClientData, shares: Float[Array, "m"]) -> Columns:
        rows = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), data)
        weights = (shares[:, None] * data.weights).reshape(-1)
        present = weights > 0
        at = jnp.nonzero(present, size=size, fill_value=len(weights))[0]
        weights = jnp.where(jnp.sum(present) <= size, weights.at[at].get(mode="fill", fill_value=0), jnp.nan)
        # Without the barrier the compiler undoes the transpose and multiplies by the rows.
        columns = jax.lax.optimization_barrier(rows.features[at].T)
        return Columns(columns, rows.labels[at], weights)

    return pooled
