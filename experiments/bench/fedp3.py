"""A round of FedP3 against a round of FedAvg: the CNN of Table C.2, 10 clients, the same local steps and rows.

    python -m experiments.bench.fedp3

FedP3 runs with all layers trained, which measures only what FedP3 adds, and as OPU3 with masks. LowerB does not
differentiate the layers that a client does not train. The methods take turns, round by round.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from commjax.algorithms import fedavg, fedp3
from commjax.algorithms.fedp3 import plans, submodels
from commjax.core import local, rounds
from commjax.data.stacked import Examples
from commjax.models import layered, networks
from experiments.bench.measure import Ratio, Side, Table, command, take_turns


@dataclass(frozen=True)
class Settings:
    clients: int = 10  # clients; all of them take part
    steps: int = 5  # local steps; the thesis has 10 epochs
    batch: int = 48  # rows per step
    repeats: int = 5  # rounds that are counted
    width: int = 64  # channels; the thesis has 64
    hidden: int = 1024  # width of the dense layers; the thesis has 1024
    image: tuple[int, int, int] = (32, 32, 3)
    keep: float = 0.9  # keep ratio of the layers that a client does not train
    more: bool = False  # also measure OPU3 with layers that are trained and discarded, and with random masks


QUICK = Settings(steps=2, batch=16, repeats=2)


def rounds_of(settings: Settings) -> dict[str, Callable[[], Any]]:
    """Return for each method a function without arguments that runs a round."""
    rng = np.random.default_rng(0)
    n, rows = settings.clients, 2 * settings.batch
    data = Examples(
        jnp.asarray(rng.random((n, rows, *settings.image), np.float32)),
        jnp.asarray(rng.integers(0, 10, (n, rows)), jnp.int32),
        jnp.full((n, rows), 1 / rows, jnp.float32),
    )
    problem = networks.classification(layered.LayeredCnn(width=settings.width, hidden=settings.hidden))
    params = problem.init(jax.random.key(0), data.inputs[0, :1])
    names, sample = layered.layers(params), local.minibatch(settings.batch)
    one_each = [[name, "ffc"] for name in names.names[:-1]]
    lower = plans.plan(names, [one_each[i % len(one_each)] for i in range(n)], settings.keep)
    made = {
        "FedAvg": fedavg.fedavg(jax.value_and_grad(problem.loss), sample, steps=settings.steps, over=rounds.one_by_one),
        "FedP3, all layers": fedp3.fedp3(problem.loss, plans.everything(names, n), sample, steps=settings.steps),
        "FedP3, OPU3": fedp3.fedp3(
            problem.loss, plans.opu(names, n, 3, keep=settings.keep), sample, steps=settings.steps
        ),
        "LowerB": fedp3.fedp3(problem.loss, lower, sample, steps=settings.steps),
    }
    more = {
        "FedP3, OPU3, trained and discarded": fedp3.fedp3(
            problem.loss, plans.opu(names, n, 3, keep=settings.keep), sample, steps=settings.steps, others="masked"
        ),
        "FedP3, OPU3, random masks": fedp3.fedp3(
            problem.loss,
            plans.opu(names, n, 3, keep=settings.keep),
            sample,
            steps=settings.steps,
            pruning=submodels.random(),
        ),
    }
    made |= more if settings.more else {}

    def taker(algorithm) -> Callable[[], Any]:
        first = jax.random.key(1), fedavg.HParams(0.01, 1.0), algorithm.init(params, jnp.arange(n)), data
        return partial(jax.jit(algorithm.step).lower(*first).compile(), *first)

    return {name: taker(algorithm) for name, algorithm in made.items()}


def tables(settings: Settings) -> list[Table]:
    """Measure all methods."""
    sides = {name: Side(take) for name, take in rounds_of(settings).items()}
    goals = {"FedP3, all layers": 1.3, "FedP3, OPU3": 1.3, "LowerB": 1.0}
    return [
        Table(
            "A round of FedP3",
            f"{settings.clients} clients, {settings.steps} steps of {settings.batch} rows, CNN "
            f"{settings.width}/{settings.hidden}, images {'x'.join(map(str, settings.image))}",
            "Training fewer layers makes a round faster.",
            take_turns(sides, settings.repeats),
            {f"{name} / FedAvg": Ratio(name, "FedAvg", goals.get(name)) for name in sides if name != "FedAvg"},
            ("ms a round", 1e3),
        )
    ]


if __name__ == "__main__":
    command(Settings, QUICK, tables)
