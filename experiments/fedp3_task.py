"""The networks of Chapter 4: data, runs and tables that the sub-commands of `experiments.fedp3` share.

Training and test rows are pooled and split 70/30 within each client, as in the thesis (F22).  All methods have the same stepsize, local
steps and rows.  A seed draws the plan (who trains which layers), the network's start, cohorts, rows and masks.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from commjax import clients, local, plans, runner
from commjax.algorithms import aggregation, ditto, fedavg, fedcr, fedp3, fedprox, flix, submodels
from commjax.base import Algorithm, State
from commjax.data import cifar, embedded, images, partition, stacked
from commjax.data.stacked import Examples
from commjax.layers import Layers
from commjax.problems import layered, networks, resnet
from commjax.records import Record
from experiments import fedp3_fedcr, plots, tables
from experiments.scafflix_networks import accuracy


@dataclass(frozen=True)
class Settings:
    task: Literal["digits", "mnist", "fashion", "cifar10"] = "digits"  # digits is embedded; others from $COMMJAX_DATA
    model: Literal["mlp", "cnn", "table", "resnet"] = "mlp"  # 4 hidden layers; a narrow CNN; the table's; ResNet-18
    width: int = 64  # of the MLP's layers; the CNN's dense layers; 8 times the channels of CNN and ResNet-18
    splits: tuple[str, ...] = ("class", "dirichlet")  # S1: 5 of 10 classes a client; S2: Dirichlet(0.5)
    classes: int = 5  # of a client in S1; the thesis has 15 of CIFAR100's
    concentration: float = 0.5  # of S2; the thesis has 0.3 for CIFAR100
    clients: int = 100  # at most 20 of digits
    cohort: int = 10  # clients a round
    rounds: int = 300  # communication rounds
    steps: int = 5  # local steps
    batch: int = 32  # rows of a step
    stepsize: float = 0.1  # for all methods
    keep: float = 0.9  # keep ratio of the layers that a client does not train
    trained: int = 3  # layers beside the final one that a client trains, in `ratio` and `local`: 3 is OPU3, 1 LowerB
    others: Literal["frozen", "masked", "free"] = "frozen"  # layers that a client does not train
    held: int = 200  # rows that the server holds, for attention
    seeds: int = 3  # error bars
    every: int = 50  # rounds between two evaluations
    out: Path = Path("results/fedp3")  # records, figures, checkpoints
    progress: bool = True  # show a bar


class Task(NamedTuple):
    """Stacked rows of all clients, the server's batch, the problem's functions and the network's layers."""

    train: Examples
    test: Examples
    held: Examples
    problem: networks.Classification
    layers: Layers


@dataclass(frozen=True)
class Run:
    """One row of a table."""

    name: str
    method: str = "fedp3"
    counts: tuple[int, ...] = ()  # of layers beside the final one; empty: all
    variant: str = ""  # of ResNet-18
    keep: float = 0.9
    local: str = "fixed"
    low: float = 0.9  # least ratio of local pruning
    aggregate: str = "simple"

    def label(self) -> str:
        words = [
            self.method,
            "-".join(map(str, self.counts)),
            self.variant,
            f"{self.keep:g}",
            self.local if self.local == "fixed" else f"{self.local}{self.low:g}",
            self.aggregate,
        ]
        return "_".join(word.replace(" ", "") for word in words if word)


def module_of(settings: Settings) -> Any:
    if settings.model == "mlp":
        return layered.LayeredMlp(widths=(settings.width,) * 4)
    if settings.model == "resnet":
        return resnet.ResNet18(width=max(1, settings.width // 8), groups=2)
    if settings.model == "table":
        return layered.LayeredCnn(side=32, patches=True)
    return layered.LayeredCnn(width=max(1, settings.width // 8), hidden=settings.width, side=32, patches=True)


@cache
def load(settings: Settings, split: str) -> Task:
    """5 of 10 classes a client, or Dirichlet(0.5) with at least a batch of training rows for everybody."""
    found = {"digits": embedded.digits, "cifar10": cifar.load}.get(settings.task)
    name = {"fashion": "fashion_mnist"}.get(settings.task, settings.task)
    data = found() if found is not None else images.load(name)
    inputs = np.concatenate([data.train, data.test])
    targets = np.concatenate([data.train_labels, data.test_labels])
    order = np.random.default_rng(0).permutation(len(targets))
    held, rest = order[: settings.held], order[settings.held :]
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


def plan_of(run: Run, names: Layers, n: int, seed: int) -> plans.Plan:
    if run.variant:
        return resnet.variant(names, n, run.variant, keep=run.keep, seed=seed)
    return plans.opu(names, n, *run.counts, keep=run.keep, seed=seed) if run.counts else plans.everything(names, n)


def expected_bits(run: Run, names: Layers, params: Any, n: int) -> dict[str, float]:
    """Bits of a client a round, in expectation over plans: every L_i once, weighted by its chance."""
    final, hidden = names.names[-1], names.names[:-1]
    if run.variant:
        sets = [[name for name in names.names if name not in left] for left in resnet.left_out(run.variant)]
        chances = [1 / len(sets)] * len(sets)
    else:
        several = [list(combinations(hidden, count)) for count in run.counts or (len(hidden),)]
        sets = [[*one, final] for group in several for one in group]
        chances = [1 / len(several) / len(group) for group in several for _ in group]
    pruning = local_pruning(run, len(sets)) if np.ndim(widths(run, n)) == 0 else None
    plan = plans.plan(names, sets, run.keep)
    if pruning is None:  # widths of their own, all layers
        plan, pruning, chances = plans.everything(names, n), local_pruning(run, n), [1 / n] * n
    bits = fedp3.ledger(plan, params, local_pruning=pruning)
    return {way: float(np.dot(chances, bits[way])) for way in ("up", "down")}


def widths(run: Run, n: int) -> Any:
    """Ratios of local pruning; HeteroFL's clients have five sizes."""
    return run.low if run.local != "heterofl" else np.linspace(run.low, 1, 5)[np.arange(n) % 5]


def local_pruning(run: Run, n: int) -> submodels.LocalPruning:
    low = widths(run, n)
    made = {
        "fixed": submodels.fixed,
        "uniform": lambda: submodels.uniform(low),
        "ordered": lambda: submodels.ordered(low),
        "fjord": lambda: submodels.ordered(low, everywhere=True),
        "heterofl": lambda: submodels.ordered(low, 1, everywhere=True),
    }
    return made[run.local]()


@cache
def algorithm_of(run: Run, settings: Settings, split: str, seed: int) -> Algorithm:
    """One object for what has the same plan, so that seeds share a compiled program where they can."""
    task = load(data_of(settings), split)
    how: dict[str, Any] = _how(settings) | {"cohort": settings.cohort}
    sample, n = local.minibatch(settings.batch), len(task.train.weights)
    if run.method == "fedcr":
        return fedcr.fedcr(fedp3_fedcr.network(fedp3_fedcr.modules(settings)), sample, **how)
    if run.method in ("fedavg", "fedprox", "ditto"):
        made = {"fedavg": fedavg.fedavg, "fedprox": fedprox.fedprox, "ditto": ditto.ditto}[run.method]
        return made(jax.value_and_grad(task.problem.loss), sample, **how)
    joins = {
        "simple": aggregation.simple(),
        "weighted": aggregation.weighted(),
        "attention": aggregation.attention(task.held),
    }
    return fedp3.fedp3(
        task.problem.loss, plan_of(run, task.layers, n, seed), sample, local_pruning=local_pruning(run, n),
        aggregate=joins[run.aggregate], others=settings.others, **how,
    )  # fmt: skip


def _how(settings: Settings) -> dict[str, Any]:
    return {"steps": settings.steps, "over": jax.vmap if settings.model == "mlp" else clients.one_by_one}


def hparams_of(run: Run, settings: Settings) -> Any:
    gamma = settings.stepsize
    made = {
        "fedprox": fedprox.HParams(gamma, 0.1, 1.0),
        "ditto": ditto.HParams(gamma, gamma, 0.1, 1.0),
        "fedcr": fedcr.HParams(gamma, 0.001, 1.0),
    }
    return made.get(run.method, fedavg.HParams(gamma, 1.0))


def _global(hparams, server, client):
    return server.params


def _own(hparams, server, client):
    return client.model


def _start(run: Run, task: Task, settings: Settings, seed: int) -> tuple[Any, networks.Classification, Any]:
    """Params, the problem by which they are judged, and what a client deploys."""
    key, first = jax.random.key(1000 + seed), task.train.inputs[0, :1]
    if run.method != "fedcr":
        return task.problem.init(key, first), task.problem, _own if run.method == "ditto" else _global
    made = fedp3_fedcr.modules(settings)
    return fedp3_fedcr.start(made, key, first), fedp3_fedcr.judge(made), fedp3_fedcr.deployed


def train(run: Run, settings: Settings, split: str, seed: int) -> Record:
    """One run; its record has the test accuracy every few rounds, over the test rows of all clients, and that of local models."""
    task = load(data_of(settings), split)
    shared, n = shape_of(settings), len(task.train.weights)
    drawn = seed if run.counts or run.variant else 0  # the seed of the plan, where there is something to draw
    algorithm, hparams = algorithm_of(run, shared, split, drawn), hparams_of(run, settings)
    params, problem, model = _start(run, task, shared, seed)

    def evaluate(state):
        return {"test": float(accuracy(problem, model, hparams, state.server, state.clients, task.test))}

    words = [settings.task, split, settings.model, run.label(), "" if settings.others == "frozen" else settings.others]
    label = "_".join(filter(None, [*words, str(seed)]))
    path = settings.out / "runs" / label
    bits = expected_bits(run, task.layers, params, n) if run.method == "fedp3" else {}
    state, record = runner.loop(
        jax.random.key(seed), algorithm, hparams, algorithm.init(params, jnp.arange(n)), task.train, settings.rounds,
        chunk=settings.every, evaluate=evaluate, checkpoint=path.with_name(path.name + ".ckpt"), label=label, progress=settings.progress,
        config={
            "task": settings.task, "split": split, "run": run.label(), "seed": seed, "clients": n, "cohort": settings.cohort,
            "expected": bits,
        },
    )  # fmt: skip
    if run.method in ("fedavg", "fedp3"):
        saved = _saved(path, settings.rounds)
        found = np.array([local_accuracy(run, shared, split, seed, hparams, state)]) if saved is None else saved
        record.evaluations["local"] = found
    record.save(path)
    return record


def _saved(path: Path, rounds: int) -> np.ndarray | None:
    """The accuracy of local models, if a run of so many rounds has left it."""
    try:
        found = Record.load(path).evaluations
    except FileNotFoundError:
        return None
    return found.get("local") if found["round"][-1] == rounds else None


def local_accuracy(run: Run, settings: Settings, split: str, seed: int, hparams: Any, state: Any) -> float:
    """Mean over clients of the accuracy of their local model (L_i trained, the rest pruned) on their own test rows: F23's metric."""
    task = load(data_of(settings), split)
    n = len(task.train.weights)
    state = State(state.server, fedp3.Client(state.clients.id))
    right, total = _local_sums(
        jax.random.key(seed), hparams, state, (task.train, task.test), run, settings, task.problem, plan_of(run, task.layers, n, seed)
    )  # fmt: skip
    return float(np.mean(np.asarray(right) / np.asarray(total)))


def _local_sums(key, hparams, state, data, run: Run, settings: Settings, problem: Any, plan: plans.Plan):
    draw = local.minibatch(settings.batch)

    @jax.jit
    def sums(key, hparams, state, data):
        return fedp3.local_models(
            key, hparams, state, data, problem.loss, plan, lambda key, pair: draw(key, pair[0]),
            local_pruning=local_pruning(run, len(plan.keep)), others=settings.others, **_how(settings),
            use=lambda model, pair: problem.accuracy_sums(model, pair[1]),
        )  # fmt: skip

    return sums(key, hparams, state, data)


def shape_of(settings: Settings) -> Settings:
    """What does not change a program, left out of its key"""
    return replace(data_of(settings), others=settings.others, cohort=settings.cohort, steps=settings.steps)


def data_of(settings: Settings) -> Settings:
    """What the data depends on"""
    names = ("task", "model", "width", "clients", "batch", "held", "classes", "concentration")
    return Settings(**{name: getattr(settings, name) for name in names})


def alone(settings: Settings, split: str, seed: int) -> float:
    """Test accuracy of clients that train by themselves as many steps as a client of a run does on average, twice over."""
    task = load(data_of(settings), split)
    params = task.problem.init(jax.random.key(1000 + seed), task.train.inputs[0, :1])
    n = len(task.train.weights)
    steps = max(1, 2 * settings.rounds * settings.steps * min(settings.cohort, n) // n)
    models = flix.local_sgd(
        jax.random.key(seed), jax.value_and_grad(task.problem.loss), params, task.train, stepsize=settings.stepsize,
        steps=steps, sample=local.minibatch(settings.batch), over=jax.vmap if settings.model == "mlp" else clients.one_by_one,
    )  # fmt: skip
    rows = ditto.Client(jnp.arange(n), models)
    return float(accuracy(task.problem, _own, None, fedavg.Server(jnp.zeros((), jnp.int32), params), rows, task.test))


def measure(runs: Sequence[Run], settings: Settings, *, local_only: bool = False) -> list[dict]:
    """One row a run and split: accuracies and bits of a client a round, mean and deviation over the seeds, which draw plans too."""
    for split in settings.splits:  # before anything is trained
        load(data_of(settings), split)
    rows = []
    for split in settings.splits:
        for run in runs:
            records = [train(run, settings, split, seed) for seed in range(settings.seeds)]
            last = 100 * np.array([record.evaluations["test"][-1] for record in records])
            own = 100 * np.array([record.evaluations.get("local", [np.nan])[-1] for record in records])
            n, m = (int(records[0].config[name]) for name in ("clients", "cohort"))
            sent = {way: [np.mean(r.metrics[f"bits_{way}"]) * n / min(m, n) for r in records] for way in ("up", "down")}
            rows.append(_row(run.name, split, last, own, sent, records[0].config.get("expected", {})))
        if local_only:
            last = 100 * np.array([alone(settings, split, seed) for seed in range(settings.seeds)])
            rows.append(_row("local only", split, last, last * np.nan, {"up": [0.0], "down": [0.0]}, {}))
    return rows


def _deviation(values: np.ndarray | Sequence[float]) -> float:
    return float(np.std(values, ddof=1)) if len(values) > 1 else float("nan")


def _row(name: str, split: str, accuracy: np.ndarray, own: np.ndarray, sent: dict, expected: dict) -> dict:
    row = {"split": split, "name": name, "accuracy": float(accuracy.mean()), "std": _deviation(accuracy)}
    row |= {"local": float(own.mean()), "local std": _deviation(own)}
    for way in ("up", "down"):
        row |= {way: float(np.mean(sent[way])), f"{way} std": _deviation(sent[way])}
        row[f"{way} expected"] = float(expected.get(way, row[way]))
    return row


def _lines(rows: list[dict], settings: Settings, thesis: dict[tuple[str, str], str] | None) -> list[str]:
    lines = [
        f"{settings.task}, {settings.model} of width {settings.width}, {settings.clients} clients, {settings.cohort} a round, {settings.rounds} rounds of {settings.steps} steps; "
        f"layers not trained: {settings.others}",
        f"accuracy (%) of the global model, and mean over clients of that of local models (F23); mean +- deviation of {settings.seeds} seeds, each with a plan of its own",
        "kbit of a client a round, mean +- deviation, and [in expectation over plans]",
        f"{'split':10} {'run':20} {'global':>14} {'local':>14} {'kbit up':>27} {'kbit down':>27}" + ("  thesis" if thesis else ""),
    ]  # fmt: skip
    for r in rows:
        own = f"{r['local']:6.2f} +- {r['local std']:4.2f}" if np.isfinite(r["local"]) else ""
        up, down = (
            f"{r[way] / 1e3:8.1f} +- {r[f'{way} std'] / 1e3:5.1f} [{r[f'{way} expected'] / 1e3:7.1f}]"
            for way in ("up", "down")
        )
        beside = "" if not thesis else f"  {thesis.get((r['name'], r['split']), '')}"
        lines.append(f"{r['split']:10} {r['name']:20} {r['accuracy']:6.2f} +- {r['std']:4.2f} {own:>14} {up:>27} {down:>27}{beside}")  # fmt: skip
    return lines


def report(name: str, rows: list[dict], settings: Settings, thesis: dict[tuple[str, str], str] | None = None) -> None:
    """The table as text and JSON, and bars; `thesis`: its figure for (name, split)."""
    lines = _lines(rows, settings, thesis)
    names = list(dict.fromkeys(row["name"] for row in rows))
    figure, axes = plt.subplots(figsize=(max(3.4, 0.55 * len(names)), 2.6), layout="constrained")
    for number, split in enumerate(settings.splits):
        mine = {row["name"]: row for row in rows if row["split"] == split}
        at = np.arange(len(names)) + 0.38 * (number - (len(settings.splits) - 1) / 2)
        axes.bar(
            at, [mine[one]["accuracy"] for one in names], 0.36, yerr=[mine[one]["std"] for one in names], capsize=2,
            label={"class": "S1: class-wise", "dirichlet": "S2: Dirichlet"}[split], color=("#0072B2", "#E69F00")[number % 2],
        )  # fmt: skip
    axes.set_xticks(np.arange(len(names)), names, rotation=30, ha="right")
    axes.set_ylabel("test accuracy, %")
    axes.set_ylim(bottom=max(0.0, min(row["accuracy"] for row in rows) - 12))
    axes.set_title(f"{settings.task}, {settings.model}")
    axes.legend(loc="lower right", frameon=True)
    stem = stem_of(name, settings)
    plots.save(figure, stem.with_name(stem.name + ".png"))
    tables.save(stem, rows, "\n".join(lines))


def stem_of(name: str, settings: Settings) -> Path:
    """Where the files of a table are, without their suffix."""
    changed = f"_opu{settings.trained}" * (name in ("ratio", "local") and settings.trained != 3)
    changed += f"_{settings.others}" * (settings.others != "frozen")
    return settings.out / f"{name}_{settings.task}_{settings.model}{changed}"
