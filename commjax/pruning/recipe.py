"""What to do with a model, in one tuple: which score, which weights compete, how many go, what is swapped back."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from commjax.checkpoint import digest
from commjax.llm.base import Model
from commjax.pruning import masks, regrow, scores, statistics
from commjax.pruning.masks import Group, Mask
from commjax.pruning.scores import Matrix, Score
from commjax.pruning.statistics import Statistics


class Choice(NamedTuple):
    """A function and its options, so that a manifest can say both."""

    function: Callable
    options: dict[str, Any]


def choose(function: Callable, **options: Any) -> Choice:
    """`choose(scores.ria, alpha=0.5)`, `choose(regrow.dsnot, cycles=50)`.

    >>> describe(Recipe(sparsity=0.5, score=choose(scores.ria, p=math.inf)))["score"]
    {'name': 'ria', 'p': 'inf'}
    """
    return Choice(function, options)


class Recipe(NamedTuple):
    """How to prune the linear layers of every block.

    Either `sparsity`, the share of weights pruned among those that compete in a `group`, or `pattern=(n, m)`: n of every m
    consecutive inputs of an output are kept.  `spread`: blocks with more outliers under Wanda's score keep more (OWL), and
    sparsities differ by 2 `spread` at most.  Blocks are pruned first to last, each with the activations of the pruned blocks
    before it and of its own dense layers, as the released Wanda, RIA and DSnoT do.

    Thesis: settings L6020.  Differs: W9 (the group is said).
    """

    sparsity: float | None = None
    pattern: tuple[int, int] | None = None
    score: Choice = choose(scores.ria, alpha=0.5)
    group: Group = "output"
    spread: float | None = None
    regrow: Choice | None = None  # regrow.dsnot or regrow.r2_dsnot
    regrow_layers: tuple[str, ...] = ("self_attn.",)  # beginnings of names; the released DSnoT leaves the MLP alone
    seed: int = 0  # of a score that samples


def check(recipe: Recipe, model: Model, dtype: DTypeLike = jnp.float32) -> tuple[Score, bool]:
    """(the score, does it need outputs?), if the recipe fits the layers of the model; nothing is computed."""
    if (recipe.sparsity is None) == (recipe.pattern is None):
        raise ValueError(f"sparsity={recipe.sparsity} and pattern={recipe.pattern}; allowed: one of them")
    if recipe.sparsity is not None:
        masks.count(1, recipe.sparsity)
    if recipe.group not in ("output", "input", "layer"):
        raise ValueError(f"group={recipe.group!r}; allowed: 'output', 'input', 'layer'")
    if recipe.pattern is not None and (recipe.group != "output" or recipe.spread is not None):
        raise ValueError(
            f"pattern={recipe.pattern} with group={recipe.group!r}, spread={recipe.spread}; allowed: 'output' and None"
        )
    if recipe.spread is not None:
        most = [1.0] + [0.0] * (model.config.num_hidden_layers - 1)
        for ratios in (most, [1 - ratio for ratio in most]):  # the ends of what OWL may ask for
            masks.outlier_weighted(ratios, recipe.sparsity or 0.0, recipe.spread)
    score, outputs = recipe.score.function(**recipe.score.options), False
    for name in model.linear:
        shape = model.block_shapes[name]["kernel"]
        if recipe.pattern is not None:
            _named(name, lambda inputs=shape[0], pattern=recipe.pattern: masks.check_pattern(inputs, *pattern))
        outputs |= _named(name, lambda shape=shape: _needs_outputs(score, shape, dtype))
        if recipe.regrow is not None:
            _named(name, lambda shape=shape: jax.eval_shape(lambda: _dry_run(recipe, shape, dtype)))
    return score, outputs


def _named(layer: str, function: Callable[[], Any]) -> Any:
    """Errors say which layer."""
    try:
        return function()
    except ValueError as error:
        raise ValueError(f"{layer}: {error}") from error


def _needs_outputs(score: Score, shape: tuple[int, ...], dtype: DTypeLike) -> bool:
    """Traced with shapes only: a score that fails without outputs must do with them."""

    def dry(outputs: bool):
        W, x = jnp.ones(shape, dtype), jnp.ones((1, shape[0]), dtype)
        return score(W, statistics.of(x, x @ W if outputs else None), jax.random.key(0))

    try:
        jax.eval_shape(lambda: dry(False))
    except ValueError:
        jax.eval_shape(lambda: dry(True))
        return True
    return False


def _dry_run(recipe: Recipe, shape: tuple[int, ...], dtype: DTypeLike) -> Matrix:
    W = jnp.ones(shape, dtype)
    return swap(recipe, W, W > 0, statistics.of(jnp.ones((1, shape[0]), dtype)), W)


def keep(recipe: Recipe, S: Matrix, sparsity: float) -> Mask:
    """The mask of one layer from its scores."""
    return masks.unstructured(S, sparsity, recipe.group) if recipe.pattern is None else masks.n_m(S, *recipe.pattern)


def swap(recipe: Recipe, W: Matrix, mask: Mask, stats: Statistics, S: Matrix) -> Matrix:
    """The pruned weights after `recipe.regrow`; with a pattern the released DSnoT prunes by the scores that made the mask."""
    assert recipe.regrow is not None
    function, options = recipe.regrow
    if recipe.pattern is not None and function is regrow.dsnot:
        options = {"prune": S} | options
    return function(W, mask, stats, pattern=recipe.pattern, **options)[0]


def describe(recipe: Recipe) -> dict[str, Any]:
    """The recipe as JSON has it; arrays as a digest.

    >>> describe(Recipe(pattern=(2, 4)))["pattern"], describe(Recipe(pattern=(2, 4), regrow=choose(regrow.dsnot)))["regrow"]
    ('2:4', {'name': 'dsnot'})
    """
    found = {name: _plain(value) for name, value in recipe._asdict().items()}
    return found | {"pattern": None if recipe.pattern is None else f"{recipe.pattern[0]}:{recipe.pattern[1]}"}


def _plain(value: Any) -> Any:
    if isinstance(value, Choice):
        return {"name": value.function.__name__} | {name: _plain(one) for name, one in value.options.items()}
    if isinstance(value, jax.Array | np.ndarray):
        return digest(value)
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    if callable(value):
        return value.__name__
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
