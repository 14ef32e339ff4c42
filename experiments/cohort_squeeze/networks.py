"""Networks of Chapter 5: training accuracy of the global model against communication cost, SPPM-NICE and LocalGD.

FEMNIST is not public in a form that may be redistributed.  Fashion-MNIST with 5 of 10 classes per client replaces it
(`--task digits` is embedded).  Without an accelerator an MLP replaces the CNN (`--model thesis` is a full CNN).  Rates
are tuned over one grid with one seed; figures show other seeds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree

from commjax.algorithms import local_gd, sppm_as
from commjax.core import rounds, runner
from commjax.core.base import Algorithm, State
from commjax.core.records import Record
from commjax.data.stacked import Examples
from commjax.models.networks import Classification
from commjax.prox.solvers import federated
from commjax.sampling import samplings
from commjax.theory import sppm as theory
from experiments import saved
from experiments.cohort_squeeze.workers import ADAM, WORKERS, Worker
from experiments.scafflix import networks as scafflix_networks

Rate = float | tuple[float, float]  # of the clients, or of the clients and the server


@dataclass(frozen=True)
class Settings:
    task: Literal["digits", "fashion"] = "fashion"  # digits is embedded; Fashion-MNIST is read from $COMMJAX_DATA
    model: Literal["small", "mlp", "thesis"] = "mlp"  # small, thesis: CNNs, for an accelerator
    clients: int = 100  # clients, at most
    rows: int = 200  # rows of each client, at most
    cohort: int = 10  # clients per round, nice sampling
    gamma: float = 1.0  # stepsize of the prox
    local: tuple[int, ...] = (1, 2, 3, 5, 8)  # K, local communication rounds
    steps: tuple[int, ...] = (1, 5, 10)  # LocalGD's local gradient steps
    rounds: int = 60  # global rounds, at most; LocalGD: four times as many
    rates: tuple[float, ...] = (0.0003, 0.001, 0.003, 0.01, 0.03)  # rates of Adam
    stepsizes: tuple[float, ...] = (0.03, 0.1, 0.3, 1.0)  # stepsizes of LocalGD
    tune_rounds: int = 20  # rounds of a run that tunes a rate
    workers: tuple[str, ...] = ()  # solvers of `network-solvers`; none: all
    targets: tuple[float, ...] = (0.65, 0.7, 0.75)  # target training accuracies
    c1: tuple[float, ...] = (0.05, 0.1, 0.2, 0.5, 1.0)  # cost of a local round, where a global one costs 1
    every: int = 2  # global rounds between two evaluations
    seeds: int = 3  # runs behind the error bars
    out: Path = Path("results/cohort_squeeze")  # folder of records, figures and checkpoints
    progress: bool = True  # show a progress bar


class Method(NamedTuple):
    """A method with its hparams and its cost.

    Attributes:
        name: Name for files.
        algorithm: The algorithm.
        hparams: rate -> hparams.
        round_cost: (c1, c2) -> cost of a global round.
    """

    name: str
    algorithm: Algorithm
    hparams: Callable[[Any], Any]
    round_cost: Callable[[float, float], float]


class Runs(NamedTuple):
    """The runs of a method, one per seed.

    Attributes:
        method: The method.
        rate: Its tuned rate.
        records: The records of the seeds.
    """

    method: Method
    rate: Any
    records: list[Record]


class Measured(NamedTuple):
    """The runs of both methods.

    Attributes:
        sppm: K -> runs of SPPM-NICE.
        localgd: Local steps -> runs of LocalGD.
    """

    sppm: dict[int, Runs]
    localgd: dict[int, Runs]

    def rates(self) -> dict[str, dict[str, Any]]:
        """The tuned rate of every setting, by method."""
        return {name: {str(k): runs.rate for k, runs in several.items()} for name, several in self._asdict().items()}


Load = tuple[str, str, int, int]  # arguments of `scafflix_networks.load`


def load_of(settings: Settings) -> Load:
    """Arguments of `scafflix_networks.load`."""
    return settings.task, settings.model, settings.clients, settings.rows


@cache
def _proximal(load: Load, cohort: int, worker: Worker) -> Algorithm:
    """One object, so that all K, rates and seeds share a compiled program."""
    task = scafflix_networks.load(*load)
    n = len(task.train.weights)
    unravel = ravel_pytree(task.problem.init(jax.random.key(0), task.train.inputs[0, :1]))[1]
    return sppm_as.sppm_as(
        task.problem.loss,
        samplings.nice(n, min(cohort, n)),
        lambda hparams: worker.make(hparams.rate, unravel),
        vectors=float(federated.vectors_per_round(worker.kind)),
        received=float(federated.vectors_down(worker.kind)),
    )


@cache
def _local_gd(load: Load, cohort: int) -> Algorithm:
    """One object, so that all steps, stepsizes and seeds share a compiled program."""
    task = scafflix_networks.load(*load)
    n = len(task.train.weights)
    return local_gd.mb_local_gd(jax.value_and_grad(task.problem.loss), samplings.nice(n, min(cohort, n)))


def proximal(K: int, settings: Settings, worker: Worker = ADAM, name: str = "sppm") -> Method:
    """SPPM-NICE with K local rounds; the solver's rate is tuned."""
    return Method(
        f"{name}_K{K}",
        _proximal(load_of(settings), settings.cohort, worker),
        lambda rate: sppm_as.HParams(settings.gamma, K, rate=rate),
        lambda c1, c2: theory.cost(c1, c2, K, 1),
    )


def averaging(steps: int, settings: Settings) -> Method:
    """LocalGD on the same cohorts; its stepsize is tuned."""
    return Method(
        f"localgd_{steps}",
        _local_gd(load_of(settings), settings.cohort),
        lambda rate: local_gd.HParams(rate, steps),
        lambda c1, c2: theory.localgd_cost(c1, c2, 1),
    )


@partial(jax.jit, static_argnames=("problem",))
def accuracy(problem: Classification, params: Any, examples: Examples) -> jax.Array:
    """Share of right predictions of the global model, over all targets of all clients."""
    right, total = rounds.one_by_one(partial(problem.accuracy_sums, params))(examples)
    return right.sum() / total.sum()


def train(
    task: scafflix_networks.Task, method: Method, rate: Rate, seed: int, rounds: int, settings: Settings
) -> Record:
    """One run; its record has training and test accuracy every few rounds."""
    algorithm, hparams = method.algorithm, method.hparams(rate)
    params = task.problem.init(jax.random.key(1000 + seed), task.train.inputs[0, :1])
    state = algorithm.init(params, jnp.arange(len(task.train.weights)))

    def evaluate(state: State) -> dict[str, float]:
        measured = partial(accuracy, task.problem, state.server.params)
        return {"train": float(measured(task.train)), "test": float(measured(task.test))}

    label = f"{settings.task}_{settings.model}_{method.name}_{shown(rate)}_{seed}_{rounds}"
    return saved.run(
        settings.out / "networks" / label,
        jax.random.key(seed),
        algorithm,
        hparams,
        state,
        task.train,
        rounds=rounds,
        chunk=settings.every,
        evaluate=evaluate,
        progress=settings.progress,
        config={"task": settings.task, "method": method.name, "rate": rate, "seed": seed, "cohort": settings.cohort},
    )


def shown(rate: Rate) -> str:
    """A rate, or a pair of rates, as text."""
    return "_".join(f"{number:g}" for number in (rate if isinstance(rate, tuple) else (rate,)))


def tuned(task: scafflix_networks.Task, method: Method, rates: Sequence[Rate], settings: Settings, rounds: int) -> Any:
    """The rate with the best training accuracy over the second half of a short run, seed 0.

    A run that diverges loses.
    """
    scores = {}
    for rate in rates:
        try:
            curve = train(task, method, rate, 0, rounds, settings).evaluations["train"]
            scores[rate] = float(curve[len(curve) // 2 :].mean())
        except runner.DivergedError:
            scores[rate] = -1.0
    return max(scores, key=lambda rate: scores[rate])


def run_tuned(
    task: scafflix_networks.Task, method: Method, rates: Sequence[Rate], settings: Settings, *, longer: int = 1
) -> Runs:
    """Tune the rate of a method, then run it with every seed; both runs are `longer` times as long as usual."""
    rate = tuned(task, method, rates, settings, longer * settings.tune_rounds)
    length, seeds = longer * settings.rounds, range(settings.seeds)
    return Runs(method, rate, [train(task, method, rate, 1 + seed, length, settings) for seed in seeds])


@cache
def measure(settings: Settings) -> Measured:
    """Runs of SPPM-NICE by K and of LocalGD by steps, each with its tuned rate."""
    task = scafflix_networks.load(*load_of(settings))
    ours = {K: run_tuned(task, proximal(K, settings), settings.rates, settings) for K in settings.local}
    theirs = {
        steps: run_tuned(task, averaging(steps, settings), settings.stepsizes, settings, longer=4)
        for steps in settings.steps
    }
    return Measured(ours, theirs)


def measure_solvers(settings: Settings) -> dict[str, Runs]:
    """Runs of SPPM-NICE with K = 3 by the workers of the settings; all rates are tuned over the same grid."""
    if unknown := set(settings.workers) - set(WORKERS):
        raise ValueError(f"workers has {', '.join(sorted(unknown))}; allowed: {', '.join(WORKERS)}")
    task = scafflix_networks.load(*load_of(settings))
    rates = tuple(sorted({*settings.rates, *settings.stepsizes}))
    pairs = tuple((rate, server) for rate in rates for server in rates)
    runs = {}
    for name in settings.workers or WORKERS:
        worker = WORKERS[name]
        method = proximal(3, settings, worker, name)
        runs[name] = run_tuned(task, method, pairs if worker.two_rates else rates, settings)
    return runs


def rounds_to(records: list[Record], target: float) -> np.ndarray:
    """[seed]: the first evaluated round with that training accuracy, or nan."""
    needed = []
    for record in records:
        reached = np.flatnonzero(record.evaluations["train"] >= target)
        needed.append(record.evaluations["round"][reached[0]] if len(reached) else np.nan)
    return np.array(needed)


def _deviation(values: np.ndarray) -> float:
    """The deviation over seeds; 0 for one seed."""
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0


def cheapest(runs: dict[int, Runs], target: float, c1: float, c2: float) -> tuple[float, float, int] | None:
    """(mean cost, deviation over seeds, setting) of the cheapest setting that reaches the target with every seed."""
    best = None
    for setting, (method, _, records) in runs.items():
        needed = rounds_to(records, target) * method.round_cost(c1, c2)
        if np.isfinite(needed).all() and (best is None or needed.mean() < best[0]):
            best = (float(needed.mean()), _deviation(needed), setting)
    return best


def cost_rows(runs: Measured, settings: Settings) -> list[dict[str, Any]]:
    """One row per target and (c1, c2): the cheapest settings of both methods."""
    rows = []
    for target in settings.targets:
        for c1, c2 in [*((c1, 1.0) for c1 in settings.c1), (1.0, 0.0)]:
            row: dict[str, Any] = {"target": target, "c1": c1, "c2": c2}
            for name, several, key in (("sppm", runs.sppm, "K"), ("localgd", runs.localgd, "steps")):
                best = cheapest(several, target, c1, c2)
                row |= {name: None} if best is None else {name: best[0], f"{name}_std": best[1], key: best[2]}
            rows.append(row)
    return rows


def solver_rows(runs: dict[str, Runs]) -> list[dict[str, Any]]:
    """One row per worker: its last accuracies and what a client sent."""
    rows = []
    for name, (_, rate, records) in runs.items():
        row: dict[str, Any] = {"solver": name, "rate": rate}
        for part in ("train", "test"):
            last = 100 * np.array([record.evaluations[part] for record in records])[:, -1]
            row |= {part: float(last.mean()), f"{part}_std": _deviation(last)}
        row["megabits"] = float(np.mean([record.metrics["bits_up"].sum() for record in records])) / 1e6
        rows.append(row)
    return rows
