r"""Local training of networks on a CPU: a step in a round of FedAvg, ours against lax's convolutions, torch and FedJAX.

    python -m venv fedjax_env
    fedjax_env/bin/pip install fedjax==0.0.17 jax==0.4.20 jaxlib==0.4.20 dm-haiku==0.0.11 \
        optax==0.1.7 chex==0.1.84 'numpy<2' 'scipy<1.12'
    python -m experiments.bench.networks --fedjax fedjax_env/bin/python

All sides take the same steps on the same shapes and take turns, round by round.  "gradient" is the bare gradient of one
batch, compiled by itself: a step in a round should cost little more.  FedJAX 0.0.17 needs an older JAX, and therefore
its own environment (Python 3.11).  The first round of each side, which compiles, is not counted.
"""

import subprocess
import time
from collections.abc import Callable, Iterator
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
import tyro

from commjax.algorithms import fedavg
from commjax.core import local, rounds
from commjax.data.stacked import Examples
from commjax.models import fast_on_cpu, networks
from commjax.models.resnet import ResNet18

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
    fedjax: Path | None = None  # Python of the environment with FedJAX


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


Side = Callable[[], Any]  # takes one round and waits for its end


def our_sides(name: str, settings: Settings) -> Iterator[tuple[str, int, Side]]:
    """Yield (name, number of steps, round) of each side that runs in JAX."""
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
    yield "gradient", 5, lambda: [jax.block_until_ready(gradient(params, batch)) for _ in range(5)]

    def fed(loss: Any, steps: int, over: Any, n: int) -> Side:
        algorithm = fedavg.fedavg(jax.value_and_grad(loss), local.minibatch(settings.batch), steps=steps, over=over)
        rows = jax.tree.map(lambda leaf: leaf[:n], data)
        step = partial(jax.jit(algorithm.step), jax.random.key(1), fedavg.HParams(0.01, 1.0))
        state = algorithm.init(params, jnp.arange(n))
        return lambda: jax.block_until_ready(step(state, rows))

    steps = settings.steps
    yield "one by one", settings.clients * steps, fed(fast_on_cpu(plain), steps, rounds.one_by_one, settings.clients)
    yield "vmap", settings.clients * steps, fed(fast_on_cpu(plain), steps, jax.vmap, settings.clients)
    if settings.lax and layers:
        few = max(1, steps // 5)
        yield "lax, one by one", few, fed(plain, few, rounds.one_by_one, 1)


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

    return take_round


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

        yield take_round
        stdin.close()


def measure(name: str, settings: Settings) -> dict[str, np.ndarray]:
    """Return the milliseconds of a step in every counted round, by side."""
    with ExitStack() as stack:
        sides = {side: (steps, take) for side, steps, take in our_sides(name, settings)}
        if (torch_round := torch_side(name, settings)) is not None:
            sides["torch"] = settings.clients * settings.steps, torch_round
        if settings.fedjax is not None and name == "emnist":
            take = stack.enter_context(fedjax_side(settings.fedjax, settings))
            sides["FedJAX, jit backend"] = settings.clients * settings.steps, take
        milliseconds: dict[str, list[float]] = {side: [] for side in sides}
        for turn in range(settings.turns + 1):
            for side, (steps, take) in sides.items():
                begin = time.perf_counter()
                take()
                if turn:
                    milliseconds[side].append(1e3 * (time.perf_counter() - begin) / steps)
    return {side: np.array(values) for side, values in milliseconds.items()}


def main(settings: Settings) -> dict[str, dict[str, np.ndarray]]:
    """Time all sides and print a table for each network."""
    found = {}
    print(f"{settings.clients} clients, {settings.steps} steps of {settings.batch} rows, jax {jax.__version__}")
    for name in settings.network:
        found[name] = measure(name, settings)
        least = min(("one by one", "vmap"), key=lambda side: float(np.median(found[name][side])))
        ours = np.median(found[name][least])
        print(f"{name}: milliseconds a step, median (least to most) of {settings.turns} rounds; {least} / side")
        for side, values in found[name].items():
            middle, low, high = np.median(values), values.min(), values.max()
            print(f"  {side:20} {middle:8.2f} ({low:.2f} to {high:.2f})   {ours / middle:5.2f}", flush=True)
    return found


if __name__ == "__main__":
    main(tyro.cli(Settings))
