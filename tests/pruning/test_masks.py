"""Masks: argsort as the oracle, exact counts, ties, N:M, released thresholds, sparsity per layer, bad input."""

import json
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commjax.compressors import selection
from commjax.pruning import masks
from commjax.pruning import sparsity as sparsities

pytestmark = pytest.mark.slow

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "goldens_pruning.json").read_text())["nm"]


def oracle(S, sparsity, group):
    """Stable ascending sort of every group; the first k are pruned."""
    S = np.asarray(S)
    if group == "layer":
        return oracle(S.reshape(-1, 1), sparsity, "output").reshape(S.shape)
    if group == "input":
        return oracle(S.T, sparsity, "output").T
    keep = np.ones(S.shape, bool)
    k = int(len(S) * sparsity + 1e-9)
    np.put_along_axis(keep, np.argsort(S, axis=0, kind="stable")[:k], False, axis=0)
    return keep


def random(seed, shape, levels=None):
    """Non-negative; few levels make many ties."""
    rng = np.random.default_rng(seed)
    S = np.abs(rng.standard_normal(shape)) if levels is None else rng.integers(0, levels, shape) / 4
    return S.astype(np.float32)


@given(
    st.sampled_from([(7, 5), (16, 1), (1, 16), (33, 12)]),
    st.sampled_from([0.0, 0.01, 0.29, 0.5, 0.6, 0.999]),
    st.sampled_from(["output", "input", "layer"]),
    st.sampled_from([None, 1, 3]),
    st.integers(0, 100),
)
def test_masks_are_those_of_a_stable_sort(shape, sparsity, group, levels, seed):
    S = random(seed, shape, levels)
    assert np.array_equal(masks.unstructured(jnp.array(S), sparsity, group), oracle(S, sparsity, group))


@pytest.mark.parametrize("group", ["output", "input", "layer"])
@pytest.mark.parametrize("levels", [None, 40])
def test_blocks_of_groups_and_what_is_left_over_are_all_right(group, levels):
    S = random(0, (600, 530), levels)
    assert np.array_equal(masks.unstructured(jnp.array(S), 0.37, group), oracle(S, 0.37, group))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16, jnp.float32, jnp.float64])
def test_every_float_is_ordered_exactly(dtype):
    S = jnp.array(random(1, (64, 9))).astype(dtype)
    assert np.array_equal(masks.unstructured(S, 0.5), oracle(S.astype(jnp.float64), 0.5, "output"))


def test_extreme_values_are_ordered():
    S = jnp.array([[jnp.inf], [0.0], [-0.0], [3e38], [1e-45], [2.0]], jnp.float32)
    for k in range(6):
        assert np.array_equal(masks.unstructured(S, k / 6), oracle(np.abs(S), k / 6, "output"))


def test_among_equals_the_first_position_is_pruned_first():
    ones = jnp.ones((3, 4))
    assert masks.unstructured(ones, 0.34).tolist() == [[False] * 4, [True] * 4, [True] * 4]
    assert masks.unstructured(ones, 0.5, "input").tolist() == [[False, False, True, True]] * 3
    assert masks.unstructured(ones, 0.5, "layer").tolist() == [[False] * 4, [False, False, True, True], [True] * 4]
    assert masks.n_m(jnp.ones((4, 1)), 1, 4).tolist() == [[False], [False], [False], [True]]


@pytest.mark.parametrize("group", ["output", "input", "layer"])
@pytest.mark.parametrize("levels", [None, 5])
@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.6, 0.95])
def test_reference_ties_prune_up_to_the_next_score_and_all_its_equals(group, levels, sparsity):
    S = random(2, (20, 11), levels)
    rows = {"output": S.T, "input": S, "layer": S.reshape(1, -1)}[group]
    threshold = np.sort(rows, axis=1)[:, int(rows.shape[1] * sparsity + 1e-9)]
    keep = rows > threshold[:, None]
    expected = {"output": keep.T, "input": keep, "layer": keep.reshape(S.shape)}[group]
    ours = masks.unstructured(jnp.array(S), sparsity, group, reference_ties=True)
    assert np.array_equal(ours, expected)
    assert np.sum(~np.asarray(ours)) > np.sum(~oracle(S, sparsity, group))


def test_counts_are_floors_that_rounding_does_not_break():
    assert masks.count(100, 0.29) == 29 and int(100 * 0.29) == 28
    for size in (104_857_600, 10**12):  # where the product itself is rounded below the whole number
        assert masks.count(size, 0.29) == size * 29 // 100 and masks.count(size, 0.07) == size * 7 // 100
    assert masks.count(6 * 10**9, 1 / 6) == 10**9 and masks.count(10**9, 0.1 + 0.2) == 3 * 10**8
    assert masks.count(10**9, 0.2999999) == 299_999_900
    assert masks.count(4096, 0.6) == 2457 and masks.count(7, 0.999) == 6 and masks.count(5, 0.0) == 0


@pytest.mark.parametrize("group", ["output", "input", "layer"])
def test_the_k_largest_are_those_that_pruning_the_others_leaves(group):
    found = jnp.asarray(np.random.default_rng(4).integers(0, 5, (6, 4)).astype(np.float32))
    size = {"output": 6, "input": 4, "layer": 24}[group]
    for k in range(1, size + 1):
        mask = masks.largest(found, k, group)
        np.testing.assert_array_equal(mask, masks.unstructured(found, (size - k) / size, group))
        assert mask.sum() == k * 24 // size
    assert not masks.largest(found, 0, group).any()
    for k in (-1, size + 1):
        with pytest.raises(ValueError, match=f"k={k}; allowed: 0 to {size}"):
            masks.largest(found, k, group)


def test_one_compilation_serves_every_sparsity():
    S = jnp.array(random(3, (10, 10)))
    masks.unstructured(S, 0.1)
    cached = cast(Any, masks._unstructured)._cache_size
    before = cached()
    for sparsity in (0.2, 0.5, 0.9):
        masks.unstructured(S, sparsity)
    assert cached() == before


def test_masks_run_under_jit_and_vmap():
    S = jnp.array(random(4, (3, 12, 8)))
    for f in (lambda S: masks.unstructured(S, 0.5), lambda S: masks.n_m(S, 2, 4)):
        assert np.array_equal(jax.vmap(jax.jit(f))(S), jnp.stack([f(one) for one in S]))


# N of M.


def test_golden_patterns():
    W = jnp.array(GOLDEN["W_out_in"]).T
    assert np.array_equal(masks.n_m(jnp.abs(W), 2, 4).T, np.array(GOLDEN["keep_2_4"], bool))
    assert np.array_equal(masks.n_m(jnp.abs(W), 4, 8).T, np.array(GOLDEN["keep_4_8"], bool))


@pytest.mark.parametrize(
    "n, m", [(1, 1), (1, 2), (1, 4), (2, 4), (3, 4), (4, 4), (4, 8), (5, 12), (16, 16), (7, 24), (30, 48)]
)
@pytest.mark.parametrize("levels", [None, 3])
def test_n_of_m_are_kept_in_every_group(n, m, levels):
    S = random(m, (2 * m, 5), levels)
    mask = np.asarray(masks.n_m(jnp.array(S), n, m))
    for start in (0, m):
        assert np.array_equal(mask[start : start + m], oracle(S[start : start + m], (m - n) / m, "output"))
    assert np.all(mask.reshape(2, m, 5).sum(1) == n)


# Sparsity of layers.


def test_uniform_sparsity_is_the_same_everywhere():
    assert sparsities.uniform(4, 0.6).tolist() == [0.6] * 4


def test_outliers_are_counted_against_the_mean_of_the_whole_layer():
    S = jnp.array([[1.0, 1.0, 1.0, 9.0]])
    assert sparsities.outlier_ratio(S, 2.5) == 0.25 and sparsities.outlier_ratio(S, 3.0) == 0.0
    assert sparsities.outlier_ratio([S, jnp.full((2, 6), 0.0)], 5.0) == 1 / 16  # mean 0.75


def test_outlier_weighted_sparsity_is_owls():
    ratios, sparsity, lam = np.array([3.0, 1.0, 2.0, 6.0]), 0.7, 0.08
    keep = (ratios - 1) * (1 / 5 * lam * 2)  # as released
    keep = keep - keep.mean() + (1 - sparsity)
    np.testing.assert_allclose(sparsities.outlier_weighted(ratios, sparsity), 1 - keep, rtol=1e-12)


@given(st.lists(st.floats(0, 0.1), min_size=1, max_size=8), st.floats(0.1, 0.85), st.floats(0, 0.05))
def test_outlier_weighted_sparsity_has_the_mean_asked_for_and_falls_with_outliers(ratios, sparsity, spread):
    sizes = np.arange(1, len(ratios) + 1)
    found = sparsities.outlier_weighted(ratios, sparsity, spread, sizes.tolist())
    assert np.average(found, weights=sizes) == pytest.approx(sparsity, abs=1e-12)
    assert np.ptp(found) <= 2 * spread + 1e-12
    assert np.all(np.diff(found[np.argsort(ratios)]) <= 1e-12)


def test_equal_outliers_give_uniform_sparsity():
    assert sparsities.outlier_weighted([0.02, 0.02], 0.5).tolist() == [0.5, 0.5]


S0 = jnp.array(random(5, (8, 3)))
BAD = {
    "sparsity 1": (lambda: masks.unstructured(S0, 1.0), r"sparsity=1\.0; allowed: 0 <= sparsity < 1"),
    "sparsity negative": (lambda: masks.unstructured(S0, -0.1), r"sparsity=-0\.1"),
    "sparsity NaN": (lambda: masks.unstructured(S0, float("nan")), "sparsity=nan"),
    "NaN scores": (
        lambda: masks.unstructured(S0.at[0, 0].set(jnp.nan), 0.5),
        "scores has 1 values that are NaN or negative",
    ),
    "negative scores": (lambda: masks.n_m(-S0, 2, 4), "scores has 24 values that are NaN or negative"),
    "no inputs": (lambda: masks.unstructured(S0[:0], 0.5), r"scores has shape \(0, 3\)"),
    "n > m": (lambda: masks.n_m(S0, 5, 4), "n=5; allowed: 1 <= n <= m = 4"),
    "n = 0": (lambda: masks.n_m(S0, 0, 4), "n=0; allowed"),
    "m does not divide": (lambda: masks.n_m(S0, 2, 3), "m=3; allowed: a divisor of the 8 inputs"),
    "m = 0": (lambda: masks.n_m(S0, 1, 0), "m=0; allowed"),
    "uniform": (lambda: sparsities.uniform(3, 1.5), r"sparsity=1\.5"),
    "no layers": (lambda: sparsities.outlier_weighted([], 0.5), r"ratios=\[\]"),
    "ratios NaN": (
        lambda: sparsities.outlier_weighted([0.1, float("nan")], 0.5),
        "ratios=.*finite number for every layer",
    ),
    "spread": (lambda: sparsities.outlier_weighted([0.1, 0.2], 0.5, -0.1), r"spread=-0\.1; allowed: at least 0"),
    "spread too wide": (
        lambda: sparsities.outlier_weighted([0.1, 0.2], 0.95, 0.1),
        r"spread=0\.1 with sparsity=0\.95 gives sparsities from 0\.85 to 1\.05",
    ),
    "OWL's sparsity": (lambda: sparsities.outlier_weighted([0.1, 0.2], 1.0), r"sparsity=1\.0"),
}


@pytest.mark.parametrize("call, message", BAD.values(), ids=BAD)
def test_bad_input_is_refused_by_name_and_value(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def test_masks_inside_a_larger_program_are_those_of_the_scores_that_it_computed():
    """The compiler fuses the arithmetic of the scores into every loop of the search: all of them must see one value."""
    rng = np.random.default_rng(3)
    W, x, y = (jnp.asarray(rng.standard_normal((320, 300)), jnp.float32) for _ in range(3))

    @jax.jit
    def program(W, x, y):
        scores = jnp.abs(W * x - y) * jnp.abs(x) + jnp.abs(W) * 0.1
        found = [masks.unstructured(scores, 0.5, group) for group in ("output", "layer")]
        top = jax.vmap(lambda row: selection.top_k_mask(row, 32))(scores)
        return scores, [*found, masks.n_m(scores, 2, 4), top]

    scores, found = program(W, x, y)
    wanted = [masks.unstructured(scores, 0.5, group) for group in ("output", "layer")]
    wanted += [masks.n_m(scores, 2, 4), jax.vmap(lambda row: selection.top_k_mask(row, 32))(scores)]
    for one, other in zip(found, wanted):
        np.testing.assert_array_equal(one, other)
    counts = [np.asarray(one).sum(axis) for one, axis in zip(found, (0, None, 0, 1))]
    for count, exact in zip(counts, (160, 48_000, 160, 32)):
        np.testing.assert_array_equal(count, exact)
