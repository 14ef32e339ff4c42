"""Interfaces to other libraries.

optax     EF-BV as an Optax gradient transformation
flax      language models as Flax modules
fedjax    data sets of FedJAX
tfds      data sets of TensorFlow Datasets
"""

from typing import TYPE_CHECKING

from commjax.core.lazy import submodules

if TYPE_CHECKING:
    from commjax.integrations import fedjax, flax, optax, tfds

__all__ = ["fedjax", "flax", "optax", "tfds"]

__getattr__, __dir__ = submodules(__name__, __all__)
