"""The network of FedCR for the settings of `experiments.fedp3`.

It is the body of the other methods' network, with a last hidden layer that is twice as wide.
"""

from functools import cache
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from commjax.algorithms import fedcr
from commjax.algorithms.fedcr import layers as fedcr_layers
from commjax.algorithms.fedcr import method
from commjax.algorithms.fedp3.layers import Layers
from commjax.algorithms.fedp3.plans import Plan
from commjax.models import layered, networks, resnet


class Modules(NamedTuple):
    """The two modules of a network.

    Attributes:
        body: Module that maps images to means and deviations of `z` features.
        head: Module that maps features to class scores.
        z: Number of features.
    """

    body: Any
    head: nn.Module
    z: int


def modules(settings: Any) -> Modules:
    """Return the modules for the settings.

    Up to the last hidden layer the body is the network of the other methods. ResNet-18 has an additional dense layer
    after pooling.
    """
    width, small = settings.width, max(1, settings.width // 8)
    body, z = {
        "mlp": lambda: (layered.LayeredMlp(classes=2 * width, widths=(width,) * 3), width),
        "cnn": lambda: (layered.LayeredCnn(2 * width, small, width, side=32, hidden_layers=1), width),
        "table": lambda: (layered.LayeredCnn(2048, side=32, hidden_layers=1), 1024),
        "resnet": lambda: (resnet.ResNet18(16 * small, small, groups=2), 8 * small),
    }[settings.model]()
    return Modules(body, networks.Mlp(10, ()), z)


@cache
def network(parts: Modules) -> fedcr.Network:
    """Return the functions that FedCR needs, for 10 classes."""

    def head(params: Any, z: Any) -> Any:
        return parts.head.apply({"params": params}, z)

    return fedcr.Network(lambda p, x: fedcr.gaussian(parts.body.apply({"params": p}, x)), head, 10, parts.z)


@cache
def _starter(module: nn.Module) -> Any:
    return jax.jit(module.init)


def start(modules: Modules, key: Any, images: Any) -> dict[str, Any]:
    """Initialize the parameters of the body and of the head.

    Args:
        modules: The modules.
        key: Random key.
        images: One image [1, ...], for the shapes.
    """
    keys = jax.random.split(key)
    features = jnp.ones((1, modules.z), jnp.float32)
    parts = {"body": (modules.body, keys[0], images), "head": (modules.head, keys[1], features)}
    return {name: _starter(module)(key, x)["params"] for name, (module, key, x) in parts.items()}


def layers(settings: Any, task: Any) -> Layers:
    """Return the layers of the body, with the head as the final layer."""
    shapes = jax.eval_shape(modules(settings).body.init, jax.random.key(0), task.train.inputs[0, :1])["params"]
    body = (resnet if settings.model == "resnet" else layered).layers(shapes)
    # The head has two leaves: a kernel and a bias.
    return Layers((*body.names, "head"), (*body.of, *[len(body.names)] * 2))


def expected_bits(plan: Plan, chances: list[float], settings: Any, params: Any) -> dict[str, float]:
    """Return the expected bits per round of a client of FedCR on layers, "up" and "down".

    Args:
        plan: A plan with one client for every possible L_i.
        chances: The probability of each of them.
        settings: Settings of the experiment.
        params: Parameters of the network.
    """
    bits = fedcr_layers.ledger(plan, method.blank(network(modules(settings)), params))
    return {way: float(np.dot(chances, bits[way])) for way in ("up", "down")}


def deployed(hparams: Any, server: Any, client: Any) -> Any:
    """Return what a client deploys; the arguments are those that `experiments.scafflix.networks.accuracy` passes."""
    return fedcr.deployed(server, client)


@cache
def judge(parts: Modules) -> networks.Classification:
    """Return the problem that scores the network as its clients use it: the head on the mean features."""
    both = network(parts)

    def sums(params: Any, examples: Any) -> tuple[Any, Any]:
        scores = both.head(params["head"], both.body(params["body"], examples.inputs).mean)
        real = examples.weights > 0
        right = real & (jnp.argmax(scores, axis=-1).astype(examples.targets.dtype) == examples.targets)
        return jnp.sum(right, dtype=jnp.int32), jnp.sum(real, dtype=jnp.int32)

    return networks.Classification(lambda key, x: {}, lambda params, examples: jnp.zeros(()), sums)
