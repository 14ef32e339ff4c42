"""Scafflix: the figures and the table of the thesis's Chapter 3.

    python -m experiments.scafflix double-acceleration   rounds of Scafflix and GD, 3 data sets x 4 splits x 5 alpha
    python -m experiments.scafflix condition-number      rounds against kappa: slopes on quadratics and logistic regression
    python -m experiments.scafflix inexact               what an inexact local optimum costs and spoils
    python -m experiments.scafflix stepsizes             one stepsize a client against one for all
    python -m experiments.scafflix probability           rounds and iterations against p
    python -m experiments.scafflix generalisation        held-out accuracy against bits: Scafflix, FLIX, FedAvg
    python -m experiments.scafflix ablations             alpha, cohort size and p of a network
    python -m experiments.scafflix baselines             Ditto, FedProx, Scaffold and the three above in one table

Minutes and expected numbers are in the README.  LibSVM files come from $COMMJAX_DATA or are downloaded; `--datasets breast_cancer`
and `--task digits` need neither.  A command that was killed goes on when it is given again.
"""

import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import tyro

from commjax import runner
from commjax.algorithms import flix, scafflix
from commjax.checkpoint import write_atomically
from commjax.data import partition
from commjax.data.libsvm import Dataset
from commjax.problems import logistic, quadratic
from commjax.problems.constants import Smoothness
from commjax.records import Record
from commjax.theory import scafflix as theory
from experiments import plots, scafflix_networks
from experiments.ef_bv import load

SPLITS = ("iid", "label", "feature", "quantity")


@dataclass(frozen=True)
class Settings:
    datasets: tuple[str, ...] = ("mushrooms", "a6a", "w8a")  # LibSVM names, or breast_cancer (embedded)
    splits: tuple[str, ...] = SPLITS  # how rows go to clients
    n: int = 8  # clients
    mu: float = 0.1  # weight of the regulariser
    alphas: tuple[float, ...] = (0.1, 0.3, 0.5, 0.7, 0.9)  # weight of the global model, the same for all clients
    seeds: int = 3  # runs of Scafflix, which flips coins
    accuracy: float = 1e-8  # the target: FLIX objective minus its minimum
    seed: int = 0  # of the splits and the coins
    out: Path = Path("results/scafflix")  # records, figures, checkpoints
    progress: bool = True  # show a bar


class Problem(NamedTuple):
    """A data set on n clients with their own optima; float64."""

    name: str
    split: str
    dataset: Dataset
    rows: Any
    data: partition.ClientData  # leading client axis
    smoothness: Smoothness
    optimum: np.ndarray  # [n, d], exact to 1e-12


def split_rows(dataset: Dataset, split: str, n: int, seed: int) -> list[np.ndarray]:
    """Thesis: L3820-L3826."""
    if split == "iid":
        return partition.blocks(len(dataset.labels), n, seed=seed)
    if split == "label":
        return partition.label_wise(dataset.labels, n, seed=seed)
    if split == "feature":
        return partition.feature_wise(dataset.features, n, seed=seed)
    if split == "quantity":
        return partition.quantity_wise(len(dataset.labels), n, concentration=0.5, seed=seed)
    raise ValueError(f"split={split!r}; allowed: {', '.join(SPLITS)}")


def problem(name: str, split: str, settings: Settings) -> Problem:
    dataset = load(name)
    rows = split_rows(dataset, split, settings.n, settings.seed)
    smoothness = logistic.constants(dataset, rows, settings.mu)
    optimum = np.stack([logistic.optimum(dataset, [ids], settings.mu).params for ids in rows])
    data = jax.tree.map(jnp.asarray, partition.stack(dataset, rows))
    return Problem(name, split, dataset, rows, data, smoothness, optimum)


def value_and_grad(mu: float):
    return jax.value_and_grad(partial(logistic.loss, mu=mu))


def communicated(record: Record, h: int, s: int) -> np.ndarray:
    """The FLIX objective at x after 0, 1, 2, ... communications, from a record of `scafflix.iterations`.

    Right after a communication every client is at its mixture of x, so the loss of that iteration is the objective's.
    """
    loss, bits = record.metrics["loss"][h, s], record.metrics["bits_up"][h, s]
    return loss[np.concatenate([[0], np.flatnonzero(bits[:-1] > 0) + 1])]


def first(values: np.ndarray, target: float) -> float:
    """Index of the first value at most target, or nan."""
    hits = np.flatnonzero(values <= target)
    return float(hits[0]) if len(hits) else float("nan")


def save_table(path: Path, rows: list[dict], text: str) -> None:
    write_atomically(path.with_suffix(".json"), json.dumps(rows, indent=1).encode())
    write_atomically(path.with_suffix(".txt"), (text + "\n").encode())
    print(text)


def run_grid(
    problem: Problem, algorithm, hparams: list, seeds: int, rounds: int, settings: Settings, label: str
) -> Record:
    """All hparams with all seeds from x^0 = 1, as one vmapped program in chunks; saved under `label`."""
    d = problem.dataset.features.shape[1]
    state = algorithm.init(jnp.ones(d), jnp.arange(settings.n), optimum=jnp.asarray(problem.optimum))
    keys = jax.random.split(jax.random.key(settings.seed), seeds)
    _, record = runner.loop(
        keys, algorithm, runner.stack(hparams), state, problem.data, rounds,
        chunk=100, checkpoint=settings.out / f"{label}.ckpt", label=label, progress=settings.progress,
        bits_init=64.0,  # alpha_i^2 / gamma_i, once
        config={"dataset": problem.name, "split": problem.split, "n": settings.n, "d": d, "mu": settings.mu},
    )  # fmt: skip
    record.save(settings.out / label)
    return record


def accelerate(problem: Problem, settings: Settings) -> dict:
    """Rounds of Scafflix and of GD to the accuracy, for every alpha, nothing tuned."""
    smooth, name = problem.smoothness, f"{problem.name}_{problem.split}"
    gradient = value_and_grad(settings.mu)
    floors = [
        logistic.flix_optimum(problem.dataset, problem.rows, settings.mu, alpha, problem.optimum).value
        for alpha in settings.alphas
    ]
    kappa = smooth.L_max / settings.mu
    gap = max(
        float(np.mean(jax.vmap(lambda x, one: gradient(x, one)[0])(mixed, problem.data))) - floor
        for alpha, floor in zip(settings.alphas, floors)
        for mixed in [alpha + (1 - alpha) * jnp.asarray(problem.optimum)]
    )
    length = int(np.ceil(1.3 * kappa * np.log(gap / settings.accuracy) / 100)) * 100
    ours = run_grid(
        problem, scafflix.iterations(gradient), [scafflix.theoretical(smooth.L_i, settings.mu, a) for a in settings.alphas],
        settings.seeds, length, settings, f"{name}_scafflix",
    )  # fmt: skip
    # L of the average, not the average of the L_i: the larger stepsize, so the stronger opponent.
    plain = run_grid(
        problem, flix.flix(gradient), [flix.theoretical(np.full(settings.n, smooth.L), a) for a in settings.alphas],
        1, length, settings, f"{name}_gd",
    )  # fmt: skip
    curves, rows = {}, []
    for h, (alpha, floor) in enumerate(zip(settings.alphas, floors)):
        runs = [communicated(ours, h, s) - floor for s in range(settings.seeds)]
        descent = plain.metrics["loss"][h, 0] - floor
        rounds = np.array([first(run, settings.accuracy) for run in runs])
        curves[alpha] = (runs[0], descent)
        rows.append(
            {
                "dataset": problem.name, "split": problem.split, "alpha": alpha, "kappa_max": kappa,
                "gd": first(descent, settings.accuracy), "scafflix": float(rounds.mean()), "scafflix_std": float(rounds.std()),
                "ratio": float(rounds.mean() / first(descent, settings.accuracy)),
            }
        )  # fmt: skip
    return {"curves": curves, "rows": rows}


def acceleration_table(rows: list[dict], settings: Settings) -> str:
    lines = [
        f"communication rounds to f - f* <= {settings.accuracy:g}, n = {settings.n}, mu = {settings.mu}",
        f"{'data set':14} {'split':9} {'alpha':>5} {'kappa_max':>9} {'GD':>7} {'Scafflix':>16} {'ratio':>6}",
    ]
    lines += [
        f"{r['dataset']:14} {r['split']:9} {r['alpha']:5.1f} {r['kappa_max']:9.1f} {r['gd']:7.0f} "
        f"{r['scafflix']:9.1f} +- {r['scafflix_std']:3.1f} {r['ratio']:6.3f}"
        for r in rows
    ]
    fewer = all(r["ratio"] < 1 for r in rows)
    falling = all(
        np.all(np.diff([r[method] for r in rows if (r["dataset"], r["split"]) == key]) >= -slack)
        for key in dict.fromkeys((r["dataset"], r["split"]) for r in rows)
        for method, slack in (("gd", 0), ("scafflix", 0))
    )
    lines.append(
        f"Scafflix needs fewer rounds than GD in every row: {fewer}; fewer rounds for smaller alpha: {falling}"
    )
    return "\n".join(lines)


def double_acceleration(settings: Settings) -> list[dict]:
    """The figure of L1440 and those of L3830: FLIX objective against communication rounds, nothing tuned."""
    rows: list[dict] = []
    for split in settings.splits:
        figure, axes = plt.subplots(
            1,
            len(settings.datasets),
            figsize=(2.3 * len(settings.datasets) + 0.2, 2.2),
            squeeze=False,
            layout="constrained",
        )
        shades = plt.get_cmap("viridis")(np.linspace(0, 0.85, len(settings.alphas)))
        for panel, name in zip(axes[0], settings.datasets):
            found = accelerate(problem(name, split, settings), settings)
            rows += found["rows"]
            for shade, (alpha, (ours, descent)) in zip(shades, found["curves"].items()):
                for values, line in ((ours, "-"), (descent, "--")):
                    pick = plots.thin(values)
                    panel.semilogy(pick, np.maximum(values[pick], 1e-14), line, color=shade, linewidth=1.1)
                panel.plot([], [], color=shade, label=rf"$\alpha$ = {alpha:g}")
            panel.set_ylim(bottom=settings.accuracy / 10)
            panel.set_xlim(0, 1.1 * np.nanmax([row["gd"] for row in found["rows"]]))
            panel.set_title(f"{name}, {split}")
            panel.set_xlabel("communication rounds")
        axes[0, 0].set_ylabel(r"$\tilde f(x) - \tilde f^\star$")
        axes[0, 0].plot([], [], "k-", label="Scafflix")
        axes[0, 0].plot([], [], "k--", label="GD")
        axes[0, 0].legend(ncols=2, columnspacing=0.8, handlelength=1.4)
        plots.save(figure, settings.out / f"double_acceleration_{split}.png")
    save_table(settings.out / "double_acceleration", rows, acceleration_table(rows, settings))
    return rows


def spread_quadratics(kappa: float, n: int, d: int, seed: int) -> quadratic.Quadratic:
    """All H_i share eigenvectors and run from mu = 1/kappa to L = 1, so that f is as badly conditioned as each f_i."""
    rng = np.random.default_rng(seed)
    basis, _ = np.linalg.qr(rng.standard_normal((d, d)))
    spectrum = np.geomspace(1 / kappa, 1, d)
    H = np.broadcast_to((basis * spectrum) @ basis.T, (n, d, d))
    # Minimisers differ by as much along flat directions as along steep ones.
    return quadratic.Quadratic((H + H.transpose(0, 2, 1)) / 2, rng.standard_normal((n, d)))


def slope(kappas, rounds) -> float:
    """Of the least-squares line through (log kappa, log rounds)."""
    return float(np.polyfit(np.log(kappas), np.log(rounds), 1)[0])


def rounds_to_accuracy(gradient, data, smooth, mu, anchors, optimum, settings: Settings, fraction: float = 1e-6):
    """(kappa, rounds of Scafflix, rounds of GD) until |x - x*|^2 is `fraction` of the first, alpha = 0.5.

    The distance, because Psi measures distances: the objective itself hardly sees the flat directions that cost the rounds.
    """
    n, d = anchors.shape
    alpha, kappa = 0.5, smooth.L_max / mu
    length = int(1.3 * kappa * np.log(1 / fraction)) + 200
    keys = jax.random.split(jax.random.key(settings.seed), settings.seeds)

    def distance(state, batch):
        return jnp.sum((state.server.params - optimum) ** 2)

    ours = runner.observe(scafflix.iterations(gradient), distance=distance)
    plain = runner.observe(flix.flix(gradient), distance=distance)
    start = ours.init(jnp.ones(d), jnp.arange(n), optimum=jnp.asarray(anchors))
    hparams = scafflix.theoretical(smooth.L_i, mu, alpha)
    _, seen = runner.sweep(keys, ours, runner.stack([hparams]), start, data, length)
    counts = []
    for far, sent in zip(np.asarray(seen.distance[0]), np.asarray(seen.bits_up[0])):
        at = np.concatenate([[0], np.flatnonzero(sent[:-1] > 0) + 1])
        counts.append(first(far[at], fraction * far[0]))
    begin = plain.init(jnp.ones(d), jnp.arange(n), optimum=jnp.asarray(anchors))
    descent = flix.theoretical(np.full(n, smooth.L), alpha)
    _, seen = runner.run(keys[0], plain, descent, begin, data, length)
    far = np.asarray(seen.distance)
    return kappa, float(np.mean(counts)), first(far, fraction * far[0])


def condition_number(settings: Settings) -> dict[str, dict]:
    """Corollary 1 (L1386): rounds grow like sqrt(kappa); those of GD like kappa."""
    found: dict[str, list] = {"quadratics": [], "logistic": []}
    for kappa in np.geomspace(10, 1e4, 7):
        data = spread_quadratics(kappa, settings.n, 20, settings.seed)
        smooth = quadratic.constants(data)
        found["quadratics"].append(
            rounds_to_accuracy(
                jax.value_and_grad(quadratic.loss), jax.tree.map(jnp.asarray, data), smooth, 1 / kappa, data.c,
                quadratic.optimum(data).params, settings,  # of FLIX too, where all clients have the same alpha
            )
        )  # fmt: skip
    for mu in np.geomspace(1e-1, 1e-3, 5):
        one = problem("breast_cancer", "iid", replace(settings, mu=float(mu)))
        optimum = logistic.flix_optimum(one.dataset, one.rows, float(mu), 0.5, one.optimum).params
        found["logistic"].append(
            rounds_to_accuracy(value_and_grad(float(mu)), one.data, one.smoothness, mu, one.optimum, optimum, settings)
        )
    figure, axes = plt.subplots(figsize=(3.4, 2.6), layout="constrained")
    results, lines = (
        {},
        [
            f"{'problem':12} {'kappa':>9} {'Scafflix':>9} {'GD':>9}   rounds to 1e-6 of the first |x - x*|^2, alpha = 0.5"
        ],
    )
    for marker, (name, rows) in zip("os", found.items()):
        kappas, ours, plain = np.array(rows).T
        slopes = {"Scafflix": slope(kappas, ours), "GD": slope(kappas, plain)}
        results[name] = {"kappa": kappas.tolist(), "Scafflix": ours.tolist(), "GD": plain.tolist(), "slopes": slopes}
        lines += [f"{name:12} {k:9.1f} {a:9.1f} {b:9.0f}" for k, a, b in rows]
        lines.append(f"{name:12} slope of log rounds: Scafflix {slopes['Scafflix']:.3f}, GD {slopes['GD']:.3f}")
        for label, values in (("Scafflix", ours), ("GD", plain)):
            axes.loglog(
                kappas,
                values,
                marker=marker,
                markersize=3.5,
                **{**plots.style(label), "label": f"{label}, {name}: slope {slopes[label]:.2f}"},
            )
    axes.set_xlabel(r"condition number $\kappa_{\max}$")
    axes.set_ylabel(r"rounds to $10^{-6}$ of the first $|x - x^\star|^2$")
    axes.legend()
    plots.save(figure, settings.out / "condition_number.png")
    save_table(settings.out / "condition_number", [results], "\n".join(lines))
    return results


def inexact(settings: Settings) -> list[dict]:
    """L1573 and Figs. L1521, L3850: local optima to |grad| < epsilon, or after so many iterations, from x_i^0 = 100."""
    name, alpha, rounds = settings.datasets[0], settings.alphas[0], 120
    exact = problem(name, "iid", settings)
    gradient, n = value_and_grad(settings.mu), settings.n
    d = exact.dataset.features.shape[1]
    far = jnp.full(d, 100.0)
    floor = logistic.flix_optimum(exact.dataset, exact.rows, settings.mu, alpha, exact.optimum)
    target = alpha * floor.params + (1 - alpha) * exact.optimum
    hparams = scafflix.theoretical(exact.smoothness.L_i, settings.mu, alpha)

    def distance(state, batch):
        away = flix.personalized(hparams, state) - jnp.asarray(target)
        return jnp.mean(jnp.sum(away**2, axis=1))

    algorithm = runner.observe(scafflix.scafflix(gradient), distance=distance)
    rows, curves = [], {}
    cases = [("epsilon", e) for e in (1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1)] + [
        ("iterations", k) for k in (0, 1, 5, 200, 1000)
    ]
    for kind, value in cases:
        limit: dict[str, Any] = (
            {"tolerance": value} if kind == "epsilon" else {"tolerance": 1e-30, "max_iterations": value}
        )
        local = flix.local_optima(gradient, far, exact.data, exact.smoothness.L_i, **limit)
        start = algorithm.init(jnp.ones(d), jnp.arange(n), optimum=local.params)
        _, seen = runner.run(jax.random.key(settings.seed), algorithm, hparams, start, exact.data, rounds)
        curves[kind, value] = np.asarray(seen.distance)
        steps = np.asarray(local.iterations)
        rows.append(
            {
                "kind": kind, "value": value, "iterations_mean": float(steps.mean()), "iterations_min": int(steps.min()),
                "iterations_max": int(steps.max()), "distance": float(seen.distance[-1]), "loss": float(seen.loss[-1]) - floor.value,
            }
        )  # fmt: skip
    figure, axes = plt.subplots(1, 3, figsize=(7.0, 2.2), layout="constrained")
    for axis, kind in zip(axes, ("epsilon", "iterations")):
        shades = plt.get_cmap("viridis")(np.linspace(0, 0.85, sum(k == kind for k, _ in curves)))
        for shade, (key, values) in zip(shades, ((k, v) for k, v in curves.items() if k[0] == kind)):
            axis.semilogy(values, color=shade, label=f"{key[1]:g}")
        axis.set_xlabel("communication rounds")
        axis.set_ylabel(r"mean$_i$ $|\tilde x_i - \tilde x_i^\star|^2$")
        title = r"$|\nabla f_i| < \epsilon$" if kind == "epsilon" else "local iterations"
        axis.legend(
            title=title,
            title_fontsize=7,
            loc="upper right" if kind == "epsilon" else "lower left",
            ncols=2,
            columnspacing=0.8,
            handlelength=1,
        )
    by_epsilon = [row for row in rows if row["kind"] == "epsilon"]
    mean = np.array([row["iterations_mean"] for row in by_epsilon])
    spread = np.array([[m - row["iterations_min"], row["iterations_max"] - m] for m, row in zip(mean, by_epsilon)]).T
    axes[2].errorbar([row["value"] for row in by_epsilon], mean, yerr=spread, marker="o", markersize=3, capsize=2)
    axes[2].set_xscale("log")
    axes[2].set_xlabel(r"$\epsilon$")
    axes[2].set_ylabel("local iterations (mean, range)")
    plots.save(figure, settings.out / "inexact.png")
    lines = [
        f"{name}, n = {n}, alpha = {alpha}, x_i^0 = 100; after {rounds} rounds",
        f"{'kind':11} {'value':>8} {'iterations (min, mean, max)':>28} {'mean |xt - xt*|^2':>18} {'mean f_i - best':>16}",
    ]
    lines += [
        f"{r['kind']:11} {r['value']:8g} {r['iterations_min']:8d} {r['iterations_mean']:10.1f} {r['iterations_max']:8d} {r['distance']:18.3e} {r['loss']:16.3e}"
        for r in rows
    ]
    lines.append(f"iterations at epsilon = 1e-6 over those at 1e-1: {mean[0] / mean[-1]:.2f} (thesis: 23.55)")
    save_table(settings.out / "inexact", rows, "\n".join(lines))
    return rows


def stepsizes(settings: Settings) -> list[dict]:
    """L1577 and Fig. L1523: gamma_i = 1/L_i against 1/max_i L_i for all, each at its own best p."""
    rows, shades = [], plt.get_cmap("viridis")(np.linspace(0, 0.85, len(settings.alphas)))
    names = settings.datasets[:2]
    figure, axes = plt.subplots(1, len(names), figsize=(2.6 * len(names), 2.3), squeeze=False, layout="constrained")
    for panel, name in zip(axes[0], names):
        one = problem(name, "feature", settings)
        smooth, gradient = one.smoothness, value_and_grad(settings.mu)
        length = int(np.ceil(1.5 * smooth.L_max / settings.mu * np.log(1e3 / settings.accuracy) / 100)) * 100
        kinds = {"individual": {}, "global": {"gamma": 1 / smooth.L_max}}
        records = {}
        for kind, given in kinds.items():
            hparams = [scafflix.theoretical(smooth.L_i, settings.mu, alpha, **given) for alpha in settings.alphas]
            records[kind] = run_grid(
                one, scafflix.iterations(gradient), hparams, settings.seeds, length, settings, f"{name}_{kind}"
            )
        for h, alpha in enumerate(settings.alphas):
            floor = logistic.flix_optimum(one.dataset, one.rows, settings.mu, alpha, one.optimum).value
            row: dict[str, Any] = {"dataset": name, "alpha": alpha, "kappa_max": smooth.L_max / settings.mu}
            for (kind, record), line in zip(records.items(), ("-", "--")):
                runs = [communicated(record, h, s) - floor for s in range(settings.seeds)]
                row[kind] = float(np.mean([first(run, settings.accuracy) for run in runs]))
                panel.semilogy(np.maximum(runs[0], 1e-14), line, color=shades[h], linewidth=1.1)
            panel.plot([], [], color=shades[h], label=rf"$\alpha$ = {alpha:g}")
            rows.append(row)
        panel.set_ylim(bottom=settings.accuracy / 10)
        panel.set_xlim(0, 1.2 * np.nanmax([row["global"] for row in rows if row["dataset"] == name]))
        panel.set_title(f"{name}, feature-wise")
        panel.set_xlabel("communication rounds")
    axes[0, 0].set_ylabel(r"$\tilde f(x) - \tilde f^\star$")
    axes[0, 0].plot([], [], "k-", label="individual")
    axes[0, 0].plot([], [], "k--", label="global")
    axes[0, 0].legend(ncols=2, columnspacing=0.8, handlelength=1.4)
    plots.save(figure, settings.out / "stepsizes.png")
    lines = [
        f"{'data set':14} {'alpha':>5} {'individual':>11} {'global':>8}   rounds to {settings.accuracy:g}, feature-wise split"
    ]
    lines += [f"{r['dataset']:14} {r['alpha']:5.1f} {r['individual']:11.1f} {r['global']:8.1f}" for r in rows]
    save_table(settings.out / "stepsizes", rows, "\n".join(lines))
    return rows


def probability(settings: Settings) -> list[dict]:
    """Rounds and iterations to the accuracy against p, in one vmapped program; theory's p is sqrt(min gamma_i mu_i)."""
    name, alpha = settings.datasets[0], 0.3
    one = problem(name, "label", settings)
    smooth, gradient = one.smoothness, value_and_grad(settings.mu)
    best = theory.best_probability(1 / smooth.L_i, np.full(settings.n, settings.mu))
    grid = [p for p in best * np.array([0.25, 0.5, 0.71, 1, 1.41, 2, 4]) if p < 1] + [1.0]
    length = int(np.ceil(4 * smooth.L_max / settings.mu * np.log(10 / settings.accuracy) / 100)) * 100
    hparams = [scafflix.theoretical(smooth.L_i, settings.mu, alpha, p=float(p)) for p in grid]
    record = run_grid(
        one, scafflix.iterations(gradient), hparams, settings.seeds, length, settings, f"{name}_probability"
    )
    floor = logistic.flix_optimum(one.dataset, one.rows, settings.mu, alpha, one.optimum).value
    rows = []
    for h, p in enumerate(grid):
        rounds, steps = [], []
        for s in range(settings.seeds):
            at = np.concatenate([[0], np.flatnonzero(record.metrics["bits_up"][h, s][:-1] > 0) + 1])
            hit = first(record.metrics["loss"][h, s][at] - floor, settings.accuracy)
            rounds.append(hit)
            steps.append(at[int(hit)] if np.isfinite(hit) else np.nan)
        rows.append(
            {
                "p": float(p),
                "theory": float(best),
                "rounds": float(np.mean(rounds)),
                "iterations": float(np.mean(steps)),
            }
        )
    figure, axes = plt.subplots(figsize=(3.4, 2.4), layout="constrained")
    axes.loglog(
        grid,
        [r["rounds"] for r in rows],
        "o-",
        markersize=3,
        color=plots.COLORS["Scafflix"],
        label="communication rounds",
    )
    axes.loglog(grid, [r["iterations"] for r in rows], "s--", markersize=3, color="grey", label="local iterations")
    axes.axvline(best, color="k", linewidth=0.8, linestyle=":", label=r"theory: $\sqrt{\min_i \gamma_i\mu_i}$")
    axes.set_xlabel("communication probability $p$")
    axes.set_ylabel(f"to reach {settings.accuracy:g}")
    axes.set_title(f"{name}, label-wise, $\\alpha$ = {alpha}")
    axes.legend()
    plots.save(figure, settings.out / "probability.png")
    lines = [f"{'p':>8} {'rounds':>9} {'iterations':>11}   theory's p = {best:.4f}"]
    lines += [f"{r['p']:8.4f} {r['rounds']:9.1f} {r['iterations']:11.1f}" for r in rows]
    save_table(settings.out / "probability", rows, "\n".join(lines))
    return rows


COMMANDS = {
    "double-acceleration": double_acceleration, "condition-number": condition_number, "inexact": inexact,
    "stepsizes": stepsizes, "probability": probability, "generalisation": scafflix_networks.generalisation,
    "ablations": scafflix_networks.ablations, "baselines": scafflix_networks.baselines,
}  # fmt: skip

if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    tyro.extras.subcommand_cli_from_dict(COMMANDS, config=(tyro.conf.OmitArgPrefixes,))
