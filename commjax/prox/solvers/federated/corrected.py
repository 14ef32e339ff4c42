"""Local steps with corrections: Mime and MimeLite (server statistics), FedSpeed (prox and perturbed gradients)."""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from commjax.prox.solvers.adaptive import repeat
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


def mime(
    local_steps: Any,
    local_stepsize: Any,
    b1: float = 0.9,
    b2: float = 0.99,
    eps: float = 1e-3,
    initial_accumulator: float | None = None,
    *,
    correct: bool = True,
) -> Solver:
    """Mime with Adam (Karimireddy et al. 2021): local steps with frozen server statistics and an SVRG correction.

        c = grad F(x),   then local_steps times from y_i = x:
        y_i <- y_i - local_stepsize (b1 m + (1 - b1) (grad F_i(y_i) - grad F_i(x) + c)) / (sqrt(v) + eps)
        m <- b1 m + (1 - b1) c        v <- b2 v + (1 - b2) c^2        x <- sum_i w_i y_i

    F = sum_i w_i F_i, y_i is the model of client i, and m and v are the server's moments.  The clients need c before
    the local steps, so a round is two aggregations and counts as two evaluations.

    Thesis: Mime-Adam, Fig. 5.4.
    Differs: v starts at grad F(x_0)^2, which is known from the first evaluation, because with v = 0 the first local
    steps would divide by eps.  There is no bias correction.

    Args:
        local_steps: number of local steps.
        local_stepsize: stepsize of the local steps.
        b1: decay of the first moment, in [0, 1).
        b2: decay of the second moment, in [0, 1).
        eps: term that keeps the denominator away from 0.
        initial_accumulator: the initial v; None means grad F(x_0)^2.
        correct: whether the local steps have the SVRG correction - grad F_i(x) + c; without it this is `mime_lite`.

    Returns:
        The solver.  It needs `oracle.local`.
    """
    check_positive(local_steps=local_steps, local_stepsize=local_stepsize, eps=eps)
    check_fractions(b1=b1, b2=b2)

    def solve(oracle: Oracle, x: Vector, budget: Any, tolerance: Any) -> Result:
        cohort = locals_of(oracle)
        stepsize = jnp.asarray(local_stepsize, x.dtype)

        def update(current: Point, memory: Any, number: Array) -> tuple[Vector, Any]:
            m, v = memory
            if initial_accumulator is None:
                v = jnp.where(number == 0, current.grad**2, v)
            anchor = jnp.broadcast_to(current.x, (cohort.weights.shape[0], x.shape[0]))
            shift = current.grad[None] - cohort.value_and_grad(anchor)[1] if correct else jnp.zeros_like(anchor)

            def step(rows: Rows, grads: Rows, _: Any) -> tuple[Rows, Any]:
                direction = (b1 * m[None] + (1 - b1) * (grads + shift)) / (jnp.sqrt(v) + eps)[None]
                return rows - stepsize * direction, ()

            rows, _ = work(cohort, current.x, local_steps, (), step)
            return cohort.weights @ rows, (b1 * m + (1 - b1) * current.grad, b2 * v + (1 - b2) * current.grad**2)

        start = jnp.full_like(x, 0.0 if initial_accumulator is None else initial_accumulator)
        return repeat(oracle, x, budget, tolerance, (jnp.zeros_like(x), start), update, evaluations=1 + correct)

    return solve


def mime_lite(
    local_steps: Any,
    local_stepsize: Any,
    b1: float = 0.9,
    b2: float = 0.99,
    eps: float = 1e-3,
    initial_accumulator: float | None = None,
) -> Solver:
    """MimeLite with Adam: `mime` without the SVRG correction, with grad F_i(y_i) alone in the local steps.

    c is needed only after the local steps.  Hence a client sends grad F_i(x) together with y_i: one evaluation per
    round and two vectors (`vectors_per_round`).

    Thesis: MimeLite-Adam, Sec. D.5.3.
    Holds if: local_steps = 1, or the F_i have the same minimiser.  Otherwise x converges to a point near the minimiser
    of F; `mime` has no such bias.
    Differs: as `mime`.

    Args:
        local_steps: as in `mime`.
        local_stepsize: as in `mime`.
        b1: as in `mime`.
        b2: as in `mime`.
        eps: as in `mime`.
        initial_accumulator: as in `mime`.

    Returns:
        The solver.  It needs `oracle.local`.
    """
    return mime(local_steps, local_stepsize, b1, b2, eps, initial_accumulator, correct=False)


def fed_speed(local_steps: Any, local_stepsize: Any, lam: Any, rho: Any = 0.1, alpha: Any = 1.0) -> Solver:
    """FedSpeed (Sun et al. 2023): local steps with perturbed gradients, a prox term and its correction h_i.

        g = grad F_i(y_i),   p = grad F_i(y_i + rho g),   q = (1 - alpha) g + alpha p
        y_i <- y_i - local_stepsize (q - h_i + (y_i - x) / lam),   local_steps times from y_i = x
        h_i <- h_i - (y_i - x) / lam        x <- sum_i w_i (y_i - lam h_i)

    F = sum_i w_i F_i, and y_i is the model of client i.  h_i starts at 0 and stays with the client for all rounds of
    the cohort.

    Thesis: FedSpeed, Fig. 5.4 and Sec. D.1.1.
    Holds if: local_stepsize (L (1 + alpha rho L) + 1/lam) <= 1, where the F_i are L-smooth.  At the limit sum_i w_i q_i
    = 0.  This is the minimiser of F if alpha rho = 0 or the F_i have the same minimiser, and a point near it otherwise.
    Differs: the perturbation is rho g, as in the paper's algorithm; its public code has rho g / |g|.

    Args:
        local_steps: number of local steps.
        local_stepsize: stepsize of the local steps.
        lam: inverse weight of the prox term, positive.
        rho: size of the perturbation, at least 0.
        alpha: share of the perturbed gradient, in [0, 1].

    Returns:
        The solver.  It needs `oracle.local`.
    """
    check_positive(local_steps=local_steps, local_stepsize=local_stepsize, lam=lam)
    if isinstance(rho, int | float) and not rho >= 0:
        raise ValueError(f"rho={rho}; allowed: at least 0")
    if isinstance(alpha, int | float) and not 0 <= alpha <= 1:
        raise ValueError(f"alpha={alpha}; allowed: 0 <= alpha <= 1")

    def solve(oracle: Oracle, x: Vector, budget: Any, tolerance: Any) -> Result:
        cohort = locals_of(oracle)
        stepsize, penalty, radius, mix = (jnp.asarray(number, x.dtype) for number in (local_stepsize, lam, rho, alpha))

        def update(current: Point, shifts: Any, number: Array) -> tuple[Vector, Any]:
            def step(rows: Rows, grads: Rows, _: Any) -> tuple[Rows, Any]:
                perturbed = cohort.value_and_grad(rows + radius * grads)[1]
                quasi = (1 - mix) * grads + mix * perturbed
                return rows - stepsize * (quasi - shifts + (rows - current.x[None]) / penalty), ()

            rows, _ = work(cohort, current.x, local_steps, (), step)
            shifts = shifts - (rows - current.x[None]) / penalty
            return cohort.weights @ (rows - penalty * shifts), shifts

        return repeat(oracle, x, budget, tolerance, jnp.zeros((cohort.weights.shape[0], x.shape[0]), x.dtype), update)

    return solve
