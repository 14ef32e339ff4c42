"""The rooms of the package: which may import which, what stands at the top, what old names say."""

import ast
import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import commjax
from commjax.core import moved

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "commjax"

# A room imports from the rooms that are named here, and from no others.
MAY_IMPORT = {
    "core": set(),
    "theory": set(),
    "data": set(),
    "compressors": {"core"},
    "sampling": {"core", "data", "theory"},
    "prox": {"core", "sampling"},
    "privacy": {"core", "theory"},
    "llm": {"core", "data"},
    "pruning": {"core", "data", "llm"},
    "algorithms": {"core", "theory", "compressors", "sampling", "prox", "privacy", "pruning"},
    "problems": {"data"},
    "models": {"core", "data", "algorithms", "pruning"},
    "devices": {"core"},
    "federation": {"core", "compressors"},
    "integrations": {"core", "compressors", "algorithms", "data", "llm"},
    "cli": {"llm", "pruning"},
}
EXTRAS = (
    "array_record",
    "dp_accounting",
    "fedjax",
    "flwr",
    "importlib_resources",
    "lm_eval",
    "matplotlib",
    "scipy",
    "sklearn",
    "tensorflow_datasets",
    "torch",
    "transformers",
    "tyro",
)


def imported_rooms(path: Path) -> set[str]:
    """The rooms that a file imports anything from, also inside functions."""
    modules = []
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path} has a relative import"
            modules += [node.module] if node.module != "commjax" else [f"commjax.{name.name}" for name in node.names]
        elif isinstance(node, ast.Import):
            modules += [name.name for name in node.names]
    return {module.split(".")[1] for module in modules if module and module.startswith("commjax.")}


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_a_room_imports_from_the_rooms_below_it_only(room):
    files = list((PACKAGE / room).rglob("*.py"))
    assert files
    for path in files:
        assert imported_rooms(path) - {room} - MAY_IMPORT[room] <= {"__version__"}, path


def test_the_directions_have_no_circle():
    below: set[str] = set()
    while len(below) < len(MAY_IMPORT):
        ready = {room for room, may in MAY_IMPORT.items() if may <= below} - below
        assert ready, set(MAY_IMPORT) - below
        below |= ready


def test_the_top_has_rooms_and_nothing_else():
    names = {path.name for path in PACKAGE.iterdir()} - {"__pycache__"}
    assert names == {"__init__.py", "__main__.py", "py.typed", *MAY_IMPORT}
    assert set(MAY_IMPORT) < set(dir(commjax))
    assert all(importlib.import_module(f"commjax.{room}").__doc__ for room in MAY_IMPORT)


def test_the_public_face_reaches_everything():
    for room in MAY_IMPORT:
        package = getattr(commjax, room)
        for name in getattr(package, "__all__", ()):
            assert getattr(package, name) is not None
    assert commjax.run is commjax.core.runner.run and commjax.State is commjax.core.base.State
    for module in (commjax, commjax.algorithms):
        with pytest.raises(AttributeError, match="has no attribute 'absent'"):
            module.absent  # noqa: B018


def test_old_names_say_the_new_ones():
    for old, new in moved.MOVED.items():
        importlib.import_module(new)
        with pytest.raises(ImportError, match=f"^{old} is now {new}$"):
            importlib.import_module(old)
    for package, (new, names) in moved.MOVED_NAMES.items():
        for name in names:
            assert getattr(importlib.import_module(new), name)
            with pytest.raises(ImportError, match=f"^{package}.{name} is now {new}.{name}$"):
                exec(f"from {package} import {name}")
    with pytest.raises(ImportError, match=r"commjax\.cohorts is now commjax\.sampling\.samplings"):
        exec("from commjax import cohorts")
    with pytest.raises(ImportError, match=r"fedp3_wire is now commjax\.algorithms\.fedp3\.wire"):
        exec("from commjax.algorithms import fedp3_wire")
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'commjax\.absent'"):
        importlib.import_module("commjax.absent")


WITHOUT_EXTRAS = f"""
import importlib, pathlib, sys
import commjax
assert "jax" not in sys.modules, "import commjax imports JAX"
for name in {EXTRAS}:
    sys.modules[name] = None  # an import of it fails
for path in sorted(pathlib.Path(commjax.__file__).parent.rglob("*.py")):
    parts = path.relative_to(pathlib.Path(commjax.__file__).parents[1]).with_suffix("").parts
    if parts[-1] != "__main__":
        importlib.import_module(".".join(parts).removesuffix(".__init__"))
"""


def test_every_module_is_imported_without_any_extra():
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-c", WITHOUT_EXTRAS], env=environment, check=True, timeout=300)
