"""What the README promises a newcomer."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.M | re.S)


def test_the_example_works_when_pasted(tmp_path):
    (code,) = blocks("python")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[0]) < 1e-6


def test_what_goes_on_from_the_example_works_when_pasted_after_it(tmp_path):
    code = "\n".join([*blocks("python"), *blocks("py continued")])
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    found = {line.split()[0]: line.split()[1:] for line in done.stdout.splitlines()}
    assert float(found["Scafflix"][0]) < 1e-4 and float(found["SPPM-AS"][0]) < 1e-4
    assert float(found["FedP3"][1]) < float(found["FedP3"][0]) / 5
    assert (tmp_path / "loss_against_bits.png").exists() and (tmp_path / "run.ckpt").exists()


def test_the_small_model_is_pruned_as_the_readme_says(tmp_path):
    (code,) = blocks("py alone")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    dense, pruned = (float(line.split()[1]) for line in done.stdout.splitlines())
    assert f"dense {dense:.2f}, pruned {pruned:.2f}" in README


def test_the_example_has_at_most_ten_statements_after_the_imports():
    (code,) = blocks("python")
    lines = [line for line in code.splitlines() if line and not line.startswith(("import", "from"))]
    assert len(lines) <= 10


def test_there_are_exactly_two_commands_and_ci_runs_them():
    commands = "".join(blocks("bash run")).strip().splitlines()
    assert len(commands) == 2
    assert "experiments.scorecard" in commands[0] and "pytest" in commands[1]
    assert "bash run" in (ROOT / ".ci/run").read_text()


def test_every_linked_file_and_every_module_in_the_table_exists():
    for page in (ROOT / "README.md", ROOT / "BUILD.md", *(ROOT / "docs").rglob("*.md")):
        text = page.read_text()
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", text):
            assert (page.parent / target).exists(), (page, target)
        for module in set(re.findall(r"python -m ((?:experiments|commjax)[a-z0-9_.]*)", text)):
            path = ROOT / module.rstrip(".").replace(".", "/")
            assert path.with_suffix(".py").exists() or path.is_dir(), (page, module)


@pytest.mark.parametrize("driver", ["ef_bv", "scafflix", "cohort_squeeze", "fedp3", "symwanda"])
def test_the_table_of_the_readme_has_every_subcommand_and_no_other(driver):
    rows = [row for row in README.splitlines() if row.startswith("|") and f"`{driver} " in row]
    cells = [row.split("|")[2].replace(f"`{driver} ", "`").split("(`--")[0] for row in rows]
    named = {name for cell in cells for name in re.findall(r"`([a-z-]+)`", cell)}
    assert named == set(importlib.import_module(f"experiments.{driver}.commands").COMMANDS)
