"""Runs of Chapter 4 and what a table says of them.

All methods have the same stepsize, local steps and rows.  A seed draws the plan (who trains which layers), the network's start, cohorts,
rows and masks.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
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
from experiments.fedp3.plans import TOGETHER, Run, expected_bits, plans_of, possible, program_of, pruning_in
from experiments.fedp3.task import Settings, Task, data_of, load, shape_of
from experiments.scafflix.networks import accuracy


@cache
def algorithm_of(run: Run, settings: Settings, split: str, seed: int) -> Algorithm:
    """One object for what has the same plans: seeds share a compiled program."""
    task = load(data_of(settings), split)
    how: dict[str, Any] = _how(settings) | {"cohort": settings.cohort}
    sample, n = local.minibatch(settings.batch), len(task.train.weights)
    if run.method == "fedcr":
        return fedcr.fedcr(fedp3_fedcr.network(fedp3_fedcr.modules(settings)), sample, **how)
    if run.method == "fedcr_layers":
        plan, _ = plans_of(run, settings, fedp3_fedcr.layers(settings, task), n, seed)
        return fedcr_layers.fedcr_layers(fedp3_fedcr.network(fedp3_fedcr.modules(settings)), plan, sample, **how)
    if run.method in ("fedavg", "fedprox", "ditto"):
        made = {"fedavg": fedavg.fedavg, "fedprox": fedprox.fedprox, "ditto": ditto.ditto}[run.method]
        return made(jax.value_and_grad(task.problem.loss), sample, **how)
    joins = {
        "simple": aggregation.simple(),
        "weighted": aggregation.weighted(),
        "attention": aggregation.attention(task.held),
    }
    plan, _ = plans_of(run, settings, task.layers, n, seed)
    return fedp3.fedp3(
        task.problem.loss,
        plan,
        sample,
        local_pruning=pruning_in(plan, run, settings),
        aggregate=joins[run.aggregate],
        others=settings.others,
        **how,
    )


def _how(settings: Settings) -> dict[str, Any]:
    return {"steps": settings.steps, "over": jax.vmap if settings.model == "mlp" else rounds.one_by_one}


def hparams_of(run: Run, settings: Settings) -> Any:
    gamma = settings.stepsize
    made = {
        "fedprox": fedprox.HParams(gamma, 0.1, 1.0),
        "ditto": ditto.HParams(gamma, gamma, 0.1, 1.0),
        "fedcr": fedcr.HParams(gamma, 0.001, 1.0),
    }
    return made.get(run.method.removesuffix("_layers"), fedavg.HParams(gamma, 1.0))


def _global(hparams, server, client):
    return server.params


def _own(hparams, server, client):
    return client.model


def _start(run: Run, task: Task, settings: Settings, seed: int) -> tuple[Any, networks.Classification, Any]:
    """Params, the problem by which they are judged, and what a client deploys."""
    key, first = jax.random.key(1000 + seed), task.train.inputs[0, :1]
    if not run.method.startswith("fedcr"):
        return task.problem.init(key, first), task.problem, _own if run.method == "ditto" else _global
    made = fedp3_fedcr.modules(settings)
    return fedp3_fedcr.start(made, key, first), fedp3_fedcr.judge(made), fedp3_fedcr.deployed


def train(run: Run, settings: Settings, split: str, seed: int) -> Record:
    """One run; its record has the test accuracy every few rounds, over the test rows of all clients, and that of local models."""
    task = load(data_of(settings), split)
    shared, n = shape_of(settings), len(task.train.weights)
    algorithm, hparams = (
        algorithm_of(program_of(run, shared), shared, split, seed - seed % TOGETHER),
        hparams_of(run, settings),
    )
    params, problem, model = _start(run, task, shared, seed)
    planned = run.method in ("fedp3", "fedcr_layers")
    rows = {"rows": plans_of(run, shared, task.layers, n, seed)[1]} if planned else {}
    begin: Any = algorithm.init  # that of methods with a plan has more arguments

    def evaluate(state):
        return {"test": float(accuracy(problem, model, hparams, state.server, state.clients, task.test))}

    words = [settings.task, split, settings.model, run.label(), "" if settings.others == "frozen" else settings.others]
    label = "_".join(filter(None, [*words, str(seed)]))
    path = settings.out / "runs" / label
    bits = expected_bits(run, task.layers, params, n) if run.method == "fedp3" else {}
    if run.method == "fedcr_layers":
        bits = fedp3_fedcr.expected_bits(*possible(run, fedp3_fedcr.layers(shared, task)), shared, params)
    state, record = runner.loop(
        jax.random.key(seed),
        algorithm,
        hparams,
        begin(params, jnp.arange(n), **rows),
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
    program = replace(program_of(run, settings), aggregate="simple")
    sums = _local_sums(program, settings, split, seed - seed % TOGETHER)
    _, rows = plans_of(run, settings, task.layers, len(task.train.weights), seed)
    state = State(state.server, fedp3.Client(state.clients.id, row=None if rows is None else jnp.asarray(rows)))
    right, total = sums(jax.random.key(seed), hparams, state, (task.train, task.test))
    return float(np.mean(np.asarray(right) / np.asarray(total)))


@cache
def _local_sums(run: Run, settings: Settings, split: str, first: int):
    task = load(data_of(settings), split)
    plan, _ = plans_of(run, settings, task.layers, len(task.train.weights), first)
    problem, draw = task.problem, local.minibatch(settings.batch)

    @jax.jit
    def sums(key, hparams, state, data):
        return fedp3.local_models(
            key,
            hparams,
            state,
            data,
            problem.loss,
            plan,
            lambda key, pair: draw(key, pair[0]),
            local_pruning=pruning_in(plan, run, settings),
            others=settings.others,
            **_how(settings),
            use=lambda model, pair: problem.accuracy_sums(model, pair[1]),
        )

    return sums


def alone(settings: Settings, split: str, seed: int) -> float:
    """Test accuracy of clients that train by themselves as many steps as a client of a run does on average, twice over."""
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
    rows = ditto.Client(jnp.arange(n), models)
    return float(accuracy(task.problem, _own, None, fedavg.Server(jnp.zeros((), jnp.int32), params), rows, task.test))


def measure(runs: Sequence[Run], settings: Settings, *, local_only: bool = False) -> list[dict]:
    """One row a run and split: accuracies and bits of a client a round, mean and deviation over the seeds, which draw plans too."""
    for split in settings.splits:  # before anything is trained
        load(data_of(settings), split)
    rows = []
    for split in settings.splits:
        for run in runs:
            try:
                records = [train(run, settings, split, seed) for seed in range(settings.seeds)]
            except runner.DivergedError as error:  # the table goes on, with nan in this row
                print(f"{run.name}, {split}: {error}")
                gone = np.full(1, np.nan)
                rows.append(_row(run.name, split, gone, gone, {"up": gone, "down": gone}, {}))
                continue
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
