"""Selections against NumPy: the k largest, k at random, k at random of the k' largest."""

import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from commjax.compressors import selection

DTYPES = [np.float32, np.float64, ml_dtypes.bfloat16, np.float16]
D = 7
# Few different magnitudes, so that ties are common; both zeros; infinities.
ENTRY = st.sampled_from([0.0, -0.0, 1.0, -1.0, 1.5, -1.5, 0.25, 3e4, math.inf, -math.inf])
VECTOR = st.lists(ENTRY, min_size=D, max_size=D)


def oracle(x, k):
    mask = np.zeros(len(x), bool)
    mask[np.argsort(-np.abs(np.asarray(x, np.float64)), kind="stable")[:k]] = True
    return mask


@pytest.mark.parametrize("k", [1, 3, D])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: np.dtype(t).name)
@given(VECTOR)
@example([0.0, -0.0, 0, 0, -0.0, 0, 0])
@example([1.0, -1, 1, -1, 1, -1, 1])
def test_top_k_mask_is_the_sorted_one_with_the_first_among_equals(dtype, k, entries):
    x = np.array(entries, dtype)
    np.testing.assert_array_equal(selection.top_k_mask(jnp.asarray(x), k), oracle(x, k))


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda t: np.dtype(t).name)
def test_top_k_mask_orders_numbers_that_differ_in_the_last_bit(dtype):
    rng = np.random.default_rng(0)
    tiny, eps = float(ml_dtypes.finfo(dtype).smallest_subnormal), float(ml_dtypes.finfo(dtype).eps)
    rows = np.array([rng.permutation([1, 1 + eps, 1 + 2 * eps, -1 - eps, tiny, 2 * tiny, 0]) for _ in range(40)], dtype)
    masks = jax.vmap(lambda x: selection.top_k_mask(x, 5))(jnp.asarray(rows))
    np.testing.assert_array_equal(masks, [oracle(x, 5) for x in rows])


@pytest.mark.parametrize("d,k", [(33, 1), (64, 40), (2, 1), (65, 64)])
def test_top_k_under_vmap_is_one_by_one_with_and_without_ties(d, k):
    rng = np.random.default_rng(d + k)
    rows = np.concatenate([rng.standard_normal((4, d)), rng.integers(-2, 3, (4, d)), np.zeros((1, d))])
    masks = jax.vmap(lambda x: selection.top_k_mask(x, k))(jnp.asarray(rows))
    assert np.all(np.sum(masks, axis=1) == k)
    for row, mask in zip(rows, masks):
        np.testing.assert_array_equal(mask, oracle(row, k))
        np.testing.assert_array_equal(mask, selection.top_k_mask(jnp.asarray(row), k))


def test_nan_is_above_all():
    x = jnp.array([1.0, jnp.nan, jnp.inf, 0.0])
    assert selection.top_k_mask(x, 1).tolist() == [False, True, False, False]


def check_uniform(masks, allowed, k):
    """Every subset of `allowed` of size k, equally often within five standard deviations; nothing else."""
    masks = np.asarray(masks)
    assert np.all(masks.sum(axis=1) == k) and not np.any(masks & ~allowed)
    codes, counts = np.unique(masks @ (1 << np.arange(len(allowed))), return_counts=True)
    subsets = math.comb(int(allowed.sum()), k)
    p = 1 / subsets
    assert len(codes) == subsets
    assert np.all(np.abs(counts - len(masks) * p) <= 5 * np.sqrt(len(masks) * p * (1 - p)) + 1)


KEYS = jax.random.split(jax.random.key(0), 20_000)


@pytest.mark.parametrize("d,k", [(6, 1), (6, 3), (5, 5), (34, 33)])
def test_random_mask_is_uniform(d, k):
    masks = jax.vmap(lambda key: selection.random_mask(key, d, k))(KEYS)  # (34, 33) takes the route of many
    check_uniform(masks, np.full(d, True), k)


def test_random_of_mask_is_uniform_on_what_is_allowed():
    allowed = np.array([True, False, True, True, False, True])
    masks = jax.jit(jax.vmap(lambda key: selection.random_of_mask(key, jnp.asarray(allowed), 2)))(KEYS)
    check_uniform(masks, allowed, 2)


TIED = np.array([2.0, 0, -2, 1, 1, 1, 0, 1])  # the five largest: 0, 2, and the first three of the ones


@pytest.mark.parametrize(
    "k,k_top,route",
    [
        (1, 5, "candidates"),
        (2, 3, "candidates"),
        (4, 5, "candidates"),
        (2, 5, "threshold"),
        (3, 3, "top"),
        (2, 8, "random"),
    ],
)
def test_k_of_top_mask_is_uniform_among_the_largest_with_ties(k, k_top, route, monkeypatch):
    if route == "threshold":
        monkeypatch.setattr(selection, "_MAX_DIMENSION", 7)
    selection.k_of_top_mask.clear_cache()
    masks = jax.jit(jax.vmap(selection.k_of_top_mask, in_axes=(0, None, None, None)), static_argnums=(2, 3))(
        KEYS, jnp.asarray(TIED), k, k_top
    )
    selection.k_of_top_mask.clear_cache()
    check_uniform(masks, oracle(TIED, k_top), k)


def test_the_routes_are_the_ones_we_think(monkeypatch):
    calls = []
    monkeypatch.setattr(selection, "_draw_from_top", lambda k, k_top: lambda key, x: calls.append((k, k_top)) or x > 0)
    for d, k, k_top in [(64, 2, 8), (64, 3, 8), (4096, 1, 256), (4097, 1, 4000), (64, 8, 8), (64, 8, 64)]:
        jax.eval_shape(
            lambda x, k=k, k_top=k_top: selection.k_of_top_mask.__wrapped__(KEYS[0], x, k, k_top), jnp.ones(d)
        )
    assert calls == [(2, 8), (4096 // 4096, 256)]  # candidates iff d <= 4096, k d <= 16 k', k < k' < d


def test_candidates_are_drawn_until_enough_are_found():
    # One of eight is accepted, two are wanted, and 30 are drawn a turn: one row in eleven needs another turn.
    rng = np.random.default_rng(1)
    rows = rng.standard_normal((400, 64)).astype(ml_dtypes.bfloat16)
    rows[0] = np.arange(64)[::-1] // 4  # ties
    draw = jax.jit(lambda keys, x: jax.vmap(lambda key, row: selection.k_of_top_mask(key, row, 2, 8))(keys, x))
    masks = np.asarray(draw(KEYS[:400], jnp.asarray(rows)))
    assert np.all(masks.sum(axis=1) == 2)
    assert not np.any(masks & ~np.array([oracle(row, 8) for row in rows]))
    alone = jax.jit(lambda key, row: selection.k_of_top_mask(key, row, 2, 8))
    for i in range(0, 400, 40):
        np.testing.assert_array_equal(alone(KEYS[i], jnp.asarray(rows[i])), masks[i])


def test_k_of_top_mask_takes_one_key_for_many_vectors_and_two_batch_axes():
    x = np.random.default_rng(2).standard_normal((3, 4, 16))
    draw = lambda key, x: selection.k_of_top_mask(key, x, 1, 8)  # noqa: E731
    same_key = jax.jit(jax.vmap(draw, in_axes=(None, 0)))(KEYS[0], jnp.asarray(x[0]))
    nested = jax.jit(jax.vmap(jax.vmap(draw)))(KEYS[:12].reshape(3, 4), jnp.asarray(x))
    for j in range(4):
        np.testing.assert_array_equal(same_key[j], draw(KEYS[0], jnp.asarray(x[0, j])))
        np.testing.assert_array_equal(nested[2, j], draw(KEYS[8 + j], jnp.asarray(x[2, j])))


@pytest.mark.parametrize("d", [1, 7, 65_535, 65_536, 3_000_000])
def test_random_index_is_uniform(d):
    index = np.asarray(jax.jit(lambda key: selection.random_index(key, (60_000,), d))(jax.random.key(d)))
    assert index.min() >= 0 and index.max() <= d - 1
    if d < 10:
        counts = np.bincount(index, minlength=d)
        assert np.all(np.abs(counts - 60_000 / d) <= 5 * np.sqrt(60_000 / d))
    else:  # mean, spread and the ends of the uniform law
        u = (index + 0.5) / d
        assert abs(u.mean() - 0.5) < 5 / np.sqrt(12 * 60_000) and abs(u.var() - 1 / 12) < 0.002
        assert u.min() < 3e-4 and u.max() > 1 - 3e-4
        halves = np.bincount(index % 2) / 60_000
        assert np.all(np.abs(halves - 0.5) < 0.011)


@pytest.mark.parametrize("k, k_top, draws", [(1, 3, 1), (2, 4, 2), (2, 4, None)])
def test_drawn_are_the_first_distinct_accepted_candidates_of_a_row_s_stream_in_however_many_turns(
    k, k_top, draws, monkeypatch
):
    if draws is not None:
        monkeypatch.setattr(selection, "_draws", lambda *_: draws)
    n, d = 40, 9
    x = np.random.default_rng(0).standard_normal((n, d))
    keys = jax.random.split(jax.random.key(3), n)
    found = np.asarray(selection._draw_rows(keys, jax.vmap(selection.magnitude_bits)(jnp.asarray(x)), k, k_top))
    stream = np.asarray(selection._candidates(keys, jnp.int32(0), 200, d))
    for i in range(n):
        top = set(np.argsort(-np.abs(x[i]))[:k_top].tolist())
        first = list(dict.fromkeys(c for c in stream[:, i].tolist() if c in top))[:k]
        assert sorted(first) == np.flatnonzero(found[i]).tolist()


@pytest.mark.parametrize("d", [7, 65_535, 65_536, 65_537, 100_000, 1 << 20])
def test_random_indices_are_uniform_on_both_sides_of_the_size_at_which_the_arithmetic_changes(d):
    found = np.asarray(selection.random_index(jax.random.key(5), (20_000,), d), np.float64)
    assert found.min() >= 0 and found.max() <= d - 1
    # The mean of 20,000 draws within five standard deviations, and every tenth of the range.
    assert abs(found.mean() - (d - 1) / 2) < 5 * d / np.sqrt(12 * len(found))
    shares = np.histogram(found, np.arange(11) * d / 10)[0] if d > 10 else np.bincount(found.astype(int), minlength=d)
    expected = len(found) / len(shares)
    assert np.abs(shares - expected).max() < 5 * np.sqrt(expected)
