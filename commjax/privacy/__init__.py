"""Differential privacy: sampling, clipping and noise (`mechanism`), and the guarantees that follow (`accounting`)."""

from typing import TYPE_CHECKING

from commjax.core.lazy import submodules

if TYPE_CHECKING:
    from commjax.privacy import accounting, mechanism

__all__ = ["accounting", "mechanism"]

__getattr__, __dir__ = submodules(__name__, __all__)
