"""The package's step is one of the outcomes over which tests/theory/test_ef_bv_theorems.py averages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commjax import compressors as c
from commjax import prox
from commjax.algorithms import ef_bv
from commjax.problems import quadratic

N, D = 3, 4
GAMMA, LAM, NU, WEIGHT = 0.11, 0.4, 0.7, 0.5
PROBLEM = quadratic.random(0, N, D, mu=0.3, L=3.0)
EVERY = [c.comp(1, 2), c.mix(1, 1), c.top_k(1), c.rand_k(2), c.m_nice(2, c.comp(1, 2)), c.perm_k()]
EVERY += [c.scaled(0.5, c.ternary()), c.natural(), c.scaled_sign()]


@pytest.mark.parametrize("compressor", EVERY, ids=lambda one: one.name)
def test_a_step_is_the_numpy_update_for_one_of_the_enumerated_outcomes(compressor):
    algorithm = ef_bv.ef_bv(jax.value_and_grad(quadratic.loss), compressor, prox.l1(WEIGHT))
    step = jax.jit(algorithm.step)
    rng = np.random.default_rng(1)
    seen = set()
    for t in range(8):
        x, h = rng.standard_normal(D), rng.standard_normal((N, D))
        grads = np.einsum("nij,nj->ni", PROBLEM.H, x - PROBLEM.c)
        state = algorithm.init(jnp.asarray(x), jnp.arange(N), shift=jnp.asarray(h))
        data = jax.tree.map(jnp.asarray, PROBLEM)
        state, metrics = step(jax.random.key(t), ef_bv.HParams(GAMMA, LAM, NU), state, data)

        probability, d = compressor.outcomes(grads - h)
        forward = x - GAMMA * (h.mean(0) + NU * d.mean(1))
        x1, h1 = np.sign(forward) * np.maximum(np.abs(forward) - GAMMA * WEIGHT, 0), h + LAM * d
        distance = np.abs(h1 - np.asarray(state.clients.shift)).max((-1, -2))
        k = int(np.argmin(distance))
        assert distance[k] < 1e-13 and probability[k] > 0
        seen.add(k)
        np.testing.assert_allclose(state.server.params, x1[k], atol=1e-13)
        np.testing.assert_allclose(state.server.shift, h1[k].mean(0), atol=1e-13)
        np.testing.assert_allclose(metrics.loss, np.sum((x - PROBLEM.c) * grads) / (2 * N), rtol=1e-12)
        np.testing.assert_array_equal(state.clients.id, np.arange(N))
        assert state.server.round == 1
    assert len(seen) > 1 or len(probability) == 1  # the keys draw different outcomes
