"""Chapter 5: effect of sampling and gamma on speed and neighbourhood; gradient methods; a picture of the clusters."""

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from commjax.algorithms import local_gd, sppm_as
from commjax.data import partition
from commjax.sampling import samplings
from commjax.theory import sppm as theory
from experiments import plots, tables
from experiments.cohort_squeeze.runs import Settings, problem, sppm, sweep
from experiments.ef_bv.runs import load
from experiments.tables import Column

NEIGHBOURHOODS = [
    Column("data set", "dataset", "13"),
    Column("sampling", "sampling", "11"),
    Column("cohort", "size", "6d"),
    Column("sigma^2", "sigma2", "10.3e"),
    Column("measured", "neighbourhood", "11.3e"),
    Column("bound", "bound", "11.3e"),
]


def compare_samplings(settings: Settings) -> list[dict]:
    """Fig. 5.3: four samplings at gamma = 1 with a near-exact prox; measured neighbourhoods beside the bounds.

    Cohorts have equal size, except for "single".
    """
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
                sppm(split, sampling, settings, 30),
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
    axes[0, 0].set_ylabel(r"$|x_t - x^\star|^2$")
    axes[0, 0].legend()
    plots.save(figure, settings.out / "samplings.png")
    tables.save(settings.out / "samplings", rows, tables.table(NEIGHBOURHOODS, rows))
    return rows


def stepsizes(settings: Settings) -> list[dict]:
    """Fig. D.4: any gamma is allowed; a larger one is faster and has a larger neighbourhood."""
    gammas = tuple(10.0**power for power in range(-3, 6))
    shades = plots.shades(len(gammas))
    size = (2.8 * len(settings.datasets) + 0.6, 2.6)
    figure, axes = plt.subplots(1, len(settings.datasets), figsize=size, squeeze=False, layout="constrained")
    rows = []
    for panel, name in zip(axes[0], settings.datasets):
        split = problem(name, settings)
        record = sweep(
            split,
            sppm(split, samplings.stratified(split.clusters), settings, 16),
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
    axes[0, 0].set_ylabel(r"$|x_t - x^\star|^2$")
    axes[0, 0].legend(title=r"$\gamma$", title_fontsize=7, ncols=2)
    plots.save(figure, settings.out / "stepsizes.png")
    columns = [
        Column("data set", "dataset", "13"),
        Column("gamma", "gamma", "8g"),
        Column("rounds to 0.1 of the start", "rounds_to_tenth", "27g"),
        Column("mean of the last 20 rounds", "last", "27.3e"),
    ]
    tables.save(settings.out / "stepsizes", rows, tables.table(columns, rows))
    return rows


def baselines(settings: Settings) -> list[dict]:
    """Fig. 5.4: SPPM-SS at gamma = 1 against MB-GD and MB-LocalGD (5 steps) at their theoretical stepsizes.

    All cohorts have the same size.
    """
    rows: list[dict] = []
    rounds = 5 * settings.rounds
    size = (2.8 * len(settings.datasets) + 0.6, 2.6)
    figure, axes = plt.subplots(1, len(settings.datasets), figsize=size, squeeze=False, layout="constrained")
    for panel, name in zip(axes[0], settings.datasets):
        split = problem(name, settings)
        n = len(split.rows)
        runs: dict[str, tuple[float, np.ndarray]] = {}
        ours = sppm(split, samplings.stratified(split.clusters), settings, 16)
        record = sweep(split, ours, [sppm_as.HParams(1.0, 16, 1e-8)], settings, f"{name}_baselines_sppm", rounds=rounds)
        runs["SPPM-SS"] = 1.0, record.metrics["distance"][0]
        for kind, sampling in (
            ("stratified", samplings.stratified(split.clusters)),
            ("nice", samplings.nice(n, settings.clusters)),
        ):
            hparams = [local_gd.theoretical(sampling, split.smoothness.L_i, steps) for steps in (1, 5)]
            plain = local_gd.mb_local_gd(jax.value_and_grad(split.loss), sampling)
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
    axes[0, 0].set_ylabel(r"$|x_t - x^\star|^2$")
    axes[0, 0].legend()
    plots.save(figure, settings.out / "baselines.png")
    columns = [
        Column("data set", "dataset", "13"),
        Column("method", "method", "23"),
        Column("stepsize", "stepsize", "9.3g"),
        Column("rounds to 0.01 of the start", "rounds_to_hundredth", "28g"),
        Column("mean of the last quarter", "settled", "25.3e"),
    ]
    tables.save(settings.out / "baselines", rows, tables.table(columns, rows))
    return rows


def clusters(settings: Settings) -> None:
    """Fig. D.1: t-SNE of rows, coloured by cluster."""
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
