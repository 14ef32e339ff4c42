"""Newton's method with the cohort's Hessian (`aicn`) and with local Newton steps (`local_newton`)."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from commjax.prox.solvers.base import (
    Advanced,
    Hessian,
    Oracle,
    Point,
    Result,
    Solver,
    Vector,
    check_positive,
    check_whole,
    evaluate,
    iterate,
    locals_of,
    pick,
)

# State of the line search: (stepsize, point, number of trials).
Trial = tuple[Array, Point, Array]


def _hessian(oracle: Oracle) -> Hessian:
    if oracle.hessian is None:
        raise ValueError("this solver needs oracle.hessian, got None: use a problem with second derivatives")
    return oracle.hessian


def aicn(scale: float = 1.0) -> Solver:
    """Affine-invariant cubic Newton (Hanzely et al. 2022).

        x <- x - a H^{-1} g,   a = (sqrt(1 + 2 L |g|_x) - 1) / (L |g|_x),   |g|_x^2 = <g, H^{-1} g>

    g and H are the gradient and the Hessian of F at x.  One iteration is one aggregation: the clients send gradient and
    Hessian together.  A Hessian that is not positive definite ends the run with BROKE_DOWN.

    Thesis: AICN, Sec. D.1.1.
    Holds if: F is semi-strongly self-concordant with constant `scale`, which the caller has to know.
    Differs: the paper has one machine; here the Hessians of the cohort's clients are added up.

    Args:
        scale: L, the constant of semi-strong self-concordance.

    Returns:
        The solver.  It needs `oracle.hessian`.
    """
    check_positive(scale=scale)

    def solve(oracle: Oracle, x: Vector, budget: Any, tolerance: Any) -> Result:
        hessian = _hessian(oracle)

        def advance(current: Point, memory: Any, number: Array) -> Advanced:
            factor = jnp.linalg.cholesky(hessian(current.x))  # NaN unless positive definite
            step = jax.scipy.linalg.cho_solve((factor, True), current.grad)
            square = jnp.vdot(current.grad, step)
            dual = scale * jnp.sqrt(jnp.maximum(square, jnp.finfo(x.dtype).tiny))
            damping = 2 / (1 + jnp.sqrt(1 + 2 * dual))  # (sqrt(1 + 2 dual) - 1) / dual without cancellation
            trial = evaluate(oracle, current.x - damping * step)
            return pick(square > 0, trial, current), memory, 1, ~(square > 0)

        return iterate(oracle, x, budget, tolerance, (), advance)

    return solve


def local_newton(steps: int = 1, most: int = 20) -> Solver:
    """Newton steps on each client, then a global line search towards the mean of the clients (Bischoff et al. 2023).

        d = sum_i w_i y_i - x,   y_i after `steps` Newton steps on F_i from x
        x <- x + t d,   the first t = 1, 1/2, 1/4, ... with F(x + t d) <= F(x) + 1e-4 t <grad F(x), d>

    The clients send their model together with the gradient at x.  Every trial of the line search is one aggregation.  A
    Hessian that is not positive definite, or a line search without success, ends the run with BROKE_DOWN.

    Thesis: LocalNewton with global line search, Sec. D.1.1.
    Holds if: the F_i have the same minimiser.  Otherwise x converges to a point near the minimiser of
    F = sum_i w_i F_i.
    Differs: the line search tries steps one after another; in the paper, clients try a fixed grid of steps at once.

    Args:
        steps: number of Newton steps of each client.
        most: largest number of trials of a line search.

    Returns:
        The solver.  It needs `oracle.local`.
    """
    check_whole(steps=steps, most=most)

    def solve(oracle: Oracle, x: Vector, budget: Any, tolerance: Any) -> Result:
        cohort = locals_of(oracle)

        def advance(current: Point, memory: Any, number: Array) -> Advanced:
            rows = jnp.broadcast_to(current.x, (cohort.weights.shape[0], x.shape[0]))
            convex = jnp.ones((), bool)
            for _ in range(steps):
                _, grads = cohort.value_and_grad(rows)
                factors = jnp.linalg.cholesky(cohort.hessian(rows))  # NaN unless positive definite
                present = (cohort.weights > 0)[:, None, None]
                convex = convex & jnp.all(jnp.isfinite(factors) | ~present)
                factors = jnp.where(present, factors, jnp.eye(x.shape[0], dtype=x.dtype))
                rows = rows - jax.vmap(lambda factor, grad: jax.scipy.linalg.cho_solve((factor, True), grad))(
                    factors, grads
                )
            direction = jnp.where(convex, cohort.weights @ rows - current.x, 0)
            slope = jnp.vdot(current.grad, direction)
            rounding = 10 * jnp.finfo(x.dtype).eps * jnp.abs(current.value)

            def too_high(trial: Trial) -> Array:
                step, point, _ = trial
                return ~(point.value <= current.value + 1e-4 * step * slope + rounding)

            def shorten(trial: Trial) -> Trial:
                step, _, count = trial
                return step / 2, evaluate(oracle, current.x + step / 2 * direction), count + 1

            trial = jnp.ones((), x.dtype), evaluate(oracle, current.x + direction), jnp.ones((), jnp.int32)
            trial = jax.lax.while_loop(lambda trial: too_high(trial) & (trial[2] < most), shorten, trial)
            broken = ~convex | too_high(trial)
            return pick(broken, current, trial[1]), memory, trial[2], broken

        return iterate(oracle, x, budget, tolerance, (), advance, searches=True)

    return solve
