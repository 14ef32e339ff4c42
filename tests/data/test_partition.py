"""Partitions are exact: no row lost or doubled, no client empty, overlap as the thesis has it."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commjax.data import libsvm, partition

SIZES = st.integers(1, 60).flatmap(lambda rows: st.tuples(st.just(rows), st.integers(1, rows)))
SEEDS = st.none() | st.integers(0, 2**32)
REMAINDERS = st.sampled_from(["spread", "last"])


def as_lists(rows):
    return [ids.tolist() for ids in rows]


def joined(parts):
    return [int(r) for part in parts for r in part]


def toy(num_rows=6, d=2):
    rng = np.random.default_rng(0)
    labels = np.where(np.arange(num_rows) % 2 == 0, -1.0, 1.0)
    return libsvm.Dataset(rng.standard_normal((num_rows, d)), labels, "toy")


@given(SIZES, SEEDS, REMAINDERS)
@settings(deadline=None, max_examples=30)
def test_no_row_is_lost_or_doubled_and_no_client_is_empty(size, seed, remainder):
    num_rows, n = size
    rows = partition.blocks(num_rows, n, seed=seed, remainder=remainder)
    assert len(rows) == n
    assert sorted(np.concatenate(rows)) == list(range(num_rows))
    lengths = [len(ids) for ids in rows]
    if remainder == "spread":
        assert min(lengths) >= 1 and max(lengths) - min(lengths) <= 1
    else:
        assert lengths[:-1] == [num_rows // n] * (n - 1)


@given(SIZES, SEEDS, REMAINDERS, st.data())
@settings(deadline=None, max_examples=30)
def test_overlap_gives_each_client_its_block_and_the_next_ones_without_wrapping(size, seed, remainder, data):
    num_rows, n = size
    xi = data.draw(st.integers(1, n))
    single = as_lists(partition.blocks(num_rows, n, seed=seed, remainder=remainder))
    rows = as_lists(partition.blocks(num_rows, n, seed=seed, remainder=remainder, overlap=xi))
    for i in range(n):
        held = range(i, i + xi) if i + xi <= n else range(n - xi, n)
        assert rows[i] == joined(single[j] for j in held)


def test_the_thesis_partition_of_mushrooms_leaves_132_rows_to_the_last_client():
    lengths = [len(ids) for ids in partition.blocks(8124, 1000, remainder="last")]
    assert lengths == [8] * 999 + [132]
    overlapping = partition.blocks(8124, 1000, remainder="last", overlap=2)
    assert [len(ids) for ids in overlapping] == [16] * 998 + [140, 140]
    np.testing.assert_array_equal(overlapping[-1], overlapping[-2])


def test_without_a_seed_rows_stay_in_file_order_and_a_seed_is_reproducible():
    assert joined(partition.blocks(20, 3)) == list(range(20))
    shuffled = as_lists(partition.blocks(20, 3, seed=1))
    assert shuffled == as_lists(partition.blocks(20, 3, seed=1))
    assert shuffled != as_lists(partition.blocks(20, 3, seed=2))
    assert joined(shuffled) == np.random.default_rng(1).permutation(20).tolist()
    assert joined(partition.blocks(20, 3, seed=0)) != list(range(20))


@pytest.mark.parametrize(
    ("args", "options", "message"),
    [
        ((3, 4), {}, r"n=4 clients for num_rows=3"),
        ((3, 0), {}, r"n=0 clients for num_rows=3"),
        ((0, 1), {}, r"n=1 clients for num_rows=0"),
        ((9, 3), {"overlap": 0}, r"overlap=0; allowed: 1 <= overlap <= n=3"),
        ((9, 3), {"overlap": 4}, r"overlap=4; allowed: 1 <= overlap <= n=3"),
    ],
)
def test_bad_sizes_are_refused_with_their_values(args, options, message):
    with pytest.raises(ValueError, match=message):
        partition.blocks(*args, **options)


def test_stack_pads_to_the_longest_client_with_weight_zero():
    dataset = toy()
    rows = [np.array([4, 0, 2]), np.array([5])]
    data = partition.stack(dataset, rows)
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
    data = partition.stack(toy(num_rows), rows)
    np.testing.assert_allclose(data.weights.sum(axis=1), 1, rtol=1e-12)
    weights = partition.row_weights(rows, num_rows)
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
        partition.stack(toy(), rows)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_non_finite_features_are_refused(bad):
    dataset = toy()
    dataset.features[3, 1] = bad
    with pytest.raises(ValueError, match="toy: row 3 has a non-finite feature"):
        partition.stack(dataset, [np.arange(6)])


def test_labels_other_than_plus_and_minus_one_are_refused():
    dataset = toy()
    dataset.labels[2] = 0.0
    with pytest.raises(ValueError, match=r"toy: row 2 has .* a label that is not -1 or"):
        partition.stack(dataset, [np.arange(6)])
