"""Feeds: read the rows of a cohort of clients from their source on demand, into arrays with a client axis."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int


class ClientRows(NamedTuple):
    """The rows of m clients, padded to the same length.

    Attributes:
        rows: Name of a feature -> array [m, length, ...]. Padding repeats the client's first row.
        weights: 1/N_i on the N_i rows of client i, 0 on padding.
    """

    rows: dict[str, np.ndarray]
    weights: Float[np.ndarray, "m length"]


class Feed(NamedTuple):
    """A set of clients and a function that reads the rows of some of them.

    Attributes:
        ids: The names of the clients. The number of a client is its position in `ids`.
        length: The number of rows of every client in a cohort, including padding. It is the same for all cohorts, so a
            program is compiled once.
        fetch: Function of client numbers [m] that reads the rows of these clients only and returns their ClientRows.
    """

    ids: tuple[Any, ...]
    length: int
    fetch: Callable[[np.ndarray], ClientRows]


def numbers(feed: Feed, ids: Sequence[Any]) -> Int[np.ndarray, "m"]:
    """Look up the numbers of clients by name.

    Args:
        feed: The feed.
        ids: Names of clients. A name that is not in `feed.ids` raises a ValueError.

    Returns:
        The numbers, in the order of `ids`.

    >>> numbers(Feed(("a", "b"), 1, lambda numbers: None), ["b"]).tolist()
    [1]
    """
    places = {name: place for place, name in enumerate(feed.ids)}
    for name in ids:
        if name not in places:
            raise ValueError(f"ids: {name!r} is in no feed of these {len(feed.ids)} clients, such as {feed.ids[:3]}")
    return np.array([places[name] for name in ids], np.int32)


def make(
    ids: Sequence[Any], sizes: Sequence[int], read: Callable[[int, int], dict[str, np.ndarray]], rows: int | None = None
) -> Feed:
    """Make a feed from a function that reads the rows of one client.

    Args:
        ids: The names of the clients, all different.
        sizes: The number of rows of each client.
        read: Function of a client's number and of a limit. It returns {feature: array [rows, ...]} with at most that
            many rows.
        rows: The largest number of rows that is read of a client; None reads all.

    Returns:
        The feed.
    """
    if not ids:
        raise ValueError("ids: the feed has no clients; allowed: at least one")
    if len(set(ids)) != len(ids):
        raise ValueError("ids: two clients have the same name")
    for name, size in zip(ids, sizes, strict=True):
        if size < 1:
            raise ValueError(f"client {name!r} has no rows; allowed: at least one")
    if rows is not None and rows < 1:
        raise ValueError(f"rows must be at least 1 (or None for all), got {rows}")
    length = max(sizes) if rows is None else min(rows, max(sizes))

    def fetch(numbers: np.ndarray) -> ClientRows:
        if len(numbers) == 0:
            raise ValueError("numbers: the cohort is empty; allowed: at least one client")
        outside = [int(number) for number in np.asarray(numbers) if not 0 <= number < len(ids)]
        if outside:
            raise ValueError(f"numbers: {outside[0]} is in no feed of {len(ids)} clients, from 0 to {len(ids) - 1}")
        clients = [read(int(number), length) for number in numbers]
        sizes = np.array([len(next(iter(client.values()))) for client in clients])
        place = np.arange(length)
        index = np.where(place < sizes[:, None], place, 0)
        stacked = {
            name: np.stack([np.asarray(client[name])[at] for client, at in zip(clients, index)]) for name in clients[0]
        }
        return ClientRows(stacked, np.where(place < sizes[:, None], 1 / sizes[:, None], 0.0))

    return Feed(tuple(ids), length, fetch)
