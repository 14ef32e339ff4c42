"""A digest of a function's source and closure, to compare the functions of two machines.

The traced program (`identity.program`) would be exact.  But tracing the client step needs a client's data, which the
server does not have.
"""

import dataclasses
import functools
import hashlib
import inspect
import re
import types
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from commjax.core import identity

_LIBRARIES = ("jax", "jaxlib", "jaxtyping", "beartype", "functools", "contextlib")


def digest(thing: Any) -> str:
    """Hash a function: its source, its defaults and its closure, with the functions inside these.

    Module-level names that a function reads are not followed, and neither is JAX.  All parties need the same version of
    the sources.

    Args:
        thing: a function, a tuple of functions, or what a function may close over.

    Returns:
        Hex digits; the repr of a number or text.

    >>> def power(p): return lambda x: x**p
    >>> digest(power(2)) == digest(power(2)), digest(power(2)) == digest(power(3))
    (True, False)
    """
    return _digest(thing, {})


def _digest(thing: Any, known: dict[int, tuple[Any, str]]) -> str:
    """`known` holds the objects seen so far: each is visited once, also if a function closes over itself."""
    if isinstance(thing, str | bytes | bool | int | float | complex | type(None)):
        return repr(thing)
    if isinstance(thing, np.ndarray | np.generic | jax.Array):
        return identity.digest(thing)
    if id(thing) not in known:
        known[id(thing)] = (thing, "itself")
        parts = [type(thing).__qualname__, *(_digest(part, known) for part in _inside(thing))]
        result = hashlib.sha256("".join(f"{len(part)} {part}" for part in parts).encode()).hexdigest()[:16]
        known[id(thing)] = (thing, result)
    return known[id(thing)][1]


def _inside(thing: Any) -> list[Any]:
    if isinstance(thing, tuple | list):
        return list(thing)
    if isinstance(thing, Mapping):
        return [part for item in sorted(thing.items(), key=lambda item: repr(item[0])) for part in item]
    if isinstance(thing, functools.partial):
        return [thing.func, thing.args, thing.keywords]
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        return [getattr(thing, field.name) for field in dataclasses.fields(thing)]
    if isinstance(thing, types.MethodType):
        return [thing.__func__, thing.__self__]
    if isinstance(thing, types.FunctionType) and _home(thing) not in _LIBRARIES:
        cells = [cell.cell_contents for cell in thing.__closure__ or () if _full(cell)]
        return [thing.__qualname__, _source(thing), thing.__defaults__, thing.__kwdefaults__, cells]
    if callable(thing):  # functions of JAX, jitted functions, classes
        name = getattr(thing, "__qualname__", None) or _plain(thing)
        inner = getattr(thing, "__wrapped__", None)
        return [getattr(thing, "__module__", None), name] + ([] if inner is None else [inner])
    return [_plain(thing)]


def _home(function: types.FunctionType) -> str:
    return str(function.__globals__.get("__name__")).split(".")[0]


def _full(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _source(function: types.FunctionType) -> str:
    try:
        return inspect.getsource(function.__code__)
    except (OSError, TypeError):
        return function.__code__.co_code.hex()


def _plain(thing: Any) -> str:
    return re.sub(r"0x[0-9a-f]+", "", repr(thing))
