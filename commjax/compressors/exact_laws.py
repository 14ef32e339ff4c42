"""Exact laws of compressors, enumerated in NumPy, from which `certify` and the tests compute expectations.

A law is `(probabilities [m], values [m, d])` for one vector, or `[m, n, d]` for the joint law of n clients.
"""

import itertools
from collections.abc import Callable

import numpy as np

Law = tuple[np.ndarray, np.ndarray]


def top(x: np.ndarray, k: int) -> np.ndarray:
    """Return the mask of the k largest magnitudes; among equals, the first positions win.

    Args:
        x: vector [d].
        k: number of entries.

    Returns:
        Mask [d].
    """
    mask = np.zeros(len(x), bool)
    mask[np.argsort(-np.abs(x), kind="stable")[:k]] = True
    return mask


def subsets(x: np.ndarray, allowed: np.ndarray, k: int, factor: float = 1.0) -> Law:
    """Return the law that keeps k of the allowed coordinates, with every subset equally likely.

    Args:
        x: vector [d].
        allowed: mask [d] of the coordinates to choose from.
        k: number of kept coordinates.
        factor: factor of the kept entries.

    Returns:
        Probabilities [m] and values [m, d], where m is the number of subsets.
    """
    chosen = list(itertools.combinations(np.flatnonzero(allowed), k))
    values = np.zeros((len(chosen), len(x)))
    for row, where in zip(values, chosen):
        row[list(where)] = factor * x[list(where)]
    return np.full(len(chosen), 1 / len(chosen)), values


def coordinatewise(low: np.ndarray, high: np.ndarray, up: np.ndarray) -> Law:
    """Return the law in which each coordinate is `high` with probability `up`, else `low`, independently.

    Args:
        low: values [d].
        high: values [d].
        up: probabilities [d].

    Returns:
        Probabilities [2^d] and values [2^d, d].
    """
    choice = np.array(list(itertools.product([False, True], repeat=len(low))))
    return np.where(choice, up, 1 - up).prod(axis=1), np.where(choice, high, low)


def independent(law: Callable[[np.ndarray], Law]) -> Callable[[np.ndarray], Law]:
    """Return the joint law of clients that draw independently.

    Args:
        law: x [d] -> the law of one client.

    Returns:
        xs [n, d] -> the product law of n clients.
    """

    def joint(xs: np.ndarray) -> Law:
        laws = [law(x) for x in xs]
        picks = np.indices([len(p) for p, _ in laws]).reshape(len(laws), -1)
        probability = np.prod([p[pick] for (p, _), pick in zip(laws, picks)], axis=0)
        return probability, np.stack([v[pick] for (_, v), pick in zip(laws, picks)], axis=1)

    return joint


def certain(function: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], Law]:
    """Return the law of a deterministic compressor: one outcome of probability 1.

    Args:
        function: x [d] -> C(x) [d].

    Returns:
        xs [n, d] -> the joint law of n clients.
    """
    return lambda xs: (np.ones(1), np.array([[function(x) for x in xs]]))
