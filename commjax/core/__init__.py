"""The parts that every method uses: tuples, pytrees, the round, the host loop, checkpoints and records.

base           State, Metrics, Message, Compressor, Exchange, Algorithm
tree           arithmetic on pytrees that keeps dtypes
communication  the verbs over the client axis: broadcast, mean
cohorts        the clients that take part in a round
compression    Message, Compressor
round_keys     the keys of a round
rounds         one round; `federated` makes an Algorithm of a client step and a server step
local          minibatches and gradient steps of one client
batches        the data of a round
runner         run, sweep, loop
compiled       the compiled programs of runs and sweeps
loop, chunked  the host loop, and the chunks that it advances
placement      where the state of a run is; `shards` has rows on the devices of a mesh
identity       which run a checkpoint belongs to
files          atomic writes and locks
trackers       the numbers of each round, to a file or a service
checkpoint     files from which a run continues, written atomically
records        settings, metrics and bits of a run
conventions    bits that other papers count for a message
checks         validation of arguments
signals        hold SIGTERM and SIGINT back until a checkpoint is written
robust         robust reducers: median, trimmed mean, clipped mean
progress       a progress bar
"""

from typing import TYPE_CHECKING

from commjax.core.lazy import submodules

if TYPE_CHECKING:
    from commjax.core import (
        base,
        checkpoint,
        checks,
        cohorts,
        communication,
        compression,
        conventions,
        local,
        progress,
        records,
        robust,
        round_keys,
        rounds,
        runner,
        signals,
        tree,
    )

__all__ = [
    "base",
    "checkpoint",
    "checks",
    "cohorts",
    "communication",
    "compression",
    "conventions",
    "local",
    "progress",
    "records",
    "robust",
    "round_keys",
    "rounds",
    "runner",
    "signals",
    "tree",
]

__getattr__, __dir__ = submodules(__name__, __all__)
