"""Line searches and what is built on them: nonlinear conjugate gradients, BFGS, L-BFGS, with the interface of `solvers`.

Optimistix has the three as well; its steps are evaluations, its budget is static and its line search is Armijo's.  Here the budget
counts iterations and may be traced (the grid of the thesis is over it), and steps satisfy the strong Wolfe conditions, as SciPy's
do, on which the thesis's figures stand.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int

from commjax.prox.solvers import (
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
    """A bracket around a zero of the directional derivative."""

    low: Array
    slope_low: Array
    high: Array
    slope_high: Array
    step: Array  # to be tried next; the accepted one when done
    point: Point  # the last trial that is low enough
    count: Int[Array, ""]
    done: Bool[Array, ""]


def _search(here: Point, slope: Array, step: Any) -> _Search:
    step = jnp.asarray(step, here.x.dtype)
    infinite = jnp.full((), jnp.inf, here.x.dtype)
    zero = jnp.zeros_like(step)
    return _Search(zero, slope, infinite, infinite, step, here, jnp.zeros((), jnp.int32), jnp.zeros((), bool))


def _narrow(search: _Search, here: Point, direction: Vector, trial: Point, c1: float, c2: float) -> _Search:
    """What the trial at `search.step` teaches: accept it, or narrow the bracket by the secant of its ends (kept off them), or
    double the step while the bracket is open."""
    slope, found = jnp.vdot(here.grad, direction), jnp.vdot(trial.grad, direction)
    # Near the optimum the decrease drowns in rounding; there the derivative alone decides.
    rounding = 10 * jnp.finfo(here.x.dtype).eps * jnp.abs(here.value)
    too_high = ~(trial.value <= here.value + c1 * search.step * slope + rounding) | ~finite(trial)
    done = ~too_high & (jnp.abs(found) <= c2 * jnp.abs(slope))
    over = too_high | (found > 0)
    low, slope_low = pick(over, (search.low, search.slope_low), (search.step, found))
    # Where F is not finite the slope says nothing: a steep one makes the secant a bisection.
    uphill = jnp.where(jnp.isfinite(found) & (found > 0), found, jnp.abs(slope))
    high, slope_high = pick(over, (search.step, uphill), (search.high, search.slope_high))
    width = high - low
    secant = low - slope_low * width / (slope_high - slope_low)
    inside = jnp.clip(secant, low + 0.1 * width, high - 0.1 * width)
    inside = jnp.where(jnp.isfinite(inside), inside, low + width / 2)
    step = jnp.where(done, search.step, jnp.where(jnp.isfinite(high), inside, 2 * search.step))
    point = pick(done | ~too_high, trial, search.point)
    return _Search(low, slope_low, high, slope_high, step, point, search.count + 1, done)


class _Descent(NamedTuple):
    here: Point
    best: Point  # smallest |grad| so far
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
    """Line searches along `propose(here, before, direction, memory, number, wanted) -> (direction, first step, memory)`.

    One turn of the loop is one evaluation, whether it ends a line search or not, so that under vmap no run waits for another's.
    A proposal that is not `wanted` (the search goes on) must leave the memory as it is; its direction and step are dropped.
    """
    start = evaluate(oracle, x)
    budget, tolerance = limits(budget, tolerance, x)
    zero = jnp.zeros((), jnp.int32)

    def begin(here, before, direction, memory, number, wanted):
        direction, step, memory = propose(here, before, direction, memory, number, wanted)
        return direction, _search(here, jnp.vdot(here.grad, direction), step), memory

    def going_on(run: _Descent) -> Array:
        return (run.iterations < budget) & (jnp.linalg.norm(run.here.grad) > tolerance) & ~run.broken

    def one(run: _Descent) -> _Descent:
        trial = evaluate(oracle, run.here.x + run.search.step * run.direction)
        search = _narrow(run.search, run.here, run.direction, trial, c1, c2)
        failed = ~search.done & (search.count >= most)
        moved = search.done | failed
        here = pick(moved, search.point, run.here)
        *following, memory = begin(here, run.here, run.direction, run.memory, run.iterations + 1, search.done)
        direction, search = pick(search.done, tuple(following), (run.direction, search))
        better = jnp.linalg.norm(here.grad) <= jnp.linalg.norm(run.best.grad)
        iterations = run.iterations + moved.astype(jnp.int32)
        best = pick(better, here, run.best)
        return _Descent(here, best, direction, search, memory, iterations, run.evaluations + 1, run.broken | failed)

    first = begin(start, start, -start.grad, memory, zero, jnp.ones((), bool))
    run = _Descent(start, start, *first, zero, zero + 1, ~finite(start))
    run = jax.lax.while_loop(going_on, one, run)
    return result_of(run, run.best, tolerance, run.evaluations, run.evaluations)


def _first_step(here: Point) -> Array:
    norm = jnp.linalg.norm(here.grad)
    return jnp.where(norm > 0, jnp.minimum(1.0, 1 / jnp.where(norm > 0, norm, 1)), 1.0)


def conjugate_gradients() -> Solver:
    """Nonlinear conjugate gradients (Polak and Ribiere, restarted when beta < 0), with a strong Wolfe line search."""

    def propose(here, before, direction, memory, number, wanted):
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


class _Updates(NamedTuple):
    """H = I + sum_k U_k^T M_k U_k, where U_k has the rows s_k and z_k = H_k y_k, found when the pair came, and

    M_k = [[rho_k + rho_k^2 <y_k, z_k>, -rho_k], [-rho_k, 0]]
    """

    U: Float[Array, "2*k d"]
    M: Float[Array, "k 2 2"]

    def times(self, V: Float[Array, "v d"]) -> Float[Array, "v d"]:
        """H v for each row v, reading U once for all"""
        along = (V @ self.U.T).reshape(len(V), -1, 2)
        return V + jnp.einsum("kij,vkj->vki", self.M, along).reshape(len(V), -1) @ self.U


def bfgs(history: int = 100) -> Solver:
    """BFGS with a strong Wolfe line search; the inverse Hessian H starts as the identity.

        H <- (I - rho s y^T) H (I - rho y s^T) + rho s s^T,   rho = 1 / <s, y>
           = H - rho (z s^T + s z^T) + (rho + rho^2 <y, z>) s s^T,   z = H y

    H is kept as its updates (2 `history` vectors), which for a few iterations in many dimensions is much less than a matrix; after
    `history` iterations it starts again from the identity.
    """
    check_whole(history=history)

    def propose(here, before, direction, updates, number, wanted):
        s, y = here.x - before.x, here.grad - before.grad
        curvature = jnp.vdot(s, y)
        positive = curvature > jnp.finfo(s.dtype).eps * jnp.linalg.norm(s) * jnp.linalg.norm(y)
        rho = jnp.where(positive, 1 / jnp.where(positive, curvature, 1), 0)
        slot = jnp.maximum(number - 1, 0) % history
        # Updates without coefficients are none: to start again, U need not be touched.
        anew = slot == 0
        updates = updates._replace(M=jnp.where(wanted & anew, 0, updates.M))
        # H y itself: H here.grad + direction is the same but for rounding, which in float32 breaks searches down.
        z, ahead = updates.times(jnp.stack([y, here.grad]))
        z = jnp.where(anew, y, z)
        U, M = jnp.stack([s, z]), jnp.array([[rho + rho**2 * jnp.vdot(y, z), -rho], [-rho, jnp.zeros_like(rho)]])
        at = jnp.where(wanted, slot, history)  # outside: a pair is written, or none
        kept = (
            updates.U.at[2 * at + jnp.arange(2, dtype=at.dtype)].set(U, mode="drop"),
            updates.M.at[at].set(M, mode="drop"),
        )
        ahead = ahead + (M @ (U @ here.grad)) @ U
        return -ahead, jnp.where(number > 0, 1.0, _first_step(here)), _Updates(*kept)

    def solve(oracle: Oracle, x: Vector, budget: Any, tolerance: Any) -> Result:
        none = _Updates(jnp.zeros((2 * history, x.shape[0]), x.dtype), jnp.zeros((history, 2, 2), x.dtype))
        return descend(oracle, x, budget, tolerance, none, propose, 1e-4, 0.9)

    return solve


def lbfgs(history: int = 10) -> Solver:
    """Limited-memory BFGS, from Optax (`optax.scale_by_lbfgs`), with our line search, so that evaluations are counted alike."""
    check_whole(history=history)
    transform = optax.scale_by_lbfgs(memory_size=history)

    def propose(here, before, direction, state, number, wanted):
        with jax.numpy_dtype_promotion("standard"):  # Optax mixes widths of integers
            scaled, following_state = transform.update(here.grad, state, here.x)
        following = -jnp.asarray(scaled)
        following = jnp.where(jnp.vdot(following, here.grad) < 0, following, -here.grad)
        return following, jnp.where(number > 0, 1.0, _first_step(here)), pick(wanted, following_state, state)

    def solve(oracle: Oracle, x: Vector, budget: Any, tolerance: Any) -> Result:
        return descend(oracle, x, budget, tolerance, transform.init(x), propose, 1e-4, 0.9)

    return solve
