"""Gradient methods: gradient descent, Nesterov's method, and Scaffnew with local steps."""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from commjax.prox.solvers.base import (
    Advanced,
    Oracle,
    Point,
    Result,
    Rows,
    Solver,
    Vector,
    check_positive,
    check_whole,
    evaluate,
    iterate,
    locals_of,
)


def gradient_descent(L: Any) -> Solver:
    """Gradient descent with constant stepsize 1/L.

        x <- x - grad F(x) / L

    Holds if: F is L-smooth.  For the prox of f with parameter gamma, L is the smoothness constant of f plus 1/gamma.

    Args:
        L: smoothness constant of F.

    Returns:
        The solver.
    """
    check_positive(L=L)

    def solve(oracle: Oracle, x: Vector, budget: Any, tolerance: Any) -> Result:
        def advance(current: Point, memory: Any, number: Array) -> Advanced:
            return evaluate(oracle, current.x - current.grad / jnp.asarray(L, x.dtype)), memory, 1, False

        return iterate(oracle, x, budget, tolerance, (), advance)

    return solve


def accelerated_gradient_descent(L: Any, mu: Any) -> Solver:
    """Nesterov's method with constant momentum.

        x_new = y - grad F(y) / L
        y <- x_new + (sqrt(kappa) - 1) / (sqrt(kappa) + 1) (x_new - x),   x <- x_new,   kappa = L / mu

    Holds if: F is L-smooth and mu-strongly convex.

    Args:
        L: smoothness constant of F.
        mu: strong convexity constant of F.

    Returns:
        The solver.
    """
    check_positive(L=L, mu=mu)

    def solve(oracle: Oracle, x: Vector, budget: Any, tolerance: Any) -> Result:
        root = jnp.sqrt(jnp.asarray(L, x.dtype) / jnp.asarray(mu, x.dtype))
        momentum = (root - 1) / (root + 1)

        def advance(current: Point, last: Any, number: Array) -> Advanced:
            # `current` is the extrapolated point y, `last` the point x before extrapolation.
            x = current.x - current.grad / jnp.asarray(L, current.x.dtype)
            return evaluate(oracle, x + momentum * (x - last)), x, 1, False

        return iterate(oracle, x, budget, tolerance, x, advance)

    return solve


def scaffnew(gamma: Any, p: Any, most: int = 1000) -> Solver:
    """Scaffnew on F = sum_i w_i F_i: local gradient steps until a coin says to communicate.

        y_i <- y_i - gamma (grad F_i(y_i) - h_i),   from y_i = x until a coin of probability p shows heads
        x <- sum_i w_i y_i        h_i <- h_i + (p / gamma) (x - y_i)

    y_i is the model of client i and h_i its control variate.  One iteration of the budget is one communication.  The
    coins are the same in every call.

    Thesis: Scaffnew, Fig. 5.4.
    Holds if: every F_i is 1/gamma-smooth.

    Args:
        gamma: local stepsize.
        p: probability of communication, 0 < p <= 1.
        most: largest number of local steps between two communications.

    Returns:
        The solver.  It needs `oracle.local`.
    """
    check_positive(gamma=gamma)
    check_whole(most=most)
    if isinstance(p, int | float) and not 0 < p <= 1:
        raise ValueError(f"p={p}; allowed: 0 < p <= 1")

    def solve(oracle: Oracle, x: Vector, budget: Any, tolerance: Any) -> Result:
        cohort = locals_of(oracle)
        m = cohort.weights.shape[0]
        key = jax.random.key(0)

        def advance(current: Point, memory: Any, number: Array) -> Advanced:
            shift, tosses = memory
            rows = jnp.broadcast_to(current.x, (m, x.shape[0]))

            def step(carry: tuple[Rows, Array, Array]) -> tuple[Rows, Array, Array]:
                rows, t, _ = carry
                rows = rows - jnp.asarray(gamma, x.dtype) * (cohort.value_and_grad(rows)[1] - shift)
                return rows, t + 1, jax.random.bernoulli(jax.random.fold_in(key, t), p)

            rows, tosses, _ = jax.lax.while_loop(
                lambda carry: ~carry[2] & (carry[1] - tosses < most), step, (rows, tosses, jnp.zeros((), bool))
            )
            mean = cohort.weights @ rows
            shift = shift + jnp.asarray(p, x.dtype) / jnp.asarray(gamma, x.dtype) * (mean[None] - rows)
            return evaluate(oracle, mean), (shift, tosses), 1, False

        memory = (jnp.zeros((m, x.shape[0]), x.dtype), jnp.zeros((), jnp.int32))
        return iterate(oracle, x, budget, tolerance, memory, advance)

    return solve
