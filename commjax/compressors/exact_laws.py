"""Exact laws of compressors, by enumeration in NumPy: what `certify` and the tests of the theorems take expectations over.

A law is `(probabilities [m], values [m, d])` for one vector, or `[m, n, d]` for the joint law of n clients.
"""

import itertools
from collections.abc import Callable

import numpy as np

Law = tuple[np.ndarray, np.ndarray]


def top(x: np.ndarray, k: int) -> np.ndarray:
    """Mask of the k largest magnitudes, the first among equals."""
    mask = np.zeros(len(x), bool)
    mask[np.argsort(-np.abs(x), kind="stable")[:k]] = True
    return mask


def subsets(x: np.ndarray, allowed: np.ndarray, k: int, factor: float = 1.0) -> Law:
    """k of the allowed coordinates, every subset equally likely, times a factor."""
    chosen = list(itertools.combinations(np.flatnonzero(allowed), k))
    values = np.zeros((len(chosen), len(x)))
    for row, where in zip(values, chosen):
        row[list(where)] = factor * x[list(where)]
    return np.full(len(chosen), 1 / len(chosen)), values


def coordinatewise(low: np.ndarray, high: np.ndarray, up: np.ndarray) -> Law:
    """Each coordinate is `high` with probability `up`, else `low`, independently: 2^d outcomes."""
    choice = np.array(list(itertools.product([False, True], repeat=len(low))))
    return np.where(choice, up, 1 - up).prod(axis=1), np.where(choice, high, low)


def independent(law: Callable[[np.ndarray], Law]) -> Callable[[np.ndarray], Law]:
    """The joint law of clients that draw independently: a product."""

    def joint(xs: np.ndarray) -> Law:
        laws = [law(x) for x in xs]
        picks = np.indices([len(p) for p, _ in laws]).reshape(len(laws), -1)
        probability = np.prod([p[pick] for (p, _), pick in zip(laws, picks)], axis=0)
        return probability, np.stack([v[pick] for (_, v), pick in zip(laws, picks)], axis=1)

    return joint


def certain(function: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], Law]:
    """A deterministic compressor: one outcome."""
    return lambda xs: (np.ones(1), np.array([[function(x) for x in xs]]))
