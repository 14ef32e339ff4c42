"""Clients' rows stacked and pooled: padding, weights, minibatches, and data that is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from commjax.core import runner
from commjax.data import libsvm, partition, stacked
from commjax.problems import logistic
from tests.data.partition_cases import REMAINDERS, SEEDS, SIZES


def toy(num_rows=6, d=2):
    rng = np.random.default_rng(0)
    labels = np.where(np.arange(num_rows) % 2 == 0, -1.0, 1.0)
    return libsvm.Dataset(rng.standard_normal((num_rows, d)), labels, "toy")


def test_stack_pads_to_the_longest_client_with_weight_zero():
    dataset = toy()
    rows = [np.array([4, 0, 2]), np.array([5])]
    data = stacked.stack(dataset, rows)
    assert data.features.shape == (2, 3, 2)
    np.testing.assert_array_equal(data.features[0], dataset.features[[4, 0, 2]])
    np.testing.assert_array_equal(data.features[1], [dataset.features[5], [0, 0], [0, 0]])
    np.testing.assert_array_equal(data.labels, [[-1, -1, -1], [1, 1, 1]])
    np.testing.assert_array_equal(data.weights, [[1 / 3, 1 / 3, 1 / 3], [1, 0, 0]])


@given(SIZES, SEEDS, REMAINDERS)
@settings(deadline=None, max_examples=30)
def test_stacked_weights_sum_to_one_per_client_and_row_weights_to_one_in_all(size, seed, remainder):
    num_rows, n = size
    rows = partition.blocks(num_rows, n, seed=seed, remainder=remainder, overlap=(n + 1) // 2)
    data = stacked.stack(toy(num_rows), rows)
    np.testing.assert_allclose(data.weights.sum(axis=1), 1, rtol=1e-12)
    weights = stacked.row_weights(rows, num_rows)
    expected = [sum((r == ids).sum() / (n * len(ids)) for ids in rows) for r in range(num_rows)]
    np.testing.assert_allclose(weights, expected, rtol=1e-12)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "rows is empty"),
        ([np.array([0]), np.array([], dtype=int)], "client 1 has no rows"),
        ([np.array([0]), np.array([6])], r"client 1 has a row id outside toy's 0..5: 6 to 6"),
        ([np.array([-1, 5])], r"client 0 has a row id outside toy's 0..5: -1 to 5"),
    ],
)
def test_bad_row_ids_are_refused(rows, message):
    with pytest.raises(ValueError, match=message):
        stacked.stack(toy(), rows)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_features_are_refused(bad):
    dataset = toy()
    dataset.features[3, 1] = bad
    with pytest.raises(ValueError, match="toy: row 3 has a non-finite feature"):
        stacked.stack(dataset, [np.arange(6)])


def test_labels_other_than_plus_and_minus_one_are_refused():
    dataset = toy()
    dataset.labels[2] = 0.0
    with pytest.raises(ValueError, match=r"toy: row 2 has .* a label that is not -1 or"):
        stacked.stack(dataset, [np.arange(6)])


def test_stack_rows_gathers_every_leaf_and_pads_with_the_first_row_at_weight_zero():
    rng = np.random.default_rng(0)
    arrays = {"image": rng.integers(0, 256, (6, 4, 4, 1)).astype(np.uint8), "label": np.arange(6, dtype=np.int32)}
    rows = [np.array([4, 0, 2]), np.array([5])]
    gathered, weights = stacked.stack_rows(arrays, rows)
    for name, leaf in arrays.items():
        assert gathered[name].dtype == leaf.dtype and gathered[name].shape == (2, 3, *leaf.shape[1:])
        np.testing.assert_array_equal(gathered[name][0], leaf[[4, 0, 2]])
        np.testing.assert_array_equal(gathered[name][1], leaf[[5, 5, 5]])
    assert weights.dtype == np.float32
    np.testing.assert_array_equal(weights, np.array([[1 / 3] * 3, [1, 0, 0]], np.float32))
    assert stacked.stack_rows(arrays, rows, dtype=np.float64)[1].dtype == np.float64


def test_examples_agree_with_stack_where_weights_are_not_zero():
    dataset = toy()
    rows = [np.array([4, 0, 2]), np.array([5])]
    data = stacked.stack(dataset, rows)
    found = stacked.examples(dataset.features, dataset.labels, rows, dtype=np.float64)
    real = data.weights > 0
    np.testing.assert_array_equal(found.weights, data.weights)
    np.testing.assert_array_equal(found.inputs[real], data.features[real])
    np.testing.assert_array_equal(found.targets[real], data.labels[real])


def test_minibatches_of_examples_are_unbiased_under_padding():
    targets = np.array([1.0, 2.0, 6.0, 5.0], np.float32)
    data = stacked.examples(targets[:, None], targets, [np.array([0, 1, 2]), np.array([3])])
    keys, rows = jax.random.split(jax.random.key(0), 7000), jax.tree.map(jnp.asarray, data)
    batch = jax.vmap(lambda key: runner.minibatches(3)(key, jnp.arange(2), rows))(keys)
    assert isinstance(batch, stacked.Examples) and batch.weights.dtype == jnp.float32
    np.testing.assert_allclose(jnp.sum(batch.weights * batch.targets, axis=2).mean(axis=0), [3, 5], rtol=0.03)


@pytest.mark.parametrize(
    ("arrays", "rows", "message"),
    [
        ((np.ones(3), np.ones(4)), [np.arange(3)], r"arrays have \[3, 4\] rows; allowed: the same number"),
        ((), [np.arange(3)], r"arrays have \[\] rows; allowed: .* at least one array"),
        (np.ones(3), [], "rows is empty"),
        (np.ones(3), [np.arange(3), np.array([], int)], "client 1 has no rows"),
        (np.ones(3), [np.array([0, 3])], r"client 0 has a row id outside the data's 0..2: 0 to 3"),
    ],
)
def test_stack_rows_refuses_what_does_not_fit(arrays, rows, message):
    with pytest.raises(ValueError, match=message):
        stacked.stack_rows(arrays, rows)


def ragged(seed=0, sizes=(3, 1, 4)):
    rng = np.random.default_rng(seed)
    most = max(sizes)
    weights = np.array([[1 / size] * size + [0.0] * (most - size) for size in sizes])
    features, labels = rng.standard_normal((len(sizes), most, 2)), np.sign(rng.standard_normal((len(sizes), most)))
    return jax.tree.map(jnp.asarray, stacked.ClientData(features, labels, weights))


@pytest.mark.parametrize("size", [8, 10])
def test_a_pooled_cohort_has_the_weighted_loss_of_its_clients(size):
    data, shares, x = ragged(), jnp.asarray([0.2, 0.5, 0.3]), jnp.asarray([0.4, -1.0])
    apart = jax.vmap(lambda one: logistic.loss(x, one, 0.3))(data)
    pooled = stacked.pool(size)(data, shares)
    assert pooled.features.shape == (size, 2) and pooled.columns.shape == (2, size)
    np.testing.assert_allclose(logistic.loss(x, pooled, 0.3), shares @ apart, rtol=1e-13)
    rows = stacked.ClientData(pooled.features, pooled.labels, pooled.weights)
    np.testing.assert_allclose(logistic.loss(x, rows, 0.3), shares @ apart, rtol=1e-13)
    grads = jax.vmap(lambda one: jax.grad(logistic.nonconvex_loss)(x, one, 0.3))(data)
    np.testing.assert_allclose(jax.grad(logistic.nonconvex_loss)(x, pooled, 0.3), shares @ grads, rtol=1e-13)


def test_a_pool_that_is_too_small_says_so_with_nan_and_absent_clients_need_no_room():
    data = ragged()
    assert np.isnan(stacked.pool(7)(data, jnp.full(3, 1 / 3)).weights).all()
    assert np.isfinite(stacked.pool(7)(data, jnp.asarray([0.5, 0.0, 0.5])).weights).all()
    with pytest.raises(ValueError, match="size=0; allowed: at least 1 row"):
        stacked.pool(0)


def test_rows_stacked_to_a_given_length_are_padded_like_the_others():
    dataset, rows = toy(), [np.array([0, 1, 2]), np.array([3])]
    whole, alone = stacked.stack(dataset, rows), stacked.stack(dataset, rows[1:], 3)
    for one, other in zip(whole, alone):
        np.testing.assert_array_equal(one[1:], other)
    with pytest.raises(ValueError, match="longest=2; allowed: at least the 3 rows"):
        stacked.stack(dataset, rows, 2)
