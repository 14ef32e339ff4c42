"""Cohort-Squeeze: the figures of the thesis's Chapter 5 on logistic regression.

    python -m experiments.cohort_squeeze cost            total cost TK against K for several gamma, SPPM-SS and LocalGD, all targets
    python -m experiments.cohort_squeeze hierarchical    the same runs at c1 = 0.1 and 0.05, c2 = 1
    python -m experiments.cohort_squeeze samplings       measured neighbourhoods of four samplings beside their bounds
    python -m experiments.cohort_squeeze stepsizes       speed against neighbourhood for gamma from 1e-3 to 1e5
    python -m experiments.cohort_squeeze clusters        t-SNE picture of the clients' clusters

LibSVM files come from $COMMJAX_DATA or are downloaded; `--datasets breast_cancer --clusters 5 --per-cluster 4` needs neither.
Clients: k-means on the rows' features, each cluster cut into equal parts; a cohort is one client of each cluster.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import tyro

from commjax import cohorts, runner
from commjax.algorithms import sppm_as
from commjax.data import partition
from commjax.data.libsvm import Dataset
from commjax.problems import logistic
from commjax.problems.constants import Smoothness
from commjax.prox import quasi_newton, solvers
from commjax.records import Record
from commjax.theory import sppm as theory
from experiments import plots, tables
from experiments.ef_bv import load

SOLVERS: dict[str, Callable[[Smoothness, Any], solvers.Solver]] = {
    "bfgs": lambda smooth, gamma: quasi_newton.bfgs(),
    "cg": lambda smooth, gamma: quasi_newton.conjugate_gradients(),
    "lbfgs": lambda smooth, gamma: quasi_newton.lbfgs(),
    "agd": lambda smooth, gamma: solvers.accelerated_gradient_descent(smooth.L_max + 1 / gamma, smooth.mu + 1 / gamma),
    "gd": lambda smooth, gamma: solvers.gradient_descent(smooth.L_max + 1 / gamma),
    "aicn": lambda smooth, gamma: solvers.aicn(),
}


@dataclass(frozen=True)
class Settings:
    datasets: tuple[str, ...] = ("a6a",)  # LibSVM names (a6a, mushrooms, a9a, ijcnn1), or breast_cancer (embedded)
    clusters: int = 10  # k-means clusters; the size of a stratified cohort
    per_cluster: int = 10  # clients of each cluster
    mu: float = 0.1  # weight of the regulariser
    solver: Literal["bfgs", "cg", "lbfgs", "agd", "gd", "aicn"] = "bfgs"  # of the prox
    gammas: tuple[float, ...] = (1.0, 10.0, 100.0, 1000.0, 10_000.0, 100_000.0)  # of the prox
    most_local: int = 15  # K from 1 to this
    rounds: int = 40  # global rounds, at most
    localgd: tuple[float, ...] = (0.01, 0.1, 0.25, 0.5, 1.0)  # LocalGD's stepsizes, beside theory's 1/L_max
    seeds: int = 5  # cohorts
    # Targets |x - x*|^2: absolute, or a fraction of |x^0 - x*|^2 where the text has an absolute one (P15).
    absolute: tuple[float, ...] = (0.1, 0.01, 0.005)
    relative: tuple[float, ...] = (0.005, 0.001)
    seed: int = 0  # of the clusters and the cohorts
    out: Path = Path("results/cohort_squeeze")  # records, figures
    progress: bool = True  # show a bar


class Problem(NamedTuple):
    """A clustered data set; float64, x^0 = 1."""

    name: str
    dataset: Dataset
    rows: Any
    clusters: list[np.ndarray]  # of clients
    data: partition.ClientData
    smoothness: Smoothness
    optimum: np.ndarray
    loss: Callable


def problem(name: str, settings: Settings) -> Problem:
    """Thesis: L4866."""
    dataset = load(name)
    groups = partition.feature_wise(dataset.features, settings.clusters, seed=settings.seed)
    if (least := min(map(len, groups))) < settings.per_cluster:
        raise ValueError(
            f"per_cluster={settings.per_cluster}; allowed: at most {least}, the rows of the smallest cluster"
        )
    rows = [part for group in groups for part in np.array_split(group, settings.per_cluster)]
    clusters = list(np.arange(len(rows)).reshape(settings.clusters, settings.per_cluster))
    data = jax.tree.map(jnp.asarray, partition.stack(dataset, rows))
    smoothness = logistic.constants(dataset, rows, settings.mu)
    optimum = logistic.optimum(dataset, rows, settings.mu).params
    return Problem(name, dataset, rows, clusters, data, smoothness, optimum, partial(logistic.loss, mu=settings.mu))


def sweep(
    problem: Problem, algorithm, hparams: list, settings: Settings, label: str, rounds: int | None = None
) -> Record:
    """All hparams with all seeds in one program; |x - x*|^2 at the start of every round is the metric `distance`."""
    optimum = jnp.asarray(problem.optimum)
    algorithm = runner.observe(algorithm, distance=lambda state, batch: jnp.sum((state.server.params - optimum) ** 2))
    d = len(problem.optimum)
    state = algorithm.init(jnp.ones(d), jnp.arange(len(problem.rows)))
    keys = jax.random.split(jax.random.key(settings.seed), settings.seeds)
    _, record = runner.loop(
        keys, algorithm, runner.stack(hparams), state, problem.data, settings.rounds if rounds is None else rounds,
        chunk=5, checkpoint=settings.out / f"{label}.ckpt", label=label, progress=settings.progress,
        config={"dataset": problem.name, "d": d, "n": len(problem.rows), "solver": settings.solver},
    )  # fmt: skip
    record.save(settings.out / label)
    return record


def sppm(problem: Problem, sampling: cohorts.Sampling, settings: Settings):
    return sppm_as.sppm_as(problem.loss, sampling, partial(SOLVERS[settings.solver], problem.smoothness))


class Grid(NamedTuple):
    """Both methods over their grids."""

    start: float  # |x^0 - x*|^2
    sppm: Record  # [gamma x K, seed, round]
    localgd: Record  # [stepsize x steps, seed, round]
    pairs: list[tuple[float, int]]
    local_pairs: list[tuple[float, int]]


def grid(problem: Problem, settings: Settings) -> Grid:
    sampling = cohorts.stratified(problem.clusters)
    pairs = [(gamma, K) for gamma in settings.gammas for K in range(1, settings.most_local + 1)]
    ours = sweep(
        problem, sppm(problem, sampling, settings), [sppm_as.HParams(gamma, K, 1e-9) for gamma, K in pairs], settings,
        f"{problem.name}_{settings.solver}",
    )  # fmt: skip
    stepsizes = (*settings.localgd, 1 / problem.smoothness.L_max)
    local_pairs = [(stepsize, steps) for stepsize in stepsizes for steps in range(1, settings.most_local + 1)]
    theirs = sweep(
        problem, sppm_as.mb_local_gd(jax.value_and_grad(problem.loss), sampling),
        [sppm_as.LocalHParams(*pair) for pair in local_pairs], settings, f"{problem.name}_localgd", rounds=2 * settings.rounds,
    )  # fmt: skip
    return Grid(float(np.sum((1 - problem.optimum) ** 2)), ours, theirs, pairs, local_pairs)


def rounds_to(record: Record, target: float) -> np.ndarray:
    """[setting, seed]: the first round whose start is within the target, or nan."""
    distance = record.metrics["distance"]
    return np.array([[tables.first(run, target) for run in setting] for setting in distance])


def costs(found: Grid, target: float, c1: float, c2: float, count: str) -> tuple[np.ndarray, np.ndarray]:
    """Mean cost over seeds (nan unless all reach the target) of every setting of both methods.

    count: "iterations" (the thesis: K local rounds for every global one) or "evaluations" (what was aggregated, P12).
    """
    T = rounds_to(found.sppm, target)
    spent = np.zeros_like(T)
    for (h, s), rounds in np.ndenumerate(T):
        if np.isfinite(rounds):
            if count == "iterations":
                spent[h, s] = theory.cost(c1, c2, found.pairs[h][1], int(rounds)) if rounds else 0.0
            else:
                spent[h, s] = c1 * found.sppm.metrics["local_rounds"][h, s, : int(rounds)].sum() + c2 * rounds
        else:
            spent[h, s] = np.nan
    local = rounds_to(found.localgd, target) * (c1 + c2)
    return spent.mean(axis=1), local.mean(axis=1)


def targets(found: Grid, settings: Settings) -> dict[str, float]:
    named = {f"{value:g}": value for value in settings.absolute}
    return named | {f"{value:g} |x0-x*|^2": value * found.start for value in settings.relative}


def cost_rows(name: str, found: Grid, settings: Settings, c1: float, c2: float) -> list[dict]:
    rows = []
    for label, target in targets(found, settings).items():
        row: dict[str, Any] = {"dataset": name, "target": label, "value": target, "c1": c1, "c2": c2}
        for count in ("iterations", "evaluations"):
            ours, local = costs(found, target, c1, c2, count)
            if np.isfinite(ours).any():
                at = int(np.nanargmin(ours))
                row |= {count: float(ours[at]), f"{count}_gamma": found.pairs[at][0], f"{count}_K": found.pairs[at][1]}
            if np.isfinite(local).any():
                at = int(np.nanargmin(local))
                row |= {
                    "localgd": float(local[at]),
                    "localgd_stepsize": found.local_pairs[at][0],
                    "localgd_steps": found.local_pairs[at][1],
                }
            if np.isfinite(local[: len(local)]).any():
                thesis = [c for c, (stepsize, _) in zip(local, found.local_pairs) if stepsize == 0.1 and np.isfinite(c)]
                row["localgd_at_0.1"] = float(min(thesis)) if thesis else None
        rows.append(row)
    return rows


def show(rows: list[dict]) -> str:
    def cell(row, key, pattern):
        return format(row[key], pattern) if row.get(key) is not None else "-"

    lines = [
        f"{'data set':13} {'target |x-x*|^2':>18} {'c1':>5} {'c2':>3} | {'SPPM-SS, iterations (gamma, K)':>31} | {'evaluations (gamma, K)':>25} | {'LocalGD (stepsize, steps)':>27} | at stepsize 0.1"
    ]
    for r in rows:
        ours = f"{cell(r, 'iterations', '.1f')} ({cell(r, 'iterations_gamma', 'g')}, {cell(r, 'iterations_K', 'd')})"
        true = f"{cell(r, 'evaluations', '.1f')} ({cell(r, 'evaluations_gamma', 'g')}, {cell(r, 'evaluations_K', 'd')})"
        local = f"{cell(r, 'localgd', '.1f')} ({cell(r, 'localgd_stepsize', '.3g')}, {cell(r, 'localgd_steps', 'd')})"
        lines.append(
            f"{r['dataset']:13} {r['target']:>18} {r['c1']:5g} {r['c2']:3g} | {ours:>31} | {true:>25} | {local:>27} | {cell(r, 'localgd_at_0.1', '.1f')}"
        )
    return "\n".join(lines)


def cost_panel(axes, found: Grid, target: float, settings: Settings, c1: float, c2: float) -> None:
    ours, local = costs(found, target, c1, c2, "iterations")
    shades = plt.get_cmap("viridis")(np.linspace(0, 0.85, len(settings.gammas)))
    K = np.arange(1, settings.most_local + 1)
    for shade, gamma, values in zip(shades, settings.gammas, ours.reshape(len(settings.gammas), -1)):
        if np.isfinite(values).any():
            axes.plot(K, values, "o-", markersize=2.5, color=shade, label=rf"$\gamma$ = {gamma:g}")
    if np.isfinite(local).any():
        axes.axhline(np.nanmin(local), color="#D55E00", linestyle="--", linewidth=1, label="LocalGD, tuned")
    axes.set_xlabel("local communication rounds $K$")


def cost(settings: Settings) -> list[dict]:
    """Figs. L1960, L2240 and L4935: cost TK to a target, counted as iterations and as evaluations."""
    rows: list[dict] = []
    figure, axes = plt.subplots(
        1,
        len(settings.datasets),
        figsize=(2.6 * len(settings.datasets) + 0.6, 2.5),
        squeeze=False,
        layout="constrained",
    )
    for panel, name in zip(axes[0], settings.datasets):
        found = grid(problem(name, settings), settings)
        rows += cost_rows(name, found, settings, 1.0, 0.0)
        cost_panel(panel, found, settings.absolute[0], settings, 1.0, 0.0)
        panel.set_title(f"{name}, {settings.solver}, $|x-x^\\star|^2 <$ {settings.absolute[0]:g}")
    axes[0, 0].set_ylabel("total cost $TK$")
    axes[0, 0].legend()
    plots.save(figure, settings.out / f"cost_{settings.solver}.png")
    tables.save(settings.out / f"cost_{settings.solver}", rows, show(rows))
    return rows


def hierarchical(settings: Settings) -> list[dict]:
    """Figs. L2253 and L5000: the runs of `cost` priced with hubs, (c1 K + c2) T against (c1 + c2) T."""
    rows: list[dict] = []
    for name in settings.datasets:
        found = grid(problem(name, settings), settings)
        for c1 in (0.1, 0.05):
            rows += cost_rows(name, found, settings, c1, 1.0)
    tables.save(settings.out / f"hierarchical_{settings.solver}", rows, show(rows))
    return rows


def samplings(settings: Settings) -> list[dict]:
    """Fig. L2293: four samplings of equal cohort size, gamma = 1, near-exact prox: where they settle, and the bound."""
    rows: list[dict] = []
    gamma, rounds = 1.0, 4 * settings.rounds
    figure, axes = plt.subplots(
        1,
        len(settings.datasets),
        figsize=(2.6 * len(settings.datasets) + 0.6, 2.4),
        squeeze=False,
        layout="constrained",
    )
    for panel, name in zip(axes[0], settings.datasets):
        one = problem(name, settings)
        n, size = len(one.rows), settings.clusters
        gradients = np.asarray(jax.vmap(jax.grad(one.loss), in_axes=(None, 0))(jnp.asarray(one.optimum), one.data))
        gradients = gradients - gradients.mean(axis=0)
        kinds = {
            "stratified": cohorts.stratified(one.clusters), "nice": cohorts.nice(n, size),
            "block": cohorts.block_of(one.clusters, min(size, settings.per_cluster)), "single": cohorts.nice(n, 1),
        }  # fmt: skip
        for kind, sampling in kinds.items():
            record = sweep(
                one,
                sppm(one, sampling, settings),
                [sppm_as.HParams(gamma, 30, 1e-8)],
                settings,
                f"{name}_{kind}",
                rounds,
            )
            curve = record.metrics["distance"][0].mean(axis=0)
            settled = float(record.metrics["distance"][0][:, rounds // 2 :].mean())
            sigma2, mu = sampling.variance(gradients), sampling.mu(np.full(n, settings.mu))
            rows.append(
                {"dataset": name, "sampling": kind, "size": sampling.size, "sigma2": sigma2, "neighbourhood": settled, "bound": theory.neighbourhood(gamma, mu, sigma2)}
            )  # fmt: skip
            panel.semilogy(curve, label=kind, linewidth=1)
        panel.set_title(f"{name}, $\\gamma$ = {gamma:g}")
        panel.set_xlabel("global rounds")
    axes[0, 0].set_ylabel(r"$|x_t - x^\star|^2$")
    axes[0, 0].legend()
    plots.save(figure, settings.out / "samplings.png")
    lines = [f"{'data set':13} {'sampling':11} {'cohort':>6} {'sigma^2':>10} {'measured':>11} {'bound':>11}"]
    lines += [
        f"{r['dataset']:13} {r['sampling']:11} {r['size']:6d} {r['sigma2']:10.3e} {r['neighbourhood']:11.3e} {r['bound']:11.3e}"
        for r in rows
    ]
    tables.save(settings.out / "samplings", rows, "\n".join(lines))
    return rows


def stepsizes(settings: Settings) -> list[dict]:
    """Fig. L4985: any gamma is allowed; a larger one is faster and settles farther away.  MB-GD at 1/L_max beside it."""
    name = settings.datasets[0]
    one = problem(name, settings)
    sampling = cohorts.stratified(one.clusters)
    gammas = tuple(10.0**power for power in range(-3, 6))
    record = sweep(
        one,
        sppm(one, sampling, settings),
        [sppm_as.HParams(gamma, 16, 1e-8) for gamma in gammas],
        settings,
        f"{name}_stepsizes",
        100,
    )
    plain = sweep(
        one, sppm_as.mb_local_gd(jax.value_and_grad(one.loss), sampling),
        [sppm_as.LocalHParams(1 / one.smoothness.L_max, steps) for steps in (1, 5)], settings, f"{name}_mbgd", 100,
    )  # fmt: skip
    figure, axes = plt.subplots(figsize=(3.4, 2.6), layout="constrained")
    shades = plt.get_cmap("viridis")(np.linspace(0, 0.85, len(gammas)))
    rows = []
    for shade, gamma, runs in zip(shades, gammas, record.metrics["distance"]):
        axes.semilogy(runs.mean(axis=0), color=shade, linewidth=1, label=f"{gamma:g}")
        rows.append({"gamma": gamma, "finite": bool(np.isfinite(runs).all()), "last": float(runs[:, -20:].mean())})
    for runs, label, line in zip(plain.metrics["distance"], ("MB-GD", "MB-LocalGD, 5 steps"), ("k--", "k:")):
        axes.semilogy(runs.mean(axis=0), line, linewidth=1, label=label)
    axes.set_xlabel("global rounds")
    axes.set_ylabel(r"$|x_t - x^\star|^2$")
    axes.set_title(f"{name}, SPPM-SS, $K$ = 16")
    axes.legend(title=r"$\gamma$", title_fontsize=7, ncols=2)
    plots.save(figure, settings.out / "stepsizes.png")
    lines = [f"{'gamma':>8} {'mean of the last 20 rounds':>27}"] + [f"{r['gamma']:8g} {r['last']:27.3e}" for r in rows]
    tables.save(settings.out / "stepsizes", rows, "\n".join(lines))
    return rows


def clusters(settings: Settings) -> None:
    """Fig. L4870: t-SNE of rows, coloured by cluster."""
    from sklearn.manifold import TSNE

    figure, axes = plt.subplots(
        1, len(settings.datasets), figsize=(2.6 * len(settings.datasets), 2.6), squeeze=False, layout="constrained"
    )
    for panel, name in zip(axes[0], settings.datasets):
        dataset = load(name)
        groups = partition.feature_wise(dataset.features, settings.clusters, seed=settings.seed)
        rng = np.random.default_rng(settings.seed)
        picked = [rng.permutation(ids)[:100] for ids in groups]
        points = TSNE(random_state=settings.seed, init="pca").fit_transform(dataset.features[np.concatenate(picked)])
        panel.scatter(*points.T, c=np.repeat(np.arange(len(picked)), list(map(len, picked))), cmap="tab10", s=3)
        panel.set_title(f"{name}, {settings.clusters} clusters")
        panel.set_xticks([])
        panel.set_yticks([])
    plots.save(figure, settings.out / "clusters.png")


COMMANDS = {
    "cost": cost,
    "hierarchical": hierarchical,
    "samplings": samplings,
    "stepsizes": stepsizes,
    "clusters": clusters,
}

if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    tyro.extras.subcommand_cli_from_dict(COMMANDS, config=(tyro.conf.OmitArgPrefixes,))
