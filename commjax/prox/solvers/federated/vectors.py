"""Count the vectors of dimension d that a client sends and receives in one aggregation of a solver."""

from collections.abc import Callable

from commjax.prox.solvers.adaptive import adam, apollo, oasis
from commjax.prox.solvers.base import Solver
from commjax.prox.solvers.federated.corrected import fed_speed, mime, mime_lite
from commjax.prox.solvers.federated.layerwise import fed_lamb
from commjax.prox.solvers.federated.server_optimizers import fed_adagrad, fed_adam, fed_opt
from commjax.prox.solvers.gradient import scaffnew
from commjax.prox.solvers.newton import local_newton

# Vectors that a client sends per aggregation: without and with a gradient that only measures the residual.
_VECTORS: dict[Callable[..., Solver], tuple[int, int]] = {
    local_newton: (2, 2),  # model and gradient at x, together
    scaffnew: (1, 2),
    adam: (1, 1),
    fed_opt: (1, 2),
    fed_adam: (1, 2),
    fed_adagrad: (1, 2),
    mime: (1, 1),  # two aggregations per round: first gradients, then models
    mime_lite: (2, 2),  # model and gradient at the server point, together
    fed_speed: (1, 2),
    fed_lamb: (2, 3),  # model and second moment
    apollo: (1, 1),
    oasis: (2, 2),  # gradient and z * (H z)
}


def vectors_per_round(solver: Callable[..., Solver], residual: bool = False) -> int:
    """Return how many vectors of dimension d one client sends for each of `Result.evaluations`.

    Args:
        solver: a factory of `federated` or of `adaptive`, or `local_newton` or `scaffnew`.
        residual: whether a tolerance may stop the run.  Methods that average models then send a gradient beside the
            model.

    Returns:
        The number of vectors.

    >>> vectors_per_round(fed_adam), vectors_per_round(fed_adam, residual=True), vectors_per_round(mime_lite)
    (1, 2, 2)
    """
    if solver not in _VECTORS:
        raise ValueError(
            f"solver={solver}; allowed: {', '.join(factory.__name__ for factory in _VECTORS)} "
            "of prox.solvers, prox.federated and prox.adaptive"
        )
    return _VECTORS[solver][residual]


def vectors_down(solver: Callable[..., Solver]) -> int:
    """Return how many vectors of dimension d one client receives for each of `Result.evaluations`.

    A client receives x and what its local steps need besides x: MimeLite's c, from which the client computes the
    moments, or Fed-LAMB's u.

    Args:
        solver: see `vectors_per_round`.

    Returns:
        The number of vectors.

    >>> vectors_down(fed_adam), vectors_down(mime_lite), vectors_down(fed_lamb)
    (1, 2, 2)
    """
    vectors_per_round(solver)  # raises an error for an unknown solver
    return 2 if solver in (mime_lite, fed_lamb) else 1
