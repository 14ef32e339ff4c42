"""What the command line makes of its options: every option reaches the recipe, with the defaults of the functions."""

import inspect
import math
from dataclasses import fields
from typing import Any

import pytest

from commjax.cli import options
from commjax.cli.commands import recipe_of
from commjax.cli.options import Prune
from commjax.cli.parse import parse
from commjax.pruning import regrow, scores
from commjax.pruning.recipe import Recipe, choose, describe
from tests.cli.cases import prune

pytestmark = pytest.mark.slow

JOINS = ("relative", "relative_to_sum", "plain", "harmonic", "root")
SCORES = {f"ria --join {name}": choose(scores.ria, join=getattr(scores, name)) for name in JOINS} | {
    "magnitude": choose(scores.magnitude),
    "wanda": choose(scores.wanda),
    "owanda": choose(scores.owanda),
    "symwanda --join root": choose(scores.symwanda, join=scores.root),
    "symmetric --join root": choose(scores.symmetric, join=scores.root),
    "ri": choose(scores.ri),
    "ria --axes out --alpha 1": choose(scores.ria, alpha=1.0, axes=("out",)),
    "ria --axes in out --p inf": choose(scores.ria, axes=("in", "out"), p=math.inf),
    "stochria --shared --beta 0.5": choose(scores.stoch_ria, shared=True, beta=0.5),
}
REGROW = {
    "": None,
    "regrow:none": None,
    "regrow:dsnot": choose(regrow.dsnot),
    "regrow:dsnot --regrow.cycles 7 --regrow.threshold 0.2 --regrow.power 0.5 --regrow.same-sign True": choose(
        regrow.dsnot, cycles=7, threshold=0.2, power=0.5, same_sign=True
    ),
    "regrow:r2dsnot --regrow.no-relative-grow --regrow.relative-prune --regrow.gamma-grow 0.1 --regrow.gamma-prune 0.2 "
    "--regrow.regularizer in --regrow.p inf --regrow.alpha 1 --regrow.literal --regrow.cycles 9": choose(
        regrow.r2_dsnot,
        relative_grow=False,
        relative_prune=True,
        gamma_grow=0.1,
        gamma_prune=0.2,
        regularizer="in",
        p=math.inf,
        alpha=1.0,
        literal=True,
        cycles=9,
    ),
}


def described(*words, **changes):
    """The recipe of a command line, as the manifest records it."""
    options = parse(prune(*words, **changes))
    assert isinstance(options, Prune)
    return describe(recipe_of(options))


@pytest.mark.parametrize("line", SCORES)
def test_every_score_of_the_chapter_is_reached(line):
    assert described(line) == describe(Recipe(0.5, score=SCORES[line]))


@pytest.mark.parametrize("line", REGROW)
def test_every_swap_is_reached(line):
    assert described("ria", line) == describe(Recipe(0.5, regrow=REGROW[line]))


def test_every_option_that_all_methods_have_reaches_the_recipe():
    wanted = Recipe(pattern=(2, 4), regrow=choose(regrow.r2_dsnot), regrow_layers=("",), seed=5)
    assert described("ria", "regrow:r2dsnot --regrow.mlp", pattern="2:4", seed=5) == describe(wanted)
    wanted = Recipe(0.3, group="layer", spread=0.05, outlier_multiple=7.0)
    assert described(sparsity=0.3, group="layer", spread=0.05, outlier_multiple=7) == describe(wanted)


@pytest.mark.parametrize("kind, function", [*options.METHODS.values(), *options.REGROW.values()])
def test_the_options_are_those_of_the_function_with_its_defaults(kind, function):
    parameters = inspect.signature(function).parameters if function else {}
    # `sampling` is stochria; the recipe has the others.
    elsewhere = {"W", "mask", "stats", "pattern", "prune", "sampling"}
    wanted = {name: parameter.default for name, parameter in parameters.items() if name not in elsewhere}
    defaults: dict[str, Any] = {field.name: field.default for field in fields(kind) if field.name != "mlp"}
    if "join" in defaults:
        defaults["join"] = getattr(scores, defaults["join"])
    assert defaults == wanted
