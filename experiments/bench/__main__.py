"""Run all benchmarks, compare with the record of this kind of CPU, and make the speed page.

    python -m experiments.bench                    all of them, about 12 minutes on 2 cores
    python -m experiments.bench --quick            small sizes, about 3 minutes
    python -m experiments.bench ef_bv optax        some of them
    python -m experiments.bench --write            keep what was measured as the record of this kind of CPU
    python -m experiments.bench --page             make docs/results/speed.md from the records

Each benchmark runs in a process of its own.  The exit status is 1 if a benchmark fails, or if a ratio is more than 15 %
worse than in the record.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Annotated, Any

import tyro

from experiments.bench import page

NAMES = (
    "compressors",
    "ef_bv",
    "networks",
    "optax",
    "scafflix",
    "fedp3",
    "cohort_squeeze",
    "pruning",
    "stream",
    "devices",
    "federation",
    "growth",
)
RECORDS = Path(__file__).parent / "records"
TOLERANCE = 1.15


@dataclass(frozen=True)
class Settings:
    names: Annotated[tuple[str, ...], tyro.conf.Positional] = field(default=NAMES)  # benchmarks to run
    quick: bool = False  # small sizes and few turns; they have a record of their own
    write: bool = False  # keep what was measured as the record of this kind of CPU
    page: bool = False  # make docs/results/speed.md from the records, and measure nothing


def cpu() -> str:
    """Return the model of the CPU and the number of cores, for instance "AMD EPYC, family 26, model 2, 2 cores"."""
    cores = f"{len(os.sched_getaffinity(0))} cores"
    try:
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    except OSError:
        return f"{platform.processor() or platform.machine()}, {cores}"
    about = {name.strip(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    parts = [f"{name.split()[-1]} {about[name]}" for name in ("cpu family", "model") if name in about]
    return ", ".join([about.get("model name", platform.machine()), *parts, cores])


def versions() -> dict[str, str]:
    """Return the versions of the packages that are compared."""
    found = {"python": platform.python_version()}
    for package in ("jax", "jaxlib", "numpy", "scipy", "torch"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "not installed"
    return found


def path(kind: str, quick: bool) -> Path:
    """Return the file of the record of a kind of CPU."""
    slug = "-".join("".join(c if c.isalnum() else " " for c in kind.lower()).split())
    return RECORDS / f"{slug}{'-quick' if quick else ''}.json"


def measured(name: str, quick: bool) -> list[dict[str, Any]] | None:
    """Run one benchmark in a process of its own; None if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "tables.json"
        words = [sys.executable, "-m", f"experiments.bench.{name}", "--json", str(file), *["--quick"] * quick]
        done = subprocess.run(words).returncode == 0
        return json.loads(file.read_text()) if done and file.exists() else None


def ratios(found: Mapping[str, Any]) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Return the ratios of a record by (benchmark, title of the table, name)."""
    return {
        (name, table["title"], ratio): value
        for name, tables in found["benchmarks"].items()
        for table in tables
        for ratio, value in table["ratios"].items()
    }


def worse(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return a line for each ratio whose median is more than 15 % worse than in the record."""
    before, out = ratios(old), []
    for place, ratio in ratios(new).items():
        if place in before:
            was, now = before[place]["values"][1], ratio["values"][1]
            factor = was / now if ratio.get("at_least") else now / was
            if factor > TOLERANCE:
                out.append(f"{place[0]}: {place[1]}: {place[2]}: {was:.3g} in the record, {now:.3g} now")
    return out


def main(settings: Settings) -> int:
    """Run the benchmarks and return the exit status."""
    if settings.page:
        page.write(
            [json.loads(file.read_text()) for file in sorted(RECORDS.glob("*.json")) if "-quick" not in file.name]
        )
        return 0
    if unknown := set(settings.names) - set(NAMES):
        raise SystemExit(f"no benchmark is called {', '.join(sorted(unknown))}; there are: {', '.join(NAMES)}")
    kind, found, failed = cpu(), {}, []
    print(f"{kind}; " + ", ".join(f"{package} {number}" for package, number in versions().items()))
    for number, name in enumerate(settings.names):
        print(f"\n[{number + 1} of {len(settings.names)}] {name}", flush=True)
        tables = measured(name, settings.quick)
        if tables is None:
            failed.append(name)
        else:
            found[name] = tables
    new = {"cpu": kind, "versions": versions(), "benchmarks": found}
    file = path(kind, settings.quick)
    old = json.loads(file.read_text()) if file.exists() else None
    if old is None:
        print(f"\nthere is no record of {kind}; keep this one with --write")
    lines = worse(old, new) if old else []
    print("\n".join([f"\n{len(lines)} of {len(ratios(new))} ratios are more than 15 % worse than the record", *lines]))
    if failed:
        print(f"failed: {', '.join(failed)}")
    if settings.write:
        RECORDS.mkdir(exist_ok=True)
        merged = new | {"benchmarks": (old["benchmarks"] if old else {}) | found}
        file.write_text(json.dumps(merged, indent=1) + "\n")
        print(f"written: {file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file}")
    return 1 if lines or failed else 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Settings)))
