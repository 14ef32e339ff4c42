"""What the tables of `experiments.symwanda` share.

These are settings, models with their texts, perplexity after pruning, and a cache of results on disk.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from commjax.core.files import write_atomically
from commjax.core.identity import digest
from commjax.llm import checkpoints, embedded, llama2c, perplexity, texts, tokens
from commjax.llm.base import Layers, Model, Params
from commjax.pruning import model as pruning
from commjax.pruning import recipe as recipes
from commjax.pruning.recipe import Recipe, describe
from commjax.pruning.scores import Score

_BATCH = 8  # windows per batch


@dataclass(frozen=True)
class Settings:
    model: str = "topics"  # topics, stories260K, or a Hugging Face folder
    calibration: Path | None = None  # calibration text, for a Hugging Face folder
    text: Path | None = None  # text of the perplexity, for a Hugging Face folder
    samples: int = 64  # calibration windows
    window: int = 256  # tokens per window
    most: int = 200  # most windows of the perplexity
    # stories260K is measured on this many stories, the first ones. It is calibrated on the others, from story 100 on.
    stories: int = 60
    sparsity: float = 0.5  # sparsity of the tables that have only one
    sparsities: tuple[float, ...] = (0.3, 0.4, 0.5, 0.6, 0.7)  # sparsities of `methods`
    betas: tuple[float, ...] = (1.0, 0.9, 0.5, 0.1, 0.05, 0.01)  # sampling ratios of `beta`
    seeds: int = 5  # seeds of stochRIA
    # Most swaps of an output. The papers have 50, about 1 % of their 4096 inputs; 2 is the same share of our inputs.
    # `ablation` takes the first of these and the first of the layers.
    cycles: tuple[int, ...] = (50, 2)
    layers: tuple[Literal["attention", "all"], ...] = ("attention", "all")  # layers that swap; released: attention
    # Tasks of `zero-shot`.
    tasks: tuple[str, ...] = (
        "arc_easy",
        "arc_challenge",
        "openbookqa",
        "hellaswag",
        "boolq",
        "rte",
        "winogrande",
    )
    limit: int | None = 200  # most questions of a task
    seed: int = 0  # seed of the calibration windows
    out: Path = Path("results/symwanda")  # folder of tables and figures
    progress: bool = True  # show a bar


class Task(NamedTuple):
    """A model with its texts.

    Attributes:
        model: The functions of the model.
        params: Its dense parameters.
        calibration: Windows of the calibration text [samples, window].
        evaluation: Windows of another text [windows, window].
    """

    model: Model
    params: Params
    calibration: np.ndarray
    evaluation: np.ndarray


@cache
def load(settings: Settings) -> Task:
    """Load the model and its texts.

    stories260K is evaluated on the first `stories` stories and calibrated on the stories from max(100, `stories`) on.
    """
    draw = settings.samples, settings.seed
    if settings.model == "topics":
        model, params = embedded.load()
        corpus = embedded.corpus()
        calibration = tokens.random_windows(corpus.train.tolist(), settings.window, *draw)
        evaluation = tokens.evaluation_windows(corpus.held_out.tolist(), settings.window)
    elif settings.model == "stories260K":
        folder = Path(os.environ.get("COMMJAX_DATA", "data")) / "stories"
        model, params = llama2c.read(folder / "stories260K.bin")
        encode = tokens.llama2c(folder / "tok512.bin").encode
        stories = texts.documents(folder / "tinystories_train_first1000.json.xz")
        calibration = tokens.document_windows(stories[max(100, settings.stories) :], encode, settings.window, *draw)
        evaluation = tokens.evaluation_windows(
            [i for s in stories[: settings.stories] for i in encode(s)], settings.window
        )
    elif settings.calibration is None or settings.text is None:
        raise ValueError(
            f"model={settings.model!r}; allowed: topics, stories260K, or a folder with --calibration and --text"
        )
    else:
        model, params = checkpoints.load(settings.model)
        encode = tokens.load(settings.model).encode
        calibration = texts.calibration(
            settings.model, settings.calibration, samples=settings.samples, length=settings.window, seed=settings.seed
        )
        evaluation = tokens.evaluation_windows(encode("\n\n".join(texts.documents(settings.text))), settings.window)
    return Task(model, params, calibration, evaluation[: settings.most])


def measured(task: Task, recipe: Recipe | None) -> float:
    """Return the perplexity after pruning, or of the dense model if `recipe` is None."""
    params = task.params if recipe is None else pruning.prune(task.model, task.params, task.calibration, recipe)[0]
    return perplexity.perplexity(perplexity.losses(task.model, params.outer, params.blocks, task.evaluation))


def over_seeds(task: Task, recipe: Recipe, seeds: int) -> list[float]:
    """Return the perplexities of `recipe` with seeds 0, 1, ...

    Calibration, scores and masks of all seeds are one `vmap`. There is one program for every layer shape and score and
    one for the block, instead of one for the whole model. This compiles in seconds.
    """
    model, outer = task.model, task.params.outer
    score, outputs = recipes.check(recipe, model)
    keys = jnp.stack([jax.random.key(seed) for seed in range(seeds)])
    hidden = [jnp.broadcast_to(h, (seeds, *h.shape)) for h in pruning.embed(model, outer, task.calibration, _BATCH)]
    found: list[Layers] = []
    for number, block in enumerate(task.params.blocks):
        calibrated = jax.vmap(lambda hidden, block=block: pruning.calibrate(model, block, hidden, outputs))(hidden)
        pruned = jax.tree.map(lambda leaf: jnp.broadcast_to(leaf, (seeds, *leaf.shape)), block)
        for i, name in enumerate(model.linear):
            run = partial(_pruned, recipe, score, block[name]["kernel"])
            kernels = jax.vmap(run)(calibrated[name].stats, jax.vmap(lambda key, at=(number, i): _fold(key, at))(keys))
            pruned = pruned | {name: pruned[name] | {"kernel": kernels}}
        if number + 1 < len(task.params.blocks):
            hidden = [_advance(model.block, pruned, h) for h in hidden]
        found.append(pruned)
    one = ([jax.tree.map(lambda leaf, seed=seed: leaf[seed], block) for block in found] for seed in range(seeds))
    return [perplexity.perplexity(perplexity.losses(model, outer, blocks, task.evaluation)) for blocks in one]


def _fold(key, at: tuple[int, int]):
    """Return the key of layer at[1] of block at[0], as in `pruning.prune`."""
    return jax.random.fold_in(jax.random.fold_in(key, at[0]), at[1])


def _pruned(recipe: Recipe, score: Score, W, stats, key):
    return jnp.where(recipes.keep(recipe, score(W, stats, key), recipe.sparsity or 0.0), W, 0)


@partial(jax.jit, static_argnums=0)
def _advance(function, blocks: Layers, h):
    """Apply a block of every seed."""
    return jax.vmap(lambda block, h: function(block, h)[0])(blocks, h)


class Kept(NamedTuple):
    """Results on disk that were computed before.

    Attributes:
        path: The JSON file.
        values: Description of a measurement -> result.
    """

    path: Path
    values: dict[str, Any]

    @staticmethod
    def open(settings: Settings) -> "Kept":
        """Open the file of this model, calibration and evaluation text."""
        task = load(settings)
        told = digest({"c": task.calibration, "e": task.evaluation, "w": task.params})
        path = settings.out / f"{Path(settings.model).name}_{told}.json"
        return Kept(path, json.loads(path.read_text()) if path.exists() else {})

    def get(self, recipe: Recipe | None, compute: Callable[[], Any], **more: Any) -> Any:
        """Return the saved result of a recipe, or compute and save it.

        Args:
            recipe: The recipe; None for the dense model.
            compute: Callable without arguments that returns the result, which must be JSON.
            **more: Other settings that the result depends on.
        """
        name = json.dumps({"recipe": None if recipe is None else describe(recipe), **more}, sort_keys=True)
        if name not in self.values:
            self.values[name] = compute()
            write_atomically(self.path, json.dumps(self.values, indent=1).encode())
        return self.values[name]
