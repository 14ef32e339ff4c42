"""The scorecard: every claim with the thesis's figure, the value measured now, and the verdict.

    python -m experiments.scorecard                 a few minutes, one process per core; no network, no files

Expected: 50 claims (52 if $COMMJAX_DATA has stories260K). Five (six) differ, as the errata S11, P15 and W17 say. The
command writes results/scorecard/index.html (self-contained) and scorecard.json.

The exit status is 1 if a claim differs and no erratum says so. A documented difference is a finding, not a failure. A
method adds its claims as one file in experiments/scorecard/claims/.
"""

import base64
import html
import importlib
import json
import os
import pkgutil
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import experiments.scorecard.claims
from commjax.core.files import write_atomically
from commjax.core.progress import progress_bar
from commjax.core.records import environment
from experiments.scorecard import workers as claim_workers
from experiments.scorecard.claims import Claim

# These modules take longest. They start first, so that no process is left alone with one of them at the end.
LONGEST = ("scafflix", "ef_bv", "symwanda", "cohort_squeeze")
COLOR = {"reproduced": "#1a7f37", "corrected": "#9a6700", "differs": "#cf222e"}


@dataclass(frozen=True)
class Settings:
    out: Path = Path("results/scorecard")  # folder of index.html and scorecard.json
    only: str = ""  # part of a module's name, such as ef_bv; empty for all modules
    processes: int = 0  # processes, which share the modules; 0: one per core
    progress: bool = True  # show a bar


def modules(only: str = "") -> list[str]:
    """Return the names of the modules in experiments/scorecard/claims/ that have `only` in their name."""
    names = sorted(
        module.name for module in pkgutil.iter_modules(experiments.scorecard.claims.__path__) if only in module.name
    )
    if not names:
        raise ValueError(f"only: no module of experiments/scorecard/claims/ has {only!r} in its name")
    return [f"experiments.scorecard.claims.{name}" for name in names]


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def measure(settings: Settings) -> list[Claim]:
    """Measure the claims of all modules. They are returned in the order of the modules, not in that of completion."""
    names = modules(settings.only)
    total = sum(len(importlib.import_module(name).CLAIMS) for name in names)
    first = [
        f"experiments.scorecard.claims.{name}" for name in LONGEST if f"experiments.scorecard.claims.{name}" in names
    ]
    order = [*first, *(name for name in names if name not in first)]
    results = []
    with progress_bar("claims", total, enabled=settings.progress) as advance:
        for result in claim_workers.measure_modules(order, settings.processes or cores()):
            results.append(result)
            advance(len(results), {})
            if settings.progress:
                claim = result.claim
                print(f"  {claim.verdict:10} {claim.seconds:5.1f} s  {claim.claim}", file=sys.stderr, flush=True)
    return [result.claim for result in sorted(results, key=lambda result: result[:2])]


def page(claims: list[Claim], seconds: float) -> str:
    """Return the scorecard as one HTML page with its pictures inside.

    Args:
        claims: The measured claims.
        seconds: Time that all claims took.
    """

    def row(claim: Claim) -> str:
        verdict = claim.verdict + (f" ({claim.errata})" if claim.errata else "")
        picture = ""
        if claim.figure:
            data = base64.b64encode(claim.figure).decode()
            picture = f'<br><img alt="{html.escape(claim.claim)}" src="data:image/png;base64,{data}">'
        cells = (claim.method, claim.claim, claim.source, claim.thesis, claim.measured)
        return (
            "<tr>"
            + "".join(f"<td>{html.escape(cell)}{picture if i == 1 else ''}</td>" for i, cell in enumerate(cells))
            + f'<td style="color:{COLOR[claim.verdict]};font-weight:600">{html.escape(verdict)}</td></tr>'
        )

    about = environment()
    versions = ", ".join(f"{name} {version}" for name, version in about["versions"].items())
    counts = ", ".join(f"{sum(c.verdict == v for c in claims)} {v}" for v in COLOR)
    return f"""<!doctype html><html lang="en"><head><meta charset="utf-8"><title>commjax scorecard</title>
<meta name="viewport" content="width=device-width"><style>
body {{ font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 78rem; padding: 0 1rem; color: #1f2328 }}
table {{ border-collapse: collapse }} \
td, th {{ border: 1px solid #d0d7de; padding: .45rem .6rem; text-align: left; vertical-align: top }}
th {{ background: #f6f8fa }} img {{ max-width: 24rem; width: 100%; margin-top: .5rem }} </style></head><body>
<h1>commjax scorecard</h1>
<p>{len(claims)} claims, measured in {seconds:.0f} s: {counts}. Errata numbers refer to docs/errata.md.</p>
<table><tr><th>method</th><th>claim</th><th>source</th><th>thesis</th><th>measured now</th><th>verdict</th></tr>
{"".join(row(claim) for claim in claims)}
</table><p>{html.escape(versions)}; {html.escape(about["device"])}.</p></body></html>
"""


def text(claims: list[Claim]) -> str:
    """Return the scorecard as a table for the terminal."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title="commjax scorecard", show_lines=True)
    for column in ("method", "claim", "source", "thesis", "measured now", "verdict"):
        table.add_column(column, overflow="fold")
    for claim in claims:
        verdict = claim.verdict + (f" ({claim.errata})" if claim.errata else "")
        cells = (claim.method, claim.claim, claim.source, claim.thesis, claim.measured, verdict)
        table.add_row(*map(escape, cells))
    console = Console(width=160)
    with console.capture() as capture:
        console.print(table)
    return capture.get()


def main(settings: Settings) -> list[Claim]:
    """Measure the claims, write the page and the JSON file, print the table, and return the claims."""
    began = time.monotonic()
    claims = measure(settings)
    seconds = time.monotonic() - began
    rows = [{key: value for key, value in asdict(claim).items() if key != "figure"} for claim in claims]
    write_atomically(settings.out / "scorecard.json", json.dumps({"claims": rows, **environment()}, indent=1).encode())
    write_atomically(settings.out / "index.html", page(claims, seconds).encode())
    print(text(claims))
    print(f"{len(claims)} claims in {seconds:.0f} s; see {settings.out / 'index.html'}")
    return claims
