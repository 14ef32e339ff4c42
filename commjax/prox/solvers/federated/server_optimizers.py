"""FedOpt: the mean of local steps is a pseudo-gradient for an optimizer of the server (FedAdam, FedAdagrad)."""

from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from commjax.prox.solvers.adaptive import repeat, transformed
from commjax.prox.solvers.base import (
    Oracle,
    Point,
    Result,
    Rows,
    Solver,
    Vector,
    check_fractions,
    check_positive,
    locals_of,
)
from commjax.prox.solvers.federated.local_steps import work


def fed_opt(
    local_steps: Any,
    local_stepsize: Any,
    server: optax.GradientTransformation,
    local: optax.GradientTransformation | None = None,
) -> Solver:
    """FedOpt (Reddi et al. 2021): the mean of local steps is a pseudo-gradient for the server's optimizer.

        y_i <- y_i - local_stepsize local(grad F_i(y_i)),   local_steps times from y_i = x
        x <- x + server(x - sum_i w_i y_i)

    Thesis: Sec. D.5.3.
    F = sum_i w_i F_i, x is the server's model, and y_i the model of client i.

    Holds if: local_steps = 1, or the F_i have the same minimiser.  Otherwise x converges to a point near the minimiser
    of F.
    Differs: there is no correction for the bias of adaptive local steps (Wang et al. 2021).

    Args:
        local_steps: number of local steps.
        local_stepsize: stepsize of the local steps.
        server: optimizer of the server, which includes its learning rate; `optax.sgd(1.0)` is FedAvg.
        local: an elementwise `optax.scale_by_...` whose state is initialised in each round.  None means plain gradient
            steps.

    Returns:
        The solver.  It needs `oracle.local`.
    """
    check_positive(local_steps=local_steps, local_stepsize=local_stepsize)
    local = local or optax.identity()

    def solve(oracle: Oracle, x: Vector, budget: Any, tolerance: Any) -> Result:
        cohort = locals_of(oracle)
        stepsize = jnp.asarray(local_stepsize, x.dtype)

        def step(rows: Rows, grads: Rows, state: Any) -> tuple[Rows, Any]:
            direction, state = transformed(local, grads, state, rows)
            return rows - stepsize * direction, state

        def update(current: Point, state: Any, number: Array) -> tuple[Vector, Any]:
            fresh = local.init(jnp.broadcast_to(current.x, (cohort.weights.shape[0], x.shape[0])))
            rows, _ = work(cohort, current.x, local_steps, fresh, step)
            move, state = transformed(server, current.x - cohort.weights @ rows, state, current.x)
            return current.x + move, state

        return repeat(oracle, x, budget, tolerance, server.init(x), update)

    return solve


class _Moments(NamedTuple):
    count: Array
    first: PyTree
    second: PyTree


EPSILON = ("outside", "inside", "uncorrected")


def _adaptive(
    rate: Any,
    *,
    b1: float,
    decay: float,
    weight: float,
    eps: float,
    bias_correction: bool,
    accumulator: float | None,
    epsilon: str,
) -> optax.GradientTransformation:
    """Return an Optax optimizer with v <- decay v + weight g^2; the other formulas are those of `fed_adam`.

    Optax itself has only bias-corrected variants.
    """
    if epsilon not in EPSILON:
        raise ValueError(f"epsilon={epsilon!r}; allowed: one of {', '.join(EPSILON)}")
    check_positive(learning_rate=rate, eps=eps)
    start = eps**2 if accumulator is None else accumulator

    def init(params: PyTree) -> _Moments:
        zeros = jax.tree.map(jnp.zeros_like, params)
        return _Moments(jnp.zeros((), jnp.int32), zeros, jax.tree.map(lambda leaf: jnp.full_like(leaf, start), params))

    def update(updates: PyTree, state: _Moments, params: PyTree = None) -> tuple[PyTree, _Moments]:
        count = state.count + 1
        first = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.first, updates)
        second = jax.tree.map(lambda v, g: decay * v + weight * g**2, state.second, updates)

        def move(m: Array, v: Array) -> Array:
            t = count.astype(m.dtype)
            bias_m, bias_v = (1 - b1**t, 1 - decay**t) if bias_correction else (1.0, 1.0)
            if epsilon == "inside":
                root = jnp.sqrt(v / bias_v + eps)
            else:
                root = jnp.sqrt(v / bias_v) + (eps if epsilon == "outside" else eps / jnp.sqrt(bias_v))
            return -jnp.asarray(rate, m.dtype) * (m / bias_m) / root

        return jax.tree.map(move, first, second), _Moments(count, first, second)

    return optax.GradientTransformation(init, cast(Any, update))


def fed_adam(
    local_steps: Any,
    local_stepsize: Any,
    learning_rate: Any,
    b1: float = 0.9,
    b2: float = 0.99,
    eps: float = 1e-3,
    *,
    local: optax.GradientTransformation | None = None,
    bias_correction: bool = False,
    initial_accumulator: float | None = None,
    epsilon: str = "outside",
) -> Solver:
    """FedAdam (Reddi et al. 2021): `fed_opt` with Adam on the server.

        m <- b1 m + (1 - b1) D        v <- b2 v + (1 - b2) D^2        x <- x - learning_rate m / (sqrt(v) + tau)

    D = x - sum_i w_i y_i is the pseudo-gradient, and tau = eps.  m starts at 0 and v at tau^2.  Public packages differ
    in the last three options.  With bias_correction=True and initial_accumulator=0 the server is `optax.adam`.

    Thesis: FedAdam-Adam and FedAdam-AdaGrad, with the `local` that the docstring of the package lists.
    Differs: there are no corrections of Wang et al. (2021) for adaptive local steps, which Sec. D.1.1 mentions.

    Args:
        local_steps: number of local steps.
        local_stepsize: stepsize of the local steps.
        learning_rate: learning rate of the server.
        b1: decay of the first moment, in [0, 1).
        b2: decay of the second moment, in [0, 1).
        eps: tau, which keeps the denominator away from 0.
        local: see `fed_opt`.
        bias_correction: whether to use m / (1 - b1^t) and v / (1 - b2^t).
        initial_accumulator: the initial v; None means tau^2.
        epsilon: the denominator: "outside", sqrt(v) + tau; "inside", sqrt(v + tau); both with the corrected v; or
            "uncorrected", (sqrt(v) + tau) / sqrt(1 - b2^t).

    Returns:
        The solver.  It needs `oracle.local`.
    """
    check_fractions(b1=b1, b2=b2)
    server = _adaptive(
        learning_rate,
        b1=b1,
        decay=b2,
        weight=1 - b2,
        eps=eps,
        bias_correction=bias_correction,
        accumulator=initial_accumulator,
        epsilon=epsilon,
    )
    return fed_opt(local_steps, local_stepsize, server, local)


def fed_adagrad(
    local_steps: Any,
    local_stepsize: Any,
    learning_rate: Any,
    b1: float = 0.0,
    eps: float = 1e-3,
    *,
    local: optax.GradientTransformation | None = None,
    initial_accumulator: float | None = None,
    epsilon: str = "outside",
) -> Solver:
    """FedAdagrad (Reddi et al. 2021): `fed_adam` with v <- v + D^2.

    Thesis: FedAdagrad-AdaGrad (Sec. D.1.1) with local=optax.scale_by_rss().  FedAdam-AdaGrad (Fig. 5.4) is `fed_adam`
    with that `local`.
    Differs: there are no corrections of Wang et al. (2021) for adaptive local steps, which Sec. D.1.1 mentions.

    Args:
        local_steps: number of local steps.
        local_stepsize: stepsize of the local steps.
        learning_rate: learning rate of the server.
        b1: decay of the first moment, in [0, 1).
        eps: tau, which keeps the denominator away from 0.
        local: see `fed_opt`.
        initial_accumulator: the initial v; None means tau^2.
        epsilon: see `fed_adam`.

    Returns:
        The solver.  It needs `oracle.local`.
    """
    check_fractions(b1=b1)
    server = _adaptive(
        learning_rate,
        b1=b1,
        decay=1.0,
        weight=1.0,
        eps=eps,
        bias_correction=False,
        accumulator=initial_accumulator,
        epsilon=epsilon,
    )
    return fed_opt(local_steps, local_stepsize, server, local)
