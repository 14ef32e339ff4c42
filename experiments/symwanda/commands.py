"""SymWanda: the tables of Chapter 6 of the thesis, perplexity of pruned models for both comparison groups.

    python -m experiments.symwanda methods       scores x sparsities (Table 6.4)
    python -m experiments.symwanda alpha         exponent of the activations x in / out side (Table 6.3)
    python -m experiments.symwanda beta          stochRIA with fewer sampled entries, five seeds (Tables 6.2, E.3)
    python -m experiments.symwanda norms         RIA with l_p norms (Table E.1)
    python -m experiments.symwanda strategies    S1 to S4 (Table E.2)
    python -m experiments.symwanda patterns      N:M (Table 6.2)
    python -m experiments.symwanda fine-tuning   magnitude, Wanda, RIA with nothing, DSnoT, R^2-DSnoT (Table 6.5)
    python -m experiments.symwanda ablation      hyperparameters of R^2-DSnoT (Table E.4)
    python -m experiments.symwanda heat-map      a dense weight matrix (Fig. 6.1)
    python -m experiments.symwanda zero-shot     accuracy of dense and pruned models on local task files (Table 6.6)

Models: `topics` (comes with the package), `stories260K` (from $COMMJAX_DATA), or a Hugging Face folder with
--calibration and --text. Every number is saved in `out` as soon as it is computed. To resume a killed command, give it
again.
"""

import math
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from commjax.core.progress import progress_bar
from commjax.pruning import model as pruning
from commjax.pruning import regrow, scores
from commjax.pruning.masks import Group
from commjax.pruning.recipe import Recipe, choose
from experiments import tables
from experiments.symwanda import figures
from experiments.symwanda.figures import GROUPS
from experiments.symwanda.task import Kept, Settings, load, measured, over_seeds
from experiments.symwanda.zeroshot import zero_shot


def grid(settings: Settings, recipes: dict[str, Recipe], label: str, groups: tuple[Group, ...] = GROUPS) -> list[dict]:
    """Measure the perplexity of every recipe in every comparison group.

    Args:
        settings: Settings of the table.
        recipes: Name of a row -> recipe.
        label: Label of the progress bar.
        groups: Comparison groups. A recipe with an N:M pattern is measured in the group "output" only.

    Returns:
        One row per recipe: its name, and the perplexity by group.
    """
    task, kept, rows = load(settings), Kept.open(settings), []
    with progress_bar(label, len(recipes), enabled=settings.progress) as advance:
        for number, (name, recipe) in enumerate(recipes.items()):
            row: dict[str, Any] = {"name": name}
            for group in ("output",) if recipe.pattern else groups:
                grouped = recipe._replace(group=group)
                row[group] = kept.get(grouped, lambda grouped=grouped: measured(task, grouped))
            rows.append(row)
            advance(number + 1, {"perplexity": row["output"]})
    return rows


def dense(settings: Settings) -> float:
    """Return the perplexity of the dense model."""
    task = load(settings)
    return Kept.open(settings).get(None, lambda: measured(task, None))


def report(settings: Settings, command: str, rows: list[dict], about: str) -> list[dict]:
    """Write the rows as a table, with the perplexity of the dense model, and return them.

    Args:
        settings: Settings of the table.
        command: Name of the sub-command, part of the file names.
        rows: The rows, as `grid` returns them.
        about: Text for the heading.
    """
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
    """Compare all scores at several sparsities (Table 6.4), and draw a figure."""
    rows = []
    for sparsity in settings.sparsities:
        recipes = {f"{name}, {100 * sparsity:g} %": Recipe(sparsity, score=score) for name, score in SCORES.items()}
        rows += [{"sparsity": sparsity} | row for row in grid(settings, recipes, f"{100 * sparsity:g} %")]
    figures.methods(settings, rows, list(SCORES), dense(settings))
    return report(settings, "methods", rows, "scores and sparsities")


def alpha(settings: Settings) -> list[dict]:
    """Vary the exponent in |X|^alpha, for Wanda and for RIA on the in side, the out side and both (Table 6.3)."""
    recipes = {}
    for value in (0.0, 0.5, 1.0, 2.0):
        recipes[f"Wanda, alpha = {value:g}"] = Recipe(settings.sparsity, score=choose(scores.wanda, alpha=value))
        for axes in (("in",), ("out",), ("in", "out")):
            choice = choose(scores.ria, alpha=value, axes=axes)
            recipes[f"RIA {' and '.join(axes)}, alpha = {value:g}"] = Recipe(settings.sparsity, score=choice)
    return report(settings, "alpha", grid(settings, recipes, "alpha"), f"{100 * settings.sparsity:g} %")


def drawn(settings: Settings, name: str, recipe: Recipe) -> dict[str, Any]:
    """Return the row of a score that samples: mean and deviation of the perplexity over seeds."""
    task, kept = load(settings), Kept.open(settings)
    row: dict[str, Any] = {"name": name}
    for group in ("output",) if recipe.pattern else GROUPS:
        grouped = recipe._replace(group=group)
        values = kept.get(
            grouped, lambda grouped=grouped: over_seeds(task, grouped, settings.seeds), seeds=settings.seeds
        )
        deviation = float(np.std(values, ddof=1)) if len(values) > 1 else 0.0
        row |= {group: float(np.mean(values)), f"{group}_std": deviation}
    return row


def beta(settings: Settings) -> list[dict]:
    """Compare stochRIA at alpha = 1 for several sampling ratios (Tables 6.2 and E.3).

    Rows are measured with independent and with shared sets, as mean and deviation over seeds. All seeds are one `vmap`.
    """
    rows = grid(settings, {"RIA": Recipe(settings.sparsity, score=choose(scores.ria, alpha=1.0))}, "RIA")
    pairs = [(value, shared) for value in settings.betas for shared in (False, True)]
    with progress_bar("beta", len(pairs), enabled=settings.progress) as advance:
        for number, (value, shared) in enumerate(pairs):
            recipe = Recipe(settings.sparsity, score=choose(scores.stoch_ria, beta=value, shared=shared))
            rows.append(drawn(settings, f"beta = {value:g}{', shared sets' if shared else ''}", recipe))
            advance(number + 1, {"perplexity": rows[-1]["output"]})
    return report(settings, "beta", rows, f"{100 * settings.sparsity:g} %, {settings.seeds} seeds")


def norms(settings: Settings) -> list[dict]:
    """Compare RIA with several l_p norms at alpha = 1 (Table E.1)."""
    recipes = {
        f"p = {p:g}": Recipe(settings.sparsity, score=choose(scores.ria, alpha=1.0, p=p))
        for p in (0.0, 1.0, 2.0, 3.0, 4.0, math.inf)
    }
    return report(settings, "norms", grid(settings, recipes, "norms"), f"{100 * settings.sparsity:g} %, alpha = 1")


def strategies(settings: Settings) -> list[dict]:
    """Compare the strategies S1 to S4 at alpha = 0.5 and p = 1 (Table E.2)."""
    recipes = {
        name: Recipe(settings.sparsity, score=choose(scores.ria, alpha=0.5, join=join))
        for name, join in STRATEGIES.items()
    }
    return report(
        settings, "strategies", grid(settings, recipes, "S1-S4"), f"{100 * settings.sparsity:g} %, alpha = 0.5"
    )


def patterns(settings: Settings) -> list[dict]:
    """Keep N of every M inputs (Table 6.2), for M that divide the number of inputs of every layer.

    stochRIA has beta = 0.1 and is measured over seeds.
    """
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
# The best rows of the thesis's ablation of R^2-DSnoT. Their base names are swapped there; here they are right (W15d).
R2 = {
    "magnitude": {},
    "Wanda": {"relative_grow": False, "relative_prune": True, "gamma_prune": 1e-3},
    "RIA": {"relative_grow": True, "relative_prune": False, "gamma_prune": 1e-4},
}
# Prefixes of layer names. The released DSnoT swaps in the attention only.
LAYERS = {
    "attention": ("self_attn.",),
    "all": ("",),
}


def r2_dsnot(settings: Settings, base: str, cycles: int, layers: str, **changes: Any) -> Recipe:
    """Return the recipe of R^2-DSnoT on the mask of a base score.

    Args:
        settings: Settings of the table, for the sparsity.
        base: Name of the base score, a key of BASES.
        cycles: Most swaps of an output.
        layers: Layers that swap, a key of LAYERS.
        **changes: Options of `regrow.r2_dsnot` that differ from the best ones.
    """
    choice = choose(regrow.r2_dsnot, cycles=cycles, **(R2[base] | changes))
    return Recipe(settings.sparsity, score=BASES[base], regrow=choice, regrow_layers=LAYERS[layers])


def swapped(settings: Settings) -> dict[str, Recipe]:
    """Return recipes of every base alone, with DSnoT and with R^2-DSnoT, for all numbers of swaps and layers."""
    recipes = {}
    for base, score in BASES.items():
        recipes[base] = Recipe(settings.sparsity, score=score)
        for cycles, layers in product(settings.cycles, settings.layers):
            r2 = r2_dsnot(settings, base, cycles, layers)
            recipes[f"{base} + DSnoT, {cycles}, {layers}"] = r2._replace(regrow=choose(regrow.dsnot, cycles=cycles))
            recipes[f"{base} + R^2-DSnoT, {cycles}, {layers}"] = r2
    return recipes


def fine_tuning(settings: Settings) -> list[dict]:
    """Compare DSnoT and R^2-DSnoT with no fine-tuning at 60 % (Table 6.5).

    The setting of the thesis and of the released code is at most 50 swaps per output, in the attention. Other settings
    are measured too.
    """
    settings = replace(settings, sparsity=0.6)
    about = f"{100 * settings.sparsity:g} %; most swaps of an output, layers that swap"
    return report(settings, "fine_tuning", grid(settings, swapped(settings), "fine-tuning"), about)


def ablation(settings: Settings) -> list[dict]:
    """Change one option of R^2-DSnoT at a time, on the masks of Wanda and RIA at 60 % (Table E.4)."""
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
        # The printed regularizer is constant for an output, so it changes nothing (W5). These vary within an output.
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
    """Draw |W| of a layer (Fig. 6.1), and the weights that Wanda and RIA keep."""
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
    figures.heat_map(settings, panels, f"|weight|, block {block}, {name}")


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
