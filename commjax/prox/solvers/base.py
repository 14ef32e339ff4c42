"""Inner solvers: min F(x), where every evaluation of F is one aggregation inside a cohort, and is counted.

A solver is a function `solve(oracle, x, budget, tolerance) -> Result`:

    oracle      F and its derivatives, on flat vectors
    x           the start, a flat vector [d]
    budget      the largest number of iterations
    tolerance   the solver stops when |grad F| <= tolerance

`budget` and `tolerance` may be traced, so a grid over them is one program.  No solver raises an error inside jit: the
result has a code that says how the solver ended (`CONVERGED`, `OUT_OF_BUDGET` or `BROKE_DOWN`).  No solver continues
from a value that is not finite.

Convex solvers return the point with the smallest |grad F| that they evaluated, and so does any solver that breaks
down.  Solvers for networks (`adaptive`, `federated`) return the last point: |grad F| of a network grows before it
falls, so the best of a few points would be the start.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

CONVERGED, OUT_OF_BUDGET, BROKE_DOWN = 0, 1, 2

Vector = Float[Array, "d"]


class Oracle(NamedTuple):
    """The function that a solver minimises; F = sum_i w_i f_i + |x - center|^2 / (2 gamma) for a prox.

    Attributes:
        value_and_grad: x [d] -> (F(x), grad F(x) [d]).
        hessian: x [d] -> the Hessian [d, d], or None.
        local: the parts of the clients, for solvers with local steps, or None.
    """

    value_and_grad: Callable[[Vector], tuple[Array, Vector]]
    hessian: Callable[[Vector], Float[Array, "d d"]] | None = None
    local: "LocalOracle | None" = None


class LocalOracle(NamedTuple):
    """The parts F_i of F = sum_i weights_i F_i, one per client.

    Attributes:
        value_and_grad: rows [m, d] -> (F_i(row_i) [m], grad F_i(row_i) [m, d]).
        hessian: rows [m, d] -> Hessians of F_i at row_i, [m, d, d].
        weights: add up to 1; 0 for clients that are not present.
    """

    value_and_grad: Callable[[Float[Array, "m d"]], tuple[Float[Array, "m"], Float[Array, "m d"]]]
    hessian: Callable[[Float[Array, "m d"]], Float[Array, "m d d"]]
    weights: Float[Array, "m"]


class Result(NamedTuple):
    """The result of one call of a solver; all counts are of this call.

    Attributes:
        params: the solution [d].
        iterations: number of iterations.
        evaluations: number of aggregations.  The value and the gradient at a point are one aggregation.
        residual: |grad F| at `params`.
        code: `CONVERGED`, `OUT_OF_BUDGET` or `BROKE_DOWN`.
        gradients: number of evaluations where the method needs grad F.  The residual needs it everywhere except at
            rejected trial points.
        values: number of evaluations where the method needs F, as line searches do (P12).
    """

    params: Vector
    iterations: Int[Array, ""]
    evaluations: Int[Array, ""]
    residual: Float[Array, ""]
    code: Int[Array, ""]
    gradients: Int[Array, ""]
    values: Int[Array, ""]


Solver = Callable[[Oracle, Vector, Any, Any], Result]


class Point(NamedTuple):
    """A point, and the value and gradient of F there.

    Attributes:
        x: the point [d].
        value: F(x).
        grad: grad F(x) [d].
    """

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
    """Evaluate F and its gradient at x: one aggregation.

    Args:
        oracle: the function.
        x: the point [d].

    Returns:
        The point with its value and gradient.
    """
    return Point(x, *oracle.value_and_grad(x))


def pick(condition: Array, yes: Any, no: Any) -> Any:
    """Apply `jnp.where` to the leaves of two trees.

    Args:
        condition: one boolean.
        yes: the tree to return if it is True.
        no: the tree to return if it is False, of the same structure.

    Returns:
        A tree.
    """
    return jax.tree.map(lambda a, b: jnp.where(condition, a, b), yes, no)


def finite(point: Point) -> Array:
    """Return whether the value and the gradient at a point are finite.

    Args:
        point: the point.

    Returns:
        One boolean.
    """
    return jnp.isfinite(point.value) & jnp.all(jnp.isfinite(point.grad))


def check_positive(**values: Any) -> None:
    """Raise a ValueError for a number that is not positive; traced values are not validated.

    Args:
        **values: the numbers by name.
    """
    for name, value in values.items():
        if isinstance(value, int | float) and not value > 0:
            raise ValueError(f"{name}={value}; allowed: positive")


def check_whole(**values: Any) -> None:
    """Raise a ValueError for a number that is not an integer of at least 1; traced values are not validated.

    Args:
        **values: the numbers by name.
    """
    for name, value in values.items():
        if isinstance(value, int | float) and (not value >= 1 or int(value) != value):
            raise ValueError(f"{name}={value}; allowed: a whole number, at least 1")


def limits(budget: Any, tolerance: Any, x: Vector) -> tuple[Array, Array]:
    """Convert a budget and a tolerance of any dtype to arrays.

    Args:
        budget: number of iterations.
        tolerance: bound on |grad F|.
        x: a vector of the dtype that the tolerance shall have.

    Returns:
        The budget as int32, and the tolerance in the dtype of x.
    """
    return jnp.asarray(budget, jnp.int32), jnp.asarray(tolerance, x.dtype)


def result_of(run: Any, point: Point, tolerance: Array, gradients: Any, values: Any) -> Result:
    """Build the result of a run.  A point that is not finite has not converged, whatever its gradient.

    Args:
        run: has the fields `iterations`, `evaluations` and `broken`.
        point: the point to return.
        tolerance: bound on |grad F|.
        gradients: see `Result`.
        values: see `Result`.

    Returns:
        The result.
    """
    residual = jnp.linalg.norm(point.grad)
    converged = (residual <= tolerance) & finite(point)
    code = jnp.where(converged, CONVERGED, jnp.where(run.broken, BROKE_DOWN, OUT_OF_BUDGET))
    gradients, values = (jnp.asarray(number, jnp.int32) for number in (gradients, values))
    return Result(point.x, run.iterations, run.evaluations, residual, code.astype(jnp.int32), gradients, values)


def iterate(
    oracle: Oracle,
    x: Vector,
    budget: Any,
    tolerance: Any,
    memory: Any,
    advance: Callable[[Point, Any, Array], tuple[Point, Any, Any, Any]],
    *,
    last: bool = False,
    searches: bool = False,
) -> Result:
    """Repeat a step until |grad F| <= tolerance or the budget is used.

    The gradient at the start is one evaluation.  A step to a point that is not finite is undone and ends the run.

    Args:
        oracle: the function to minimise.
        x: the start [d].
        budget: the largest number of steps.
        tolerance: bound on |grad F|.
        memory: the initial memory of the method, a pytree.
        advance: the step, (point, memory, number of the step) -> (point, memory, evaluations, whether it broke down).
        last: return the last point instead of the best one, unless the run broke down.
        searches: whether the method uses the values of F.

    Returns:
        The result.
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
    point = pick(loop.broken, loop.best, loop.here) if last else loop.best
    return result_of(loop, point, tolerance, loop.iterations + 1, loop.evaluations if searches else 0)


def gradient_descent(L: Any) -> Solver:
    """Gradient descent with constant stepsize 1/L.

        x <- x - grad F(x) / L

    Holds if: F is L-smooth (for a prox, L of f_C plus 1/gamma).

    Args:
        L: smoothness constant of F.

    Returns:
        The solver.
    """
    check_positive(L=L)

    def solve(oracle: Oracle, x: Vector, budget: Any, tolerance: Any) -> Result:
        def advance(here, memory, number):
            return evaluate(oracle, here.x - here.grad / jnp.asarray(L, x.dtype)), memory, 1, False

        return iterate(oracle, x, budget, tolerance, (), advance)

    return solve


def accelerated_gradient_descent(L: Any, mu: Any) -> Solver:
    """Nesterov's method with constant momentum.

        x_new = y - grad F(y) / L
        y <- x_new + (sqrt(kappa) - 1) / (sqrt(kappa) + 1) (x_new - x),   x <- x_new,   kappa = L / mu

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

        def advance(here, last, number):
            # `here` is the extrapolated point y, `last` the point x before extrapolation.
            x = here.x - here.grad / jnp.asarray(L, here.x.dtype)
            return evaluate(oracle, x + momentum * (x - last)), x, 1, False

        return iterate(oracle, x, budget, tolerance, x, advance)

    return solve


def _hessian(oracle: Oracle) -> Callable:
    if oracle.hessian is None:
        raise ValueError("this solver needs oracle.hessian, got None: use a problem with second derivatives")
    return oracle.hessian


def aicn(scale: float = 1.0) -> Solver:
    """Affine-invariant cubic Newton (Hanzely et al. 2022).

        x <- x - a H^{-1} g,   a = (sqrt(1 + 2 L |g|_x) - 1) / (L |g|_x),   |g|_x^2 = <g, H^{-1} g>

    One iteration is one aggregation: the clients send gradient and Hessian together.  An indefinite Hessian ends the
    run with BROKE_DOWN.

    Thesis: AICN, Sec. D.1.1.
    Holds if: F is semi-strongly self-concordant with constant `scale`, which the caller has to know.
    Differs: nothing; the paper has one machine, here the cohort's Hessians are added up.

    Args:
        scale: L, the constant of semi-strong self-concordance.

    Returns:
        The solver.  It needs `oracle.hessian`.
    """
    check_positive(scale=scale)

    def solve(oracle: Oracle, x: Vector, budget: Any, tolerance: Any) -> Result:
        hessian = _hessian(oracle)

        def advance(here, memory, number):
            factor = jnp.linalg.cholesky(hessian(here.x))  # NaN unless positive definite
            step = jax.scipy.linalg.cho_solve((factor, True), here.grad)
            square = jnp.vdot(here.grad, step)
            dual = scale * jnp.sqrt(jnp.maximum(square, jnp.finfo(x.dtype).tiny))
            damping = 2 / (1 + jnp.sqrt(1 + 2 * dual))  # (sqrt(1 + 2 dual) - 1) / dual without cancellation
            there = evaluate(oracle, here.x - damping * step)
            return pick(square > 0, there, here), memory, 1, ~(square > 0)

        return iterate(oracle, x, budget, tolerance, (), advance)

    return solve


def locals_of(oracle: Oracle) -> LocalOracle:
    """Return the parts of the clients, or raise a ValueError if the oracle has none.

    Args:
        oracle: the function to minimise.

    Returns:
        `oracle.local`.
    """
    if oracle.local is None:
        raise ValueError(
            "this solver needs oracle.local, got None: it lets each client of the cohort work by itself; on a mesh "
            "(axis_name) a cohort has none, because its rows are spread over the devices: run it on one device, "
            "or use another solver"
        )
    return oracle.local


def local_newton(steps: int = 1, most: int = 20) -> Solver:
    """Newton steps on each client, then a global line search towards the mean of the clients (Bischoff et al. 2023).

        d = sum_i w_i y_i - x,   y_i after `steps` Newton steps on F_i from x
        x <- x + t d,   the first t = 1, 1/2, 1/4, ... with F(x + t d) <= F(x) + 1e-4 t <grad F(x), d>

    The clients send their model together with the gradient at x.  Every trial of the line search is one aggregation.  A
    Hessian that is not positive definite, or a line search without success, ends the run with BROKE_DOWN.

    Thesis: LocalNewton with global line search, Sec. D.1.1.
    Holds if: it stops near, not at, the minimiser of F unless the F_i agree.
    Differs: steps are tried one after another; the paper's clients try a fixed grid of them at once.

    Args:
        steps: number of Newton steps of each client.
        most: largest number of trials of a line search.

    Returns:
        The solver.  It needs `oracle.local`.
    """
    check_whole(steps=steps, most=most)

    def solve(oracle: Oracle, x: Vector, budget: Any, tolerance: Any) -> Result:
        cohort = locals_of(oracle)

        def advance(here, memory, number):
            rows = jnp.broadcast_to(here.x, (cohort.weights.shape[0], x.shape[0]))
            convex = jnp.ones((), bool)
            for _ in range(steps):
                _, grads = cohort.value_and_grad(rows)
                factors = jnp.linalg.cholesky(cohort.hessian(rows))  # NaN unless positive definite
                there = (cohort.weights > 0)[:, None, None]
                convex = convex & jnp.all(jnp.isfinite(factors) | ~there)
                factors = jnp.where(there, factors, jnp.eye(x.shape[0], dtype=x.dtype))
                rows = rows - jax.vmap(lambda factor, grad: jax.scipy.linalg.cho_solve((factor, True), grad))(
                    factors, grads
                )
            direction = jnp.where(convex, cohort.weights @ rows - here.x, 0)
            slope = jnp.vdot(here.grad, direction)
            rounding = 10 * jnp.finfo(x.dtype).eps * jnp.abs(here.value)

            def too_high(trial):
                step, point, _ = trial
                return ~(point.value <= here.value + 1e-4 * step * slope + rounding)

            def shorten(trial):
                step, _, count = trial
                return step / 2, evaluate(oracle, here.x + step / 2 * direction), count + 1

            one = jnp.ones((), x.dtype)
            trial = one, evaluate(oracle, here.x + direction), jnp.ones((), jnp.int32)
            trial = jax.lax.while_loop(lambda trial: too_high(trial) & (trial[2] < most), shorten, trial)
            broken = ~convex | too_high(trial)
            return pick(broken, here, trial[1]), memory, trial[2], broken

        return iterate(oracle, x, budget, tolerance, (), advance, searches=True)

    return solve


def scaffnew(gamma: Any, p: Any, most: int = 1000) -> Solver:
    """Scaffnew on F = sum_i w_i F_i: local gradient steps until a coin says to communicate.

        y_i <- y_i - gamma (grad F_i(y_i) - h_i),   from y_i = x until a coin of probability p shows heads
        x <- sum_i w_i y_i        h_i <- h_i + (p / gamma) (x - y_i)

    One iteration of the budget is one communication.  The sequence of coins is fixed.

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
