"""FedP3: each client trains some layers, is sent the others pruned, and sends back only what it trains.

method              `fedp3`: the round of all clients, its bits, its local models
layers, plans       the layers of a network by name; which client trains which, and how much of the others it receives
submodels           what a client receives of the layers that it does not train
aggregation         how the server joins the layers
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
    Server,
    deployed,
    fedp3,
    ledger,
    local_models,
    messages,
    released,
)

__all__ = [
    "Client",
    "HParams",
    "Server",
    "deployed",
    "fedp3",
    "ledger",
    "local_models",
    "messages",
    "released",
]
