"""What `compress` draws is what `outcomes` enumerates: same values, same frequencies."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commjax.compressors import (
    candidates,
    comp,
    dithering,
    exact_laws,
    m_nice,
    mix,
    natural,
    perm_k,
    rand_k,
    scaled,
    scaled_sign,
    ternary,
    top_k,
)
from tests.compressors.zoo import INF, cloud

pytestmark = pytest.mark.long

SAMPLES = 20_000
CASES = {
    # name: (compressor, n, d)
    "rand-1 of 4": (rand_k(1), 2, 4),
    "rand-3 of 5": (rand_k(3), 2, 5),
    "comp-(1,3) of 5": (comp(1, 3), 2, 5),
    "comp-(2,4) of 6": (comp(2, 4), 1, 6),
    "comp-(2,3) of 4": (comp(2, 3), 2, 4),
    "mix-(1,2) of 5": (mix(1, 2), 2, 5),
    "2-nice of 3": (m_nice(2), 3, 2),
    "1-nice(rand-2)": (m_nice(1, rand_k(2)), 3, 3),
    "2-nice(2-nice)": (m_nice(2, m_nice(2)), 3, 2),
    "perm-k, d = 2n": (perm_k(), 2, 4),
    "perm-k, d > n": (perm_k(), 2, 5),
    "perm-k, d < n": (perm_k(), 4, 3),
    "perm-k, n = 2d": (perm_k(), 4, 2),
    "natural": (natural(), 1, 4),
    "dithering p=1": (dithering(2, 1.0), 1, 4),
    "dithering p=2": (dithering(3, 2.0), 2, 3),
    "dithering p=inf": (dithering(2, INF), 1, 4),
    "ternary": (ternary(), 2, 3),
    "top-2 of 4": (top_k(2), 2, 4),
    "scaled sign": (scaled_sign(), 2, 4),
    "scaled": (scaled(0.25, comp(1, 2)), 2, 3),
}


def _sampler(compressor, n):
    """(keys, xs) -> values [samples, n, d]"""

    def once(key, xs):
        return jax.vmap(lambda x, id: compressor.compress(key, x, id, n).value)(xs, jnp.arange(n))

    return jax.jit(jax.vmap(once, in_axes=(0, None)))


@cache
def _keys(seed):
    return jax.random.split(jax.random.key(seed), SAMPLES)


def _distinct(probability, values, digits=9):
    """Outcomes of positive probability, equal ones taken together"""
    possible = probability > 0
    rows, where = np.unique(
        np.round(values[possible].reshape(possible.sum(), -1), digits) + 0.0, axis=0, return_inverse=True
    )
    return np.bincount(where.reshape(-1), probability[possible]), rows


def _nearest(samples, rows, tolerance):
    """The outcome that each sample is; fails where it is none."""
    flat = np.asarray(samples, np.float64).reshape(len(samples), -1)
    unique, where = np.unique(flat, axis=0, return_inverse=True)
    distance = np.abs(unique[:, None] - rows[None]).max(axis=2)
    assert distance.min(axis=1).max() <= tolerance * np.abs(rows).max()
    return distance.argmin(axis=1)[where.reshape(-1)]


def _check_frequencies(which, probability):
    count = len(which)
    seen = np.bincount(which, minlength=len(probability))
    error = np.abs(seen - count * probability)
    assert np.all(error <= 5 * np.sqrt(count * probability * (1 - probability)) + 5)
    # All together: chi^2 has len - 1 degrees of freedom.
    likely = count * probability > 5
    chi2 = np.sum((error**2 / (count * probability))[likely])
    freedom = likely.sum() - 1
    assert chi2 <= freedom + 5 * np.sqrt(2 * freedom) + 10


def _check(compressor, n, d, dtype=jnp.float64, xs=None, seed=0):
    # Quarters, so that float32 and bfloat16 hold the vectors exactly.
    xs = np.round(4 * cloud(d * n, n, d)) / 4 + 0.25 if xs is None else xs
    probability, rows = _distinct(*compressor.outcomes(xs))
    values = _sampler(compressor, n)(_keys(seed), jnp.asarray(xs, dtype))
    assert values.dtype == dtype
    which = _nearest(values, rows, {jnp.float64: 1e-8, jnp.float32: 1e-6, jnp.bfloat16: 0.02}[dtype])
    if dtype != jnp.bfloat16:  # whose probabilities are rounded too
        _check_frequencies(which, probability)


@pytest.mark.parametrize("case", CASES)
def test_samples_follow_the_enumerated_law(case):
    _check(*CASES[case])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("case", ["comp-(1,3) of 5", "mix-(1,2) of 5", "natural", "dithering p=2", "ternary"])
def test_samples_follow_the_law_in_lower_precision(case, dtype):
    _check(*CASES[case], dtype)


def test_comp_follows_its_law_when_it_takes_the_threshold_route(monkeypatch):
    monkeypatch.setattr(candidates, "_MAX_CANDIDATES", 0)
    monkeypatch.setattr(candidates, "_draw_from_top", None)
    candidates.k_of_top_mask.clear_cache()
    try:
        _check(comp(2, 3), 2, 5)
    finally:
        candidates.k_of_top_mask.clear_cache()


@pytest.mark.parametrize("compressor", [comp(1, 3), mix(2, 1)], ids=lambda c: c.name)
def test_ties_are_broken_as_the_law_says(compressor):
    xs = np.array([[1.0, -1, 1, 1, 0], [0.0, 2, 0, -2, 0.5]])
    _check(compressor, 2, 5, xs=xs, seed=1)


def test_the_law_of_zero_is_zero():
    for compressor in (natural(), dithering(3), dithering(2, 1.0), ternary(), scaled_sign(), comp(1, 2)):
        probability, values = compressor.outcomes(np.zeros((2, 3)))
        assert probability.sum() == pytest.approx(1) and not values.any()


def test_a_product_law_multiplies_probabilities_and_keeps_pairs():
    one = lambda x: (np.array([0.25, 0.75]), np.array([x, 2 * x]))  # noqa: E731
    probability, values = exact_laws.independent(one)(np.array([[1.0], [10.0]]))
    assert dict(zip(map(tuple, values[..., 0]), probability)) == {
        (1, 10): 0.0625,
        (1, 20): 0.1875,
        (2, 10): 0.1875,
        (2, 20): 0.5625,
    }
