"""What identifies code: a traced program, or the source and closure of a function that cannot be traced.

In a federation the server has no data of a client, so it cannot trace the client step; and a callback to the host is
no part of the traced program.
"""

import dataclasses
import functools
import hashlib
import inspect
import re
import types
import weakref
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from commjax.core import identity

_LIBRARIES = ("jax", "jaxlib", "jaxtyping", "beartype", "functools", "contextlib")


def of_program(jaxpr: ClosedJaxpr) -> tuple[str, list[Any]]:
    """Return what identifies a traced program: its text, its constants and its callbacks.

    Two methods may have equal states and hparams and differ in a compressor only; then their programs differ.

    Args:
        jaxpr: The closed jaxpr of the program.

    Returns:
        Its text, without memory addresses, which change from process to process; and its constants, also those of
        nested programs (jit, scan, cond, ...), and a digest of each callback to the host.  What a callback reads from
        a module, a file or a compiled extension is not seen (`of_function`).
    """
    return re.sub(r"0x[0-9a-f]+", "", str(jaxpr)), [*jaxpr.consts, *_nested(jaxpr.jaxpr, {})]


def _nested(jaxpr: Jaxpr, known: dict[int, str]) -> list[Any]:
    """The constants of the programs inside a program's equations.  `known`: digests, since many calls may share one."""
    found: list[Any] = []

    def look(value: Any) -> None:
        if isinstance(value, tuple | list):
            for part in value:
                look(part)
        elif isinstance(value, np.ndarray | jax.Array) and np.ndim(value):
            found.append(value)  # its text may be shortened
        elif isinstance(value, ClosedJaxpr | Jaxpr):
            if id(value) not in known:
                inner = value.jaxpr if isinstance(value, ClosedJaxpr) else value
                consts = value.consts if isinstance(value, ClosedJaxpr) else []
                parts = [*consts, *_nested(inner, known)]
                known[id(value)] = identity.digest(parts) if parts else ""
            found.extend([known[id(value)]] if known[id(value)] else [])

    for equation in jaxpr.eqns:
        look([atom.val for atom in equation.invars if isinstance(atom, Literal)])
        for name, value in equation.params.items():
            if name == "callback":
                found.append(of_function(value))
            else:
                look(value)
    return found


def of_function(thing: Any) -> str:
    """Hash a function: its source, its defaults and its closure, with the functions inside these.

    An object counts with its class and its attributes.  Not seen: module-level names that a function reads, what JAX
    or a compiled extension holds, files.  All parties need the same version of the sources.

    Args:
        thing: a function, an object, a tuple of them, or what a function may close over.

    Returns:
        Hex digits; the repr of a number or text.

    >>> def power(p): return lambda x: x**p
    >>> of_function(power(2)) == of_function(power(2)), of_function(power(2)) == of_function(power(3))
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
    if isinstance(thing, set | frozenset):
        return sorted(thing, key=repr)
    if isinstance(thing, weakref.WeakKeyDictionary):  # what was computed before
        return []
    if isinstance(thing, Mapping):
        return [part for item in sorted(thing.items(), key=lambda item: repr(item[0])) for part in item]
    if isinstance(thing, functools.partial):
        return [thing.func, thing.args, thing.keywords]
    if dataclasses.is_dataclass(thing) and not isinstance(thing, type):
        return [type(thing), *(getattr(thing, field.name) for field in dataclasses.fields(thing))]
    if isinstance(thing, types.MethodType):
        return [thing.__func__, thing.__self__]
    if isinstance(thing, types.FunctionType) and _home(thing.__globals__.get("__name__")) not in _LIBRARIES:
        cells = [cell.cell_contents for cell in thing.__closure__ or () if _full(cell)]
        return [thing.__qualname__, _source(thing.__code__), thing.__defaults__, thing.__kwdefaults__, cells]
    name = [getattr(thing, "__module__", None), getattr(thing, "__qualname__", None) or _plain(thing)]
    if (inner := getattr(thing, "__wrapped__", None)) is not None:  # functions of JAX, jitted and custom_vjp functions
        return [*name, inner, [rule for rule in vars(thing).values() if isinstance(rule, types.FunctionType)]]
    if isinstance(thing, type):
        return name if _home(thing.__module__) in _LIBRARIES else [*name, _source(thing)]
    if isinstance(thing, types.ModuleType) or _home(type(thing).__module__) in _LIBRARIES:
        return name
    attributes = getattr(thing, "__dict__", {}) | {k: getattr(thing, k) for k in _slots(thing) if hasattr(thing, k)}
    # With attributes, the repr may show the same again in another order, or less than all of it.
    return [type(thing), attributes] if attributes else [*name, type(thing)]


def _home(module: str | None) -> str:
    return str(module).split(".")[0]


def _slots(thing: Any) -> list[str]:
    named = [getattr(kind, "__slots__", ()) for kind in type(thing).__mro__]
    return [name for slots in named for name in ((slots,) if isinstance(slots, str) else slots)]


def _full(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _source(thing: types.CodeType | type) -> str:
    try:
        return inspect.getsource(thing)
    except (OSError, TypeError):  # typed into an interpreter
        return _plain(_compiled(thing))


def _compiled(thing: Any) -> Any:
    """Names, constants and instructions of what has no source; of a class, those of its functions."""
    if isinstance(thing, type):
        functions = [part for part in vars(thing).values() if isinstance(part, types.FunctionType)]
        return [_compiled(function.__code__) for function in functions]
    if isinstance(thing, types.CodeType):
        return [thing.co_code.hex(), thing.co_names, [_compiled(constant) for constant in thing.co_consts]]
    return thing


def _plain(thing: Any) -> str:
    return re.sub(r"0x[0-9a-f]+", "", repr(thing))
