"""Train the runs of Chapter 4 and collect the rows of their tables.

All methods have the same stepsize, number of local steps and batch size. A seed draws the plan (which client trains
which layers), the initial network, the cohorts, the rows of the batches and the masks.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from commjax.algorithms import ditto, fedavg, fedcr, fedp3, fedprox, flix
from commjax.algorithms.fedcr import layers as fedcr_layers
from commjax.algorithms.fedp3 import aggregation
from commjax.core import local, rounds, runner
from commjax.core.base import Algorithm, State
from commjax.core.records import Record
from commjax.models import networks
from experiments.fedp3 import fedcr as fedp3_fedcr
from experiments.fedp3.task import (
    Run,
    Settings,
    Task,
    data_of,
    expected_bits,
    load,
    local_pruning,
    plan_of,
    possible,
    program_of,
    program_plan,
    shape_of,
)


@cache
def algorithm_of(run: Run, settings: Settings, split: str) -> Algorithm:
    """Return the algorithm of a run.

    The cache returns the same object for equal arguments, so that seeds share a compiled program.
    """
    task = load(data_of(settings), split)
    options: dict[str, Any] = _options(settings) | {"cohort": settings.cohort}
    sample, n = local.minibatch(settings.batch), len(task.train.weights)
    if run.method == "fedcr":
        return fedcr.fedcr(fedp3_fedcr.network(fedp3_fedcr.modules(settings)), sample, **options)
    if run.method == "fedcr_layers":
        plan = program_plan(run, settings, fedp3_fedcr.layers(settings, task), n)
        return fedcr_layers.fedcr_layers(fedp3_fedcr.network(fedp3_fedcr.modules(settings)), plan, sample, **options)
    if run.method in ("fedavg", "fedprox", "ditto"):
        make = {"fedavg": fedavg.fedavg, "fedprox": fedprox.fedprox, "ditto": ditto.ditto}[run.method]
        return make(jax.value_and_grad(task.problem.loss), sample, **options)
    return method_of(run, settings, split).algorithm()


def method_of(run: Run, settings: Settings, split: str) -> fedp3.Method:
    """Return FedP3 with the options of a run."""
    task = load(data_of(settings), split)
    n = len(task.train.weights)
    rules = {
        "simple": aggregation.simple(),
        "weighted": aggregation.weighted(),
        "attention": aggregation.attention(task.held),
    }
    return fedp3.Method(
        task.problem.loss,
        program_plan(run, settings, task.layers, n),
        local.minibatch(settings.batch),
        local_pruning=local_pruning(run, n, settings),
        aggregate=rules[run.aggregate],
        others=settings.others,
        cohort=settings.cohort,
        **_options(settings),
    )


def _options(settings: Settings) -> dict[str, Any]:
    return {"steps": settings.steps, "over": jax.vmap if settings.model == "mlp" else rounds.one_by_one}


def hparams_of(run: Run, settings: Settings) -> Any:
    """Return the hyperparameters of a run."""
    gamma = settings.stepsize
    kinds = {
        "fedprox": fedprox.HParams(gamma, 0.1, 1.0),
        "ditto": ditto.HParams(gamma, gamma, 0.1, 1.0),
        "fedcr": fedcr.HParams(gamma, 0.001, 1.0),
    }
    return kinds.get(run.method.removesuffix("_layers"), fedavg.HParams(gamma, 1.0))


def _global(hparams: Any, server: Any, client: Any) -> Any:
    return server.params


def _personal(hparams: Any, server: Any, client: Any) -> Any:
    return client.model


def _start(run: Run, task: Task, settings: Settings, seed: int) -> tuple[Any, networks.Classification, Any]:
    """Return the initial params, the problem that scores them, and the function that returns what a client deploys."""
    key, first = jax.random.key(1000 + seed), task.train.inputs[0, :1]
    if not run.method.startswith("fedcr"):
        return task.problem.init(key, first), task.problem, _personal if run.method == "ditto" else _global
    modules = fedp3_fedcr.modules(settings)
    return fedp3_fedcr.start(modules, key, first), fedp3_fedcr.judge(modules), fedp3_fedcr.deployed


def train(run: Run, settings: Settings, split: str, seed: int) -> Record:
    """Train one run and save its record.

    The record has the test accuracy over the test rows of all clients, every few rounds ("test"). For FedAvg and FedP3
    it also has the accuracy of the local models after the last round ("local").
    """
    task = load(data_of(settings), split)
    shared, n = shape_of(settings), len(task.train.weights)
    algorithm, hparams = algorithm_of(program_of(run, shared), shared, split), hparams_of(run, settings)
    params, problem, model = _start(run, task, shared, seed)
    names = fedp3_fedcr.layers(shared, task) if run.method == "fedcr_layers" else task.layers
    planned = run.method in ("fedp3", "fedcr_layers")
    plan = {"plan": plan_of(run, names, n, seed)} if planned else {}
    begin: Any = algorithm.init  # `init` of a method with a plan takes more arguments

    def evaluate(state):
        return {"test": float(networks.accuracy(problem, model, hparams, state.server, state.clients, task.test))}

    words = [settings.task, split, settings.model, run.label(), "" if settings.others == "frozen" else settings.others]
    label = "_".join(filter(None, [*words, str(seed)]))
    path = settings.out / "runs" / label
    bits = expected_bits(run, task.layers, params, n) if run.method == "fedp3" else {}
    if run.method == "fedcr_layers":
        bits = fedp3_fedcr.expected_bits(*possible(run, names), shared, params)
    state, record = runner.loop(
        jax.random.key(seed),
        algorithm,
        hparams,
        begin(params, jnp.arange(n), **plan),
        task.train,
        settings.rounds,
        chunk=settings.every,
        evaluate=evaluate,
        checkpoint=path.with_name(path.name + ".ckpt"),
        label=label,
        progress=settings.progress,
        config={
            "task": settings.task,
            "split": split,
            "run": run.label(),
            "seed": seed,
            "clients": n,
            "cohort": settings.cohort,
            "expected": bits,
        },
    )
    if run.method in ("fedavg", "fedp3"):
        saved = _saved(path, settings.rounds)
        if saved is None:
            saved = np.array([local_accuracy(run, shared, split, seed, state)])
        record.evaluations["local"] = saved
    record.save(path)
    return record


def _saved(path: Path, rounds: int) -> np.ndarray | None:
    """Return the accuracy of the local models that a run of this many rounds has saved, or None."""
    try:
        evaluations = Record.load(path).evaluations
    except FileNotFoundError:
        return None
    return evaluations.get("local") if evaluations["round"][-1] == rounds else None


def local_accuracy(run: Run, settings: Settings, split: str, seed: int, state: State) -> float:
    """Return the mean over clients of the accuracy of each local model on its own test rows (erratum F23).

    In a local model the layers of L_i are trained and the other layers are pruned.
    """
    task = load(data_of(settings), split)
    method, sums = _local_sums(replace(program_of(run, settings), aggregate="simple"), settings, split)
    ids = state.clients.id
    clients = method.init(state.server.params, ids, plan=plan_of(run, task.layers, len(ids), seed)).clients
    hparams = hparams_of(run, settings)
    right, total = sums(jax.random.key(seed), hparams, State(state.server, clients), (task.train, task.test))
    return float(np.mean(np.asarray(right) / np.asarray(total)))


@cache
def _local_sums(run: Run, settings: Settings, split: str) -> tuple[fedp3.Method, Callable[..., Any]]:
    problem, draw = load(data_of(settings), split).problem, local.minibatch(settings.batch)
    method = replace(method_of(run, settings, split), sample=lambda key, pair: draw(key, pair[0]))

    def score(model: Any, pair: Any) -> Any:
        return problem.accuracy_sums(model, pair[1])

    return method, jax.jit(partial(method.local_models, use=score))


def alone(settings: Settings, split: str, seed: int) -> float:
    """Return the test accuracy of clients that train without communication.

    Each client takes twice as many steps as a client of a run does on average.
    """
    task = load(data_of(settings), split)
    params = task.problem.init(jax.random.key(1000 + seed), task.train.inputs[0, :1])
    n = len(task.train.weights)
    steps = max(1, 2 * settings.rounds * settings.steps * min(settings.cohort, n) // n)
    models = flix.local_sgd(
        jax.random.key(seed),
        jax.value_and_grad(task.problem.loss),
        params,
        task.train,
        stepsize=settings.stepsize,
        steps=steps,
        sample=local.minibatch(settings.batch),
        over=jax.vmap if settings.model == "mlp" else rounds.one_by_one,
    )
    clients, server = ditto.Client(jnp.arange(n), models), fedavg.Server(jnp.zeros((), jnp.int32), params)
    return float(networks.accuracy(task.problem, _personal, None, server, clients, task.test))


def measure(runs: Sequence[Run], settings: Settings, *, local_only: bool = False) -> list[dict]:
    """Train all runs and return one row per run and split.

    A row has accuracies and bits per client and round, as mean and deviation over the seeds. The seeds also draw the
    plans.

    Args:
        runs: The runs.
        settings: Settings of all runs.
        local_only: Add a row for clients that train without communication.
    """
    for split in settings.splits:  # fail before training if data are missing
        load(data_of(settings), split)
    rows = []
    for split in settings.splits:
        for run in runs:
            try:
                records = [train(run, settings, split, seed) for seed in range(settings.seeds)]
            except runner.DivergedError as error:  # the row gets nan, and the other runs go on
                print(f"{run.name}, {split}: {error}")
                gone = np.full(1, np.nan)
                rows.append(_row(run.name, split, gone, gone, {"up": gone, "down": gone}, {}))
                continue
            last = 100 * np.array([record.evaluations["test"][-1] for record in records])
            local_scores = 100 * np.array([record.evaluations.get("local", [np.nan])[-1] for record in records])
            n, m = (int(records[0].config[name]) for name in ("clients", "cohort"))
            sent = {way: [np.mean(r.metrics[f"bits_{way}"]) * n / min(m, n) for r in records] for way in ("up", "down")}
            rows.append(_row(run.name, split, last, local_scores, sent, records[0].config.get("expected", {})))
        if local_only:
            last = 100 * np.array([alone(settings, split, seed) for seed in range(settings.seeds)])
            rows.append(_row("local only", split, last, last * np.nan, {"up": [0.0], "down": [0.0]}, {}))
    return rows


def _deviation(values: np.ndarray | Sequence[float]) -> float:
    return float(np.std(values, ddof=1)) if len(values) > 1 else float("nan")


def _row(name: str, split: str, accuracy: np.ndarray, local_scores: np.ndarray, sent: dict, expected: dict) -> dict:
    row = {"split": split, "name": name, "accuracy": float(accuracy.mean()), "std": _deviation(accuracy)}
    row |= {"local": float(local_scores.mean()), "local std": _deviation(local_scores)}
    for way in ("up", "down"):
        row |= {way: float(np.mean(sent[way])), f"{way} std": _deviation(sent[way])}
        row[f"{way} expected"] = float(expected.get(way, row[way]))
    return row
