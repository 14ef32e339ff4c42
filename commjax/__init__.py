"""commjax: communication-efficient distributed and federated learning in JAX.

    import commjax as cj

    cj.algorithms      ef_bv, scafflix, fedp3, sppm_as and their baselines
    cj.compressors     top_k, rand_k, comp, natural, ... with constants and wire formats
    cj.sampling        samplings of the clients that take part in a round
    cj.run, cj.sweep, cj.loop    many rounds, on one device, several, or several hosts
    cj.core            State, Algorithm, rounds, checkpoints, records, trackers
    cj.devices         several devices, several hosts, clients in host memory
    cj.federation      a server and clients that exchange bytes; Flower
    cj.pruning         SymWanda's scores, masks and R^2-DSnoT
    cj.llm             Llama and OPT as pure functions
    cj.theory          every bound and constant as a function of plain numbers

Modules are imported when they are first used.  In docstrings, "Thesis: Thm 2.4.1" is a theorem of the thesis whose
methods this library implements (README.md).  A letter E, S, F, P or W with a number, such as E9, is a row of
`docs/errata.md`.
"""

import importlib
from typing import TYPE_CHECKING, Any

from commjax.core import moved

if TYPE_CHECKING:
    from commjax import (
        algorithms,
        cli,
        compressors,
        core,
        data,
        devices,
        federation,
        integrations,
        llm,
        models,
        privacy,
        problems,
        prox,
        pruning,
        sampling,
        theory,
    )
    from commjax.core.base import Algorithm, Compressor, Constants, Message, Metrics, Round, State
    from commjax.core.runner import loop, run, stack, sweep

__version__ = "0.1.0"

__all__ = [
    "Algorithm",
    "Compressor",
    "Constants",
    "Message",
    "Metrics",
    "Round",
    "State",
    "algorithms",
    "cli",
    "compressors",
    "core",
    "data",
    "devices",
    "federation",
    "integrations",
    "llm",
    "loop",
    "models",
    "privacy",
    "problems",
    "prox",
    "pruning",
    "run",
    "sampling",
    "stack",
    "sweep",
    "theory",
]

_RUNNER = ("loop", "run", "stack", "sweep")
_ROOMS = (
    "algorithms",
    "cli",
    "compressors",
    "core",
    "data",
    "devices",
    "federation",
    "integrations",
    "llm",
    "models",
    "privacy",
    "problems",
    "prox",
    "pruning",
    "sampling",
    "theory",
)

moved.install()


def __getattr__(name: str) -> Any:
    if name in _ROOMS:
        return importlib.import_module(f"commjax.{name}")
    if name in __all__:
        return getattr(importlib.import_module("commjax.core.runner" if name in _RUNNER else "commjax.core.base"), name)
    raise AttributeError(f"module 'commjax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
