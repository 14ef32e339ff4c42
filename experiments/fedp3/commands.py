"""FedP3 on networks (Chapter 4 of the thesis). Each sub-command makes one figure or table.

    python -m experiments.fedp3 counts                      parameters and bits of every kind of client; seconds
    python -m experiments.fedp3 layers --task fashion       FedAvg, OPU3, OPU2, LowerB (left of Fig. 4.2)
    python -m experiments.fedp3 ratio --task fashion        keep ratios of server-to-client pruning (Fig. 4.3)
    python -m experiments.fedp3 local --task fashion        local pruning: fixed, uniform, ordered dropout (Table 4.2)
    python -m experiments.fedp3 aggregation --task fashion  simple, weighted, attention (Fig. 4.4)
    python -m experiments.fedp3 baselines --task fashion    FedCR and other methods (right of Fig. 4.2)
    python -m experiments.fedp3 resnet --task cifar10 --model resnet    blocks left out of ResNet-18 (Table 4.1)
    python -m experiments.fedp3 tables --task fashion       all tables of Fashion-MNIST in one file
    python -m experiments.fedp3 privacy                     LDP-FedP3: accuracy against epsilon and bits
    python -m experiments.fedp3 audit                       the attacks on LDP-FedP3 alone
    python -m experiments.fedp3 theory                      the theorems as numbers

`counts` trains nothing. In the thesis's OPU3 a client has only one pruned layer. `ratio` and `local` with
`--trained 1 --others masked` (LowerB, which prunes the layers that a client does not train in every step) show more of
the effect of pruning; `tables` includes both.

`--task digits` is embedded; the other data sets are read from $COMMJAX_DATA. To resume a killed command, give it again.
Runs that two commands share are computed once. `experiments.fedp3.privacy` has more on theory and privacy.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

from commjax.core.files import write_atomically
from commjax.models import resnet
from experiments import plots, tables
from experiments.fedp3 import counts
from experiments.fedp3 import privacy as fedp3_privacy
from experiments.fedp3.runs import measure
from experiments.fedp3.task import Run, Settings

FEDAVG = Run("FedAvg", "fedavg", keep=1.0)
# Fashion-MNIST, (S1, S2), from Table 4.2 of the thesis. The figures of the thesis have no numbers.
THESIS_LOCAL = {
    "Fixed, keep 0.9": ("81.75", "84.27"),
    "Uniform, keep 0.9": ("78.81", "77.24"),
    "Ordered, keep 0.9": ("75.45", "73.27"),
    "Uniform, keep 0.7": ("72.66", "70.37"),
    "Ordered, keep 0.7": ("70.21", "67.58"),
}

# Table 4.1 of the thesis, where the network has its full width.
THESIS_RESNET = {"Full": "73.25", "-B2-B3 (full)": "65.68", "-B2 (part)": "72.09", "-B3 (part)": "73.47"}


def layer_overlap(settings: Settings) -> list[dict]:
    """How many layers do clients have to train? (Left of Fig. 4.2.)"""
    runs = [FEDAVG]
    runs += [
        Run(name, counts=(count,), keep=settings.keep) for name, count in (("OPU3", 3), ("OPU2", 2), ("LowerB", 1))
    ]
    rows = measure(runs, settings)
    report("layers", rows, settings)
    return rows


def ratio(settings: Settings) -> list[dict]:
    """How much of the layers that they do not train must clients be sent? (Fig. 4.3.)

    The thesis has mean drops of 5.32, 12.86 and 27.76 % at keep ratios 0.9, 0.7 and 0.5.
    """
    counts = (settings.trained,)
    rows = measure([Run(f"keep {keep:g}", counts=counts, keep=keep) for keep in (1.0, 0.9, 0.7, 0.5)], settings)
    report("ratio", rows, settings)
    return rows


def local_pruning(settings: Settings) -> list[dict]:
    """Compare three kinds of local pruning (Table 4.2). Its p is both the keep ratio and the least local ratio."""
    kinds = [(kind, keep) for keep in (0.9, 0.7) for kind in ("Fixed", "Uniform", "Ordered")]
    runs = [
        Run(f"{kind}, keep {keep:g}", counts=(settings.trained,), keep=keep, local=kind.lower(), low=keep)
        for kind, keep in kinds
    ]
    rows = measure(runs, settings)
    beside = {
        (name, split): both[at]
        for name, both in THESIS_LOCAL.items()
        for at, split in enumerate(("class", "dirichlet"))
    }
    report("local", rows, settings, beside if settings.task == "fashion" else None)
    return rows


def aggregation(settings: Settings) -> list[dict]:
    """Compare three ways to aggregate layers, for OPU1-2-3 and OPU2-3 (Fig. 4.4)."""
    runs = [
        Run(f"{short}, {rule}", counts=counts, keep=settings.keep, aggregate=rule)
        for short, counts in (("OPU1-2-3", (1, 2, 3)), ("OPU2-3", (2, 3)))
        for rule in ("simple", "weighted", "attention")
    ]
    rows = measure(runs, settings)
    report("aggregation", rows, settings)
    return rows


def baselines(settings: Settings) -> list[dict]:
    """Compare FedP3 with other methods by the model that each client deploys (right of Fig. 4.2).

    The model is the global one, a personal model (Ditto), a personal head (FedCR), or one trained without the others.
    """
    runs = [
        FEDAVG,
        Run("FedProx", "fedprox", keep=1.0),
        Run("OPU3", counts=(3,), keep=settings.keep),
        Run("FjORD-style", keep=1.0, local="fjord", low=0.5),
        Run("HeteroFL-style", keep=1.0, local="heterofl", low=0.5),
        Run("Ditto", "ditto", keep=1.0),
        Run("FedCR", "fedcr", keep=1.0),
        Run("FedCR-OPU3", "fedcr_layers", counts=(3,), keep=settings.keep),
    ]
    rows = measure(runs, settings, local_only=True)
    report("baselines", rows, settings)
    return rows


def resnet_blocks(settings: Settings) -> list[dict]:
    """Leave blocks of ResNet-18 out, on the class-wise split (Table 4.1)."""
    if settings.model != "resnet":
        raise ValueError(f"model={settings.model!r}; allowed: 'resnet'")
    settings = replace(settings, splits=("class",))
    rows = measure([Run(name, variant=name, keep=settings.keep) for name in resnet.VARIANTS], settings)
    report("resnet", rows, settings, {(name, "class"): figure for name, figure in THESIS_RESNET.items()})
    return rows


def all_tables(settings: Settings) -> None:
    """Write every table of Fashion-MNIST as text into one Markdown file."""
    parts = [("layers", 3, "frozen"), ("ratio", 3, "frozen"), ("local", 3, "frozen"), ("aggregation", 3, "frozen")]
    parts += [("ratio", 1, "masked"), ("local", 1, "masked"), ("baselines", 3, "frozen")]
    lines = [
        "# FedP3: tables",
        "",
        "Made by `python -m experiments.fedp3 tables`; nothing here is written by hand.",
        "",
    ]
    for name, trained, others in parts:
        part = replace(settings, trained=trained, others=others)
        COMMANDS[name](part)
        option = "" if trained == 3 else f" --trained {trained} --others {others}"
        text = stem_of(name, part).with_suffix(".txt").read_text()
        lines += [f"## {name}{option}", "", "```", text.rstrip(), "```", ""]
    write_atomically(settings.out / "fedp3.md", "\n".join(lines).encode())


def _lines(rows: list[dict], settings: Settings, thesis: dict[tuple[str, str], str] | None) -> list[str]:
    some = f", {settings.rows} rows" if settings.rows else ""
    lines = [
        f"{settings.task}{some}, {settings.model} of width {settings.width}, {settings.clients} clients, "
        f"{settings.cohort} a round, {settings.rounds} rounds of {settings.steps} steps; "
        f"layers not trained: {settings.others}",
        "accuracy (%) of the global model, and mean over clients of that of local models (F23); "
        f"mean +- deviation of {settings.seeds} seeds, each with a plan of its own",
        "kbit of a client a round, mean +- deviation, and [in expectation over plans]",
        f"{'split':10} {'run':20} {'global':>14} {'local':>14} {'kbit up':>27} {'kbit down':>27}"
        + ("  thesis" if thesis else ""),
    ]
    for r in rows:
        local = f"{r['local']:6.2f} +- {r['local std']:4.2f}" if np.isfinite(r["local"]) else ""
        up, down = (
            f"{r[way] / 1e3:8.1f} +- {r[f'{way} std'] / 1e3:5.1f} [{r[f'{way} expected'] / 1e3:7.1f}]"
            for way in ("up", "down")
        )
        beside = "" if not thesis else f"  {thesis.get((r['name'], r['split']), '')}"
        lines.append(
            f"{r['split']:10} {r['name']:20} {r['accuracy']:6.2f} +- {r['std']:4.2f} {local:>14} "
            f"{up:>27} {down:>27}{beside}"
        )
    return lines


def report(name: str, rows: list[dict], settings: Settings, thesis: dict[tuple[str, str], str] | None = None) -> None:
    """Write a table as text and JSON, and a bar chart of the accuracies.

    Args:
        name: Name of the table, part of the file names.
        rows: The rows, as `runs.measure` returns them.
        settings: Settings of the runs.
        thesis: The thesis's figure for (name of the row, split), shown in a column.
    """
    lines = _lines(rows, settings, thesis)
    names = list(dict.fromkeys(row["name"] for row in rows))
    figure, axes = plt.subplots(figsize=(max(3.4, 0.55 * len(names)), 2.6), layout="constrained")
    for number, split in enumerate(settings.splits):
        of_split = {row["name"]: row for row in rows if row["split"] == split}
        at = np.arange(len(names)) + 0.38 * (number - (len(settings.splits) - 1) / 2)
        axes.bar(
            at,
            [of_split[run]["accuracy"] for run in names],
            0.36,
            yerr=[of_split[run]["std"] for run in names],
            capsize=2,
            label={"class": "S1: class-wise", "dirichlet": "S2: Dirichlet"}[split],
            color=("#0072B2", "#E69F00")[number % 2],
        )
    axes.set_xticks(np.arange(len(names)), names, rotation=30, ha="right")
    axes.set_ylabel("test accuracy, %")
    axes.set_ylim(bottom=max(0.0, np.nanmin([row["accuracy"] for row in rows]) - 12))
    axes.set_title(f"{settings.task}, {settings.model}")
    axes.legend(loc="upper right", frameon=True)
    stem = stem_of(name, settings)
    plots.save(figure, stem.with_name(stem.name + ".png"))
    tables.save(stem, rows, "\n".join(lines))


def stem_of(name: str, settings: Settings) -> Path:
    """Return the path of the files of a table, without suffix."""
    changed = f"_opu{settings.trained}" * (name in ("ratio", "local") and settings.trained != 3)
    changed += f"_{settings.others}" * (settings.others != "frozen")
    return settings.out / f"{name}_{settings.task}_{settings.model}{changed}"


COMMANDS: dict[str, Callable] = {
    "layers": layer_overlap,
    "ratio": ratio,
    "local": local_pruning,
    "aggregation": aggregation,
    "baselines": baselines,
    "resnet": resnet_blocks,
    "counts": counts.parameter_counts,
    "tables": all_tables,
    "privacy": fedp3_privacy.curve,
    "audit": fedp3_privacy.audit,
    "theory": fedp3_privacy.theory,
}
