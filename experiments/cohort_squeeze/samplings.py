"""Chapter 5: effect of sampling and gamma on speed and neighbourhood; gradient methods; a picture of the clusters."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.figure import Figure

from commjax.algorithms import local_gd, sppm_as
from commjax.data import partition
from commjax.sampling import samplings
from commjax.theory import sppm as theory
from experiments import plots, tables
from experiments.cohort_squeeze.figures import DATASET
from experiments.cohort_squeeze.runs import Settings, problem, sppm, sweep, watched
from experiments.ef_bv.runs import load
from experiments.tables import Column, fields

NEIGHBOURHOODS = [
    DATASET,
    *fields(sampling="11"),
    Column("cohort", "size", "6d"),
    Column("sigma^2", "sigma2", "10.3e"),
    Column("measured", "neighbourhood", "11.3e"),
    *fields(bound="11.3e"),
]


def _row_of_panels(settings: Settings, width: float, height: float, margin: float = 0.6) -> tuple[Figure, np.ndarray]:
    """A figure and its panels, one per data set; a panel has the given size in inches."""
    count = len(settings.datasets)
    figure, panels = plots.panels(1, count, (width * count + margin, height))
    return figure, panels[0]


def _save(figure: Figure, path: Path, rows: list[dict], columns: list[Column], **legend: Any) -> None:
    """Label the distances and add a legend to the first panel; save the figure and the table."""
    figure.axes[0].set_ylabel(r"$|x_t - x^\star|^2$")
    figure.axes[0].legend(**legend)
    plots.save(figure, path.with_suffix(".png"))
    tables.save(path, rows, tables.table(columns, rows))


def compare_samplings(settings: Settings) -> list[dict]:
    """Fig. 5.3: four samplings at gamma = 1 with a near-exact prox; measured neighbourhoods beside the bounds.

    Cohorts have equal size, except for "single".
    """
    rows: list[dict] = []
    gamma, rounds = 1.0, 4 * settings.rounds
    figure, panels = _row_of_panels(settings, 2.6, 2.4)
    for panel, name in zip(panels, settings.datasets):
        split = problem(name, settings)
        n, size = len(split.rows), settings.clusters
        gradients = np.asarray(
            jax.vmap(jax.grad(split.loss), in_axes=(None, 0))(jnp.asarray(split.optimum), split.data)
        )
        gradients = gradients - gradients.mean(axis=0)
        kinds = {
            "stratified": samplings.stratified(split.clusters),
            "nice": samplings.nice(n, size),
            "block": samplings.block_of(split.clusters, min(size, settings.per_cluster)),
            "single": samplings.nice(n, 1),
        }
        for kind, sampling in kinds.items():
            record = sweep(
                split,
                watched(split, sppm(split, sampling, settings, 30)),
                [sppm_as.HParams(gamma, 30, 1e-8)],
                settings,
                f"{name}_{kind}",
                rounds=rounds,
            )
            curve = record.metrics["distance"][0].mean(axis=0)
            settled = float(record.metrics["distance"][0][:, rounds // 2 :].mean())
            sigma2, mu = sampling.variance(gradients), sampling.mu(np.full(n, settings.mu))
            rows.append(
                {
                    "dataset": name,
                    "sampling": kind,
                    "size": sampling.size,
                    "sigma2": sigma2,
                    "neighbourhood": settled,
                    "bound": theory.neighbourhood(gamma, mu, sigma2),
                }
            )
            panel.semilogy(curve, label=kind, linewidth=1)
        panel.set_title(f"{name}, $\\gamma$ = {gamma:g}")
        panel.set_xlabel("global rounds")
    _save(figure, settings.out / "samplings", rows, NEIGHBOURHOODS)
    return rows


def stepsizes(settings: Settings) -> list[dict]:
    """Fig. D.4: any gamma is allowed; a larger one is faster and has a larger neighbourhood."""
    gammas = tuple(10.0**power for power in range(-3, 6))
    shades = plots.shades(len(gammas))
    figure, panels = _row_of_panels(settings, 2.8, 2.6)
    rows = []
    for panel, name in zip(panels, settings.datasets):
        split = problem(name, settings)
        record = sweep(
            split,
            watched(split, sppm(split, samplings.stratified(split.clusters), settings, 16)),
            [sppm_as.HParams(gamma, 16, 1e-8) for gamma in gammas],
            settings,
            f"{name}_stepsizes",
            rounds=100,
        )
        start = float(np.sum((1 - split.optimum) ** 2))
        for shade, gamma, runs in zip(shades, gammas, record.metrics["distance"]):
            panel.semilogy(runs.mean(axis=0), color=shade, linewidth=1, label=f"{gamma:g}")
            rows.append(
                {
                    "dataset": name,
                    "gamma": gamma,
                    "finite": bool(np.isfinite(runs).all()),
                    "last": float(runs[:, -20:].mean()),
                    "rounds_to_tenth": tables.first(runs.mean(axis=0), 0.1 * start),
                }
            )
        panel.set_xlabel("global rounds")
        panel.set_title(f"{name}, SPPM-SS, $K$ = 16")
    columns = [
        DATASET,
        *fields(gamma="8g"),
        Column("rounds to 0.1 of the start", "rounds_to_tenth", "27g"),
        Column("mean of the last 20 rounds", "last", "27.3e"),
    ]
    _save(figure, settings.out / "stepsizes", rows, columns, title=r"$\gamma$", title_fontsize=7, ncols=2)
    return rows


def baselines(settings: Settings) -> list[dict]:
    """Fig. 5.4: SPPM-SS at gamma = 1 against MB-GD and MB-LocalGD (5 steps) at their theoretical stepsizes.

    All cohorts have the same size.
    """
    rows: list[dict] = []
    rounds = 5 * settings.rounds
    figure, panels = _row_of_panels(settings, 2.8, 2.6)
    for panel, name in zip(panels, settings.datasets):
        split = problem(name, settings)
        n = len(split.rows)
        runs: dict[str, tuple[float, np.ndarray]] = {}
        ours = watched(split, sppm(split, samplings.stratified(split.clusters), settings, 16))
        record = sweep(split, ours, [sppm_as.HParams(1.0, 16, 1e-8)], settings, f"{name}_baselines_sppm", rounds=rounds)
        runs["SPPM-SS"] = 1.0, record.metrics["distance"][0]
        for kind, sampling in (
            ("stratified", samplings.stratified(split.clusters)),
            ("nice", samplings.nice(n, settings.clusters)),
        ):
            hparams = [local_gd.theoretical(sampling, split.smoothness.L_i, steps) for steps in (1, 5)]
            plain = watched(split, local_gd.mb_local_gd(jax.value_and_grad(split.loss), sampling))
            record = sweep(split, plain, hparams, settings, f"{name}_baselines_{kind}", rounds=rounds)
            for label, h, distance in zip(("MB-GD", "MB-LocalGD"), hparams, record.metrics["distance"]):
                runs[f"{label}, {kind}"] = h.stepsize, distance
        start = float(np.sum((1 - split.optimum) ** 2))
        for number, (label, (stepsize, distance)) in enumerate(runs.items()):
            line = "-" if label == "SPPM-SS" else "--" if "stratified" in label else ":"
            panel.semilogy(distance.mean(axis=0), line, color=f"C{number}", linewidth=1, label=label)
            rows.append(
                {
                    "dataset": name,
                    "method": label,
                    "stepsize": stepsize,
                    "settled": float(distance[:, -rounds // 4 :].mean()),
                    "rounds_to_hundredth": tables.first(distance.mean(axis=0), 0.01 * start),
                }
            )
        panel.set_xlabel("global rounds")
        panel.set_title(f"{name}, $\\gamma$ = 1")
    columns = [
        DATASET,
        *fields(method="23", stepsize="9.3g"),
        Column("rounds to 0.01 of the start", "rounds_to_hundredth", "28g"),
        Column("mean of the last quarter", "settled", "25.3e"),
    ]
    _save(figure, settings.out / "baselines", rows, columns)
    return rows


def clusters(settings: Settings) -> None:
    """Fig. D.1: t-SNE of rows, coloured by cluster."""
    from sklearn.manifold import TSNE

    figure, panels = _row_of_panels(settings, 2.6, 2.6, margin=0.0)
    for panel, name in zip(panels, settings.datasets):
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
