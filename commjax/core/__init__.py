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
loop           the only host loop: `drive`
chunked        the job of `runner.loop`: placement, identity and checkpoint of a run in chunks
placement      where the state of a run lives: one device, clients or settings split over a mesh
shards         rows of clients on a mesh: padding, `shard_map`, arrays of several processes
checkpoint     files from which a run continues
code           what identifies a traced program or a function
identity       what must be the same for a checkpoint to be continued
files          files that are written atomically, by one process at a time
records        settings, metrics and bits of a run
trackers       pass the numbers of each round on, such as to a file of JSON lines
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
        batches,
        checkpoint,
        checks,
        chunked,
        code,
        cohorts,
        communication,
        compiled,
        compression,
        conventions,
        files,
        identity,
        local,
        loop,
        placement,
        progress,
        records,
        robust,
        round_keys,
        rounds,
        runner,
        shards,
        signals,
        trackers,
        tree,
    )

__all__ = [
    "base",
    "batches",
    "checkpoint",
    "checks",
    "chunked",
    "code",
    "cohorts",
    "communication",
    "compiled",
    "compression",
    "conventions",
    "files",
    "identity",
    "local",
    "loop",
    "placement",
    "progress",
    "records",
    "robust",
    "round_keys",
    "rounds",
    "runner",
    "shards",
    "signals",
    "trackers",
    "tree",
]

__getattr__, __dir__ = submodules(__name__, __all__)
