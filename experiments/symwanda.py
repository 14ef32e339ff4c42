"""SymWanda: the tables of Chapter 6, perplexity of a pruned model, for both comparison groups.

    python -m experiments.symwanda methods       scores x sparsities (L2770)
    python -m experiments.symwanda alpha         exponent of the activations x in / out side (L2730)
    python -m experiments.symwanda beta          stochRIA with fewer sampled entries, five seeds in one vmap (L2707, L6079)
    python -m experiments.symwanda norms         RIA with l_p norms (L6031)
    python -m experiments.symwanda strategies    S1 to S4 (L6060)
    python -m experiments.symwanda patterns      N:M
    python -m experiments.symwanda fine-tuning   magnitude, Wanda, RIA with nothing, DSnoT, R^2-DSnoT (L2802)
    python -m experiments.symwanda ablation      hyperparameters of R^2-DSnoT (L6096)
    python -m experiments.symwanda heat-map      a dense weight matrix (L2761)

Models: `topics` (comes with the package), `stories260K` (from $COMMJAX_DATA), or a Hugging Face folder with --calibration and --text.
Every figure is kept in `out` as it is computed; a command that was killed goes on where it was.
"""

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import tyro

from commjax.checkpoint import digest, write_atomically
from commjax.llm import checkpoints, embedded, llama2c, perplexity, texts, tokens
from commjax.llm.base import Model, Params
from commjax.progress import progress_bar
from commjax.pruning import masks, regrow, scores, statistics
from commjax.pruning import model as pruning
from commjax.pruning.masks import Group
from commjax.pruning.recipe import Recipe, choose, describe
from experiments import plots, tables

GROUPS: tuple[Group, ...] = ("output", "layer")


@dataclass(frozen=True)
class Settings:
    model: str = "topics"  # topics, stories260K, or a Hugging Face folder
    calibration: Path | None = None  # text for a folder
    text: Path | None = None  # text of the perplexity, for a folder
    samples: int = 64  # windows of calibration
    window: int = 256  # tokens
    most: int = 200  # windows of the perplexity, at most
    sparsity: float = 0.5  # of the tables with one
    sparsities: tuple[float, ...] = (0.3, 0.4, 0.5, 0.6)  # of `methods`
    betas: tuple[float, ...] = (1.0, 0.5, 0.1, 0.05)  # of `beta`
    seeds: int = 5  # of stochRIA
    cycles: int = 2  # most swaps of an output; the 50 of the papers are as many hundredths of their 4096 inputs
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
    """stories260K is calibrated on stories 100 to 999 and measured on the first 60."""
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
        calibration = tokens.document_windows(stories[100:], encode, settings.window, *draw)
        evaluation = tokens.evaluation_windows([i for s in stories[:60] for i in encode(s)], settings.window)
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


def sampled(task: Task, recipe: Recipe) -> Callable[[jax.Array], jax.Array]:
    """nats a token as a pure function of the key of a score that samples: `jax.vmap` of it is all seeds in one program."""
    score = recipe.score.function(**recipe.score.options)
    sparsity = recipe.sparsity
    assert sparsity is not None

    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *task.params.blocks)
    ids = jnp.asarray(task.evaluation)

    def pruned(h, key, block):
        entering = task.model.block(block, h)[1]
        for i, name in enumerate(task.model.linear):
            W = block[name]["kernel"]
            S = score(W, statistics.of(entering[name]), jax.random.fold_in(key, i))
            mask = masks.unstructured(S, sparsity, recipe.group)
            block = block | {name: block[name] | {"kernel": jnp.where(mask, W, 0)}}
        return task.model.block(block, h)[0], block

    def nats(key):
        keys = jax.vmap(partial(jax.random.fold_in, key))(jnp.arange(len(task.params.blocks)))
        h = task.model.embed(task.params.outer, jnp.asarray(task.calibration))
        _, blocks = jax.lax.scan(lambda h, one: pruned(h, *one), h, (keys, stacked))
        h = task.model.embed(task.params.outer, ids)
        h, _ = jax.lax.scan(lambda h, block: (task.model.block(block, h)[0], None), h, blocks)
        logits = jax.nn.log_softmax(task.model.head(task.params.outer, h[:, :-1]).astype(jnp.float32))
        return -jnp.mean(jnp.take_along_axis(logits, ids[:, 1:, None], axis=-1))

    return nats


def over_seeds(task: Task, recipe: Recipe, seeds: int) -> list[float]:
    """Perplexities of `recipe` with seeds 0, 1, ..."""
    keys = jnp.stack([jax.random.key(seed) for seed in range(seeds)])
    return np.exp(np.asarray(jax.jit(jax.vmap(sampled(task, recipe)))(keys), np.float64)).tolist()


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


def grid(settings: Settings, recipes: dict[str, Recipe], label: str, groups: tuple[Group, ...] = GROUPS) -> list[dict]:
    """A row a recipe: perplexity in every group; N:M has one only."""
    task, kept, rows = load(settings), Kept.open(settings), []
    with progress_bar(label, len(recipes), enabled=settings.progress) as advance:
        for number, (name, recipe) in enumerate(recipes.items()):
            row: dict[str, Any] = {"name": name}
            for group in ("output",) if recipe.pattern else groups:
                one = recipe._replace(group=group)
                row[group] = kept.get(one, lambda one=one: measured(task, one))
            rows.append(row)
            advance(number + 1, {"perplexity": row["output"]})
    return rows


def dense(settings: Settings) -> float:
    task = load(settings)
    return Kept.open(settings).get(None, lambda: measured(task, None))


def report(settings: Settings, command: str, rows: list[dict], about: str) -> list[dict]:
    lines = [
        f"{Path(settings.model).name}: perplexity, {about}; dense {dense(settings):.3f}",
        f"{'':34} {'output group':>16} {'layer group':>16}",
    ]
    for row in rows:
        cells = [
            "-" if row.get(group) is None else f"{row[group]:.3f}" + (f" +- {row[f'{group}_std']:.3f}" if f"{group}_std" in row else "")
            for group in GROUPS
        ]  # fmt: skip
        lines.append(f"{row['name']:34} {cells[0]:>16} {cells[1]:>16}")
    tables.save(settings.out / f"{command}_{Path(settings.model).name}", rows, "\n".join(lines))
    return rows


SCORES = {
    "magnitude": choose(scores.magnitude),
    "Wanda": choose(scores.wanda),
    "OWanda": choose(scores.owanda),
    "SymWanda": choose(scores.symwanda),
    "symmetric": choose(scores.symmetric),
    "RI": choose(scores.ri),
    "RIA, alpha = 0.5": choose(scores.ria, alpha=0.5),
    "RIA, alpha = 1": choose(scores.ria, alpha=1.0),
}
STRATEGIES = {"S1": scores.relative, "S2": scores.relative_to_sum, "S3": scores.plain, "S4": scores.harmonic}


def methods(settings: Settings) -> list[dict]:
    """Table L2770, and a figure: every score at several sparsities."""
    rows = []
    for sparsity in settings.sparsities:
        recipes = {f"{name}, {100 * sparsity:g} %": Recipe(sparsity, score=score) for name, score in SCORES.items()}
        rows += [{"sparsity": sparsity} | row for row in grid(settings, recipes, f"{100 * sparsity:g} %")]
    figure, axes = plt.subplots(1, 2, figsize=(6.4, 2.6), layout="constrained", sharey=True)
    for axis, group in zip(axes, GROUPS):
        for number, name in enumerate(SCORES):
            axis.semilogy([100 * s for s in settings.sparsities], [row[group] for row in rows if row["name"].startswith(f"{name}, ") and row["name"].count(",") == name.count(",") + 1],
                          "o-", markersize=2.5, linewidth=1, color=f"C{number}", label=name)  # fmt: skip
        axis.axhline(dense(settings), color="grey", linestyle=":", linewidth=1, label="dense")
        axis.set_xlabel("sparsity, %")
        axis.set_title(f"{Path(settings.model).name}, {group} group")
    axes[0].set_ylabel("perplexity")
    axes[0].legend(fontsize=6)
    plots.save(figure, settings.out / f"methods_{Path(settings.model).name}.png")
    return report(settings, "methods", rows, "scores and sparsities")


def alpha(settings: Settings) -> list[dict]:
    """Table L2730: |X|^alpha on Wanda, on the in side, the out side, and both."""
    recipes = {}
    for value in (0.0, 0.5, 1.0, 2.0):
        recipes[f"Wanda, alpha = {value:g}"] = Recipe(settings.sparsity, score=choose(scores.wanda, alpha=value))
        for axes in (("in",), ("out",), ("in", "out")):
            choice = choose(scores.ria, alpha=value, axes=axes)
            recipes[f"RIA {' and '.join(axes)}, alpha = {value:g}"] = Recipe(settings.sparsity, score=choice)
    return report(settings, "alpha", grid(settings, recipes, "alpha"), f"{100 * settings.sparsity:g} %")


def beta(settings: Settings) -> list[dict]:
    """Tables L2707 and L6079: stochRIA at alpha = 1, independent and shared sets, mean and deviation over seeds."""
    task, kept = load(settings), Kept.open(settings)
    rows = grid(settings, {"RIA": Recipe(settings.sparsity, score=choose(scores.ria, alpha=1.0))}, "RIA")
    pairs = [(value, shared) for value in settings.betas for shared in (False, True)]
    with progress_bar("beta", len(pairs), enabled=settings.progress) as advance:
        for number, (value, shared) in enumerate(pairs):
            row: dict[str, Any] = {"name": f"beta = {value:g}{', shared sets' if shared else ''}"}
            for group in GROUPS:
                recipe = Recipe(
                    settings.sparsity, score=choose(scores.stoch_ria, beta=value, shared=shared), group=group
                )
                found = kept.get(
                    recipe, lambda recipe=recipe: over_seeds(task, recipe, settings.seeds), seeds=settings.seeds
                )
                row |= {group: float(np.mean(found)), f"{group}_std": float(np.std(found, ddof=1)) if len(found) > 1 else 0.0}  # fmt: skip
            rows.append(row)
            advance(number + 1, {"perplexity": row["output"]})
    return report(settings, "beta", rows, f"{100 * settings.sparsity:g} %, {settings.seeds} seeds")


def norms(settings: Settings) -> list[dict]:
    """Table L6031: l_p norms at alpha = 1."""
    recipes = {
        f"p = {p:g}": Recipe(settings.sparsity, score=choose(scores.ria, alpha=1.0, p=p))
        for p in (0.0, 1.0, 2.0, 3.0, 4.0, math.inf)
    }
    return report(settings, "norms", grid(settings, recipes, "norms"), f"{100 * settings.sparsity:g} %, alpha = 1")


def strategies(settings: Settings) -> list[dict]:
    """Table L6060: S1 to S4 at alpha = 0.5, p = 1."""
    recipes = {
        name: Recipe(settings.sparsity, score=choose(scores.ria, alpha=0.5, join=join))
        for name, join in STRATEGIES.items()
    }
    return report(
        settings, "strategies", grid(settings, recipes, "S1-S4"), f"{100 * settings.sparsity:g} %, alpha = 0.5"
    )


def patterns(settings: Settings) -> list[dict]:
    """N of every M inputs kept, where M divides the inputs of every layer."""
    model = load(settings).model
    inputs = [model.block_shapes[name]["kernel"][0] for name in model.linear]
    recipes = {
        f"{name}, {n}:{m}": Recipe(pattern=(n, m), score=score)
        for n, m in ((2, 4), (4, 8))
        if all(size % m == 0 for size in inputs)
        for name, score in SCORES.items()
    }
    return report(settings, "patterns", grid(settings, recipes, "N:M"), "N:M")


BASES = {"magnitude": SCORES["magnitude"], "Wanda": SCORES["Wanda"], "RIA": SCORES["RIA, alpha = 0.5"]}
SWAPS = {"": None, " + DSnoT": regrow.dsnot, " + R^2-DSnoT": regrow.r2_dsnot}
EVERYWHERE = ("",)  # all linear layers, where the released DSnoT swaps in the attention only


def swapped(settings: Settings) -> dict[str, Recipe]:
    """Every base with every kind of swaps."""
    recipes = {}
    for base, score in BASES.items():
        for name, function in SWAPS.items():
            choice = None if function is None else choose(function, cycles=settings.cycles)
            recipes[base + name] = Recipe(settings.sparsity, score=score, regrow=choice, regrow_layers=EVERYWHERE)
    return recipes


def fine_tuning(settings: Settings) -> list[dict]:
    """Table L2802 at 60 %: swaps in all layers."""
    settings = replace(settings, sparsity=0.6)
    recipes = swapped(settings)
    return report(settings, "fine_tuning", grid(settings, recipes, "fine-tuning"), f"{100 * settings.sparsity:g} %")


def ablation(settings: Settings) -> list[dict]:
    """Table L6096: one option of R^2-DSnoT at a time, on Wanda's and RIA's masks at 60 %."""
    settings = replace(settings, sparsity=0.6)
    options: dict[str, dict[str, Any]] = {
        "default": {},
        "relative prune only": {"relative_grow": False, "relative_prune": True},
        "relative grow and prune": {"relative_prune": True},
        "neither": {"relative_grow": False},
        "gamma = 1e-3, out (constant)": {"gamma_grow": 1e-3, "gamma_prune": 1e-3},
        "gamma = 1e-3, in": {"gamma_grow": 1e-3, "gamma_prune": 1e-3, "regularizer": "in"},
        "gamma = 1e-3, in, p = 1": {"gamma_grow": 1e-3, "gamma_prune": 1e-3, "regularizer": "in", "p": 1.0},
        "gamma = 1e-3, toggled": {"gamma_grow": 1e-3, "gamma_prune": 1e-3, "regularizer": "toggled"},
        "printed grow rule": {"literal": True},
    }
    recipes = {
        f"{base}, {name}": Recipe(settings.sparsity, score=BASES[base], regrow=choose(regrow.r2_dsnot, cycles=settings.cycles, **more), regrow_layers=EVERYWHERE)
        for base in ("Wanda", "RIA")
        for name, more in options.items()
    }  # fmt: skip
    return report(settings, "ablation", grid(settings, recipes, "ablation"), f"{100 * settings.sparsity:g} %")


def heat_map(settings: Settings) -> None:
    """Fig. L2761: |W| of a layer, dense, and which weights Wanda and RIA keep."""
    task = load(settings)
    name = next(name for name in task.model.linear if name.endswith(("q_proj", "fc1")))
    block = len(task.params.blocks) // 2
    W = np.abs(np.asarray(task.params.blocks[block][name]["kernel"], np.float32))
    panels = {"dense": W}
    for label, choice in (("Wanda", SCORES["Wanda"]), ("RIA", SCORES["RIA, alpha = 0.5"])):
        pruned, _ = pruning.prune(
            task.model, task.params, task.calibration, Recipe(settings.sparsity, score=choice, group="layer")
        )
        panels[f"{label}, {100 * settings.sparsity:g} %"] = np.abs(
            np.asarray(pruned.blocks[block][name]["kernel"], np.float32)
        )
    figure, axes = plt.subplots(1, 3, figsize=(6.8, 2.5), layout="constrained", sharey=True)
    for axis, (label, values) in zip(axes, panels.items()):
        image = axis.imshow(values, cmap="viridis", vmin=0, vmax=np.quantile(W, 0.995), aspect="auto", interpolation="nearest")  # fmt: skip
        axis.set_title(label)
        axis.set_xlabel("output")
        axis.grid(False)
    axes[0].set_ylabel("input")
    figure.colorbar(image, ax=axes, label=f"|weight|, block {block}, {name}")
    plots.save(figure, settings.out / f"heat_map_{Path(settings.model).name}.png")


COMMANDS = {
    "methods": methods, "alpha": alpha, "beta": beta, "norms": norms, "strategies": strategies, "patterns": patterns,
    "fine-tuning": fine_tuning, "ablation": ablation, "heat-map": heat_map,
}  # fmt: skip

if __name__ == "__main__":
    tyro.extras.subcommand_cli_from_dict(COMMANDS, config=(tyro.conf.OmitArgPrefixes,))
