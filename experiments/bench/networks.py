r"""Local training of networks on a CPU: a step in a round of FedAvg, ours against lax's convolutions, torch and FedJAX.

    python -m venv fedjax_env
    fedjax_env/bin/pip install fedjax==0.0.17 jax==0.4.20 jaxlib==0.4.20 dm-haiku==0.0.11 \
        optax==0.1.7 chex==0.1.84 'numpy<2' 'scipy<1.12'
    FEDJAX_PYTHON=fedjax_env/bin/python python -m experiments.bench networks

All sides take the same steps on the same shapes.  "gradient" is the bare gradient of one batch, compiled by itself: a
step in a round should cost little more.  FedJAX 0.0.17 needs an older JAX, and therefore its own environment (Python
3.11).
"""

import os
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from commjax.algorithms import fedavg
from commjax.core import local, rounds
from commjax.data.stacked import Examples
from commjax.models import fast_on_cpu, networks
from commjax.models.resnet import ResNet18
from experiments.bench.measure import Ratio, Side, Table, command, take_turns

# (channels, side of the kernel) of a convolution, "pool" for 2 x 2 maximum pooling, width of a dense layer
Layers = tuple[tuple[int, int] | str | int, ...]

NETWORKS: dict[str, tuple[Layers, str, tuple[int, int, int], int]] = {  # layers, padding, image, classes
    "emnist": (((32, 3), (64, 3), "pool", 128), "VALID", (28, 28, 1), 62),  # FedJAX's
    "thesis": (((32, 5), (64, 5), "pool", 128), "VALID", (28, 28, 1), 62),  # 879,422 parameters
    "small": (((16, 3), "pool", (32, 3), "pool", (64, 3), "pool"), "SAME", (28, 28, 1), 10),
    "wide": (((32, 5), "pool", (64, 5), "pool", 512), "SAME", (28, 28, 1), 10),
    "resnet": ((), "SAME", (32, 32, 3), 10),  # ResNet-18 of width 16, with GroupNorm
}


@dataclass(frozen=True)
class Settings:
    network: tuple[str, ...] = ("emnist", "thesis", "small", "wide", "resnet")
    clients: int = 10  # clients of a round
    steps: int = 20  # local steps
    batch: int = 20  # rows of a step
    turns: int = 5  # rounds of each side that are counted
    lax: bool = True  # also lax's convolutions, which are slow: one client, one fifth of the steps
    # Python of the environment with FedJAX
    fedjax: Path | None = Path(os.environ["FEDJAX_PYTHON"]) if "FEDJAX_PYTHON" in os.environ else None


class Network(nn.Module):
    """A network of plain Flax layers, as a user writes it."""

    layers: Layers
    padding: str
    classes: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Return the score of each class."""
        for layer in self.layers:
            if layer == "pool":
                x = nn.max_pool(x, (2, 2), (2, 2))
            elif isinstance(layer, tuple):
                x = nn.relu(nn.Conv(layer[0], (layer[1], layer[1]), padding=self.padding)(x))
            else:
                x = nn.relu(nn.Dense(int(layer))(x.reshape(len(x), -1)))
        return nn.Dense(self.classes)(x.reshape(len(x), -1))


QUICK = Settings(network=("small", "emnist"), clients=4, steps=5, turns=3)


def our_sides(name: str, settings: Settings) -> Iterator[tuple[str, Side]]:
    """Yield the name of each side that runs in JAX, and a round of it; the units are local steps."""
    layers, padding, image, classes = NETWORKS[name]
    module = Network(layers, padding, classes) if layers else ResNet18(width=16, groups=2)
    data = examples(settings, image, classes)
    problem = networks.classification(module)
    params = problem.init(jax.random.key(0), data.inputs[0, :1])

    def plain(params: Any, data: Examples) -> jax.Array:
        outputs: Any = module.apply({"params": params}, data.inputs)
        scores = jax.nn.log_softmax(outputs)
        return -jnp.mean(jnp.take_along_axis(scores, data.targets[:, None], axis=1))

    batch = jax.tree.map(lambda leaf: leaf[0, : settings.batch], data)
    gradient = jax.jit(jax.value_and_grad(plain))
    yield "gradient", Side(lambda: [jax.block_until_ready(gradient(params, batch)) for _ in range(5)], 5)

    def fed(loss: Any, steps: int, over: Any, n: int) -> Side:
        algorithm = fedavg.fedavg(jax.value_and_grad(loss), local.minibatch(settings.batch), steps=steps, over=over)
        rows = jax.tree.map(lambda leaf: leaf[:n], data)
        step = partial(jax.jit(algorithm.step), jax.random.key(1), fedavg.HParams(0.01, 1.0))
        state = algorithm.init(params, jnp.arange(n))
        return Side(lambda: step(state, rows), n * steps)

    yield "one by one", fed(fast_on_cpu(plain), settings.steps, rounds.one_by_one, settings.clients)
    yield "vmap", fed(fast_on_cpu(plain), settings.steps, jax.vmap, settings.clients)
    if settings.lax and layers:
        yield "lax, one by one", fed(plain, max(1, settings.steps // 5), rounds.one_by_one, 1)


def examples(settings: Settings, image: tuple[int, int, int], classes: int) -> Examples:
    """Draw 200 rows for each client."""
    rng, n, rows = np.random.default_rng(0), settings.clients, 200
    inputs, targets = rng.random((n, rows, *image), np.float32), rng.integers(0, classes, (n, rows))
    weights = jnp.full((n, rows), 1 / rows, jnp.float32)
    return Examples(jnp.asarray(inputs), jnp.asarray(targets, jnp.int32), weights)


def torch_side(name: str, settings: Settings) -> Side | None:
    """A round of FedAvg in torch, with the default number of threads."""
    layers, padding, image, classes = NETWORKS[name]
    if not layers or find_spec("torch") is None:
        return None
    torch: Any = import_module("torch")
    parts: list[Any] = []
    for layer in (*layers, classes):
        if layer == "pool":
            parts.append(torch.nn.MaxPool2d(2))
        elif isinstance(layer, tuple):
            parts += [torch.nn.LazyConv2d(layer[0], layer[1], padding=padding.lower()), torch.nn.ReLU()]
        else:
            parts += [torch.nn.Flatten(), torch.nn.LazyLinear(int(layer)), torch.nn.ReLU()]
    model = torch.nn.Sequential(*parts[:-1])
    data = examples(settings, image, classes)
    inputs = torch.from_numpy(np.moveaxis(np.asarray(data.inputs), -1, 2).copy())
    targets = torch.from_numpy(np.asarray(data.targets).astype(np.int64))
    model(inputs[0, :1])
    weights = list(model.parameters())
    loss = torch.nn.CrossEntropyLoss()

    def take_round() -> None:
        start = [weight.detach().clone() for weight in weights]
        total = [torch.zeros_like(weight) for weight in start]
        for images, labels in zip(inputs, targets):
            with torch.no_grad():
                torch._foreach_copy_(weights, start)
            for _ in range(settings.steps):
                rows = torch.randint(len(images), (settings.batch,))
                slope = torch.autograd.grad(loss(model(images[rows]), labels[rows]), weights)
                with torch.no_grad():
                    torch._foreach_add_(weights, slope, alpha=-0.01)
            with torch.no_grad():
                torch._foreach_add_(total, weights, alpha=1 / len(inputs))
        with torch.no_grad():
            torch._foreach_copy_(weights, start)  # every turn does the same work

    return Side(take_round, settings.clients * settings.steps)


@contextmanager
def fedjax_side(python: Path, settings: Settings) -> Iterator[Side]:
    """A process in FedJAX's environment; it takes one round for each line that it reads."""
    script = Path(__file__).with_name("fedjax_side.py")
    options = [f"--{name}={getattr(settings, name)}" for name in ("clients", "steps", "batch")]
    words = [str(python), "-P", str(script), *options]  # this folder has an optax.py
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        stdin, stdout = process.stdin, process.stdout

        def take_round() -> None:
            stdin.write("round\n")
            stdin.flush()
            if stdout.readline() != "done\n":
                raise RuntimeError(f"FedJAX's side ended with status {process.wait()}")

        yield Side(take_round, settings.clients * settings.steps)
        stdin.close()


def table(name: str, settings: Settings) -> Table:
    """Time all sides of one network."""
    with ExitStack() as stack:
        sides = dict(our_sides(name, settings))
        if (torch_round := torch_side(name, settings)) is not None:
            sides["torch"] = torch_round
        if settings.fedjax is not None and name == "emnist":
            sides["FedJAX, jit backend"] = stack.enter_context(fedjax_side(settings.fedjax, settings))
        seconds = take_turns(sides, settings.turns)
    goals = {"gradient": 1.2, "torch": 0.8, "FedJAX, jit backend": 0.15, "lax, one by one": None}
    return Table(
        f"Local training, network {name}",
        f"{settings.clients} clients, {settings.steps} steps of {settings.batch} rows, FedAvg",
        "A step in a round, with the drawing of rows and the update, against the bare gradient and other libraries.",
        seconds,
        {f"one by one / {side}": Ratio("one by one", side, goal) for side, goal in goals.items() if side in sides},
        ("ms a step", 1e3),
    )


def tables(settings: Settings) -> list[Table]:
    """Measure all networks."""
    return [table(name, settings) for name in settings.network]


if __name__ == "__main__":
    command(Settings, QUICK, tables)
