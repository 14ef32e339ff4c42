"""Scores: the thesis's 3 x 4 example, NumPy oracles, the identities between scores, sampling, bad input."""

import json
import math
from collections import Counter
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commjax.pruning import masks, scores, statistics

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "goldens_pruning.json").read_text())["pruning"]
W = jnp.array(GOLDEN["W"])
X, Y = jnp.array(GOLDEN["X"]), jnp.array(GOLDEN["Y"])
A, B = (jnp.array(GOLDEN["general_diag"][name]) for name in "AB")
# One sample; the outputs are Y^T, so that the norms of outputs are those of the rows of Y.
STATS = statistics.of(X, Y.T)
KEY = jax.random.key(0)


def sampled_norms():
    sets, w = GOLDEN["stochria_sets"], np.abs(np.array(W))
    inputs = [w[j, S].sum() for j, S in enumerate(sets["S_j_cols_per_row"])]
    outputs = [w[S, k].sum() for k, S in enumerate(sets["S_k_rows_per_col"])]
    return scores.given(jnp.array(inputs)), scores.given(jnp.array(outputs))


NAMED = {
    "magnitude": scores.magnitude(),
    "wanda": scores.wanda(),
    "owanda": scores.owanda(),
    "symwanda(sum of norms)": scores.symwanda(),
    "symwanda_squared(sqrt of sum of squares)": scores.symwanda(scores.root),
    "symmetric X=Y=W^T (sum)": scores.symmetric(),
    "symmetric squared variant (sqrt)": scores.symmetric(scores.root),
    "ri": scores.ri(),
    "ria_a0.5": scores.ria(),
    "ria_a1": scores.ria(1.0),
    "ria_a2": scores.ria(2.0),
    "wanda_a0.5": scores.wanda(0.5),
    "row_sum_a1 (|W|/|W_j:|_1)": scores.ria(1.0, axes=("in",)),
    "col_sum_a1 (|W|/|W_:k|_1)": scores.ria(1.0, axes=("out",)),
    **{f"lp_S1_p{p}": scores.ria(0.0, float(p)) for p in (0, 1, 2, 3, 4)},
    "lp_S1_pinf": scores.ria(0.0, math.inf),
    "S2_p1": scores.ria(0.0, join=scores.relative_to_sum),
    "S3_p1": scores.ria(0.0, join=scores.plain),
    "S4_p1": scores.ria(0.0, join=scores.harmonic),
    "stochria tau=2": scores.score(*sampled_norms()),
    "general_diag A,B": scores.general_diagonal(A, B),
}
GROUPS: dict[Any, str] = {"layer": "keep_per_layer", "input": "keep_per_input_row", "output": "keep_per_output_column"}


def test_every_golden_score_has_a_name():
    assert set(NAMED) == set(GOLDEN["scores"])


@pytest.mark.parametrize("name", NAMED)
def test_the_example_of_the_thesis_has_the_golden_scores_and_masks(name):
    expected = GOLDEN["scores"][name]
    S = NAMED[name](W, STATS)
    np.testing.assert_allclose(S, np.array(expected["S"]), rtol=1e-12)
    for group, field in GROUPS.items():
        assert np.array_equal(masks.unstructured(S, 0.5, group), np.array(expected[field], bool))


def test_any_two_matrices_give_the_score_of_their_norms():
    np.testing.assert_allclose(scores.general(X, Y)(W), scores.symwanda()(W, STATS), rtol=1e-14)
    np.testing.assert_allclose(scores.general(X, Y, scores.root)(W), scores.symwanda(scores.root)(W, STATS), rtol=1e-14)


def random(seed, shape, dtype: Any = np.float32):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def oracle_ria(w, a, alpha, p, axes, join):
    """In float64, from the formulas."""
    w, a = np.abs(np.asarray(w, float)), np.asarray(a, float)
    with np.errstate(divide="ignore", invalid="ignore"):
        norms = [np.linalg.norm(w, p, axis=1)[:, None]] * ("in" in axes) + [np.linalg.norm(w, p, axis=0)[None]] * (
            "out" in axes
        )
        formula = {
            scores.relative: lambda: sum(w / n for n in norms),
            scores.relative_to_sum: lambda: w / sum(norms),
            scores.plain: lambda: w * sum(norms),
            scores.harmonic: lambda: w / sum(1 / n for n in norms),
            scores.root: lambda: w * np.sqrt(sum(n**2 for n in norms)),
        }
        return np.nan_to_num(formula[join]()) * a[:, None] ** alpha


@settings(max_examples=20)
@given(
    st.sampled_from([0.0, 0.5, 1.0, 1.7, 2.0]),
    st.sampled_from([0.0, 1.0, 2.0, 3.0, 4.0, math.inf]),
    st.sampled_from([("in",), ("out",), ("in", "out")]),
    st.sampled_from([scores.relative, scores.relative_to_sum, scores.plain, scores.harmonic, scores.root]),
    st.integers(0, 5),
)
def test_the_algebra_is_its_formulas(alpha, p, axes, join, seed):
    w, x = random(seed, (7, 5)), random(seed + 9, (2, 6, 7))
    stats = statistics.of(jnp.array(x))
    S = scores.ria(alpha, p, axes, join)(jnp.array(w), stats)
    a = np.sqrt((x.astype(float) ** 2).sum((0, 1)) / 2)
    assert S.dtype == jnp.float32
    np.testing.assert_allclose(S, oracle_ria(w, a, alpha, p, axes, join), rtol=3e-6)


@pytest.mark.parametrize("join", [scores.relative, scores.relative_to_sum, scores.plain, scores.harmonic, scores.root])
def test_an_input_or_output_of_zeros_scores_zero_and_not_nan(join):
    w = jnp.array([[0.0, 0.0, 0.0], [0.0, 2.0, 1.0]])
    S = scores.ria(0.0, join=join)(w)
    assert np.all(np.isfinite(S)) and np.all((S == 0) == (w == 0))


def test_a_quotient_by_a_zero_norm_is_left_out():
    S = scores.score(scores.given(jnp.array([0.0, 4.0])), scores.given(jnp.array([2.0])))(jnp.array([[3.0], [3.0]]))
    assert S.tolist() == [[1.5], [2.25]]


def test_small_weights_do_not_underflow_in_high_norms():
    w = jnp.full((3, 4), 1e-15, jnp.float32)
    np.testing.assert_allclose(scores.norm(w, 4.0, "in"), 1e-15 * 4**0.25, rtol=1e-6)
    np.testing.assert_allclose(scores.norm(w, 3.0, "out"), 1e-15 * 3 ** (1 / 3), rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_half_precision_is_scored_in_float32(dtype):
    w, stats = jnp.array(random(0, (6, 4))).astype(dtype), statistics.of(jnp.array(random(1, (9, 6))).astype(dtype))
    S = scores.ria()(w, stats)
    assert S.dtype == jnp.float32
    assert np.array_equal(S, scores.ria()(w.astype(jnp.float32), stats))


def wanda_in_float32(w, x):
    """[out, in] as released: q is a mean over samples of token sums, the score |W| sqrt(q)."""
    q = np.zeros(x.shape[-1], np.float64)
    for n, sample in enumerate(x.astype(np.float64)):
        q = q * (n / (n + 1)) + (sample**2).sum(0) / (n + 1)
    return np.abs(w.T) * np.sqrt(q.astype(np.float32))[None, :]


@pytest.mark.parametrize("sparsity", [0.3, 0.5, 0.6])
def test_wandas_float32_masks_are_the_released_ones_bit_for_bit(sparsity):
    w, x = random(3, (96, 64)), random(4, (4, 16, 96))
    S = wanda_in_float32(w, x)
    pruned = np.zeros(S.shape, bool)
    np.put_along_axis(pruned, np.argsort(S, axis=1, kind="stable")[:, : int(96 * sparsity + 1e-9)], True, axis=1)
    ours = masks.unstructured(scores.wanda()(jnp.array(w), statistics.of(jnp.array(x))), sparsity)
    assert np.array_equal(ours.T, ~pruned)


@pytest.mark.parametrize("alpha", [0.5, 1.0])
def test_rias_float32_masks_are_the_released_ones_bit_for_bit(alpha):
    """Layer-wise with <= as the released code, and with the per-output switch."""
    w, x = random(5, (80, 48)), random(6, (3, 10, 80))
    q = np.sqrt((x.astype(np.float64) ** 2).sum((0, 1)) / 3).astype(np.float32)
    torch_w = np.abs(w.T)
    S = (torch_w / torch_w.sum(0)[None, :] + torch_w / torch_w.sum(1)[:, None]) * q[None, :] ** np.float32(alpha)
    ours = scores.ria(alpha)(jnp.array(w), statistics.of(jnp.array(x)))
    threshold = np.sort(S.flatten())[int(S.size * 0.5)]
    assert np.array_equal(masks.unstructured(ours, 0.5, "layer", reference_ties=True).T, threshold < S)
    pruned = np.zeros(S.shape, bool)
    np.put_along_axis(pruned, np.argsort(S, axis=1, kind="stable")[:, :40], True, axis=1)
    assert np.array_equal(masks.unstructured(ours, 0.5).T, ~pruned)


# Identities.

w0, x0 = jnp.array(random(7, (12, 12), np.float64)), jnp.array(random(8, (2, 9, 12), np.float64))
stats0 = statistics.of(x0, x0 @ w0)


def same_masks(a, b, groups=("output", "input", "layer")):
    return all(np.array_equal(masks.unstructured(a, 0.4, g), masks.unstructured(b, 0.4, g)) for g in groups)


def test_the_count_of_nonzeros_of_dense_weights_changes_no_order():
    assert same_masks(scores.ria(1.0, p=0.0)(w0, stats0), scores.wanda()(w0, stats0))


def test_without_outputs_symwanda_is_wanda_and_with_unit_inputs_magnitude():
    nothing = jnp.zeros((12, 3))
    np.testing.assert_allclose(
        scores.general(x0.reshape(-1, 12), nothing)(w0), scores.wanda()(w0, stats0) * 2**0.5, rtol=1e-12
    )
    np.testing.assert_allclose(scores.general(jnp.eye(12), nothing)(w0), scores.magnitude()(w0), rtol=1e-15)


def test_per_output_owanda_and_the_out_sum_change_nothing():
    assert same_masks(scores.owanda()(w0, stats0), scores.magnitude()(w0), ["output"])
    assert not same_masks(scores.owanda()(w0, stats0), scores.magnitude()(w0), ["layer"])
    assert same_masks(scores.ria(1.0, axes=("out",))(w0, stats0), scores.wanda()(w0, stats0), ["output"])


def test_rias_masks_do_not_see_the_scale_of_weights_or_activations():
    S = scores.ria()(w0, stats0)
    assert same_masks(scores.ria()(8 * w0, statistics.of(0.25 * x0)), S)


def test_scores_see_magnitudes_only():
    for score in (scores.ria(), scores.symwanda(), scores.symmetric()):
        assert np.array_equal(score(w0, stats0), score(jnp.abs(w0), stats0))


def test_names_are_built_once():
    assert scores.ria(0.5, 2.0) is scores.ria(0.5, 2.0) and scores.wanda() is not scores.wanda(0.5)


def test_scores_run_under_jit_and_vmap():
    S = scores.ria()(w0, stats0)
    np.testing.assert_allclose(jax.jit(scores.ria())(w0, stats0), S, rtol=1e-14)
    both = jax.vmap(lambda w: scores.ria()(w, stats0))(jnp.stack([w0, 2 * w0]))
    np.testing.assert_allclose(both[0], S, rtol=1e-14)


# Sampling.


@pytest.mark.parametrize("shared", [False, True])
def test_sampling_all_of_a_square_matrix_is_ria(shared):
    S = scores.stoch_ria(1.0, 0.5, shared)(w0, stats0, KEY)
    np.testing.assert_allclose(S, scores.ria()(w0, stats0), rtol=1e-13)


def test_sampling_a_long_matrix_at_ratio_one_is_not_ria():
    """tau = min(in, out) still samples the longer side (W12)."""
    w = w0[:, :5]
    S, full = (f(w, None, KEY) for f in (scores.stoch_ria(1.0, 0.0), scores.ri()))
    assert not np.allclose(S, full)
    half = scores.ria(0.0, axes=("in",), sampling=scores.Sampling(1.0))(w, None, KEY)
    np.testing.assert_allclose(half, scores.ria(0.0, axes=("in",))(w), rtol=1e-13)


def sets(beta, shape, shared, key, axis):
    """The sampled sets: with powers of two as weights, a sum says which entries are in it."""
    n, d = shape if axis == "in" else shape[::-1]
    rows = jnp.array(np.tile(2.0 ** np.arange(d), (n, 1)))
    w = rows if axis == "in" else rows.T
    norms = scores.weights(1.0, scores.Sampling(beta, shared))(w, None, key, axis)
    return [frozenset(i for i in range(d) if int(total) >> i & 1) for total in np.asarray(norms)]


@pytest.mark.parametrize("axis", ["in", "out"])
@pytest.mark.parametrize("beta, tau", [(0.01, 1), (0.5, 2), (0.75, 3), (1.0, 4)])
def test_sets_have_the_stated_size_and_differ_unless_shared(axis, beta, tau):
    apart, shared = (sets(beta, (4, 40) if axis == "in" else (40, 4), s, KEY, axis) for s in (False, True))
    assert {len(S) for S in apart} == {len(S) for S in shared} == {tau}
    assert len(set(apart)) > 1 and len(set(shared)) == 1


@pytest.mark.parametrize("shared", [False, True])
def test_every_subset_is_equally_likely(shared):
    draw = jax.jit(
        lambda key: scores.weights(1.0, scores.Sampling(0.5, shared))(
            jnp.array([[1.0, 2.0, 4.0, 8.0]] * 4), None, key, "in"
        )[0]
    )
    totals = jax.vmap(draw)(jax.random.split(KEY, 6000))
    seen = Counter(np.asarray(totals).tolist())
    assert set(seen) == {3.0, 5.0, 6.0, 9.0, 10.0, 12.0}
    assert all(abs(n - 1000) < 5 * math.sqrt(1000 * 5 / 6) for n in seen.values())


def test_stochastic_ria_by_default_samples_a_tenth_of_the_shorter_side_and_weighs_by_the_input_norm():
    w, norms = jnp.ones((40, 45)), np.arange(1.0, 41)  # tau = 4
    S = scores.stoch_ria()(w, statistics.of(jnp.array(norms)[None]), KEY)
    np.testing.assert_allclose(S, np.tile((1 / 4 + 1 / 4) * norms[:, None], 45), rtol=1e-14)


def test_seeds_give_other_scores_and_the_same_seed_the_same():
    score = scores.stoch_ria(0.25)
    a, b = score(w0, stats0, KEY), score(w0, stats0, jax.random.key(1))
    assert not np.allclose(a, b) and np.array_equal(a, score(w0, stats0, KEY))
    both = jax.vmap(lambda key: score(w0, stats0, key))(jnp.stack([KEY, jax.random.key(1)]))
    np.testing.assert_allclose(both, jnp.stack([a, b]), rtol=1e-13)


def test_the_two_sides_are_sampled_from_different_keys():
    symmetric = jnp.array(2.0 ** np.add.outer(np.arange(6), np.arange(6)))
    S = scores.ria(0.0, sampling=scores.Sampling(0.5, True))(symmetric, None, KEY)
    assert not np.allclose(S, S.T)


# Bad input.

BAD = {
    "p": (lambda: scores.ria(p=0.5), r"p=0\.5; allowed: 0, or at least 1"),
    "p negative": (lambda: scores.weights(-1.0), r"p=-1\.0"),
    "p nan": (lambda: scores.weights(math.nan), "p=nan"),
    "alpha": (lambda: scores.wanda(-0.5), r"alpha=-0\.5; allowed: finite, at least 0"),
    "alpha infinite": (lambda: scores.ria(math.inf), "alpha=inf"),
    "beta 0": (lambda: scores.stoch_ria(0.0), r"beta=0\.0; allowed: 0 < beta <= 1"),
    "beta 2": (lambda: scores.stoch_ria(2.0), r"beta=2\.0"),
    "no axes": (lambda: scores.ria(axes=()), r"axes=\(\)"),
    "no key": (lambda: scores.stoch_ria()(w0, stats0), "key=None; allowed: a key"),
    "no statistics": (lambda: scores.wanda()(w0), "stats=None; allowed: Statistics"),
    "no statistics of outputs": (lambda: scores.owanda()(w0), "stats=None; allowed: Statistics"),
    "no outputs": (lambda: scores.owanda()(w0, statistics.of(x0)), r"stats has no outputs; allowed: .*of\(x, y\)"),
    "another layer's inputs": (
        lambda: scores.wanda()(w0[:5], stats0),
        r"stats has shape \(12,\); allowed: \(5,\) on the in side",
    ),
    "another layer's outputs": (
        lambda: scores.owanda()(w0[:, :5], stats0),
        r"stats has shape \(12,\); allowed: \(5,\) on the out side",
    ),
    "another X": (lambda: scores.general(X, Y)(w0), r"norms has shape \(3,\); allowed: \(12,\)"),
    "empty": (lambda: scores.ri()(w0[:0]), r"W has shape \(0, 12\)"),
    "NaN weights": (lambda: scores.ri()(w0.at[1, 2].set(jnp.nan)), "W has 1 values that are not finite"),
    "infinite weights": (lambda: scores.magnitude()(w0.at[:2, 2].set(jnp.inf)), "W has 2 values that are not finite"),
    "NaN activations": (
        lambda: scores.wanda()(w0, statistics.of(x0.at[0, 0, 3].set(jnp.nan))),
        "stats has [1-9][0-9]* values",
    ),
    "overflow": (lambda: scores.symmetric()(jnp.full((2, 2), 1e30, jnp.float32)), "the scores overflow"),
}


@pytest.mark.parametrize("call, message", BAD.values(), ids=BAD)
def test_bad_input_is_refused_by_name_and_value(call, message):
    with pytest.raises(ValueError, match=message):
        call()
