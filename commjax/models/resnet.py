"""ResNet-18 for 32 x 32 images, with 18 named layers."""

from collections.abc import Sequence
from typing import Any

import flax.linen as nn
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Float, Shaped

from commjax.algorithms.fedp3 import plans
from commjax.algorithms.fedp3.layers import Layers, named
from commjax.algorithms.fedp3.plans import Plan
from commjax.models import networks

BLOCKS = (1, 2, 3, 4)
VARIANTS = ("Full", "-B2-B3 (full)", "-B2 (part)", "-B3 (part)")


class ResNet18(nn.Module):
    """An input layer, four blocks of four 3 x 3 convolutions with skip connections, and an output layer.

    The network has 11,173,962 parameters. Block b has the layers b{b}_1 to b{b}_4, each a convolution and its norm.
    Where the shape changes (blocks 2 to 4), the skip connection has a 1 x 1 convolution. It belongs to layer b{b}_2,
    after which its output is added. GroupNorm replaces the BatchNorm of the original, because clients would have to
    exchange the running means of BatchNorm as well.

    Thesis: Sec. 4.4.2.
    Differs: the network has GroupNorm, and an input layer for small images (3 x 3, no pooling); the thesis does not
    describe its input layer.

    Attributes:
        classes: The number of classes.
        width: The channels of the first block. Each further block doubles them.
        groups: The number of groups of GroupNorm, at most the number of channels.
        dtype: The dtype of parameters and activations.

    >>> import jax
    >>> shapes = jax.eval_shape(ResNet18().init, jax.random.key(0), jnp.ones((1, 32, 32, 3)))["params"]
    >>> sum(leaf.size for leaf in jax.tree.leaves(shapes))
    11173962
    """

    classes: int = 10
    width: int = 64
    groups: int = 8
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Shaped[Array, "b h w c"]) -> Float[Array, "b classes"]:
        """Return the score of each class."""

        def conv(x: Array, name: str, width: int, size: int = 3, stride: int = 1) -> Array:
            layer = networks.conv(width, size, "SAME", self.dtype, stride, use_bias=False, name=f"{name}_conv")
            norm: dict[str, Any] = {"dtype": self.dtype, "param_dtype": self.dtype}
            return nn.GroupNorm(min(self.groups, width), name=f"{name}_norm", **norm)(layer(x))

        x = nn.relu(conv(x.astype(self.dtype), "input", self.width))
        for block in BLOCKS:
            width = self.width * 2 ** (block - 1)
            for first in (1, 3):
                stride = 2 if block > 1 and first == 1 else 1
                y = nn.relu(conv(x, f"b{block}_{first}", width, stride=stride))
                y = conv(y, f"b{block}_{first + 1}", width)
                if stride > 1:
                    x = conv(x, f"b{block}_skip", width, 1, stride)
                x = nn.relu(x + y)
        x = jnp.mean(x, axis=(1, 2))
        return nn.Dense(self.classes, name="output", dtype=self.dtype, param_dtype=self.dtype)(x)


def block_layers(block: int, of: Sequence[int] = (1, 2, 3, 4)) -> list[str]:
    """List the names of layers of one block.

    Args:
        block: The number of the block, 1 to 4.
        of: The numbers of the layers in the block, 1 to 4.

    Returns:
        The names.

    >>> block_layers(2, (1, 2))
    ['b2_1', 'b2_2']
    """
    return [f"b{block}_{number}" for number in of]


def layers(params: Any) -> Layers:
    """List the 18 layers, in the order of computation.

    Args:
        params: The parameters of a ResNet18.

    Returns:
        The layers; the last one is "output".
    """
    groups = {"input": ["input_conv", "input_norm"]}
    for block in BLOCKS:
        for name in block_layers(block):
            skip = [f"b{block}_skip_conv", f"b{block}_skip_norm"] if block > 1 and name.endswith("_2") else []
            groups[name] = [f"{name}_conv", f"{name}_norm", *skip]
    return named(params, final="output", groups=groups | {"output": ["output"]})


def left_out(name: str) -> list[list[str]]:
    """List the sets of layers of a variant of the ablation. Each client leaves out one of these sets.

        "Full"            nothing is left out
        "-B2-B3 (full)"   all of B2, or all of B3
        "-B2 (part)"      the first two or the last two layers of B2
        "-B3 (part)"      the first two or the last two layers of B3

    Args:
        name: The variant, one of `VARIANTS`.

    Returns:
        The sets, each a list of names of layers.
    """
    pairs = {block: [block_layers(block, (1, 2)), block_layers(block, (3, 4))] for block in (2, 3)}
    sets = {
        "Full": [[]],
        "-B2-B3 (full)": [block_layers(2), block_layers(3)],
        "-B2 (part)": pairs[2],
        "-B3 (part)": pairs[3],
    }
    if name not in sets:
        raise ValueError(f"name={name!r}; allowed: {', '.join(map(repr, sets))}")
    return sets[name]


def variant(layers: Layers, n: int, name: str, *, seed: int = 0, keep: ArrayLike = 0.9) -> Plan:
    """Make the plan of a variant of the ablation. Each client leaves out one set of `left_out`, drawn uniformly.

    Thesis: Sec. 4.4.2, Table 4.1.

    Args:
        layers: The layers of the network.
        n: The number of clients.
        name: The variant, one of `VARIANTS`.
        seed: The seed of the draw.
        keep: The fraction of weights that pruning keeps in the layers that a client does not train, in (0, 1].

    Returns:
        The plan.
    """
    return plans.without(layers, n, left_out(name), seed=seed, keep=keep)
