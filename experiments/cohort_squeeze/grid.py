"""The (gamma x K x seed) grid of SPPM-SS and the (stepsize x steps x seed) grid of LocalGD."""

from dataclasses import replace
from typing import NamedTuple

import jax
import numpy as np

from commjax.algorithms import local_gd, sppm_as
from commjax.core.records import Record
from commjax.sampling import samplings
from experiments import tables
from experiments.cohort_squeeze.runs import Problem, Settings, sppm, sweep, watched


class Grid(NamedTuple):
    """Both methods over their grids.

    Attributes:
        start: |x^0 - x*|^2.
        sppm: Record [gamma x K, seed, round] of SPPM-SS; nan after the last round of a setting.
        localgd: Record [stepsize x steps, seed, round] of LocalGD.
        pairs: (gamma, K) of each setting of SPPM-SS.
        local_pairs: (stepsize, steps) of each setting of LocalGD.
        cap: Largest number of local rounds of both methods.
    """

    start: float
    sppm: Record
    localgd: Record
    pairs: list[tuple[float, int]]
    local_pairs: list[tuple[float, int]]
    cap: float


def together(records: list[Record]) -> Record:
    """One record of all settings, nan where a run has ended."""
    longest = max(record.metrics["distance"].shape[-1] for record in records)

    def extended(values: np.ndarray) -> np.ndarray:
        room = [(0, 0)] * (values.ndim - 1) + [(0, longest - values.shape[-1])]
        return np.pad(np.asarray(values, np.float64), room, constant_values=np.nan)

    names = records[0].metrics
    merged = {name: np.concatenate([extended(record.metrics[name]) for record in records]) for name in names}
    return replace(records[0], metrics=merged)


def run_grid(problem: Problem, settings: Settings, rival: Record | None = None) -> Grid:
    """Run both methods over their grids, with the same cap on the cost.

    LocalGD runs `cap` rounds; SPPM-SS with K local rounds runs at least cap / K.

    Args:
        problem: The problem.
        settings: The settings.
        rival: LocalGD's record, if the grid of another solver has it already.

    Returns:
        The runs of both methods.
    """
    sampling = samplings.stratified(problem.clusters)
    algorithm = watched(problem, sppm(problem, sampling, settings))
    # The pairs are sorted by K, so that settings computed together have inner loops of about equal length.  Three K are
    # run at a time, with as many rounds as the smallest of them may take; all of them share one program.
    pairs = [(gamma, K) for K in range(1, settings.most_local + 1) for gamma in settings.gammas]
    ours = []
    for least in range(1, settings.most_local + 1, 3):
        hparams = [sppm_as.HParams(gamma, K, 1e-9) for gamma, K in pairs if least <= K < least + 3]
        label, rounds = f"{problem.name}_{settings.solver}_{least}", 5 * -(-settings.cap // (5 * least))
        ours.append(sweep(problem, algorithm, hparams, settings, label, rounds=rounds))
    stepsizes = (*settings.localgd, 1 / problem.smoothness.L_max)
    local_pairs = [(stepsize, steps) for steps in range(1, settings.most_local + 1) for stepsize in stepsizes]
    theirs = rival or sweep(
        problem,
        watched(problem, local_gd.mb_local_gd(jax.value_and_grad(problem.loss), sampling)),
        [local_gd.HParams(*pair) for pair in local_pairs],
        settings,
        f"{problem.name}_localgd",
        rounds=settings.cap,
    )
    start = float(np.sum((1 - problem.optimum) ** 2))
    return Grid(start, together(ours), theirs, pairs, local_pairs, settings.cap)


def rounds_to(record: Record, target: float) -> np.ndarray:
    """[setting, seed]: the first round whose start is within the target, or nan."""
    distance = record.metrics["distance"]
    return np.array([[tables.first(run, target) for run in setting] for setting in distance])


def bits_to(grid: Grid, target: float) -> np.ndarray:
    """Bits that one client uploads until the target, mean over seeds; nan unless all seeds reach it."""
    T = rounds_to(grid.sppm, target)
    sent = np.full_like(T, np.nan)
    for (h, s), rounds in np.ndenumerate(T):
        if np.isfinite(rounds):
            sent[h, s] = grid.sppm.metrics["bits_up"][h, s, : int(rounds)].sum()
    return sent.mean(axis=1)
