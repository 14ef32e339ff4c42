"""SymWanda: the tables of Chapter 6, perplexity of a pruned model, for both comparison groups.

    python -m experiments.symwanda methods       scores x sparsities (L2770)
    python -m experiments.symwanda alpha         exponent of the activations x in / out side (L2730)
    python -m experiments.symwanda beta          stochRIA with fewer sampled entries, five seeds in one vmap (L2707, L6079)
    python -m experiments.symwanda norms         RIA with l_p norms (L6031)
    python -m experiments.symwanda strategies    S1 to S4 (L6060)
    python -m experiments.symwanda patterns      N:M
    python -m experiments.symwanda fine-tuning   magnitude, Wanda, RIA with nothing, DSnoT, R^2-DSnoT x swaps x layers (L2802)
    python -m experiments.symwanda ablation      hyperparameters of R^2-DSnoT (L6096)
    python -m experiments.symwanda heat-map      a dense weight matrix (L2761)
    python -m experiments.symwanda zero-shot     accuracy on local task files, dense and pruned, by lm-eval (L2825)

Models: `topics` (comes with the package), `stories260K` (from $COMMJAX_DATA), or a Hugging Face folder with --calibration and --text.
Every figure is kept in `out` as it is computed; a command that was killed goes on where it was.
"""

import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from commjax.core.progress import progress_bar
from commjax.pruning import model as pruning
from commjax.pruning import regrow, scores
from commjax.pruning.masks import Group
from commjax.pruning.recipe import Recipe, choose
from experiments import plots, tables
from experiments.symwanda.task import Kept, Settings, load, measured, over_seeds
from experiments.symwanda.zeroshot import zero_shot

GROUPS: tuple[Group, ...] = ("output", "layer")


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
        f"{'':38} {'output group':>16} {'layer group':>16}",
    ]
    for row in rows:
        cells = [
            "-"
            if row.get(group) is None
            else f"{row[group]:.3f}" + (f" +- {row[f'{group}_std']:.3f}" if f"{group}_std" in row else "")
            for group in GROUPS
        ]
        lines.append(f"{row['name']:38} {cells[0]:>16} {cells[1]:>16}")
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
            axis.semilogy(
                [100 * s for s in settings.sparsities],
                [
                    row[group]
                    for row in rows
                    if row["name"].startswith(f"{name}, ") and row["name"].count(",") == name.count(",") + 1
                ],
                "o-",
                markersize=2.5,
                linewidth=1,
                color=f"C{number}",
                label=name,
            )
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


def drawn(settings: Settings, name: str, recipe: Recipe) -> dict[str, Any]:
    """A row of a score that samples: mean and deviation over seeds."""
    task, kept = load(settings), Kept.open(settings)
    row: dict[str, Any] = {"name": name}
    for group in ("output",) if recipe.pattern else GROUPS:
        one = recipe._replace(group=group)
        found = kept.get(one, lambda one=one: over_seeds(task, one, settings.seeds), seeds=settings.seeds)
        row |= {group: float(np.mean(found)), f"{group}_std": float(np.std(found, ddof=1)) if len(found) > 1 else 0.0}
    return row


def beta(settings: Settings) -> list[dict]:
    """Tables L2707 and L6079: stochRIA at alpha = 1, independent and shared sets, mean and deviation over seeds."""
    rows = grid(settings, {"RIA": Recipe(settings.sparsity, score=choose(scores.ria, alpha=1.0))}, "RIA")
    pairs = [(value, shared) for value in settings.betas for shared in (False, True)]
    with progress_bar("beta", len(pairs), enabled=settings.progress) as advance:
        for number, (value, shared) in enumerate(pairs):
            recipe = Recipe(settings.sparsity, score=choose(scores.stoch_ria, beta=value, shared=shared))
            rows.append(drawn(settings, f"beta = {value:g}{', shared sets' if shared else ''}", recipe))
            advance(number + 1, {"perplexity": rows[-1]["output"]})
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
    """Table L2707: N of every M inputs kept, where M divides the inputs of every layer; stochRIA with beta = 0.1 over seeds."""
    model = load(settings).model
    inputs = [model.block_shapes[name]["kernel"][0] for name in model.linear]
    fitting = [(n, m) for n, m in ((2, 4), (4, 8)) if all(size % m == 0 for size in inputs)]
    recipes = {
        f"{name}, {n}:{m}": Recipe(pattern=(n, m), score=score) for n, m in fitting for name, score in SCORES.items()
    }
    rows = grid(settings, recipes, "N:M")
    for n, m in fitting:
        rows.append(drawn(settings, f"stochRIA, {n}:{m}", Recipe(pattern=(n, m), score=choose(scores.stoch_ria))))
    return report(settings, "patterns", rows, f"N:M, {settings.seeds} seeds of stochRIA")


BASES = {"magnitude": SCORES["magnitude"], "Wanda": SCORES["Wanda"], "RIA": SCORES["RIA, alpha = 0.5"]}
# R^2-DSnoT as the ablation's best rows have it, their base names swapped back (W15d).
R2 = {
    "magnitude": {},
    "Wanda": {"relative_grow": False, "relative_prune": True, "gamma_prune": 1e-3},
    "RIA": {"relative_grow": True, "relative_prune": False, "gamma_prune": 1e-4},
}
LAYERS = {
    "attention": ("self_attn.",),
    "all": ("",),
}  # beginnings of names; the released DSnoT swaps in the attention only


def r2_dsnot(settings: Settings, base: str, cycles: int, layers: str, **changes: Any) -> Recipe:
    choice = choose(regrow.r2_dsnot, cycles=cycles, **(R2[base] | changes))
    return Recipe(settings.sparsity, score=BASES[base], regrow=choice, regrow_layers=LAYERS[layers])


def swapped(settings: Settings) -> dict[str, Recipe]:
    """Every base with nothing, DSnoT and R^2-DSnoT, for every number of swaps and choice of layers."""
    recipes = {}
    for base, score in BASES.items():
        recipes[base] = Recipe(settings.sparsity, score=score)
        for cycles, layers in product(settings.cycles, settings.layers):
            r2 = r2_dsnot(settings, base, cycles, layers)
            recipes[f"{base} + DSnoT, {cycles}, {layers}"] = r2._replace(regrow=choose(regrow.dsnot, cycles=cycles))
            recipes[f"{base} + R^2-DSnoT, {cycles}, {layers}"] = r2
    return recipes


def fine_tuning(settings: Settings) -> list[dict]:
    """Table L2802 at 60 %: at most 50 swaps an output in the attention (the thesis's and the released setting), and others."""
    settings = replace(settings, sparsity=0.6)
    about = f"{100 * settings.sparsity:g} %; most swaps of an output, layers that swap"
    return report(settings, "fine_tuning", grid(settings, swapped(settings), "fine-tuning"), about)


def ablation(settings: Settings) -> list[dict]:
    """Table L6096: one option of R^2-DSnoT changed at a time, on Wanda's and RIA's masks at 60 %."""
    settings = replace(settings, sparsity=0.6)
    cycles, layers = settings.cycles[0], settings.layers[0]
    options: dict[str, dict[str, Any]] = {
        "best": {},
        "p = 1": {"p": 1.0},
        "p = inf": {"p": math.inf},
        "gamma_prune = 0": {"gamma_prune": 0.0},
        "gamma_prune = 1e-4": {"gamma_prune": 1e-4},
        "gamma_prune = 1e-3": {"gamma_prune": 1e-3},
        "neither relative": {"relative_grow": False, "relative_prune": False},
        "relative grow only": {"relative_grow": True, "relative_prune": False},
        "relative prune only": {"relative_grow": False, "relative_prune": True},
        "relative grow and prune": {"relative_grow": True, "relative_prune": True},
        # Printed, the regulariser is one number an output and changes nothing (W5); these vary within an output.
        "regularizer in": {"regularizer": "in"},
        "regularizer in, p = 1": {"regularizer": "in", "p": 1.0},
        "regularizer in, p = inf": {"regularizer": "in", "p": math.inf},
        "regularizer toggled": {"regularizer": "toggled"},
        "printed grow rule": {"literal": True},
    }
    recipes = {
        f"{base}, {name}": r2_dsnot(settings, base, cycles, layers, **more)
        for base in ("Wanda", "RIA")
        for name, more in options.items()
    }
    about = f"{100 * settings.sparsity:g} %, {cycles} swaps at most, layers: {layers}"
    return report(settings, "ablation", grid(settings, recipes, "ablation"), about)


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
        image = axis.imshow(
            values, cmap="viridis", vmin=0, vmax=np.quantile(W, 0.995), aspect="auto", interpolation="nearest"
        )
        axis.set_title(label)
        axis.set_xlabel("output")
        axis.grid(False)
    axes[0].set_ylabel("input")
    figure.colorbar(image, ax=axes, label=f"|weight|, block {block}, {name}")
    plots.save(figure, settings.out / f"heat_map_{Path(settings.model).name}.png")


COMMANDS = {
    "methods": methods,
    "alpha": alpha,
    "beta": beta,
    "norms": norms,
    "strategies": strategies,
    "patterns": patterns,
    "fine-tuning": fine_tuning,
    "ablation": ablation,
    "heat-map": heat_map,
    "zero-shot": zero_shot,
}
