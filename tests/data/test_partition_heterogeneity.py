"""Heterogeneous partitions as the thesis has them: by label, feature, quantity and class."""

import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commjax.data import partition
from tests.data.partition_cases import SEEDS, as_lists


def is_exact(rows, n, num_rows):
    """Every row once, every client at least one."""
    assert len(rows) == n and min(map(len, rows)) >= 1
    assert all(np.issubdtype(ids.dtype, np.integer) for ids in rows)
    return sorted(np.concatenate(rows).tolist()) == list(range(num_rows))


def some_labels(num_rows, classes, seed=0):
    """Every class a few times, in no order."""
    return np.random.default_rng(seed).permutation(np.arange(num_rows) % classes)


NON_IID = {
    "label_wise": lambda seed: partition.label_wise(some_labels(60, 2), 5, seed=seed),
    "equal_sizes": lambda seed: partition.label_wise(some_labels(60, 2), 5, seed=seed, equal_sizes=True),
    "quantity_wise": lambda seed: partition.quantity_wise(60, 5, seed=seed),
    "class_wise": lambda seed: partition.class_wise(some_labels(60, 6), 5, 3, seed=seed),
    "label_dirichlet": lambda seed: partition.label_dirichlet(some_labels(60, 6), 5, seed=seed),
}


@pytest.mark.parametrize("name", NON_IID)
def test_a_seed_gives_the_same_partition_again_and_another_seed_another(name):
    first, again, other = (as_lists(NON_IID[name](seed)) for seed in (1, 1, 2))
    assert first == again != other
    assert name == "equal_sizes" or is_exact(NON_IID[name](3), 5, 60)


@given(st.integers(2, 8), st.integers(16, 200), st.integers(16, 200), SEEDS)
def test_label_wise_shares_positives_by_r_pos_and_negatives_by_r_neg(n, num_positive, num_negative, seed):
    labels = np.random.default_rng(0).permutation([1.0] * num_positive + [-1.0] * num_negative)
    rows = partition.label_wise(labels, n, seed=seed)
    assert is_exact(rows, n, len(labels))
    r_pos = (np.arange(n) + 1) / n
    for sign, r, total in [(1, r_pos, num_positive), (-1, 1 - r_pos, num_negative)]:
        counts = np.array([(labels[ids] == sign).sum() for ids in rows])
        assert np.abs(counts - total * r / r.sum()).max() < 1
    assert (labels[rows[-1]] == 1).all()


def test_label_wise_rounds_the_largest_remainders_up():
    rows = partition.label_wise(np.array([1] * 7 + [-1] * 5), 3)
    # positives 7 * (1, 2, 3)/6 = 1.17, 2.33, 3.5; negatives 5 * (2, 1, 0)/3 = 3.33, 1.67, 0
    assert as_lists(rows) == [[0, 7, 8, 9], [1, 2, 10, 11], [3, 4, 5, 6]]


@given(st.integers(2, 8), st.integers(16, 200), st.integers(16, 200), SEEDS)
def test_equal_sizes_have_r_pos_of_their_rows_positive_and_could_not_be_larger(n, num_positive, num_negative, seed):
    labels = np.random.default_rng(0).permutation([1] * num_positive + [0] * num_negative)
    rows = partition.label_wise(labels, n, seed=seed, equal_sizes=True)
    together = np.concatenate(rows)
    assert len(set(together.tolist())) == len(together) and len({len(ids) for ids in rows}) == 1

    def positives(m):
        return [int(np.floor(m * (i + 1) / n + 0.5 + 1e-9)) for i in range(n)]

    m = len(rows[0])
    assert [int(labels[ids].sum()) for ids in rows] == positives(m)
    more = positives(m + 1)
    assert sum(more) > num_positive or n * (m + 1) - sum(more) > num_negative


def test_label_wise_keeps_file_order_without_a_seed():
    labels = some_labels(40, 2)
    rows = partition.label_wise(labels, 4)
    for sign in (0, 1):
        of_sign = [r for ids in rows for r in ids if labels[r] == sign]
        assert of_sign == sorted(of_sign)


@pytest.mark.parametrize(
    ("labels", "n", "options", "message"),
    [
        ([1, 2, 1], 2, {}, r"labels are \[1, 2\]; allowed: -1 and \+1, or 0 and 1"),
        ([-1, 0, 1], 2, {}, r"labels are \[-1, 0, 1\]; allowed"),
        ([1, -1, 1], 1, {}, r"n=1 clients for 3 labels; allowed: 2 <= n"),
        ([1, -1, 1], 4, {}, r"n=4 clients for 3 labels; allowed: 2 <= n"),
        ([-1, -1, -1, -1], 2, {}, r"client 1 of n=2 would be empty with 0 positive and 4 negative rows"),
        ([-1, -1, 1, -1], 3, {"equal_sizes": True}, r"client 0 of n=3 would be empty with 1 positive and 3 negative"),
    ],
)
def test_label_wise_refuses_what_it_cannot_do(labels, n, options, message):
    with pytest.raises(ValueError, match=message):
        partition.label_wise(np.array(labels), n, **options)


def test_feature_wise_finds_the_clusters_and_orders_them_by_first_row():
    rng = np.random.default_rng(0)
    cluster = rng.integers(0, 4, 80)
    features = 100.0 * np.eye(4)[cluster] + rng.standard_normal((80, 4))
    rows = partition.feature_wise(features, 4)
    assert is_exact(rows, 4, 80)
    assert as_lists(rows) == as_lists(partition.feature_wise(features, 4))
    assert all(len(set(cluster[ids])) == 1 for ids in rows)
    assert [ids[0] for ids in rows] == sorted(ids[0] for ids in rows)
    assert all((np.diff(ids) > 0).all() for ids in rows)
    assert as_lists(partition.feature_wise(features, 1)) == [list(range(80))]


def test_feature_wise_depends_on_the_seed_alone():
    features = np.random.default_rng(0).standard_normal((200, 3))
    first = as_lists(partition.feature_wise(features, 6, seed=1))
    assert first == as_lists(partition.feature_wise(features, 6, seed=1))
    assert first != as_lists(partition.feature_wise(features, 6, seed=2))
    assert is_exact(partition.feature_wise(features, 6), 6, 200)


def test_feature_wise_refuses_more_clients_than_distinct_rows():
    with pytest.raises(ValueError, match="k-means found 2 non-empty clusters for n=3; allowed: n <= distinct rows"):
        partition.feature_wise(np.array([[0.0], [1.0], [0.0], [1.0]]), 3)
    for n in (0, 5):
        with pytest.raises(ValueError, match=f"n={n} clients for 4 rows"):
            partition.feature_wise(np.ones((4, 1)), n)


def test_feature_wise_names_the_extra_when_scikit_learn_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.cluster", None)
    with pytest.raises(ImportError, match=r"feature_wise needs scikit-learn: pip install 'commjax\[data\]'"):
        partition.feature_wise(np.ones((4, 1)), 1)


@given(st.integers(1, 8), st.integers(100, 300), st.floats(0.3, 50), st.integers(0, 1000))
def test_quantity_wise_uses_every_row_once(n, num_rows, concentration, seed):
    rows = partition.quantity_wise(num_rows, n, concentration=concentration, seed=seed, tries=1000)
    assert is_exact(rows, n, num_rows)


def test_the_sizes_of_clients_vary_as_a_dirichlet_draw_does():
    def spread(concentration):
        seeds = range(300)
        draws = [partition.quantity_wise(10**4, 4, concentration=concentration, seed=seed) for seed in seeds]
        return np.var([[len(ids) / 10**4 for ids in rows] for rows in draws])

    for concentration in (1.0, 5.0):  # Var = (1/n)(1 - 1/n)/(n a + 1)
        np.testing.assert_allclose(spread(concentration), 3 / 16 / (4 * concentration + 1), rtol=0.15)


def test_quantity_wise_redraws_until_every_client_has_the_minimum():
    sizes = [min(map(len, partition.quantity_wise(200, 5, seed=seed, minimum=10, tries=1000))) for seed in range(20)]
    assert min(sizes) >= 10
    unrestricted = [min(map(len, partition.quantity_wise(200, 5, seed=seed))) for seed in range(20)]
    assert 1 <= min(unrestricted) < 10
    assert as_lists(partition.quantity_wise(6, 3, minimum=2, tries=1000))  # the only draw that will do is 2, 2, 2


LABELS = np.array([0, 1] * 3)


@pytest.mark.parametrize(
    "draw",
    [
        lambda n, **options: partition.quantity_wise(6, n, **options),
        lambda n, **options: partition.label_dirichlet(LABELS, n, **options),
    ],
    ids=["quantity_wise", "label_dirichlet"],
)
def test_draws_that_cannot_succeed_are_refused_with_all_their_settings(draw):
    message = r"minimum=3 rows in each of tries=7 Dirichlet draws with concentration=0.25 for n=4 clients"
    with pytest.raises(ValueError, match=message):
        draw(4, concentration=0.25, minimum=3, tries=7)
    for bad in ({"n": 0}, {"n": 2, "tries": 0}, {"n": 2, "minimum": 0}):
        with pytest.raises(ValueError, match="allowed: at least 1 each"):
            draw(**bad)
    for concentration in (0.0, -1.0, np.inf, np.nan):
        with pytest.raises(ValueError, match=f"concentration={concentration}; allowed: finite and > 0"):
            draw(2, concentration=concentration)
    assert len(draw(6, concentration=100.0, tries=10**4)) == 6  # one row each
    assert len(draw(1)) == 1


@given(st.integers(1, 12), st.integers(1, 7), st.data(), st.integers(0, 1000))
def test_class_wise_is_exact_and_balanced(n, num_classes, data, seed):
    least = -(-num_classes // n)
    held = data.draw(st.integers(least, num_classes))
    labels = some_labels(num_classes * 13 + 3, num_classes)
    rows = partition.class_wise(labels, n, held, seed=seed)
    assert is_exact(rows, n, len(labels))
    counts = np.array([np.bincount(labels[ids], minlength=num_classes) for ids in rows])
    assert ((counts > 0).sum(axis=1) == held).all()
    holders = (counts > 0).sum(axis=0)
    assert holders.min() >= 1 and holders.max() - holders.min() <= 1
    for c in range(num_classes):
        shares = counts[counts[:, c] > 0, c]
        assert shares.max() - shares.min() <= 1


def test_a_hundred_clients_of_fashion_mnist_have_five_classes_and_600_rows_each():
    labels = np.repeat(np.arange(10), 6000)
    rows = partition.class_wise(labels, 100, 5)
    assert {len(ids) for ids in rows} == {600}
    assert {len(set(labels[ids])) for ids in rows} == {5}
    assert len({tuple(sorted(set(labels[ids]))) for ids in rows}) > 20  # not the same few sets of classes


@pytest.mark.parametrize(
    ("n", "held", "message"),
    [
        (4, 0, r"classes_per_client=0 for n=4 clients and 3 classes; allowed: 1 <= classes_per_client"),
        (4, 4, r"classes_per_client=4 for n=4 clients and 3 classes"),
        (1, 2, r"classes_per_client=2 for n=1 clients and 3 classes"),
        (0, 2, r"classes_per_client=2 for n=0 clients and 3 classes"),
        (3, 3, r"class 7 has 2 rows for 3 clients; allowed: at least one each"),
    ],
)
def test_class_wise_refuses_what_it_cannot_do(n, held, message):
    labels = np.array([5, 6, 7] * 2 + [5, 6])
    with pytest.raises(ValueError, match=message):
        partition.class_wise(labels, n, held)


@given(st.integers(1, 6), st.integers(1, 5), st.floats(0.2, 20), st.integers(0, 1000))
def test_label_dirichlet_uses_every_row_once(n, num_classes, concentration, seed):
    labels = some_labels(150, num_classes)
    rows = partition.label_dirichlet(labels, n, concentration=concentration, seed=seed, tries=1000)
    assert is_exact(rows, n, 150)


def test_the_shares_of_each_class_vary_as_a_dirichlet_draw_does():
    labels = np.repeat([0, 1], 1000)
    draws = [partition.label_dirichlet(labels, 3, concentration=2.0, seed=seed) for seed in range(300)]
    shares = np.array([[np.bincount(labels[ids], minlength=2) / 1000 for ids in rows] for rows in draws])
    np.testing.assert_allclose(shares.var(axis=0).mean(axis=0), 2 / 9 / 7, rtol=0.15)
    assert abs(np.corrcoef(shares[:, 0].T)[0, 1]) < 0.15  # classes are drawn apart


def test_the_thesis_s_split_of_a_hundred_classes():
    """15 of 100 classes for each of 100 clients (CIFAR100)"""
    labels = some_labels(6000, 100)
    rows = partition.class_wise(labels, 100, 15)
    assert is_exact(rows, 100, 6000) and {len(np.unique(labels[ids])) for ids in rows} == {15}
