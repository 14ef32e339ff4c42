"""Inner solvers for networks that use one gradient of F per round (Adam, Apollo, OASIS); helpers for `federated`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, PyTree

from commjax.prox.solvers.base import (
    Advanced,
    Oracle,
    Point,
    Result,
    Solver,
    Vector,
    check_fractions,
    check_positive,
    evaluate,
    iterate,
)

# (point, memory, number of the round) -> (x [d], memory)
Round = Callable[[Point, Any, Array], tuple[Vector, Any]]


def repeat(
    oracle: Oracle, x: Vector, budget: Any, tolerance: Any, memory: Any, update: Round, *, evaluations: int = 1
) -> Result:
    """Repeat a round until |grad F| <= tolerance or the budget is used, and return the last point.

    A value of F that is not finite also ends the run.  The last point is returned, because on a network the start often
    has the smallest |grad F| of all points.

    Args:
        oracle: the function to minimise.
        x: the start [d].
        budget: the largest number of rounds.
        tolerance: bound on |grad F|.
        memory: the initial memory of the method, a pytree.
        update: the round, (point, memory, number of the round) -> (x [d], memory).
        evaluations: number of aggregations of a round.

    Returns:
        The result.
    """

    def advance(current: Point, memory: Any, number: Array) -> Advanced:
        x, memory = update(current, memory, number)
        return evaluate(oracle, x), memory, evaluations, False

    return iterate(oracle, x, budget, tolerance, memory, advance, last=True)


def transformed(
    transform: optax.GradientTransformation, updates: PyTree, state: Any, params: PyTree
) -> tuple[PyTree, Any]:
    """Call an Optax transformation with standard dtype promotion, and keep the dtypes of the updates.

    Optax mixes its integer counters with floats, so it does not work with strict promotion.

    Args:
        transform: the transformation.
        updates: pytree of updates.
        state: state of the transformation.
        params: pytree of parameters.

    Returns:
        The new updates and the new state.
    """
    with jax.numpy_dtype_promotion("standard"):
        moved, state = transform.update(updates, state, params)
    return jax.tree.map(lambda new, old: jnp.asarray(new, old.dtype), moved, updates), state


def adam(learning_rate: Any, b1: float = 0.9, b2: float = 0.999, eps: float = 1e-8) -> Solver:
    """Adam on F (Kingma and Ba 2015; `optax.scale_by_adam`); a round is one gradient of F.

        m <- b1 m + (1 - b1) grad F(x)        v <- b2 v + (1 - b2) grad F(x)^2
        x <- x - learning_rate (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

    m and v are the moments of the gradient, t the number of the round.  With a constant rate, x ends up within about
    learning_rate of the minimiser in each coordinate.

    Thesis: the solver of its networks, Sec. D.5.1.

    Args:
        learning_rate: positive.
        b1: decay of the first moment, in [0, 1).
        b2: decay of the second moment, in [0, 1).
        eps: term that keeps the denominator away from 0.

    Returns:
        The solver.

    >>> F = Oracle(lambda x: (jnp.vdot(x, x) / 2, x))
    >>> result = adam(0.1)(F, jnp.ones(2), 20, 0.0)
    >>> int(result.iterations), int(result.evaluations), bool(result.residual < 0.5)
    (20, 21, True)
    """
    check_positive(learning_rate=learning_rate)
    check_fractions(b1=b1, b2=b2)
    transform = optax.scale_by_adam(b1, b2, eps)

    def solve(oracle: Oracle, x: Vector, budget: Any, tolerance: Any) -> Result:
        def update(current: Point, state: Any, number: Array) -> tuple[Vector, Any]:
            direction, state = transformed(transform, current.grad, state, current.x)
            return current.x - jnp.asarray(learning_rate, x.dtype) * direction, state

        return repeat(oracle, x, budget, tolerance, transform.init(x), update)

    return solve


def apollo(learning_rate: Any, b: float = 0.9, sigma: float = 1.0, eps: float = 1e-4) -> Solver:
    """Apollo (Ma 2020): a diagonal B from the weak secant equation d^T B d = -d^T (m_new - m), bounded below by sigma.

        m_new = m + (1 - b) / (1 - b^t) (grad F(x) - m)
        B <- B - (d^T (m_new - m) + d^T B d) / (|d|_4 + eps)^4 d^2,   m <- m_new
        d <- m / max(|B|, sigma)        x <- x - learning_rate d

    B, d and m start at 0.  As in the paper, the secant equation leaves out learning_rate.  Hence B estimates
    learning_rate times the Hessian, and (apart from eps) only learning_rate / sigma matters.

    Thesis: Apollo, Fig. 5.4 and Sec. D.1.1.
    Holds if: learning_rate / sigma is at most about 1/L, where F is L-smooth.
    Differs: |d|_4 is the norm of the whole vector; the paper takes one norm per parameter tensor.  There is no weight
    decay and no warm-up: the paper's warm-up takes 500 iterations, more than a cohort has.

    Args:
        learning_rate: positive.
        b: decay of the first moment, in [0, 1).
        sigma: lower bound of |B|, positive.
        eps: term that keeps |d|_4 away from 0.

    Returns:
        The solver.
    """
    check_positive(learning_rate=learning_rate, sigma=sigma)
    check_fractions(b=b)

    def solve(oracle: Oracle, x: Vector, budget: Any, tolerance: Any) -> Result:
        def update(current: Point, memory: Any, number: Array) -> tuple[Vector, Any]:
            m, d, B = memory
            t = (number + 1).astype(x.dtype)
            change = (1 - b) / (1 - b**t) * (current.grad - m)
            length = jnp.sum(d**4) ** 0.25 + eps
            unit = d / length  # avoids fourth powers of small numbers
            B = B - (jnp.vdot(unit, change) / length + jnp.vdot(unit, B * unit)) * unit**2
            m = m + change
            d = m / jnp.maximum(jnp.abs(B), sigma)
            return current.x - jnp.asarray(learning_rate, x.dtype) * d, (m, d, B)

        zero = jnp.zeros_like(x)
        return repeat(oracle, x, budget, tolerance, (zero, zero, zero), update)

    return solve


def oasis(
    learning_rate: Any = 0.1,
    b1: float = 0.0,
    b2: float = 0.99,
    floor: float = 1e-5,
    *,
    adaptive: bool = True,
    samples: int = 10,
    seed: int = 0,
) -> Solver:
    """OASIS (Jahani et al. 2022): Hutchinson's estimate of the Hessian's diagonal, averaged, with an adaptive stepsize.

        D <- b2 D + (1 - b2) z * (H(x) z),   z uniform on {-1, 1}^d        A = max(|D|, floor)
        e <- min(sqrt(1 + e / e_old) e, |x - x_old|_A / (2 |grad F(x) - grad F(x_old)|_{1/A}))
        m <- b1 m + (1 - b1) grad F(x)        x <- x - e m / A

    with |u|_A^2 = sum_j A_j u_j^2.

    H z is the derivative of the gradient along z (`jax.jvp`).  A client sends it together with the gradient: one
    evaluation, two vectors.

    Thesis: OASIS, Fig. 5.4 and Sec. D.1.1.
    Holds if: F is twice differentiable; the paper's theory is for b1 = 0.
    Differs: `adaptive` with b1 > 0 uses the same rule for e.

    Args:
        learning_rate: the first stepsize e, positive.
        b1: decay of the first moment, in [0, 1).
        b2: decay of D, in [0, 1).
        floor: lower bound of A, positive.
        adaptive: whether e adapts; otherwise all steps have e = learning_rate.
        samples: number of z whose mean is the initial D.
        seed: seed of the z.

    Returns:
        The solver.
    """
    check_positive(learning_rate=learning_rate, floor=floor, samples=samples)
    check_fractions(b1=b1, b2=b2)

    def solve(oracle: Oracle, x: Vector, budget: Any, tolerance: Any) -> Result:
        key = jax.random.key(seed)

        def probe(x: Vector, key: Array) -> tuple[Point, Vector]:
            z = jax.random.rademacher(key, x.shape, x.dtype)
            (value, grad), (_, curved) = jax.jvp(oracle.value_and_grad, (x,), (z,))
            return Point(x, value, grad), z * curved

        def advance(current: Point, memory: Any, number: Array) -> Advanced:
            D, m, step, growth, last = memory
            A = jnp.maximum(jnp.abs(D), floor)
            moved, turned = current.x - last.x, current.grad - last.grad
            smooth = jnp.sqrt(jnp.sum(A * moved**2)) / (2 * jnp.sqrt(jnp.sum(turned**2 / A)))
            adapted = jnp.minimum(jnp.sqrt(1 + growth) * step, smooth)
            usable = adaptive & (number > 0) & jnp.isfinite(adapted) & (adapted > 0)
            following = jnp.where(usable, adapted, step)
            m = b1 * m + (1 - b1) * current.grad
            trial, sample = probe(current.x - following * m / A, jax.random.fold_in(key, number + 1))
            # After the first step, nothing bounds the growth of the stepsize.
            growth = jnp.where(number > 0, following / step, jnp.inf)
            return trial, (b2 * D + (1 - b2) * sample, m, following, growth, current), 1, False

        keys = jax.random.split(jax.random.fold_in(key, 0), samples)
        D = jnp.mean(jax.lax.map(lambda key: probe(x, key)[1], keys), 0)
        step = jnp.asarray(learning_rate, x.dtype)
        last = Point(x, jnp.zeros((), x.dtype), jnp.zeros_like(x))
        memory = (D, jnp.zeros_like(x), step, jnp.full_like(step, jnp.inf), last)
        return iterate(oracle, x, budget, tolerance, memory, advance, last=True)

    return solve
