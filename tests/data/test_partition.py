"""Partitions are exact: no row lost or doubled, no client empty; overlap and holdout."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commjax.data import partition
from tests.data.partition_cases import REMAINDERS, SEEDS, SIZES, as_lists


def joined(parts):
    return [int(r) for part in parts for r in part]


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


def test_by_group_gives_each_group_its_rows_in_file_order():
    names, rows = partition.by_group(np.array([30, 10, 30, 20, 10]))
    assert names.tolist() == [10, 20, 30] and as_lists(rows) == [[1, 4], [3], [0, 2]]
    names, rows = partition.by_group(["ROMEO", "All", "ROMEO"])
    assert names.tolist() == ["All", "ROMEO"] and as_lists(rows) == [[1], [0, 2]]


@given(st.lists(st.integers(2, 30), min_size=1, max_size=5), st.floats(0.01, 0.99), st.integers(0, 99))
def test_holdout_splits_every_client_without_losing_a_row(lengths, fraction, seed):
    ends = np.cumsum(lengths)
    rows = [np.arange(end - length, end)[::-1] for end, length in zip(ends, lengths)]
    train, test = partition.holdout(rows, fraction, seed=seed)
    for ids, kept, held in zip(rows, train, test, strict=True):
        assert sorted([*kept, *held]) == sorted(ids)
        assert len(kept) >= 1 and len(held) >= 1
        assert len(held) in (round(fraction * len(ids)), 1, len(ids) - 1)
        assert (np.diff(kept) < 0).all() and (np.diff(held) < 0).all()  # the order of the rows is kept


def test_holdout_is_reproducible_client_by_client_and_takes_the_fraction():
    rows = [np.arange(100), np.arange(100, 150)]
    train, test = partition.holdout(rows, 0.3, seed=4)
    assert [len(ids) for ids in test] == [30, 15] and [len(ids) for ids in train] == [70, 35]
    first_alone = partition.holdout(rows[:1], 0.3, seed=4)[1]
    np.testing.assert_array_equal(first_alone[0], test[0])
    assert (partition.holdout(rows, 0.3, seed=5)[1][0] != test[0]).any()
    assert (test[0][:15] + 100 != test[1]).any()  # clients do not share a permutation


def test_holdout_refuses_a_client_with_one_row_and_fractions_outside_0_1():
    with pytest.raises(ValueError, match=r"holdout: client 1 has 1 row\(s\); allowed: at least 2"):
        partition.holdout([np.arange(2), np.arange(1)], 0.5)
    for fraction in (0.0, 1.0, -0.1, 1.5):
        with pytest.raises(ValueError, match=f"fraction={fraction}; allowed: 0 < fraction < 1"):
            partition.holdout([np.arange(4)], fraction)
