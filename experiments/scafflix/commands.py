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
import matplotlib.pyplot as plt
import numpy as np

from commjax.algorithms import flix, scafflix
from commjax.core import runner
from commjax.core.records import Record
from commjax.problems import logistic
from commjax.theory import scafflix as theory
from experiments import plots, tables
from experiments.scafflix import condition as scafflix_condition
from experiments.scafflix import networks as scafflix_networks
from experiments.scafflix.problem import Problem, Settings, problem, value_and_grad


def communicated(record: Record, h: int, s: int) -> np.ndarray:
    """The FLIX objective at x after 0, 1, 2, ... communications, from a record of `scafflix.iterations`.

    Right after a communication every client is at its mixture of x, so the loss of that iteration is the objective.

    Args:
        record: Record with metrics [hparams, seed, iteration].
        h: Number of the hparams.
        s: Number of the seed.
    """
    loss, bits = record.metrics["loss"][h, s], record.metrics["bits_up"][h, s]
    return loss[np.concatenate([[0], np.flatnonzero(bits[:-1] > 0) + 1])]


def run_grid(
    problem: Problem, algorithm, hparams: list, seeds: int, rounds: int, settings: Settings, label: str
) -> Record:
    """Run all hparams with all seeds from x^0 = 1, as one vmapped program in chunks; saved under `label`."""
    d = problem.dataset.features.shape[1]
    state = algorithm.init(jnp.ones(d), jnp.arange(settings.n), optimum=jnp.asarray(problem.optimum))
    keys = jax.random.split(jax.random.key(settings.seed), seeds)
    _, record = runner.loop(
        keys,
        algorithm,
        runner.stack(hparams),
        state,
        problem.data,
        rounds,
        chunk=100,
        checkpoint=settings.out / f"{label}.ckpt",
        label=label,
        progress=settings.progress,
        bits_init=64.0,  # every client sends alpha_i^2 / gamma_i once
        config={"dataset": problem.name, "split": problem.split, "n": settings.n, "d": d, "mu": settings.mu},
    )
    record.save(settings.out / label)
    return record


def accelerate(problem: Problem, settings: Settings) -> dict:
    """Rounds of Scafflix and of GD to the accuracy, for every alpha; nothing is tuned."""
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
        problem,
        scafflix.iterations(gradient),
        [scafflix.theoretical(smooth.L_i, settings.mu, a) for a in settings.alphas],
        settings.seeds,
        length,
        settings,
        f"{name}_scafflix",
    )
    # L of the average is at most the average of the L_i: its larger stepsize makes GD the stronger opponent.
    plain = run_grid(
        problem,
        flix.flix(gradient),
        [flix.theoretical(np.full(settings.n, smooth.L), a) for a in settings.alphas],
        1,
        length,
        settings,
        f"{name}_gd",
    )
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
    return {"curves": curves, "rows": rows}


def acceleration_table(rows: list[dict], settings: Settings) -> str:
    """The table of `double_acceleration` as text."""
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
        np.all(np.diff([r[method] for r in rows if (r["dataset"], r["split"]) == key]) >= 0)
        for key in dict.fromkeys((r["dataset"], r["split"]) for r in rows)
        for method in ("gd", "scafflix")
    )
    lines.append(
        f"Scafflix needs fewer rounds than GD in every row: {fewer}; fewer rounds for smaller alpha: {falling}"
    )
    return "\n".join(lines)


def double_acceleration(settings: Settings) -> list[dict]:
    """Figs. 3.1 and B.4: FLIX objective against communication rounds; nothing is tuned."""
    rows: list[dict] = []
    for split in settings.splits:
        figure, axes = plt.subplots(
            1,
            len(settings.datasets),
            figsize=(2.5 * len(settings.datasets) + 0.2, 2.3),
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
            ratios = [row["ratio"] for row in found["rows"]]
            panel.set_title(f"{name}, {split}: {min(ratios):.2f} to {max(ratios):.2f} of GD's rounds")
            panel.set_xlabel("communication rounds")
        axes[0, 0].set_ylabel(r"$\tilde f(x) - \tilde f^\star$")
        axes[0, 0].plot([], [], "k-", label="Scafflix")
        axes[0, 0].plot([], [], "k--", label="GD")
        axes[0, 0].legend(ncols=2, columnspacing=0.8, handlelength=1.4)
        plots.save(figure, settings.out / f"double_acceleration_{split}.png")
    tables.save(settings.out / "double_acceleration", rows, acceleration_table(rows, settings))
    return rows


def inexact(settings: Settings) -> list[dict]:
    """Sec. 3.3.4, Figs. 3.4 and B.5: local optima to |grad| < epsilon, or after some iterations, from x_i^0 = 100."""
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
                "kind": kind,
                "value": value,
                "iterations_mean": float(steps.mean()),
                "iterations_min": int(steps.min()),
                "iterations_max": int(steps.max()),
                "distance": float(seen.distance[-1]),
                "loss": float(seen.loss[-1]) - floor.value,
            }
        )
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
        f"{'kind':11} {'value':>8} {'iterations (min, mean, max)':>28} "
        f"{'mean |xt - xt*|^2':>18} {'mean f_i - best':>16}",
    ]
    lines += [
        f"{r['kind']:11} {r['value']:8g} "
        f"{r['iterations_min']:8d} {r['iterations_mean']:10.1f} {r['iterations_max']:8d} "
        f"{r['distance']:18.3e} {r['loss']:16.3e}"
        for r in rows
    ]
    lines.append(f"iterations at epsilon = 1e-6 over those at 1e-1: {mean[0] / mean[-1]:.2f} (thesis: 23.55)")
    tables.save(settings.out / "inexact", rows, "\n".join(lines))
    return rows


def stepsizes(settings: Settings) -> list[dict]:
    """Sec. 3.3.4, Fig. 3.5: gamma_i = 1/L_i against 1/max_i L_i for all clients, each at its own best p."""
    rows, shades = [], plt.get_cmap("viridis")(np.linspace(0, 0.85, len(settings.alphas)))
    names = settings.datasets[:2]
    figure, axes = plt.subplots(1, len(names), figsize=(2.6 * len(names), 2.3), squeeze=False, layout="constrained")
    for panel, name in zip(axes[0], names):
        one = problem(name, "feature", settings)
        smooth, gradient = one.smoothness, value_and_grad(settings.mu)
        length = int(np.ceil(1.5 * smooth.L_max / settings.mu * np.log(1e3 / settings.accuracy) / 100)) * 100
        kinds = {"individual": {}, "global": {"gamma": 1 / smooth.L_max}}
        algorithm, records = scafflix.iterations(gradient), {}
        for kind, given in kinds.items():
            hparams = [scafflix.theoretical(smooth.L_i, settings.mu, alpha, **given) for alpha in settings.alphas]
            records[kind] = run_grid(one, algorithm, hparams, settings.seeds, length, settings, f"{name}_{kind}")
        for h, alpha in enumerate(settings.alphas):
            floor = logistic.flix_optimum(one.dataset, one.rows, settings.mu, alpha, one.optimum).value
            row: dict[str, Any] = {"dataset": name, "alpha": alpha, "kappa_max": smooth.L_max / settings.mu}
            for (kind, record), line in zip(records.items(), ("-", "--")):
                runs = [communicated(record, h, s) - floor for s in range(settings.seeds)]
                row[kind] = float(np.mean([tables.first(run, settings.accuracy) for run in runs]))
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
        f"{'data set':14} {'alpha':>5} {'individual':>11} {'global':>8}   "
        f"rounds to {settings.accuracy:g}, feature-wise split"
    ]
    lines += [f"{r['dataset']:14} {r['alpha']:5.1f} {r['individual']:11.1f} {r['global']:8.1f}" for r in rows]
    tables.save(settings.out / "stepsizes", rows, "\n".join(lines))
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
            hit = tables.first(record.metrics["loss"][h, s][at] - floor, settings.accuracy)
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
    tables.save(settings.out / "probability", rows, "\n".join(lines))
    return rows


COMMANDS = {
    "double-acceleration": double_acceleration,
    "condition-number": scafflix_condition.condition_number,
    "inexact": inexact,
    "stepsizes": stepsizes,
    "probability": probability,
    "generalisation": scafflix_networks.generalisation,
    "ablations": scafflix_networks.ablations,
    "baselines": scafflix_networks.baselines,
}
