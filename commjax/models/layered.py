"""The networks of Chapter 4 with named layers, as `commjax.algorithms.fedp3.layers` needs them."""

from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Shaped

from commjax.algorithms.fedp3.layers import Layers, named
from commjax.models import networks
from commjax.pruning.statistics import Statistics, of


class LayeredCnn(nn.Module):
    """Two 5 x 5 convolutions with pooling and three dense layers without biases: conv1, conv2, fc1, fc2, ffc.

    On 32 x 32 x 3 images it has 2,804,544 parameters, as in the table. The table's count for Fashion-MNIST, 2,801,344,
    needs ``side=32``.

    Thesis: Table C.2.
    Differs (docs/errata.md): F4 (the text says four dense layers; the table and its numbers have three).

    Attributes:
        classes: The number of classes.
        width: The channels of the convolutions.
        hidden: The width of the dense layers before the last.
        side: Smaller images are padded with zeros to side x side; None pads nothing.
        dtype: The dtype of parameters and activations.
        hidden_layers: The number of dense layers before the last.

    >>> images = jnp.ones((1, 28, 28, 1))
    >>> shapes = jax.eval_shape(LayeredCnn(side=32).init, jax.random.key(0), images)["params"]
    >>> sum(leaf.size for leaf in jax.tree.leaves(shapes))
    2801344
    """

    classes: int = 10
    width: int = 64
    hidden: int = 1024
    side: int | None = None
    dtype: DTypeLike = jnp.float32
    hidden_layers: int = 2

    @nn.compact
    def __call__(self, x: Shaped[Array, "b h w c"]) -> Float[Array, "b classes"]:
        """Return the score of each class."""
        x = x.astype(self.dtype)
        if self.side is not None:
            spare = self.side - x.shape[1], self.side - x.shape[2]
            x = jnp.pad(x, ((0, 0), *((by // 2, by - by // 2) for by in spare), (0, 0)))
        for name in ("conv1", "conv2"):
            x = networks.pool(nn.relu(networks.conv(self.width, 5, dtype=self.dtype, name=name)(x)))
        x = x.reshape(x.shape[0], -1)
        for number in range(1, self.hidden_layers + 1):
            x = nn.relu(_dense(self.hidden, f"fc{number}", self.dtype)(x))
        return _dense(self.classes, "ffc", self.dtype)(x)


class LayeredMlp(nn.Module):
    """Dense layers fc1, fc2, ..., ffc without biases: 2,910,208 parameters on 28 x 28 images.

    Thesis: Table C.2 (EMNIST-L).

    Attributes:
        classes: The number of classes.
        widths: The widths of the layers before the last.
        dtype: The dtype of parameters and activations.

    >>> shapes = jax.eval_shape(LayeredMlp().init, jax.random.key(0), jnp.ones((1, 28, 28, 1)))["params"]
    >>> sum(leaf.size for leaf in jax.tree.leaves(shapes))
    2910208
    """

    classes: int = 10
    widths: Sequence[int] = (1024, 1024, 1024)
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Shaped[Array, "b ..."]) -> Float[Array, "b classes"]:
        """Return the score of each class."""
        x = x.reshape(x.shape[0], -1).astype(self.dtype)
        for number, width in enumerate(self.widths, 1):
            x = nn.relu(_dense(width, f"fc{number}", self.dtype)(x))
        return _dense(self.classes, "ffc", self.dtype)(x)


def _dense(width: int, name: str, dtype: Any) -> nn.Dense:
    return nn.Dense(width, use_bias=False, name=name, dtype=dtype, param_dtype=dtype)


def layers(params: Any) -> Layers:
    """List the layers of a LayeredCnn or LayeredMlp, in the order of computation.

    Args:
        params: The parameters of the network.

    Returns:
        The layers; the last one is "ffc".

    >>> params = LayeredMlp(widths=(4,)).init(jax.random.key(0), jnp.ones((1, 8)))["params"]
    >>> layers(params).names
    ('fc1', 'ffc')
    """
    return named(params, final="ffc")


def _patches(layer: nn.Conv, x: Float[Array, "b h w c"]) -> Float[Array, "b i j k"]:
    """The inputs of each output of a convolution, in the order of the kernel's first three axes."""
    if layer.feature_group_count != 1:
        raise ValueError(
            f"statistics: layer {'/'.join(layer.path)} has feature_group_count={layer.feature_group_count}; allowed: 1"
        )
    strides, dilations = (np.broadcast_to(by or 1, 2).tolist() for by in (layer.strides, layer.kernel_dilation))
    size: Any = layer.kernel_size
    padding: Any = layer.padding
    patches = jax.lax.conv_general_dilated_patches(
        x, size, strides, padding, rhs_dilation=dilations, dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    by_channel = patches.reshape(*patches.shape[:3], x.shape[-1], -1)
    return jnp.swapaxes(by_channel, -1, -2).reshape(patches.shape)


def statistics(module: nn.Module, held: Any) -> Callable[[Any], dict[str, Statistics]]:
    """Make a function that measures the inputs and outputs of every kernel, for scores that depend on activations.

    The inputs of a convolution are its patches, in the order of the kernel's first three axes.

    Args:
        module: The network, whose layers are `nn.Dense` or `nn.Conv` of images.
        held: The batch of images on which the network runs.

    Returns:
        A function of the parameters that returns {path of the kernel: Statistics}.

    >>> module, images = LayeredMlp(widths=(4,)), jnp.ones((2, 8))
    >>> params = module.init(jax.random.key(0), images)["params"]
    >>> sorted(statistics(module, images)(params))
    ['fc1/kernel', 'ffc/kernel']
    """

    def measured(params: Any) -> dict[str, Statistics]:
        seen: dict[str, Statistics] = {}

        def look(call: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], context: Any) -> Any:
            out = call(*args, **kwargs)
            if context.method_name == "__call__" and isinstance(context.module, nn.Dense | nn.Conv):
                x = _patches(context.module, args[0]) if isinstance(context.module, nn.Conv) else args[0]
                path = "/".join((*context.module.path, "kernel"))
                seen[path] = of(x.reshape(-1, x.shape[-1]), out.reshape(-1, out.shape[-1]))
            return out

        with nn.intercept_methods(look):
            module.apply({"params": params}, jnp.asarray(held))
        return seen

    return measured
