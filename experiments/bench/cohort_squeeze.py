"""The (gamma x K x seed) grid of `experiments.cohort_squeeze cost` as one program, against scipy.optimize run after run.

    python -m experiments.bench.cohort_squeeze            a6a (or --dataset breast_cancer, embedded)

Same cohorts, same prox objectives, BFGS on both sides (scipy's own line search), values and gradients by NumPy in float64 on
scipy's side; ours in float64 and in float32 (JAX's default).  The time of compilation is printed apart.  Both sides run in turn on
the same machine.  The rate is that of the two products with the cohort's rows in the evaluations that were needed (runs that wait
for others are not counted), beside the rate of these two products alone in the same shapes.
"""

import time
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import tyro
from scipy.optimize import minimize

from commjax import cohorts, runner
from commjax.algorithms import sppm_as
from experiments import cohort_squeeze_grid


@dataclass(frozen=True)
class Settings:
    dataset: str = "a6a"  # LibSVM name, or breast_cancer
    clusters: int = 10  # and the size of a cohort
    per_cluster: int = 10  # clients
    gammas: tuple[float, ...] = (1.0, 10.0, 100.0, 1000.0, 10_000.0, 100_000.0)  # of the prox
    most_local: int = 15  # K from 1 to this
    seeds: int = 5  # cohorts
    rounds: int = 5  # global rounds of every run
    at_once: int = 18  # settings side by side
    repeats: int = 3  # of our side; the median counts


def ours(problem, settings: Settings, pairs, keys, dtype):
    algorithm = cohort_squeeze_grid.sppm(problem, cohorts.stratified(problem.clusters), cohort_squeeze_grid.Settings())
    tolerance = 1e-9 if dtype == jnp.float64 else 1e-5  # below it float32 has nothing to gain
    grid = runner.stack(
        [sppm_as.HParams(jnp.asarray(gamma, dtype), K, jnp.asarray(tolerance, dtype)) for gamma, K in pairs]
    )
    state = algorithm.init(jnp.ones(len(problem.optimum), dtype), jnp.arange(len(problem.rows)))
    data = jax.tree.map(lambda leaf: jnp.asarray(leaf, dtype), problem.data)
    inputs = (keys, algorithm, grid, state, data, settings.rounds)
    seconds = []
    for _ in range(1 + settings.repeats):
        begin = time.perf_counter()
        states, metrics = jax.block_until_ready(runner.sweep(*inputs, at_once=settings.at_once))
        seconds.append(time.perf_counter() - begin)
    run = float(np.median(seconds[1:]))
    rows = cohort_squeeze_grid.most_rows(problem, cohorts.stratified(problem.clusters))
    needed = float(np.sum(metrics.local_rounds)) * 4 * rows * len(problem.optimum)
    rates = needed / run / 1e9, products(rows, len(problem.optimum), settings, dtype)
    return np.asarray(states.server.params, np.float64), run, seconds[0] - run, rates


def products(rows: int, d: int, settings: Settings, dtype) -> float:
    """Gflop/s of A x and A^T r for all seeds and as many settings as run side by side"""
    shapes = (settings.seeds, rows, d), (settings.at_once, settings.seeds, d)
    A, x = (jax.random.normal(jax.random.key(0), shape, dtype) for shape in shapes)
    both = jax.jit(lambda A, x: jnp.einsum("smd,smh->hsd", A, jnp.einsum("smd,hsd->smh", A, x)))
    seconds = []
    for _ in range(1 + 3 * settings.repeats):
        begin = time.perf_counter()
        jax.block_until_ready(both(A, x))
        seconds.append(time.perf_counter() - begin)
    return 4 * rows * d * settings.seeds * settings.at_once / float(np.median(seconds[1:])) / 1e9


def theirs(problem, settings: Settings, pairs, keys):
    """The same runs, one after another."""
    sampling = cohorts.stratified(problem.clusters)
    signed = [problem.dataset.labels[ids, None] * problem.dataset.features[ids] for ids in problem.rows]
    weights = 1 / (len(problem.rows) * sampling.probabilities)
    draws = np.array([
        [np.asarray(sampling.sample(jax.random.fold_in(jax.random.split(key)[0], t)).ids) for t in range(settings.rounds)] for key in keys
    ])  # fmt: skip
    found = np.empty((len(pairs), len(keys), len(problem.optimum)))
    begin = time.perf_counter()
    for s in range(len(keys)):
        cohort = []
        for ids in draws[s]:
            A = np.concatenate([signed[i] for i in ids])
            w = np.concatenate([np.full(len(signed[i]), weights[i] / len(signed[i])) for i in ids])
            cohort.append((A, w, float(weights[ids].sum())))
        for h, (gamma, K) in enumerate(pairs):
            x = np.ones(len(problem.optimum))
            for A, w, total in cohort:

                def objective(z, A=A, w=w, total=total, x=x, gamma=gamma):
                    margin = A @ z
                    wrong = 1 / (1 + np.exp(np.minimum(margin, 700)))
                    value = w @ np.logaddexp(0, -margin) + total * 0.05 * z @ z + (z - x) @ (z - x) / (2 * gamma)
                    return value, -A.T @ (w * wrong) + total * 0.1 * z + (z - x) / gamma

                x = minimize(objective, x, jac=True, method="BFGS", options={"maxiter": K, "gtol": 1e-9}).x
            found[h, s] = x
    return found, time.perf_counter() - begin


def main(settings: Settings) -> None:
    about = cohort_squeeze_grid.Settings(clusters=settings.clusters, per_cluster=settings.per_cluster)
    problem = cohort_squeeze_grid.problem(settings.dataset, about)
    pairs = [(gamma, K) for K in range(1, settings.most_local + 1) for gamma in settings.gammas]
    keys = jax.random.split(jax.random.key(0), settings.seeds)
    runs = len(pairs) * len(keys)
    print(
        f"{settings.dataset}, {len(problem.rows)} clients, {runs} runs of {settings.rounds} global rounds, jax {jax.__version__}"
    )
    measured = {dtype: ours(problem, settings, pairs, keys, dtype) for dtype in (jnp.float64, jnp.float32)}
    found, their_seconds = theirs(problem, settings, pairs, keys)
    last = [h for h, (_, K) in enumerate(pairs) if settings.most_local == K]
    print(f"  scipy, run after run   {their_seconds:8.2f} s   float64")
    for dtype, (params, seconds, compilation, rates) in measured.items():
        gap = np.abs(found[last] - params[last]).max()
        print(f"  one program            {seconds:8.2f} s   {dtype.__name__}, compilation {compilation:.1f} s apart")
        print(f"  scipy / ours           {their_seconds / seconds:8.1f}     goal: at least 20; largest difference of x where K = {settings.most_local}: {gap:.1e}")  # fmt: skip
        print(
            f"  products               {rates[0]:8.1f}     Gflop/s needed and done; {rates[1]:.1f} Gflop/s if nothing else is done"
        )


if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    main(tyro.cli(Settings))
