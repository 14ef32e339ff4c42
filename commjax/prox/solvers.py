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


class _Point(NamedTuple):
    x: Vector
    value: Array
    grad: Vector


class _Loop(NamedTuple):
    here: _Point
    best: _Point  # smallest |grad| so far
    memory: Any
    iterations: Int[Array, ""]
    evaluations: Int[Array, ""]
    broken: Bool[Array, ""]


def _at(oracle: Oracle, x: Vector) -> _Point:
    return _Point(x, *oracle.value_and_grad(x))


def _pick(condition: Array, yes: Any, no: Any) -> Any:
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)


def _finite(point: _Point) -> Array:
    return jnp.isfinite(point.value) & jnp.all(jnp.isfinite(point.grad))


def _limits(budget: Any, tolerance: Any, x: Vector) -> tuple[Array, Array]:
    """Numbers and arrays of any dtype are accepted."""
    return jnp.asarray(budget, jnp.int32), jnp.asarray(tolerance, x.dtype)


def _result(run: Any, tolerance: Array) -> Result:
    """A start that is not finite has not converged, whatever its gradient."""
    residual = jnp.linalg.norm(run.best.grad)
    converged = (residual <= tolerance) & _finite(run.best)
    code = jnp.where(converged, CONVERGED, jnp.where(run.broken, BROKE_DOWN, OUT_OF_BUDGET))
    return Result(run.best.x, run.iterations, run.evaluations, residual, code.astype(jnp.int32))


def iterate(
    oracle: Oracle,
    x: Vector,
    budget: Any,
    tolerance: Any,
    memory: Any,
    advance: Callable[[_Point, Any, Array], tuple[_Point, Any, Any, Any]],
) -> Result:
    """`advance(point, memory, number) -> (point, memory, evaluations, broken)` until |grad F| <= tolerance or the budget is used.

    The gradient at the start is one evaluation.  A step to a point that is not finite is undone and ends the run.
    """
    start = _at(oracle, x)
    budget, tolerance = _limits(budget, tolerance, x)
    small = jnp.zeros((), jnp.int32)

    def going_on(loop: _Loop) -> Array:
        return (loop.iterations < budget) & (jnp.linalg.norm(loop.here.grad) > tolerance) & ~loop.broken

    def one(loop: _Loop) -> _Loop:
        there, memory, count, broken = advance(loop.here, loop.memory, loop.iterations)
        good = _finite(there)
        here = _pick(good, there, loop.here)
        better = jnp.linalg.norm(here.grad) <= jnp.linalg.norm(loop.best.grad)
        return _Loop(
            here,
            _pick(better, here, loop.best),
            _pick(good, memory, loop.memory),
            loop.iterations + 1,
            loop.evaluations + count,
            broken | ~good,
        )

    loop = _Loop(start, start, memory, small, small + 1, ~_finite(start))
    loop = jax.lax.while_loop(going_on, one, loop)
    return _result(loop, tolerance)


_ONE = 1  # evaluations of a step without line search


def gradient_descent(L: Any) -> Solver:
    """x <- x - grad F(x) / L.  Holds if: F is L-smooth (for a prox, L of f_C plus 1/gamma)."""

    def solve(oracle: Oracle, x: Vector, budget: Any, tolerance: Any) -> Result:
        def advance(here, memory, number):
            return _at(oracle, here.x - here.grad / jnp.asarray(L, x.dtype)), memory, _ONE, jnp.zeros((), bool)

        return iterate(oracle, x, budget, tolerance, (), advance)

    return solve


def accelerated_gradient_descent(L: Any, mu: Any) -> Solver:
    """Nesterov's method with constant momentum (sqrt(kappa) - 1) / (sqrt(kappa) + 1), kappa = L / mu."""

    def solve(oracle: Oracle, x: Vector, budget: Any, tolerance: Any) -> Result:
        root = jnp.sqrt(jnp.asarray(L, x.dtype) / jnp.asarray(mu, x.dtype))
        momentum = (root - 1) / (root + 1)

        def advance(here, last, number):  # `here` is the extrapolated point y, `last` the one before extrapolation
            x = here.x - here.grad / jnp.asarray(L, here.x.dtype)
            return _at(oracle, x + momentum * (x - last)), x, _ONE, jnp.zeros((), bool)

        return iterate(oracle, x, budget, tolerance, x, advance)

    return solve


class _Search(NamedTuple):
    """A bracket around a zero of the directional derivative."""

    low: Array
    slope_low: Array
    high: Array
    slope_high: Array
    step: Array  # to be tried next; the accepted one when done
    point: _Point  # the last trial that is low enough
    count: Int[Array, ""]
    done: Bool[Array, ""]


def _search(here: _Point, slope: Array, step: Any) -> _Search:
    step = jnp.asarray(step, here.x.dtype)
    infinite = jnp.full((), jnp.inf, here.x.dtype)
    zero = jnp.zeros_like(step)
    return _Search(zero, slope, infinite, infinite, step, here, jnp.zeros((), jnp.int32), jnp.zeros((), bool))


def _narrow(search: _Search, here: _Point, direction: Vector, trial: _Point, c1: float, c2: float) -> _Search:
    """What the trial at `search.step` teaches: accept it, or narrow the bracket by the secant of its ends (kept off them), or
    double the step while the bracket is open."""
    slope, found = jnp.vdot(here.grad, direction), jnp.vdot(trial.grad, direction)
    # Near the optimum the decrease drowns in rounding; there the derivative alone decides.
    rounding = 10 * jnp.finfo(here.x.dtype).eps * jnp.abs(here.value)
    too_high = ~(trial.value <= here.value + c1 * search.step * slope + rounding) | ~_finite(trial)
    done = ~too_high & (jnp.abs(found) <= c2 * jnp.abs(slope))
    over = too_high | (found > 0)
    low, slope_low = _pick(over, (search.low, search.slope_low), (search.step, found))
    # Where F is not finite the slope says nothing: a steep one makes the secant a bisection.
    uphill = jnp.where(jnp.isfinite(found) & (found > 0), found, jnp.abs(slope))
    high, slope_high = _pick(over, (search.step, uphill), (search.high, search.slope_high))
    width = high - low
    secant = low - slope_low * width / (slope_high - slope_low)
    inside = jnp.clip(secant, low + 0.1 * width, high - 0.1 * width)
    inside = jnp.where(jnp.isfinite(inside), inside, low + width / 2)
    step = jnp.where(done, search.step, jnp.where(jnp.isfinite(high), inside, 2 * search.step))
    point = _pick(done | ~too_high, trial, search.point)
    return _Search(low, slope_low, high, slope_high, step, point, search.count + 1, done)


def line_search(
    oracle: Oracle, here: _Point, direction: Vector, step: Any, c1: float, c2: float, most: int = 20
) -> tuple[_Point, Array, Array, Array]:
    """A step t with F(x + t p) <= F + c1 t <g, p> and |<grad F(x + t p), p>| <= c2 |<g, p>| (strong Wolfe).

    Returns (point, t, evaluations, found).
    """

    def one(search: _Search) -> _Search:
        trial = _at(oracle, here.x + search.step * direction)
        return _narrow(search, here, direction, trial, c1, c2)

    start = _search(here, jnp.vdot(here.grad, direction), step)
    search = jax.lax.while_loop(lambda search: ~search.done & (search.count < most), one, start)
    return search.point, search.step, search.count, search.done


class _Descent(NamedTuple):
    here: _Point
    best: _Point  # smallest |grad| so far
    direction: Vector
    search: _Search
    memory: Any
    iterations: Int[Array, ""]
    evaluations: Int[Array, ""]
    broken: Bool[Array, ""]


def descend(
    oracle: Oracle,
    x: Vector,
    budget: Any,
    tolerance: Any,
    memory: Any,
    propose: Callable,
    c1: float,
    c2: float,
    most: int = 20,
) -> Result:
    """Line searches along `propose(here, before, direction, memory, number) -> (direction, first step, memory)`.

    One turn of the loop is one evaluation, whether it ends a line search or not, so that under vmap no run waits for another's.
    """
    start = _at(oracle, x)
    budget, tolerance = _limits(budget, tolerance, x)
    zero = jnp.zeros((), jnp.int32)

    def begin(here, before, direction, memory, number):
        direction, step, memory = propose(here, before, direction, memory, number)
        return direction, _search(here, jnp.vdot(here.grad, direction), step), memory

    def going_on(run: _Descent) -> Array:
        return (run.iterations < budget) & (jnp.linalg.norm(run.here.grad) > tolerance) & ~run.broken

    def one(run: _Descent) -> _Descent:
        trial = _at(oracle, run.here.x + run.search.step * run.direction)
        search = _narrow(run.search, run.here, run.direction, trial, c1, c2)
        failed = ~search.done & (search.count >= most)
        moved = search.done | failed
        here = _pick(moved, search.point, run.here)
        following = begin(here, run.here, run.direction, run.memory, run.iterations + 1)
        direction, search, memory = _pick(search.done, following, (run.direction, search, run.memory))
        better = jnp.linalg.norm(here.grad) <= jnp.linalg.norm(run.best.grad)
        iterations = run.iterations + moved.astype(jnp.int32)
        best = _pick(better, here, run.best)
        return _Descent(here, best, direction, search, memory, iterations, run.evaluations + 1, run.broken | failed)

    first = begin(start, start, -start.grad, memory, zero)
    run = _Descent(start, start, *first, zero, zero + 1, ~_finite(start))
    run = jax.lax.while_loop(going_on, one, run)
    return _result(run, tolerance)


def _first_step(here: _Point) -> Array:
    norm = jnp.linalg.norm(here.grad)
    return jnp.where(norm > 0, jnp.minimum(1.0, 1 / jnp.where(norm > 0, norm, 1)), 1.0)


def conjugate_gradients() -> Solver:
    """Nonlinear conjugate gradients (Polak and Ribiere, restarted when beta < 0), with a strong Wolfe line search."""

    def propose(here, before, direction, memory, number):
        square = jnp.vdot(before.grad, before.grad)
        change = jnp.vdot(here.grad, here.grad - before.grad)
        beta = jnp.maximum(change / jnp.where(square > 0, square, 1), 0)
        following = -here.grad + jnp.where(number > 0, beta, 0) * direction
        following = jnp.where(jnp.vdot(here.grad, following) < 0, following, -here.grad)
        # As much decrease as last time, to first order.
        ahead = jnp.vdot(here.grad, following)
        guess = 1.01 * 2 * (here.value - before.value) / jnp.where(ahead < 0, ahead, -1)
        guess = jnp.where((number > 0) & (guess > 0), jnp.minimum(guess, 1e6), _first_step(here))
        return following, guess, memory

    return lambda oracle, x, budget, tolerance: descend(oracle, x, budget, tolerance, (), propose, 1e-4, 0.4)


def bfgs() -> Solver:
    """BFGS with a strong Wolfe line search; the inverse Hessian starts as the identity."""

    def propose(here, before, direction, inverse, number):
        s, y = here.x - before.x, here.grad - before.grad
        curvature = jnp.vdot(s, y)
        positive = curvature > jnp.finfo(s.dtype).eps * jnp.linalg.norm(s) * jnp.linalg.norm(y)
        rho = jnp.where(positive, 1 / jnp.where(positive, curvature, 1), 0)
        along = inverse @ y
        # (I - rho s y^T) H (I - rho y s^T) + rho s s^T, without a product of matrices
        cross = jnp.outer(along, s)
        inverse = inverse - rho * (cross + cross.T) + (rho + rho**2 * jnp.vdot(y, along)) * jnp.outer(s, s)
        return -inverse @ here.grad, jnp.where(number > 0, 1.0, _first_step(here)), inverse

    def solve(oracle: Oracle, x: Vector, budget: Any, tolerance: Any) -> Result:
        return descend(oracle, x, budget, tolerance, jnp.eye(x.shape[0], dtype=x.dtype), propose, 1e-4, 0.9)

    return solve


def lbfgs(history: int = 10) -> Solver:
    """Limited-memory BFGS, from Optax (`optax.scale_by_lbfgs`), with our line search, so that evaluations are counted alike."""
    import optax

    transform = optax.scale_by_lbfgs(memory_size=history)

    def propose(here, before, direction, state, number):
        with jax.numpy_dtype_promotion("standard"):  # Optax mixes widths of integers
            scaled, state = transform.update(here.grad, state, here.x)
        following = -jnp.asarray(scaled)
        following = jnp.where(jnp.vdot(following, here.grad) < 0, following, -here.grad)
        return following, jnp.where(number > 0, 1.0, _first_step(here)), state

    def solve(oracle: Oracle, x: Vector, budget: Any, tolerance: Any) -> Result:
        return descend(oracle, x, budget, tolerance, transform.init(x), propose, 1e-4, 0.9)

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
            there = _at(oracle, here.x - damping * step)
            return _pick(square > 0, there, here), memory, _ONE, ~(square > 0)

        return iterate(oracle, x, budget, tolerance, (), advance)

    return solve


def _locals(oracle: Oracle) -> LocalOracle:
    if oracle.local is None:
        raise ValueError("this solver needs oracle.local, got None: it lets each client of the cohort work by itself")
    return oracle.local


def local_newton(steps: int = 1) -> Solver:
    """Each client takes `steps` Newton steps on its own F_i; the cohort averages.  One iteration is one aggregation.

    Holds if: it stops near, not at, the minimiser of F unless the F_i agree; a gradient of F is computed to measure the residual,
    and is not counted as an aggregation of its own because it travels with the models.
    """

    def solve(oracle: Oracle, x: Vector, budget: Any, tolerance: Any) -> Result:
        cohort = _locals(oracle)

        def advance(here, memory, number):
            rows = jnp.broadcast_to(here.x, (cohort.weights.shape[0], x.shape[0]))
            for _ in range(steps):
                _, grads = cohort.value_and_grad(rows)
                rows = rows - jnp.linalg.solve(cohort.hessian(rows), grads[..., None])[..., 0]
            return _at(oracle, cohort.weights @ rows), memory, _ONE, jnp.zeros((), bool)

        return iterate(oracle, x, budget, tolerance, (), advance)

    return solve


def scaffnew(gamma: Any, p: Any, most: int = 1000) -> Solver:
    """Scaffnew on F = sum_i w_i F_i with coins of probability p (a fixed sequence): one iteration of the budget is one communication.

    Holds if: every F_i is 1/gamma-smooth.
    """

    def solve(oracle: Oracle, x: Vector, budget: Any, tolerance: Any) -> Result:
        cohort = _locals(oracle)
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
            return _at(oracle, mean), (shift, tosses), _ONE, jnp.zeros((), bool)

        memory = (jnp.zeros((m, x.shape[0]), x.dtype), jnp.zeros((), jnp.int32))
        return iterate(oracle, x, budget, tolerance, memory, advance)

    return solve
