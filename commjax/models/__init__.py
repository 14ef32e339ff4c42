"""Networks as Flax modules (small networks, ResNet-18, networks with named layers); any network fast on a CPU."""

from typing import TYPE_CHECKING

from commjax.core.lazy import submodules
from commjax.models.fast import conv_general_dilated, fast_on_cpu

if TYPE_CHECKING:
    from commjax.models import layered, networks, resnet

__all__ = ["conv_general_dilated", "fast_on_cpu", "layered", "networks", "resnet"]

__getattr__, __dir__ = submodules(__name__, __all__)
