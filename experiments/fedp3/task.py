"""The data and networks of Chapter 4 that the sub-commands of `experiments.fedp3` share.

Training and test rows are pooled and then split 70/30 within each client, as in the thesis (F22).
"""

from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from commjax.algorithms.fedp3.layers import Layers
from commjax.core import local
from commjax.data import cifar, embedded, images, partition, stacked
from commjax.data.stacked import Examples
from commjax.models import layered, networks, resnet


@dataclass(frozen=True)
class Settings:
    # digits is embedded; the others are read from $COMMJAX_DATA.
    task: Literal["digits", "mnist", "fashion", "cifar10"] = "digits"
    model: Literal["mlp", "cnn", "table", "resnet"] = "mlp"  # 4 hidden layers; narrow CNN; CNN of Table C.2; ResNet-18
    width: int = 64  # width of the MLP and of the CNN's dense layers; 8 times the channels of CNN and ResNet-18
    splits: tuple[str, ...] = ("class", "dirichlet")  # S1: some classes per client; S2: Dirichlet
    classes: int = 5  # classes per client in S1; the thesis has 15 of CIFAR100's
    concentration: float = 0.5  # concentration of S2; the thesis has 0.3 for CIFAR100
    rows: int = 0  # rows of the data set, drawn at random; 0: all
    clients: int = 100  # clients; for digits at most 20 are used
    cohort: int = 10  # clients per round
    rounds: int = 300  # communication rounds
    steps: int = 5  # local steps
    batch: int = 32  # rows per step
    stepsize: float = 0.1  # stepsize of all methods
    keep: float = 0.9  # keep ratio of the layers that a client does not train
    trained: int = 3  # layers that a client of `ratio` and `local` trains besides the final one: 3 is OPU3, 1 LowerB
    others: Literal["frozen", "masked", "free"] = "frozen"  # treatment of layers that a client does not train
    held: int = 200  # rows of the server, for attention
    seeds: int = 3  # seeds; they give the error bars
    every: int = 50  # rounds between two evaluations
    out: Path = Path("results/fedp3")  # folder of records, figures and checkpoints
    progress: bool = True  # show a bar


class Task(NamedTuple):
    """Data and network of a split.

    Attributes:
        train: Stacked training rows of all clients.
        test: Stacked test rows of all clients.
        held: Rows of the server.
        problem: The functions of the problem.
        layers: The layers of the network.
    """

    train: Examples
    test: Examples
    held: Examples
    problem: networks.Classification
    layers: Layers


def module_of(settings: Settings) -> Any:
    """Return the network of the settings."""
    if settings.model == "mlp":
        return layered.LayeredMlp(widths=(settings.width,) * 4)
    if settings.model == "resnet":
        return resnet.ResNet18(width=max(1, settings.width // 8), groups=2, patches=True)
    if settings.model == "table":
        return layered.LayeredCnn(side=32, patches=True)
    return layered.LayeredCnn(width=max(1, settings.width // 8), hidden=settings.width, side=32, patches=True)


@cache
def load(settings: Settings, split: str) -> Task:
    """Load the data and split them over the clients.

    The split "class" gives each client `classes` classes. The split "dirichlet" is Dirichlet(`concentration`), with at
    least one batch of training rows per client.
    """
    found = {"digits": embedded.digits, "cifar10": cifar.load}.get(settings.task)
    name = {"fashion": "fashion_mnist"}.get(settings.task, settings.task)
    data = found() if found is not None else images.load(name)
    inputs = np.concatenate([data.train, data.test])
    targets = np.concatenate([data.train_labels, data.test_labels])
    order = np.random.default_rng(0).permutation(len(targets))
    held, rest = order[: settings.held], order[settings.held :][: settings.rows or None]
    n = min(settings.clients, 20) if settings.task == "digits" else settings.clients
    if split == "class":
        rows = partition.class_wise(targets[rest], n, settings.classes)
    elif split == "dirichlet":
        least = int(settings.batch / 0.7) + 1
        rows = partition.label_dirichlet(targets[rest], n, concentration=settings.concentration, minimum=least)
    else:
        raise ValueError(f"split={split!r}; allowed: 'class', 'dirichlet'")
    train, test = partition.holdout([rest[ids] for ids in rows], 0.3)
    parts = [jax.tree.map(jnp.asarray, stacked.examples(inputs, targets, part)) for part in (train, test)]
    local.check_batch(settings.batch, parts[0])
    server = Examples(inputs[held], targets[held], np.full(len(held), 1 / max(1, len(held)), np.float32))
    problem = networks.classification(module_of(settings))
    shapes = jax.eval_shape(module_of(settings).init, jax.random.key(0), parts[0].inputs[0, :1])["params"]
    names = (resnet if settings.model == "resnet" else layered).layers(shapes)
    return Task(parts[0], parts[1], jax.tree.map(jnp.asarray, server), problem, names)


def shape_of(settings: Settings) -> Settings:
    """Return settings with only the fields that a compiled program depends on, for use as a cache key."""
    names = ("others", "cohort", "steps", "seeds")
    return replace(data_of(settings), **{name: getattr(settings, name) for name in names})


def data_of(settings: Settings) -> Settings:
    """Return settings with only the fields that the data and the network depend on, for use as a cache key."""
    names = ("task", "model", "width", "clients", "batch", "held", "classes", "concentration", "rows")
    return Settings(**{name: getattr(settings, name) for name in names})
