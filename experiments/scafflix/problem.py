"""Logistic regression on n clients with their own optima: the problem of all convex figures of Chapter 3."""

from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from commjax.data import partition, stacked
from commjax.data.libsvm import Dataset
from commjax.problems import logistic
from commjax.problems.constants import Smoothness
from experiments.ef_bv.runs import load

SPLITS = ("iid", "label", "feature", "quantity")


@dataclass(frozen=True)
class Settings:
    datasets: tuple[str, ...] = ("mushrooms", "a6a", "w8a")  # LibSVM names, or breast_cancer (embedded)
    splits: tuple[str, ...] = SPLITS  # how the rows are split over clients
    n: int = 8  # clients
    mu: float = 0.1  # weight of the regulariser
    alphas: tuple[float, ...] = (0.1, 0.3, 0.5, 0.7, 0.9)  # weight of the global model, the same for all clients
    seeds: int = 3  # runs of Scafflix, which flips coins
    accuracy: float = 1e-8  # the target: FLIX objective minus its minimum
    seed: int = 0  # seed of the splits and the coins
    out: Path = Path("results/scafflix")  # folder of records, figures and checkpoints
    progress: bool = True  # show a progress bar


class Problem(NamedTuple):
    """A data set on n clients with their own optima, in float64.

    Attributes:
        name: Name of the data set.
        split: One of SPLITS.
        dataset: The whole data set.
        rows: Row numbers of each client.
        data: Rows of all clients, with a leading client axis.
        smoothness: Exact smoothness constants.
        optimum: Local optima [n, d], exact to 1e-12.
    """

    name: str
    split: str
    dataset: Dataset
    rows: Any
    data: stacked.ClientData
    smoothness: Smoothness
    optimum: np.ndarray


def split_rows(dataset: Dataset, split: str, n: int, seed: int) -> list[np.ndarray]:
    """Row numbers of each client under one of SPLITS.  Thesis: Sec. B.4.2."""
    if split == "iid":
        return partition.blocks(len(dataset.labels), n, seed=seed)
    if split == "label":
        return partition.label_wise(dataset.labels, n, seed=seed)
    if split == "feature":
        return partition.feature_wise(dataset.features, n, seed=seed)
    if split == "quantity":
        return partition.quantity_wise(len(dataset.labels), n, concentration=0.5, seed=seed)
    raise ValueError(f"split={split!r}; allowed: {', '.join(SPLITS)}")


def problem(name: str, split: str, settings: Settings) -> Problem:
    """Split a data set over clients, and compute its exact constants and the local optima."""
    dataset = load(name)
    rows = split_rows(dataset, split, settings.n, settings.seed)
    smoothness = logistic.constants(dataset, rows, settings.mu)
    optimum = np.stack([logistic.optimum(dataset, [ids], settings.mu).params for ids in rows])
    data = jax.tree.map(jnp.asarray, stacked.stack(dataset, rows))
    return Problem(name, split, dataset, rows, data, smoothness, optimum)


@cache
def value_and_grad(mu: float):
    """Loss and gradient of one client.  There is one object per mu, so that programs compiled for it are reused."""
    return jax.value_and_grad(partial(logistic.loss, mu=mu))
