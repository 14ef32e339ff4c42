"""Partitions are exact: no row lost or doubled, no client empty; overlap and heterogeneity as the thesis has them."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commjax.core import runner
from commjax.data import libsvm, partition, stacked
from commjax.problems import logistic

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


def test_the_thesis_s_split_of_a_hundred_classes():
    """15 of 100 classes for each of 100 clients (CIFAR100)"""
    labels = some_labels(6000, 100)
    rows = partition.class_wise(labels, 100, 15)
    assert is_exact(rows, 100, 6000) and {len(np.unique(labels[ids])) for ids in rows} == {15}
