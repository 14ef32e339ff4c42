"""Numbers of parameters and bits that FedP3 clients store and send in the networks of the thesis."""

import jax
import matplotlib.pyplot as plt
import numpy as np

from commjax.algorithms import fedp3
from commjax.algorithms.fedp3 import layers, plans
from commjax.algorithms.fedp3.layers import Layers
from commjax.models import layered
from experiments import plots, tables
from experiments.fedp3.task import Settings

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
        cells = ", ".join(f"{layer} {deployed:,.0f} / {sent:,}" for layer, deployed, sent in pairs)
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
