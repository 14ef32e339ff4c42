r"""A round of local training, ours against FedJAX's jit backend: the same network, clients, steps and rows.

    python -m venv fedjax_env
    fedjax_env/bin/pip install fedjax==0.0.17 jax==0.4.20 jaxlib==0.4.20 dm-haiku==0.0.11 \
        optax==0.1.7 chex==0.1.84 'numpy<2' 'scipy<1.12'
    python -m experiments.bench.scafflix --fedjax fedjax_env/bin/python

FedJAX 0.0.17 needs an older JAX, and therefore its own environment (Python 3.11). Both sides run in turn on the same
machine. The first round, which compiles, is not counted.
"""

import subprocess
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from commjax.algorithms import fedavg, scafflix
from commjax.core import local, rounds, runner
from commjax.data.stacked import ClientData, Examples
from commjax.models import networks
from commjax.problems import logistic


@dataclass(frozen=True)
class Settings:
    fedjax: Path | None = None  # Python of the environment with FedJAX; if missing, only our side is measured
    clients: int = 10  # clients per round
    steps: int = 20  # local steps
    batch: int = 20  # rows per step
    rounds: int = 5  # rounds that are counted


def timed(step, state, data, rounds: int) -> tuple[float, float]:
    """Return the least and the median seconds per round, without compilation."""
    seconds = []
    for _ in range(rounds + 1):
        begin = time.perf_counter()
        state, _ = jax.block_until_ready(step(state, data))
        seconds.append(time.perf_counter() - begin)
    return min(seconds[1:]), float(np.median(seconds[1:]))


def ours(settings: Settings) -> dict[str, tuple[float, float]]:
    """Time FedAvg with two ways to iterate over clients."""
    rng = np.random.default_rng(0)
    n, rows = settings.clients, 200
    data = Examples(
        jnp.asarray(rng.random((n, rows, 28, 28, 1), np.float32)),
        jnp.asarray(rng.integers(0, 62, (n, rows)), jnp.int32),
        jnp.full((n, rows), 1 / rows, jnp.float32),
    )
    found = {}
    for name, over in (("one by one", rounds.one_by_one), ("vmap", jax.vmap)):
        problem = networks.classification(networks.FedjaxCnn())
        params = problem.init(jax.random.key(0), data.inputs[0, :1])
        algorithm = fedavg.fedavg(
            jax.value_and_grad(problem.loss), local.minibatch(settings.batch), steps=settings.steps, over=over
        )
        step = partial(jax.jit(algorithm.step), jax.random.key(1), fedavg.HParams(0.05, 1.0))
        state = algorithm.init(params, jnp.arange(n))
        found[f"FedAvg, {name}"] = timed(step, state, data, settings.rounds)
    return found


def theirs(python: Path, settings: Settings) -> tuple[float, float]:
    """Time FedJAX in its own environment."""
    script = Path(__file__).with_name("fedjax_side.py")
    options = [f"--{name}={getattr(settings, name)}" for name in ("clients", "steps", "batch", "rounds")]
    done = subprocess.run([str(python), str(script), *options], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"FedJAX's side failed:\n{done.stderr[-2000:]}")
    least, median = done.stdout.split()[-2:]
    return float(least), float(median)


def logistic_rounds() -> float:
    """Return the communication rounds per second of logistic regression inside one scan.

    There are 8 clients with 1,000 rows each, and d = 112.
    """
    rng = np.random.default_rng(0)
    n, rows, d = 8, 1000, 112
    data = ClientData(
        jnp.asarray(rng.standard_normal((n, rows, d)), jnp.float32),
        jnp.sign(jnp.asarray(rng.standard_normal((n, rows)), jnp.float32)),
        jnp.full((n, rows), 1 / rows, jnp.float32),
    )
    algorithm = scafflix.i_scaffnew(jax.value_and_grad(lambda x, one: logistic.loss(x, one, 0.1)))
    state = algorithm.init(jnp.zeros(d, jnp.float32), jnp.arange(n))
    inputs = (jax.random.key(0), algorithm, scafflix.HParams(0.1, 1.0, 0.2), state, data, 200)
    jax.block_until_ready(runner.run(*inputs))
    begin = time.perf_counter()
    jax.block_until_ready(runner.run(*inputs))
    return 200 / (time.perf_counter() - begin)


def main(settings: Settings) -> None:
    """Time all sides and print the table."""
    print(
        f"{settings.clients} clients, {settings.steps} steps of {settings.batch} rows, FedJAX's EMNIST network, jax "
        f"{jax.__version__}"
    )
    found = ours(settings)
    if settings.fedjax is not None:
        found = {"FedJAX, jit backend": theirs(settings.fedjax, settings), **found}
    reference = found.get("FedJAX, jit backend")
    for name, (least, median) in found.items():
        ratio = f"   {median / reference[1]:.2f} of FedJAX (least: {least / reference[0]:.2f})" if reference else ""
        print(f"  {name:24} {1e3 * median:8.0f} ms a round (least {1e3 * least:.0f}){ratio}")
    print(
        f"  logistic regression, 8 x 1,000 x 112, p = 0.2, one scan: {logistic_rounds():.0f} communication rounds a "
        "second"
    )


if __name__ == "__main__":
    main(tyro.cli(Settings))
