"""Clients on several devices, on several hosts, or in the memory of one host.

parallel        a mesh of devices: shard_step, pmap_step, run, sweep; the collectives of a compiled program
distributed     one program in several processes: start, rows, init, loop
host_clients    more clients than fit on a device: their rows stay in host memory or in files
"""

from typing import TYPE_CHECKING

from commjax.core.lazy import submodules

if TYPE_CHECKING:
    from commjax.devices import distributed, host_clients, parallel

__all__ = ["distributed", "host_clients", "parallel"]

__getattr__, __dir__ = submodules(__name__, __all__)
