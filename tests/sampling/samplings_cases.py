"""Goldens and gradients that add up to 0: what the tests of samplings share."""

import json
from pathlib import Path

GOLDENS = json.loads((Path(__file__).parents[1] / "data" / "goldens_sppm.json").read_text())


def centred(rows):
    return rows - rows.mean(axis=0)
