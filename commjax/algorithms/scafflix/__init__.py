"""Scafflix: local training with control variates (Scaffnew) and one stepsize per client, on the FLIX objective.

method           `scafflix`, `iterations`, `i_scaffnew`
communication    what a round computes: coins, local steps, uploads, control variates
shifts           the state before the first round, and admissible control variates
stepsizes        the hyperparameters of the theorems
remote           the client step and the server step, for a client on another machine
"""

from commjax.algorithms.scafflix.communication import Client, Server
from commjax.algorithms.scafflix.method import SPEC, HParams, Metrics, check, i_scaffnew, iterations, scafflix
from commjax.algorithms.scafflix.shifts import admissible_shift, check_shift
from commjax.algorithms.scafflix.stepsizes import scaffnew_hparams, theoretical

__all__ = [
    "SPEC",
    "Client",
    "HParams",
    "Metrics",
    "Server",
    "admissible_shift",
    "check",
    "check_shift",
    "i_scaffnew",
    "iterations",
    "scafflix",
    "scaffnew_hparams",
    "theoretical",
]
