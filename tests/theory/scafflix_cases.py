"""Three quadratics, random states and both outcomes of a step: what the tests of Scafflix's theorems share."""

import jax
import jax.numpy as jnp
import numpy as np

from commjax.problems import quadratic

N, D = 3, 4
IDS = jnp.arange(N)
KEY = jax.random.key(0)
PROBLEM = quadratic.random(0, N, D, mu=0.3, L=3.0)
DATA = jax.tree.map(jnp.asarray, PROBLEM)
SPECTRA = np.linalg.eigvalsh(PROBLEM.H)
L, MU = SPECTRA[:, -1], SPECTRA[:, 0]
value_and_grad = jax.value_and_grad(quadratic.loss)


def gradients(models, problem=PROBLEM):
    return np.einsum("nij,...nj->...ni", problem.H, models - problem.c)


def minimiser(alpha, tilt=0.0, problem=PROBLEM):
    """argmin_x sum_i f_i(alpha_i x + (1 - alpha_i) c_i) - <tilt, x>"""
    weights = np.broadcast_to(alpha, (len(problem.c),)) ** 2
    right = np.einsum("n,nij,nj->i", weights, *problem) + tilt
    return np.linalg.solve(np.einsum("n,nij->ij", weights, problem.H), right)


def mixed(alpha, x, problem=PROBLEM):
    return alpha[:, None] * x + (1 - alpha)[:, None] * problem.c


def squares(rows):
    return (rows**2).sum(-1)


ALPHA = np.array([0.3, 1.0, 0.6])
