"""Clusterings: the optimal one against all others, clusters of features and of gradients."""

import builtins
from itertools import combinations

import numpy as np
import pytest

from commjax.sampling import clustering, samplings
from tests.sampling.samplings_cases import GOLDENS, centred


def every_clustering(n, b):
    """All partitions of range(n) into b sets of equal size"""

    def split(left):
        if not left:
            yield []
        for others in combinations(left[1:], n // b - 1) if left else ():
            rest = [i for i in left if i not in (left[0], *others)]
            yield from ([[left[0], *others], *more] for more in split(rest))

    return split(list(range(n)))


@pytest.mark.parametrize(("n", "b"), [(4, 2), (6, 2), (6, 3), (8, 4), (9, 3), (5, 1), (5, 5)])
def test_the_optimal_clustering_has_the_smallest_variance_of_all(n, b):
    for seed in range(2 if n < 9 else 1):
        a = centred(np.random.default_rng(seed).standard_normal((n, 3)))
        best = clustering.optimal_stratified(a, b)
        # sigma^2_SS of P6; building a sampling for each clustering is slow under type checks
        least = min(
            sum(len(ids) * np.sum((a[ids] - a[ids].mean(axis=0)) ** 2) for ids in map(list, clusters)) / n**2
            for clusters in every_clustering(n, b)
        )
        assert samplings.stratified(best).variance(a) == pytest.approx(least, rel=1e-11, abs=1e-14)
        assert [len(ids) for ids in best] == [n // b] * b
    shifted = clustering.optimal_stratified(a + 5.0, b)
    assert [ids.tolist() for ids in shifted] == [ids.tolist() for ids in best]


def test_the_optimal_clustering_is_the_same_far_from_zero():
    gradients = np.round(1024 * np.random.default_rng(3).standard_normal((6, 2))) / 1024
    near, far = (clustering.optimal_stratified(gradients + shift, 3) for shift in (0.0, 2.0**30))  # no digit is lost
    assert [ids.tolist() for ids in far] == [ids.tolist() for ids in near] != [[0, 1], [2, 3], [4, 5]]


def test_the_clustering_of_the_text_example():
    golden = GOLDENS["sppm_text_example"]
    assert [ids.tolist() for ids in clustering.optimal_stratified(np.array(golden["a"]), 2)] == golden["best"]


def test_one_cluster_one_client_and_one_row_are_allowed():
    rows = np.array([[0.0], [9.0], [0.1]])
    assert [ids.tolist() for ids in clustering.by_gradients(rows, 1)] == [[0, 1, 2]]
    assert [ids.tolist() for ids in clustering.by_features(rows, [[0], [1], [2]], 2)] == [[0, 2], [1]]
    assert [ids.tolist() for ids in clustering.optimal_stratified(rows[:1], 1)] == [[0]]


def test_clusters_of_features_and_of_gradients_find_the_groups():
    rng = np.random.default_rng(7)
    group = np.array([0, 1, 2, 0, 1, 2, 2, 0])
    gradients = 10.0 * np.eye(3)[group] + 0.1 * rng.standard_normal((8, 3))
    wanted = [[0, 3, 7], [1, 4], [2, 5, 6]]
    assert [ids.tolist() for ids in clustering.by_gradients(gradients, 3)] == wanted
    rows = [np.array([2 * i, 2 * i + 1]) for i in range(8)]
    features = np.repeat(gradients, 2, axis=0) + np.tile([[3.0], [-3.0]], (8, 1))  # only the means tell
    assert [ids.tolist() for ids in clustering.by_features(features, rows, 3, seed=1)] == wanted
    a = centred(gradients)
    alike, mixed = (
        samplings.stratified(wanted).variance(a),
        samplings.stratified([[0, 1, 2], [3, 4], [5, 6, 7]]).variance(a),
    )
    assert alike < 0.01 * mixed


def test_clusters_of_gradients_come_from_seed_zero_unless_told():
    gradients = np.random.default_rng(0).standard_normal((30, 2))  # no groups: k-means ends where it starts from
    found = (
        clustering.by_gradients(gradients, 6),
        clustering.by_gradients(gradients, 6, seed=0),
        clustering.by_gradients(gradients, 6, seed=1),
    )
    default, zero, one = ([ids.tolist() for ids in clusters] for clusters in found)
    assert default == zero != one


def test_without_scikit_learn_the_error_names_the_extra(monkeypatch):
    original = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name.startswith("sklearn"):
            raise ImportError(name)
        return original(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ImportError, match=r"commjax\[data\]"):
        clustering.by_gradients(np.arange(4.0)[:, None], 2)
