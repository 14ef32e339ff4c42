"""Who trains what in the runs of Chapter 4, and what that costs in bits."""

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
    """One row of a table."""

    name: str
    method: str = "fedp3"
    counts: tuple[int, ...] = ()  # of layers beside the final one; empty: all
    variant: str = ""  # of ResNet-18
    keep: float = 0.9
    local: str = "fixed"
    low: float = 0.9  # least ratio of local pruning
    aggregate: str = "simple"

    def label(self) -> str:
        words = [
            self.method,
            "-".join(map(str, self.counts)),
            self.variant,
            f"{self.keep:g}",
            self.local if self.local == "fixed" else f"{self.local}{self.low:g}",
            self.aggregate,
        ]
        return "_".join(word.replace(" ", "") for word in words if word)


# Compiling takes longer than a run: kinds of clients and seeds whose plans stand in one program, one beneath the other.
KINDS = [((3,), 0.9), ((3,), 1.0), ((3,), 0.7), ((3,), 0.5), ((2,), 0.9), ((1,), 0.9), ((1, 2, 3), 0.9), ((2, 3), 0.9)]
TOGETHER = 3


def alike(run: Run, settings: Settings) -> bool:
    """Whether a run differs from others only in its plan.  (With `one_by_one` a program has a branch for each L_i.)"""
    usual = run.local == "fixed" or (run.local in ("uniform", "ordered") and run.low == run.keep)
    return settings.model == "mlp" and run.method == "fedp3" and usual and (run.counts, run.keep) in KINDS


def program_of(run: Run, settings: Settings) -> Run:
    """The same for all runs that share a program."""
    if not alike(run, settings):
        return replace(run, name="")
    counts, keep = KINDS[0]
    return replace(run, name="", counts=counts, keep=keep, low=keep if run.local != "fixed" else 0.9)


def plan_of(run: Run, names: Layers, n: int, seed: int) -> plans.Plan:
    if run.variant:
        return resnet.variant(names, n, run.variant, keep=run.keep, seed=seed)
    return plans.opu(names, n, *run.counts, keep=run.keep, seed=seed) if run.counts else plans.everything(names, n)


def plans_of(run: Run, settings: Settings, names: Layers, n: int, seed: int) -> tuple[plans.Plan, np.ndarray | None]:
    """A plan that has the plan of a run and seed inside, and where; the same for neighbouring seeds and runs that are `alike`."""
    if not (run.counts or run.variant):  # nothing to draw
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
    """Every L_i once, and its chance."""
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
    """Bits of a client a round, in expectation over plans."""
    plan, chances = possible(run, names)
    if np.ndim(widths(run, n)):  # widths of their own, all layers
        plan, chances = plans.everything(names, n), [1 / n] * n
    pruning = local_pruning(run, len(chances))
    bits = fedp3.ledger(plan, params, local_pruning=pruning)
    return {way: float(np.dot(chances, bits[way])) for way in ("up", "down")}


def widths(run: Run, n: int) -> Any:
    """Ratios of local pruning; HeteroFL's clients have five sizes."""
    return run.low if run.local != "heterofl" else np.linspace(run.low, 1, 5)[np.arange(n) % 5]


def local_pruning(run: Run, n: int, low: Any = None) -> submodels.LocalPruning:
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
    """That of all runs in a plan, whose least ratios are their keep ratios where they are `alike`."""
    return local_pruning(run, len(plan.keep), plan.keep if alike(run, settings) else None)
