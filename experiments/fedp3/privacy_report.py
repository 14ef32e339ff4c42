"""Tables and figures of `experiments.fedp3.privacy`."""

from typing import Any

import matplotlib.pyplot as plt

from experiments import plots


def figure(settings: Any, table: list[dict], curves: dict) -> None:
    """Draw accuracy against epsilon and against bits."""
    drawing, axes = plt.subplots(1, 2, figsize=(7.0, 2.5), layout="constrained", sharey=True)
    colors = ("#0072B2", "#D55E00", "#009E73")
    for color, name in zip(colors, settings.variants):
        mine = [row for row in table if row["variant"] == name]
        private = mine[1:]
        axes[0].errorbar(
            [row["target"] for row in private],
            [row["accuracy"] for row in private],
            yerr=[row["std"] for row in private],
            marker="o",
            markersize=3,
            capsize=2,
            color=color,
            label=name,
        )
        axes[0].axhline(mine[0]["accuracy"], color=color, linewidth=0.8, linestyle=":")
        for k in (0, len(private)):
            bits, scores = curves[name, k]
            axes[1].plot(bits[1:], scores[1:], ":" if k == 0 else "-", color=color)
    axes[0].set_xscale("log")
    axes[0].set_xticks(settings.epsilons, [f"{epsilon:g}" for epsilon in settings.epsilons])
    axes[0].minorticks_off()
    axes[0].set_xlabel(rf"$\epsilon$ ($\delta$ = {settings.delta:g}, {settings.relation})")
    axes[0].set_ylabel("test accuracy, %")
    axes[0].legend()
    axes[1].set_xscale("log")
    axes[1].set_xlabel("bits sent by a client")
    axes[1].set_title(rf"$\epsilon$ = {settings.epsilons[-1]:g} (dotted: no privacy)")
    plots.save(drawing, settings.out / f"{settings.task}_private.png")


def text(settings: Any, rows: int, table: list[dict]) -> str:
    """Return the table of `curve` as text; `rows` is the number of rows of a client."""
    lines = [
        f"{settings.task}: {settings.clients} clients of {rows} rows, {table[0]['parameters']} parameters, "
        f"{settings.rounds} rounds, "
        f"rate {settings.rate:g}, {settings.seeds} seeds; neighbours: {settings.relation}, delta = {settings.delta:g}",
        f"{'variant':12} {'epsilon':>8} {'certified':>9} {'attack':>7} {'z':>7} {'stepsize':>8} "
        f"{'accuracy':>14} {'Mbit up':>8}",
    ]
    lines += [
        f"{r['variant']:12} {r['target']:8g} {r['certified']:9.3f} "
        f"{'' if r['audit'] is None else format(r['audit'], '.3f'):>7} "
        f"{r['noise']:7.2f} {r['stepsize']:8g} {r['accuracy']:6.2f} +- {r['std']:4.2f} {r['bits_up'] / 1e6:8.3f}"
        for r in table
    ]
    lines.append("epsilon of the same noise:")
    for r in table[1 : 1 + len(settings.epsilons)]:
        lines.append(
            f"  z = {r['noise']:7.2f}: "
            + ", ".join(f"{name} {r[name]:.3f}" for name in r if "-" in name and " " in name)
        )
    below = all(r["audit"] <= r["certified"] <= r["target"] for r in table if r["audit"] is not None)
    lines.append(f"attack <= certificate <= target in every row: {below}")
    return "\n".join(lines)


def audit_text(settings: Any, table: list[dict]) -> str:
    """Return the table of `audit` as text."""
    lines = [
        f"95 % confidence; many runs: {settings.trials} in each world; one run: {settings.canaries} canaries",
        f"{'relation':12} {'epsilon':>8} {'certified':>9} {'z':>7} {'many runs':>9} {'one run':>8}  right guesses",
    ]
    lines += [
        f"{r['relation']:12} {r['target']:8g} {r['certified']:9.3f} {r['noise']:7.2f} "
        f"{r['audit']:9.3f} {r['one_run']:8.2f}"
        f"  {r['correct']} of {r['guesses']}"
        for r in table
    ]
    return "\n".join(lines)
