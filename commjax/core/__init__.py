"""What every method is made of: tuples, trees, the round, the host loop, checkpoints and records.

base           State, Metrics, Message, Compressor, Exchange, Algorithm
tree           arithmetic on pytrees that keeps dtypes
rounds         broadcast, mean, cohort; `federated` makes an Algorithm of a client step and a server step
local          steps on one client
runner         run, sweep, loop
checkpoint     atomic files that a run continues from
records        the metrics of a run, with its bits
conventions    what other papers charge for a message
checks         validation of arguments
signals        SIGTERM and SIGINT wait for a checkpoint
robust         reducers that bad messages do not move: median, trimmed mean, clipped mean
progress       a progress bar
"""

from typing import TYPE_CHECKING

from commjax.core.lazy import submodules

if TYPE_CHECKING:
    from commjax.core import (
        base,
        checkpoint,
        checks,
        conventions,
        local,
        progress,
        records,
        robust,
        rounds,
        runner,
        signals,
        tree,
    )

__all__ = [
    "base",
    "checkpoint",
    "checks",
    "conventions",
    "local",
    "progress",
    "records",
    "robust",
    "rounds",
    "runner",
    "signals",
    "tree",
]

__getattr__, __dir__ = submodules(__name__, __all__)
