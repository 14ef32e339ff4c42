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

from commjax.checkpoint import digest, write_atomically
from commjax.llm import checkpoints, embedded, llama2c, perplexity, texts, tokens
from commjax.llm.base import Model, Params
from commjax.pruning import model as pruning
from commjax.pruning import recipe as recipes
from commjax.pruning import statistics
from commjax.pruning.recipe import Recipe, describe


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
        calibration = texts.calibration(settings.model, settings.calibration, samples=settings.samples, length=settings.window, seed=settings.seed)  # fmt: skip
        evaluation = tokens.evaluation_windows(encode("\n\n".join(texts.documents(settings.text))), settings.window)
    return Task(model, params, calibration, evaluation[: settings.most])


def measured(task: Task, recipe: Recipe | None) -> float:
    """Perplexity after pruning (None: of the dense model)."""
    params = task.params if recipe is None else pruning.prune(task.model, task.params, task.calibration, recipe)[0]
    return perplexity.perplexity(perplexity.losses(task.model, params.outer, params.blocks, task.evaluation))


def sampled(model: Model, recipe: Recipe) -> Callable[..., jax.Array]:
    """nats a token as a pure function of model, windows and the key of a score that samples: a `vmap` of it is all seeds in one program."""
    score = recipe.score.function(**recipe.score.options)
    sparsity = recipe.sparsity or 0.0  # with a pattern it is not asked for

    def pruned(h, key, block):
        entering = model.block(block, h)[1]
        for i, name in enumerate(model.linear):
            W = block[name]["kernel"]
            S = score(W, statistics.of(entering[name]), jax.random.fold_in(key, i))
            mask = recipes.keep(recipe, S, sparsity)
            block = block | {name: block[name] | {"kernel": jnp.where(mask, W, 0)}}
        return model.block(block, h)[0], block

    def nats(outer, stacked, calibration, evaluation, key):
        keys = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(model.config.num_hidden_layers))
        h = model.embed(outer, calibration)
        _, blocks = jax.lax.scan(lambda h, one: pruned(h, *one), h, (keys, stacked))

        def of_window(window):  # one at a time: the logits of all windows and seeds at once would be gigabytes
            h = model.embed(outer, window[None])
            h, _ = jax.lax.scan(lambda h, block: (model.block(block, h)[0], None), h, blocks)
            logits = jax.nn.log_softmax(model.head(outer, h[:, :-1]).astype(jnp.float32))
            return -jnp.mean(jnp.take_along_axis(logits, window[None, 1:, None], axis=-1))

        return jnp.mean(jax.lax.map(of_window, evaluation))

    return nats


def over_seeds(task: Task, recipe: Recipe, seeds: int) -> list[float]:
    """Perplexities of `recipe` with seeds 0, 1, ..."""
    keys = jnp.stack([jax.random.key(seed) for seed in range(seeds)])
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *task.params.blocks)
    # Arguments, because XLA would fold what is closed over.
    data = task.params.outer, stacked, jnp.asarray(task.calibration), jnp.asarray(task.evaluation)
    run = jax.jit(jax.vmap(sampled(task.model, recipe), in_axes=(None, None, None, None, 0)))
    return np.exp(np.asarray(run(*data, keys), np.float64)).tolist()


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
