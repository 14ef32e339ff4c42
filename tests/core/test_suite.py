"""A test that crashes or hangs ends the run of pytest with its name, and does not leave it waiting."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long

ROOT = Path(__file__).parents[2]
BODY = {"crash": "os.kill(os.getpid(), signal.SIGILL)", "hang": "time.sleep(600)"}


@pytest.mark.parametrize("what", BODY)
def test_a_lost_worker_ends_the_run_with_the_name_of_the_test(tmp_path, what):
    lines = ["import os, signal, time", f"def test_bad(): {BODY[what]}", "def test_after(): pass"]
    (tmp_path / "test_it.py").write_text("\n".join(lines))
    (tmp_path / "test_other.py").write_text("def test_other(): pass")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    options = ["-c", ROOT / "pyproject.toml", "--rootdir", tmp_path, "-o", "timeout=4", "-p", "no:cacheprovider"]
    found = subprocess.run(
        [sys.executable, "-m", "pytest", *options, tmp_path],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert found.returncode == 1, found.stdout
    assert "crashed while running 'test_it.py::test_bad'" in found.stdout


def test_the_tiers_do_not_depend_on_where_the_clone_lies(tmp_path):
    """A folder above the clone may have the name of a folder of tests."""
    clone = tmp_path / "experiments" / "privacy" / "clone"
    (clone / "tests").mkdir(parents=True)
    for name in ("pyproject.toml", "tests/conftest.py"):
        shutil.copy(ROOT / name, clone / name)
    (clone / "commjax").symlink_to(ROOT / "commjax")
    (clone / "tests" / "test_quick.py").write_text("def test_quick(): pass")
    (clone / "tests" / "test_long.py").write_text("import pytest\npytestmark = pytest.mark.long\ndef test_long(): pass")
    for tier, wanted in (("not slow", "quick"), ("slow", "long"), ("long", "long")):
        words = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-n", "0", "-m", tier, "tests"]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
        found = subprocess.run(words, env=environment, cwd=clone, capture_output=True, text=True).stdout
        assert found.splitlines()[0] == f"tests/test_{wanted}.py::test_{wanted}" and found.count("::") == 1, found


def test_torch_does_not_use_amx():
    """Its bfloat16 products end with an illegal instruction on machines that advertise AMX; benchmarks set the same."""
    assert os.environ["ONEDNN_MAX_CPU_ISA"] == "AVX512_CORE_VNNI"
    show = "import experiments.bench, os; print(os.environ['ONEDNN_MAX_CPU_ISA'])"
    environment = {name: value for name, value in os.environ.items() if name != "ONEDNN_MAX_CPU_ISA"}
    found = subprocess.run([sys.executable, "-c", show], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert found.stdout.strip() == "AVX512_CORE_VNNI"


def test_no_test_changes_the_compiler():
    """The programs that tests compile are those that users run."""
    words = [
        "disable_most_" + "optimizations",
        "use_fusion_" + "emitters",
        "backend_optimization_" + "level",
        "compiler_" + "options",
    ]
    for path in [*(ROOT / "tests").rglob("*.py"), *(ROOT / "experiments").rglob("*.py"), *(ROOT / "colab").glob("*")]:
        assert not any(word in path.read_text().lower() for word in words), path
    assert not any(word in os.environ.get("XLA_FLAGS", "").lower() for word in words)
