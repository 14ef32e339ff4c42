"""One method per file or folder.

Use the modules qualified: `ef_bv.ef_bv(...)`, `ef_bv.HParams`, `ef_bv.theoretical(...)`.

ef_bv                                   EF-BV, EF21, DIANA, gradient descent with compressed messages
scafflix, flix                          Scafflix, i-Scaffnew, Scaffnew, FLIX
fedp3                                   FedP3, LDP-FedP3 and the sketched algorithm
fedcr                                   FedCR, for whole networks and for layers
sppm_as, averaged_prox, local_gd        Cohort-Squeeze (SPPM-AS) and its baselines
recommend                               settings of SPPM-AS for a loss and data
fedavg, fedprox, scaffold, ditto        baselines
"""

from typing import TYPE_CHECKING

from commjax.core.lazy import submodules

if TYPE_CHECKING:
    from commjax.algorithms import (
        averaged_prox,
        ditto,
        ef_bv,
        fedavg,
        fedcr,
        fedp3,
        fedprox,
        flix,
        local_gd,
        recommend,
        scafflix,
        scaffold,
        sppm_as,
    )

__all__ = [
    "averaged_prox",
    "ditto",
    "ef_bv",
    "fedavg",
    "fedcr",
    "fedp3",
    "fedprox",
    "flix",
    "local_gd",
    "recommend",
    "scafflix",
    "scaffold",
    "sppm_as",
]

__getattr__, __dir__ = submodules(__name__, __all__)
