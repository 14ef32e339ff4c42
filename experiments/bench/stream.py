"""What pruning costs beside the forward passes that it needs.

    python -m experiments.bench.stream                    a random Llama of 3 M parameters, 64 windows of 256 tokens
    python -m experiments.bench.stream --model FILE.bin   a llama2.c model instead

Calibration runs every block twice: dense, to see what enters its layers, and pruned, to see what leaves it.  What leaves the dense
block nobody reads, so XLA drops its last layer: that pass is less than a whole one.  Hence two sides to compare with,

    two whole passes        every block twice
    the passes needed       the dense one without its last layer; the stricter of the two, and the one to judge by

against `model.prune` (statistics, scores, masks, reconstruction errors) and `stream.prune_folder` (the same from disk to disk, with its
checks).  All take turns in one process; compilation comes before.  Wall time, and CPU time of all threads, the least of the repeats:
on a busy machine read the CPU time.
"""

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
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
    hidden: int = 256  # of the random model
    inner: int = 688
    blocks: int = 4
    samples: int = 64  # calibration windows; papers take 128 of 2048 tokens
    window: int = 256
    batch_size: int = 8
    repeats: int = 5  # the least counts


def random_model(settings: Settings):
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
    """What enters the layers, computed in full and hardly read."""
    return [jnp.sum(x) for x in function(block, h)[1].values()]


def two_passes(model, params, windows, batch_size, whole: bool) -> None:
    """Every block twice over all windows, and nothing else."""
    hidden = in_memory.embed(model, params.outer, windows, batch_size)
    for block in params.blocks:
        if whole:
            in_memory.advance(model, block, [h.copy() for h in hidden])
        else:
            jax.block_until_ready([entering(model.block, block, h) for h in hidden])
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

        sides: dict[str, Callable[[int], Any]] = {
            name: lambda number, whole=whole: two_passes(model, params, windows, settings.batch_size, whole)
            for name, whole in (("two whole passes", True), ("the passes needed", False))
        }
        for name, recipe in recipes.items():
            sides[f"in memory: {name}"] = lambda number, recipe=recipe: jax.block_until_ready(
                in_memory.prune(model, params, windows, recipe, batch_size=settings.batch_size)[0]
            )
        first = recipes["RIA, 50 % of an output"]
        sides["from disk to disk: RIA, 50 % of an output"] = lambda number: streamed(first, number)
        seconds = {name: [] for name in sides}
        for repeat in range(1 + settings.repeats):  # the first compiles
            for name, run in sides.items():
                begin = time.perf_counter(), time.process_time()
                run(repeat)
                seconds[name].append((time.perf_counter() - begin[0], time.process_time() - begin[1]))
    load = os.getloadavg()[0]
    print(f"{weights / 1e6:.1f} M parameters, {shape[0]} windows of {shape[1]} tokens, jax {jax.__version__}")
    print(f"load of the machine {load:.1f} on {os.cpu_count()} cores; goal: at most 1.3 x the passes needed")
    least = {name: np.min(measured[1:], axis=0) for name, measured in seconds.items()}
    base = least["the passes needed"]
    for name, (wall, cpu) in least.items():
        ratios = f"{wall:7.3f} s wall {wall / base[0]:5.2f} x   {cpu:7.3f} s CPU {cpu / base[1]:5.2f} x"
        print(f"  {name:44s} {ratios}")


if __name__ == "__main__":
    main(tyro.cli(Settings))
