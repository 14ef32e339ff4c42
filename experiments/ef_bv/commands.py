"""EF-BV against EF21 on logistic regression: the figures and the table of the thesis's Chapter 2.

    python -m experiments.ef_bv table          the parameter table, printed / corrected / ours
    python -m experiments.ef_bv main-figure    12 panels: 4 data sets x (k, xi), 37 CPU minutes
    python -m experiments.ef_bv nonconvex      9 panels with the nonconvex regulariser, 25 CPU minutes
    python -m experiments.ef_bv ablate-n       number of clients, up to one row a client
    python -m experiments.ef_bv ablate-k       k' from k (top-k) to d (rand-k)
    python -m experiments.ef_bv stepsizes      gamma times 1 to 1024, one vmapped program

Times were measured on 2 cores.  A command without a time was not timed as a whole.  LibSVM files come from
$COMMJAX_DATA or are downloaded; `--datasets breast_cancer --n 100` needs neither.

Expected: EF-BV needs fewer bits than EF21 for every target gap in all 12 panels, by a factor of about sqrt(r_av/r) =
0.72 to 0.81 (measured 0.73 to 0.85).

To resume a command that was killed, give it again; finished panels are not run twice.  More --rounds continue from
fewer. Delete results/ef_bv/*.ckpt to begin anew.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from commjax import compressors
from commjax.algorithms import ef_bv
from commjax.core import runner
from commjax.core.records import Record
from commjax.core.rounds import dense_bits
from commjax.data import embedded, libsvm, partition, stacked
from commjax.data.libsvm import Dataset
from commjax.problems import logistic
from commjax.problems.constants import Smoothness
from commjax.theory import ef_bv as theory
from experiments import plots
from experiments.ef_bv import table as ef_bv_table

METHODS = ("EF-BV", "EF21")
DATASETS = ("mushrooms", "phishing", "a9a", "w8a")


@dataclass(frozen=True)
class Settings:
    # LibSVM names, or breast_cancer (embedded); None: those of the thesis's figure
    datasets: tuple[str, ...] | None = None
    pairs: tuple[tuple[int, int], ...] = ((1, 1), (1, 2), (2, 1))  # (k, xi) of each row of the main figure
    n: int = 1000  # clients
    rounds: int = 10_000  # rounds of each run
    mu: float = 0.1  # weight of the regulariser
    # x^0.  The thesis does not say it; the authors' code draws it from N(0, I).  auto: zero, but normal in nonconvex
    # runs, where the regulariser has no gradient at zero
    start: Literal["auto", "zero", "normal"] = "auto"
    seed: int = 0  # seed of the shuffle, the start and the compressors
    chunk: int = 250  # rounds between two checkpoints
    out: Path = Path("results/ef_bv")  # folder of records, figures and checkpoints
    progress: bool = True  # show a progress bar


class Problem(NamedTuple):
    """A data set on n clients, ready to run, in float64.

    Attributes:
        name: Name of the data set.
        data: Rows of all clients, with a leading client axis.
        value_and_grad: (params [d], data of one client) -> (loss, gradient [d]).
        smoothness: Exact smoothness constants.
        floor: f*, or 0 for the nonconvex problem.
        d: Number of features.
    """

    name: str
    data: stacked.ClientData
    value_and_grad: Callable
    smoothness: Smoothness
    floor: float
    d: int


def load(name: str) -> Dataset:
    """Load a data set: breast_cancer is embedded, the others are LibSVM files."""
    return embedded.breast_cancer() if name == "breast_cancer" else libsvm.load(name)


def problem(name: str, settings: Settings, xi: int = 1, n: int | None = None, nonconvex: bool = False) -> Problem:
    """Split a data set over clients, and compute its exact constants and its optimum.

    Args:
        name: LibSVM name, or breast_cancer.
        settings: The settings.
        xi: Blocks per client.  The shuffled rows are cut into n blocks that differ by at most one row.
        n: Number of clients; None: that of the settings.
        nonconvex: Use the nonconvex regulariser.
    """
    dataset = load(name)
    rows = partition.blocks(len(dataset.labels), n or settings.n, seed=settings.seed, overlap=xi)
    if nonconvex:
        loss, floor = partial(logistic.nonconvex_loss, lam=settings.mu), 0.0
        smoothness = logistic.nonconvex_constants(dataset, rows, settings.mu)
    else:
        loss, floor = (
            partial(logistic.loss, mu=settings.mu),
            logistic.optimum(dataset, rows, settings.mu).value,
        )
        smoothness = logistic.constants(dataset, rows, settings.mu)
    data = jax.tree.map(jnp.asarray, stacked.stack(dataset, rows))
    return Problem(name, data, jax.value_and_grad(loss), smoothness, floor, dataset.features.shape[1])


def compare(
    problem: Problem,
    k: int,
    settings: Settings,
    label: str,
    *,
    k_top: int | None = None,
    factors=(1.0,),
    nonconvex=False,
) -> Record:
    """Run both methods with their theoretical hparams (times each factor) from the same start, as one vmapped program.

    Metrics have axes [method x factor, 1, round].  Numbers are sent as float32.  The bits include h_i^0 = grad
    f_i(x^0).

    Args:
        problem: The problem.
        k: k of comp-(k, k').
        settings: The settings.
        label: Name of the record and the checkpoint.
        k_top: k' of comp-(k, k'); None: d/2.
        factors: Factors of the theoretical stepsize.
        nonconvex: Use the nonconvex stepsizes, and record |grad f|^2.
    """
    n = len(problem.data.labels)
    regime = "nonconvex" if nonconvex else "pl"
    compressor = compressors.rounded(compressors.comp(k, k_top or problem.d // 2))
    constants = compressor.constants(problem.d, n)
    hparams = [
        ef_bv.theoretical(constants, problem.smoothness, regime),
        ef_bv.ef21_hparams(constants, problem.smoothness, regime),
    ]
    grid = runner.stack([h._replace(gamma=h.gamma * factor) for h in hparams for factor in factors])
    algorithm = ef_bv.ef_bv(problem.value_and_grad, compressor)
    if nonconvex:
        algorithm = runner.observe(algorithm, sq_grad=partial(squared_gradient, problem.value_and_grad))
    key, key_start = jax.random.split(jax.random.key(settings.seed))
    start = ("normal" if nonconvex else "zero") if settings.start == "auto" else settings.start
    x0 = jnp.zeros(problem.d) if start == "zero" else jax.random.normal(key_start, (problem.d,))
    shift = jax.vmap(problem.value_and_grad, in_axes=(None, 0))(x0, problem.data)[1]
    _, record = runner.loop(
        key[None],
        algorithm,
        grid,
        algorithm.init(x0, jnp.arange(n), shift=shift),
        problem.data,
        settings.rounds,
        chunk=min(settings.chunk, settings.rounds),
        checkpoint=settings.out / f"{label}.ckpt",
        label=label,
        progress=settings.progress,
        bits_init=dense_bits(x0.astype(jnp.float32)),
        config={
            "dataset": problem.name,
            "d": problem.d,
            "n": n,
            "k": k,
            "k_top": k_top or problem.d // 2,
            "kept": k,
            "methods": METHODS,
            "factors": factors,
            "floor": problem.floor,
            "start": start,
            "L": problem.smoothness.L,
            "L_tilde": problem.smoothness.L_tilde,
            "predicted": predicted_ratio(constants),
        },
    )
    record.save(settings.out / label)
    return record


def squared_gradient(value_and_grad, state, batch):
    """|grad f(x)|^2 at the server's x."""
    grads = jax.vmap(value_and_grad, in_axes=(None, 0))(state.server.params, batch)[1]
    return jnp.sum(jnp.mean(grads, axis=0) ** 2)


def predicted_ratio(constants) -> float:
    """sqrt(r_av / r): EF21's error factor over EF-BV's."""
    lam, nu = (
        theory.best_scaling(constants.eta, constants.omega),
        theory.best_scaling(constants.eta, constants.omega_ran),
    )
    r_av = theory.contraction(constants.eta, constants.omega_ran, nu)
    return float(np.sqrt(r_av / theory.contraction(constants.eta, constants.omega, lam)))


def bits_to_targets(
    record: Record, fractions=(0.7, 0.5, 0.3, 0.2, 0.1, 0.05, 0.01), metric: str = "loss"
) -> list[dict]:
    """Rounds and bits of both methods to each target that one of them reaches, and the ratio of bits.

    A target is a fraction of the first gap.  The bits exclude h_i^0, and are infinite where the target was not reached.
    """
    gap = record.metrics[metric][:, 0] - (record.config["floor"] if metric == "loss" else 0.0)
    bits = record.bits_up()[:, 0] - record.bits_init
    found = []
    for fraction in fractions:
        hits = [np.flatnonzero(row <= fraction * gap[0, 0]) for row in gap]
        if any(len(hit) for hit in hits):
            spent = [float(row[hit[0]]) if len(hit) else np.inf for row, hit in zip(bits, hits)]
            rounds = [int(hit[0]) if len(hit) else None for hit in hits]
            ratio = 0.0 if np.isinf(spent[1]) else spent[0] / max(spent[1], 1.0)
            found.append({"fraction": fraction, "rounds": rounds, "bits": spent, "ratio": ratio})
    return found


def panel(axes, record: Record, metric: str = "loss") -> None:
    """Draw the curves of both methods against kilobits."""
    floor = record.config["floor"] if metric == "loss" else 0.0
    for row, method in enumerate(METHODS):
        values = record.metrics[metric][row, 0] - floor
        values = values if metric == "loss" else np.minimum.accumulate(values)
        pick = plots.thin(values)
        axes.semilogy(record.bits_up()[row, 0][pick] / 1e3, values[pick], **plots.style(method))
    axes.set_title(f"{record.config['dataset']}, k={record.config['k']}")


def grid_figure(records: dict[tuple[str, int, int], Record], metric: str, ylabel: str):
    """One panel per data set and (k, xi)."""
    names = list(dict.fromkeys(name for name, _, _ in records))
    rows = list(dict.fromkeys((k, xi) for _, k, xi in records))
    figure, axes = plt.subplots(
        len(rows),
        len(names),
        figsize=(1.8 * len(names) + 0.3, 1.65 * len(rows) + 0.3),
        squeeze=False,
        layout="constrained",
    )
    for (name, k, xi), record in records.items():
        panel_axes = axes[rows.index((k, xi)), names.index(name)]
        panel(panel_axes, record, metric)
        panel_axes.set_title(f"{name}, k={k}, $\\xi$={xi}")
    figure.supxlabel("kilobits sent by one client (first exchange included)", fontsize=8)
    figure.supylabel(ylabel, fontsize=8)
    axes[0, 0].legend()
    return figure


def report(records: dict[tuple[str, int, int], Record], metric: str = "loss") -> str:
    """Table: measured bits of EF-BV over EF21 at every target that one of them reaches, beside the prediction."""
    lines = [
        f"{'data set':12} {'k':>2} {'xi':>2} {'target':>7} {'EF-BV bits':>12} {'EF21 bits':>12} "
        f"{'ratio':>6} {'sqrt(r_av/r)':>13}"
    ]
    for (name, k, xi), record in records.items():
        for row in bits_to_targets(record, metric=metric):
            a, b = row["bits"]
            predicted = record.config["predicted"]
            lines.append(
                f"{name:12} {k:2d} {xi:2d} {row['fraction']:7g} {a:12.0f} {b:12.0f} "
                f"{row['ratio']:6.3f} {predicted:13.3f}"
            )
    return "\n".join(lines)


def main_figure(settings: Settings) -> dict[tuple[str, int, int], Record]:
    """f(x^t) - f* against bits, comp-(k, d/2), for every data set and (k, xi)."""
    records = {
        (name, k, xi): compare(problem(name, settings, xi), k, settings, f"{name}_k{k}_xi{xi}")
        for name in settings.datasets or DATASETS
        for k, xi in settings.pairs
    }
    plots.save(grid_figure(records, "loss", r"$f(x^t) - f^\star$"), settings.out / "main_figure.png")
    text = report(records)
    (settings.out / "main_figure.txt").write_text(text + "\n")
    print(text)
    return records


def nonconvex(settings: Settings) -> dict[tuple[str, int, int], Record]:
    """min |grad f|^2 against bits with the regulariser mu sum x^2/(1+x^2), at the stepsizes of Thm 2.5.1 (E12, E14)."""
    names = settings.datasets or DATASETS[:3]
    records = {
        (name, k, xi): compare(
            problem(name, settings, xi, nonconvex=True),
            k,
            settings,
            f"nonconvex_{name}_k{k}_xi{xi}",
            nonconvex=True,
        )
        for name in names
        for k, xi in settings.pairs
    }
    plots.save(
        grid_figure(records, "sq_grad", r"$\min_{s \leq t} |\nabla f(x^s)|^2$"),
        settings.out / "nonconvex.png",
    )
    text = report(records, "sq_grad")
    (settings.out / "nonconvex.txt").write_text(text + "\n")
    print(text)
    return records


def ratio_figure(xs, measured, predicted, xlabel: str, names, path: Path) -> None:
    """Measured and predicted ratios of bits, one pair of curves per data set."""
    figure, axes = plt.subplots(figsize=(3.4, 2.5), layout="constrained")
    for name, x, row, theory_row in zip(names, xs, measured, predicted):
        line = axes.semilogx(x, row, "o", label=f"{name}, measured")[0]
        axes.semilogx(x, theory_row, "--", color=line.get_color(), label=r"$\sqrt{r_{av}/r}$")
    axes.set_xlabel(xlabel)
    axes.set_ylabel("bits of EF-BV / bits of EF21")
    axes.legend()
    plots.save(figure, path)


def _ablation(settings: Settings, values, run, xlabel: str, file: str) -> list[dict]:
    """Run `run(name, value)` over the values of each data set.

    The ratio of bits is that of the last target that both methods reach.
    """
    names = settings.datasets or DATASETS[:2]
    rows = []
    for name in names:
        for value in values(name):
            record = run(name, value)
            targets = bits_to_targets(record, (0.95, 0.9, 0.8, 0.7, 0.5, 0.3, 0.2, 0.1, 0.05, 0.01))
            both = [row["ratio"] for row in targets if np.isfinite(row["bits"]).all()]
            ratio = both[-1] if both else float("nan")
            rows.append({"dataset": name, "value": value, "ratio": ratio, "predicted": record.config["predicted"]})
            print(f"{name:12} {xlabel} = {value:6d}: measured {ratio:.3f}, predicted {rows[-1]['predicted']:.3f}")
    pick = {name: [row for row in rows if row["dataset"] == name] for name in names}
    xs, measured, predicted = (
        [[row[key] for row in pick[name]] for name in names] for key in ("value", "ratio", "predicted")
    )
    ratio_figure(xs, measured, predicted, xlabel, names, settings.out / file)
    return rows


def ablate_n(settings: Settings) -> list[dict]:
    """More clients give a smaller omega_ran and a larger lead of EF-BV.  The last point has one row per client."""
    return _ablation(
        settings,
        lambda name: (
            [n for n in (10, 30, 100, 300, 1000, 3000) if n < len(load(name).labels)] + [len(load(name).labels)]
        ),
        lambda name, n: compare(problem(name, settings, n=n), 1, settings, f"{name}_n{n}"),
        "clients n",
        "ablate_n.png",
    )


def ablate_k(settings: Settings) -> list[dict]:
    """k' = k is top-k, where the two methods are the same; k' = d is rand-k."""
    dimension = {name: load(name).features.shape[1] for name in settings.datasets or DATASETS[:2]}
    return _ablation(
        settings,
        lambda name: [1, *(dimension[name] * part // 8 for part in (1, 2, 4, 6, 8))],
        lambda name, k_top: compare(problem(name, settings), 1, settings, f"{name}_ktop{k_top}", k_top=k_top),
        "k'",
        "ablate_k.png",
    )


def stepsizes(settings: Settings) -> Record:
    """The gap after all rounds against gamma / (theoretical gamma), for both methods, in one vmapped program."""
    factors = tuple(2.0**power for power in range(11))
    name = (settings.datasets or DATASETS)[0]
    record = compare(problem(name, settings), 1, settings, f"{name}_stepsizes", factors=factors)
    last = record.metrics["loss"][:, 0, -1].reshape(2, -1) - record.config["floor"]
    figure, axes = plt.subplots(figsize=(3.4, 2.5), layout="constrained")
    for method, row in zip(METHODS, last):
        axes.loglog(factors, np.where(np.isfinite(row), row, np.nan), marker="o", markersize=3, **plots.style(method))
    axes.axhline(record.metrics["loss"][0, 0, 0] - record.config["floor"], color="grey", linewidth=0.8, label="start")
    axes.set_xlabel(r"$\gamma$ / theoretical $\gamma$")
    axes.set_ylabel(rf"$f(x^t) - f^\star$ after {settings.rounds} rounds")
    axes.set_title(f"{name}, n={record.config['n']}")
    axes.legend()
    plots.save(figure, settings.out / "stepsizes.png")
    return record


def table(settings: Settings) -> list[ef_bv_table.Cell]:
    """The parameter table: printed, corrected, and ours, side by side."""
    cells = ef_bv_table.cells(settings.datasets or DATASETS, settings.n, settings.seed)
    settings.out.mkdir(parents=True, exist_ok=True)
    text = ef_bv_table.render(cells)
    (settings.out / "table.txt").write_text(text + "\n")
    print(text)
    return cells


COMMANDS = {
    "table": table,
    "main-figure": main_figure,
    "nonconvex": nonconvex,
    "ablate-n": ablate_n,
    "ablate-k": ablate_k,
    "stepsizes": stepsizes,
}
