"""Scafflix: the figures and the table of the thesis's Chapter 3.

    python -m experiments.scafflix double-acceleration 3 data sets, 4 splits, 5 alpha: 0.18 to 0.39 of GD's rounds  28
    python -m experiments.scafflix condition-number    slopes 0.49 and 1.00 (quadratics), 0.48 and 0.98 (logistic) 1.4
    python -m experiments.scafflix inexact             2.7 times the iterations for epsilon = 1e-6 as for 1e-1     0.3
    python -m experiments.scafflix stepsizes           one a client: 42 to 53 rounds against 46 to 56 (mushrooms)  1.7
    python -m experiments.scafflix probability         fewest rounds (26) at half of theory's p, 45 at theory's    0.6
    python -m experiments.scafflix generalisation      test accuracy against bits                                    5
    python -m experiments.scafflix ablations           alpha, cohort size and p of a network                        3.6
    python -m experiments.scafflix baselines           Ditto, FedProx, Scaffold and the three above                   7

Each line has what to expect, and the CPU minutes that were measured (networks: `--task fashion --model mlp`, in
pieces).  LibSVM files come from $COMMJAX_DATA or are downloaded; `--datasets breast_cancer` and `--task digits` need
neither.  To resume a command that was killed, give it again.
"""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from commjax.algorithms import flix, scafflix
from commjax.core import runner
from commjax.core.base import State
from commjax.theory import scafflix as theory
from experiments import tables
from experiments.scafflix import condition, figures, network_figures, networks
from experiments.scafflix.runs import (
    Problem,
    Settings,
    after_communications,
    communicated,
    flix_optimum,
    iterations_for,
    problem,
    run_grid,
    value_and_grad,
)

Rows = list[dict[str, Any]]


def accelerate(problem: Problem, settings: Settings) -> tuple[Rows, figures.Curves]:
    """Rounds of Scafflix and of GD to the accuracy, and their curves, for every alpha; nothing is tuned."""
    smooth, name = problem.smoothness, f"{problem.name}_{problem.split}"
    gradient, kappa = value_and_grad(settings.mu), smooth.L_max / settings.mu
    floors = [flix_optimum(problem, alpha, settings).value for alpha in settings.alphas]
    gap = max(
        float(np.mean(jax.vmap(lambda x, rows: gradient(x, rows)[0])(mixed, problem.data))) - floor
        for alpha, floor in zip(settings.alphas, floors)
        for mixed in [alpha + (1 - alpha) * jnp.asarray(problem.optimum)]
    )
    length = iterations_for(1.3 * kappa, gap, settings.accuracy)
    hparams: list[Any] = [scafflix.theoretical(smooth.L_i, settings.mu, alpha) for alpha in settings.alphas]
    ours = run_grid(problem, scafflix.iterations(gradient), hparams, settings, f"{name}_scafflix", rounds=length)
    # L of the average is at most the average of the L_i: its larger stepsize makes GD the stronger opponent.
    hparams = [flix.theoretical(np.full(settings.n, smooth.L), alpha) for alpha in settings.alphas]
    plain = run_grid(problem, flix.flix(gradient), hparams, settings, f"{name}_gd", rounds=length, seeds=1)
    curves, rows = {}, []
    for h, (alpha, floor) in enumerate(zip(settings.alphas, floors)):
        runs = [communicated(ours, h, s) - floor for s in range(settings.seeds)]
        descent = plain.metrics["loss"][h, 0] - floor
        rounds = np.array([tables.first(run, settings.accuracy) for run in runs])
        curves[alpha] = (runs[0], descent)
        rows.append(
            {
                "dataset": problem.name,
                "split": problem.split,
                "alpha": alpha,
                "kappa_max": kappa,
                "gd": tables.first(descent, settings.accuracy),
                "scafflix": float(rounds.mean()),
                "scafflix_std": float(rounds.std()),
                "ratio": float(rounds.mean() / tables.first(descent, settings.accuracy)),
            }
        )
    replace(ours, config={**ours.config, "rounds": rows}).save(settings.out / f"{name}_scafflix")
    return rows, curves


def double_acceleration(settings: Settings) -> Rows:
    """Figs. 3.1 and B.4: FLIX objective against communication rounds; nothing is tuned."""
    rows: Rows = []
    for split in settings.splits:
        panels = {name: accelerate(problem(name, split, settings), settings) for name in settings.datasets}
        figures.acceleration(panels, settings.accuracy, settings.out / f"double_acceleration_{split}.png")
        rows += [row for panel_rows, _ in panels.values() for row in panel_rows]
    tables.save(settings.out / "double_acceleration", rows, figures.acceleration_table(rows, settings))
    return rows


LIMITS = [("epsilon", epsilon) for epsilon in (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)]
LIMITS += [("iterations", number) for number in (0, 1, 5, 200, 1000)]


def inexact(settings: Settings) -> Rows:
    """Sec. 3.3.4, Figs. 3.4 and B.5: local optima to |grad| < epsilon, or after some iterations, from x_i^0 = 100."""
    name, alpha, rounds = settings.datasets[0], settings.alphas[0], 120
    exact = problem(name, "iid", settings)
    gradient, n, d = value_and_grad(settings.mu), settings.n, exact.dataset.features.shape[1]
    floor = flix_optimum(exact, alpha, settings)
    target = alpha * floor.params + (1 - alpha) * exact.optimum
    hparams = scafflix.theoretical(exact.smoothness.L_i, settings.mu, alpha)

    def distance(state: State, batch: Any) -> jax.Array:
        away = flix.personalized(hparams, state) - jnp.asarray(target)
        return jnp.mean(jnp.sum(away**2, axis=1))

    algorithm = runner.observe(scafflix.scafflix(gradient), distance=distance)
    rows, curves = [], {}
    for kind, value in LIMITS:
        limit: dict[str, Any] = (
            {"tolerance": value} if kind == "epsilon" else {"tolerance": 1e-30, "max_iterations": value}
        )
        local = flix.local_optima(gradient, jnp.full(d, 100.0), exact.data, exact.smoothness.L_i, **limit)
        start = algorithm.init(jnp.ones(d), jnp.arange(n), optimum=local.params)
        _, seen = runner.run(jax.random.key(settings.seed), algorithm, hparams, start, exact.data, rounds)
        curves[kind, value] = np.asarray(seen.distance)
        steps = np.asarray(local.iterations)
        rows.append(
            {
                "kind": kind,
                "value": value,
                "iterations_mean": float(steps.mean()),
                "iterations_min": int(steps.min()),
                "iterations_max": int(steps.max()),
                "distance": float(seen.distance[-1]),
                "loss": float(seen.loss[-1]) - floor.value,
            }
        )
    figures.inexact(rows, curves, settings.out / "inexact.png")
    title = f"{name}, n = {n}, alpha = {alpha}, x_i^0 = 100; after {rounds} rounds"
    tables.save(settings.out / "inexact", rows, figures.inexact_table(rows, title))
    return rows


def stepsizes(settings: Settings) -> Rows:
    """Sec. 3.3.4, Fig. 3.5: gamma_i = 1/L_i against 1/max_i L_i for all clients, each at its own best p."""
    rows: Rows = []
    panels: dict[str, tuple[Rows, figures.Curves]] = {}
    for name in settings.datasets[:2]:
        split = problem(name, "feature", settings)
        smooth, algorithm = split.smoothness, scafflix.iterations(value_and_grad(settings.mu))
        kappa = smooth.L_max / settings.mu
        length, records = iterations_for(1.5 * smooth.L_max / settings.mu, 1e3, settings.accuracy), {}
        for kind, given in {"individual": {}, "global": {"gamma": 1 / smooth.L_max}}.items():
            hparams = [scafflix.theoretical(smooth.L_i, settings.mu, alpha, **given) for alpha in settings.alphas]
            records[kind] = run_grid(split, algorithm, hparams, settings, f"{name}_{kind}", rounds=length)
        panel_rows, curves = [], {}
        for h, alpha in enumerate(settings.alphas):
            floor = flix_optimum(split, alpha, settings).value
            runs = {
                kind: [communicated(record, h, s) - floor for s in range(settings.seeds)]
                for kind, record in records.items()
            }
            rounds = {
                kind: float(np.mean([tables.first(run, settings.accuracy) for run in several]))
                for kind, several in runs.items()
            }
            curves[alpha] = (runs["individual"][0], runs["global"][0])
            panel_rows.append({"dataset": name, "alpha": alpha, "kappa_max": kappa, **rounds})
        panels[name] = (panel_rows, curves)
        rows += panel_rows
    figures.stepsizes(panels, settings.accuracy, settings.out / "stepsizes.png")
    tables.save(settings.out / "stepsizes", rows, figures.stepsizes_table(rows, settings))
    return rows


def probability(settings: Settings) -> Rows:
    """Rounds and iterations to the accuracy against p, in one vmapped program; theory's p is sqrt(min gamma_i mu_i)."""
    name, alpha = settings.datasets[0], 0.3
    split = problem(name, "label", settings)
    smooth = split.smoothness
    best = float(theory.best_probability(1 / smooth.L_i, np.full(settings.n, settings.mu)))
    grid = [float(p) for p in best * np.array([0.25, 0.5, 0.71, 1, 1.41, 2, 4]) if p < 1] + [1.0]
    hparams = [scafflix.theoretical(smooth.L_i, settings.mu, alpha, p=p) for p in grid]
    algorithm = scafflix.iterations(value_and_grad(settings.mu))
    length = iterations_for(4 * smooth.L_max / settings.mu, 10, settings.accuracy)
    record = run_grid(split, algorithm, hparams, settings, f"{name}_probability", rounds=length)
    floor = flix_optimum(split, alpha, settings).value
    rows = []
    for h, p in enumerate(grid):
        rounds, steps = [], []
        for s in range(settings.seeds):
            at = after_communications(record.metrics["bits_up"][h, s])
            hit = tables.first(record.metrics["loss"][h, s][at] - floor, settings.accuracy)
            rounds.append(hit)
            steps.append(at[int(hit)] if np.isfinite(hit) else np.nan)
        rows.append({"p": p, "theory": best, "rounds": float(np.mean(rounds)), "iterations": float(np.mean(steps))})
    title = f"{name}, label-wise, $\\alpha$ = {alpha}"
    figures.probability(rows, settings.accuracy, title, settings.out / "probability.png")
    tables.save(settings.out / "probability", rows, figures.probability_table(rows))
    return rows


def condition_number(settings: Settings) -> dict[str, dict[str, Any]]:
    """Cor. 3.2.4: rounds of Scafflix grow like sqrt(kappa), those of GD like kappa."""
    results = {
        "quadratics": condition.growth(condition.quadratics(settings), settings),
        "logistic": condition.growth(condition.logistic_regressions(settings), settings),
    }
    condition.figure(results, settings.out / "condition_number.png")
    tables.save(settings.out / "condition_number", [results], condition.table(results))
    return results


def generalisation(settings: networks.Settings) -> Rows:
    """Fig. 3.2: Scafflix, FLIX and FedAvg, tuned alike.

    The dotted line is the accuracy that clients reach without any communication.
    """
    task = networks.load(settings.task, settings.model, settings.clients, settings.rows)
    results = networks.measure(task, networks.MAIN, settings)
    network_figures.accuracy_against_bits(
        results, len(task.train.weights), settings, settings.out / f"generalisation_{settings.task}.png"
    )
    rows = network_figures.rows_of(results, settings)
    tables.save(settings.out / f"generalisation_{settings.task}", rows, network_figures.table(rows, settings))
    return rows


def baselines(settings: networks.Settings) -> Rows:
    """Table B.1, with the methods of this package; FedCR, FedPAC and FedSR of that table are left out."""
    task = networks.load(settings.task, settings.model, settings.clients, settings.rows)
    rows = network_figures.rows_of(networks.measure(task, tuple(networks.METHODS), settings), settings)
    tables.save(settings.out / f"baselines_{settings.task}", rows, network_figures.table(rows, settings))
    return rows


def ablations(settings: networks.Settings) -> Rows:
    """Fig. 3.3: Scafflix with other alpha, cohort sizes and p, at the stepsize that was tuned for the default."""
    task = networks.load(settings.task, settings.model, settings.clients, settings.rows)
    starts = networks.Starts(task, settings)
    stepsize = networks.tuned(task, "Scafflix", starts, settings)[0]
    knobs = {
        "alpha": (0.1, 0.3, 0.5, 0.7, 0.9),
        "cohort": tuple(size for size in (1, 5, 10, 20) if size <= len(task.train.weights)),
        "p": (0.1, 0.2, 0.5),
    }
    curves = {}
    for knob, value in ((knob, value) for knob, values in knobs.items() for value in values):
        changed = replace(settings, **{knob: value})
        labels = [f"{settings.task}_{knob}{value:g}_{seed}" for seed in range(settings.seeds)]
        curves[knob, value] = [
            networks.train(task, "Scafflix", stepsize, 1 + seed, starts, changed, label=label)
            for seed, label in enumerate(labels)
        ]
    rows = network_figures.ablations(curves, settings.out / f"ablations_{settings.task}.png")
    title = f"{settings.task}, Scafflix, stepsize {stepsize:g}, {settings.rounds} rounds, {settings.seeds} seeds"
    tables.save(settings.out / f"ablations_{settings.task}", rows, network_figures.ablations_table(rows, title))
    return rows


COMMANDS = {
    "double-acceleration": double_acceleration,
    "condition-number": condition_number,
    "inexact": inexact,
    "stepsizes": stepsizes,
    "probability": probability,
    "generalisation": generalisation,
    "ablations": ablations,
    "baselines": baselines,
}
