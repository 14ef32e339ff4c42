"""Six quadratics, their minimisers and a run of Scafflix: what the tests of Scafflix share."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np

from commjax.problems import quadratic

N, D = 6, 4
PROBLEM = quadratic.random(0, N, D, mu=0.2, L=2.0)
DATA = jax.tree.map(jnp.asarray, PROBLEM)
SPECTRA = np.linalg.eigvalsh(PROBLEM.H)
L, MU = SPECTRA[:, -1], SPECTRA[:, 0]
ALPHA = np.array([0.5, 1.0, 0.2, 0.8, 0.35, 0.9])
IDS, KEY = jnp.arange(N), jax.random.key(7)
START, OPTIMUM = jnp.linspace(-1.0, 2.0, D), jnp.asarray(PROBLEM.c)
value_and_grad = jax.value_and_grad(quadratic.loss)


@cache
def made(make, cohort=None):
    """One object per method, so that what one test compiled serves the next."""
    return make(value_and_grad, cohort=cohort)


stepper = cache(lambda algorithm: jax.jit(algorithm.step))


def run(algorithm, hparams, rounds, state=None, key=KEY, data=DATA):
    """The state after so many rounds, and the metrics of each."""
    state, seen = begin(algorithm) if state is None else state, []
    for _ in range(rounds):
        state, metrics = stepper(algorithm)(key, hparams, state, data)
        seen.append(metrics)
    return state, jax.tree.map(lambda *rows: np.stack(rows), *seen)


def gradients(x):
    return np.einsum("nij,nj->ni", PROBLEM.H, x - PROBLEM.c)


def begin(algorithm, **per_client):
    return algorithm.init(START, IDS, optimum=OPTIMUM, **per_client)
