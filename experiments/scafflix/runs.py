"""The convex figures of Chapter 3: settings, logistic regression on n clients with their own optima, and runs on it."""

from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from commjax.core import runner
from commjax.core.base import Algorithm
from commjax.core.local import ValueAndGrad
from commjax.core.records import Record
from commjax.data import partition, stacked
from commjax.data.libsvm import Dataset
from commjax.problems import logistic
from commjax.problems.constants import Optimum, Smoothness
from experiments import saved
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
def value_and_grad(mu: float) -> ValueAndGrad:
    """Loss and gradient of one client.  There is one object per mu, so that programs compiled for it are reused."""
    return jax.value_and_grad(partial(logistic.loss, mu=mu))


def flix_optimum(problem: Problem, alpha: float, settings: Settings) -> Optimum:
    """The minimiser and the minimum of the FLIX objective."""
    return logistic.flix_optimum(problem.dataset, problem.rows, settings.mu, alpha, problem.optimum)


def iterations_for(kappa: float, gap: float, accuracy: float) -> int:
    """kappa log(gap / accuracy) iterations, rounded up to hundreds."""
    return int(np.ceil(kappa * np.log(gap / accuracy) / 100)) * 100


def run_grid(
    problem: Problem,
    algorithm: Algorithm,
    hparams: list[Any],
    settings: Settings,
    label: str,
    *,
    rounds: int,
    seeds: int | None = None,
) -> Record:
    """Run all hparams with all seeds from x^0 = 1, as one vmapped program in chunks; saved under `label`.

    Args:
        problem: The problem.
        algorithm: The method.
        hparams: Its settings.
        settings: The settings of the command.
        label: Name of the record and the checkpoint.
        rounds: Number of steps of the algorithm.
        seeds: Number of runs of each setting; None: that of the settings.
    """
    d = problem.dataset.features.shape[1]
    state = algorithm.init(jnp.ones(d), jnp.arange(settings.n), optimum=jnp.asarray(problem.optimum))
    keys = jax.random.split(jax.random.key(settings.seed), settings.seeds if seeds is None else seeds)
    return saved.run(
        settings.out / label,
        keys,
        algorithm,
        runner.stack(hparams),
        state,
        problem.data,
        rounds=rounds,
        chunk=100,
        progress=settings.progress,
        bits_init=64.0,  # every client sends alpha_i^2 / gamma_i once
        config={"dataset": problem.name, "split": problem.split, "n": settings.n, "d": d, "mu": settings.mu},
    )


def after_communications(bits: np.ndarray) -> np.ndarray:
    """Numbers of the iterations that begin right after 0, 1, 2, ... communications, from the bits of each iteration."""
    return np.concatenate([[0], np.flatnonzero(bits[:-1] > 0) + 1])


def communicated(record: Record, h: int, s: int) -> np.ndarray:
    """The FLIX objective at x after 0, 1, 2, ... communications, from a record of `scafflix.iterations`.

    Right after a communication every client is at its mixture of x, so the loss of that iteration is the objective.

    Args:
        record: Record with metrics [hparams, seed, iteration].
        h: Number of the hparams.
        s: Number of the seed.
    """
    loss, bits = record.metrics["loss"][h, s], record.metrics["bits_up"][h, s]
    return loss[after_communications(bits)]
