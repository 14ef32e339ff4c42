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


# Compiling takes longer than a run. The runs with these kinds of clients (counts, keep) therefore share one program.
KINDS = [((3,), 0.9), ((3,), 1.0), ((3,), 0.7), ((3,), 0.5), ((2,), 0.9), ((1,), 0.9), ((1, 2, 3), 0.9), ((2, 3), 0.9)]


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


def program_plan(run: Run, settings: Settings, names: Layers, n: int) -> plans.Plan:
    """Return the plan that the program of a run is compiled for.

    It has every kind of client of all seeds and of all runs that are `alike`. The plan of a run and seed is data of the
    program: `init` takes it.

    Args:
        run: The run.
        settings: Settings of the experiment.
        names: Layers of the network.
        n: Number of clients.
    """
    if not (run.counts or run.variant):  # the plan is not random
        return plan_of(run, names, n, 0)
    kinds = KINDS if alike(run, settings) else [(run.counts, run.keep)]
    return plans.kinds(
        [
            plan_of(replace(run, counts=counts, keep=keep), names, n, seed)
            for counts, keep in kinds
            for seed in range(settings.seeds)
        ]
    )


def possible(run: Run, names: Layers) -> tuple[plans.Plan, list[float]]:
    """Return a plan with one client for every possible L_i, and the probability of each."""
    final, hidden = names.names[-1], names.names[:-1]
    if run.variant:
        sets = [[name for name in names.names if name not in left] for left in resnet.left_out(run.variant)]
        chances = [1 / len(sets)] * len(sets)
    else:
        several = [list(combinations(hidden, count)) for count in run.counts or (len(hidden),)]
        sets = [[*hidden_set, final] for group in several for hidden_set in group]
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


def local_pruning(run: Run, n: int, settings: Settings | None = None) -> submodels.LocalPruning:
    """Return the local pruning of a run for n clients.

    With the settings, runs that are `alike` have the same one: their least ratio is the keep ratio of the client.
    """
    low = "keep" if settings is not None and alike(run, settings) else widths(run, n)
    kinds = {
        "fixed": submodels.fixed,
        "uniform": lambda: submodels.uniform(low),
        "ordered": lambda: submodels.ordered(low),
        "fjord": lambda: submodels.ordered(low, everywhere=True),
        "heterofl": lambda: submodels.ordered(low, 1, everywhere=True),
    }
    return kinds[run.local]()
