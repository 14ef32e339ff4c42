"""FedP3 with sketches: a NumPy oracle, its special cases, its prices, its errors."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.flatten_util import ravel_pytree

from commjax.algorithms import fedavg
from commjax.algorithms.fedp3 import sketched
from commjax.compressors import identity, perm_k
from commjax.core import rounds, runner
from commjax.problems import quadratic

pytestmark = pytest.mark.slow

N, D = 3, 7
KEY = jax.random.key(3)
PROBLEM = quadratic.random(0, N, D, mu=0.5, L=2.0)
DATA = jax.tree.map(jnp.asarray, PROBLEM)
IDS = jnp.arange(N)
value_and_grad = jax.value_and_grad(quadratic.loss)


def run(algorithm, hparams, rounds, start=None):
    state = algorithm.init(jnp.ones(D) if start is None else start, IDS)
    metrics: Any = None
    for _ in range(rounds):
        state, metrics = algorithm.step(KEY, hparams, state, DATA)
    return state, metrics


@pytest.mark.parametrize("keep, steps", [(1.0, 1), (0.6, 1), (0.6, 3)])
def test_three_rounds_are_those_of_the_oracle(keep, steps):
    """Masks and owners are read off the package's own events; the arithmetic is NumPy's."""
    prune, gamma, w = sketched.uniform(keep), 0.2, np.ones(D)
    for t in range(3):
        key, total = jax.random.fold_in(KEY, t), np.zeros(D)
        for i in range(N):
            mask = np.asarray(prune.mask(sketched.use_key(jax.random.fold_in(key, i), 2), D), float)
            assert mask.sum() == np.ceil(keep * D) == prune.kept(D)
            u = mask * w
            for _ in range(steps):
                u = u - gamma * mask * (PROBLEM.H[i] @ (u - PROBLEM.c[i]))
            S = np.asarray(perm_k().compress(key, jnp.ones(D), i, N).value)
            assert set(np.unique(S)) <= {0.0, float(N)}
            total += S * u / N
        w = total
    algorithm = sketched.sketched(value_and_grad, prune, steps=steps)
    state, _ = run(algorithm, sketched.HParams(gamma), 3)
    np.testing.assert_allclose(state.server.params, w, rtol=1e-12)


def test_without_sketches_it_is_fedavg_and_with_one_step_gradient_descent():
    for steps in (1, 4):
        ours, _ = run(sketched.sketched(value_and_grad, sketch=identity(), steps=steps), sketched.HParams(0.1), 5)
        theirs, _ = run(fedavg.fedavg(value_and_grad, steps=steps), fedavg.HParams(0.1), 5)
        np.testing.assert_allclose(ours.server.params, theirs.server.params, rtol=1e-12)


def test_with_no_step_a_round_leaves_the_weights_alone():
    """(1/n) sum S_i = I, though 3 does not divide 7"""
    state, _ = run(sketched.sketched(value_and_grad), sketched.HParams(0.0), 4)
    np.testing.assert_allclose(state.server.params, np.ones(D), rtol=1e-15)


def test_one_client_is_centralised_gradient_descent():
    one = jax.tree.map(lambda leaf: leaf[:1], DATA)
    algorithm = sketched.sketched(value_and_grad)
    state, _ = runner.run(KEY, algorithm, sketched.HParams(0.5), algorithm.init(jnp.zeros(D), IDS[:1]), one, 200)
    np.testing.assert_allclose(state.server.params, PROBLEM.c[0], rtol=1e-9)


def test_clients_that_agree_on_a_minimiser_reach_it_and_others_reach_a_floor():
    smooth = quadratic.constants(PROBLEM)
    gap = []
    for c in (np.tile(PROBLEM.c[:1], (N, 1)), PROBLEM.c):
        problem = PROBLEM._replace(c=c)
        algorithm = sketched.sketched(value_and_grad)
        state = algorithm.init(jnp.ones(D), IDS)
        data = jax.tree.map(jnp.asarray, problem)
        state, _ = runner.run(KEY, algorithm, sketched.theoretical(smooth.L_i, 1), state, data, 400)
        gap.append(float(np.abs(np.asarray(state.server.params) - quadratic.optimum(problem).params).max()))
    assert gap[0] < 1e-12 and gap[1] > 1e-2


def test_a_client_pays_for_its_share_up_and_for_its_pruned_model_down():
    _, metrics = run(sketched.sketched(value_and_grad, sketched.uniform(0.5)), sketched.HParams(0.1), 1)
    assert metrics.bits_up == pytest.approx(64 * D / N) and metrics.bits_down == 64 * 4
    _, metrics = run(sketched.sketched(value_and_grad), sketched.HParams(0.1), 1)
    assert metrics.bits_down == 64 * D == rounds.dense_bits(jnp.ones(D))


def test_leaves_of_several_widths_travel_as_one_vector_and_are_paid_for_as_such():
    params = {"a": jnp.ones(4, jnp.bfloat16), "b": jnp.ones(4, jnp.float32)}

    def loss(params, data):
        return sum(jnp.sum(leaf.astype(jnp.float32) ** 2) for leaf in jax.tree.leaves(params)) + 0 * data[0]

    algorithm = sketched.sketched(jax.value_and_grad(loss), sketched.uniform(0.5))
    state = algorithm.init(params, jnp.arange(2))
    assert algorithm.exchange is not None and algorithm.exchange.download is not None
    with jax.numpy_dtype_promotion("standard"):
        downloads = algorithm.exchange.download.write(KEY, state.server, [0, 1], 2)
        price = algorithm.exchange.bits_down(state.server)
    assert [8 * len(download) for download in downloads] == [price] * 2 == [128, 128]


def test_parameters_may_be_any_tree():
    flat = jnp.arange(1.0, D + 1)
    tree = {"a": flat[:3], "b": [flat[3:].reshape(2, 2)]}

    def loss(params, data):
        return quadratic.loss(ravel_pytree(params)[0], data)

    algorithm = sketched.sketched(jax.value_and_grad(loss), sketched.uniform(0.5))
    state, _ = run(algorithm, sketched.HParams(0.1), 2, tree)
    same, _ = run(sketched.sketched(value_and_grad, sketched.uniform(0.5)), sketched.HParams(0.1), 2, flat)
    np.testing.assert_allclose(ravel_pytree(state.server.params)[0], same.server.params, rtol=1e-12)


def test_masks_are_drawn_by_each_client_and_in_each_round_and_know_nothing_of_the_owners():
    """fold_in(key, i) = split(key)[i]: with the first keys, client 0's mask would follow the permutation of the
    sketch."""

    def draw(key):
        mask = sketched.uniform(0.5).mask(sketched.use_key(jax.random.fold_in(key, 0), 2), 8)
        owner = perm_k().compress(key, jnp.ones(8), 0, 2).value > 0
        return mask, owner

    mask, owner = (np.asarray(leaf, float) for leaf in jax.vmap(draw)(jax.random.split(KEY, 4000)))
    assert mask.mean() == 0.5 == owner.mean()
    assert abs(np.mean(mask * owner) - 0.25) < 0.01
    assert np.abs(mask.mean(axis=0) - 0.5).max() < 0.04
    with pytest.raises(ValueError, match="use=1; allowed: at least 2"):
        sketched.use_key(KEY, 1)


def test_the_theoretical_stepsize():
    L = np.array([2.0, 8.0])
    assert sketched.theoretical(L, 10).gamma == pytest.approx(1 / np.sqrt(5 * 8 * 10))
    assert sketched.theoretical(L, 1).gamma == 1 / 8
    for bad in ((L, 0), (np.array([1.0, 0.0]), 5)):
        with pytest.raises(ValueError, match=r"rounds=.*, L=.*; allowed: at least 1 round, positive constants"):
            sketched.theoretical(*bad)


def test_bad_input_is_refused():
    for keep in (0.0, -0.1, 1.1, np.nan):
        with pytest.raises(ValueError, match=r"keep=.*; allowed: 0 < keep <= 1"):
            sketched.uniform(float(keep))
    with pytest.raises(ValueError, match="steps=0; allowed: at least 1"):
        sketched.sketched(value_and_grad, steps=0)
    with pytest.raises(ValueError, match="3 clients share out d = 2 coordinates; allowed: at most d clients"):
        sketched.sketched(value_and_grad).init(jnp.ones(2), IDS)
    sketched.sketched(value_and_grad, sketch=identity()).init(jnp.ones(2), IDS)
