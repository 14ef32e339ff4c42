"""Eight quadratics, their proxes and samplings: what the tests of SPPM-AS share."""

import jax
import jax.numpy as jnp
import numpy as np

from commjax.algorithms import sppm_as
from commjax.problems import quadratic
from commjax.prox import solvers
from commjax.sampling import samplings

N, D = 8, 4
PROBLEM = quadratic.random(3, N, D, mu=0.5, L=3.0)
DATA = jax.tree.map(jnp.asarray, PROBLEM)
CLUSTERS = [np.array([0, 3, 5]), np.array([1, 2]), np.array([4, 6, 7])]
KEY = jax.random.key(4)
START = jnp.asarray(np.random.default_rng(0).standard_normal(D))
EXACT = sppm_as.HParams(2.0, 50, 1e-12)


def newton(hparams):
    return solvers.aicn(1e-9)  # nearly undamped: exact on quadratics


def after(algorithm, hparams, rounds=1, ids=None, data=DATA):
    state = algorithm.init(START, jnp.arange(N) if ids is None else ids)
    for _ in range(rounds):
        state, metrics = jax.jit(algorithm.step)(KEY, hparams, state, data)
    return np.asarray(state.server.params), metrics


SAMPLINGS = {
    "stratified": samplings.stratified(CLUSTERS),
    "block": samplings.block(CLUSTERS),
    "nice": samplings.nice(N, 3),
    "full": samplings.full(N),
}
