"""Fed-LAMB: local steps whose length is set layer by layer."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, PyTree

from commjax.prox.solvers.adaptive import repeat, transformed
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


def fed_lamb(
    local_steps: Any,
    local_stepsize: Any,
    unravel: Callable[[Vector], PyTree],
    *,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    weight_decay: float = 0.0,
) -> Solver:
    """Fed-LAMB (Karimi et al. 2022): local steps whose length is set layer by layer (`optax.scale_by_trust_ratio`).

        v_i = u,   y_i = x,   then local_steps times, with g = grad F_i(y_i):
        m_i <- b1 m_i + (1 - b1) g        v_i <- b2 v_i + (1 - b2) g^2
        p = m_i / (sqrt(u) + eps) + weight_decay y_i        y_i <- y_i - local_stepsize p |y_i| / |p|
        x <- sum_i w_i y_i        u <- max(u, sum_i w_i v_i)

    The step of y_i is taken for each layer (leaf of unravel(y_i)) by itself.  A layer at 0 takes the step
    local_stepsize p.  u starts at eps.  m_i starts at 0 and stays with the client for all rounds of the cohort.  A
    client sends y_i and v_i: two vectors.

    Thesis: Fed-LAMB, Sec. D.1.1.
    Holds if: every step of a layer y has the length local_stepsize |y|, whatever the gradient, so x ends up at about
    this distance from a minimiser.
    Differs: the scaling phi(|y|) is |y|, and v_i starts at u; the thesis states neither.  A gradient uses all rows of a
    client, where the paper averages over minibatches.

    Args:
        local_steps: number of local steps.
        local_stepsize: stepsize of the local steps.
        unravel: flat vector [d] -> pytree whose leaves are the layers.
        b1: decay of the first moment, in [0, 1).
        b2: decay of the second moment, in [0, 1).
        eps: term that keeps the denominator away from 0.
        weight_decay: weight of y_i in the direction p.

    Returns:
        The solver.  It needs `oracle.local`.
    """
    check_positive(local_steps=local_steps, local_stepsize=local_stepsize, eps=eps)
    check_fractions(b1=b1, b2=b2)
    trust = optax.scale_by_trust_ratio()

    def scaled(direction: Vector, y: Vector) -> Vector:
        layers = unravel(y)
        return ravel_pytree(transformed(trust, unravel(direction), trust.init(layers), layers)[0])[0]

    def solve(oracle: Oracle, x: Vector, budget: Any, tolerance: Any) -> Result:
        cohort = locals_of(oracle)
        stepsize = jnp.asarray(local_stepsize, x.dtype)

        def update(current: Point, memory: Any, number: Array) -> tuple[Vector, Any]:
            first, shared = memory

            def step(rows: Rows, grads: Rows, moments: Any) -> tuple[Rows, Any]:
                m, v = b1 * moments[0] + (1 - b1) * grads, b2 * moments[1] + (1 - b2) * grads**2
                direction = m / (jnp.sqrt(shared) + eps)[None] + weight_decay * rows
                return rows - stepsize * jax.vmap(scaled)(direction, rows), (m, v)

            second = jnp.broadcast_to(shared, first.shape)
            rows, (first, second) = work(cohort, current.x, local_steps, (first, second), step)
            return cohort.weights @ rows, (first, jnp.maximum(shared, cohort.weights @ second))

        memory = (jnp.zeros((cohort.weights.shape[0], x.shape[0]), x.dtype), jnp.full_like(x, eps))
        return repeat(oracle, x, budget, tolerance, memory, update)

    return solve
