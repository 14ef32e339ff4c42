"""Networks of Chapter 5: training accuracy of the global model against communication cost, SPPM-NICE and LocalGD.

    python -m experiments.cohort_squeeze networks        cost to target accuracies, c1 from 0.05 to 1, c2 = 1 (and 1, 0)
    python -m experiments.cohort_squeeze network-solvers the prox by FedSGD, FedAdam, MimeLite-Adam, ... at K = 3

FEMNIST is not public in a form that may be redistributed.  Fashion-MNIST with 5 of 10 classes per client replaces it
(`--task digits` is embedded).  Without an accelerator an MLP replaces the CNN (`--model thesis` is a full CNN).  Rates
are tuned over one grid with one seed; figures show other seeds.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from commjax.algorithms import local_gd, sppm_as
from commjax.core import rounds, runner
from commjax.core.base import Algorithm
from commjax.core.records import Record
from commjax.prox.solvers import adaptive, federated
from commjax.sampling import samplings
from commjax.theory import sppm as theory
from experiments import plots, tables
from experiments.scafflix import networks as scafflix_networks


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
        price: (c1, c2) -> cost of a global round.
    """

    name: str
    algorithm: Algorithm
    hparams: Callable[[float], Any]
    price: Callable[[float, float], float]


Load = tuple[str, str, int, int]  # arguments of `scafflix_networks.load`


def load_of(settings: Settings) -> Load:
    """Arguments of `scafflix_networks.load`."""
    return settings.task, settings.model, settings.clients, settings.rows


class Worker(NamedTuple):
    """A solver of a network's prox.

    Attributes:
        make: (rate, function that unflattens the parameters) -> the solver.  With `two_rates` the rate is a pair, the
            clients' and the server's.
        kind: The solver's function, which says what a client sends (`federated.vectors_per_round`).
        two_rates: Whether the server has a rate of its own.
    """

    make: Callable[[Any, Callable], Any]
    kind: Callable
    two_rates: bool = False


ADAM = Worker(lambda rate, unravel: adaptive.adam(rate), adaptive.adam)


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
def accuracy(problem, params, examples) -> jax.Array:
    """Share of right predictions of the global model, over all targets of all clients."""
    right, total = rounds.one_by_one(partial(problem.accuracy_sums, params))(examples)
    return right.sum() / total.sum()


def train(task, method: Method, rate: Any, seed: int, rounds: int, settings: Settings) -> Record:
    """One run; its record has training and test accuracy every few rounds."""
    algorithm, hparams = method.algorithm, method.hparams(rate)
    params = task.problem.init(jax.random.key(1000 + seed), task.train.inputs[0, :1])
    state = algorithm.init(params, jnp.arange(len(task.train.weights)))

    def evaluate(state):
        measured = partial(accuracy, task.problem, state.server.params)
        return {"train": float(measured(task.train)), "test": float(measured(task.test))}

    label = f"{settings.task}_{settings.model}_{method.name}_{shown(rate)}_{seed}_{rounds}"
    path = settings.out / "networks" / label
    _, record = runner.loop(
        jax.random.key(seed),
        algorithm,
        hparams,
        state,
        task.train,
        rounds,
        chunk=settings.every,
        evaluate=evaluate,
        checkpoint=path.with_name(path.name + ".ckpt"),
        label=label,
        progress=settings.progress,
        config={"task": settings.task, "method": method.name, "rate": rate, "seed": seed, "cohort": settings.cohort},
    )
    record.save(path)
    return record


def shown(rate: Any) -> str:
    """A rate, or a pair of rates, as text."""
    return "_".join(f"{one:g}" for one in rate) if isinstance(rate, tuple) else f"{rate:g}"


def tuned(task, method: Method, rates, settings: Settings, rounds: int) -> Any:
    """The rate with the best training accuracy over the second half of a short run, seed 0.

    A run that diverges loses.
    """
    scores = {}
    for rate in rates:
        try:
            found = train(task, method, rate, 0, rounds, settings).evaluations["train"]
            scores[rate] = float(found[len(found) // 2 :].mean())
        except runner.DivergedError:
            scores[rate] = -1.0
    return max(scores, key=lambda rate: scores[rate])


def rounds_to(records: list[Record], target: float) -> np.ndarray:
    """[seed]: the first evaluated round with that training accuracy, or nan."""
    found = []
    for record in records:
        reached = np.flatnonzero(record.evaluations["train"] >= target)
        found.append(record.evaluations["round"][reached[0]] if len(reached) else np.nan)
    return np.array(found)


@cache
def measure(settings: Settings) -> tuple[dict[int, tuple[Method, float, list[Record]]], dict]:
    """Runs of SPPM-NICE by K and of LocalGD by steps, each with its tuned rate."""
    task = scafflix_networks.load(*load_of(settings))

    def runs(method, rates, rounds, tune):
        rate = tuned(task, method, rates, settings, tune)
        return method, rate, [train(task, method, rate, 1 + seed, rounds, settings) for seed in range(settings.seeds)]

    ours = {
        K: runs(proximal(K, settings), settings.rates, settings.rounds, settings.tune_rounds) for K in settings.local
    }
    theirs = {
        steps: runs(averaging(steps, settings), settings.stepsizes, 4 * settings.rounds, 4 * settings.tune_rounds)
        for steps in settings.steps
    }
    return ours, theirs


def cheapest(runs: dict, target: float, c1: float, c2: float) -> tuple[float, float, int] | None:
    """(mean cost, deviation over seeds, setting) of the cheapest setting that reaches the target with every seed."""
    best = None
    for setting, (method, _, records) in runs.items():
        needed = rounds_to(records, target) * method.price(c1, c2)
        if np.isfinite(needed).all() and (best is None or needed.mean() < best[0]):
            best = (float(needed.mean()), float(needed.std(ddof=1)) if len(needed) > 1 else 0.0, setting)
    return best


def networks(settings: Settings) -> list[dict]:
    """Figs. D.7 and D.8: least cost to target training accuracies, for several c1."""
    ours, theirs = measure(settings)
    rows: list[dict] = []
    prices = [*((c1, 1.0) for c1 in settings.c1), (1.0, 0.0)]
    for target in settings.targets:
        for c1, c2 in prices:
            row: dict[str, Any] = {"target": target, "c1": c1, "c2": c2}
            for name, runs, key in (("sppm", ours, "K"), ("localgd", theirs, "steps")):
                best = cheapest(runs, target, c1, c2)
                row |= {name: None} if best is None else {name: best[0], f"{name}_std": best[1], key: best[2]}
            rows.append(row)
    figure, axes = plt.subplots(1, 2, figsize=(6.4, 2.6), layout="constrained")
    for K, (_, _, records) in ours.items():
        plots_curve(axes[0], records, settings, f"SPPM-NICE, $K$ = {K}", 0.1 * K + 1)
    for steps, (_, _, records) in theirs.items():
        plots_curve(axes[0], records, settings, f"LocalGD, {steps} steps", 1.1, "--")
    axes[0].set_xlabel("cost $(0.1 K + 1) T$")
    axes[0].set_ylabel("training accuracy, %")
    axes[0].set_title(f"{settings.task}, {settings.cohort} clients a round")
    axes[0].legend(fontsize=5)
    for number, target in enumerate(settings.targets):
        for name, line in (("sppm", "o-"), ("localgd", "s--")):
            values = [row.get(name) for row in rows if row["target"] == target and row["c2"] == 1.0]
            label = f"{'SPPM-NICE' if name == 'sppm' else 'LocalGD'}, {100 * target:g} %"
            axes[1].plot(
                settings.c1,
                [np.nan if v is None else v for v in values],
                line,
                color=f"C{number}",
                markersize=3,
                linewidth=1,
                label=label,
            )
    axes[1].set_xscale("log")
    axes[1].set_yscale("log")
    axes[1].set_xlabel("$c_1$ ($c_2$ = 1)")
    axes[1].set_ylabel("least cost to the target")
    axes[1].legend(fontsize=5)
    plots.save(figure, settings.out / f"networks_{settings.task}_{settings.model}.png")
    lines = [f"{'target':>7} {'c1':>5} {'c2':>3} {'SPPM-NICE (K)':>22} {'LocalGD (steps)':>24}"]
    for r in rows:
        cells = [
            "-" if r[name] is None else f"{r[name]:.1f} +- {r[f'{name}_std']:.1f} ({r[key]})"
            for name, key in (("sppm", "K"), ("localgd", "steps"))
        ]
        lines.append(f"{r['target']:7g} {r['c1']:5g} {r['c2']:3g} {cells[0]:>22} {cells[1]:>24}")
    rates = {
        name: {str(k): rate for k, (_, rate, _) in runs.items()} for name, runs in (("sppm", ours), ("localgd", theirs))
    }
    lines.append(f"tuned rates: {rates}")
    tables.save(
        settings.out / f"networks_{settings.task}_{settings.model}",
        [{**row, "rates": rates} for row in rows],
        "\n".join(lines),
    )
    return rows


def plots_curve(axis, records: list[Record], settings: Settings, label: str, price: float, line: str = "-") -> None:
    """Draw training accuracy against cost, with its deviation over seeds."""
    scores = 100 * np.array([record.evaluations["train"] for record in records])
    at = records[0].evaluations["round"] * price
    (drawn,) = axis.plot(at, scores.mean(axis=0), line, linewidth=1, label=label)
    if len(scores) > 1:
        low, high = scores.mean(axis=0) - scores.std(axis=0, ddof=1), scores.mean(axis=0) + scores.std(axis=0, ddof=1)
        axis.fill_between(at, low, high, color=drawn.get_color(), alpha=0.15, linewidth=0)


# Every client takes three local steps in a local round, as in Fig. D.9.  The clients' rate is tuned, and the server's
# too if the server has an optimizer of its own.
WORKERS: dict[str, Worker] = {
    "FedSGD": Worker(lambda rate, unravel: federated.fed_opt(3, rate, optax.sgd(1.0)), federated.fed_opt),
    "FedAdam": Worker(
        lambda rate, unravel: federated.fed_opt(3, rate, optax.sgd(1.0), optax.scale_by_adam()), federated.fed_opt
    ),
    "FedAdam-Adam": Worker(
        lambda rate, unravel: federated.fed_adam(3, *rate, local=optax.scale_by_adam()),
        federated.fed_adam,
        two_rates=True,
    ),
    "FedAdam-AdaGrad": Worker(
        lambda rate, unravel: federated.fed_adam(3, *rate, local=optax.scale_by_rss()),
        federated.fed_adam,
        two_rates=True,
    ),
    "Mime-Adam": Worker(lambda rate, unravel: federated.mime(3, rate), federated.mime),
    "MimeLite-Adam": Worker(lambda rate, unravel: federated.mime_lite(3, rate), federated.mime_lite),
    "FedSpeed": Worker(lambda rate, unravel: federated.fed_speed(3, rate, 0.1), federated.fed_speed),
    "Fed-LAMB": Worker(lambda rate, unravel: federated.fed_lamb(3, rate, unravel), federated.fed_lamb),
    "Adam": ADAM,
    "Apollo": Worker(lambda rate, unravel: adaptive.apollo(rate), adaptive.apollo),
    "OASIS": Worker(lambda rate, unravel: adaptive.oasis(rate), adaptive.oasis),
}


def network_solvers(settings: Settings) -> list[dict]:
    """Fig. D.9 and Table 5.2: K = 3 local rounds of 3 worker steps, gamma = 1, the same tuning grid for all rates."""
    task = scafflix_networks.load(*load_of(settings))
    rates = tuple(sorted({*settings.rates, *settings.stepsizes}))
    pairs = tuple((rate, server) for rate in rates for server in rates)
    rows, figure_axes = [], plt.subplots(1, 2, figsize=(6.2, 2.6), layout="constrained", sharex=True)
    figure, axes = figure_axes
    if unknown := set(settings.workers) - set(WORKERS):
        raise ValueError(f"workers has {', '.join(sorted(unknown))}; allowed: {', '.join(WORKERS)}")
    for name in settings.workers or WORKERS:
        worker = WORKERS[name]
        method = proximal(3, settings, worker, name)
        rate = tuned(task, method, pairs if worker.two_rates else rates, settings, settings.tune_rounds)
        records = [train(task, method, rate, 1 + seed, settings.rounds, settings) for seed in range(settings.seeds)]
        row: dict[str, Any] = {"solver": name, "rate": rate}
        for axis, part in zip(axes, ("train", "test")):
            scores = 100 * np.array([record.evaluations[part] for record in records])
            axis.plot(records[0].evaluations["round"], scores.mean(axis=0), linewidth=1, label=name)
            row |= {
                part: float(scores[:, -1].mean()),
                f"{part}_std": float(scores[:, -1].std(ddof=1)) if len(scores) > 1 else 0.0,
            }
        row["megabits"] = float(np.mean([record.metrics["bits_up"].sum() for record in records])) / 1e6
        rows.append(row)
    for axis, part in zip(axes, ("training", "test")):
        axis.set_xlabel("global rounds, $K$ = 3")
        axis.set_ylabel(f"{part} accuracy, %")
    axes[0].legend(fontsize=6)
    plots.save(figure, settings.out / f"network_solvers_{settings.task}_{settings.model}.png")
    lines = [f"{'solver':15} {'rate':>12} {'training, %':>16} {'test, %':>16} {'Mbit up a client':>17}"]
    lines += [
        f"{r['solver']:15} {shown(r['rate']):>12} {r['train']:8.2f} +- {r['train_std']:4.2f} "
        f"{r['test']:8.2f} +- {r['test_std']:4.2f} {r['megabits']:17.1f}"
        for r in rows
    ]
    tables.save(settings.out / f"network_solvers_{settings.task}_{settings.model}", rows, "\n".join(lines))
    return rows
