"""A recipe for pruning a model: the score, the competing weights, the sparsity, and the swaps afterwards."""

import inspect
import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from commjax.core.identity import digest
from commjax.llm.base import Model
from commjax.pruning import masks, regrow, scores, statistics
from commjax.pruning.masks import Group, Mask
from commjax.pruning.scores import Matrix, Score
from commjax.pruning.statistics import Statistics


class Choice(NamedTuple):
    """A function and its options, so that a manifest can name both.

    Attributes:
        function: A score builder such as `scores.ria`, or a swap such as `regrow.dsnot`.
        options: Keyword arguments of the function.
    """

    function: Callable
    options: dict[str, Any]


def choose(function: Callable, **options: Any) -> Choice:
    """Choose a function and its options: `choose(scores.ria, alpha=0.5)`, `choose(regrow.dsnot, cycles=50)`.

    >>> describe(Recipe(sparsity=0.5, score=choose(scores.ria, p=math.inf)))["score"]
    {'name': 'ria', 'alpha': 0.5, 'p': 'inf', 'axes': ['in', 'out'], 'join': 'relative', 'sampling': None}

    Args:
        function: A score builder of `scores`, or a swap of `regrow`.
        **options: Its keyword arguments; those left out keep their defaults.

    Returns:
        The choice, for a `Recipe`.
    """
    return Choice(function, options)


class Recipe(NamedTuple):
    """How to prune the linear layers of every block.

    Either `sparsity` or `pattern` is given.  Blocks are pruned from first to last.  Each block is calibrated with the
    activations that leave the pruned blocks before it; its own layers are still dense, as in the released Wanda, RIA
    and DSnoT.

    Thesis: Sec. E.3.1, settings.  Differs (docs/errata.md): W9 (the thesis does not state `group`).

    Attributes:
        sparsity: Share of weights pruned among those that compete in a group.
        pattern: (n, m): n of every m consecutive inputs of an output are kept.
        score: Builder of the score.
        group: Which weights compete: "output", "input" or "layer".
        spread: OWL: blocks with more outliers keep more weights, and sparsities differ by at most 2 `spread`.  None:
            all blocks have the same sparsity.
        outlier_multiple: OWL: an outlier is a score of Wanda's above this multiple of the block's mean.
        regrow: `regrow.dsnot` or `regrow.r2_dsnot` with options; None: no swaps.
        regrow_layers: Prefixes of the names of layers that are swapped.  The released DSnoT does not swap in the MLP.
        seed: Seed of a score that samples.
    """

    sparsity: float | None = None
    pattern: tuple[int, int] | None = None
    score: Choice = choose(scores.ria, alpha=0.5)
    group: Group = "output"
    spread: float | None = None
    outlier_multiple: float = 5.0
    regrow: Choice | None = None
    regrow_layers: tuple[str, ...] = ("self_attn.",)
    seed: int = 0


def check(recipe: Recipe, model: Model, dtype: DTypeLike = jnp.float32) -> tuple[Score, bool]:
    """Raise a ValueError unless the recipe fits the layers of the model; nothing is computed.

    Args:
        recipe: The recipe.
        model: The model, of which only shapes are used.
        dtype: Dtype of the weights.

    Returns:
        The score, and whether it needs the outputs of the layers.
    """
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
        _check_spread(recipe.sparsity or 0.0, recipe.spread, model.config.num_hidden_layers)
    if not 0 <= recipe.seed < 2**32:
        raise ValueError(f"seed={recipe.seed}; allowed: 0 to {2**32 - 1}")
    if not 0 < recipe.outlier_multiple < math.inf:
        raise ValueError(f"outlier_multiple={recipe.outlier_multiple}; allowed: finite, above 0")
    for shape, name in _shapes(model).items():
        if recipe.pattern is not None:
            _named(name, lambda inputs=shape[0], pattern=recipe.pattern: masks.check_pattern(inputs, *pattern))
        if recipe.regrow is not None:
            _named(name, lambda shape=shape: jax.eval_shape(lambda: _dry_run(recipe, shape, dtype)))
    return scoring(recipe, model, dtype)


def scoring(recipe: Recipe, model: Model, dtype: DTypeLike = jnp.float32) -> tuple[Score, bool]:
    """Build the score of a recipe.

    Args:
        recipe: The recipe.
        model: The model, of which only shapes are used.
        dtype: Dtype of the weights.

    Returns:
        The score, and whether it needs the outputs of the layers.
    """
    score = recipe.score.function(**recipe.score.options)
    needs = [
        _named(name, lambda shape=shape: _needs_outputs(score, shape, dtype)) for shape, name in _shapes(model).items()
    ]
    return score, any(needs)


def _shapes(model: Model) -> dict[tuple[int, ...], str]:
    """Map each shape of a kernel to the first layer that has it."""
    shapes: dict[tuple[int, ...], str] = {}
    for name in model.linear:
        shapes.setdefault(model.block_shapes[name]["kernel"], name)
    return shapes


def _check_spread(sparsity: float, spread: float, blocks: int) -> None:
    """Raise a ValueError if no outlier ratios could bring the sparsities into [0, 1).

    `sparsity.outlier_weighted` checks the rest when the outliers are counted.  With r the mean over blocks of
    (D - min D) / (max D - min D), 1/blocks <= r <= 1 - 1/blocks, sparsities go from sparsity - 2 spread (1 - r) to
    sparsity + 2 spread r.
    """
    if not 0 <= spread < math.inf:
        raise ValueError(f"spread={spread}; allowed: finite, at least 0")
    if blocks == 1 or spread == 0:
        return
    least = max(1 / blocks, 1 - sparsity / (2 * spread))
    most = min(1 - 1 / blocks, (1 - sparsity) / (2 * spread))
    if least > most + 1e-9:
        raise ValueError(
            f"spread={spread} with sparsity={sparsity} on {blocks} blocks; allowed: 0 <= sparsity < 1 for each of "
            "them, whose sparsities differ by 2 spread"
        )


def _named(layer: str, function: Callable[[], Any]) -> Any:
    """Call the function; a ValueError gets the layer's name in front."""
    try:
        return function()
    except ValueError as error:
        raise ValueError(f"{layer}: {error}") from error


@lru_cache(64)
def _needs_outputs(score: Score, shape: tuple[int, ...], dtype: DTypeLike) -> bool:
    """Whether the score needs outputs.

    The score is traced with shapes only.  If it fails without outputs, it must work with them.
    """

    def dry(outputs: bool) -> Matrix:
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
    """Compute the mask of one layer from its scores.

    Args:
        recipe: The recipe, which has the group or the pattern.
        S: Scores [in, out].
        sparsity: Sparsity of the layer's block; a pattern ignores it.

    Returns:
        The mask [in, out], True where a weight is kept.
    """
    return masks.unstructured(S, sparsity, recipe.group) if recipe.pattern is None else masks.n_m(S, *recipe.pattern)


def swap(recipe: Recipe, W: Matrix, mask: Mask, stats: Statistics, S: Matrix) -> Matrix:
    """Apply `recipe.regrow` to a masked layer.

    With a pattern, `regrow.dsnot` prunes by the scores S that made the mask, as the released DSnoT does.

    Args:
        recipe: The recipe; its `regrow` must not be None.
        W: Dense weights [in, out].
        mask: Mask before the swaps [in, out].
        stats: Statistics of the layer's inputs.
        S: Scores that made the mask [in, out].

    Returns:
        The pruned weights after the swaps [in, out].
    """
    assert recipe.regrow is not None
    function, options = recipe.regrow
    if recipe.pattern is not None and function is regrow.dsnot:
        options = {"prune": S} | options
    return function(W, mask, stats, pattern=recipe.pattern, **options)[0]


def describe(recipe: Recipe) -> dict[str, Any]:
    """Describe a recipe by JSON values, with the defaults of its functions; an array becomes its digest.

    >>> describe(Recipe(pattern=(2, 4)))["pattern"]
    '2:4'
    >>> describe(Recipe(pattern=(2, 4), regrow=choose(regrow.dsnot)))["regrow"]["cycles"]
    50

    Args:
        recipe: The recipe.

    Returns:
        A dictionary for the manifest.
    """
    entries = {name: _plain(value) for name, value in recipe._asdict().items()}
    return entries | {"pattern": None if recipe.pattern is None else f"{recipe.pattern[0]}:{recipe.pattern[1]}"}


def _plain(value: Any) -> Any:
    if isinstance(value, Choice):
        return {"name": _name(value.function)} | {name: _plain(option) for name, option in _options(value).items()}
    if isinstance(value, jax.Array | np.ndarray):
        return digest(value)
    if isinstance(value, tuple):
        return [_plain(entry) for entry in value]
    if callable(value):
        return _name(value)
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _options(choice: Choice) -> dict[str, Any]:
    """All options with their defaults: if a default changes with a version, the recipe is another one."""
    try:
        bound = inspect.signature(choice.function).bind_partial(**choice.options)
    except TypeError as error:
        raise ValueError(f"{_name(choice.function)} with options {sorted(choice.options)}: {error}") from error
    bound.apply_defaults()
    options: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        several = bound.signature.parameters[name].kind == inspect.Parameter.VAR_KEYWORD
        options |= value if several else {name: value}
    options.pop("pattern", None)  # the recipe has its own entry for it
    return options


def _name(function: Callable) -> str:
    """A name that identifies the function in a manifest."""
    name = getattr(function, "__qualname__", None)
    if name is None or "<lambda>" in name:
        raise ValueError(f"{function!r} has no name for the manifest; allowed: functions made by def")
    module = function.__module__
    return name if module.split(".")[0] == "commjax" else f"{module}.{name}"
