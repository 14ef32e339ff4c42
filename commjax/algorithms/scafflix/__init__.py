"""Scafflix: local training with control variates (Scaffnew) and one stepsize per client, on the FLIX objective.

method           `scafflix`, `iterations`, `i_scaffnew`, the stepsizes of the theorem
communication    what a round computes: coins, local steps, uploads, control variates
remote           the client step and the server step, for a client on another machine
"""

from commjax.algorithms.scafflix.communication import Client, Server
from commjax.algorithms.scafflix.method import (
    SPEC,
    HParams,
    Metrics,
    admissible_shift,
    check,
    check_shift,
    hparams,
    i_scaffnew,
    iterations,
    scafflix,
    scaffnew,
    theoretical,
)

__all__ = [
    "SPEC",
    "Client",
    "HParams",
    "Metrics",
    "Server",
    "admissible_shift",
    "check",
    "check_shift",
    "hparams",
    "i_scaffnew",
    "iterations",
    "scafflix",
    "scaffnew",
    "theoretical",
]
