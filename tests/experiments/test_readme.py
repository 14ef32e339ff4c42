"""What the README promises a newcomer."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.M | re.S)


def test_the_example_works_when_pasted(tmp_path):
    (code,) = blocks("python")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[0]) < 1e-6


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
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / target).exists(), target
    for module in set(re.findall(r"python -m ([a-z_.]+)", README)):
        assert (ROOT / (module.replace(".", "/") + ".py")).exists(), module


def test_every_subcommand_in_the_readme_exists():
    from experiments.ef_bv import COMMANDS

    named = set(re.findall(r"experiments\.ef_bv ([a-z-]+)", README))
    assert named == set(COMMANDS)
