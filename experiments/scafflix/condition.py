"""Corollary 3.2.4: communication rounds against the condition number.

    python -m experiments.scafflix condition-number

Expected: slopes of log rounds 0.49 (Scafflix) and 1.00 (GD) on quadratics, 0.48 and 0.98 on logistic regression; 1.4
CPU minutes.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from commjax.algorithms import flix, scafflix
from commjax.core import runner
from commjax.core.base import Algorithm, State
from commjax.core.local import ValueAndGrad
from commjax.problems import quadratic
from commjax.problems.constants import Smoothness
from experiments import plots, tables
from experiments.scafflix.runs import Settings, after_communications, flix_optimum, problem, value_and_grad
from experiments.tables import Column


def spread_quadratics(kappa: float, n: int, d: int, seed: int) -> quadratic.Quadratic:
    """Quadratics whose H_i are the same matrix, with eigenvalues from mu = 1/kappa to L = 1.

    Thus f is as badly conditioned as each f_i.
    """
    rng = np.random.default_rng(seed)
    basis, _ = np.linalg.qr(rng.standard_normal((d, d)))
    spectrum = np.geomspace(1 / kappa, 1, d)
    H = np.broadcast_to((basis * spectrum) @ basis.T, (n, d, d))
    # The minimisers differ along flat directions as much as along steep ones.
    return quadratic.Quadratic((H + H.transpose(0, 2, 1)) / 2, rng.standard_normal((n, d)))


def slope(kappas: Sequence[float] | np.ndarray, rounds: Sequence[float] | np.ndarray) -> float:
    """Slope of the least-squares line through (log kappa, log rounds)."""
    return float(np.polyfit(np.log(kappas), np.log(rounds), 1)[0])


class Case(NamedTuple):
    """One problem, with alpha = 0.5 for all clients.

    Attributes:
        gradient: (params [d], data of one client) -> (loss, gradient [d]).
        data: Data of all clients, with a leading client axis.
        smoothness: Smoothness constants.
        mu: Strong convexity constant.
        anchors: Local optima [n, d].
        optimum: Minimiser of the FLIX objective [d].
    """

    gradient: ValueAndGrad
    data: Any
    smoothness: Smoothness
    mu: float
    anchors: np.ndarray
    optimum: np.ndarray


def quadratic_case(kappa: float, n: int, d: int, seed: int) -> Case:
    """`spread_quadratics`; their optimum is also FLIX's, because all clients have the same alpha."""
    data = spread_quadratics(kappa, n, d, seed)
    smooth, optimum = quadratic.constants(data), quadratic.optimum(data).params
    return Case(_quadratic_gradient(), jax.tree.map(jnp.asarray, data), smooth, 1 / kappa, data.c, optimum)


@cache
def _quadratic_gradient() -> ValueAndGrad:
    """One object, so that all quadratics share a compiled program."""
    return jax.value_and_grad(quadratic.loss)


def quadratics(settings: Settings) -> Iterator[Case]:
    """Quadratics of condition numbers 10 to 10,000."""
    for kappa in np.geomspace(10, 1e4, 7):
        yield quadratic_case(kappa, settings.n, 20, settings.seed)


def logistic_regressions(settings: Settings) -> Iterator[Case]:
    """Logistic regressions with weaker and weaker regularisers."""
    for mu in np.geomspace(1e-1, 1e-3, 5):
        weaker = replace(settings, mu=float(mu))
        split = problem("breast_cancer", "iid", weaker)
        optimum = flix_optimum(split, 0.5, weaker).params
        yield Case(value_and_grad(float(mu)), split.data, split.smoothness, mu, split.optimum, optimum)


@cache
def _observed(gradient: ValueAndGrad) -> tuple[Algorithm, Algorithm]:
    """Scafflix and GD with the metric |x - x*|^2.

    A client's batch is (its data, x*), so that all problems of one size share two compiled programs.
    """

    def client_gradient(params: Any, batch: Any) -> tuple[jax.Array, Any]:
        return gradient(params, batch[0])

    def distance(state: State, batch: Any) -> jax.Array:
        return jnp.sum((state.server.params - batch[1][0]) ** 2)

    ours, plain = scafflix.iterations(client_gradient), flix.flix(client_gradient)
    return runner.observe(ours, distance=distance), runner.observe(plain, distance=distance)


def length_for(kappa: float, fraction: float = 1e-6) -> int:
    """Number of iterations in which both methods reach the fraction."""
    return int(1.3 * kappa * np.log(1 / fraction)) + 200


def rounds_to_accuracy(
    case: Case, settings: Settings, *, fraction: float = 1e-6, length: int | None = None
) -> tuple[float, float, float]:
    """Rounds of Scafflix and of GD until |x - x*|^2 is `fraction` of its first value, at alpha = 0.5.

    The distance is measured, because the theory's Psi consists of distances.  The flat directions, which cost most
    rounds, hardly change the objective.

    Args:
        case: The problem.
        settings: The settings.
        fraction: Target, as a fraction of the first |x - x*|^2.
        length: Number of iterations; None: `length_for`.

    Returns:
        (kappa, rounds of Scafflix, rounds of GD).
    """
    (n, d), smooth = case.anchors.shape, case.smoothness
    alpha, kappa = 0.5, smooth.L_max / case.mu
    length = length_for(kappa, fraction) if length is None else length
    keys = jax.random.split(jax.random.key(settings.seed), settings.seeds)
    data = (case.data, jnp.tile(jnp.asarray(case.optimum), (n, 1)))
    ours, plain = _observed(case.gradient)
    start = ours.init(jnp.ones(d), jnp.arange(n), optimum=jnp.asarray(case.anchors))
    hparams = scafflix.theoretical(smooth.L_i, case.mu, alpha)
    _, seen = runner.sweep(keys, ours, runner.stack([hparams]), start, data, length)
    counts = [
        tables.first(far[after_communications(sent)], fraction * far[0])
        for far, sent in zip(np.asarray(seen.distance[0]), np.asarray(seen.bits_up[0]))
    ]
    begin = plain.init(jnp.ones(d), jnp.arange(n), optimum=jnp.asarray(case.anchors))
    descent = flix.theoretical(np.full(n, smooth.L), alpha)
    _, seen = runner.run(keys[0], plain, descent, begin, data, length)
    far = np.asarray(seen.distance)
    return kappa, float(np.mean(counts)), tables.first(far, fraction * far[0])


def growth(cases: Iterator[Case], settings: Settings) -> dict[str, Any]:
    """Rounds of both methods over the condition numbers of the cases, and the slopes of their logarithms."""
    kappas, ours, plain = np.array([rounds_to_accuracy(case, settings) for case in cases]).T
    slopes = {"Scafflix": slope(kappas, ours), "GD": slope(kappas, plain)}
    return {"kappa": kappas.tolist(), "Scafflix": ours.tolist(), "GD": plain.tolist(), "slopes": slopes}


def figure(results: dict[str, dict[str, Any]], path: Path) -> None:
    """Rounds against the condition number, one marker per kind of problem."""
    drawing, axes = plt.subplots(figsize=(3.4, 2.6), layout="constrained")
    for marker, (name, result) in zip("os", results.items()):
        for method, steep in result["slopes"].items():
            style = {**plots.style(method), "label": f"{method}, {name}: slope {steep:.2f}"}
            axes.loglog(result["kappa"], result[method], marker=marker, markersize=3.5, **style)
    axes.set_xlabel(r"condition number $\kappa_{\max}$")
    axes.set_ylabel(r"rounds to $10^{-6}$ of the first $|x - x^\star|^2$")
    axes.legend()
    plots.save(drawing, path)


def table(results: dict[str, dict[str, Any]]) -> str:
    """The table of `condition_number` as text."""
    columns = [
        Column("problem", "problem", "12"),
        Column("kappa", "kappa", "9.1f"),
        Column("Scafflix", "Scafflix", "9.1f"),
        Column("GD", "GD", "9.0f"),
    ]
    fields = ("kappa", "Scafflix", "GD")
    rows = [
        {"problem": name, **dict(zip(fields, values))}
        for name, result in results.items()
        for values in zip(*(result[field] for field in fields))
    ]
    slopes = [
        f"{name:12} slope of log rounds: Scafflix {result['slopes']['Scafflix']:.3f}, GD {result['slopes']['GD']:.3f}"
        for name, result in results.items()
    ]
    title = "rounds to 1e-6 of the first |x - x*|^2, alpha = 0.5"
    return "\n".join([title, tables.table(columns, rows), *slopes])
