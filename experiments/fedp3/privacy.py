"""LDP-FedP3: the cost of privacy in accuracy, and the thesis's theory of FedP3 against measurements (Chapter 4).

    python -m experiments.fedp3.privacy curve     accuracy against epsilon and bits, with certificates and an attack
    python -m experiments.fedp3.privacy audit     the attacks alone: the epsilon they prove, and the certified epsilon
    python -m experiments.fedp3.privacy theory    the theorems as numbers: noise floor, formula for sigma, schedule

`--task digits` (the default) is embedded; `--task fashion` reads Fashion-MNIST from $COMMJAX_DATA. To resume a killed
command, give it again. The certificate protects a single row of a client against everyone who sees the messages.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from commjax.algorithms.fedp3 import ldp_fedp3, one_run_audit, private_training
from commjax.compressors import identity
from commjax.core import rounds, runner
from commjax.core.base import Algorithm
from commjax.core.records import Record
from commjax.data import embedded, images, stacked
from commjax.data.stacked import Examples
from commjax.models import networks
from commjax.privacy import accounting
from commjax.privacy.accounting import Guarantee
from experiments import tables
from experiments.fedp3 import privacy_report
from experiments.fedp3 import theory as fedp3_theory


@dataclass(frozen=True)
class Settings:
    task: Literal["digits", "fashion"] = "digits"  # digits is embedded; fashion is read from $COMMJAX_DATA
    width: int = 0  # width of the hidden layer; 0: softmax regression, which needs the least noise
    # "clipped part" clips only the part of the gradient that is sent. LDP-SGD sends the whole gradient.
    variants: tuple[str, ...] = ("LDP-FedP3", "clipped part", "LDP-SGD")
    clients: int = 10  # clients; all have equally many rows, drawn at random
    epsilons: tuple[float, ...] = (1.0, 4.0, 8.0)  # target values of epsilon
    delta: float = 1e-5  # delta of all targets
    relation: Literal["replace-one", "add-remove"] = "replace-one"  # that of the thesis, or that of most papers
    accountant: Literal["pld", "rdp"] = "pld"
    rounds: int = 100  # communication rounds, which share the privacy budget
    rate: float = 0.5  # probability that a row is used in a round
    clip: float = 0.5  # norm to which a row's gradient is clipped; "clipped part" divides it by sqrt(clients)
    stepsizes: tuple[float, ...] = (0.3, 1.0, 3.0)  # grid, tuned on validation rows with a seed that is not reported
    seeds: int = 3  # seeds; they give the error bars
    every: int = 10  # rounds between two evaluations
    trials: int = 4000  # runs of the attack with the canary, and as many without
    canaries: int = 2000  # canaries of the attack with one run
    out: Path = Path("results/fedp3")  # folder of records, figures and checkpoints
    progress: bool = True  # show a bar


class Task(NamedTuple):
    """Data and network.

    Attributes:
        train: Training rows of all clients, stacked.
        validation: Validation rows, pooled.
        test: Test rows, pooled.
        problem: The functions of the problem.
    """

    train: Examples
    validation: Examples
    test: Examples
    problem: networks.Classification


class Variant(NamedTuple):
    """A variant of the algorithm.

    Attributes:
        build: (settings, rows of the largest client) -> (loss -> Algorithm).
        share: settings -> factor of the clipping norm. It is 1/sqrt(n) if only the sent part is clipped, because that
            part has about 1/sqrt(n) of the norm of the gradient.
    """

    build: Callable[[Settings, int], Callable[[Any], Algorithm]]
    share: Callable[[Settings], float] = lambda settings: 1.0


def capacity(settings: Settings, rows: int) -> int | None:
    """Return how many rows of a client are differentiated in a round, or None for all.

    More rows are drawn with a probability of at most 1e-14, which is charged to delta.
    """
    from scipy.stats import binom

    most = int(binom.isf(1e-14, rows, settings.rate)) + 1
    return None if most >= rows else most


def _build(settings: Settings, rows: int, sketch=None, clipped: Literal["whole", "sent"] = "whole"):
    def build(loss) -> Algorithm:
        over = jax.vmap if settings.task == "digits" else rounds.one_by_one
        return ldp_fedp3.ldp_fedp3(
            loss, sketch, clipped=clipped, capacity=capacity(settings, rows), rows=rows, over=over
        )

    return build


VARIANTS = {
    "LDP-FedP3": Variant(lambda s, rows: _build(s, rows)),
    "clipped part": Variant(lambda s, rows: _build(s, rows, clipped="sent"), lambda s: 1 / math.sqrt(s.clients)),
    "LDP-SGD": Variant(lambda s, rows: _build(s, rows, identity())),
}


@cache
def load(task: str, width: int, n: int) -> Task:
    """Load the data: n clients with equally many random rows, and 10 % of the training part for validation.

    Args:
        task: digits or fashion.
        width: Width of the hidden layer; 0 for none.
        n: Number of clients.
    """
    pictures = embedded.digits() if task == "digits" else images.load("fashion_mnist")
    order = np.random.default_rng(0).permutation(len(pictures.train))
    held = order[: len(order) // 10]
    size = (len(order) - len(held)) // n
    rows = list(order[len(held) : len(held) + n * size].reshape(n, size))
    train = stacked.examples(pictures.train, pictures.train_labels, rows)

    def pooled(inputs, labels) -> Examples:
        return Examples(jnp.asarray(inputs), jnp.asarray(labels), jnp.full(len(labels), 1 / len(labels)))

    problem = networks.classification(networks.Mlp(classes=10, widths=(width,) if width else ()))
    return Task(
        jax.tree.map(jnp.asarray, train),
        pooled(pictures.train[held], pictures.train_labels[held]),
        pooled(pictures.test, pictures.test_labels),
        problem,
    )


def certificate(settings: Settings, rows: int, epsilon: float) -> Guarantee:
    """Return the certificate with the least noise for a target epsilon."""
    most = capacity(settings, rows)
    return accounting.calibrate(
        epsilon,
        settings.delta,
        settings.rate,
        settings.rounds,
        accountant=settings.accountant,
        relation=settings.relation,
        capacity=most,
        rows=None if most is None else rows,
    )


@cache
def attack(certificate: Guarantee, trials: int, seed: int) -> float:
    """Return the epsilon that the attack proves."""
    return private_training.audit(jax.random.key(seed), certificate, trials)


def others(certificate: Guarantee, rows: int) -> dict[str, float]:
    """Return the epsilon of the same noise by every accountant and for both relations."""
    most = certificate.capacity
    return {
        f"{accountant} {relation}": accounting.guarantee(
            certificate.noise,
            certificate.rate,
            certificate.rounds,
            certificate.delta,
            accountant=accountant,
            relation=relation,
            capacity=most,
            rows=None if most is None else rows,
        ).epsilon
        for accountant in ("pld", "rdp")
        for relation in ("add-remove", "replace-one")
    }


def train(
    task: Task, name: str, noises: list[float], settings: Settings, *, seeds: int, first: int, label: str
) -> Record:
    """Train every noise with every stepsize and seed, as one program.

    Args:
        task: Data and network.
        name: Name of the variant.
        noises: Noise multipliers.
        settings: Settings of the runs.
        seeds: Number of seeds.
        first: Seed of the key from which the keys of all runs are split.
        label: Name of the record and of the checkpoint.

    Returns:
        The record, with axes [noise * stepsize, seed, round].
    """
    rows = task.train.weights.shape[1]
    clip = settings.clip * VARIANTS[name].share(settings)
    algorithm = VARIANTS[name].build(settings, rows)(task.problem.loss)
    params = task.problem.init(jax.random.key(0), task.train.inputs[0, :1])
    state = algorithm.init(params, jnp.arange(settings.clients), data=task.train)
    hparams = [ldp_fedp3.HParams(gamma, clip, z, settings.rate) for z in noises for gamma in settings.stepsizes]

    @jax.jit
    def scores(params) -> dict[str, jax.Array]:
        def accuracy(part: Examples):
            return jax.vmap(jax.vmap(lambda model: jnp.divide(*task.problem.accuracy_sums(model, part))))(params)

        return {"validation": accuracy(task.validation), "test": accuracy(task.test)}

    _, record = runner.loop(
        jax.random.split(jax.random.key(first), seeds),
        algorithm,
        runner.stack(hparams),
        state,
        task.train,
        settings.rounds,
        chunk=settings.every,
        evaluate=lambda states: scores(states.server.params),
        at_once=len(settings.stepsizes),
        checkpoint=settings.out / f"{label}.ckpt",
        label=label,
        progress=settings.progress,
        config={"task": settings.task, "clip": clip, "noises": noises, "stepsizes": settings.stepsizes},
    )
    record.save(settings.out / label)
    return record


def curve(settings: Settings) -> list[dict]:
    """Measure accuracy against epsilon and bits.

    The stepsize of each target is the best of the grid on validation rows, with a seed that is not reported. This
    choice uses training runs and is not part of the certificate, as in most papers. `--stepsizes 0.3` avoids the
    choice.
    """
    task = load(settings.task, settings.width, settings.clients)
    rows, d = task.train.weights.shape[1], None
    targets = [certificate(settings, rows, epsilon) for epsilon in settings.epsilons]
    bounds = [attack(target, settings.trials, 100 + i) for i, target in enumerate(targets)]
    noises, table, curves = [0.0, *(target.noise for target in targets)], [], {}
    for name in settings.variants:
        label = f"{settings.task}_private_{name.lower().replace(' ', '_')}"
        record = train(task, name, noises, settings, seeds=1 + settings.seeds, first=7, label=label)
        shape = (len(noises), len(settings.stepsizes), 1 + settings.seeds, -1)
        validation, test = (record.evaluations[part].reshape(shape) for part in ("validation", "test"))
        bits = np.concatenate([[0.0], np.cumsum(record.metrics["bits_up"][0, 0])])
        at = record.evaluations["round"].astype(int)
        d = int(record.metrics["bits_down"][0, 0, 0]) // 32
        for k, noise in enumerate(noises):
            best = int(validation[k, :, 0, -1].argmax())
            scores = 100 * test[k, best, 1:]
            curves[name, k] = (bits[at], scores.mean(axis=0))
            target = targets[k - 1] if k else None
            table.append(
                {
                    "variant": name,
                    "target": settings.epsilons[k - 1] if k else math.inf,
                    "noise": noise,
                    "certified": target.epsilon if target else math.inf,
                    "audit": bounds[k - 1] if k else None,
                    "stepsize": settings.stepsizes[best],
                    "accuracy": float(scores[:, -1].mean()),
                    "std": float(scores[:, -1].std(ddof=1)) if settings.seeds > 1 else math.nan,
                    "bits_up": float(bits[at[-1]]),
                    "parameters": d,
                    **(others(target, rows) if target else {}),
                }
            )
    privacy_report.figure(settings, table, curves)
    tables.save(settings.out / f"{settings.task}_private", table, privacy_report.text(settings, rows, table))
    return table


def audit(settings: Settings) -> list[dict]:
    """Attack the calibrated mechanism in two ways, for both relations.

    One attack uses many runs with one canary, the other one run with many canaries.
    """
    table = []
    for relation in ("add-remove", "replace-one"):
        for number, epsilon in enumerate(settings.epsilons):
            target = accounting.calibrate(
                epsilon,
                settings.delta,
                settings.rate,
                settings.rounds,
                accountant=settings.accountant,
                relation=relation,
            )
            bound = attack(target, settings.trials, number)
            single = one_run_audit.audit(jax.random.key(number), target, settings.canaries)
            table.append(
                {
                    "relation": relation,
                    "target": epsilon,
                    "certified": target.epsilon,
                    "noise": target.noise,
                    "audit": bound,
                    "one_run": single.epsilon,
                    "guesses": single.guesses,
                    "correct": single.correct,
                }
            )
    tables.save(settings.out / "audit", table, privacy_report.audit_text(settings, table))
    return table


def theory(settings: Settings) -> list[dict]:
    """Check the thesis's statements about FedP3 as numbers."""
    return fedp3_theory.checks(settings.out, settings.delta)


COMMANDS = {"curve": curve, "audit": audit, "theory": theory}

if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict(COMMANDS, config=(tyro.conf.OmitArgPrefixes,))
