"""Submodules that are imported when they are first used."""

import importlib
from collections.abc import Callable, Sequence
from typing import Any

from commjax.core import moved


def submodules(package: str, names: Sequence[str]) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Make `__getattr__` and `__dir__` of a package.

    Args:
        package: `__name__` of the package.
        names: names of its submodules.

    Returns:
        `__getattr__`, which imports a submodule, and `__dir__`, which lists them for tab completion.
    """

    def get(name: str) -> Any:
        if name in names:
            return importlib.import_module(f"{package}.{name}")
        new, old_names = moved.MOVED_NAMES.get(package, ("", ()))
        if name in old_names:
            raise ImportError(f"{package}.{name} is now {new}.{name}")
        raise AttributeError(f"module {package!r} has no attribute {name!r}")

    return get, lambda: sorted(names)
