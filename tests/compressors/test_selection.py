"""Selections against NumPy: the k largest, k at random, k at random of the k' largest."""

import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from commjax.compressors import candidates, comp, leafwise, random_sets, selection, top_k

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


LONG = selection._LARGE + 5  # rows are taken one after another, and the last row of a table is not whole


def long_rows(d):
    rng = np.random.default_rng(0)
    normal = rng.standard_normal((3, d))
    return {
        "normal": normal,
        "heavy tails": rng.standard_t(1, (3, d)),
        "layers": normal * np.repeat(10.0 ** np.arange(-3, 2), -(-d // 5))[:d],
        "few numbers": np.round(normal * 4) / 4,
        "few entries": normal * (rng.random((3, d)) < 0.002),
        "equal": np.sign(normal),
        "zero": np.zeros((3, d)),
        "infinite": np.where(rng.random((3, d)) < 0.01, -np.inf, normal),
    }


@pytest.mark.parametrize("dtype", DTYPES[:3], ids=lambda t: np.dtype(t).name)
@pytest.mark.parametrize("k", [1, 163, LONG // 2, LONG - 1])
def test_long_rows_are_selected_as_by_a_sort(dtype, k):
    selected = jax.jit(jax.vmap(lambda row: selection.top_k_mask(row, k)))
    for name, rows in long_rows(LONG).items():
        rows = rows.astype(dtype)
        masks = selected(jnp.asarray(rows))
        np.testing.assert_array_equal(masks, [oracle(row, k) for row in rows], err_msg=name)
    alone = jax.jit(lambda row: selection.top_k_mask(row, k))(jnp.asarray(rows[0]))
    np.testing.assert_array_equal(alone, masks[0])


def test_a_long_row_is_selected_right_inside_a_fusion_that_would_compute_it_twice():
    rng = np.random.default_rng(3)
    a, b = (jnp.asarray(rng.standard_normal((4, LONG)), jnp.float32) for _ in range(2))

    @jax.jit
    def chosen(a, b):
        x = a * 1.7 - b * b
        mask = jax.vmap(lambda row: selection.top_k_mask(row, 100))(x)
        return mask, jnp.where(mask, x, 0)

    for seed in range(8):
        mask, _ = chosen(a + np.float32(seed), b)
        assert (np.asarray(mask).sum(axis=1) == 100).all()


@pytest.mark.parametrize("compressor", [top_k(5), comp(3, 50)], ids=lambda c: c.name)
def test_a_long_vector_that_was_compressed_can_be_differentiated(compressor):
    def energy(x):
        return jnp.sum(compressor.compress(KEYS[0], x).value ** 2) / 2

    x = jnp.asarray(np.random.default_rng(0).standard_normal((2, LONG)))
    value, gradient = jax.jit(
        lambda x: (jax.vmap(lambda row: compressor.compress(KEYS[0], row).value)(x), jax.vmap(jax.grad(energy))(x))
    )(x)
    np.testing.assert_allclose(gradient, value * np.where(value == 0, 0, value / x))


@pytest.mark.parametrize("d", [1, 15, 16, 17, 300, LONG])
def test_entries_of_a_mask_are_found_by_their_number(d):
    rng = np.random.default_rng(d)
    for share in (0.02, 0.5, 1.0):
        mask = rng.random(d) < share
        size = int(mask.sum())
        if size:
            found = np.asarray(jax.jit(selection.ranked)(jnp.asarray(mask), jnp.arange(size, dtype=jnp.int32)))
            assert sorted(found) == np.flatnonzero(mask).tolist()
            some = rng.permutation(size)[: size // 2 + 1]
            np.testing.assert_array_equal(
                selection.ranked(jnp.asarray(mask), jnp.asarray(some, jnp.int32)), found[some]
            )


@pytest.mark.parametrize("d, k", [(9, 4), (LONG, 50)])
def test_positions_and_values_are_those_of_the_mask(d, k):
    x = np.random.default_rng(1).integers(-4, 5, d).astype(np.float32)
    positions, values = selection.top_k(jnp.asarray(x), k)
    assert sorted(np.asarray(positions)) == np.flatnonzero(oracle(x, k)).tolist()
    np.testing.assert_array_equal(values, x[np.asarray(positions)])
    for size in (k, 2 * k, d):
        drawn = np.asarray(candidates.k_of_top(KEYS[0], jnp.asarray(x), k, size))
        assert len(set(drawn.tolist())) == k and oracle(x, size)[drawn].all()


def test_more_entries_than_there_are_cannot_be_kept():
    for compressor, name in ((top_k(3), "top_k"), (leafwise(lambda d: top_k(1)), "top_k")):
        x = jnp.ones(2) if compressor.name == "top-3" else {"full": jnp.ones(3), "empty": jnp.ones(0)}
        with pytest.raises(ValueError, match=f"{name}: k must be at most the dimension d = [02], got [13]"):
            compressor.compress(KEYS[0], x)


@pytest.mark.parametrize("dtype", [jnp.int32, jnp.complex64])
def test_only_floating_point_numbers_are_selected_by_magnitude(dtype):
    with pytest.raises(ValueError, match=f"a vector of {jnp.dtype(dtype).name}; allowed: floating-point numbers"):
        top_k(2).compress(KEYS[0], jnp.ones(5, dtype))


def test_on_other_platforms_top_k_of_jax_selects():
    def selected(row):
        return selection.top_k_mask(row, 3)

    text = jax.jit(selected).trace(jnp.ones(50)).lower(lowering_platforms=("tpu",)).as_text()
    assert "top_k" in text and "while" not in text
    x = np.array([1.0, 3, -3, 2, 3, 0])
    keys = selection.magnitude_bits(jnp.asarray(x))
    np.testing.assert_array_equal(selection._by_top_k(keys, 2), oracle(x, 2))


def test_nan_is_above_all():
    x = jnp.array([1.0, jnp.nan, jnp.inf, 0.0])
    assert selection.top_k_mask(x, 1).tolist() == [False, True, False, False]
    long = jnp.ones(LONG).at[jnp.array([7, 9])].set(jnp.array([jnp.inf, -jnp.nan]))
    assert np.flatnonzero(selection.top_k_mask(long, 2)).tolist() == [7, 9]
    assert np.flatnonzero(selection.top_k_mask(jnp.full(LONG, jnp.nan), 3)).tolist() == [0, 1, 2]


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
    masks = jax.vmap(lambda key: random_sets.random_mask(key, d, k))(KEYS)  # (34, 33) takes the route of many
    check_uniform(masks, np.full(d, True), k)


def test_random_of_mask_is_uniform_on_what_is_allowed():
    allowed = np.array([True, False, True, True, False, True])
    masks = jax.jit(jax.vmap(lambda key: random_sets.random_of_mask(key, jnp.asarray(allowed), 4, 2)))(KEYS)
    check_uniform(masks, allowed, 2)


def test_random_of_mask_is_uniform_where_entries_are_drawn_by_their_number(monkeypatch):
    monkeypatch.setattr(random_sets, "LARGE", 4)
    random_sets.random_of_mask.clear_cache()
    allowed = np.zeros(40, bool)
    allowed[[0, 1, 17, 33, 39]] = True  # also behind the last whole row of the table
    draw = random_sets.random_of_mask.__wrapped__
    for size, k in ((5, 2), (5, 5)):
        masks = jax.jit(jax.vmap(lambda key, size=size, k=k: draw(key, jnp.asarray(allowed), size, k)))(KEYS)
        check_uniform(masks, allowed, k)


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
        monkeypatch.setattr(candidates, "MAX_DIMENSION", 7)
    candidates.k_of_top_mask.clear_cache()
    masks = jax.jit(jax.vmap(candidates.k_of_top_mask, in_axes=(0, None, None, None)), static_argnums=(2, 3))(
        KEYS, jnp.asarray(TIED), k, k_top
    )
    candidates.k_of_top_mask.clear_cache()
    check_uniform(masks, oracle(TIED, k_top), k)


def test_the_routes_are_the_ones_we_think(monkeypatch):
    calls = []
    monkeypatch.setattr(candidates, "_draw_from_top", lambda k, k_top: lambda key, x: calls.append((k, k_top)) or x > 0)
    for d, k, k_top in [(64, 2, 8), (64, 3, 8), (4096, 1, 256), (4097, 1, 4000), (64, 8, 8), (64, 8, 64)]:
        jax.eval_shape(
            lambda x, k=k, k_top=k_top: candidates.k_of_top_mask.__wrapped__(KEYS[0], x, k, k_top), jnp.ones(d)
        )
    assert calls == [(2, 8), (4096 // 4096, 256)]  # candidates iff d <= 4096, k d <= 16 k', k < k' < d


def test_candidates_are_drawn_until_enough_are_found():
    # One of eight is accepted, two are wanted, and 30 are drawn a turn: one row in eleven needs another turn.
    rng = np.random.default_rng(1)
    rows = rng.standard_normal((400, 64)).astype(ml_dtypes.bfloat16)
    rows[0] = np.arange(64)[::-1] // 4  # ties
    draw = jax.jit(lambda keys, x: jax.vmap(lambda key, row: candidates.k_of_top_mask(key, row, 2, 8))(keys, x))
    masks = np.asarray(draw(KEYS[:400], jnp.asarray(rows)))
    assert np.all(masks.sum(axis=1) == 2)
    assert not np.any(masks & ~np.array([oracle(row, 8) for row in rows]))
    alone = jax.jit(lambda key, row: candidates.k_of_top_mask(key, row, 2, 8))
    for i in range(0, 400, 40):
        np.testing.assert_array_equal(alone(KEYS[i], jnp.asarray(rows[i])), masks[i])


def test_k_of_top_mask_takes_one_key_for_many_vectors_and_two_batch_axes():
    x = np.random.default_rng(2).standard_normal((3, 4, 16))
    draw = lambda key, x: candidates.k_of_top_mask(key, x, 1, 8)  # noqa: E731
    same_key = jax.jit(jax.vmap(draw, in_axes=(None, 0)))(KEYS[0], jnp.asarray(x[0]))
    nested = jax.jit(jax.vmap(jax.vmap(draw)))(KEYS[:12].reshape(3, 4), jnp.asarray(x))
    for j in range(4):
        np.testing.assert_array_equal(same_key[j], draw(KEYS[0], jnp.asarray(x[0, j])))
        np.testing.assert_array_equal(nested[2, j], draw(KEYS[8 + j], jnp.asarray(x[2, j])))


@pytest.mark.parametrize("d", [1, 7, 65_535, 65_536, 3_000_000])
def test_random_index_is_uniform(d):
    index = np.asarray(jax.jit(lambda key: random_sets.random_index(key, (60_000,), d))(jax.random.key(d)))
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
        monkeypatch.setattr(candidates, "_draws", lambda *_: draws)
    n, d = 40, 9
    x = np.random.default_rng(0).standard_normal((n, d))
    keys = jax.random.split(jax.random.key(3), n)
    found = np.asarray(candidates._draw_rows(keys, jax.vmap(selection.magnitude_bits)(jnp.asarray(x)), k, k_top))
    stream = np.asarray(jax.vmap(lambda key: candidates._candidates(key, jnp.int32(0), 200, d))(keys)).T
    for i in range(n):
        top = set(np.argsort(-np.abs(x[i]))[:k_top].tolist())
        first = list(dict.fromkeys(c for c in stream[:, i].tolist() if c in top))[:k]
        assert sorted(first) == np.flatnonzero(found[i]).tolist()


@pytest.mark.parametrize("d", [7, 65_535, 65_536, 65_537, 100_000, 1 << 20])
def test_random_indices_are_uniform_on_both_sides_of_the_size_at_which_the_arithmetic_changes(d):
    found = np.asarray(random_sets.random_index(jax.random.key(5), (20_000,), d), np.float64)
    assert found.min() >= 0 and found.max() <= d - 1
    # The mean of 20,000 draws within five standard deviations, and every tenth of the range.
    assert abs(found.mean() - (d - 1) / 2) < 5 * d / np.sqrt(12 * len(found))
    shares = np.histogram(found, np.arange(11) * d / 10)[0] if d > 10 else np.bincount(found.astype(int), minlength=d)
    expected = len(found) / len(shares)
    assert np.abs(shares - expected).max() < 5 * np.sqrt(expected)


@pytest.mark.parametrize("d, k", [(1024, 33), (1031, 1030), (5000, 5000), (70_001, 700), (2**20 + 1, 100_000)])
def test_random_positions_are_distinct_and_within_the_dimension(d, k):
    positions = np.asarray(jax.vmap(lambda key: random_sets.random_positions(key, d, k))(KEYS[:3]))
    assert positions.dtype == np.int32 and positions.shape == (3, k)
    assert positions.min() >= 0 and positions.max() < d
    assert all(len(np.unique(row)) == k for row in positions) and (positions[0] != positions[1]).any()
    mask = np.asarray(random_sets.random_mask(KEYS[0], d, k))
    assert mask.sum() == k and (2 * k > d or mask[positions[0]].all())


def chi_square(counts, expected, variance_of_one=None):
    """How many deviations the sum of squares is away from its mean, if all counts have this expectation."""
    counts = np.asarray(counts, float).ravel()
    degrees = len(counts) - 1
    return (np.sum((counts - expected) ** 2 / (variance_of_one or expected)) - degrees) / np.sqrt(2 * degrees)


@pytest.mark.parametrize("d, k", [(1024, 40), (4099, 40), (10_000, 64)])
def test_single_positions_and_pairs_of_random_sets_are_uniform_over_keys_rounds_and_clients(d, k):
    """A level of five deviations: a right generator fails once in three million runs."""
    many = {
        "split": KEYS,
        "rounds": jax.vmap(lambda t: jax.random.fold_in(KEYS[0], t))(jnp.arange(20_000)),
        "clients": jax.vmap(lambda i: jax.random.fold_in(jax.random.fold_in(KEYS[0], 3), i))(jnp.arange(20_000)),
    }
    for keys in many.values():
        positions = np.asarray(jax.jit(jax.vmap(lambda key: random_sets.random_positions(key, d, k)))(keys))
        n = len(positions)
        p = k / d
        counts = np.bincount(positions.ravel(), minlength=d)
        # The counts of a set of fixed size are negatively correlated: their sum is fixed.
        assert abs(chi_square(counts, n * p, n * p * (1 - p) * d / (d - 1))) < 5
        cells = 16
        cell = positions * cells // d
        for first, second in ((0, 1), (0, k - 1), (k // 2, k // 2 + 1)):  # also the order is uniform
            pairs = np.zeros((cells, cells))
            np.add.at(pairs, (cell[:, first], cell[:, second]), 1)
            assert abs(chi_square(pairs, n / cells**2)) < 5
        apart = np.zeros((cells, cells))  # one key and the next
        np.add.at(apart, (cell[:-1, 0], cell[1:, 0]), 1)
        assert abs(chi_square(apart, n / cells**2)) < 5
        gaps = np.bincount((positions[:, 0] - positions[:, 1]) % d, minlength=d)[1:]  # neighbours are not preferred
        assert abs(chi_square(gaps, n / (d - 1))) < 5


def test_ordered_pairs_of_few_places_are_uniform_after_the_rounds_of_the_permutation():
    """The fewer places, the more rounds are needed: from 1024 on, four are more than enough (at 64, three are not)."""
    d, many = 64, jax.random.split(jax.random.key(8), 1_000_000)
    pairs = np.asarray(jax.jit(jax.vmap(lambda key: random_sets.permutation(key, d, 2)))(many))
    counts = np.bincount(pairs[:, 0] * d + pairs[:, 1], minlength=d * d).reshape(d, d)
    assert np.diag(counts).sum() == 0
    assert abs(chi_square(counts[~np.eye(d, dtype=bool)], len(pairs) / (d * (d - 1)))) < 5


@pytest.mark.parametrize("d", [2**31 - 1, 2**30 + 1, 25013 * 85009])
def test_positions_among_billions_are_distinct_and_spread_evenly(d):
    positions = np.asarray(random_sets.permutation(KEYS[1], d, 20_000))
    assert positions.min() >= 0 and positions.max() < d and len(np.unique(positions)) == 20_000
    for part in (positions, positions % 65_536 * (d // 65_536)):  # high and low digits
        assert abs(chi_square(np.histogram(part, 64, (0, d))[0], 20_000 / 64)) < 5


@pytest.mark.parametrize("d", [1, 2, 3, 10, 31, 1024, 1031])
def test_a_permutation_of_all_places_has_every_place_once(d):
    images = np.asarray(jax.vmap(lambda key: random_sets.permutation(key, d, d))(KEYS[:5]))
    assert (np.sort(images, axis=1) == np.arange(d)).all()


def test_rand_k_in_large_dimensions_is_unbiased_with_the_variance_of_theory():
    d, k, n = 4100, 41, 20_000
    x = np.random.default_rng(0).standard_normal(d)
    masks = jax.jit(jax.vmap(lambda key: random_sets.random_positions(key, d, k)))(KEYS)
    chosen = x[np.asarray(masks)]
    # |C(x) - x|^2 = (d/k)^2 sum_chosen x^2 - 2 (d/k) sum_chosen x^2 + |x|^2, whose mean is (d/k - 1) |x|^2
    errors = ((d / k) ** 2 - 2 * d / k) * (chosen**2).sum(axis=1) + x @ x
    assert abs(errors.mean() - (d / k - 1) * (x @ x)) < 5 * errors.std() / np.sqrt(n)
    inner = d / k * (chosen * chosen).sum(axis=1)  # <C(x), x>, whose mean is |x|^2
    assert abs(inner.mean() - x @ x) < 5 * inner.std() / np.sqrt(n)


def test_more_coordinates_than_32_bits_number_are_refused():
    with pytest.raises(ValueError, match=r"d=2147483648; allowed: fewer than 2\^31 coordinates"):
        random_sets.random_positions(KEYS[0], 2**31, 33)
    with pytest.raises(ValueError, match=r"d=2147483648 coordinates; allowed: fewer than 2\^31"):
        jax.eval_shape(lambda x: selection.top_k_mask(x, 5), jax.ShapeDtypeStruct((2**31,), jnp.bfloat16))
