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

import jax
import matplotlib.pyplot as plt
import numpy as np

from commjax.algorithms import fedp3
from commjax.algorithms.fedp3 import layers, plans
from commjax.algorithms.fedp3.layers import Layers
from commjax.core.files import write_atomically
from commjax.models import layered, resnet
from experiments import plots, tables
from experiments.fedp3 import privacy as fedp3_privacy
from experiments.fedp3.plans import Run
from experiments.fedp3.report import report, stem_of
from experiments.fedp3.runs import measure
from experiments.fedp3.task import Settings

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
        Run(f"{short}, {how}", counts=counts, keep=settings.keep, aggregate=how)
        for short, counts in (("OPU1-2-3", (1, 2, 3)), ("OPU2-3", (2, 3)))
        for how in ("simple", "weighted", "attention")
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


TABLES = {
    "CIFAR10": (layered.LayeredCnn(), (32, 32, 3)),
    "CIFAR100": (layered.LayeredCnn(classes=100), (32, 32, 3)),
    "FashionMNIST": (layered.LayeredCnn(side=32), (28, 28, 1)),
    "EMNIST-L": (layered.LayeredMlp(), (28, 28, 1)),
}
PRINTED = {"CIFAR10": 10815.0, "CIFAR100": 1522.91, "FashionMNIST": 13749.46, "EMNIST-L": 30.23}


def shapes_of(module, image: tuple[int, ...]):
    """Return the shapes of the parameters of a module for images of the given shape."""
    return jax.eval_shape(module.init, jax.random.key(0), jax.numpy.ones((1, *image), jax.numpy.float32))["params"]


def lower_b_clients(names: Layers, keep: float) -> plans.Plan:
    """Plan one LowerB client for each layer except the final one."""
    return plans.plan(names, [[name, names.names[-1]] for name in names.names[:-1]], keep)


def count(name: str, keep: float) -> dict:
    """Count what the LowerB clients of one of the thesis's networks deploy and send."""
    shapes = shapes_of(*TABLES[name])
    names = layered.layers(shapes)
    plan, sizes = lower_b_clients(names, keep), layers.sizes(names, shapes)
    bits = fedp3.ledger(plan, shapes)
    return {
        "network": name,
        "keep": keep,
        "layers": dict(zip(names.names, sizes.tolist())),
        "total": int(sizes.sum()),
        "sent": plans.uplink_sizes(plan, sizes).tolist(),
        "deployed": plans.deployed_sizes(plan, sizes).tolist(),
        "kbit up": (bits["up"] / 1e3).tolist(),
        "kbit down": (bits["down"] / 1e3).tolist(),
        "spread": plans.relative_spread(plans.uplink_sizes(plan, sizes)),
        "printed": PRINTED[name],
        "deployed spread": plans.relative_spread(plans.deployed_sizes(plan, sizes)),
    }


def expected_share(sizes: np.ndarray, counts: int) -> float:
    """Return the expected share of the parameters that a client sends.

    The client sends `counts` layers, drawn uniformly from those before the final one, and the final one.

    Args:
        sizes: Parameters of each layer, the final layer last.
        counts: Number of drawn layers.
    """
    return float((counts / (len(sizes) - 1) * sizes[:-1].sum() + sizes[-1]) / sizes.sum())


def parameter_counts(settings: Settings) -> list[dict]:
    """Make Fig. C.1 and check the percentages of Sec. 4.4.2 and C.2.5 of the thesis (errata F1, F3, F5)."""
    rows = [count(name, keep) for name in TABLES for keep in (0.9, 0.7, 0.5)]
    lines = ["What LowerB clients deploy and send, by the layer that they train beside the final one (params)"]
    for row in rows:
        hidden = list(row["layers"])[:-1]
        pairs = zip(hidden, row["deployed"], row["sent"])
        cells = ", ".join(f"{one} {there:,.0f} / {sent:,}" for one, there, sent in pairs)
        lines.append(f"{row['network']:13} keep {row['keep']:.1f}  {cells}")
        lines.append(
            f"{'':13} (max - min) / min: deployed {row['deployed spread']:.2f} %, "
            f"sent {row['spread']:.2f} % (printed {row['printed']:g})"
        )
    for name in TABLES:
        sizes = np.array(list(count(name, 0.9)["layers"].values()))
        depth = len(sizes)
        shares = ", ".join(
            f"{label} {100 * (number + 1) / depth:.0f} % of the layers, "
            f"{100 * expected_share(sizes, number):.2f} % of the params"
            for label, number in (("OPU3", 3), ("OPU2", 2), ("LowerB", 1))
        )
        lines.append(f"{name:13} {shares}")
    figure, axes = plt.subplots(1, len(TABLES), figsize=(7.0, 2.3), layout="constrained")
    for panel, name in zip(axes, TABLES):
        mine = [row for row in rows if row["network"] == name]
        hidden = list(mine[0]["layers"])[:-1]
        for number, row in enumerate(mine):
            panel.bar(
                np.arange(len(hidden)) + 0.2 * number, row["deployed"], 0.18, label=f"deployed, keep {row['keep']:g}"
            )
        panel.bar(np.arange(len(hidden)) + 0.6, mine[0]["sent"], 0.18, color="k", label="sent")
        panel.set_yscale("log")
        panel.set_xticks(np.arange(len(hidden)) + 0.3, hidden)
        panel.set_title(name)
    axes[0].set_ylabel("params")
    axes[-1].legend(fontsize=5)
    plots.save(figure, settings.out / "counts.png")
    tables.save(settings.out / "counts", rows, "\n".join(lines))
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
        one = replace(settings, trained=trained, others=others)
        COMMANDS[name](one)
        option = "" if trained == 3 else f" --trained {trained} --others {others}"
        text = stem_of(name, one).with_suffix(".txt").read_text()
        lines += [f"## {name}{option}", "", "```", text.rstrip(), "```", ""]
    write_atomically(settings.out / "fedp3.md", "\n".join(lines).encode())


COMMANDS: dict[str, Callable] = {
    "layers": layer_overlap,
    "ratio": ratio,
    "local": local_pruning,
    "aggregation": aggregation,
    "baselines": baselines,
    "resnet": resnet_blocks,
    "counts": parameter_counts,
    "tables": all_tables,
    "privacy": fedp3_privacy.curve,
    "audit": fedp3_privacy.audit,
    "theory": fedp3_privacy.theory,
}
