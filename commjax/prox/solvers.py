"""Inner solvers: min F(x) where every evaluation of F is one aggregation inside a cohort, and is counted.

A solver is `solve(oracle, x, budget, tolerance) -> Result` on flat vectors.  `budget` (iterations) and `tolerance` (on |grad F|)
may be traced, so that a grid over them is one program.  No solver raises inside jit: it returns the best point that it saw and a
code that says how it ended, and never goes on from a value that is not finite.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

CONVERGED, OUT_OF_BUDGET, BROKE_DOWN = 0, 1, 2

Vector = Float[Array, "d"]


class Oracle(NamedTuple):
    """What a cohort answers.  F = sum_i w_i f_i + |x - center|^2 / (2 gamma) for a prox; any F for other uses."""

    value_and_grad: Callable[[Vector], tuple[Array, Vector]]
    hessian: Callable[[Vector], Float[Array, "d d"]] | None = None
    local: "LocalOracle | None" = None  # for solvers that let each client work by itself


class LocalOracle(NamedTuple):
    """F = sum_i weights_i F_i, client by client.  `weights` of clients that are not there are 0."""

    value_and_grad: Callable[[Float[Array, "m d"]], tuple[Float[Array, "m"], Float[Array, "m d"]]]
    hessian: Callable[[Float[Array, "m d"]], Float[Array, "m d d"]]
    weights: Float[Array, "m"]  # add up to 1


class Result(NamedTuple):
    """Counts are of this call.  `evaluations` is the number of aggregations: value and gradient at a point travel together."""

    params: Vector
    iterations: Int[Array, ""]
    evaluations: Int[Array, ""]
    residual: Float[Array, ""]  # |grad F| at params
    code: Int[Array, ""]


Solver = Callable[[Oracle, Vector, Any, Any], Result]


class Point(NamedTuple):
    """Where a solver is, and what the cohort said there."""

    x: Vector
    value: Array
    grad: Vector


class _Loop(NamedTuple):
    here: Point
    best: Point  # smallest |grad| so far
    memory: Any
    iterations: Int[Array, ""]
    evaluations: Int[Array, ""]
    broken: Bool[Array, ""]


def evaluate(oracle: Oracle, x: Vector) -> Point:
    """One aggregation"""
    return Point(x, *oracle.value_and_grad(x))


def pick(condition: Array, yes: Any, no: Any) -> Any:
    """`where` on trees"""
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)


def finite(point: Point) -> Array:
    """Value and gradient are numbers"""
    return jnp.isfinite(point.value) & jnp.all(jnp.isfinite(point.grad))


def limits(budget: Any, tolerance: Any, x: Vector) -> tuple[Array, Array]:
    """Numbers and arrays of any dtype are accepted."""
    return jnp.asarray(budget, jnp.int32), jnp.asarray(tolerance, x.dtype)


def result_of(run: Any, tolerance: Array) -> Result:
    """A start that is not finite has not converged, whatever its gradient."""
    residual = jnp.linalg.norm(run.best.grad)
    converged = (residual <= tolerance) & finite(run.best)
    code = jnp.where(converged, CONVERGED, jnp.where(run.broken, BROKE_DOWN, OUT_OF_BUDGET))
    return Result(run.best.x, run.iterations, run.evaluations, residual, code.astype(jnp.int32))


def iterate(
    oracle: Oracle,
    x: Vector,
    budget: Any,
    tolerance: Any,
    memory: Any,
    advance: Callable[[Point, Any, Array], tuple[Point, Any, Any, Any]],
) -> Result:
    """`advance(point, memory, number) -> (point, memory, evaluations, broken)` until |grad F| <= tolerance or the budget is used.

    The gradient at the start is one evaluation.  A step to a point that is not finite is undone and ends the run.
    """
    start = evaluate(oracle, x)
    budget, tolerance = limits(budget, tolerance, x)
    small = jnp.zeros((), jnp.int32)

    def going_on(loop: _Loop) -> Array:
        return (loop.iterations < budget) & (jnp.linalg.norm(loop.here.grad) > tolerance) & ~loop.broken

    def one(loop: _Loop) -> _Loop:
        there, memory, count, broken = advance(loop.here, loop.memory, loop.iterations)
        good = finite(there)
        here = pick(good, there, loop.here)
        better = jnp.linalg.norm(here.grad) <= jnp.linalg.norm(loop.best.grad)
        return _Loop(
            here,
            pick(better, here, loop.best),
            pick(good, memory, loop.memory),
            loop.iterations + 1,
            loop.evaluations + count,
            broken | ~good,
        )

    loop = _Loop(start, start, memory, small, small + 1, ~finite(start))
    loop = jax.lax.while_loop(going_on, one, loop)
    return result_of(loop, tolerance)


def gradient_descent(L: Any) -> Solver:
    """x <- x - grad F(x) / L.  Holds if: F is L-smooth (for a prox, L of f_C plus 1/gamma)."""

    def solve(oracle: Oracle, x: Vector, budget: Any, tolerance: Any) -> Result:
        def advance(here, memory, number):
            return evaluate(oracle, here.x - here.grad / jnp.asarray(L, x.dtype)), memory, 1, False

        return iterate(oracle, x, budget, tolerance, (), advance)

    return solve


def accelerated_gradient_descent(L: Any, mu: Any) -> Solver:
    """Nesterov's method with constant momentum (sqrt(kappa) - 1) / (sqrt(kappa) + 1), kappa = L / mu."""

    def solve(oracle: Oracle, x: Vector, budget: Any, tolerance: Any) -> Result:
        root = jnp.sqrt(jnp.asarray(L, x.dtype) / jnp.asarray(mu, x.dtype))
        momentum = (root - 1) / (root + 1)

        def advance(here, last, number):  # `here` is the extrapolated point y, `last` the one before extrapolation
            x = here.x - here.grad / jnp.asarray(L, here.x.dtype)
            return evaluate(oracle, x + momentum * (x - last)), x, 1, False

        return iterate(oracle, x, budget, tolerance, x, advance)

    return solve


def _hessian(oracle: Oracle) -> Callable:
    if oracle.hessian is None:
        raise ValueError("this solver needs oracle.hessian, got None: use a problem with second derivatives")
    return oracle.hessian


def aicn(scale: float = 1.0) -> Solver:
    """Affine-invariant cubic Newton: x <- x - a H^{-1} g, a = (sqrt(1 + 2 L |g|_x) - 1) / (L |g|_x), |g|_x^2 = <g, H^{-1} g>.

    `scale` (L) is the constant of semi-strong self-concordance.  One iteration is one aggregation: gradient and Hessian travel
    together.  An indefinite Hessian ends the run with BROKE_DOWN.
    """

    def solve(oracle: Oracle, x: Vector, budget: Any, tolerance: Any) -> Result:
        hessian = _hessian(oracle)

        def advance(here, memory, number):
            factor = jnp.linalg.cholesky(hessian(here.x))  # NaN unless positive definite
            step = jax.scipy.linalg.cho_solve((factor, True), here.grad)
            square = jnp.vdot(here.grad, step)
            dual = scale * jnp.sqrt(jnp.maximum(square, jnp.finfo(x.dtype).tiny))
            damping = 2 / (1 + jnp.sqrt(1 + 2 * dual))  # (sqrt(1 + 2 dual) - 1) / dual, without its cancellation
            there = evaluate(oracle, here.x - damping * step)
            return pick(square > 0, there, here), memory, 1, ~(square > 0)

        return iterate(oracle, x, budget, tolerance, (), advance)

    return solve


def locals_of(oracle: Oracle) -> LocalOracle:
    """The clients' own answers, or a ValueError"""
    if oracle.local is None:
        raise ValueError("this solver needs oracle.local, got None: it lets each client of the cohort work by itself")
    return oracle.local


def local_newton(steps: int = 1) -> Solver:
    """Each client takes `steps` Newton steps on its own F_i; the cohort averages.  One iteration is one aggregation.

    Holds if: it stops near, not at, the minimiser of F unless the F_i agree; a gradient of F is computed to measure the residual,
    and is not counted as an aggregation of its own because it travels with the models.
    """

    def solve(oracle: Oracle, x: Vector, budget: Any, tolerance: Any) -> Result:
        cohort = locals_of(oracle)

        def advance(here, memory, number):
            rows = jnp.broadcast_to(here.x, (cohort.weights.shape[0], x.shape[0]))
            for _ in range(steps):
                _, grads = cohort.value_and_grad(rows)
                rows = rows - jnp.linalg.solve(cohort.hessian(rows), grads[..., None])[..., 0]
            return evaluate(oracle, cohort.weights @ rows), memory, 1, False

        return iterate(oracle, x, budget, tolerance, (), advance)

    return solve


def scaffnew(gamma: Any, p: Any, most: int = 1000) -> Solver:
    """Scaffnew on F = sum_i w_i F_i with coins of probability p (a fixed sequence): one iteration of the budget is one communication.

    Holds if: every F_i is 1/gamma-smooth.
    """

    def solve(oracle: Oracle, x: Vector, budget: Any, tolerance: Any) -> Result:
        cohort = locals_of(oracle)
        m = cohort.weights.shape[0]
        key = jax.random.key(0)

        def advance(here, memory, number):
            shift, tosses = memory
            rows = jnp.broadcast_to(here.x, (m, x.shape[0]))

            def step(carry):
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
