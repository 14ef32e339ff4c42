"""What all benchmarks share: sides that take turns, ratios, and one command."""

import json
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np
import tyro


class Side(NamedTuple):
    """One of the programs that are compared.

    Attributes:
        run: does the work; what it returns is waited for.
        units: units of work in one call (rounds, steps, entries), by which the time is divided.
    """

    run: Callable[[], Any]
    units: float = 1


class Ratio(NamedTuple):
    """The time of one side divided by that of another.

    Attributes:
        over: name of the side whose time is divided.
        under: name of the side by whose time it is divided.
        goal: the bound that we want; None if there is none.
        at_least: whether the goal is a lower bound: `over` is the other program, `under` is ours.
    """

    over: str
    under: str
    goal: float | None = None
    at_least: bool = False


class Table(NamedTuple):
    """What one benchmark measured.

    Attributes:
        title: what is measured, in a few words.
        setting: sizes, in one line.
        says: at most two sentences that the speed page prints below the table.
        seconds: seconds a unit of every turn, by side.
        ratios: by name.
        scale: (name of the unit, units in a second), for instance ("ms a round", 1e3).
        goals: largest times that we want, in this unit, by side.
        values: other numbers by name: one for each turn, and the largest that we want.
    """

    title: str
    setting: str
    says: str
    seconds: dict[str, list[float]]
    ratios: dict[str, Ratio]
    scale: tuple[str, float] = ("ms", 1e3)
    goals: Mapping[str, float] = {}
    values: Mapping[str, tuple[list[float], float]] = {}


def take_turns(sides: Mapping[str, Side], repeats: int) -> dict[str, list[float]]:
    """Return the seconds a unit of each side in each turn.

    The sides take turns, so that a slow moment of the machine affects all of them.  A call of each, which compiles, is
    not counted.  Each waits a moment first, because threads of the side before it may still be spinning.
    """
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(repeats + 1):
        for name, side in sides.items():
            time.sleep(0.1)
            begin = time.perf_counter()
            jax.block_until_ready(side.run())
            if turn:
                seconds[name].append((time.perf_counter() - begin) / side.units)
    return seconds


def span(values: Any) -> list[float]:
    """Return [least, median, most]."""
    return [float(f"{f(values):.4g}") for f in (np.min, np.median, np.max)]


def summary(table: Table) -> dict[str, Any]:
    """Return what is kept of a table: [least, median, most] of the time of each side, and of each ratio."""
    unit, scale = table.scale
    ratios = {}
    for name, (over, under, goal, at_least) in table.ratios.items():
        values = np.array(table.seconds[over]) / np.array(table.seconds[under])
        ratios[name] = {"values": span(values), "goal": goal, "at_least": at_least}
    for side, goal in table.goals.items():
        ratios[f"{side}, {unit}"] = {"values": span(scale * np.array(table.seconds[side])), "goal": goal}
    for name, (values, goal) in table.values.items():
        ratios[name] = {"values": span(values), "goal": goal}
    times = {side: span(scale * np.array(values)) for side, values in table.seconds.items()}
    return {"title": table.title, "setting": table.setting, "says": table.says, "unit": unit} | {
        "turns": len(next(iter(table.seconds.values()))),
        "times": times,
        "ratios": ratios,
    }


def lines(found: Mapping[str, Any]) -> list[str]:
    """Return a summary as lines of text."""
    out = [f"{found['title']} ({found['setting']}), {found['unit']}: median (least to most) of {found['turns']}"]
    for side, (least, median, most) in found["times"].items():
        out.append(f"  {side:44} {median:10.4g} ({least:.4g} to {most:.4g})")
    for name, ratio in found["ratios"].items():
        least, median, most = ratio["values"]
        out.append(f"  {name:44} {median:10.3g} ({least:.3g} to {most:.3g})   {goal(ratio)}")
    return out


def goal(ratio: Mapping[str, Any]) -> str:
    """Return the goal of a ratio in words, and whether the median reaches it."""
    if ratio["goal"] is None:
        return ""
    words = f"{'at least' if ratio.get('at_least') else 'at most'} {ratio['goal']:g}"
    return words if reached(ratio) else f"{words}: missed"


def reached(ratio: Mapping[str, Any]) -> bool:
    """Whether the median is on the right side of the goal."""
    median = ratio["values"][1]
    return median >= ratio["goal"] if ratio.get("at_least") else median <= ratio["goal"]


def command(settings: type[Any], quick: Any, tables: Callable[[Any], list[Table]]) -> None:
    """Run one benchmark from the command line, print its tables, and write them to the file behind `--json`."""
    words = sys.argv[1:]
    file = words.pop(words.index("--json") + 1) if "--json" in words else None
    default = quick if "--quick" in words else settings()
    words = [word for word in words if word not in ("--json", "--quick")]
    found = [summary(table) for table in tables(tyro.cli(settings, args=words, default=default))]
    print("\n".join(line for table in found for line in lines(table)), flush=True)
    if file is not None:
        Path(file).write_text(json.dumps(found))
