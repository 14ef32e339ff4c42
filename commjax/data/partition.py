"""Which client holds which rows, and the rows of all clients stacked."""

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Integer, PyTree, Shaped

from commjax.data.libsvm import Dataset

Rows = Sequence[Integer[np.ndarray, "_"]]


class ClientData(NamedTuple):
    """The rows of all clients, stacked; ``jax.vmap`` hands one client's slice (no ``n``) to a loss.

    A client's loss is ``sum(weights * loss of each row)``: 1/N_i on its N_i rows, 0 on padding.

    >>> ClientData(np.ones((3, 2, 5)), np.ones((3, 2)), np.full((3, 2), 0.5)).labels.shape
    (3, 2)
    """

    features: Float[Any, "n m d"]
    labels: Float[Any, "n m"]
    weights: Float[Any, "n m"]


def pool(size: int) -> Callable[[ClientData, Float[Array, "m"]], ClientData]:
    """What makes one client of a cohort's: at most `size` rows, client i's weighted by shares_i, padding left out.

    For a loss that is a weighted sum over rows plus a regulariser, and shares that add up to 1,

        loss(x, pool(size)(data, shares)) = sum_i shares_i loss(x, data_i).

    A cohort with more than `size` rows gets NaN for weights: nothing is dropped in silence.

    >>> two = ClientData(jnp.ones((2, 3, 1)), jnp.ones((2, 3)), jnp.array([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]]))
    >>> pool(3)(two, jnp.array([0.25, 0.75])).weights.tolist()
    [0.125, 0.125, 0.75]
    """
    if size < 1:
        raise ValueError(f"size={size}; allowed: at least 1 row")

    def pooled(data: ClientData, shares: Float[Array, "m"]) -> ClientData:
        rows = jax.tree.map(lambda leaf: leaf.reshape(-1, *leaf.shape[2:]), data)
        weights = (shares[:, None] * data.weights).reshape(-1)
        present = weights > 0
        at = jnp.nonzero(present, size=size, fill_value=len(weights))[0]
        weights = jnp.where(jnp.sum(present) <= size, weights.at[at].get(mode="fill", fill_value=0), jnp.nan)
        return ClientData(rows.features[at], rows.labels[at], weights)

    return pooled


class Examples(NamedTuple):
    """As ``ClientData``, for networks: inputs and targets of any shape and dtype.

    >>> Examples(np.ones((3, 2, 8, 8, 1)), np.ones((3, 2), np.int32), np.full((3, 2), 0.5)).targets.shape
    (3, 2)
    """

    inputs: Shaped[Any, "n m ..."]
    targets: Shaped[Any, "n m ..."]
    weights: Float[Any, "n m"]


def blocks(
    num_rows: int,
    n: int,
    *,
    seed: int | None = None,
    remainder: Literal["spread", "last"] = "spread",
    overlap: int = 1,
) -> list[np.ndarray]:
    """Row ids of each of ``n`` clients: blocks of the rows in file order, or shuffled by ``seed``.

    ``remainder="spread"``: sizes differ by at most 1; ``"last"``: num_rows//n each, the rest to the last.
    ``overlap=xi``: client i holds blocks i, ..., i+xi-1, without wrap-around: the last clients all hold the
    last xi blocks.

    Thesis: L2950 (n blocks, ``remainder="last"``, overlap xi).
    Differs: E2, E14: tab10 was made in file order, though the text says "after random shuffling".

    >>> [ids.tolist() for ids in blocks(7, 3)]
    [[0, 1, 2], [3, 4], [5, 6]]
    >>> [ids.tolist() for ids in blocks(7, 3, remainder="last", overlap=2)]
    [[0, 1, 2, 3], [2, 3, 4, 5, 6], [2, 3, 4, 5, 6]]
    """
    if not 1 <= n <= num_rows:
        raise ValueError(f"n={n} clients for num_rows={num_rows}; allowed: 1 <= n <= num_rows")
    if not 1 <= overlap <= n:
        raise ValueError(f"overlap={overlap}; allowed: 1 <= overlap <= n={n}")
    if remainder not in ("spread", "last"):
        raise ValueError(f"remainder={remainder!r}; allowed: 'spread', 'last'")
    ids = np.arange(num_rows)
    if seed is not None:
        ids = np.random.default_rng(seed).permutation(ids)
    if remainder == "spread":
        pieces = np.array_split(ids, n)
    else:
        size = num_rows // n
        pieces = np.split(ids, [size * i for i in range(1, n)])
    starts = [min(i, n - overlap) for i in range(n)]
    return [np.concatenate(pieces[start : start + overlap]) for start in starts]


def _sizes(total: int, shares: np.ndarray) -> np.ndarray:
    """Whole numbers in proportion to ``shares`` that sum to ``total``: the largest remainders are rounded up."""
    exact = total * shares / shares.sum()
    sizes = np.floor(exact).astype(int)
    largest = np.argsort(sizes - exact, kind="stable")[: total - sizes.sum()]
    sizes[largest] += 1
    return sizes


def _deal(ids: np.ndarray, sizes: Sequence[int] | np.ndarray) -> list[np.ndarray]:
    """The first sizes[0] ids, the next sizes[1], and so on; what is left over is left out."""
    ends = np.cumsum(sizes)
    return [ids[end - size : end] for end, size in zip(ends, sizes)]


def label_wise(
    labels: Shaped[np.ndarray, "N"], n: int, *, seed: int | None = None, equal_sizes: bool = False
) -> list[np.ndarray]:
    """Client i = 0, ..., n-1 prefers positive rows by r_pos = (i+1)/n, negative ones by r_neg = 1 - r_pos.

    Positive rows are shared out in proportion to r_pos and negative rows in proportion to r_neg, every row once;
    so clients are positive in that order, but r_pos is not the part of their rows that is. ``equal_sizes=True``
    makes it so: m rows each, round(m r_pos) of them positive (1/2 up), m as large as the data allows, and the
    rows that do not fit are *left out*. Rows are in file order, or shuffled by ``seed``.

    Thesis: L3823.
    Differs: the text leaves open which of the two is meant; S9 (i counts from 0).

    >>> [ids.tolist() for ids in label_wise(np.array([-1, 1, 1, -1, 1, -1]), 2)]
    [[1, 0, 3, 5], [2, 4]]
    >>> [ids.tolist() for ids in label_wise(np.array([-1, 1, 1, -1, 1, -1]), 2, equal_sizes=True)]
    [[1, 0], [2, 4]]
    """
    found = np.unique(labels).tolist()
    if not (set(found) <= {-1, 1} or set(found) <= {0, 1}):
        raise ValueError(f"labels are {found[:5]}; allowed: -1 and +1, or 0 and 1")
    if not 2 <= n <= len(labels):
        raise ValueError(f"n={n} clients for {len(labels)} labels; allowed: 2 <= n <= number of labels")
    ids = np.arange(len(labels)) if seed is None else np.random.default_rng(seed).permutation(len(labels))
    positive, negative = ids[labels[ids] > 0], ids[labels[ids] <= 0]
    ratio = np.arange(1, n + 1)  # n r_pos
    if equal_sizes:

        def split(m: int) -> tuple[np.ndarray, np.ndarray]:
            num_positive = (2 * m * ratio + n) // (2 * n)
            return num_positive, m - num_positive

        sizes = (split(m) for m in range(len(labels) // n, 0, -1))
        fits = ((p, q) for p, q in sizes if p.sum() <= len(positive) and q.sum() <= len(negative))
        empty = np.zeros(n, int)
        num_positive, num_negative = next(fits, (empty, empty))
    else:
        num_positive, num_negative = _sizes(len(positive), ratio), _sizes(len(negative), n - ratio)
    for i in np.flatnonzero(num_positive + num_negative == 0)[:1]:
        raise ValueError(
            f"label_wise: client {i} of n={n} would be empty with {len(positive)} positive and "
            f"{len(negative)} negative rows; allowed: fewer clients, or more rows of both labels"
        )
    parts = zip(_deal(positive, num_positive), _deal(negative, num_negative))
    return [np.concatenate(part) for part in parts]


def feature_wise(features: Float[np.ndarray, "N d"], n: int, *, seed: int = 0) -> list[np.ndarray]:
    """Each client holds a cluster of k-means with ``n`` clusters, rows in file order, clients by their first row.

    Needs scikit-learn, ``commjax[data]``. One thread, so that the order of sums, hence the clusters, is always the same.

    Thesis: L3824.

    >>> [ids.tolist() for ids in feature_wise(np.array([[0.0], [9.0], [0.1], [9.2], [9.1]]), 2)]
    [[0, 2], [1, 3, 4]]
    """
    if not 1 <= n <= len(features):
        raise ValueError(f"n={n} clients for {len(features)} rows; allowed: 1 <= n <= number of rows")
    try:
        from sklearn.cluster import KMeans
        from sklearn.exceptions import ConvergenceWarning
        from threadpoolctl import threadpool_limits
    except ImportError as error:
        raise ImportError("feature_wise needs scikit-learn: pip install 'commjax[data]'") from error
    with threadpool_limits(1), warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # "fewer distinct points than clusters": refused below
        clusters = KMeans(n, n_init=1, random_state=seed).fit_predict(features)  # pyright: ignore[reportArgumentType]
    found, rows = by_group(clusters)
    if len(found) < n:
        raise ValueError(f"k-means found {len(found)} non-empty clusters for n={n}; allowed: n <= distinct rows")
    return sorted(rows, key=lambda ids: ids[0])


def _redrawn(draw: Callable[[], list[np.ndarray]], n: int, concentration: float, minimum: int, tries: int):
    """The first of at most ``tries`` draws in which every client has ``minimum`` rows."""
    if n < 1 or tries < 1 or minimum < 1:
        raise ValueError(f"n={n}, tries={tries}, minimum={minimum}; allowed: at least 1 each")
    if not (np.isfinite(concentration) and concentration > 0):
        raise ValueError(f"concentration={concentration}; allowed: finite and > 0")
    for _ in range(tries):
        rows = draw()
        if min(map(len, rows)) >= minimum:
            return rows
    raise ValueError(
        f"a client had fewer than minimum={minimum} rows in each of tries={tries} Dirichlet draws with "
        f"concentration={concentration} for n={n} clients; allowed: what a draw can give"
    )


def quantity_wise(
    num_rows: int, n: int, *, concentration: float = 0.5, seed: int = 0, minimum: int = 1, tries: int = 100
) -> list[np.ndarray]:
    """Shuffled rows; the sizes of the clients are in proportion to a Dirichlet(concentration, ..., concentration) draw.

    A draw that leaves a client fewer than ``minimum`` rows is redrawn, at most ``tries`` times.

    Thesis: L3825.
    Differs: S9 (concentration 1 is uniform on the simplex, not equal sizes; the larger, the more equal).

    >>> [len(ids) for ids in quantity_wise(100, 3)]
    [23, 29, 48]
    """
    rng = np.random.default_rng(seed)

    def draw() -> list[np.ndarray]:
        sizes = _sizes(num_rows, rng.dirichlet(np.full(n, concentration)))
        return _deal(rng.permutation(num_rows), sizes)

    return _redrawn(draw, n, concentration, minimum, tries)


def label_dirichlet(
    labels: Shaped[np.ndarray, "N"],
    n: int,
    *,
    concentration: float = 0.5,
    seed: int = 0,
    minimum: int = 1,
    tries: int = 100,
) -> list[np.ndarray]:
    """The shuffled rows of each class, shared out in proportion to a Dirichlet draw over the clients.

    Clients differ in their classes and in their sizes; redrawn as in ``quantity_wise``.

    Thesis: L3994.
    Differs: the thesis, after FedCR, draws each client's shares of the classes and lets clients pick until no row is left.

    >>> rows = label_dirichlet(np.array([0, 1] * 50), 2)
    >>> [np.bincount(ids % 2).tolist() for ids in rows]
    [[50, 36], [0, 14]]
    """
    rng = np.random.default_rng(seed)
    _, classes = by_group(labels)

    def draw() -> list[np.ndarray]:
        shares = [rng.dirichlet(np.full(n, concentration)) for _ in classes]
        dealt = [_deal(rng.permutation(ids), _sizes(len(ids), share)) for ids, share in zip(classes, shares)]
        return [np.concatenate(parts) for parts in zip(*dealt)]

    return _redrawn(draw, n, concentration, minimum, tries)


def class_wise(labels: Shaped[np.ndarray, "N"], n: int, classes_per_client: int, *, seed: int = 0) -> list[np.ndarray]:
    """Every client holds ``classes_per_client`` of the classes; the rows of a class go evenly to its holders.

    Every class has a holder, and the numbers of holders differ by at most 1, as do a class's rows per holder.

    Thesis: L3992 (FashionMNIST, EMNIST-L, CIFAR10: 5 of 10 classes; CIFAR100: 15 of 100).
    Differs: F23 (the released code gives each client 5 *consecutive* classes).

    >>> rows = class_wise(np.array([0, 1, 2] * 4), n=3, classes_per_client=2)
    >>> [np.bincount(ids % 3).tolist() for ids in rows]
    [[2, 2], [2, 0, 2], [0, 2, 2]]
    """
    names, classes = by_group(labels)
    if not 1 <= classes_per_client <= len(names) <= n * classes_per_client:
        raise ValueError(
            f"classes_per_client={classes_per_client} for n={n} clients and {len(names)} classes; "
            "allowed: 1 <= classes_per_client <= classes <= n * classes_per_client"
        )
    rng = np.random.default_rng(seed)
    holders: list[list[int]] = [[] for _ in names]
    for i in rng.permutation(n):
        # The classes with the fewest holders so far, ties by chance: numbers of holders never differ by more than 1.
        tie_break = rng.permutation(len(names))
        fewest = np.lexsort(np.stack([tie_break, [len(held) for held in holders]]))
        for c in fewest[:classes_per_client]:
            holders[c].append(int(i))
    parts: list[list[np.ndarray]] = [[] for _ in range(n)]
    for name, ids, held in zip(names, classes, holders):
        if len(ids) < len(held):
            raise ValueError(f"class {name} has {len(ids)} rows for {len(held)} clients; allowed: at least one each")
        for i, part in zip(held, np.array_split(rng.permutation(ids), len(held))):
            parts[i].append(part)
    return [np.concatenate(part) for part in parts]


def by_group(groups: Shaped[np.ndarray, "N"] | Sequence[Any]) -> tuple[np.ndarray, list[np.ndarray]]:
    """The natural partition: the sorted names of the groups, and each group's rows in file order.

    >>> names, rows = by_group(["b", "a", "b"])
    >>> names.tolist(), [ids.tolist() for ids in rows]
    (['a', 'b'], [[1], [0, 2]])
    """
    names, group, sizes = np.unique(np.asarray(groups), return_inverse=True, return_counts=True)
    return names, _deal(np.argsort(group, kind="stable"), sizes)


def holdout(rows: Rows, fraction: float, *, seed: int = 0) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Split each client's rows at random into (train, test): round(fraction N_i) test rows, at least 1 of both.

    The split of client i depends on (seed, i) only; both parts keep the order of the rows.

    >>> train, test = holdout([np.arange(4), np.arange(4, 6)], 0.25)
    >>> [ids.tolist() for ids in train], [ids.tolist() for ids in test]
    ([[0, 1, 3], [5]], [[2], [4]])
    """
    if not 0 < fraction < 1:
        raise ValueError(f"fraction={fraction}; allowed: 0 < fraction < 1")
    train, test = [], []
    for i, ids in enumerate(rows):
        if len(ids) < 2:
            raise ValueError(f"holdout: client {i} has {len(ids)} row(s); allowed: at least 2")
        held = np.zeros(len(ids), bool)
        size = min(max(round(fraction * len(ids)), 1), len(ids) - 1)
        held[np.random.default_rng([seed, i]).permutation(len(ids))[:size]] = True
        train.append(ids[~held])
        test.append(ids[held])
    return train, test


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
    """ValueError unless features are finite, labels are -1 or +1, and every client has rows of the data set.

    >>> check(Dataset(np.eye(2), np.array([-1.0, 1.0]), "two"), [np.array([0]), np.array([2])])
    Traceback (most recent call last):
        ...
    ValueError: client 1 has a row id outside two's 0..1: 2 to 2
    """
    _check_rows(rows, len(dataset.features), dataset.name)
    bad = np.flatnonzero(~np.isfinite(dataset.features).all(axis=1) | (np.abs(dataset.labels) != 1.0))
    if bad.size:
        raise ValueError(f"{dataset.name}: row {bad[0]} has a non-finite feature or a label that is not -1 or +1")


def stack(dataset: Dataset, rows: Rows) -> ClientData:
    """Gather each client's rows and pad to the longest client (label +1, features 0, weight 0).

    The padding costs memory: with ``remainder="last"`` every client is as long as the last one.

    >>> two = Dataset(np.eye(2), np.array([-1.0, 1.0]), "two")
    >>> stack(two, [np.array([0, 1]), np.array([1])]).weights
    array([[0.5, 0.5],
           [1. , 0. ]])
    """
    check(dataset, rows)
    n, longest = len(rows), max(map(len, rows))
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
    """Gather each client's rows of every array, padded to the longest client; and the weights, 1/N_i or 0.

    Dtypes stay as they are. A padded row is the client's first row again, so that integers stay valid, with weight 0.

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
    """The ``stack_rows`` of inputs and targets, for ``problems.networks`` and ``runner.minibatches``.

    >>> examples(np.ones((5, 8, 8, 1)), np.arange(5), blocks(5, 2)).inputs.shape
    (2, 3, 8, 8, 1)
    """
    (inputs, targets), weights = stack_rows((inputs, targets), rows, dtype=dtype)
    return Examples(inputs, targets, weights)


def row_weights(rows: Rows, num_rows: int) -> Float[np.ndarray, "N"]:
    """What each row weighs in f = (1/n) sum_i f_i: the sum of 1/(n N_i) over the clients that hold it.

    >>> row_weights([np.array([0, 1]), np.array([1])], 3)
    array([0.25, 0.75, 0.  ])
    """
    share = np.repeat([1 / (len(rows) * len(ids)) for ids in rows], [len(ids) for ids in rows])
    return np.bincount(np.concatenate(rows), weights=share, minlength=num_rows)
