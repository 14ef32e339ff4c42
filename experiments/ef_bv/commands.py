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

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from commjax.core.records import Record
from experiments import plots, tables
from experiments.ef_bv import figures
from experiments.ef_bv import table as ef_bv_table
from experiments.ef_bv.figures import Records
from experiments.ef_bv.runs import DATASETS, Settings, bits_to_targets, compare, load, problem


def main_figure(settings: Settings) -> Records:
    """f(x^t) - f* against bits, comp-(k, d/2), for every data set and (k, xi)."""
    records = {
        (name, k, xi): compare(problem(name, settings, xi), k, settings, f"{name}_k{k}_xi{xi}")
        for name in settings.datasets or DATASETS
        for k, xi in settings.pairs
    }
    plots.save(figures.grid_figure(records, "loss", r"$f(x^t) - f^\star$"), settings.out / "main_figure.png")
    tables.save_text(settings.out / "main_figure", figures.report(records))
    return records


def nonconvex(settings: Settings) -> Records:
    """min |grad f|^2 against bits with the regulariser mu sum x^2/(1+x^2), at the stepsizes of Thm 2.5.1 (E12, E14)."""
    records = {}
    for name in settings.datasets or DATASETS[:3]:
        for k, xi in settings.pairs:
            label = f"nonconvex_{name}_k{k}_xi{xi}"
            split = problem(name, settings, xi, nonconvex=True)
            records[name, k, xi] = compare(split, k, settings, label, nonconvex=True)
    ylabel = r"$\min_{s \leq t} |\nabla f(x^s)|^2$"
    plots.save(figures.grid_figure(records, "sq_grad", ylabel), settings.out / "nonconvex.png")
    tables.save_text(settings.out / "nonconvex", figures.report(records, "sq_grad"))
    return records


def _ablation(
    settings: Settings, xlabel: str, values: Callable[[str], Iterable[int]], run: Callable[[str, int], Record]
) -> list[dict[str, Any]]:
    """Run `run(data set, value)` over the values of each data set.

    The ratio of bits is that of the last target that both methods reach.
    """
    rows = []
    for name in settings.datasets or DATASETS[:2]:
        for value in values(name):
            record = run(name, value)
            targets = bits_to_targets(record, (0.95, 0.9, 0.8, 0.7, 0.5, 0.3, 0.2, 0.1, 0.05, 0.01))
            both = [row["ratio"] for row in targets if np.isfinite(row["bits"]).all()]
            ratio, predicted = both[-1] if both else float("nan"), record.config["predicted"]
            rows.append({"dataset": name, "value": value, "ratio": ratio, "predicted": predicted})
            print(f"{name:12} {xlabel} = {value:6d}: measured {ratio:.3f}, predicted {predicted:.3f}")
    return rows


def ablate_n(settings: Settings) -> list[dict[str, Any]]:
    """More clients give a smaller omega_ran and a larger lead of EF-BV.  The last point has one row per client."""

    def numbers(name: str) -> list[int]:
        most = len(load(name).labels)
        return [n for n in (10, 30, 100, 300, 1000, 3000) if n < most] + [most]

    def run(name: str, n: int) -> Record:
        return compare(problem(name, settings, n=n), 1, settings, f"{name}_n{n}")

    rows = _ablation(settings, "clients n", numbers, run)
    figures.ratio_figure(rows, "clients n", settings.out / "ablate_n.png")
    return rows


def ablate_k(settings: Settings) -> list[dict[str, Any]]:
    """k' = k is top-k, where the two methods are the same; k' = d is rand-k."""

    def numbers(name: str) -> list[int]:
        d = load(name).features.shape[1]
        return [1, *(d * part // 8 for part in (1, 2, 4, 6, 8))]

    def run(name: str, k_top: int) -> Record:
        return compare(problem(name, settings), 1, settings, f"{name}_ktop{k_top}", k_top=k_top)

    rows = _ablation(settings, "k'", numbers, run)
    figures.ratio_figure(rows, "k'", settings.out / "ablate_k.png")
    return rows


def stepsizes(settings: Settings) -> Record:
    """The gap after all rounds against gamma / (theoretical gamma), for both methods, in one vmapped program."""
    factors = tuple(2.0**power for power in range(11))
    name = (settings.datasets or DATASETS)[0]
    record = compare(problem(name, settings), 1, settings, f"{name}_stepsizes", factors=factors)
    figures.stepsize_figure(record, factors, settings.out / "stepsizes.png")
    return record


def table(settings: Settings) -> list[ef_bv_table.Cell]:
    """The parameter table: printed, corrected, and ours, side by side."""
    cells = ef_bv_table.cells(settings.datasets or DATASETS, settings.n, settings.seed)
    tables.save_text(settings.out / "table", ef_bv_table.render(cells))
    return cells


COMMANDS = {
    "table": table,
    "main-figure": main_figure,
    "nonconvex": nonconvex,
    "ablate-n": ablate_n,
    "ablate-k": ablate_k,
    "stepsizes": stepsizes,
}
