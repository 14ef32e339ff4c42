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
from experiments.ef_bv.commands import load

SPLITS = ("iid", "label", "feature", "quantity")


@dataclass(frozen=True)
class Settings:
    datasets: tuple[str, ...] = ("mushrooms", "a6a", "w8a")  # LibSVM names, or breast_cancer (embedded)
    splits: tuple[str, ...] = SPLITS  # how rows go to clients
    n: int = 8  # clients
    mu: float = 0.1  # weight of the regulariser
    alphas: tuple[float, ...] = (0.1, 0.3, 0.5, 0.7, 0.9)  # weight of the global model, the same for all clients
    seeds: int = 3  # runs of Scafflix, which flips coins
    accuracy: float = 1e-8  # the target: FLIX objective minus its minimum
    seed: int = 0  # of the splits and the coins
    out: Path = Path("results/scafflix")  # records, figures, checkpoints
    progress: bool = True  # show a bar


class Problem(NamedTuple):
    """A data set on n clients with their own optima; float64."""

    name: str
    split: str
    dataset: Dataset
    rows: Any
    data: stacked.ClientData  # leading client axis
    smoothness: Smoothness
    optimum: np.ndarray  # [n, d], exact to 1e-12


def split_rows(dataset: Dataset, split: str, n: int, seed: int) -> list[np.ndarray]:
    """Thesis: L3820-L3826."""
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
    dataset = load(name)
    rows = split_rows(dataset, split, settings.n, settings.seed)
    smoothness = logistic.constants(dataset, rows, settings.mu)
    optimum = np.stack([logistic.optimum(dataset, [ids], settings.mu).params for ids in rows])
    data = jax.tree.map(jnp.asarray, stacked.stack(dataset, rows))
    return Problem(name, split, dataset, rows, data, smoothness, optimum)


@cache
def value_and_grad(mu: float):
    """One object a mu, so that what was compiled for it serves again."""
    return jax.value_and_grad(partial(logistic.loss, mu=mu))
