"""The package's step is one of the outcomes over which tests/theory/test_ef_bv_theorems.py averages."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commjax import compressors as c
from commjax import prox
from commjax.algorithms import ef_bv
from commjax.core import runner
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


def test_bfloat16_params_with_float32_shifts_do_not_drift_and_pay_for_bfloat16():
    data = jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.bfloat16), PROBLEM)
    x, hparams = jnp.ones(D, jnp.bfloat16), ef_bv.HParams(0.1, 0.3, 0.3)
    drift, bits = [], []
    for dtype, compressor in ((jnp.bfloat16, c.top_k(1)), (jnp.float32, c.rounded(c.top_k(1), jnp.bfloat16))):
        algorithm = ef_bv.ef_bv(jax.value_and_grad(quadratic.loss), compressor)
        state = algorithm.init(x, jnp.arange(N), shift=jnp.zeros((N, D), dtype))
        assert {leaf.dtype for leaf in (state.server.shift, state.clients.shift)} == {jnp.dtype(dtype)}
        state, metrics = runner.run(jax.random.key(0), algorithm, hparams, state, data, 300)
        assert state.server.params.dtype == jnp.bfloat16 and state.server.shift.dtype == dtype
        h, rows = (np.asarray(leaf, np.float64) for leaf in (state.server.shift, state.clients.shift))
        drift.append(np.abs(h - rows.mean(0)).max())
        bits.append(metrics.bits_up)
    assert drift[0] > 1e-3 and drift[1] < 1e-5
    np.testing.assert_array_equal(bits[0], bits[1])
