"""Samplings: which clients take part in a round.

nice, full, block, stratified, nonuniform, importance      samplings with their theoretical constants
stratified_of                                              one client from each of some clusters
block_of                                                   some clients from one cluster
clustering                                                 clusters of similar clients
draws                                                      the types `Draw` and `Sampling`, and checks of arguments
"""

from commjax.sampling import clustering, draws, samplings
from commjax.sampling.draws import Draw, Sampling
from commjax.sampling.samplings import (
    block,
    block_of,
    full,
    importance,
    nice,
    nonuniform,
    stratified,
    stratified_of,
)

__all__ = [
    "Draw",
    "Sampling",
    "block",
    "block_of",
    "clustering",
    "draws",
    "full",
    "importance",
    "nice",
    "nonuniform",
    "samplings",
    "stratified",
    "stratified_of",
]
