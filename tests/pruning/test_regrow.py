"""DSnoT: an oracle that looks at one output after another, the released pointers, goldens, edge cases."""

import json
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commjax.pruning import masks, regrow, scores, statistics, swaps
from tests.pruning.regrow_cases import check, first_mask, layer, oracle

pytestmark = pytest.mark.long

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "goldens_pruning.json").read_text())["dsnot"]


def released(pruned, M, G, wanda, *, cycles=50, threshold=0.1, same_sign=False):
    """The released code's lists and pointers, on [out, in]; True where pruned."""
    pruned, rows, inputs = pruned.copy(), np.arange(len(M)), M.shape[1]
    grow_list = np.argsort(np.where(pruned, G, 0), axis=1, kind="stable")
    prune_list = []
    for k in rows:
        order = [j for j in np.argsort(wanda[k], kind="stable") if not pruned[k, j]]
        prune_list.append([j for j in order if M[k, j] < 0] + [j for j in reversed(order) if M[k, j] >= 0])
    prune_list = np.array(prune_list)
    error = np.where(pruned, M, 0).sum(1)
    first, active = np.sign(error), np.ones(len(M), bool)
    grow_low, grow_high = np.zeros(len(M), int), np.full(len(M), inputs - 1)
    prune_low, prune_high = np.zeros(len(M), int), np.full(len(M), prune_list.shape[1] - 1)
    for _ in range(cycles):
        g = grow_list[rows, np.where(error > 0, grow_high, grow_low)]
        p = prune_list[rows, np.where(error < 0, prune_high, prune_low)]
        grow_high, grow_low = grow_high - (error > 0), grow_low + (error <= 0)
        prune_high, prune_low = prune_high - (error < 0), prune_low + (error >= 0)
        after = error + M[rows, p] - M[rows, g]
        active &= abs(error) > threshold
        if same_sign:
            active &= np.sign(after) == first
        pruned[rows[active], p[active]], pruned[rows[active], g[active]] = True, False
        error = np.where(active, after, error)
    return pruned


def released_n_m(pruned, M, G, scores, *, m, cycles=50, threshold=0.1):
    """The released N:M code, on [out, in]: the same grow pointers; the least score of the group, which is then
    spent."""
    pruned, rows, inputs = pruned.copy(), np.arange(len(M)), M.shape[1]
    grow_list = np.argsort(np.where(pruned, G, 0), axis=1, kind="stable")
    left = np.where(pruned, np.inf, scores)
    error = np.where(pruned, M, 0).sum(1)
    first, active = np.sign(error), np.ones(len(M), bool)
    low, high = np.zeros(len(M), int), np.full(len(M), inputs - 1)
    for _ in range(cycles):
        g = grow_list[rows, np.where(error > 0, high, low)]
        high, low = high - (error > 0), low + (error <= 0)
        members = (g // m * m)[:, None] + np.arange(m)
        p = members[rows, np.argmin(left[rows[:, None], members], axis=1)]
        after = error + M[rows, p] - M[rows, g]
        active &= (np.sign(after) == first) & (abs(error) > threshold)
        left[rows, p] = np.inf
        pruned[rows[active], p[active]], pruned[rows[active], g[active]] = True, False
        error = np.where(active, after, error)
    return pruned


def inputs_of(W, stats, power=1.0):
    """M, G, P of DSnoT in NumPy"""
    sums, var, norms = (
        np.asarray(f(stats)) for f in (statistics.input_sum, statistics.variance, statistics.input_norm)
    )
    M = np.asarray(W) * sums[:, None]
    return M, M / var[:, None] ** np.float32(power), np.abs(W) * norms[:, None]


@pytest.mark.parametrize("inputs", [4, 20, 64])
@pytest.mark.parametrize("pattern", [None, (2, 4), (1, 4), (3, 4)])
@pytest.mark.parametrize("same_sign", [False, True])
def test_dsnot_is_the_oracle_also_when_candidates_run_out(inputs, pattern, same_sign):
    W, stats = layer(inputs, 24, inputs)
    mask = first_mask(W, stats, pattern)
    expected = oracle(mask, *inputs_of(W, stats), m=pattern and pattern[1], same_sign=same_sign)
    check(W, mask, regrow.dsnot(W, mask, stats, pattern=pattern, same_sign=same_sign), expected)
    assert same_sign or not np.array_equal(expected, mask)


@pytest.mark.parametrize("same_sign", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_dsnot_is_the_released_loop_bit_for_bit_where_that_does_not_overrun(same_sign, dtype):
    W, stats = layer(512, 32, 1, dtype)
    mask = first_mask(W, stats, None)
    M, G, P = (np.asarray(a).T for a in inputs_of(W, stats))
    expected = ~released(~np.asarray(mask).T, M, G, P, same_sign=same_sign).T
    check(W, mask, regrow.dsnot(W, mask, stats, same_sign=same_sign), expected)


@pytest.mark.parametrize("pattern", [(2, 4), (3, 4), (4, 8)])
def test_with_a_pattern_dsnot_is_the_released_loop_bit_for_bit(pattern):
    """A group keeps at least as many as it lost, so that the released code never runs out of them."""
    W, stats = layer(512, 32, 21)
    S = np.asarray(scores.ria(alpha=0.5)(W, stats))
    mask = masks.n_m(jnp.array(S), *pattern)
    M, G, _ = (np.asarray(a).T for a in inputs_of(W, stats))
    expected = ~released_n_m(~np.asarray(mask).T, M, G, S.T, m=pattern[1]).T
    assert np.any(expected != mask)
    check(W, mask, regrow.dsnot(W, mask, stats, pattern=pattern, prune=jnp.array(S)), expected)


@pytest.mark.parametrize("pattern", [None, (2, 4)])
def test_outputs_in_blocks_of_which_the_last_is_filled_up_are_the_oracle(pattern, monkeypatch):
    monkeypatch.setattr(swaps, "_BLOCK", 8)
    W, stats = layer(40, 22, 31)  # three blocks of eight, and a shape of its own, because programs are kept
    mask = first_mask(W, stats, pattern)
    expected = oracle(mask, *inputs_of(W, stats), m=pattern and pattern[1], same_sign=pattern is not None)
    check(W, mask, regrow.dsnot(W, mask, stats, pattern=pattern), expected)


def test_one_program_serves_every_number_of_swaps():
    W, stats = layer(20, 24, 32)
    mask = first_mask(W, stats, None)
    regrow.dsnot(W, mask, stats, cycles=2)
    size = cast(Any, regrow._dsnot)._cache_size
    before = size()
    few, more = (regrow.dsnot(W, mask, stats, cycles=cycles, threshold=0.0)[1] for cycles in (1, 5))
    assert size() == before and not np.array_equal(few, more)


def test_the_sign_rule_is_off_by_default_but_on_for_patterns_as_released():
    W, stats = layer(64, 24, 2)
    for pattern, default in ((None, False), ((2, 4), True)):
        mask = first_mask(W, stats, pattern)
        found = {s: regrow.dsnot(W, mask, stats, pattern=pattern, same_sign=s)[1] for s in (None, False, True)}
        assert np.array_equal(found[None], found[default]) and not np.array_equal(found[None], found[not default])


@settings(max_examples=12)
@given(
    st.integers(0, 1000), st.sampled_from([1, 7]), st.sampled_from([0.0, 0.5, 20.0]), st.sampled_from([0.0, 0.5, 2.0])
)
def test_cycles_threshold_and_power_are_obeyed(seed, cycles, threshold, power):
    W, stats = layer(20, 24, seed)
    mask = first_mask(W, stats, None)
    expected = oracle(mask, *inputs_of(W, stats, power), cycles=cycles, threshold=threshold)
    check(W, mask, regrow.dsnot(W, mask, stats, cycles=cycles, threshold=threshold, power=power), expected)


@pytest.mark.parametrize("method", [regrow.dsnot, regrow.r2_dsnot])
def test_by_default_an_output_swaps_fifty_times_at_most(method):
    W, mask = jnp.repeat(jnp.array([[1.0], [-1.0]]), 150, axis=0), jnp.repeat(jnp.array([[False], [True]]), 150, axis=0)
    stats = statistics.of(jnp.broadcast_to(jnp.array([[0.5], [1.5]]), (2, 300)))
    new = method(W, mask, stats)[1]  # the error is 300 and falls by 4 with every swap
    assert (int(jnp.sum(new & ~mask)), int(jnp.sum(mask & ~new))) == (50, 50)


def test_prune_scores_may_be_given_and_are_wandas_otherwise():
    W, stats = layer(64, 24, 3)
    mask = masks.unstructured(jnp.abs(W), 0.5)
    M, G, P = inputs_of(W, stats)
    check(W, mask, regrow.dsnot(W, mask, stats), oracle(mask, M, G, P))
    given = np.random.default_rng(0).permutation(W.size).reshape(W.shape).astype(float)  # one of them is 0
    check(W, mask, regrow.dsnot(W, mask, stats, prune=jnp.array(given)), oracle(mask, M, G, given))
    check(
        W,
        mask,
        regrow.dsnot(W, mask, stats, prune=jnp.array(given), pattern=(2, 4)),
        oracle(mask, M, G, given, m=4, same_sign=True),
    )


def test_under_the_sign_rule_no_output_is_worse_off_and_without_it_some_are():
    W, stats = layer(64, 24, 4)
    mask = first_mask(W, stats, None)
    M = inputs_of(W, stats)[0]

    def error(mask):
        return np.abs(np.where(mask, 0, M).sum(0))

    careful, free = (error(regrow.dsnot(W, mask, stats, same_sign=s)[1]) for s in (True, False))
    assert np.all(careful <= error(mask)) and careful.sum() < 0.7 * error(mask).sum()
    assert np.any(free > error(mask))


# Edge cases.


def test_a_dead_channel_is_never_grown_and_a_constant_one_first():
    W, stats = layer(16, 6, 5)
    x = np.random.default_rng(0).standard_normal((2, 8, 16))
    x[..., 3], x[..., 7] = 0, 2.0
    stats = statistics.of(jnp.array(x))
    assert statistics.variance(stats)[3] == 0 == statistics.variance(stats)[7]
    mask = masks.unstructured(jnp.abs(W).at[3].set(0).at[7].set(0), 0.5)  # both are pruned everywhere
    new = regrow.dsnot(W, mask, stats, cycles=1, threshold=0.0)[1]
    error = np.where(mask, 0, W * statistics.input_sum(stats)[:, None]).sum(0)
    swapped = np.any(new != mask, axis=0)
    helps = np.asarray(error * W[7] > 0)
    assert not np.any(new[3]) and np.any(helps & swapped)
    assert np.array_equal(new[7], helps & swapped)


def test_an_output_of_zeros_and_inputs_without_mean_stay_as_they_are():
    W, stats = layer(16, 3, 6)
    mask = masks.unstructured(jnp.abs(W), 0.5)
    zero = W.at[:, 1].set(0)
    for threshold in (0.0, 0.1):
        assert np.array_equal(regrow.dsnot(zero, mask, stats, threshold=threshold)[1][:, 1], mask[:, 1])
    x = np.random.default_rng(1).standard_normal((2, 4, 16))
    centred = statistics.of(jnp.array(np.concatenate([x, -x], axis=1)))
    pruned, new = regrow.dsnot(W, mask, centred)
    assert np.array_equal(new, mask) and np.all(np.isfinite(pruned))


@pytest.mark.parametrize("full", [True, False])
def test_nothing_to_grow_or_nothing_to_prune_changes_nothing(full):
    W, stats = layer(9, 4, 7)
    mask = jnp.full(W.shape, full)
    for method in (regrow.dsnot, regrow.r2_dsnot):
        pruned, new = method(W, mask, stats)
        assert np.array_equal(new, mask) and np.array_equal(pruned, W if full else jnp.zeros_like(W))


def test_equal_candidates_are_taken_as_the_released_lists_give_them():
    """Grown: from the end for a positive error, from the start for a negative one.  Pruned: always the first."""
    x = statistics.of(jnp.array([[1.0] * 6, [3.0] * 6]))
    W, mask = jnp.array([[1.0], [1.0], [1.0], [-1.0], [-1.0], [-1.0]]), jnp.array([[False]] * 3 + [[True]] * 3)

    def after(cycles, W, mask, threshold=0.0):
        return regrow.dsnot(W, mask, x, cycles=cycles, threshold=threshold)[1][:, 0].tolist()

    assert after(1, W, mask) == [False, False, True, False, True, True]  # the error goes from 12 to 4,
    assert after(2, W, mask) == [False, True, True, False, False, True]  # then to -4
    assert after(1, -W, mask) == [True, False, False, False, True, True]
    assert after(2, -W, mask) == [True, True, False, False, False, True]
    assert after(1, W, mask, 12.0) == mask[:, 0].tolist() != after(1, W, mask, 11.5)  # |error| <= threshold is done


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_equal_candidates_of_a_long_output_are_those_of_the_released_loop(sign):
    """Many chunks of equals, and constant channels, whose grow score is infinite."""
    rng = np.random.default_rng(0)
    W = jnp.array(sign * rng.choice([-2.0, -1.0, 1.0, 2.0], (256, 8)))
    x = np.tile([[1.0], [3.0]], (1, 256))
    x[:, [20, 21, 100, 200]] = 2.0
    stats = statistics.of(jnp.array(x))
    mask = jnp.array(rng.permuted(np.repeat([False, True], 128)[:, None] & np.ones((1, 8), bool), axis=0))
    with np.errstate(divide="ignore"):
        M, G, P = (np.asarray(a).T for a in inputs_of(W, stats))
    assert np.isinf(G).sum() == 32
    for cycles in (1, 2, 5, 12):
        expected = ~released(~np.asarray(mask).T, M, G, P, cycles=cycles).T
        check(W, mask, regrow.dsnot(W, mask, stats, cycles=cycles), expected)


def test_half_precision_weights_come_back_as_they_were():
    W, stats = layer(32, 6, 8, np.float32)
    half = W.astype(jnp.bfloat16)
    mask = first_mask(half, stats, None)
    pruned, new = regrow.dsnot(half, mask, stats)
    assert pruned.dtype == jnp.bfloat16
    assert np.array_equal(new, regrow.dsnot(half.astype(jnp.float32), mask, stats)[1])


def test_regrowing_runs_under_jit():
    W, stats = layer(64, 24, 9)
    mask = first_mask(W, stats, None)
    assert np.array_equal(jax.jit(regrow.dsnot)(W, mask, stats)[1], regrow.dsnot(W, mask, stats)[1])


# Goldens and R^2-DSnoT.


def golden_layer():
    """The golden output beside one of kept weights that makes the l1 norms of the inputs what the golden says."""
    w, keep = np.array(GOLDEN["w"]), np.array(GOLDEN["keep"], bool)
    other = np.array(GOLDEN["col_l1"]) - np.abs(w) * keep
    one = jnp.ones((), jnp.int32)

    def total(a):
        return statistics.Sum(jnp.array(a), jnp.zeros(len(w)))

    squares = np.array(GOLDEN["normX"]) ** 2
    stats = statistics.Statistics(one, one, total(GOLDEN["EX"]), total(squares), total(GOLDEN["VarX"]), None, None)
    return jnp.array(np.stack([w, other], axis=1)), jnp.array(np.stack([keep, np.ones(6, bool)], axis=1)), stats


@pytest.mark.parametrize("name, method", [("DSnoT", regrow.dsnot), ("R2", regrow.r2_dsnot)])
def test_the_golden_swap(name, method):
    W, mask, stats = golden_layer()
    options = {} if name == "DSnoT" else {"relative_grow": True, "relative_prune": True, "alpha": 0.5}
    new = np.asarray(method(W, mask, stats, cycles=1, **options)[1])
    golden = GOLDEN[name]
    expected = np.array(mask)
    expected[golden["grow"], 0], expected[golden["prune"], 0] = True, False
    assert np.array_equal(new, expected)
