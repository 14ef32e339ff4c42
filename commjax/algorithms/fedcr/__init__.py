"""FedCR: clients share a body and keep their heads; they also share distributions of the features of each class.

method    `fedcr` for whole bodies
layers    `fedcr_layers`: each client trains some of the layers of the body
"""

from commjax.algorithms.fedcr.method import (
    Client,
    HParams,
    Network,
    Normal,
    Server,
    bits_down,
    check,
    deployed,
    divergence,
    fedcr,
    gaussian,
)

__all__ = [
    "Client",
    "HParams",
    "Network",
    "Normal",
    "Server",
    "bits_down",
    "check",
    "deployed",
    "divergence",
    "fedcr",
    "gaussian",
]
