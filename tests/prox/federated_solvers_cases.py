"""Three clients, every inner solver for networks and its walk: what the tests of these solvers share."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree

from commjax.problems import quadratic
from commjax.prox import cohort
from commjax.prox.solvers import adaptive, federated
from tests.prox.mixed_loss import data_type, mixed_loss

jit = jax.jit

M, D, GAMMA = 3, 4, 5.0
WEIGHTS = np.array([0.5, 0.2, 0.3])
CENTER = np.array([1.0, -2.0, 0.5, 3.0])
APART = quadratic.random(0, M, D, mu=0.5, L=2.0)
_rng = np.random.default_rng(1)
LOGISTIC = (_rng.standard_normal((M, 6, D)), np.sign(_rng.standard_normal((M, 6))))
_, unravel = ravel_pytree({"a": jnp.zeros(1), "b": jnp.zeros(D - 1)})

SOLVERS = {
    "adam": lambda: adaptive.adam(0.05),
    "fed_opt": lambda: federated.fed_opt(3, 0.2, optax.sgd(1.0)),
    "fed_adam": lambda: federated.fed_adam(2, 0.1, 0.5),
    "fed_adam_adam": lambda: federated.fed_adam(2, 0.1, 0.5, local=optax.scale_by_adam()),
    "fed_adam_adagrad": lambda: federated.fed_adam(2, 0.1, 0.5, local=optax.scale_by_rss()),
    "fed_adagrad": lambda: federated.fed_adagrad(2, 0.1, 0.5),
    "mime": lambda: federated.mime(3, 0.2),
    "mime_lite": lambda: federated.mime_lite(3, 0.2),
    "fed_speed": lambda: federated.fed_speed(10, 0.1, 1.0, rho=0.1),
    "fed_speed_plain": lambda: federated.fed_speed(10, 0.1, 1.0, rho=0.1, alpha=0.0),
    "fed_lamb": lambda: federated.fed_lamb(2, 0.03, unravel),
    "apollo": lambda: adaptive.apollo(0.4),
    "oasis": lambda: adaptive.oasis(),
}


Data = data_type(*LOGISTIC, wall=np.full(M, np.inf))  # F is NaN where x_0 >= wall


def _loss(x, data):
    return jnp.where(x[0] < data.wall, 1.0, jnp.nan) * mixed_loss(x, data, 0.5)


def oracle_of(data, center=CENTER):
    data = jax.tree.map(jnp.asarray, Data(*data))
    weights = jnp.asarray(WEIGHTS, data.H.dtype)
    return cohort.prox_oracle(
        _loss, lambda x: x, cohort.Cohort(data, weights), jnp.asarray(center, data.H.dtype), GAMMA
    )


@functools.partial(jit, static_argnums=0)
def _solve(name, data, center, budget, tolerance):
    return SOLVERS[name]()(oracle_of(data, center), center, budget, tolerance)


def run(name, data=APART, budget=2000, tolerance=1e-6, center=CENTER):
    """Everything but the solver is traced, so that each is compiled once."""
    arrays = jax.tree.map(jnp.asarray, Data(*data))
    return _solve(name, arrays, jnp.asarray(center), jnp.asarray(budget), jnp.asarray(tolerance))


A = APART.H + np.eye(D) / GAMMA  # F_i is a quadratic again, with Hessian A_i and minimiser OWN_i
OWN = np.stack([np.linalg.solve(a, h @ c + CENTER / GAMMA) for a, h, c in zip(A, APART.H, APART.c)])
MEAN = np.einsum("i,ijk->jk", WEIGHTS, A)
OPTIMUM = np.linalg.solve(MEAN, np.einsum("i,ijk,ik->j", WEIGHTS, A, OWN))


def local_grads(rows):
    return np.einsum("ijk,ik->ij", A, rows - OWN)


def fed_adam_by_hand(rounds, local_steps, stepsize, rate, *, b1=0.9, b2=0.99, tau=1e-3):
    x, m, v = CENTER, np.zeros(D), np.full(D, tau**2)
    for _ in range(rounds):
        rows = np.tile(x, (M, 1))
        for _ in range(local_steps):
            rows = rows - stepsize * local_grads(rows)
        delta = WEIGHTS @ rows - x
        m, v = b1 * m + (1 - b1) * delta, b2 * v + (1 - b2) * delta**2
        x = x + rate * m / (np.sqrt(v) + tau)
    return x
