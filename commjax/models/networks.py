"""Networks in Flax, and the losses that make a classification problem of any Flax module."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, PyTree, Shaped

from commjax.core import tree
from commjax.core.base import Key
from commjax.data.stacked import Examples


class Conv(nn.Module):
    """A convolution with the parameters and the outputs of ``nn.Conv``.

    ``patches=True`` computes it as a sum of matrix products of shifted images: about 3 times as fast on a CPU where
    every client has weights of its own, since ``vmap`` makes a grouped convolution, for which XLA has no fast path there.

    >>> image = jnp.ones((1, 8, 8, 3), jnp.float32)
    >>> params = Conv(4, 3).init(jax.random.key(0), image)
    >>> Conv(4, 3).apply(params, image).shape, Conv(4, 3, patches=True).apply(params, image).shape
    ((1, 6, 6, 4), (1, 6, 6, 4))
    """

    features: int
    size: int
    padding: Literal["VALID", "SAME"] = "VALID"
    patches: bool = False
    dtype: DTypeLike = jnp.float32
    stride: int = 1
    use_bias: bool = True

    @nn.compact
    def __call__(self, x: Float[Array, "b h w c"]) -> Float[Array, "b i j f"]:
        size, stride, channels = self.size, self.stride, x.shape[-1]
        kernel = self.param("kernel", nn.initializers.lecun_normal(), (size, size, channels, self.features), self.dtype)
        if not self.patches:
            axes = ("NHWC", "HWIO", "NHWC")
            x = jax.lax.conv_general_dilated(x, kernel, (stride, stride), self.padding, dimension_numbers=axes)
        else:
            around = jax.lax.padtype_to_pads(x.shape[1:3], (size, size), (stride, stride), self.padding)
            x = jnp.pad(x, ((0, 0), *around, (0, 0)))
            height, width = x.shape[1] - size + 1, x.shape[2] - size + 1
            # Patches along one axis, a sum along the other: as fast as whole patches, in a fraction 1/size of the memory.
            strips = jnp.concatenate([x[:, :, j : j + width : stride] for j in range(size)], axis=-1)
            matrices = kernel.reshape(size, -1, self.features)
            x = sum(
                (strips[:, i : i + height : stride] @ matrices[i] for i in range(1, size)),
                strips[:, :height:stride] @ matrices[0],
            )
        if not self.use_bias:
            return x
        bias = self.param("bias", nn.initializers.zeros_init(), (self.features,), self.dtype)
        return x + jax.lax.expand_dims(bias, (0, 1, 2))


def _pool(x: Float[Array, "b h w c"]) -> Float[Array, "b i j c"]:
    return nn.max_pool(x, (2, 2), (2, 2))


def _flat(x: Shaped[Array, "b ..."], dtype: DTypeLike) -> Float[Array, "b d"]:
    return x.reshape(x.shape[0], -1).astype(dtype)


class FedjaxCnn(nn.Module):
    """FedJAX's EMNIST model: two 3 x 3 convolutions, 1,206,590 parameters on 28 x 28 images.

    Dropout acts only where ``apply`` is given an rng named "dropout".

    >>> images = jnp.ones((1, 28, 28, 1))
    >>> tree.size(jax.eval_shape(FedjaxCnn().init, jax.random.key(0), images))
    1206590
    """

    classes: int = 62
    patches: bool = False
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Shaped[Array, "b h w c"]) -> Float[Array, "b classes"]:
        def dropout(rate: float):
            return nn.Dropout(rate, deterministic=not self.has_rng("dropout"))

        x = x.astype(self.dtype)
        x = nn.relu(Conv(32, 3, patches=self.patches, dtype=self.dtype)(x))
        x = nn.relu(Conv(64, 3, patches=self.patches, dtype=self.dtype)(x))
        x = _flat(dropout(0.25)(_pool(x)), self.dtype)
        x = nn.relu(nn.Dense(128, dtype=self.dtype, param_dtype=self.dtype)(x))
        return nn.Dense(self.classes, dtype=self.dtype, param_dtype=self.dtype)(dropout(0.5)(x))


class ThesisCnn(nn.Module):
    """The thesis's FEMNIST model: two 5 x 5 convolutions, 879,422 parameters on 28 x 28 images, no dropout.

    Thesis: L5059, L5069.
    Differs: P13 (the last layer is 62 wide, as in the table; the shapes are 24, 20, 10, as the counts are).

    >>> images = jnp.ones((1, 28, 28, 1))
    >>> tree.size(jax.eval_shape(ThesisCnn().init, jax.random.key(0), images))
    879422
    """

    classes: int = 62
    patches: bool = False
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Shaped[Array, "b h w c"]) -> Float[Array, "b classes"]:
        x = x.astype(self.dtype)
        x = nn.relu(Conv(32, 5, patches=self.patches, dtype=self.dtype)(x))
        x = nn.relu(Conv(64, 5, patches=self.patches, dtype=self.dtype)(x))
        x = nn.relu(nn.Dense(128, dtype=self.dtype, param_dtype=self.dtype)(_flat(_pool(x), self.dtype)))
        return nn.Dense(self.classes, dtype=self.dtype, param_dtype=self.dtype)(x)


class SmallCnn(nn.Module):
    """For quick runs: 3 x 3 convolutions that keep the size, each followed by relu and 2 x 2 pooling; then one layer.

    >>> images = jnp.ones((5, 8, 8, 1))
    >>> SmallCnn().init_with_output(jax.random.key(0), images)[0].shape
    (5, 10)
    """

    classes: int = 10
    widths: Sequence[int] = (8, 16)
    patches: bool = False
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Shaped[Array, "b h w c"]) -> Float[Array, "b classes"]:
        x = x.astype(self.dtype)
        for width in self.widths:
            x = _pool(nn.relu(Conv(width, 3, "SAME", self.patches, self.dtype)(x)))
        return nn.Dense(self.classes, dtype=self.dtype, param_dtype=self.dtype)(_flat(x, self.dtype))


class Mlp(nn.Module):
    """Dense layers of ``widths`` with relu, then one of ``classes``; inputs of any shape are flattened.

    >>> images = jnp.ones((5, 8, 8, 1))
    >>> Mlp(widths=(32, 32)).init_with_output(jax.random.key(0), images)[0].shape
    (5, 10)
    """

    classes: int = 10
    widths: Sequence[int] = (64,)
    dtype: DTypeLike = jnp.float32

    @nn.compact
    def __call__(self, x: Shaped[Array, "b ..."]) -> Float[Array, "b classes"]:
        x = _flat(x, self.dtype)
        for width in self.widths:
            x = nn.relu(nn.Dense(width, dtype=self.dtype, param_dtype=self.dtype)(x))
        return nn.Dense(self.classes, dtype=self.dtype, param_dtype=self.dtype)(x)


class ShakespeareLstm(nn.Module):
    """FedJAX's Shakespeare model: characters embedded, LSTM layers, a score for each next character; 820,522 parameters.

    ``vocabulary`` counts the ids: ``data.text.Windows.num_ids``.

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
        x: Any = nn.Embed(self.vocabulary, self.embedding, dtype=self.dtype, param_dtype=self.dtype)(tokens)
        for width in self.widths:
            cell = nn.OptimizedLSTMCell(width, dtype=self.dtype, param_dtype=self.dtype)
            start = jnp.zeros((len(tokens), width), self.dtype)
            x = nn.RNN(cell)(x, initial_carry=tree.varying_like((start, start), x))
        return nn.Dense(self.vocabulary, dtype=self.dtype, param_dtype=self.dtype)(x)


class Classification(NamedTuple):
    """What ``classification`` makes of a module; ``examples`` are those of one client (no axis ``n``).

    >>> Classification._fields
    ('init', 'loss', 'accuracy_sums')
    """

    init: Callable[[Key, Any], PyTree]
    loss: Callable[..., Float[Array, ""]]
    accuracy_sums: Callable[[PyTree, Examples], tuple[Int[Array, ""], Int[Array, ""]]]


def _kept(targets: Int[Array, "b ..."], weights: Float[Array, "b"]):
    """Where a target counts: in rows that are not padding, and in sequences where it is not the padding id 0."""
    rows = jnp.broadcast_to(jax.lax.expand_dims(weights > 0, range(1, targets.ndim)), targets.shape)
    return rows & (targets > 0) if targets.ndim > 1 else rows


def classification(module: nn.Module) -> Classification:
    """Softmax cross entropy of a module whose outputs are [b, classes], or [b, t, classes] for sequences.

    ``init(key, inputs)``: params. ``loss(params, examples, key=None)``: the sum over rows of weight times cross entropy,
    that of a sequence being the mean over its targets > 0 (0 is padding); with ``key``, dropout acts.
    ``accuracy_sums(params, examples)``: (right, all) targets as whole numbers, which add up over clients and devices.

    >>> problem = classification(Mlp(classes=3))
    >>> data = Examples(jnp.ones((2, 5)), jnp.array([0, 2]), jnp.array([0.5, 0.5]))
    >>> params = problem.init(jax.random.key(0), data.inputs)
    >>> problem.loss(params, data).shape, int(problem.accuracy_sums(params, data)[1])
    ((), 2)
    """

    begin = jax.jit(module.init)  # once, so that every seed has the same program

    def init(key: Key, inputs: Any) -> PyTree:
        variables = begin(key, inputs)
        if set(variables) != {"params"}:
            raise ValueError(f"{type(module).__name__} has variables {sorted(variables)}; allowed: 'params' alone")
        return variables["params"]

    def scores(params: PyTree, examples: Examples, key: Key | None = None) -> Float[Array, "b ... classes"]:
        inputs = jax.tree.map(jnp.asarray, examples.inputs)
        found = module.apply({"params": params}, inputs, rngs=None if key is None else {"dropout": key})
        assert isinstance(found, jax.Array)
        if found.shape[:-1] != examples.targets.shape:
            raise ValueError(
                f"{type(module).__name__} gives outputs of shape {found.shape} for targets of shape "
                f"{examples.targets.shape}; allowed: the shape of the targets and one more axis"
            )
        return found

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
