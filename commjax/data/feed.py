"""Clients whose rows are elsewhere: a feed knows who there is and fetches a cohort at a time, as arrays with a client axis."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int


class Cohort(NamedTuple):
    """Rows of some clients; `weights` are 1/N_i on a client's N_i rows and 0 on padding, which repeats its first row."""

    rows: dict[str, np.ndarray]  # each [m, length, ...]
    weights: Float[np.ndarray, "m length"]


class Feed(NamedTuple):
    """`ids` are the clients' names where they come from; a client's number is its position there.

    `fetch(numbers)` reads the rows of these clients only; all cohorts have the same `length`, so a program is compiled once.
    """

    ids: tuple[Any, ...]
    length: int
    fetch: Callable[[np.ndarray], Cohort]


def numbers(feed: Feed, ids: Sequence[Any]) -> Int[np.ndarray, "m"]:
    """The numbers of clients that go by these names.

    >>> numbers(Feed(("a", "b"), 1, lambda numbers: None), ["b"]).tolist()
    [1]
    """
    places = {name: place for place, name in enumerate(feed.ids)}
    for one in ids:
        if one not in places:
            raise ValueError(f"ids: {one!r} is in no feed of these {len(feed.ids)} clients, such as {feed.ids[:3]}")
    return np.array([places[one] for one in ids], np.int32)


def make(
    ids: Sequence[Any], sizes: Sequence[int], read: Callable[[int, int], dict[str, np.ndarray]], rows: int | None = None
) -> Feed:
    """A feed from `read(number, most) -> {name: [at most `most` rows, ...]}`; `rows`: so many of a client at most, by default all"""
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

    def fetch(numbers: np.ndarray) -> Cohort:
        if len(numbers) == 0:
            raise ValueError("numbers: the cohort is empty; allowed: at least one client")
        outside = [int(one) for one in np.asarray(numbers) if not 0 <= one < len(ids)]
        if outside:
            raise ValueError(f"numbers: {outside[0]} is in no feed of {len(ids)} clients, from 0 to {len(ids) - 1}")
        found = [read(int(one), length) for one in numbers]
        sizes = np.array([len(next(iter(one.values()))) for one in found])
        place = np.arange(length)
        index = np.where(place < sizes[:, None], place, 0)
        stacked = {name: np.stack([np.asarray(one[name])[at] for one, at in zip(found, index)]) for name in found[0]}
        return Cohort(stacked, np.where(place < sizes[:, None], 1 / sizes[:, None], 0.0))

    return Feed(tuple(ids), length, fetch)
