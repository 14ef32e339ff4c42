"""Real processes, killed at random moments and started again, end where uninterrupted ones do: bit for bit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.core import kills

pytestmark = pytest.mark.long

ROOT, KILLS = Path(__file__).parents[2], 3


@pytest.mark.long
def test_each_long_job_survives_kills_at_random_moments_bit_for_bit(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "tests.core.kills", str(tmp_path), str(KILLS)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert report.keys() == kills.JOBS.keys()
    for job, found in report.items():
        assert found["equal"] and found["bytes"] > 2000, job
        assert found["kills"] == KILLS and found["with progress"] >= 2, job  # two of them after a new checkpoint
        assert found["left"] == [], job  # no lock and no temporary file
