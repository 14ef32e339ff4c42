"""Inner solvers: minimise F(x), where every evaluation of F is one aggregation inside a cohort, and is counted.

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
from typing import Any, NamedTuple, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

CONVERGED, OUT_OF_BUDGET, BROKE_DOWN = 0, 1, 2

Vector = Float[Array, "d"]
# One row per client.
Rows = Float[Array, "m d"]
Hessian = Callable[[Vector], Float[Array, "d d"]]


class Oracle(NamedTuple):
    """The function that a solver minimises; F = sum_i w_i f_i + |x - center|^2 / (2 gamma) for a prox.

    Attributes:
        value_and_grad: x [d] -> (F(x), grad F(x) [d]).
        hessian: x [d] -> the Hessian [d, d], or None.
        local: the parts of the clients, for solvers with local steps, or None.
    """

    value_and_grad: Callable[[Vector], tuple[Array, Vector]]
    hessian: Hessian | None = None
    local: "LocalOracle | None" = None


class LocalOracle(NamedTuple):
    """The parts F_i of F = sum_i weights_i F_i, one per client.

    Attributes:
        value_and_grad: rows [m, d] -> (F_i(row_i) [m], grad F_i(row_i) [m, d]).
        hessian: rows [m, d] -> Hessians of F_i at row_i, [m, d, d].
        weights: add up to 1; 0 for clients that are not present.
    """

    value_and_grad: Callable[[Rows], tuple[Float[Array, "m"], Rows]]
    hessian: Callable[[Rows], Float[Array, "m d d"]]
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
        values: number of evaluations where the method needs F, as line searches do (erratum P12 in docs/errata.md).
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


# (next point, memory, number of evaluations, whether the step broke down)
Advanced = tuple[Point, Any, Any, Any]
# (point, memory, number of the step) -> the step's outcome
Advance = Callable[[Point, Any, Array], Advanced]


class _Loop(NamedTuple):
    """The state of `iterate`; `best` is the point with the smallest |grad F| so far."""

    current: Point
    best: Point
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


def check_fractions(**values: Any) -> None:
    """Raise a ValueError for a number outside [0, 1); traced values are not validated.

    Args:
        **values: the numbers by name.
    """
    for name, value in values.items():
        if isinstance(value, int | float) and not 0 <= value < 1:
            raise ValueError(f"{name}={value}; allowed: 0 <= {name} < 1")


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


@runtime_checkable
class Run(Protocol):
    """What `result_of` reads from the state of a loop."""

    @property
    def iterations(self) -> Int[Array, ""]:
        """Number of iterations."""
        ...

    @property
    def evaluations(self) -> Int[Array, ""]:
        """Number of aggregations."""
        ...

    @property
    def broken(self) -> Bool[Array, ""]:
        """Whether the run broke down."""
        ...


def result_of(run: Run, point: Point, tolerance: Array, gradients: Any, values: Any) -> Result:
    """Build the result of a run.  A point that is not finite has not converged, whatever its gradient.

    Args:
        run: the counts of the run, and whether it broke down.
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


def iterate(
    oracle: Oracle,
    x: Vector,
    budget: Any,
    tolerance: Any,
    memory: Any,
    advance: Advance,
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
        return (loop.iterations < budget) & (jnp.linalg.norm(loop.current.grad) > tolerance) & ~loop.broken

    def guarded_step(loop: _Loop) -> _Loop:
        trial, memory, count, broken = advance(loop.current, loop.memory, loop.iterations)
        good = finite(trial)
        current = pick(good, trial, loop.current)
        better = jnp.linalg.norm(current.grad) <= jnp.linalg.norm(loop.best.grad)
        return _Loop(
            current,
            pick(better, current, loop.best),
            pick(good, memory, loop.memory),
            loop.iterations + 1,
            loop.evaluations + count,
            broken | ~good,
        )

    loop = _Loop(start, start, memory, small, small + 1, ~finite(start))
    loop = jax.lax.while_loop(going_on, guarded_step, loop)
    point = pick(loop.broken, loop.best, loop.current) if last else loop.best
    return result_of(loop, point, tolerance, loop.iterations + 1, loop.evaluations if searches else 0)
