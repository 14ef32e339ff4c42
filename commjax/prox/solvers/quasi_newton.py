"""Line searches and the solvers that use them: nonlinear conjugate gradients, BFGS, L-BFGS.

Optimistix has these three methods as well, but its steps are evaluations, its budget is static and its line search is
Armijo's.  Here the budget counts iterations and may be traced, because the thesis's grid is over the budget.  Steps
satisfy the strong Wolfe conditions, as in SciPy, which the thesis's figures are based on.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from commjax.prox.solvers.base import (
    Oracle,
    Point,
    Result,
    Solver,
    Vector,
    check_whole,
    evaluate,
    finite,
    limits,
    pick,
    result_of,
)


class _Search(NamedTuple):
    """A bracket around a zero of the directional derivative.

    Attributes:
        low: lower end of the bracket.
        slope_low: directional derivative at `low`.
        high: upper end of the bracket; infinite while the bracket is open.
        slope_high: directional derivative at `high`.
        step: the next step to try; the accepted step when done.
        point: the last trial point with sufficient decrease.
        count: number of trials.
        done: whether a step was accepted.
    """

    low: Array
    slope_low: Array
    high: Array
    slope_high: Array
    step: Array
    point: Point
    count: Int[Array, ""]
    done: Bool[Array, ""]


def _search(current: Point, slope: Array, step: Any) -> _Search:
    step = jnp.asarray(step, current.x.dtype)
    infinite = jnp.full((), jnp.inf, current.x.dtype)
    zero = jnp.zeros_like(step)
    return _Search(zero, slope, infinite, infinite, step, current, jnp.zeros((), jnp.int32), jnp.zeros((), bool))


def _narrow(search: _Search, current: Point, direction: Vector, trial: Point, c1: float, c2: float) -> _Search:
    """Accept the trial at `search.step`, narrow the bracket, or double the step while the bracket is open.

    The new trial is the zero of the secant between the ends of the bracket, kept away from the ends.
    """
    slope, slope_trial = jnp.vdot(current.grad, direction), jnp.vdot(trial.grad, direction)
    # Near the optimum the decrease is smaller than rounding errors; there the derivative alone decides.
    rounding = 10 * jnp.finfo(current.x.dtype).eps * jnp.abs(current.value)
    too_high = ~(trial.value <= current.value + c1 * search.step * slope + rounding) | ~finite(trial)
    done = ~too_high & (jnp.abs(slope_trial) <= c2 * jnp.abs(slope))
    over = too_high | (slope_trial > 0)
    low, slope_low = pick(over, (search.low, search.slope_low), (search.step, slope_trial))
    # Where F is not finite, its slope is useless; the slope at the start makes the secant close to a bisection.
    uphill = jnp.where(jnp.isfinite(slope_trial) & (slope_trial > 0), slope_trial, jnp.abs(slope))
    high, slope_high = pick(over, (search.step, uphill), (search.high, search.slope_high))
    width = high - low
    secant = low - slope_low * width / (slope_high - slope_low)
    inside = jnp.clip(secant, low + 0.1 * width, high - 0.1 * width)
    inside = jnp.where(jnp.isfinite(inside), inside, low + width / 2)
    step = jnp.where(done, search.step, jnp.where(jnp.isfinite(high), inside, 2 * search.step))
    point = pick(done | ~too_high, trial, search.point)
    return _Search(low, slope_low, high, slope_high, step, point, search.count + 1, done)


class _Descent(NamedTuple):
    """The state of `descend`; `best` is the point with the smallest |grad F| so far."""

    current: Point
    best: Point
    direction: Vector
    search: _Search
    memory: Any
    iterations: Int[Array, ""]
    evaluations: Int[Array, ""]
    broken: Bool[Array, ""]


# (direction [d], first step to try, memory)
Proposal = tuple[Vector, Any, Any]
# (point, previous point, previous direction [d], memory, number of the line search) -> a proposal
Propose = Callable[[Point, Point, Vector, Any, Array], Proposal]


def descend(
    oracle: Oracle,
    x: Vector,
    budget: Any,
    tolerance: Any,
    memory: Any,
    propose: Propose,
    *,
    c1: float,
    c2: float,
    most: int = 20,
) -> Result:
    """Minimise F by line searches along proposed directions.

    One iteration of the loop is one evaluation, whether or not it ends a line search.  Hence under vmap no run waits
    for the line search of another run.

    Args:
        oracle: the function to minimise.
        x: the start [d].
        budget: the largest number of line searches.
        tolerance: bound on |grad F|.
        memory: the initial memory of the method, a pytree.
        propose: (point, previous point, previous direction [d], memory, number of the line search) ->
            (direction [d], first step to try, memory).
        c1: constant of the sufficient decrease condition.
        c2: constant of the curvature condition.
        most: largest number of trials of a line search.

    Returns:
        The result; its point is the best one by |grad F|.
    """
    start = evaluate(oracle, x)
    budget, tolerance = limits(budget, tolerance, x)
    zero = jnp.zeros((), jnp.int32)

    def begin(
        current: Point, before: Point, direction: Vector, memory: Any, number: Array
    ) -> tuple[Vector, _Search, Any]:
        direction, step, memory = propose(current, before, direction, memory, number)
        return direction, _search(current, jnp.vdot(current.grad, direction), step), memory

    def going_on(run: _Descent) -> Array:
        return (run.iterations < budget) & (jnp.linalg.norm(run.current.grad) > tolerance) & ~run.broken

    def trial_step(run: _Descent) -> _Descent:
        trial = evaluate(oracle, run.current.x + run.search.step * run.direction)
        search = _narrow(run.search, run.current, run.direction, trial, c1, c2)
        failed = ~search.done & (search.count >= most)
        moved = search.done | failed
        current = pick(moved, search.point, run.current)
        following = begin(current, run.current, run.direction, run.memory, run.iterations + 1)
        direction, search, memory = pick(search.done, following, (run.direction, search, run.memory))
        better = jnp.linalg.norm(current.grad) <= jnp.linalg.norm(run.best.grad)
        iterations = run.iterations + moved.astype(jnp.int32)
        best = pick(better, current, run.best)
        return _Descent(current, best, direction, search, memory, iterations, run.evaluations + 1, run.broken | failed)

    first = begin(start, start, -start.grad, memory, zero)
    run = _Descent(start, start, *first, zero, zero + 1, ~finite(start))
    run = jax.lax.while_loop(going_on, trial_step, run)
    return result_of(run, run.best, tolerance, run.evaluations, run.evaluations)


def _first_step(current: Point) -> Array:
    norm = jnp.linalg.norm(current.grad)
    return jnp.where(norm > 0, jnp.minimum(1.0, 1 / jnp.where(norm > 0, norm, 1)), 1.0)


def conjugate_gradients() -> Solver:
    """Nonlinear conjugate gradients (Polak and Ribiere, restarted when beta < 0), with a strong Wolfe line search.

        beta = max(<g, g - g_old> / |g_old|^2, 0)        direction <- -g + beta direction

    g is the gradient of F, and g_old the gradient at the previous point.

    Returns:
        The solver.
    """

    def propose(current: Point, before: Point, direction: Vector, memory: Any, number: Array) -> Proposal:
        square = jnp.vdot(before.grad, before.grad)
        change = jnp.vdot(current.grad, current.grad - before.grad)
        beta = jnp.maximum(change / jnp.where(square > 0, square, 1), 0)
        following = -current.grad + jnp.where(number > 0, beta, 0) * direction
        following = jnp.where(jnp.vdot(current.grad, following) < 0, following, -current.grad)
        # To first order, the first step to try gives the same decrease as the last step did.
        ahead = jnp.vdot(current.grad, following)
        guess = 1.01 * 2 * (current.value - before.value) / jnp.where(ahead < 0, ahead, -1)
        guess = jnp.where((number > 0) & (guess > 0), jnp.minimum(guess, 1e6), _first_step(current))
        return following, guess, memory

    return lambda oracle, x, budget, tolerance: descend(oracle, x, budget, tolerance, (), propose, c1=1e-4, c2=0.4)


class _Updates(NamedTuple):
    """H = I + sum_k scale_k s_k s_k^T - rho_k (z_k s_k^T + s_k z_k^T), with z_k = H_k y_k computed once."""

    s: Float[Array, "k d"]
    z: Float[Array, "k d"]
    rho: Float[Array, "k"]
    scale: Float[Array, "k"]

    def times(self, v: Vector) -> Vector:
        along, across = self.s @ v, self.z @ v
        return v + (self.scale * along - self.rho * across) @ self.s - (self.rho * along) @ self.z


def bfgs(history: int = 100) -> Solver:
    """BFGS with a strong Wolfe line search; the inverse Hessian H starts as the identity.

        H <- (I - rho s y^T) H (I - rho y s^T) + rho s s^T,   rho = 1 / <s, y>
           = H - rho (z s^T + s z^T) + (rho + rho^2 <y, z>) s s^T,   z = H y

    s is the last change of x, and y the last change of the gradient.  H is stored as its updates (2 `history` vectors).
    For a few iterations in many dimensions this is much smaller than a matrix.

    Args:
        history: number of stored updates; after `history` iterations H starts again from the identity.

    Returns:
        The solver.
    """
    check_whole(history=history)

    def propose(current: Point, before: Point, direction: Vector, updates: Any, number: Array) -> Proposal:
        s, y = current.x - before.x, current.grad - before.grad
        curvature = jnp.vdot(s, y)
        positive = curvature > jnp.finfo(s.dtype).eps * jnp.linalg.norm(s) * jnp.linalg.norm(y)
        rho = jnp.where(positive, 1 / jnp.where(positive, curvature, 1), 0)
        slot = jnp.maximum(number - 1, 0) % history
        updates = pick(slot == 0, jax.tree.map(jnp.zeros_like, updates), updates)
        z = updates.times(y)
        new = _Updates(s, z, rho, rho + rho**2 * jnp.vdot(y, z))
        updates = jax.tree.map(lambda leaf, row: leaf.at[slot].set(row), updates, new)
        return -updates.times(current.grad), jnp.where(number > 0, 1.0, _first_step(current)), updates

    def solve(oracle: Oracle, x: Vector, budget: Any, tolerance: Any) -> Result:
        rows, row = jnp.zeros((history, x.shape[0]), x.dtype), jnp.zeros(history, x.dtype)
        return descend(oracle, x, budget, tolerance, _Updates(rows, rows, row, row), propose, c1=1e-4, c2=0.9)

    return solve


def lbfgs(history: int = 10) -> Solver:
    """Limited-memory BFGS from Optax (`optax.scale_by_lbfgs`) with the line search of this module.

    The line search counts evaluations as the other solvers do.

    Args:
        history: number of stored updates.

    Returns:
        The solver.
    """
    check_whole(history=history)
    transform = optax.scale_by_lbfgs(memory_size=history)

    def propose(current: Point, before: Point, direction: Vector, state: Any, number: Array) -> Proposal:
        with jax.numpy_dtype_promotion("standard"):  # Optax mixes integers of different widths
            scaled, state = transform.update(current.grad, state, current.x)
        following = -jnp.asarray(scaled)
        following = jnp.where(jnp.vdot(following, current.grad) < 0, following, -current.grad)
        return following, jnp.where(number > 0, 1.0, _first_step(current)), state

    def solve(oracle: Oracle, x: Vector, budget: Any, tolerance: Any) -> Result:
        return descend(oracle, x, budget, tolerance, transform.init(x), propose, c1=1e-4, c2=0.9)

    return solve
