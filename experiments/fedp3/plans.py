"""The plans of the runs of Chapter 4 (which client trains which layers), and their cost in bits."""

from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np

from commjax.algorithms import fedp3
from commjax.algorithms.fedp3 import plans, submodels
from commjax.algorithms.fedp3.layers import Layers
from commjax.models import resnet
from experiments.fedp3.task import Settings


@dataclass(frozen=True)
class Run:
    """One row of a table.

    Attributes:
        name: Name of the row.
        method: fedp3, fedavg, fedprox, ditto, fedcr or fedcr_layers.
        counts: Each client trains one of these numbers of layers, and the final one. Empty: all layers.
        variant: Variant of ResNet-18.
        keep: Keep ratio of the layers that a client does not train.
        local: Kind of local pruning: fixed, uniform, ordered, fjord or heterofl.
        low: Least ratio of local pruning.
        aggregate: simple, weighted or attention.
    """

    name: str
    method: str = "fedp3"
    counts: tuple[int, ...] = ()
    variant: str = ""
    keep: float = 0.9
    local: str = "fixed"
    low: float = 0.9
    aggregate: str = "simple"

    def label(self) -> str:
        """Return the part of file names that identifies the run. It does not contain `name`."""
        words = [
            self.method,
            "-".join(map(str, self.counts)),
            self.variant,
            f"{self.keep:g}",
            self.local if self.local == "fixed" else f"{self.local}{self.low:g}",
            self.aggregate,
        ]
        return "_".join(word.replace(" ", "") for word in words if word)


# Compiling takes longer than a run. The plans of these kinds of clients (counts, keep), for TOGETHER seeds each, are
# therefore stacked into one plan and share one program.
KINDS = [((3,), 0.9), ((3,), 1.0), ((3,), 0.7), ((3,), 0.5), ((2,), 0.9), ((1,), 0.9), ((1, 2, 3), 0.9), ((2, 3), 0.9)]
TOGETHER = 3


def alike(run: Run, settings: Settings) -> bool:
    """Return whether a run differs from the runs of KINDS only in its plan.

    This is limited to the MLP: with `one_by_one` a program has a branch for each L_i.
    """
    usual = run.local == "fixed" or (run.local in ("uniform", "ordered") and run.low == run.keep)
    return settings.model == "mlp" and run.method == "fedp3" and usual and (run.counts, run.keep) in KINDS


def program_of(run: Run, settings: Settings) -> Run:
    """Return a run that stands for its program: it is equal for all runs that share a program."""
    if not alike(run, settings):
        return replace(run, name="")
    counts, keep = KINDS[0]
    return replace(run, name="", counts=counts, keep=keep, low=keep if run.local != "fixed" else 0.9)


def plan_of(run: Run, names: Layers, n: int, seed: int) -> plans.Plan:
    """Return the plan of a run and seed for n clients."""
    if run.variant:
        return resnet.variant(names, n, run.variant, keep=run.keep, seed=seed)
    return plans.opu(names, n, *run.counts, keep=run.keep, seed=seed) if run.counts else plans.everything(names, n)


def plans_of(run: Run, settings: Settings, names: Layers, n: int, seed: int) -> tuple[plans.Plan, np.ndarray | None]:
    """Return a stacked plan that contains the plan of this run and seed, and its rows in the stacked plan.

    The stacked plan is equal for neighbouring seeds and for runs that are `alike`, so that they share a program.

    Args:
        run: The run.
        settings: Settings of the experiment.
        names: Layers of the network.
        n: Number of clients.
        seed: Seed of the plan.

    Returns:
        The stacked plan and the row of each client [n]. The rows are None if the plan is not random.
    """
    if not (run.counts or run.variant):  # the plan is not random
        return plan_of(run, names, n, 0), None
    kinds = KINDS if alike(run, settings) else [(run.counts, run.keep)]
    first = seed - seed % TOGETHER
    several = [
        plan_of(replace(run, counts=counts, keep=keep), names, n, first + more)
        for counts, keep in kinds
        for more in range(TOGETHER)
    ]
    position = TOGETHER * kinds.index((run.counts, run.keep)) + seed - first
    return plans.beneath(several), np.arange(n, dtype=np.int32) + n * position


def possible(run: Run, names: Layers) -> tuple[plans.Plan, list[float]]:
    """Return a plan with one client for every possible L_i, and the probability of each."""
    final, hidden = names.names[-1], names.names[:-1]
    if run.variant:
        sets = [[name for name in names.names if name not in left] for left in resnet.left_out(run.variant)]
        chances = [1 / len(sets)] * len(sets)
    else:
        several = [list(combinations(hidden, count)) for count in run.counts or (len(hidden),)]
        sets = [[*one, final] for group in several for one in group]
        chances = [1 / len(several) / len(group) for group in several for _ in group]
    return plans.plan(names, sets, run.keep), chances


def expected_bits(run: Run, names: Layers, params: Any, n: int) -> dict[str, float]:
    """Return the bits of a client per round, "up" and "down", in expectation over plans."""
    plan, chances = possible(run, names)
    if np.ndim(widths(run, n)):  # each client has its own width and trains all layers
        plan, chances = plans.everything(names, n), [1 / n] * n
    pruning = local_pruning(run, len(chances))
    bits = fedp3.ledger(plan, params, local_pruning=pruning)
    return {way: float(np.dot(chances, bits[way])) for way in ("up", "down")}


def widths(run: Run, n: int) -> Any:
    """Return the least ratio of local pruning: one number, or one per client for HeteroFL, which has five sizes."""
    return run.low if run.local != "heterofl" else np.linspace(run.low, 1, 5)[np.arange(n) % 5]


def local_pruning(run: Run, n: int, low: Any = None) -> submodels.LocalPruning:
    """Return the local pruning of a run for n clients. `low` replaces the least ratio of the run."""
    low = widths(run, n) if low is None else low
    made = {
        "fixed": submodels.fixed,
        "uniform": lambda: submodels.uniform(low),
        "ordered": lambda: submodels.ordered(low),
        "fjord": lambda: submodels.ordered(low, everywhere=True),
        "heterofl": lambda: submodels.ordered(low, 1, everywhere=True),
    }
    return made[run.local]()


def pruning_in(plan: plans.Plan, run: Run, settings: Settings) -> submodels.LocalPruning:
    """Return the local pruning for all clients of a stacked plan.

    For runs that are `alike` the least ratio of a client is its keep ratio.
    """
    return local_pruning(run, len(plan.keep), plan.keep if alike(run, settings) else None)
