"""Two problems, every convex inner solver and its run: what the tests of these solvers share."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commjax.problems import quadratic
from commjax.prox import cohort, solvers
from commjax.prox.solvers import quasi_newton
from tests.prox.mixed_loss import data_type, mixed_loss

jit = jax.jit

MU, L, M, D = 0.1, 2.0, 3, 4
WEIGHTS = np.array([0.5, 0.2, 0.3])

# (L, mu) of F -> solver
EXACT = {
    "gd": lambda L, mu: solvers.gradient_descent(L),
    "agd": lambda L, mu: solvers.accelerated_gradient_descent(L, mu),
    "cg": lambda L, mu: quasi_newton.conjugate_gradients(),
    "bfgs": lambda L, mu: quasi_newton.bfgs(),
    "lbfgs": lambda L, mu: quasi_newton.lbfgs(),
    "aicn": lambda L, mu: solvers.aicn(),
}
ALL = EXACT | {
    "scaffnew": lambda L, mu: solvers.scaffnew(1 / L, 0.5),
    "local_newton": lambda L, mu: solvers.local_newton(),
}
each_exact = pytest.mark.parametrize("name", EXACT)


QUADRATIC = quadratic.random(0, M, D, mu=MU, L=L)
_rng = np.random.default_rng(1)
_A = _rng.standard_normal((M, 6, D)) * [2.0, 1.0, 0.5, 0.1]
LOGISTIC = (_A, np.sign(_rng.standard_normal((M, 6))))


Data = data_type(*LOGISTIC)
_loss = functools.partial(mixed_loss, mu=MU)
PROBLEMS = {"quadratic": Data(*QUADRATIC), "logistic": Data(0 * QUADRATIC.H, QUADRATIC.c, share=np.ones(M))}
SMOOTH = {"quadratic": L, "logistic": max(np.linalg.norm(A, 2) ** 2 / 24 for A in _A) + MU}
CENTER = np.array([1.0, -2.0, 0.5, 3.0])


POINTS = []  # at which a cohort of `problem` was asked, when compiled with `counted`


def oracle_of(data, gamma, center, counted=False):
    """The oracle that SPPM-AS builds, on three clients with weights that add up to 1."""
    data = jax.tree.map(lambda leaf: jnp.asarray(leaf, center.dtype), data)
    oracle = cohort.prox_oracle(
        _loss, lambda x: x, cohort.Cohort(data, jnp.asarray(WEIGHTS, center.dtype)), center, gamma
    )

    def value_and_grad(x):
        jax.debug.callback(lambda x: POINTS.append(tuple(map(float, x))), x)
        return oracle.value_and_grad(x)

    return oracle._replace(value_and_grad=value_and_grad) if counted else oracle


class Case(NamedTuple):
    """What a run is given beside its solver; all of it is traced."""

    smooth: Any
    gamma: Any
    start: Any
    budget: Any
    tolerance: Any
    center: Any
    data: Any


def solution(name, case, counted=False):
    solver = ALL[name](case.smooth + 1 / case.gamma, jnp.asarray(MU, case.center.dtype) + 1 / case.gamma)
    oracle = oracle_of(case.data, case.gamma, case.center, counted)
    return solver(oracle, case.start, case.budget, case.tolerance)


compiled = jit(solution, static_argnums=(0, 2))


def run(
    name,
    kind="quadratic",
    gamma=5.0,
    budget=2000,
    tolerance=1e-9,
    *,
    start=CENTER,
    center=CENTER,
    data=None,
    dtype=np.float64,
):
    """Everything but the solver and the dtype is traced, so that each is compiled once."""
    POINTS.clear()
    smooth, gamma, start, center = (jnp.asarray(value, dtype) for value in (SMOOTH[kind], gamma, start, center))
    data = jax.tree.map(jnp.asarray, PROBLEMS[kind] if data is None else data)
    case = Case(smooth, gamma, start, jnp.asarray(budget), jnp.asarray(tolerance), center, data)
    result = compiled(name, case, dtype == np.float64)
    jax.block_until_ready(result)
    jax.effects_barrier()
    return result


_value_and_grad = jit(lambda data, x: oracle_of(data, 5.0, jnp.asarray(CENTER)).value_and_grad(x))


def gradient(kind, x):
    return np.asarray(_value_and_grad(PROBLEMS[kind], jnp.asarray(x))[1])
