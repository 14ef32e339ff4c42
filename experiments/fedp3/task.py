"""The data, networks and plans of Chapter 4 that the sub-commands of `experiments.fedp3` share.

A plan says which client trains which layers. Training and test rows are pooled and then split 70/30 within each
client, as in the thesis (F22).
"""

from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from commjax.algorithms import fedp3
from commjax.algorithms.fedp3 import plans
from commjax.algorithms.fedp3.layers import Layers
from commjax.algorithms.fedp3.local_pruning import LocalPruning, fixed, ordered, uniform
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
        return resnet.ResNet18(width=max(1, settings.width // 8), groups=2)
    if settings.model == "table":
        return layered.LayeredCnn(side=32)
    return layered.LayeredCnn(width=max(1, settings.width // 8), hidden=settings.width, side=32)


@cache
def load(settings: Settings, split: str) -> Task:
    """Load the data and split them over the clients.

    The split "class" gives each client `classes` classes. The split "dirichlet" is Dirichlet(`concentration`), with at
    least one batch of training rows per client.
    """
    read = {"digits": embedded.digits, "cifar10": cifar.load}.get(settings.task)
    name = {"fashion": "fashion_mnist"}.get(settings.task, settings.task)
    data = read() if read is not None else images.load(name)
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


@dataclass(frozen=True)
class Run:
    """One row of a table.

    Attributes:
        name: Name of the row.
        method: fedp3, fedavg, fedprox, ditto, fedcr or fedcr_layers.
        counts: Each client trains one of these numbers of layers, and the final one. Empty: all layers.
        variant: Variant of ResNet-18.
        keep: Keep ratio of the layers that a client does not train.
        local: Kind of local pruning: fixed, uniform, ordered, fjord or heterofl.
        low: Least ratio of local pruning.
        aggregate: simple, weighted or attention.
    """

    name: str
    method: str = "fedp3"
    counts: tuple[int, ...] = ()
    variant: str = ""
    keep: float = 0.9
    local: str = "fixed"
    low: float = 0.9
    aggregate: str = "simple"

    def label(self) -> str:
        """Return the part of file names that identifies the run. It does not contain `name`."""
        words = [
            self.method,
            "-".join(map(str, self.counts)),
            self.variant,
            f"{self.keep:g}",
            self.local if self.local == "fixed" else f"{self.local}{self.low:g}",
            self.aggregate,
        ]
        return "_".join(word.replace(" ", "") for word in words if word)


# Compiling takes longer than a run. The runs with these kinds of clients (counts, keep) therefore share one program.
KINDS = [((3,), 0.9), ((3,), 1.0), ((3,), 0.7), ((3,), 0.5), ((2,), 0.9), ((1,), 0.9), ((1, 2, 3), 0.9), ((2, 3), 0.9)]


def alike(run: Run, settings: Settings) -> bool:
    """Return whether a run differs from the runs of KINDS only in its plan.

    This is limited to the MLP: with `one_by_one` a program has a branch for each L_i.
    """
    usual = run.local == "fixed" or (run.local in ("uniform", "ordered") and run.low == run.keep)
    return settings.model == "mlp" and run.method == "fedp3" and usual and (run.counts, run.keep) in KINDS


def program_of(run: Run, settings: Settings) -> Run:
    """Return a run that stands for its program: it is equal for all runs that share a program."""
    if not alike(run, settings):
        return replace(run, name="")
    counts, keep = KINDS[0]
    return replace(run, name="", counts=counts, keep=keep, low=keep if run.local != "fixed" else 0.9)


def plan_of(run: Run, names: Layers, n: int, seed: int) -> plans.Plan:
    """Return the plan of a run and seed for n clients."""
    if run.variant:
        return resnet.variant(names, n, run.variant, keep=run.keep, seed=seed)
    return plans.opu(names, n, *run.counts, keep=run.keep, seed=seed) if run.counts else plans.everything(names, n)


def program_plan(run: Run, settings: Settings, names: Layers, n: int) -> plans.Plan:
    """Return the plan that the program of a run is compiled for.

    It has every kind of client of all seeds and of all runs that are `alike`. The plan of a run and seed is data of the
    program: `init` takes it.

    Args:
        run: The run.
        settings: Settings of the experiment.
        names: Layers of the network.
        n: Number of clients.
    """
    if not (run.counts or run.variant):  # the plan is not random
        return plan_of(run, names, n, 0)
    kinds = KINDS if alike(run, settings) else [(run.counts, run.keep)]
    return plans.kinds(
        [
            plan_of(replace(run, counts=counts, keep=keep), names, n, seed)
            for counts, keep in kinds
            for seed in range(settings.seeds)
        ]
    )


def possible(run: Run, names: Layers) -> tuple[plans.Plan, list[float]]:
    """Return a plan with one client for every possible L_i, and the probability of each."""
    final, hidden = names.names[-1], names.names[:-1]
    if run.variant:
        sets = [[name for name in names.names if name not in left] for left in resnet.left_out(run.variant)]
        chances = [1 / len(sets)] * len(sets)
    else:
        several = [list(combinations(hidden, count)) for count in run.counts or (len(hidden),)]
        sets = [[*hidden_set, final] for group in several for hidden_set in group]
        chances = [1 / len(several) / len(group) for group in several for _ in group]
    return plans.plan(names, sets, run.keep), chances


def expected_bits(run: Run, names: Layers, params: Any, n: int) -> dict[str, float]:
    """Return the bits of a client per round, "up" and "down", in expectation over plans."""
    plan, chances = possible(run, names)
    if np.ndim(widths(run, n)):  # each client has its own width and trains all layers
        plan, chances = plans.everything(names, n), [1 / n] * n
    pruning = local_pruning(run, len(chances))
    bits = fedp3.ledger(plan, params, local_pruning=pruning)
    return {way: float(np.dot(chances, bits[way])) for way in ("up", "down")}


def widths(run: Run, n: int) -> Any:
    """Return the least ratio of local pruning: one number, or one per client for HeteroFL, which has five sizes."""
    return run.low if run.local != "heterofl" else np.linspace(run.low, 1, 5)[np.arange(n) % 5]


def local_pruning(run: Run, n: int, settings: Settings | None = None) -> LocalPruning:
    """Return the local pruning of a run for n clients.

    With the settings, runs that are `alike` have the same one: their least ratio is the keep ratio of the client.
    """
    low = "keep" if settings is not None and alike(run, settings) else widths(run, n)
    kinds = {
        "fixed": fixed,
        "uniform": lambda: uniform(low),
        "ordered": lambda: ordered(low),
        "fjord": lambda: ordered(low, everywhere=True),
        "heterofl": lambda: ordered(low, 1, everywhere=True),
    }
    return kinds[run.local]()
