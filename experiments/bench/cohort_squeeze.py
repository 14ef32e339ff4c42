"""The (gamma x K x seed) grid of `experiments.cohort_squeeze cost` as one program, against scipy.optimize run by run.

    python -m experiments.bench.cohort_squeeze            a6a (or --dataset breast_cancer, embedded)

Both sides have the same cohorts, the same prox objectives and BFGS (scipy with its own line search). Scipy's side
computes values and gradients with NumPy in float64. Our side runs in float64 and in float32 (JAX's default). It runs
with the settings split over one device per core (`mesh=`), and on one device with all cores.

Without COMMJAX_DATA, the embedded data set breast_cancer is taken.
"""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from scipy.optimize import minimize

from commjax.algorithms import sppm_as
from commjax.core import runner
from commjax.devices.mesh import client_mesh
from commjax.sampling import samplings
from experiments.bench.measure import Ratio, Side, Table, command, take_turns
from experiments.cohort_squeeze import runs as cohort_squeeze_runs

Pairs = Sequence[tuple[float, int]]  # (gamma, K) of each setting


@dataclass(frozen=True)
class Settings:
    # breast_cancer (embedded) or the name of a LibSVM data set
    dataset: str = "a6a" if "COMMJAX_DATA" in os.environ else "breast_cancer"
    clusters: int = 10  # number of clusters, which is also the size of a cohort
    per_cluster: int = 10  # clients per cluster
    gammas: tuple[float, ...] = (1.0, 10.0, 100.0, 1000.0, 10_000.0, 100_000.0)  # stepsizes of the prox
    most_local: int = 15  # K runs from 1 to this number
    seeds: int = 5  # seeds of the cohorts
    rounds: int = 5  # global rounds per run
    at_once: int = 15  # settings that run together on a device with one core
    at_once_alone: int = 30  # settings that run together on a device with all cores
    repeats: int = 5


QUICK = Settings(gammas=(1.0, 1000.0), most_local=5, seeds=2, repeats=2)


def ours(
    problem: cohort_squeeze_runs.Problem, settings: Settings, pairs: Pairs, keys: jax.Array, dtype: Any, devices: int
) -> Callable[[], np.ndarray]:
    """Return a function that runs the whole grid and returns x [setting, seed, d].

    Args:
        problem: The problem, from `experiments.cohort_squeeze.runs`.
        settings: Settings of the benchmark.
        pairs: The settings (gamma, K).
        keys: Random keys, one per seed.
        dtype: float64 or float32.
        devices: Number of devices.
    """
    algorithm = cohort_squeeze_runs.sppm(
        problem, samplings.stratified(problem.clusters), cohort_squeeze_runs.Settings()
    )
    tolerance = 1e-9 if dtype == jnp.float64 else 1e-5  # float32 cannot get below 1e-5
    grid = runner.stack(
        [sppm_as.HParams(jnp.asarray(gamma, dtype), K, jnp.asarray(tolerance, dtype)) for gamma, K in pairs]
    )
    state = algorithm.init(jnp.ones(len(problem.optimum), dtype), jnp.arange(len(problem.rows)))
    data = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), problem.data)
    inputs = (keys, algorithm, grid, state, data, settings.rounds)

    def run() -> np.ndarray:
        if devices > 1:
            states, _ = runner.sweep(*inputs, mesh=client_mesh(devices), at_once=settings.at_once)
        else:
            states, _ = runner.sweep(*inputs, at_once=settings.at_once_alone)
        return np.asarray(states.server.params, np.float64)

    return run


def _objective(
    z: np.ndarray, *, A: np.ndarray, w: np.ndarray, total: float, center: np.ndarray, gamma: float
) -> tuple[np.ndarray, np.ndarray]:
    """Return value and gradient of a cohort's prox objective: rows A with weights w, and mu = 0.1 times `total`."""
    margin, away = A @ z, z - center
    small = np.exp(-np.abs(margin))
    loss = w @ (np.maximum(-margin, 0) + np.log1p(small))
    wrong = np.where(margin >= 0, small, 1) / (1 + small)
    value = loss + total * 0.05 * (z @ z) + (away @ away) / (2 * gamma)
    return value, -((w * wrong) @ A) + total * 0.1 * z + away / gamma


def theirs(
    problem: cohort_squeeze_runs.Problem, settings: Settings, pairs: Pairs, key: jax.Array
) -> Callable[[], np.ndarray]:
    """Return a function that takes the same runs of one seed one after another, and returns x [setting, d]."""
    sampling = samplings.stratified(problem.clusters)
    signed = [problem.dataset.labels[ids, None] * problem.dataset.features[ids] for ids in problem.rows]
    weights = 1 / (len(problem.rows) * sampling.probabilities)
    draws = [
        np.asarray(sampling.sample(jax.random.fold_in(jax.random.split(key)[0], t)).ids) for t in range(settings.rounds)
    ]

    def run() -> np.ndarray:
        cohort = []
        for ids in draws:
            A = np.concatenate([signed[i] for i in ids])
            w = np.concatenate([np.full(len(signed[i]), weights[i] / len(signed[i])) for i in ids])
            cohort.append((A, w, float(weights[ids].sum())))
        params = np.empty((len(pairs), len(problem.optimum)))
        for h, (gamma, K) in enumerate(pairs):
            x = np.ones(len(problem.optimum))
            for A, w, total in cohort:
                objective = partial(_objective, A=A, w=w, total=total, center=x, gamma=gamma)
                x = minimize(objective, x, jac=True, method="BFGS", options={"maxiter": K, "gtol": 1e-9}).x
            params[h] = x
        return params

    return run


def tables(settings: Settings) -> list[Table]:
    """Measure all sides."""
    about = cohort_squeeze_runs.Settings(clusters=settings.clusters, per_cluster=settings.per_cluster)
    problem = cohort_squeeze_runs.problem(settings.dataset, about)
    pairs = [(gamma, K) for K in range(1, settings.most_local + 1) for gamma in settings.gammas]
    keys = jax.random.split(jax.random.key(0), settings.seeds)
    if "COMMJAX_DATA" not in os.environ:
        print("COMMJAX_DATA is not set: the embedded data set breast_cancer is taken instead of a6a")
    names = {1: "one device", jax.device_count(): "one device a core"}
    ours_by_name = {
        f"{dtype.__name__}, {name}": ours(problem, settings, pairs, keys, dtype, devices)
        for dtype in (jnp.float64, jnp.float32)
        for devices, name in names.items()
    }
    scipy = [theirs(problem, settings, pairs, key) for key in keys]
    sides = {"scipy, run after run": Side(lambda: [run() for run in scipy])}
    sides |= {name: Side(run) for name, run in ours_by_name.items()}
    # float32 does not compute what scipy computes; it has no goal.
    goals = {name: 20.0 if "float64" in name and "core" in name else None for name in ours_by_name}
    return [
        Table(
            "A grid of Cohort-Squeeze",
            f"{settings.dataset}, {len(problem.rows)} clients, {len(pairs) * len(keys)} runs of {settings.rounds} "
            "rounds",
            "The whole grid is one program. scipy takes the same time with one BLAS thread or two.",
            take_turns(sides, settings.repeats),
            {f"scipy / {name}": Ratio("scipy, run after run", name, goal, True) for name, goal in goals.items()},
            ("s", 1),
        )
    ]


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    if "JAX_NUM_CPU_DEVICES" not in os.environ:
        jax.config.update("jax_num_cpu_devices", len(os.sched_getaffinity(0)))
    command(Settings, QUICK, tables)
