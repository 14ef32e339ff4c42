"""R^2-DSnoT: the oracle with its scores, its options, and bad input to both methods."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from commjax.pruning import regrow, statistics
from tests.pruning.regrow_cases import check, first_mask, layer, oracle

pytestmark = pytest.mark.long


def r2(W, mask, stats, *, relative_grow, relative_prune, alpha, gammas, p, regularizer, literal):
    """M, G, P of R^2-DSnoT in NumPy, entry by entry."""
    W, mask = np.asarray(W, float), np.asarray(mask)
    mean, var, norms, sums = (
        np.asarray(f(stats), float)
        for f in (statistics.mean, statistics.variance, statistics.input_norm, statistics.input_sum)
    )
    kept = W * mask
    G, P = np.zeros_like(W), np.zeros_like(W)
    for j, k in np.ndindex(W.shape):
        ins, outs = np.abs(kept[j]).sum(), np.abs(kept[:, k]).sum()
        D = (1 / ins if ins else 0) + (1 / outs if outs else 0)
        toggled = kept[:, k].copy()
        toggled[j] = 0 if mask[j, k] else W[j, k]
        R = np.linalg.norm({"out": kept[:, k], "in": kept[j], "toggled": toggled}[regularizer], p)
        g = (1 if literal else W[j, k]) * mean[j] / var[j] * (D if relative_grow else 1)
        G[j, k] = g + np.sign(g) * gammas[0] * R
        P[j, k] = abs(W[j, k]) * norms[j] ** alpha * (D if relative_prune else 1) + gammas[1] * R
    return W * sums[:, None], G, P


OPTIONS = st.fixed_dictionaries(
    {
        "relative_grow": st.booleans(),
        "relative_prune": st.booleans(),
        "alpha": st.sampled_from([0.0, 0.5, 1.0]),
        "gammas": st.sampled_from([(0.0, 0.0), (0.05, 0.0), (0.0, 0.05), (0.3, 0.2)]),
        "p": st.sampled_from([1.0, 2.0, math.inf]),
        "regularizer": st.sampled_from(["out", "in", "toggled"]),
        "literal": st.booleans(),
    }
)


@settings(max_examples=20)
@given(OPTIONS, st.sampled_from([None, (2, 4)]), st.integers(0, 3))
def test_r2_dsnot_is_the_oracle_with_its_scores(options, pattern, seed):
    W, stats = layer(16, 6, seed)
    mask = first_mask(W, stats, pattern)
    mask = mask & (jnp.arange(16) != 5)[:, None] if pattern is None else mask  # an input that is pruned everywhere
    M, G, P = r2(W, mask, stats, **options)
    expected = oracle(mask, M, G, P, m=pattern and 4, same_sign=pattern is not None)
    gammas = dict(zip(("gamma_grow", "gamma_prune"), options["gammas"]))
    rest = {name: value for name, value in options.items() if name != "gammas"}
    check(W, mask, regrow.r2_dsnot(W, mask, stats, pattern=pattern, **gammas, **rest), expected)


def test_without_its_options_r2_dsnot_is_dsnot():
    W, stats = layer(64, 24, 11)
    for pattern in (None, (2, 4)):
        mask = first_mask(W, stats, pattern)
        plain = regrow.r2_dsnot(W, mask, stats, relative_grow=False, relative_prune=False, alpha=1.0, pattern=pattern)
        assert np.array_equal(plain[1], regrow.dsnot(W, mask, stats, pattern=pattern)[1])


def test_the_printed_regulariser_changes_nothing_and_the_others_do():
    W, stats = layer(64, 24, 12)
    mask = first_mask(W, stats, None)

    def run(gamma, regularizer):
        return regrow.r2_dsnot(W, mask, stats, gamma_grow=gamma, gamma_prune=gamma, regularizer=regularizer)[1]

    none = run(0.0, "out")
    assert np.array_equal(run(0.5, "out"), none)
    assert not np.array_equal(run(0.5, "in"), none) and not np.array_equal(run(0.5, "toggled"), none)


def test_the_toggled_norm_of_the_largest_weights_is_right_also_among_equals():
    W = jnp.array([[3.0, 3.0], [-3.0, 1.0], [2.0, 5.0], [1.0, 0.5]])
    mask = jnp.array([[True, True], [True, True], [False, False], [False, True]])
    R = regrow._regularizer(W, mask, jnp.where(mask, W, 0), math.inf, "toggled")
    assert R.tolist() == [[3.0, 1.0], [3.0, 3.0], [3.0, 5.0], [3.0, 3.0]]


def test_d_is_frozen_at_the_first_mask_and_ignores_norms_of_zero():
    """W4: an input that is pruned everywhere has no relative importance of its own, and no infinite one."""
    W, stats = layer(16, 6, 13)
    mask = first_mask(W, stats, None).at[2].set(False)
    pruned, new = regrow.r2_dsnot(W, mask, stats, relative_grow=True, relative_prune=True)
    assert np.all(np.isfinite(pruned)) and np.array_equal(new.sum(0), mask.sum(0))


W0, STATS0 = layer(8, 3, 14)
MASK0 = first_mask(W0, STATS0, None)
BAD = {
    "mask": (lambda: regrow.dsnot(W0, MASK0[:4], STATS0), r"mask has shape \(4, 3\); allowed: that of W, \(8, 3\)"),
    "statistics": (lambda: regrow.dsnot(W0[:4], MASK0[:4], STATS0), "stats has 8 inputs; allowed: the 4 of W"),
    "prune": (lambda: regrow.dsnot(W0, MASK0, STATS0, prune=W0[:2]), r"prune has shape \(2, 3\)"),
    "pattern n > m": (lambda: regrow.dsnot(W0, MASK0, STATS0, pattern=(5, 4)), "n=5; allowed"),
    "pattern m": (
        lambda: regrow.r2_dsnot(W0, MASK0, STATS0, pattern=(2, 3)),
        "m=3; allowed: a divisor of the 8 inputs",
    ),
    "cycles": (lambda: regrow.dsnot(W0, MASK0, STATS0, cycles=0), "cycles=0; allowed: 1 to 1073741824"),
    "threshold": (lambda: regrow.dsnot(W0, MASK0, STATS0, threshold=-1.0), r"threshold=-1\.0; allowed"),
    "power": (lambda: regrow.dsnot(W0, MASK0, STATS0, power=math.inf), "power=inf; allowed"),
    "alpha": (lambda: regrow.r2_dsnot(W0, MASK0, STATS0, alpha=-1.0), r"alpha=-1\.0; allowed"),
    "gamma_grow": (lambda: regrow.r2_dsnot(W0, MASK0, STATS0, gamma_grow=-1.0), r"gamma_grow=-1\.0; allowed"),
    "gamma_prune": (lambda: regrow.r2_dsnot(W0, MASK0, STATS0, gamma_prune=math.nan), "gamma_prune=nan; allowed"),
    "p": (lambda: regrow.r2_dsnot(W0, MASK0, STATS0, p=0.5), r"p=0\.5; allowed: at least 1"),
}


@pytest.mark.parametrize("call, message", BAD.values(), ids=BAD)
def test_bad_input_is_refused_by_name_and_value(call, message):
    with pytest.raises(ValueError, match=message):
        call()
