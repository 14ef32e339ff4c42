"""commjax: communication-efficient distributed and federated learning in JAX.

In docstrings L1234 is a line of the thesis's source; E, S, F, P, W with a number are rows of `docs/errata.md`.
"""

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
