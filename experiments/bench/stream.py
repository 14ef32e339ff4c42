"""The cost of pruning besides the forward passes that it needs.

    python -m experiments.bench.stream                    a random Llama of 3 M parameters, 64 windows of 256 tokens
    python -m experiments.bench.stream --model FILE.bin   a llama2.c model instead

Calibration runs every block twice: dense, to get the inputs of its layers, and pruned, to get its output. The output of
the dense block is not needed, so XLA drops its last layer, and that pass is less than a whole one. Pruning is therefore
compared with two baselines:

    two whole passes        every block twice
    the passes needed       the dense pass without its last layer; stricter, and the one to judge by

The sides are `model.prune` (statistics, scores, masks, reconstruction errors) and `stream.prune_folder` (the same from
disk to disk, with its checks).
"""

import itertools
import tempfile
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from commjax import llm
from commjax.llm import Config, llama2c
from commjax.pruning import model as in_memory
from commjax.pruning import regrow, scores, stream
from commjax.pruning.recipe import Recipe, choose
from experiments.bench.measure import Ratio, Side, Table, command, take_turns


@dataclass(frozen=True)
class Settings:
    model: Path | None = None  # a llama2.c file; without it, a random model
    hidden: int = 256  # width of the random model
    inner: int = 688  # width of its MLP
    blocks: int = 4  # number of its blocks
    samples: int = 64  # calibration windows; papers take 128 windows of 2048 tokens
    window: int = 256  # tokens per window
    batch_size: int = 8  # windows per batch
    repeats: int = 5


QUICK = Settings(blocks=2, samples=16, repeats=3)


def random_model(settings: Settings):
    """Return a random Llama: the model and its parameters."""
    config = Config(
        "llama",
        vocab_size=512,
        hidden_size=settings.hidden,
        intermediate_size=settings.inner,
        num_hidden_layers=settings.blocks,
        num_attention_heads=8,
        num_key_value_heads=4,
        head_dim=settings.hidden // 8,
        max_position_embeddings=settings.window,
    )
    model = llm.model(config)
    return model, llm.init(jax.random.key(0), model)


@partial(jax.jit, static_argnums=0)
def entering(function, block, h):
    """Return the sums of the inputs of the layers, so that the inputs are computed and hardly read."""
    return [jnp.sum(x) for x in function(block, h)[1].values()]


def two_passes(model, params, windows, batch_size, whole: bool) -> None:
    """Run every block twice over all windows, and nothing else.

    Args:
        model: The model.
        params: Its parameters.
        windows: Token ids [windows, tokens].
        batch_size: Windows per batch.
        whole: Whether the first pass includes the last layer of the block.
    """
    hidden = in_memory.embed(model, params.outer, windows, batch_size)
    for block in params.blocks:
        if whole:
            in_memory.advance(model, block, [h.copy() for h in hidden])
        else:
            jax.block_until_ready([entering(model.block, block, h) for h in hidden])
        in_memory.advance(model, block, hidden)
    jax.block_until_ready(hidden)


def tables(settings: Settings) -> list[Table]:
    """Measure all sides."""
    model, params = random_model(settings) if settings.model is None else llama2c.read(settings.model)
    weights = sum(leaf.size for leaf in jax.tree.leaves(params))
    shape = settings.samples, settings.window
    windows = np.random.default_rng(0).integers(0, model.config.vocab_size, shape).astype(np.int32)
    recipes = {
        "RIA, 50 % of an output": Recipe(sparsity=0.5),
        "Wanda, 2:4": Recipe(pattern=(2, 4), score=choose(scores.wanda)),
        "RIA, DSnoT in attention": Recipe(sparsity=0.5, regrow=choose(regrow.dsnot)),
    }
    with tempfile.TemporaryDirectory() as folder:
        llm.save(f"{folder}/source", model, params)
        number = itertools.count()

        def streamed(recipe: Recipe) -> None:
            out = f"{folder}/out{next(number)}"
            stream.prune_folder(
                f"{folder}/source", out, windows, recipe, batch_size=settings.batch_size, progress=False
            )

        def passes(whole: bool) -> None:
            two_passes(model, params, windows, settings.batch_size, whole)

        def pruned(recipe: Recipe) -> Any:
            return in_memory.prune(model, params, windows, recipe, batch_size=settings.batch_size)[0]

        sides = {"two whole passes": Side(partial(passes, True)), "the passes needed": Side(partial(passes, False))}
        sides |= {f"in memory: {name}": Side(partial(pruned, recipe)) for name, recipe in recipes.items()}
        first = "RIA, 50 % of an output"
        sides[f"from disk to disk: {first}"] = Side(partial(streamed, recipes[first]))
        seconds = take_turns(sides, settings.repeats)
    ratios = {f"{name} / passes needed": Ratio(name, "the passes needed", 1.3) for name in sides if ":" in name}
    ratios |= {f"{name} / two passes": Ratio(name, "two whole passes", 1.3) for name in sides if ":" in name}
    return [
        Table(
            "Pruning a model",
            f"a random Llama of {weights / 1e6:.1f} million parameters, {shape[0]} windows of {shape[1]} tokens",
            "The passes needed leave out the last layer of the dense pass, whose output is not used.",
            seconds,
            ratios,
        )
    ]


if __name__ == "__main__":
    command(Settings, QUICK, tables)
