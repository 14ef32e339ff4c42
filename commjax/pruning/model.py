"""Prune a model block by block, in memory.  `commjax.pruning.stream` does the same from disk to disk, bit for bit.

for every block:
    stats = statistics of the inputs of each linear layer       the block is dense, the blocks before it are pruned
    S = score(W, stats);  mask = the largest scores;  W~ = W on the mask, after swaps if the recipe has them
    h <- block(W~, h)                                           the input of the next block
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from commjax.core.base import Key
from commjax.llm.base import Hidden, Layers, Model, Params, advance_once, embed_once
from commjax.llm.layers import linear
from commjax.pruning import recipe as recipes
from commjax.pruning import reconstruct, scores, sparsity, statistics
from commjax.pruning.recipe import Recipe
from commjax.pruning.scores import Matrix, Score
from commjax.pruning.statistics import Statistics

# Number of calibration tokens from which the reconstruction error is computed.
_ERROR_TOKENS = 1024

Windows = Int[np.ndarray, "n t"]
Activations = Float[Array, "t i"]
Batches = list[Float[Array, "_ t d"]]  # the last may be smaller


class Layer(NamedTuple):
    """Result of pruning one linear layer.

    Attributes:
        block: Number of the block.
        name: Name of the layer within the block.
        sparsity: Share of its weights that are zero.
        error: |X W - X W~|_F / |X W|_F with the dense weights W, the pruned weights W~, and the inputs X of the layer
            at 1024 of the calibration tokens (or at all tokens, if there are fewer).
    """

    block: int
    name: str
    sparsity: float
    error: float


class Calibration(NamedTuple):
    """Calibration of one linear layer.

    Attributes:
        stats: Statistics over all windows.
        inputs: Inputs of the tokens from which the reconstruction error is computed.
    """

    stats: Statistics
    inputs: Activations


def prune(
    model: Model, params: Params, windows: Windows, recipe: Recipe, *, batch_size: int = 8
) -> tuple[Params, tuple[Layer, ...]]:
    """Prune all linear layers of a model; embeddings, norms, biases and head stay unchanged.

    >>> from commjax.llm import base, config, llama
    >>> tiny = llama.model(config.Config("llama", 5, 8, 12, 1, 2, 1, 4, 16))
    >>> dense = base.init(jax.random.key(0), tiny)
    >>> pruned, layers = prune(tiny, dense, np.array([[1, 2, 3]]), Recipe(sparsity=0.5))
    >>> layers[0].name, layers[0].sparsity, float(jnp.mean(pruned.blocks[0]["mlp.up_proj"]["kernel"] == 0))
    ('self_attn.q_proj', 0.5, 0.5)

    Args:
        model: The model.
        params: Its dense parameters.
        windows: Tokens to calibrate on, [n, t].
        recipe: How to prune.
        batch_size: Windows per batch.

    Returns:
        The pruned parameters, and the result of every layer.
    """
    recipes.check(recipe, model)
    check_windows(model, windows, batch_size)
    sparsities = sparsity_of_blocks(model, params.outer, params.blocks, windows, recipe, batch_size)
    hidden = embed(model, params.outer, windows, batch_size)
    pruned = list(pruned_blocks(model, params.blocks, hidden, recipe, sparsities))
    blocks, layers = tuple(block for block, _ in pruned), tuple(layer for _, results in pruned for layer in results)
    return Params(params.outer, blocks), layers


def check_windows(model: Model, windows: Windows, batch_size: int) -> None:
    """Raise a ValueError unless the windows hold tokens of the model and are short enough for it.

    Args:
        model: The model.
        windows: Tokens, [n, t].
        batch_size: Windows per batch.
    """
    config = model.config
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}; allowed: at least 1")
    if not windows.size or windows.shape[1] > config.max_position_embeddings:
        raise ValueError(
            f"windows has shape {windows.shape}; allowed: at least one window of 1 to "
            f"max_position_embeddings={config.max_position_embeddings} tokens"
        )
    if windows.min() < 0 or windows.max() >= config.vocab_size:
        raise ValueError(f"windows has tokens {windows.min()}..{windows.max()}; allowed: 0..{config.vocab_size - 1}")


def embed(model: Model, outer: Layers, windows: Windows, batch_size: int) -> Batches:
    """Embed the windows: the input of the first block.

    Args:
        model: The model.
        outer: Parameters outside of the blocks.
        windows: Tokens, [n, t].
        batch_size: Windows per batch.

    Returns:
        Batches of activations [batch, t, d]; the last batch may be smaller.
    """
    parts = range(0, len(windows), batch_size)
    return [embed_once(model.embed, outer, jnp.asarray(windows[i : i + batch_size], jnp.int32)) for i in parts]


def advance(model: Model, block: Layers, hidden: Batches) -> None:
    """Replace the inputs of a block by its outputs, in place, so that there is one copy of the activations.

    Args:
        model: The model.
        block: Parameters of the block.
        hidden: Batches of activations; they are overwritten.
    """
    for i, h in enumerate(hidden):
        hidden[i] = advance_once(model.block, block, h)


def pruned_blocks(
    model: Model,
    blocks: Iterable[Layers],
    hidden: Batches,
    recipe: Recipe,
    sparsities: np.ndarray,
    *,
    first: int = 0,
    told: Callable[[int, Layer], None] = lambda done, layer: None,
) -> Iterator[tuple[Layers, tuple[Layer, ...]]]:
    """Prune blocks one after another, and pass the activations through each pruned block.

    Args:
        model: The model.
        blocks: Parameters of the dense blocks from number `first` on.  They are read once, one block at a time.
        hidden: Inputs of block `first`, in batches; they are overwritten.
        recipe: The recipe.
        sparsities: Sparsity of every block of the model.
        first: Number of the first block in `blocks`.
        told: Called as told(number of layers done, result of the last one) after every layer, to show progress.

    Yields:
        The pruned parameters of each block, and the results of its layers.
    """
    score, outputs = recipes.scoring(recipe, model)
    for number, block in enumerate(blocks, first):
        calibrated = calibrate(model, block, hidden, outputs)
        layers = []
        for i, name in enumerate(model.linear):
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(recipe.seed), number), i)
            W = block[name]["kernel"]
            pruned = _prune(recipe, score, name, W, calibrated[name].stats, sparsity=float(sparsities[number]), key=key)
            zeros, error = _outcome(calibrated[name].inputs, W, pruned)
            layers.append(Layer(number, name, float(zeros) / W.size, float(error)))
            block = block | {name: block[name] | {"kernel": pruned}}
            told(number * len(model.linear) + i + 1, layers[-1])
        del calibrated, W, pruned
        advance(model, block, hidden)
        yield block, tuple(layers)


def _prune(
    recipe: Recipe, score: Score, name: str, W: Matrix, stats: Statistics, *, sparsity: float, key: Key
) -> Matrix:
    S = score(W, stats, key)
    mask = recipes.keep(recipe, S, sparsity)
    if recipe.regrow is not None and name.startswith(recipe.regrow_layers):
        return recipes.swap(recipe, W, mask, stats, S)
    return jnp.where(mask, W, 0)


def calibrate(model: Model, block: Layers, hidden: Batches, outputs: bool = False) -> dict[str, Calibration]:
    """Collect statistics of the inputs of each linear layer of a dense block, over all batches.

    Args:
        model: The model.
        block: Parameters of the dense block.
        hidden: Inputs of the block, in batches.
        outputs: Also collect the norms of the outputs of the layers.

    Returns:
        The calibration of each linear layer, by name.
    """
    drawn = drawn_tokens(sum(h.shape[0] * h.shape[1] for h in hidden))
    total = {name: _nothing(block[name]["kernel"], hidden[0].dtype, outputs, len(drawn)) for name in model.linear}
    begin = 0
    for h in hidden:
        # One program serves all blocks and batches; a last batch that is not full needs another one.
        total = _calibrate(model.block, outputs, block, h, total, drawn - begin)
        begin += h.shape[0] * h.shape[1]
    return total


def drawn_tokens(tokens: int) -> Int[np.ndarray, "n"]:
    """Draw the calibration tokens from which the reconstruction error is computed.

    The batch size does not change them.

    >>> drawn_tokens(5).tolist(), len(drawn_tokens(5000))
    ([0, 1, 2, 3, 4], 1024)

    Args:
        tokens: Number of calibration tokens.

    Returns:
        Sorted positions of at most 1024 tokens.
    """
    drawn = np.random.default_rng(0).choice(tokens, min(tokens, _ERROR_TOKENS), replace=False)
    return np.sort(drawn).astype(np.int32)


def _nothing(W: Array, dtype: DTypeLike, outputs: bool, drawn: int) -> Calibration:
    """Calibration of no samples, with room for `drawn` inputs."""
    x, y = (jax.ShapeDtypeStruct((1, size), dtype) for size in W.shape)
    shapes = jax.eval_shape(statistics.of, x, y if outputs else None)
    # NumPy's zeros need no compiled program.
    stats = jax.tree.map(lambda leaf: jnp.asarray(np.zeros(leaf.shape, leaf.dtype)), shapes)
    return Calibration(stats, jnp.asarray(np.zeros((drawn, W.shape[0]), dtype)))


@partial(jax.jit, static_argnums=(0, 1))
def _calibrate(
    function: Callable[[Layers, Hidden], tuple[Hidden, dict[str, Hidden]]],
    outputs: bool,
    block: Layers,
    h: Hidden,
    total: dict[str, Calibration],
    drawn: Int[Array, "n"],
) -> dict[str, Calibration]:
    """Add the batch h to the calibrations.  `drawn` counts from the first token of h."""
    entering = function(block, h)[1]
    seen: dict[int, Statistics] = {}  # several layers have the same input
    for name, x in entering.items():
        if outputs or id(x) not in seen:
            seen[id(x)] = statistics.of(x, linear(block[name], x) if outputs else None)
        rows = x.reshape(-1, x.shape[-1])
        in_batch = ((drawn >= 0) & (drawn < len(rows)))[:, None]
        inputs = jnp.where(in_batch, jnp.take(rows, drawn, axis=0, mode="clip"), total[name].inputs)
        total = total | {name: Calibration(statistics.add(total[name].stats, seen[id(x)]), inputs)}
    return total


def sparsity_of_blocks(
    model: Model, outer: Layers, blocks: Iterable[Layers], windows: Windows, recipe: Recipe, batch_size: int
) -> np.ndarray:
    """Return the sparsity of every block: the same for all, or OWL's, which prunes blocks with more outliers less.

    For OWL the dense model first reads all windows.

    Args:
        model: The model.
        outer: Parameters outside of the blocks.
        blocks: Parameters of the dense blocks; only OWL reads them.
        windows: Tokens to calibrate on, [n, t].
        recipe: The recipe.
        batch_size: Windows per batch.

    Returns:
        The sparsities [number of blocks].
    """
    count = model.config.num_hidden_layers
    if recipe.pattern is not None:
        return sparsity.uniform(count, 1 - recipe.pattern[0] / recipe.pattern[1])
    assert recipe.sparsity is not None
    if recipe.spread is None:
        return sparsity.uniform(count, recipe.sparsity)
    hidden, ratios = embed(model, outer, windows, batch_size), []
    for block in blocks:
        stats = {name: layer.stats for name, layer in calibrate(model, block, hidden).items()}
        ratios.append(
            sparsity.outlier_ratio(
                [scores.wanda()(block[name]["kernel"], stats[name]) for name in model.linear], recipe.outlier_multiple
            )
        )
        advance(model, block, hidden)
    return sparsity.outlier_weighted(ratios, recipe.sparsity, recipe.spread)


@jax.jit
def _outcome(inputs: Activations, W: Matrix, pruned: Matrix) -> tuple[Int[Array, ""], Float[Array, ""]]:
    """Return the number of zero weights, and the relative reconstruction error."""
    return jnp.sum(pruned == 0), reconstruct.of_activations(inputs, W, pruned).relative
