"""Networks of Chapter 3: accuracy of the models that clients deploy, on rows that were not used for training or tuning.

Every client's rows are cut into training, validation and test parts (60/15/25 %).  Stepsizes are tuned over one grid,
the same for all methods, by validation accuracy with one seed.  The figures show test accuracy over `seeds` other
seeds, which draw the network's start, the local optima, cohorts, coins and rows.  All methods do the same work per
round on average: FedAvg, FedProx, Scaffold and Ditto take 1/p local steps of `batch` rows, Scafflix takes Geometric(p)
such steps, and FLIX takes one step of batch/p rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from commjax.algorithms import ditto, fedavg, fedprox, flix, scafflix, scaffold
from commjax.core import local, rounds, runner
from commjax.core.base import Algorithm, State
from commjax.core.records import Record
from commjax.data import embedded, images, partition, stacked, text
from commjax.data.stacked import Examples
from commjax.models import networks
from experiments import saved


@dataclass(frozen=True)
class Settings:
    # digits is embedded; the others are read from $COMMJAX_DATA
    task: Literal["digits", "fashion", "shakespeare"] = "fashion"
    # thesis / fedjax: the full CNN or LSTM, for an accelerator
    model: Literal["small", "mlp", "thesis", "fedjax"] = "small"
    clients: int = 100  # clients, at most; Shakespeare: the speakers with most windows
    rows: int = 200  # rows of each client, at most
    cohort: int = 10  # clients per round
    rounds: int = 200  # communication rounds
    batch: int = 20  # rows of a stochastic gradient
    p: float = 0.2  # Scafflix's probability to communicate; the others take 1/p local steps
    alpha: float = 0.3  # weight of the global model
    local_steps: int = 200  # steps of each client's own training towards x_i*
    local_stepsize: float = 0.1  # stepsize of this training
    stepsizes: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0)  # the grid, the same for all methods
    seeds: int = 5  # runs behind the error bars
    every: int = 20  # rounds between two evaluations
    out: Path = Path("results/scafflix")  # folder of records, figures and checkpoints
    progress: bool = True  # show a progress bar


class Task(NamedTuple):
    """Rows of all clients, stacked, and the problem's functions.

    Attributes:
        train: Training rows.
        validation: Rows to tune stepsizes on.
        test: Test rows.
        problem: Start, loss and accuracy of the network.
    """

    train: Examples
    validation: Examples
    test: Examples
    problem: networks.Classification


# (hparams, server's state, one client's state) -> the parameters that the client deploys
Deployed = Callable[[Any, Any, Any], Any]


class Method(NamedTuple):
    """How a method is built, and which model its clients deploy.

    Attributes:
        build: (value_and_grad, settings) -> the algorithm.
        hparams: (stepsize, settings) -> its hparams.
        model: (hparams, server's state, one client's state) -> the parameters that the client deploys.
        personal: Whether it starts from local optima.
    """

    build: Callable[[Any, Settings], Algorithm]
    hparams: Callable[[float, Settings], Any]
    model: Deployed = lambda hparams, server, client: server.params
    personal: bool = False


def _steps(settings: Settings) -> int:
    return round(1 / settings.p)


def _options(settings: Settings) -> dict[str, Any]:
    """Options of the algorithm.

    A full network fills the machine by itself, so running clients one by one is faster.
    """
    return {"cohort": settings.cohort, "over": jax.vmap if settings.model in ("small", "mlp") else rounds.one_by_one}


def _local(make: Callable[..., Algorithm]) -> Callable[[Any, Settings], Algorithm]:
    def build(value_and_grad: local.ValueAndGrad, settings: Settings) -> Algorithm:
        return make(value_and_grad, local.minibatch(settings.batch), steps=_steps(settings), **_options(settings))

    return build


def _mixed(hparams: Any, server: Any, client: Any) -> Any:
    return flix.mixture(hparams.alpha, server.params, client.optimum)


METHODS = {
    "Scafflix": Method(
        lambda f, s: scafflix.scafflix(f, local.minibatch(s.batch), **_options(s)),
        lambda gamma, s: scafflix.HParams(gamma, s.alpha, s.p),
        _mixed,
        personal=True,
    ),
    "FLIX": Method(
        lambda f, s: flix.flix(f, local.minibatch(s.batch * _steps(s)), **_options(s)),
        lambda gamma, s: flix.HParams(gamma, s.alpha),
        _mixed,
        personal=True,
    ),
    "FedAvg": Method(_local(fedavg.fedavg), lambda gamma, s: fedavg.HParams(gamma, 1.0)),
    "FedProx": Method(_local(fedprox.fedprox), lambda gamma, s: fedprox.HParams(gamma, 0.1, 1.0)),
    "Scaffold": Method(_local(scaffold.scaffold), lambda gamma, s: scaffold.HParams(gamma, 1.0)),
    "Ditto": Method(
        _local(ditto.ditto),
        lambda gamma, s: ditto.HParams(gamma, gamma, 0.1, 1.0),
        lambda h, server, client: client.model,
    ),
}
MAIN = ("Scafflix", "FLIX", "FedAvg")


@cache
def load(task: str, model: str, most_clients: int, most_rows: int) -> Task:
    """Load a task.

    Fashion-MNIST has 5 of 10 classes per client (class-wise), digits 3 of 10.  A client of Shakespeare is a speaker.
    """
    module: Any
    if task == "shakespeare":
        windows = text.roles(text.load(), length=80 if model != "small" else 40, minimum=20)
        _, rows = partition.by_group(windows.speakers)
        rows = sorted(rows, key=len, reverse=True)[:most_clients]
        inputs, targets = windows.inputs, windows.targets
        widths = (256, 256) if model != "small" else (64,)
        module = networks.ShakespeareLstm(windows.num_ids, widths=widths)
    else:
        dataset = embedded.digits() if task == "digits" else images.load("fashion_mnist")
        inputs, targets = dataset.train, dataset.train_labels
        n = min(most_clients, 20) if task == "digits" else most_clients
        rows = partition.class_wise(targets, n, 3 if task == "digits" else 5)
        cnns = {"thesis": networks.ThesisCnn, "fedjax": networks.FedjaxCnn, "small": networks.SmallCnn}
        module = networks.Mlp() if model == "mlp" else cnns[model](classes=10)
    rng = np.random.default_rng(0)
    rows = [rng.permutation(ids)[:most_rows] for ids in rows]
    rest, test = partition.holdout(rows, 0.25)
    train, validation = partition.holdout(rest, 0.2)
    parts = [jax.tree.map(jnp.asarray, stacked.examples(inputs, targets, part)) for part in (train, validation, test)]
    return Task(parts[0], parts[1], parts[2], networks.classification(module))


@cache
def _compiled(problem: networks.Classification, build: Callable, settings: Settings) -> Algorithm:
    """One object per setting, so that seeds and stepsizes share a compiled program."""
    return build(jax.value_and_grad(problem.loss), settings)


@cache
def _local_training(problem: networks.Classification, batch: int) -> tuple[local.ValueAndGrad, local.Sample]:
    """Gradient and minibatches of a client: one object each, so that the seeds share a compiled program."""
    return jax.value_and_grad(problem.loss), local.minibatch(batch)


def begin(task: Task, settings: Settings, seed: int, personal: bool) -> tuple[Any, Any]:
    """The network's start, and with `personal` the local optima x_i* by local SGD from there."""
    key_init, key_local = jax.random.split(jax.random.key(1000 + seed))
    params = task.problem.init(key_init, task.train.inputs[0, :1])
    if not personal:
        return params, None
    gradient, sample = _local_training(task.problem, settings.batch)
    optimum = flix.local_sgd(
        key_local,
        gradient,
        params,
        task.train,
        stepsize=settings.local_stepsize,
        steps=settings.local_steps,
        sample=sample,
        over=_options(settings)["over"],
    )
    return params, optimum


class Starts:
    """Starts of the seeds, each computed once per command."""

    def __init__(self, task: Task, settings: Settings):
        self.make = cache(lambda seed, personal: begin(task, settings, seed, personal))


def train(
    task: Task, name: str, stepsize: float, seed: int, starts: Starts, settings: Settings, *, label: str = ""
) -> Record:
    """One run; its record has test and validation accuracy every few rounds."""
    method = METHODS[name]
    # These settings do not change the program, so all their values share one.
    shape = replace(settings, alpha=0.0, stepsizes=(), seeds=0)
    algorithm, hparams = _compiled(task.problem, method.build, shape), method.hparams(stepsize, settings)
    params, optimum = starts.make(seed, method.personal)
    n = len(task.train.weights)
    state = algorithm.init(params, jnp.arange(n), **({"optimum": optimum} if method.personal else {}))

    def evaluate(state: State) -> dict[str, float]:
        measured = partial(networks.accuracy, task.problem, method.model, hparams, state.server, state.clients)
        return {"test": float(measured(task.test)), "validation": float(measured(task.validation))}

    return saved.run(
        settings.out / "networks" / (label or f"{settings.task}_{name}_{stepsize:g}_{seed}"),
        jax.random.key(seed),
        algorithm,
        hparams,
        state,
        task.train,
        rounds=settings.rounds,
        chunk=settings.every,
        evaluate=evaluate,
        progress=settings.progress,
        config={
            "task": settings.task,
            "method": name,
            "stepsize": stepsize,
            "seed": seed,
            "clients": n,
            "cohort": settings.cohort,
        },
    )


def tuned(task: Task, name: str, starts: Starts, settings: Settings) -> list[float]:
    """The stepsizes of the grid, by last validation accuracy of seed 0, best first; a run that diverges loses."""
    scores = {}
    for stepsize in settings.stepsizes:
        try:
            scores[stepsize] = float(train(task, name, stepsize, 0, starts, settings).evaluations["validation"][-1])
        except runner.DivergedError:
            scores[stepsize] = -1.0
    return sorted(scores, key=lambda stepsize: scores[stepsize], reverse=True)


def seeds_of(task: Task, name: str, starts: Starts, settings: Settings) -> tuple[float, list[Record]]:
    """The runs of all seeds with the best stepsize at which none of them diverges, and this stepsize."""
    diverged: Exception | None = None
    for stepsize in tuned(task, name, starts, settings):
        try:
            return stepsize, [train(task, name, stepsize, 1 + seed, starts, settings) for seed in range(settings.seeds)]
        except runner.DivergedError as error:
            print(f"{name}: a seed diverges at stepsize {stepsize:g}; the next best of the grid is taken")
            diverged = error
    raise ValueError(f"{name} diverges with every stepsize of {settings.stepsizes}") from diverged


def measure(task: Task, names: Sequence[str], settings: Settings) -> dict[str, dict[str, Any]]:
    """Tune, then run the seeds: test accuracy [seed, evaluation] against megabits that one client uploads."""
    results: dict[str, dict[str, Any]] = {}
    starts = Starts(task, settings)
    for name in names:
        stepsize, records = seeds_of(task, name, starts, settings)
        at = records[0].evaluations["round"].astype(int)
        bits = np.concatenate([[0], np.cumsum(records[0].metrics["bits_up"])])[at] / 1e6
        results[name] = {
            "stepsize": stepsize,
            "megabits": bits,
            "test": np.array([r.evaluations["test"] for r in records]),
        }
    if any(METHODS[name].personal for name in names):
        results["local only"] = {"test": np.array([alone(task, starts, 1 + seed) for seed in range(settings.seeds)])}
    return results


def alone(task: Task, starts: Starts, seed: int) -> float:
    """Test accuracy of the local optima by themselves, without any communication."""
    params, optimum = starts.make(seed, True)
    rows = flix.Client(jnp.arange(len(task.train.weights)), optimum)
    server = flix.Server(jnp.zeros((), jnp.int32), params)
    return float(networks.accuracy(task.problem, _mixed, flix.HParams(0.0, 0.0), server, rows, task.test))
