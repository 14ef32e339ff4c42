"""Runs, sweeps and minibatches.  The loop with its checkpoint is in `test_loop.py`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commjax import compressors
from commjax.algorithms import ef_bv
from commjax.core import runner
from commjax.data.stacked import ClientData
from commjax.problems import logistic, quadratic
from tests.registry import build

pytestmark = pytest.mark.slow

CASE = build("ef-bv m-nice")
KEY = jax.random.key(11)


def test_a_run_is_the_step_repeated_with_half_of_the_split_key():
    key_step, _ = jax.random.split(KEY)
    state, losses = CASE.init(), []
    for _ in range(3):
        state, metrics = jax.jit(CASE.algorithm.step)(key_step, CASE.hparams, state, CASE.data)
        losses.append(float(metrics.loss))
    found, metrics = runner.run(KEY, CASE.algorithm, CASE.hparams, CASE.init(), CASE.data, 3)
    np.testing.assert_allclose(metrics.loss, losses, rtol=1e-12)
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-10), found, state)
    assert metrics.bits_up.shape == metrics.bits_down.shape == (3,)


def test_a_run_of_no_rounds_returns_the_state_and_empty_metrics():
    state, metrics = runner.run(KEY, CASE.algorithm, CASE.hparams, CASE.init(), CASE.data, 0)
    jax.tree.map(np.testing.assert_array_equal, state, CASE.init())
    assert metrics.loss.shape == (0,)


def test_a_run_is_compiled_once_for_all_hyperparameters_and_keys():
    traces = []

    def value_and_grad(params, data):
        traces.append(1)
        return jax.value_and_grad(quadratic.loss)(params, data)

    algorithm = ef_bv.gd(value_and_grad)
    state = algorithm.init(CASE.params, CASE.ids)
    for seed, gamma in enumerate((0.1, 0.2, 0.3)):
        runner.run(jax.random.key(seed), algorithm, ef_bv.HParams(gamma, 1.0, 1.0), state, CASE.data, 2)
    assert len(traces) == 1


def test_a_sweep_has_axes_of_hparams_and_keys_and_every_pair_its_own_numbers():
    settings = [CASE.hparams._replace(gamma=CASE.hparams.gamma * c) for c in (1.0, 0.5, 0.25)]
    keys = jax.random.split(KEY, 2)
    state, metrics = runner.sweep(keys, CASE.algorithm, runner.stack(settings), CASE.init(), CASE.data, 4)
    assert metrics.loss.shape == metrics.bits_up.shape == (3, 2, 4)
    assert state.server.params.shape == (3, 2, 11) and state.clients.shift.shape == (3, 2, 8, 11)
    assert len(np.unique(np.asarray(metrics.loss[:, :, -1]))) == 6
    # All begin at the same point, so that the first loss is common.
    np.testing.assert_allclose(metrics.loss[:, :, 0], np.full((3, 2), metrics.loss[0, 0, 0]), rtol=1e-14)


@pytest.mark.parametrize("at_once", [1, 2, 3, 5])
def test_a_sweep_some_settings_at_a_time_is_the_same_sweep(at_once):
    grid = runner.stack([CASE.hparams._replace(gamma=CASE.hparams.gamma * scale) for scale in (0.2, 0.5, 1.0)])
    inputs = (jax.random.split(KEY, 2), CASE.algorithm, grid, CASE.init(), CASE.data, 4)
    whole, parts = runner.sweep(*inputs), runner.sweep(*inputs, at_once=at_once)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), parts, whole)
    _, record = runner.loop(*inputs, chunk=3, progress=False, at_once=at_once)
    np.testing.assert_allclose(record.metrics["loss"], whole[1].loss, rtol=1e-12)


def test_a_sweep_some_settings_at_a_time_keeps_metrics_that_are_vectors_and_goes_on_from_any_round():
    watched = runner.observe(CASE.algorithm, x=lambda state, batch: state.server.params)
    grid = runner.stack([CASE.hparams._replace(gamma=CASE.hparams.gamma * scale) for scale in (0.2, 0.5, 1.0)])
    start, _ = runner.run(KEY, CASE.algorithm, CASE.hparams, CASE.init(), CASE.data, 2)
    inputs = (jax.random.split(KEY, 2), watched, grid, start, CASE.data, 4)
    whole, parts = runner.sweep(*inputs), runner.sweep(*inputs, at_once=2)
    assert parts[1].x.shape == (3, 2, 4, 11) and np.all(parts[0].server.round == 6)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), parts, whole)


def test_settings_at_once_need_a_sweep():
    for key, at_once in ((KEY, 2), (jax.random.split(KEY, 2), 0)):
        with pytest.raises(ValueError, match=f"at_once={at_once}; allowed: at least 1, with an array of keys"):
            runner.loop(key, CASE.algorithm, CASE.hparams, CASE.init(), CASE.data, 1, at_once=at_once)
    for at_once in (-1, 0):
        with pytest.raises(ValueError, match=f"at_once={at_once}; allowed: at least 1"):
            runner.sweep(
                KEY[None], CASE.algorithm, runner.stack([CASE.hparams]), CASE.init(), CASE.data, 1, at_once=at_once
            )


def test_clients_of_a_sweep_may_stand_in_any_order():
    order = jnp.asarray([3, 1, 0, 2, 7, 5, 6, 4])
    state = CASE.algorithm.init(CASE.params, order)
    data = jax.tree.map(lambda leaf: leaf[order], CASE.data)
    grid, keys = runner.stack([CASE.hparams]), jax.random.split(KEY, 1)
    states, _ = runner.sweep(keys, CASE.algorithm, grid, state, data, 3)
    alone, _ = runner.run(keys[0], CASE.algorithm, CASE.hparams, state, data, 3)
    np.testing.assert_array_equal(states.clients.id[0, 0], order)
    np.testing.assert_allclose(states.server.params[0, 0], alone.server.params, rtol=1e-12)


def test_stack_puts_equal_trees_on_a_leading_axis():
    stacked = runner.stack([ef_bv.HParams(1.0, 2.0, 3.0), ef_bv.HParams(4.0, 5.0, 6.0)])
    assert isinstance(stacked, ef_bv.HParams) and stacked.nu.tolist() == [3.0, 6.0]
    with pytest.raises(ValueError, match=r"(?i)structure|mismatch|arity|expected"):
        runner.stack([{"a": 1.0}, {"b": 1.0}])


def test_observed_metrics_are_taken_where_the_round_begins_and_change_nothing_else():
    algorithm = runner.observe(CASE.algorithm, first=lambda state, batch: state.server.params[0])
    plain, _ = runner.run(KEY, CASE.algorithm, CASE.hparams, CASE.init(), CASE.data, 3)
    watched, metrics = runner.run(KEY, algorithm, CASE.hparams, CASE.init(), CASE.data, 3)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-12), watched, plain)
    assert metrics._fields == ("loss", "bits_up", "bits_down", "first")
    two, _ = runner.run(KEY, CASE.algorithm, CASE.hparams, CASE.init(), CASE.data, 2)
    assert metrics.first[0] == CASE.params[0]
    np.testing.assert_allclose(metrics.first[2], two.server.params[0], rtol=1e-12)


def tagged(n=4, rows=5):
    """Each entry says which client and row it is."""
    mark = jnp.asarray(100.0 * np.arange(n)[:, None] + np.arange(rows))
    return ClientData(jnp.stack([mark, mark], axis=2), mark, jnp.full((n, rows), 0.2))


def test_minibatches_take_rows_of_the_client_itself_and_keep_leaves_together():
    data = tagged()
    draw = jax.vmap(lambda key: runner.minibatches(4)(key, jnp.arange(4), data))
    batch = draw(jax.random.split(KEY, 12))
    assert batch.labels.shape == (12, 4, 4)
    np.testing.assert_array_equal(batch.features[..., 1], batch.labels)
    for i in range(4):
        assert set(np.asarray(batch.labels[:, i]).ravel()) == {
            100.0 * i + j for j in range(5)
        }  # all rows, none of others
    # weights 1/5 on 5 rows, reweighted for 4: each 1/4
    np.testing.assert_allclose(batch.weights, np.full((12, 4, 4), 0.25), rtol=1e-14)


def test_minibatches_larger_than_the_data_are_refused():
    with pytest.raises(ValueError, match=r"minibatches: size=6, but a client has 5 rows; allowed: 1 to 5"):
        runner.minibatches(6)(KEY, jnp.arange(4), tagged())
    assert runner.minibatches(5)(KEY, jnp.arange(4), tagged()).labels.shape == (4, 5)


def test_minibatches_depend_on_the_key_and_on_the_id_but_not_on_the_place_of_a_client():
    batch, data = runner.minibatches(5), tagged()
    order = jnp.asarray([2, 0, 3, 1])
    straight = batch(KEY, jnp.arange(4), data)
    shuffled = batch(KEY, order, jax.tree.map(lambda leaf: leaf[order], data))
    np.testing.assert_array_equal(shuffled.labels, straight.labels[order])
    assert not np.array_equal(batch(jax.random.key(5), jnp.arange(4), data).labels, straight.labels)
    rows = np.asarray(straight.labels) % 100
    assert not np.array_equal(rows[0], rows[1])


def test_the_mean_of_many_minibatch_gradients_is_the_full_gradient_under_padding():
    rng = np.random.default_rng(0)
    weights = jnp.asarray([[1 / 3, 1 / 3, 1 / 3, 0.0], [0.25, 0.25, 0.25, 0.25]])  # the first client is padded
    data = ClientData(
        jnp.asarray(rng.standard_normal((2, 4, 3))),
        jnp.sign(jnp.asarray(rng.standard_normal((2, 4)))),
        weights,
    )
    x = jnp.asarray(rng.standard_normal(3))
    gradient = jax.vmap(jax.grad(lambda x, data: logistic.loss(x, data, 0.1)), (None, 0))
    batches = jax.vmap(lambda key: gradient(x, runner.minibatches(2)(key, jnp.arange(2), data)))
    drawn = np.asarray(jax.jit(batches)(jax.random.split(KEY, 4000)))
    error = 5 * drawn.std(axis=0) / np.sqrt(len(drawn))
    assert (np.abs(drawn.mean(axis=0) - gradient(x, data)) < error).all() and error.max() < 0.1


def test_every_round_draws_new_minibatches_and_the_same_ones_when_run_again():
    def value_and_grad(x, data):
        return data.labels[0], jnp.zeros_like(x)

    algorithm = ef_bv.ef_bv(value_and_grad, compressors.identity())
    state, data = algorithm.init(jnp.ones(2), jnp.arange(4)), tagged()
    inputs = (KEY, algorithm, ef_bv.HParams(0.1, 1.0, 1.0), state, data, 12)
    (_, first), (_, again) = (runner.run(*inputs, batch_fn=runner.minibatches(1)) for _ in range(2))
    np.testing.assert_array_equal(first.loss, again.loss)
    assert len(np.unique(np.asarray(first.loss))) > 4


@pytest.mark.parametrize("size", [0, -3])
def test_minibatches_of_no_rows_are_refused(size):
    with pytest.raises(ValueError, match=f"size must be at least 1, got {size}"):
        runner.minibatches(size)


@pytest.mark.parametrize(
    "data", [{"x": jnp.ones((4, 5, 2)), "y": jnp.ones((4, 6))}, {"x": jnp.ones((4, 5)), "s": jnp.ones(4)}, jnp.ones(4)]
)
def test_minibatches_of_leaves_without_a_common_row_axis_are_refused(data):
    with pytest.raises(ValueError, match=r"every leaf of a client.s data must be \[rows, ...\], got shapes "):
        runner.minibatches(2)(KEY, jnp.arange(4), data)


def test_a_sweep_says_what_its_hparams_and_keys_must_be():
    algorithm = ef_bv.ef_bv(jax.value_and_grad(lambda x, c: jnp.sum((x - c) ** 2)), compressors.top_k(1))
    state, data, keys = (
        algorithm.init(jnp.zeros(2), jnp.arange(3)),
        jnp.zeros((3, 2)),
        jax.random.split(jax.random.key(0), 2),
    )
    one = ef_bv.HParams(0.1, 1.0, 1.0)
    for hparams in ([one, one], one._replace(gamma=jnp.ones(2)), one):
        with pytest.raises(
            ValueError, match=r"hparams has leaves of shapes .*; allowed: one leading axis for all, as `runner.stack`"
        ):
            runner.sweep(keys, algorithm, hparams, state, data, 1)
    for wrong in (jax.random.key(0), jnp.arange(2)):
        with pytest.raises(TypeError, match=r"key must be a row of keys, jax.random.split\(key, number\), got "):
            runner.sweep(wrong, algorithm, runner.stack([one]), state, data, 1)
