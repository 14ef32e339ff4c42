"""FedCR: clients share a body and keep their heads; they also share distributions of the features of each class.

method           `fedcr` for whole bodies
distributions    the distributions of features and classes
layers           `fedcr_layers`: each client trains some of the layers of the body
"""

from commjax.algorithms.fedcr.distributions import Normal, divergence, gaussian
from commjax.algorithms.fedcr.method import (
    Client,
    HParams,
    Network,
    Server,
    bits_down,
    check,
    deployed,
    fedcr,
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
