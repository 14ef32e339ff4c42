"""The claims of the thesis, measured now. A method adds its claims as one file in this folder.

Each module has `CLAIMS`, a list of functions without arguments. Each function returns a `Claim`.
`experiments.scorecard` finds the modules by itself.
"""

from dataclasses import dataclass
from typing import Literal

Verdict = Literal["reproduced", "differs", "corrected"]


def reproduced(holds: bool, errata: str = "") -> tuple[Verdict, str]:
    """Return verdict and errata number of a claim that the measurement confirms or not.

    Args:
        holds: Whether the measurement agrees with the thesis.
        errata: The number in docs/errata.md, if it is known that it does not agree.
    """
    return ("reproduced", "") if holds else ("differs", errata)


def corrected(holds: bool, errata: str) -> tuple[Verdict, str]:
    """Return verdict and errata number of a claim that the errata correct.

    Args:
        holds: Whether the measurement agrees with the errata.
        errata: The number in docs/errata.md.
    """
    return ("corrected", errata) if holds else ("differs", "")


@dataclass(frozen=True)
class Claim:
    """One row of the scorecard. Every number in `measured` was computed when the row was created.

    Attributes:
        method: Name of the method.
        claim: The claim in words.
        source: Where the thesis makes the claim.
        thesis: The thesis's figure.
        measured: Our figure, measured now.
        verdict: Comparison of the two.
        errata: Number in docs/errata.md. "corrected" needs it; "differs" has it if the difference is known.
        figure: A PNG file.
        seconds: Time that the measurement took. The scorecard fills it in.
    """

    method: str
    claim: str
    source: str
    thesis: str
    measured: str
    verdict: Verdict
    errata: str = ""
    figure: bytes | None = None
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.verdict == "corrected" and not self.errata:
            raise ValueError(f"a corrected claim needs an errata number: {self.claim}")
