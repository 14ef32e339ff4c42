"""A model pruned block by block, in memory: what `commjax.pruning.stream` does from disk to disk, bit for bit.

for every block:
    stats = of what enters each linear layer        the block dense, the blocks before it pruned
    S = score(W, stats);  mask = the largest;  W~ = W on the mask, after swaps if the recipe has them
    h <- block(W~, h)                               what the next block sees
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float, Int

from commjax.llm.base import Hidden, Layers, Model, Params, advance_once, embed_once
from commjax.llm.layers import linear
from commjax.pruning import masks, reconstruct, scores, statistics
from commjax.pruning import recipe as recipes
from commjax.pruning.recipe import Recipe
from commjax.pruning.scores import Score
from commjax.pruning.statistics import Statistics

# Tokens, drawn from all of the calibration, from which the reconstruction error is computed.
_ERROR_TOKENS = 1024

Windows = Int[np.ndarray, "n t"]
Activations = Float[Array, "t i"]
Batches = list[Float[Array, "_ t d"]]  # the last may be smaller


class Layer(NamedTuple):
    """What became of one linear layer."""

    block: int
    name: str
    sparsity: float  # the share of its weights that are zero
    error: float  # |X W - X W~|_F / |X W|_F, X what enters it, 1024 tokens of it (or all)


class Calibration(NamedTuple):
    """Of one linear layer: statistics over all windows, and a few of its inputs."""

    stats: Statistics
    inputs: Activations


def prune(
    model: Model, params: Params, windows: Windows, recipe: Recipe, *, batch_size: int = 8
) -> tuple[Params, tuple[Layer, ...]]:
    """The pruned model and what became of its layers; embeddings, norms, biases and head stay.

    >>> from commjax.llm import base, config, llama
    >>> tiny = llama.model(config.Config("llama", 5, 8, 12, 1, 2, 1, 4, 16))
    >>> dense = base.init(jax.random.key(0), tiny)
    >>> pruned, layers = prune(tiny, dense, np.array([[1, 2, 3]]), Recipe(sparsity=0.5))
    >>> layers[0].name, layers[0].sparsity, float(jnp.mean(pruned.blocks[0]["mlp.up_proj"]["kernel"] == 0))
    ('self_attn.q_proj', 0.5, 0.5)
    """
    recipes.check(recipe, model)
    check_windows(model, windows, batch_size)
    sparsities = sparsity_of_blocks(model, params.outer, params.blocks, windows, recipe, batch_size)
    hidden = embed(model, params.outer, windows, batch_size)
    found = list(pruned_blocks(model, params.blocks, hidden, recipe, sparsities))
    return Params(params.outer, tuple(block for block, _ in found)), tuple(one for _, some in found for one in some)


def check_windows(model: Model, windows: Windows, batch_size: int) -> None:
    """ValueError unless these are tokens of the model, in windows that it can read."""
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
    """What enters the first block, in batches."""
    parts = range(0, len(windows), batch_size)
    return [embed_once(model.embed, outer, jnp.asarray(windows[i : i + batch_size], jnp.int32)) for i in parts]


def advance(model: Model, block: Layers, hidden: Batches) -> None:
    """hidden <- what leaves the block, in place: there is one copy of the activations."""
    for i, h in enumerate(hidden):
        hidden[i] = advance_once(model.block, block, h)


def pruned_blocks(
    model: Model,
    blocks: Iterable[Layers],
    hidden: Batches,
    how: Recipe,
    sparsities: np.ndarray,
    first: int = 0,
    told: Callable[[int, Layer], None] = lambda done, layer: None,
) -> Iterator[tuple[Layers, tuple[Layer, ...]]]:
    """Block after block, pruned; `hidden` is what enters block number `first`, and is changed.

    `blocks` is read once, a block at a time.  `told(layers done, the last one)` hears of progress.
    """
    score, outputs = recipes.scoring(how, model)
    for number, block in enumerate(blocks, first):
        calibrated = calibrate(model, block, hidden, outputs)
        layers = []
        for i, name in enumerate(model.linear):
            key = jax.random.fold_in(jax.random.fold_in(jax.random.key(how.seed), number), i)
            W = block[name]["kernel"]
            pruned = _prune(how, score, name, W, calibrated[name].stats, float(sparsities[number]), key)
            zeros, error = _outcome(calibrated[name].inputs, W, pruned)
            layers.append(Layer(number, name, float(zeros) / W.size, float(error)))
            block = block | {name: block[name] | {"kernel": pruned}}
            told(number * len(model.linear) + i + 1, layers[-1])
        del calibrated, W, pruned
        advance(model, block, hidden)
        yield block, tuple(layers)


def _prune(how: Recipe, score: Score, name: str, W, stats: Statistics, sparsity: float, key):
    S = score(W, stats, key)
    mask = recipes.keep(how, S, sparsity)
    if how.regrow is not None and name.startswith(how.regrow_layers):
        return recipes.swap(how, W, mask, stats, S)
    return jnp.where(mask, W, 0)


def calibrate(model: Model, block: Layers, hidden: Batches, outputs: bool = False) -> dict[str, Calibration]:
    """What enters each linear layer of a dense block, over all batches; with `outputs`, the norms of what leaves them too."""
    drawn = drawn_tokens(sum(h.shape[0] * h.shape[1] for h in hidden))
    total = {name: _nothing(block[name]["kernel"], hidden[0].dtype, outputs, len(drawn)) for name in model.linear}
    begin = 0
    for h in hidden:
        # One program for all blocks and batches; a last batch that is not full is compiled apart.
        total = _calibrate(model.block, outputs, block, h, total, drawn - begin)
        begin += h.shape[0] * h.shape[1]
    return total


def drawn_tokens(tokens: int) -> Int[np.ndarray, "n"]:
    """Which of the calibration's tokens the reconstruction error is computed from: the same however they are batched.

    >>> drawn_tokens(5).tolist(), len(drawn_tokens(5000))
    ([0, 1, 2, 3, 4], 1024)
    """
    drawn = np.random.default_rng(0).choice(tokens, min(tokens, _ERROR_TOKENS), replace=False)
    return np.sort(drawn).astype(np.int32)


def _nothing(W: Array, dtype, outputs: bool, drawn: int) -> Calibration:
    """Of no samples, with room for the inputs."""
    x, y = (jax.ShapeDtypeStruct((1, size), dtype) for size in W.shape)
    shapes = jax.eval_shape(statistics.of, x, y if outputs else None)
    # NumPy's zeros need no program.
    stats = jax.tree.map(lambda one: jnp.asarray(np.zeros(one.shape, one.dtype)), shapes)
    return Calibration(stats, jnp.asarray(np.zeros((drawn, W.shape[0]), dtype)))


@partial(jax.jit, static_argnums=(0, 1))
def _calibrate(function, outputs: bool, block: Layers, h: Hidden, total: dict[str, Calibration], drawn):
    """`drawn` counts from the first token of h."""
    entering = function(block, h)[1]
    seen: dict[int, Statistics] = {}  # several layers read one input
    for name, x in entering.items():
        if outputs or id(x) not in seen:
            seen[id(x)] = statistics.of(x, linear(block[name], x) if outputs else None)
        rows = x.reshape(-1, x.shape[-1])
        here = ((drawn >= 0) & (drawn < len(rows)))[:, None]
        inputs = jnp.where(here, jnp.take(rows, drawn, axis=0, mode="clip"), total[name].inputs)
        total = total | {name: Calibration(statistics.add(total[name].stats, seen[id(x)]), inputs)}
    return total


def sparsity_of_blocks(
    model: Model, outer: Layers, blocks: Iterable[Layers], windows: Windows, how: Recipe, batch_size: int
) -> np.ndarray:
    """The sparsity of every block: uniform, or OWL's, for which the dense model reads all windows first."""
    count = model.config.num_hidden_layers
    if how.pattern is not None:
        return masks.uniform(count, 1 - how.pattern[0] / how.pattern[1])
    assert how.sparsity is not None
    if how.spread is None:
        return masks.uniform(count, how.sparsity)
    hidden, ratios = embed(model, outer, windows, batch_size), []
    for block in blocks:
        stats = {name: one.stats for name, one in calibrate(model, block, hidden).items()}
        ratios.append(
            masks.outlier_ratio(
                [scores.wanda()(block[name]["kernel"], stats[name]) for name in model.linear], how.outlier_multiple
            )
        )
        advance(model, block, hidden)
    return masks.outlier_weighted(ratios, how.sparsity, how.spread)


@jax.jit
def _outcome(inputs: Activations, W, pruned):
    """How many weights are zero, and the relative error."""
    return jnp.sum(pruned == 0), reconstruct.of_activations(inputs, W, pruned).relative
