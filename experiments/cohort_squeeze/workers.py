"""The solvers of a network's prox: those that the thesis names, with one tuned rate or two."""

from collections.abc import Callable
from typing import Any, NamedTuple

import optax

from commjax.prox.solvers import adaptive, federated


class Worker(NamedTuple):
    """A solver of a network's prox.

    Attributes:
        make: (rate, function that unflattens the parameters) -> the solver.  With `two_rates` the rate is a pair, the
            clients' and the server's.
        kind: The solver's function, which says what a client sends (`federated.vectors_per_round`).
        two_rates: Whether the server has a rate of its own.
    """

    make: Callable[[Any, Any], Any]
    kind: Callable[..., Any]
    two_rates: bool = False


ADAM = Worker(lambda rate, unravel: adaptive.adam(rate), adaptive.adam)


# Every client takes three local steps in a local round, as in Fig. D.9.  The clients' rate is tuned, and the server's
# too if the server has an optimizer of its own.
WORKERS: dict[str, Worker] = {
    "FedSGD": Worker(lambda rate, unravel: federated.fed_opt(3, rate, optax.sgd(1.0)), federated.fed_opt),
    "FedAdam": Worker(
        lambda rate, unravel: federated.fed_opt(3, rate, optax.sgd(1.0), optax.scale_by_adam()), federated.fed_opt
    ),
    "FedAdam-Adam": Worker(
        lambda rate, unravel: federated.fed_adam(3, *rate, local=optax.scale_by_adam()),
        federated.fed_adam,
        two_rates=True,
    ),
    "FedAdam-AdaGrad": Worker(
        lambda rate, unravel: federated.fed_adam(3, *rate, local=optax.scale_by_rss()),
        federated.fed_adam,
        two_rates=True,
    ),
    "Mime-Adam": Worker(lambda rate, unravel: federated.mime(3, rate), federated.mime),
    "MimeLite-Adam": Worker(lambda rate, unravel: federated.mime_lite(3, rate), federated.mime_lite),
    "FedSpeed": Worker(lambda rate, unravel: federated.fed_speed(3, rate, 0.1), federated.fed_speed),
    "Fed-LAMB": Worker(lambda rate, unravel: federated.fed_lamb(3, rate, unravel), federated.fed_lamb),
    "Adam": ADAM,
    "Apollo": Worker(lambda rate, unravel: adaptive.apollo(rate), adaptive.apollo),
    "OASIS": Worker(lambda rate, unravel: adaptive.oasis(rate), adaptive.oasis),
}
