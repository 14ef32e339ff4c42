"""FedP3: each client trains some layers, receives the others pruned, and uploads only the layers that it trains.

method              `fedp3` and `Method`: the round of all clients, its bits, its local models
client              the local training of one client
layers, plans       the layers of a network by name; the layers that each client trains, and its keep ratio for the
                    others
submodels           the pruning of the layers that a client does not train
local_pruning       the pruning inside a local step
aggregation         how the server averages the layers
wire                the bytes of a download and of an upload
remote              the client step and the server step, for a client on another machine
sketched            the algorithm that the theorems are about
ldp_fedp3           LDP-FedP3: clipped gradients with noise
private_training    a run with a privacy guarantee, and its audit by many runs
one_run_audit       an audit by one run with many canaries
"""

from commjax.algorithms.fedp3.method import (
    Client,
    HParams,
    Messages,
    Method,
    Server,
    deployed,
    fedp3,
    ledger,
    released,
)

__all__ = [
    "Client",
    "HParams",
    "Messages",
    "Method",
    "Server",
    "deployed",
    "fedp3",
    "ledger",
    "released",
]
