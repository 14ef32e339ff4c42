"""Local steps: every client of the cohort works by itself from the same point."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from commjax.prox.solvers.base import (
    LocalOracle,
    Rows,
    Vector,
)

# (rows [m, d], gradients of F_i at row_i [m, d], memory) -> (rows, memory)
LocalStep = Callable[[Rows, Rows, Any], tuple[Rows, Any]]


def work(cohort: LocalOracle, x: Vector, steps: Any, memory: Any, step: LocalStep) -> tuple[Rows, Any]:
    """Apply a local step several times; every client starts at x.

    Args:
        cohort: the parts F_i of the clients.
        x: the start [d].
        steps: number of steps; may be traced.
        memory: the initial memory of the steps, a pytree.
        step: the local step of all clients.

    Returns:
        The points of the clients [m, d], and the memory.
    """
    rows = jnp.broadcast_to(x, (cohort.weights.shape[0], x.shape[0]))
    return jax.lax.fori_loop(
        0, steps, lambda _, carry: step(carry[0], cohort.value_and_grad(carry[0])[1], carry[1]), (rows, memory)
    )
