"""The speed page, docs/results/speed.md, from the records."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments import plots
from experiments.bench.measure import goal

FIGURE = Path(__file__).parents[2] / "docs" / "figures" / "growth.png"
PAGE = Path(__file__).parents[2] / "docs" / "results" / "speed.md"
HEAD = """# Speed

How fast is commjax compared with other programs?

All numbers are made by one command, which also compares them with the last record of the same kind of CPU:

```bash
python -m experiments.bench              # everything; --quick: small sizes; or names of benchmarks
python -m experiments.bench --page       # makes this page from experiments/bench/records
```

The sides of a benchmark take turns in one process. Cells have the median, and the least and the most in brackets. A
ratio is computed in each turn. What misses its goal says so.
"""


def cell(values: Sequence[float]) -> str:
    """Return [least, median, most] as text."""
    least, median, most = (f"{value:.3g}" for value in values)
    return f"{median} ({least} to {most})"


def section(title: str, tables: Sequence[tuple[str, dict[str, Any]]], name: str) -> str:
    """Return one table of the page, with a column for each machine."""
    first = tables[0][1]
    settings = list(dict.fromkeys(table["setting"] for _, table in tables))
    rows = [f"| {first['unit']} | {' | '.join(machine for machine, _ in tables)} |", "|---" * (len(tables) + 1) + "|"]
    for side in dict.fromkeys(side for _, table in tables for side in table["times"]):
        cells = [cell(table["times"][side]) if side in table["times"] else "" for _, table in tables]
        rows.append(f"| {side} | {' | '.join(cells)} |")
    for ratio in dict.fromkeys(ratio for _, table in tables for ratio in table["ratios"]):
        found = [table["ratios"].get(ratio) for _, table in tables]
        cells = [f"**{cell(one['values'])}** {goal(one)}".strip() if one else "" for one in found]
        rows.append(f"| {ratio} | {' | '.join(cells)} |")
    parts = [f"### {title}", f"`python -m experiments.bench {name}`: {'; '.join(settings)}.", "\n".join(rows)]
    return "\n\n".join([*parts, *[first["says"]] * bool(first["says"])])


def figure(tables: Sequence[dict[str, Any]]) -> None:
    """Draw time and memory against size, with the fitted exponents, from the tables of the benchmark `growth`."""
    drawn, axes = plots.panels(1, 2, (7, 3.2))
    (memory,) = (table["times"] for table in tables if table["title"] == "Memory")
    for number, table in enumerate(table for table in tables if "exponent" in table["ratios"]):
        name, color = table["title"].removeprefix("Growth with "), f"C{number}"
        sizes = [int(size.replace(",", "")) for size in table["times"]]
        slope = table["ratios"]["exponent"]["values"][1]
        times = [value[1] for value in table["times"].values()]
        axes[0, 0].loglog(sizes, times, "o-", ms=3, color=color, label=f"{name}: {slope:.2f}")
        axes[0, 1].loglog(sizes, [memory[f"{name}: {size:,}"][1] for size in sizes], "o-", ms=3, color=color)
    for axis, label in zip(axes[0], ("ms", "MB")):
        axis.set(xlabel="size", ylabel=label)
    drawn.legend(loc="outside lower center", ncols=3, title="what grows, and the exponent of the time")
    plots.save(drawn, FIGURE)


def write(records: Sequence[dict[str, Any]]) -> None:
    """Write the page."""
    letters = [chr(ord("A") + number) for number in range(len(records))]
    machines = ["| machine | CPU | versions |", "|---|---|---|"]
    for letter, record in zip(letters, records):
        numbers = ", ".join(f"{package} {number}" for package, number in record["versions"].items())
        machines.append(f"| {letter} | {record['cpu']} | {numbers} |")
    by_title: dict[tuple[str, str], list[tuple[str, dict[str, Any]]]] = {}
    for letter, record in zip(letters, records):
        for name, tables in record["benchmarks"].items():
            for table in tables:
                by_title.setdefault((name, table["title"]), []).append((letter, table))
    out = [HEAD.rstrip(), "\n".join(machines)]
    last = ""
    for (name, title), tables in by_title.items():
        if name != last:
            out.append(f"## {name}")
            if name == "growth":
                figure(next(record["benchmarks"][name] for record in records if name in record["benchmarks"]))
                out.append("![Time and memory against size](../figures/growth.png)")
        last = name
        out.append(section(title, tables, name))
    PAGE.write_text("\n\n".join(out) + "\n")
