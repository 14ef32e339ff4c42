"""What pruning costs beside the forward passes that it needs.

    python -m experiments.bench.stream                    a random Llama of 13 M parameters, 64 windows of 256 tokens
    python -m experiments.bench.stream --model FILE.bin   a llama2.c model instead

Calibration runs every block twice: dense, to see what enters its layers, and pruned, to see what leaves it.  Those two passes alone
are one side; `model.prune` (statistics, scores, masks, reconstruction errors) and `stream.prune_folder` (the same from disk to disk,
with its checks) are the other.  All sides take turns in one process; compilation comes before.
"""

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np
import tyro

from commjax import llm
from commjax.llm import Config, llama2c
from commjax.pruning import model as in_memory
from commjax.pruning import regrow, scores, stream
from commjax.pruning.recipe import Recipe, choose


@dataclass(frozen=True)
class Settings:
    model: Path | None = None  # a llama2.c file
    hidden: int = 512  # of the random model
    inner: int = 1376
    blocks: int = 4
    samples: int = 64  # calibration windows; papers take 128 of 2048 tokens
    window: int = 256
    batch_size: int = 8
    repeats: int = 5  # the median counts


def random_model(settings: Settings):
    config = Config("llama", vocab_size=512, hidden_size=settings.hidden, intermediate_size=settings.inner, num_hidden_layers=settings.blocks,
                    num_attention_heads=8, num_key_value_heads=4, head_dim=settings.hidden // 8, max_position_embeddings=settings.window)  # fmt: skip
    model = llm.model(config)
    return model, llm.init(jax.random.key(0), model)


def two_passes(model, params, windows, batch_size) -> None:
    """Every block twice over all windows, and nothing else."""
    hidden = in_memory.embed(model, params.outer, windows, batch_size)
    for block in params.blocks:
        twice = [h.copy() for h in hidden]
        in_memory.advance(model, block, twice)
        in_memory.advance(model, block, hidden)
    jax.block_until_ready(hidden)


def main(settings: Settings) -> None:
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

        def streamed(recipe, number):
            out = f"{folder}/out{number}"
            stream.prune_folder(
                f"{folder}/source", out, windows, recipe, batch_size=settings.batch_size, progress=False
            )

        sides = {"the two passes alone": lambda number: two_passes(model, params, windows, settings.batch_size)}
        for name, recipe in recipes.items():
            sides[f"in memory: {name}"] = lambda number, recipe=recipe: jax.block_until_ready(
                in_memory.prune(model, params, windows, recipe, batch_size=settings.batch_size)[0]
            )
        first = recipes["RIA, 50 % of an output"]
        sides["from disk to disk: RIA, 50 % of an output"] = lambda number: streamed(first, number)
        seconds = {name: [] for name in sides}
        for repeat in range(1 + settings.repeats):  # the first compiles
            for name, run in sides.items():
                begin = time.perf_counter()
                run(repeat)
                seconds[name].append(time.perf_counter() - begin)
    print(f"{weights / 1e6:.1f} M parameters, {shape[0]} windows of {shape[1]} tokens, jax {jax.__version__}")
    base = float(np.median(seconds["the two passes alone"][1:]))
    for name, measured in seconds.items():
        median = float(np.median(measured[1:]))
        goal = "" if name.startswith("the two") else f"   {median / base:5.2f} x (goal: at most 1.3)"
        print(f"  {name:44s} {median:7.3f} s{goal}")


if __name__ == "__main__":
    main(tyro.cli(Settings))
