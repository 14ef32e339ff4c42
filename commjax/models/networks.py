"""Networks in Flax, and the losses that turn a Flax module into a classification problem."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int, PyTree, Shaped

from commjax.core import rounds, tree
from commjax.core.base import Key
from commjax.data.stacked import Examples
from commjax.models import fast


def conv(
    features: int,
    size: int,
    padding: str = "VALID",
    dtype: DTypeLike = jnp.float32,
    stride: int = 1,
    use_bias: bool = True,
    name: str | None = None,
) -> nn.Conv:
    """Make a convolution of images that is fast on a CPU.

    Args:
        features: The number of output channels.
        size: The side of the square kernel.
        padding: "VALID" or "SAME".
        dtype: The dtype of parameters and activations.
        stride: The stride along both axes.
        use_bias: Whether a bias is added.
        name: The name of the layer.

    Returns:
        The layer.

    >>> image = jnp.ones((1, 8, 8, 3), jnp.float32)
    >>> conv(4, 3).init_with_output(jax.random.key(0), image)[0].shape
    (1, 6, 6, 4)
    """
    return nn.Conv(
        features,
        (size, size),
        stride,
        padding,
        use_bias=use_bias,
        dtype=dtype,
        param_dtype=dtype,
        conv_general_dilated=fast.conv_general_dilated,
        name=name,
    )


@fast.fast_on_cpu
def pool(x: Float[Array, "b h w c"]) -> Float[Array, "b i j c"]:
    """Return the largest entry of each 2 x 2 window."""
    return nn.max_pool(x, (2, 2), (2, 2))


def _flat(x: Shaped[Array, "b ..."], dtype: DTypeLike) -> Float[Array, "b d"]:
    return x.reshape(x.shape[0], -1).astype(dtype)


class _EmnistCnn(nn.Module):
    """The common parts of the two EMNIST models: attributes, two convolutions with pooling, two dense layers."""

    classes: int = 62
    dtype: DTypeLike = jnp.float32

    def _convolved(self, x: Shaped[Array, "b h w c"], size: int) -> Float[Array, "b i j f"]:
        """Apply two convolutions of 32 and 64 channels, and pooling."""
        x = x.astype(self.dtype)
        for features in (32, 64):
            x = nn.relu(conv(features, size, dtype=self.dtype)(x))
        return pool(x)

    def _dense(self, features: int) -> nn.Dense:
        return nn.Dense(features, dtype=self.dtype, param_dtype=self.dtype)


class FedjaxCnn(_EmnistCnn):
    """FedJAX's EMNIST model: two 3 x 3 convolutions, 1,206,590 parameters on 28 x 28 images.

    Dropout is active only if ``apply`` gets an rng named "dropout". The attributes are those of `SmallCnn`, without
    `widths`.

    >>> images = jnp.ones((1, 28, 28, 1))
    >>> tree.size(jax.eval_shape(FedjaxCnn().init, jax.random.key(0), images))
    1206590
    """

    @nn.compact
    def __call__(self, x: Shaped[Array, "b h w c"]) -> Float[Array, "b classes"]:
        """Return the score of each class."""

        def dropout(rate: float) -> nn.Dropout:
            return nn.Dropout(rate, deterministic=not self.has_rng("dropout"))

        x = _flat(dropout(0.25)(self._convolved(x, 3)), self.dtype)
        x = nn.relu(self._dense(128)(x))
        return self._dense(self.classes)(dropout(0.5)(x))


class ThesisCnn(_EmnistCnn):
    """The thesis's FEMNIST model: two 5 x 5 convolutions, 879,422 parameters on 28 x 28 images, no dropout.

    Thesis: Sec. D.5.1, Table D.4.
    Differs (docs/errata.md): P13 (the last layer is 62 wide, as in the table; the images are 24, 20 and 10 wide, which
    the parameter counts imply).

    The attributes are those of `SmallCnn`, without `widths`.

    >>> images = jnp.ones((1, 28, 28, 1))
    >>> tree.size(jax.eval_shape(ThesisCnn().init, jax.random.key(0), images))
    879422
    """

    @nn.compact
    def __call__(self, x: Shaped[Array, "b h w c"]) -> Float[Array, "b classes"]:
        """Return the score of each class."""
        x = nn.relu(self._dense(128)(_flat(self._convolved(x, 5), self.dtype)))
        return self._dense(self.classes)(x)


class SmallCnn(nn.Module):
    """A small network for quick runs: 3 x 3 convolutions, each with relu and 2 x 2 pooling, then one dense layer.

    The convolutions keep the size of the image.

    Attributes:
        classes: The number of classes.
        widths: The channels of the convolutions.
        dtype: The dtype of parameters and activations.

    >>> images = jnp.ones((5, 8, 8, 1))
    >>> SmallCnn().init_with_output(jax.random.key(0), images)[0].shape
    (5, 10)
    """

    classes: int = 10
    widths: Sequence[int] = (8, 16)
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Shaped[Array, "b h w c"]) -> Float[Array, "b classes"]:
        """Return the score of each class."""
        x = x.astype(self.dtype)
        for width in self.widths:
            x = pool(nn.relu(conv(width, 3, "SAME", self.dtype)(x)))
        return nn.Dense(self.classes, dtype=self.dtype, param_dtype=self.dtype)(_flat(x, self.dtype))


class Mlp(nn.Module):
    """Dense layers with relu, then a dense output layer. Inputs of any shape are flattened.

    Attributes:
        classes: The number of classes.
        widths: The widths of the layers before the output layer.
        dtype: The dtype of parameters and activations.

    >>> images = jnp.ones((5, 8, 8, 1))
    >>> Mlp(widths=(32, 32)).init_with_output(jax.random.key(0), images)[0].shape
    (5, 10)
    """

    classes: int = 10
    widths: Sequence[int] = (64,)
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Shaped[Array, "b ..."]) -> Float[Array, "b classes"]:
        """Return the score of each class."""
        x = _flat(x, self.dtype)
        for width in self.widths:
            x = nn.relu(nn.Dense(width, dtype=self.dtype, param_dtype=self.dtype)(x))
        return nn.Dense(self.classes, dtype=self.dtype, param_dtype=self.dtype)(x)


class ShakespeareLstm(nn.Module):
    """FedJAX's Shakespeare model: embedded characters, LSTM layers, a score for each next character.

    It has 820,522 parameters with the default sizes.

    Attributes:
        vocabulary: The number of ids, ``data.text.Windows.num_ids``.
        embedding: The width of the embedding.
        widths: The widths of the LSTM layers.
        dtype: The dtype of parameters and activations.

    >>> tokens = jnp.ones((1, 80), jnp.int32)
    >>> tree.size(jax.eval_shape(ShakespeareLstm().init, jax.random.key(0), tokens))
    820522
    """

    vocabulary: int = 90
    embedding: int = 8
    widths: Sequence[int] = (256, 256)
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, tokens: Int[Array, "b t"]) -> Float[Array, "b t vocabulary"]:
        """Return a score for each possible next character."""
        x: Any = nn.Embed(self.vocabulary, self.embedding, dtype=self.dtype, param_dtype=self.dtype)(tokens)
        for width in self.widths:
            cell = nn.OptimizedLSTMCell(width, dtype=self.dtype, param_dtype=self.dtype)
            start = jnp.zeros((len(tokens), width), self.dtype)
            x = nn.RNN(cell)(x, initial_carry=tree.varying_like((start, start), x))
        return nn.Dense(self.vocabulary, dtype=self.dtype, param_dtype=self.dtype)(x)


class Classification(NamedTuple):
    """The functions that ``classification`` makes from a module. The examples are those of one client (no axis ``n``).

    Attributes:
        init: Function (key, inputs) -> parameters.
        loss: Function (params, examples, key=None) -> loss. Dropout is active if a key is given.
        accuracy_sums: Function (params, examples) -> (number of correct targets, number of targets). The numbers are
            integers, which add up over clients and devices.

    >>> Classification._fields
    ('init', 'loss', 'accuracy_sums')
    """

    init: Callable[[Key, Any], PyTree]
    loss: Callable[..., Float[Array, ""]]
    accuracy_sums: Callable[[PyTree, Examples], tuple[Int[Array, ""], Int[Array, ""]]]


def _kept(targets: Int[Array, "b ..."], weights: Float[Array, "b"]) -> Bool[Array, "b ..."]:
    """True where a target counts: the row is not padding and, in a sequence, the target is not the padding id 0."""
    rows = jnp.broadcast_to(jax.lax.expand_dims(weights > 0, range(1, targets.ndim)), targets.shape)
    return rows & (targets > 0) if targets.ndim > 1 else rows


def classification(module: nn.Module) -> Classification:
    """Make a classification problem with softmax cross entropy from a Flax module.

        loss = sum over rows r of weights_r * cross entropy of row r

    The cross entropy of a sequence is the mean over its targets > 0, because 0 is padding.  On a CPU, convolutions and
    maximum pooling are computed as `commjax.models.fast_on_cpu` does.

    Args:
        module: A module with outputs [b, classes], or [b, t, classes] for sequences, and with no variables except
            "params".

    Returns:
        The functions init, loss and accuracy_sums.

    >>> problem = classification(Mlp(classes=3))
    >>> data = Examples(jnp.ones((2, 5)), jnp.array([0, 2]), jnp.array([0.5, 0.5]))
    >>> params = problem.init(jax.random.key(0), data.inputs)
    >>> problem.loss(params, data).shape, int(problem.accuracy_sums(params, data)[1])
    ((), 2)
    """
    begin = jax.jit(module.init)  # compiled once for all seeds
    apply = fast.fast_on_cpu(module.apply)

    def init(key: Key, inputs: Any) -> PyTree:
        variables = begin(key, inputs)
        if set(variables) != {"params"}:
            raise ValueError(f"{type(module).__name__} has variables {sorted(variables)}; allowed: 'params' alone")
        return variables["params"]

    def scores(params: PyTree, examples: Examples, key: Key | None = None) -> Float[Array, "b ... classes"]:
        inputs = jax.tree.map(jnp.asarray, examples.inputs)
        outputs = apply({"params": params}, inputs, rngs=None if key is None else {"dropout": key})
        assert isinstance(outputs, jax.Array)
        if outputs.shape[:-1] != examples.targets.shape:
            raise ValueError(
                f"{type(module).__name__} gives outputs of shape {outputs.shape} for targets of shape "
                f"{examples.targets.shape}; allowed: the shape of the targets and one more axis"
            )
        return outputs

    def loss(params: PyTree, examples: Examples, key: Key | None = None) -> Float[Array, ""]:
        entropy = optax.softmax_cross_entropy_with_integer_labels(scores(params, examples, key), examples.targets)
        if entropy.ndim > 1:
            kept = (examples.targets > 0).astype(entropy.dtype).reshape(len(entropy), -1)
            entropy = jnp.sum(kept * entropy.reshape(kept.shape), axis=1) / jnp.maximum(jnp.sum(kept, axis=1), 1)
        return jnp.sum(examples.weights.astype(entropy.dtype) * entropy)

    def accuracy_sums(params: PyTree, examples: Examples) -> tuple[Int[Array, ""], Int[Array, ""]]:
        kept = _kept(examples.targets, examples.weights)
        best = jnp.argmax(scores(params, examples), axis=-1)
        right = kept & (best == examples.targets.astype(best.dtype))
        return jnp.sum(right, dtype=jnp.int32), jnp.sum(kept, dtype=jnp.int32)

    return Classification(init, loss, accuracy_sums)


@partial(jax.jit, static_argnames=("problem", "model"))
def accuracy(
    problem: Classification,
    model: Callable[[Any, Any, Any], PyTree],
    hparams: Any,
    server: Any,
    clients: Any,
    examples: Examples,
) -> Float[Array, ""]:
    """Return the share of right predictions over the targets of all clients; each client uses the model it deploys.

    Args:
        problem: The network.
        model: `model(hparams, server, client)` returns the params that a client deploys.
        hparams: Hyperparameters, for `model`.
        server: Server state, for `model`.
        clients: Client states with a leading client axis, for `model`.
        examples: Rows of all clients, with a leading client axis.

    Returns:
        The accuracy, between 0 and 1.

    >>> problem = classification(nn.Dense(2))
    >>> rows = Examples(jnp.ones((3, 4, 5)), jnp.zeros((3, 4), int), jnp.full((3, 4), 0.25))
    >>> params = {"kernel": jnp.zeros((5, 2)), "bias": jnp.array([1.0, 0.0])}
    >>> accuracy(problem, lambda hparams, server, client: server, None, params, jnp.arange(3), rows).item()
    1.0
    """

    def client_sums(client: Any, data: Examples) -> tuple[Int[Array, ""], Int[Array, ""]]:
        return problem.accuracy_sums(model(hparams, server, client), data)

    right, total = rounds.one_by_one(client_sums)(clients, examples)
    return right.sum() / total.sum()
