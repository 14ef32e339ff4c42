"""A round of FedP3 against a round of FedAvg: the CNN of Table C.2, 10 clients, the same local steps and rows.

    python -m experiments.bench.fedp3

Prints FedP3 / FedAvg and LowerB / FedAvg. FedP3 runs with all layers trained, which measures only what FedP3 adds, and
as OPU3 with masks. LowerB does not differentiate the layers that a client does not train. The methods take turns, round
by round, on the same machine. Compilation is not counted, and the least time of the rounds counts.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from commjax.algorithms import fedavg, fedp3
from commjax.algorithms.fedp3 import plans, submodels
from commjax.core import local, rounds
from commjax.data.stacked import Examples
from commjax.models import layered, networks


@dataclass(frozen=True)
class Settings:
    clients: int = 10  # clients; all of them take part
    steps: int = 5  # local steps; the thesis has 10 epochs
    batch: int = 48  # rows per step
    rounds: int = 3  # rounds that are counted
    width: int = 64  # channels; the thesis has 64
    hidden: int = 1024  # width of the dense layers; the thesis has 1024
    image: tuple[int, int, int] = (32, 32, 3)
    keep: float = 0.9  # keep ratio of the layers that a client does not train
    more: bool = False  # also measure OPU3 with layers that are trained and discarded, and with random masks


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


def measure(settings: Settings) -> dict[str, np.ndarray]:
    """Return [seconds, CPU seconds] of every counted round, by method.

    The methods take turns, so that other load of the machine affects all of them.
    """
    seconds: dict[str, list] = {}
    takers = rounds_of(settings)
    for _ in range(settings.rounds):
        for name, take in takers.items():
            begin = time.perf_counter(), time.process_time()
            jax.block_until_ready(take())
            seconds.setdefault(name, []).append((time.perf_counter() - begin[0], time.process_time() - begin[1]))
    return {name: np.array(pairs) for name, pairs in seconds.items()}


def main(settings: Settings) -> dict[str, float]:
    """Time all methods, and print and return the ratios to FedAvg."""
    print(
        f"{settings.clients} clients, {settings.steps} steps of {settings.batch} rows, CNN "
        f"{settings.width}/{settings.hidden}, "
        f"images {'x'.join(map(str, settings.image))}, jax {jax.__version__}"
    )
    found = measure(settings)
    least = {name: pairs.min(axis=0) for name, pairs in found.items()}
    ratios = {name: float(times[0] / least["FedAvg"][0]) for name, times in least.items()}
    for name, (seconds, processor) in least.items():
        print(
            f"  {name:36} {1e3 * seconds:7.0f} ms a round (least), {ratios[name]:.2f} of FedAvg; "
            f"processor {1e3 * processor:7.0f} ms, {processor / least['FedAvg'][1]:.2f}"
        )
    return ratios


if __name__ == "__main__":
    main(tyro.cli(Settings))
