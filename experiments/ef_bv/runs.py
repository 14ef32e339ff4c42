"""The runs behind the figures of Chapter 2: settings, problems, and EF-BV against EF21 on them."""

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from commjax import compressors
from commjax.algorithms import ef_bv
from commjax.core import runner
from commjax.core.base import Constants, State
from commjax.core.local import ValueAndGrad
from commjax.core.records import Record
from commjax.core.rounds import dense_bits
from commjax.data import embedded, libsvm, partition, stacked
from commjax.data.libsvm import Dataset
from commjax.problems import logistic
from commjax.problems.constants import Smoothness
from commjax.theory import ef_bv as theory
from experiments import saved

METHODS = ("EF-BV", "EF21")
DATASETS = ("mushrooms", "phishing", "a9a", "w8a")


@dataclass(frozen=True)
class Settings:
    # LibSVM names, or breast_cancer (embedded); None: those of the thesis's figure
    datasets: tuple[str, ...] | None = None
    pairs: tuple[tuple[int, int], ...] = ((1, 1), (1, 2), (2, 1))  # (k, xi) of each row of the main figure
    n: int = 1000  # clients
    rounds: int = 10_000  # rounds of each run
    mu: float = 0.1  # weight of the regulariser
    # x^0.  The thesis does not say it; the authors' code draws it from N(0, I).  auto: zero, but normal in nonconvex
    # runs, where the regulariser has no gradient at zero
    start: Literal["auto", "zero", "normal"] = "auto"
    seed: int = 0  # seed of the shuffle, the start and the compressors
    chunk: int = 250  # rounds between two checkpoints
    out: Path = Path("results/ef_bv")  # folder of records, figures and checkpoints
    progress: bool = True  # show a progress bar


class Problem(NamedTuple):
    """A data set on n clients, ready to run, in float64.

    Attributes:
        name: Name of the data set.
        data: Rows of all clients, with a leading client axis.
        value_and_grad: (params [d], data of one client) -> (loss, gradient [d]).
        smoothness: Exact smoothness constants.
        floor: f*, or 0 for the nonconvex problem.
        d: Number of features.
    """

    name: str
    data: stacked.ClientData
    value_and_grad: ValueAndGrad
    smoothness: Smoothness
    floor: float
    d: int


def load(name: str) -> Dataset:
    """Load a data set: breast_cancer is embedded, the others are LibSVM files."""
    return embedded.breast_cancer() if name == "breast_cancer" else libsvm.load(name)


def problem(name: str, settings: Settings, xi: int = 1, n: int | None = None, nonconvex: bool = False) -> Problem:
    """Split a data set over clients, and compute its exact constants and its optimum.

    Args:
        name: LibSVM name, or breast_cancer.
        settings: The settings.
        xi: Blocks per client.  The shuffled rows are cut into n blocks that differ by at most one row.
        n: Number of clients; None: that of the settings.
        nonconvex: Use the nonconvex regulariser.
    """
    dataset = load(name)
    rows = partition.blocks(len(dataset.labels), n or settings.n, seed=settings.seed, overlap=xi)
    if nonconvex:
        loss, floor = partial(logistic.nonconvex_loss, lam=settings.mu), 0.0
        smoothness = logistic.nonconvex_constants(dataset, rows, settings.mu)
    else:
        loss = partial(logistic.loss, mu=settings.mu)
        floor = logistic.optimum(dataset, rows, settings.mu).value
        smoothness = logistic.constants(dataset, rows, settings.mu)
    data = jax.tree.map(jnp.asarray, stacked.stack(dataset, rows))
    return Problem(name, data, jax.value_and_grad(loss), smoothness, floor, dataset.features.shape[1])


def compare(
    problem: Problem,
    k: int,
    settings: Settings,
    label: str,
    *,
    k_top: int | None = None,
    factors: tuple[float, ...] = (1.0,),
    nonconvex: bool = False,
) -> Record:
    """Run both methods with their theoretical hparams (times each factor) from the same start, as one vmapped program.

    Metrics have axes [method x factor, 1, round].  Numbers are sent as float32.  The bits include h_i^0 = grad
    f_i(x^0).

    Args:
        problem: The problem.
        k: k of comp-(k, k').
        settings: The settings.
        label: Name of the record and the checkpoint.
        k_top: k' of comp-(k, k'); None: d/2.
        factors: Factors of the theoretical stepsize.
        nonconvex: Use the nonconvex stepsizes, and record |grad f|^2.
    """
    n = len(problem.data.labels)
    regime = "nonconvex" if nonconvex else "pl"
    compressor = compressors.rounded(compressors.comp(k, k_top or problem.d // 2))
    constants = compressor.constants(problem.d, n)
    hparams = [
        ef_bv.theoretical(constants, problem.smoothness, regime),
        ef_bv.ef21_hparams(constants, problem.smoothness, regime),
    ]
    grid = runner.stack([h._replace(gamma=h.gamma * factor) for h in hparams for factor in factors])
    algorithm = ef_bv.ef_bv(problem.value_and_grad, compressor)
    if nonconvex:
        algorithm = runner.observe(algorithm, sq_grad=partial(squared_gradient, problem.value_and_grad))
    key, key_start = jax.random.split(jax.random.key(settings.seed))
    start = ("normal" if nonconvex else "zero") if settings.start == "auto" else settings.start
    x0 = jnp.zeros(problem.d) if start == "zero" else jax.random.normal(key_start, (problem.d,))
    shift = jax.vmap(problem.value_and_grad, in_axes=(None, 0))(x0, problem.data)[1]
    return saved.run(
        settings.out / label,
        key[None],
        algorithm,
        grid,
        algorithm.init(x0, jnp.arange(n), shift=shift),
        problem.data,
        rounds=settings.rounds,
        chunk=min(settings.chunk, settings.rounds),
        progress=settings.progress,
        bits_init=dense_bits(x0.astype(jnp.float32)),
        config={
            "dataset": problem.name,
            "d": problem.d,
            "n": n,
            "k": k,
            "k_top": k_top or problem.d // 2,
            "kept": k,
            "methods": METHODS,
            "factors": factors,
            "floor": problem.floor,
            "start": start,
            "L": problem.smoothness.L,
            "L_tilde": problem.smoothness.L_tilde,
            "predicted": predicted_ratio(constants),
        },
    )


def squared_gradient(value_and_grad: ValueAndGrad, state: State, batch: Any) -> jax.Array:
    """|grad f(x)|^2 at the server's x."""
    grads = jax.vmap(value_and_grad, in_axes=(None, 0))(state.server.params, batch)[1]
    return jnp.sum(jnp.mean(grads, axis=0) ** 2)


def predicted_ratio(constants: Constants) -> float:
    """sqrt(r_av / r): EF21's error factor over EF-BV's."""
    lam = theory.best_scaling(constants.eta, constants.omega)
    nu = theory.best_scaling(constants.eta, constants.omega_ran)
    r_av = theory.contraction(constants.eta, constants.omega_ran, nu)
    return float(np.sqrt(r_av / theory.contraction(constants.eta, constants.omega, lam)))


def bits_to_targets(
    record: Record,
    fractions: tuple[float, ...] = (0.7, 0.5, 0.3, 0.2, 0.1, 0.05, 0.01),
    metric: str = "loss",
) -> list[dict[str, Any]]:
    """Rounds and bits of both methods to each target that one of them reaches, and the ratio of bits.

    A target is a fraction of the first gap.  The bits exclude h_i^0, and are infinite where the target was not reached.
    """
    gap = record.metrics[metric][:, 0] - (record.config["floor"] if metric == "loss" else 0.0)
    bits = record.bits_up()[:, 0] - record.bits_init
    targets = []
    for fraction in fractions:
        hits = [np.flatnonzero(row <= fraction * gap[0, 0]) for row in gap]
        if any(len(hit) for hit in hits):
            spent = [float(row[hit[0]]) if len(hit) else np.inf for row, hit in zip(bits, hits)]
            rounds = [int(hit[0]) if len(hit) else None for hit in hits]
            ratio = 0.0 if np.isinf(spent[1]) else spent[0] / max(spent[1], 1.0)
            targets.append({"fraction": fraction, "rounds": rounds, "bits": spent, "ratio": ratio})
    return targets
