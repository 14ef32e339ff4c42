"""Clients on several devices, on several hosts, or in the memory of one host.

mesh            a mesh of devices: client_mesh, shard_step, pmap_step, jit_step
hosts           one program in several processes: start, local_ids, rows, init
host_clients    more clients than fit on a device: their rows stay in host memory or in files
host_storage    these rows, in memory or in a folder
collectives     operations and bytes between devices in a compiled program
"""

from typing import TYPE_CHECKING

from commjax.core.lazy import submodules

if TYPE_CHECKING:
    from commjax.devices import collectives, host_clients, host_storage, hosts, mesh

__all__ = ["collectives", "host_clients", "host_storage", "hosts", "mesh"]

__getattr__, __dir__ = submodules(__name__, __all__)
