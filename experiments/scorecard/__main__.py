"""`python -m experiments.scorecard`"""

import sys

import jax
import tyro

from experiments.scorecard import page

if __name__ == "__main__":
    jax.config.update("jax_enable_x64", True)
    claims = page.main(tyro.cli(page.Settings))
    sys.exit(any(claim.verdict == "differs" and not claim.errata for claim in claims))
