"""commjax: communication-efficient distributed and federated learning in JAX."""

from commjax import checkpoint, clients, compressors, prox, records, runner, tree
from commjax.base import Algorithm, Compressor, Constants, Message, Metrics, Round, State

__version__ = "0.1.0"

__all__ = [
    "Algorithm",
    "Compressor",
    "Constants",
    "Message",
    "Metrics",
    "Round",
    "State",
    "checkpoint",
    "clients",
    "compressors",
    "prox",
    "records",
    "runner",
    "tree",
]
