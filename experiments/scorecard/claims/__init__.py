"""What the thesis claims, measured now.  A method adds its claims in one file of this folder.

Each module has `CLAIMS`, a list of functions without arguments; each returns a `Claim`.  `experiments.scorecard` finds the
modules by itself.
"""

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["reproduced", "differs", "corrected"]


def corrected(holds: bool, errata: str) -> tuple[Verdict, str]:
    """Verdict and errata number of a claim that the errata correct, if what they say was measured now."""
    return ("corrected", errata) if holds else ("differs", "")


@dataclass(frozen=True)
class Claim:
    """One row of the scorecard.  Every number in `measured` was computed when the row was."""

    method: str
    claim: str  # in words
    source: str  # where the thesis says so
    thesis: str  # its figure
    measured: str  # ours, now
    verdict: Verdict
    errata: str = ""  # for "corrected", and for "differs" where it is known: the number in docs/errata.md
    figure: bytes | None = None  # a PNG
    seconds: float = 0.0  # that it took; the scorecard fills this in

    def __post_init__(self):
        if self.verdict == "corrected" and not self.errata:
            raise ValueError(f"a corrected claim needs an errata number: {self.claim}")
