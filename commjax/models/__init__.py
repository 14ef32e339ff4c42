"""Networks as Flax modules: small networks, ResNet-18, and networks with named layers."""

from typing import TYPE_CHECKING

from commjax.core.lazy import submodules

if TYPE_CHECKING:
    from commjax.models import layered, networks, resnet

__all__ = ["layered", "networks", "resnet"]

__getattr__, __dir__ = submodules(__name__, __all__)
