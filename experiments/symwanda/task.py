"""What the tables of `symwanda` share: settings, models with their texts, perplexity after pruning, and what is computed already."""

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

from commjax.core.checkpoint import digest, write_atomically
from commjax.llm import checkpoints, embedded, llama2c, perplexity, texts, tokens
from commjax.llm.base import Layers, Model, Params
from commjax.pruning import model as pruning
from commjax.pruning import recipe as recipes
from commjax.pruning.recipe import Recipe, describe
from commjax.pruning.scores import Score

_BATCH = 8  # windows at a time


@dataclass(frozen=True)
class Settings:
    model: str = "topics"  # topics, stories260K, or a Hugging Face folder
    calibration: Path | None = None  # text for a folder
    text: Path | None = None  # text of the perplexity, for a folder
    samples: int = 64  # windows of calibration
    window: int = 256  # tokens
    most: int = 200  # windows of the perplexity, at most
    stories: int = (
        60  # stories260K is measured on the first so many, calibrated on those from 100 on that are not among them
    )
    sparsity: float = 0.5  # of the tables with one
    sparsities: tuple[float, ...] = (0.3, 0.4, 0.5, 0.6, 0.7)  # of `methods`
    betas: tuple[float, ...] = (1.0, 0.9, 0.5, 0.1, 0.05, 0.01)  # of `beta`
    seeds: int = 5  # of stochRIA
    # Most swaps of an output: the papers' 50, which are a hundredth of their 4096 inputs, and as many hundredths of ours.
    # `ablation` takes the first of these and of the layers.
    cycles: tuple[int, ...] = (50, 2)
    layers: tuple[Literal["attention", "all"], ...] = ("attention", "all")  # that swap; released: the attention
    tasks: tuple[str, ...] = (
        "arc_easy",
        "arc_challenge",
        "openbookqa",
        "hellaswag",
        "boolq",
        "rte",
        "winogrande",
    )  # of `zero-shot`
    limit: int | None = 200  # questions of a task
    seed: int = 0  # of the calibration windows
    out: Path = Path("results/symwanda")  # tables, figures
    progress: bool = True  # show a bar


class Task(NamedTuple):
    model: Model
    params: Params
    calibration: np.ndarray  # windows
    evaluation: np.ndarray  # windows, of other text


@cache
def load(settings: Settings) -> Task:
    """stories260K is calibrated on stories 100 to 999 and measured on the first 60, as long as `stories` does not say more."""
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
    """Perplexity after pruning (None: of the dense model)."""
    params = task.params if recipe is None else pruning.prune(task.model, task.params, task.calibration, recipe)[0]
    return perplexity.perplexity(perplexity.losses(task.model, params.outer, params.blocks, task.evaluation))


def over_seeds(task: Task, recipe: Recipe, seeds: int) -> list[float]:
    """Perplexities of `recipe` with seeds 0, 1, ...: calibration, scores and masks of all of them are one `vmap`.

    A program for every layer shape and score, and one for the block, not one for the whole model: this compiles in seconds.
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
    """The key of a layer of a block, as `pruning.prune` has it."""
    return jax.random.fold_in(jax.random.fold_in(key, at[0]), at[1])


def _pruned(recipe: Recipe, score: Score, W, stats, key):
    return jnp.where(recipes.keep(recipe, score(W, stats, key), recipe.sparsity or 0.0), W, 0)


@partial(jax.jit, static_argnums=0)
def _advance(function, blocks: Layers, h):
    """A block of every seed."""
    return jax.vmap(lambda block, h: function(block, h)[0])(blocks, h)


class Kept(NamedTuple):
    """What was computed already, on disk."""

    path: Path
    values: dict[str, Any]

    @staticmethod
    def open(settings: Settings) -> "Kept":
        """One file a model and calibration."""
        task = load(settings)
        told = digest({"c": task.calibration, "e": task.evaluation, "w": task.params})
        path = settings.out / f"{Path(settings.model).name}_{told}.json"
        return Kept(path, json.loads(path.read_text()) if path.exists() else {})

    def get(self, recipe: Recipe | None, compute: Callable[[], Any], **more: Any) -> Any:
        name = json.dumps({"recipe": None if recipe is None else describe(recipe), **more}, sort_keys=True)
        if name not in self.values:
            self.values[name] = compute()
            write_atomically(self.path, json.dumps(self.values, indent=1).encode())
        return self.values[name]
