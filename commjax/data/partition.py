"""Partition the rows of a data set among clients."""

import warnings
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from jaxtyping import Float, Integer, Shaped

from commjax.data.dealing import deal, proportional_sizes, redraw

Rows = Sequence[Integer[np.ndarray, "_"]]


def blocks(
    num_rows: int,
    n: int,
    *,
    seed: int | None = None,
    remainder: Literal["spread", "last"] = "spread",
    overlap: int = 1,
) -> list[np.ndarray]:
    """Split the rows into ``n`` blocks, one per client, in file order or shuffled.

    Thesis: Sec. A.3.1 (n blocks, ``remainder="last"``, overlap xi).
    Differs (docs/errata.md): E2, E14 (Table A.2 was made in file order; the text says "after random shuffling").

    Args:
        num_rows: The number of rows.
        n: The number of clients.
        seed: The seed of the shuffle; None keeps the file order.
        remainder: "spread" gives sizes that differ by at most 1. "last" gives num_rows//n rows to every client, and the
            rest to the last client.
        overlap: The number xi of blocks per client. Client i holds blocks i, ..., i+xi-1 without wrap-around: the last
            clients all hold the last xi blocks.

    Returns:
        The row ids of each client.

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


def label_wise(
    labels: Shaped[np.ndarray, "N"], n: int, *, seed: int | None = None, equal_sizes: bool = False
) -> list[np.ndarray]:
    """Split the rows so that the share of positive labels grows with the number of the client.

    Client i = 0, ..., n-1 has the preference r_pos = (i+1)/n for positive rows and r_neg = 1 - r_pos for negative rows.
    By default, positive rows are split in proportion to r_pos and negative rows in proportion to r_neg, every row once.
    Then the fraction of positive rows increases with i, but it is not r_pos.

    Thesis: Sec. B.4.2.
    Differs (docs/errata.md): S9 (i counts from 0). The thesis does not say which setting of ``equal_sizes`` it uses.

    Args:
        labels: The labels: -1 and +1, or 0 and 1.
        n: The number of clients.
        seed: The seed of the shuffle; None keeps the file order.
        equal_sizes: True gives every client m rows, of which round(m r_pos) are positive (1/2 is rounded up). m is as
            large as the data allows. The rows that do not fit are *left out*.

    Returns:
        The row ids of each client.

    >>> [ids.tolist() for ids in label_wise(np.array([-1, 1, 1, -1, 1, -1]), 2)]
    [[1, 0, 3, 5], [2, 4]]
    >>> [ids.tolist() for ids in label_wise(np.array([-1, 1, 1, -1, 1, -1]), 2, equal_sizes=True)]
    [[1, 0], [2, 4]]
    """
    classes = np.unique(labels).tolist()
    if not (set(classes) <= {-1, 1} or set(classes) <= {0, 1}):
        raise ValueError(f"labels are {classes[:5]}; allowed: -1 and +1, or 0 and 1")
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
        num_positive, num_negative = (
            proportional_sizes(len(positive), ratio),
            proportional_sizes(len(negative), n - ratio),
        )
    for i in np.flatnonzero(num_positive + num_negative == 0)[:1]:
        raise ValueError(
            f"label_wise: client {i} of n={n} would be empty with {len(positive)} positive and "
            f"{len(negative)} negative rows; allowed: fewer clients, or more rows of both labels"
        )
    parts = zip(deal(positive, num_positive), deal(negative, num_negative))
    return [np.concatenate(part) for part in parts]


def feature_wise(features: Float[np.ndarray, "N d"], n: int, *, seed: int = 0) -> list[np.ndarray]:
    """Give each client one cluster of k-means with ``n`` clusters.

    Needs scikit-learn, ``commjax[data]``. k-means runs on one thread, so that the order of the sums, and hence the
    clusters, is always the same.

    Thesis: Sec. B.4.2.

    Args:
        features: The features, one example a row.
        n: The number of clients.
        seed: The seed of k-means.

    Returns:
        The row ids of each client, in file order. The clients are ordered by their first row.

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
        # The warning says that there are fewer distinct points than clusters, which is refused below.
        warnings.simplefilter("ignore", ConvergenceWarning)
        clusters = KMeans(n, n_init=1, random_state=seed).fit_predict(features)  # pyright: ignore[reportArgumentType]
    names, rows = by_group(clusters)
    if len(names) < n:
        raise ValueError(f"k-means found {len(names)} non-empty clusters for n={n}; allowed: n <= distinct rows")
    return sorted(rows, key=lambda ids: ids[0])


def quantity_wise(
    num_rows: int, n: int, *, concentration: float = 0.5, seed: int = 0, minimum: int = 1, tries: int = 100
) -> list[np.ndarray]:
    """Shuffle the rows and draw the sizes of the clients from a Dirichlet distribution.

    The sizes are in proportion to a Dirichlet(concentration, ..., concentration) draw.

    Thesis: Sec. B.4.2.
    Differs (docs/errata.md): S9 (concentration 1 makes shares uniform on the simplex, not equal; they become equal as
    the concentration grows).

    Args:
        num_rows: The number of rows.
        n: The number of clients.
        concentration: The parameter of the Dirichlet distribution.
        seed: The seed of the shuffle and of the draw.
        minimum: A draw that gives a client fewer rows is repeated.
        tries: The largest number of draws. If all of them fail, a ValueError is raised.

    Returns:
        The row ids of each client.

    >>> [len(ids) for ids in quantity_wise(100, 3)]
    [23, 29, 48]
    """
    rng = np.random.default_rng(seed)

    def draw() -> list[np.ndarray]:
        sizes = proportional_sizes(num_rows, rng.dirichlet(np.full(n, concentration)))
        return deal(rng.permutation(num_rows), sizes)

    return redraw(draw, n, concentration, minimum, tries)


def label_dirichlet(
    labels: Shaped[np.ndarray, "N"],
    n: int,
    *,
    concentration: float = 0.5,
    seed: int = 0,
    minimum: int = 1,
    tries: int = 100,
) -> list[np.ndarray]:
    """Shuffle the rows of each class and split them in proportion to a Dirichlet draw over the clients.

    The clients differ in their classes and in their sizes.

    Thesis: Sec. C.2.2.
    Differs: the thesis, like FedCR, draws for each client its shares of the classes. The clients then pick rows until
    no row is left.

    Args:
        labels: The class of each row.
        n: The number of clients.
        concentration: The parameter of the Dirichlet distribution.
        seed: The seed of the shuffles and of the draws.
        minimum: A draw that gives a client fewer rows is repeated.
        tries: The largest number of draws. If all of them fail, a ValueError is raised.

    Returns:
        The row ids of each client.

    >>> rows = label_dirichlet(np.array([0, 1] * 50), 2)
    >>> [np.bincount(ids % 2).tolist() for ids in rows]
    [[50, 36], [0, 14]]
    """
    rng = np.random.default_rng(seed)
    _, classes = by_group(labels)

    def draw() -> list[np.ndarray]:
        shares = [rng.dirichlet(np.full(n, concentration)) for _ in classes]
        dealt = [deal(rng.permutation(ids), proportional_sizes(len(ids), share)) for ids, share in zip(classes, shares)]
        return [np.concatenate(parts) for parts in zip(*dealt)]

    return redraw(draw, n, concentration, minimum, tries)


def class_wise(labels: Shaped[np.ndarray, "N"], n: int, classes_per_client: int, *, seed: int = 0) -> list[np.ndarray]:
    """Give every client ``classes_per_client`` of the classes, and split the rows of a class evenly among its clients.

    Every class has at least one client. The numbers of clients of two classes differ by at most 1. The clients of a
    class get numbers of its rows that differ by at most 1.

    Thesis: Sec. C.2.2 (FashionMNIST, EMNIST-L, CIFAR10: 5 of 10 classes; CIFAR100: 15 of 100).
    Differs (docs/errata.md): F23 (the released code gives each client 5 *consecutive* classes).

    Args:
        labels: The class of each row.
        n: The number of clients.
        classes_per_client: The number of classes of each client.
        seed: The seed of the assignment and of the shuffles.

    Returns:
        The row ids of each client.

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
        # Take the classes with the fewest holders so far, ties at random: numbers of holders differ by at most 1.
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
    """Split the rows by group, for example by user: the natural partition.

    Args:
        groups: The group of each row.

    Returns:
        The sorted names of the groups, and for each group its row ids in file order.

    >>> names, rows = by_group(["b", "a", "b"])
    >>> names.tolist(), [ids.tolist() for ids in rows]
    (['a', 'b'], [[1], [0, 2]])
    """
    names, group, sizes = np.unique(np.asarray(groups), return_inverse=True, return_counts=True)
    return names, deal(np.argsort(group, kind="stable"), sizes)


def holdout(rows: Rows, fraction: float, *, seed: int = 0) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Split each client's rows at random into a training part and a test part.

    The test part has round(fraction N_i) rows; both parts have at least 1.
    The split of client i depends only on (seed, i).

    Args:
        rows: The row ids of each client, at least 2.
        fraction: The fraction of test rows.
        seed: The seed of the split.

    Returns:
        The training row ids and the test row ids of each client. Both keep the order of the rows.

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
