"""What to do with a model, in one tuple: which score, which weights compete, how many go, what is swapped back."""

import inspect
import math
from collections.abc import Callable
from functools import lru_cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from commjax.core.checkpoint import digest
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
    {'name': 'ria', 'alpha': 0.5, 'p': 'inf', 'axes': ['in', 'out'], 'join': 'relative', 'sampling': None}
    """
    return Choice(function, options)


class Recipe(NamedTuple):
    """How to prune the linear layers of every block.

    Either `sparsity`, the share of weights pruned among those that compete in a `group`, or `pattern=(n, m)`: n of every m
    consecutive inputs of an output are kept.  `spread`: blocks with more outliers, scores of Wanda's above `outlier_multiple`
    times the block's mean, keep more (OWL), and sparsities differ by 2 `spread` at most.  Blocks are pruned first to last, each with the activations of the pruned blocks
    before it and of its own dense layers, as the released Wanda, RIA and DSnoT do.

    Thesis: settings L6020.  Differs: W9 (the group is said).
    """

    sparsity: float | None = None
    pattern: tuple[int, int] | None = None
    score: Choice = choose(scores.ria, alpha=0.5)
    group: Group = "output"
    spread: float | None = None
    outlier_multiple: float = 5.0
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
    """(the score, does it need outputs?)"""
    score = recipe.score.function(**recipe.score.options)
    needs = [
        _named(name, lambda shape=shape: _needs_outputs(score, shape, dtype)) for shape, name in _shapes(model).items()
    ]
    return score, any(needs)


def _shapes(model: Model) -> dict[tuple[int, ...], str]:
    """Shape of a kernel -> the first layer that has it."""
    found: dict[tuple[int, ...], str] = {}
    for name in model.linear:
        found.setdefault(model.block_shapes[name]["kernel"], name)
    return found


def _check_spread(sparsity: float, spread: float, blocks: int) -> None:
    """Refuses what no outliers could bring into range; `masks.outlier_weighted` refuses the rest when it has counted them.

    With r the mean over blocks of (D - min D) / (max D - min D), 1/blocks <= r <= 1 - 1/blocks, sparsities go from
    sparsity - 2 spread (1 - r) to sparsity + 2 spread r.
    """
    if not 0 <= spread < math.inf:
        raise ValueError(f"spread={spread}; allowed: finite, at least 0")
    if blocks == 1 or spread == 0:
        return
    least = max(1 / blocks, 1 - sparsity / (2 * spread))
    most = min(1 - 1 / blocks, (1 - sparsity) / (2 * spread))
    if least > most + 1e-9:
        raise ValueError(
            f"spread={spread} with sparsity={sparsity} on {blocks} blocks; allowed: 0 <= sparsity < 1 for each of them, whose "
            "sparsities differ by 2 spread"
        )


def _named(layer: str, function: Callable[[], Any]) -> Any:
    """Errors say which layer."""
    try:
        return function()
    except ValueError as error:
        raise ValueError(f"{layer}: {error}") from error


@lru_cache(64)
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
    """The recipe as JSON has it, with the defaults of its functions; arrays as a digest.

    >>> describe(Recipe(pattern=(2, 4)))["pattern"], describe(Recipe(pattern=(2, 4), regrow=choose(regrow.dsnot)))["regrow"]["cycles"]
    ('2:4', 50)
    """
    found = {name: _plain(value) for name, value in recipe._asdict().items()}
    return found | {"pattern": None if recipe.pattern is None else f"{recipe.pattern[0]}:{recipe.pattern[1]}"}


def _plain(value: Any) -> Any:
    if isinstance(value, Choice):
        return {"name": _name(value.function)} | {name: _plain(one) for name, one in _options(value).items()}
    if isinstance(value, jax.Array | np.ndarray):
        return digest(value)
    if isinstance(value, tuple):
        return [_plain(one) for one in value]
    if callable(value):
        return _name(value)
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _options(choice: Choice) -> dict[str, Any]:
    """All of them: a default that changes with a version is another recipe."""
    try:
        bound = inspect.signature(choice.function).bind_partial(**choice.options)
    except TypeError as error:
        raise ValueError(f"{_name(choice.function)} with options {sorted(choice.options)}: {error}") from error
    bound.apply_defaults()
    found: dict[str, Any] = {}
    for name, value in bound.arguments.items():
        several = bound.signature.parameters[name].kind == inspect.Parameter.VAR_KEYWORD
        found |= value if several else {name: value}
    found.pop("pattern", None)  # the recipe's own
    return found


def _name(function: Callable) -> str:
    """A name that says which function it is, in a manifest too."""
    name = getattr(function, "__qualname__", None)
    if name is None or "<lambda>" in name:
        raise ValueError(f"{function!r} has no name for the manifest; allowed: functions made by def")
    module = function.__module__
    return name if module.split(".")[0] == "commjax" else f"{module}.{name}"
