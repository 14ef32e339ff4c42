"""Inner solvers for networks with local steps on the clients, for F = sum_i w_i F_i.

One iteration of the budget is one round in the cohort.  The methods of the thesis (Fig. 5.4, Sec. D.1.1, Sec. D.5.3)
are called as follows:

    FedSGD, LocalGD           fed_opt(steps, stepsize, optax.sgd(1.0))
    FedAdam (Sec. D.5.3)      fed_opt(steps, stepsize, optax.sgd(1.0), local=optax.scale_by_adam())
    FedAdam-Adam              fed_adam(steps, stepsize, rate, local=optax.scale_by_adam())
    FedAdam-AdaGrad           fed_adam(steps, stepsize, rate, local=optax.scale_by_rss())
    FedAdagrad-AdaGrad        fed_adagrad(steps, stepsize, rate, local=optax.scale_by_rss())
    Mime-Adam, MimeLite-Adam, FedSpeed, Fed-LAMB    mime, mime_lite, fed_speed, fed_lamb
    Adam, Apollo, OASIS       adaptive.adam, adaptive.apollo, adaptive.oasis

The solvers use gradients of the full local objectives F_i, where the papers draw minibatches.  They return the last
point.  Like all solvers, they compute the gradient of F at the end of a round to report the residual.  Clients have to
send this gradient only if a tolerance needs it; `vectors_per_round` counts what a client sends.
"""

from commjax.prox.solvers.federated.corrected import fed_speed, mime, mime_lite
from commjax.prox.solvers.federated.layerwise import fed_lamb
from commjax.prox.solvers.federated.server_optimizers import fed_adagrad, fed_adam, fed_opt
from commjax.prox.solvers.federated.vectors import vectors_down, vectors_per_round

__all__ = [
    "fed_adagrad",
    "fed_adam",
    "fed_lamb",
    "fed_opt",
    "fed_speed",
    "mime",
    "mime_lite",
    "vectors_down",
    "vectors_per_round",
]
