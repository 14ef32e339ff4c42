"""The audit with one training run: its formula, its confidence, and what it catches."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commjax.algorithms.fedp3 import one_run_audit, private_training
from commjax.algorithms.fedp3.one_run_audit import lower_bound, p_value
from commjax.privacy import mechanism
from commjax.privacy.accounting import guarantee

pytestmark = pytest.mark.long

KEY = jax.random.key(0)
JAX_PRIVACY = (0.0010733299019243516, 0.016537847209041896)


def binomial_tail(least, trials, chance):
    return sum(
        math.comb(trials, j) * chance**j * (1 - chance) ** (trials - j) for j in range(max(0, least), trials + 1)
    )


@pytest.mark.parametrize("epsilon,delta,m,r,v", [(0.5, 1e-3, 40, 12, 11), (1.5, 1e-2, 20, 20, 19), (0.0, 0.0, 9, 9, 7)])
def test_the_p_value_is_that_of_the_theorem(epsilon, delta, m, r, v):
    chance = math.exp(epsilon) / (math.exp(epsilon) + 1)
    beta = binomial_tail(v, r, chance)
    alpha = max((binomial_tail(v - i, r, chance) - beta) / i for i in range(1, m + 1))
    assert p_value(epsilon, delta, m, r, v) == pytest.approx(beta + 2 * m * delta * alpha, rel=1e-12)


def test_the_p_value_agrees_with_jax_privacy():
    """jax_privacy 2.0.0, `auditing._one_run_p_value(m, r, v, epsilon, delta)`"""
    assert p_value(2.0, 1e-5, 1000, 125, 123) == pytest.approx(JAX_PRIVACY[0], rel=1e-9)
    assert p_value(0.3, 1e-4, 500, 62, 45) == pytest.approx(JAX_PRIVACY[1], rel=1e-9)
    assert p_value(3.0, 1e-2, 1000, 50, 49) == 1.0


def test_randomised_response_is_accused_no_more_often_than_stated_and_the_bound_is_near():
    rng, epsilon, m, repeats = np.random.default_rng(0), 1.0, 400, 60
    truth = math.exp(epsilon) / (1 + math.exp(epsilon))
    found = []
    for _ in range(repeats):
        coins = rng.choice([-1, 1], m)
        answers = np.where(rng.uniform(size=m) < truth, coins, -coins)
        found.append(lower_bound(answers * rng.uniform(0.5, 1, m), coins, 0.0, 0.9).epsilon)
    assert np.mean(np.array(found) > epsilon) <= 0.1
    assert 0.5 < np.median(found) < epsilon


@pytest.mark.parametrize("relation", ["replace-one", "add-remove"])
def test_an_honest_mechanism_is_not_accused_and_a_broken_one_is(relation, monkeypatch):
    certificate = guarantee(3.0 if relation == "add-remove" else 6.0, 0.5, 4, 1e-5, relation=relation)
    assert certificate.epsilon < 3.0
    honest = one_run_audit.audit(KEY, certificate, 400)
    assert 0.15 * certificate.epsilon < honest.epsilon <= certificate.epsilon and honest.canaries == 400
    assert honest == one_run_audit.audit(KEY, certificate, 400) and honest.correct > 0.6 * honest.guesses

    def accused(name, change):
        def build(*args, **kwargs):  # a new object, so that the changed mechanism is compiled
            return private_training._mechanism(None)(*args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(mechanism, name, change(getattr(mechanism, name)))
            return one_run_audit.audit(KEY, certificate, 400, build=build).epsilon

    tenth = accused("gaussian_like", lambda old: lambda key, like: jax.tree.map(lambda x: x / 10, old(key, like)))
    unclipped = accused("clip_factor", lambda old: lambda squared, C: jnp.ones_like(squared))
    assert min(tenth, unclipped) > certificate.epsilon


def test_bad_arguments_are_refused():
    coins = np.ones(5)
    with pytest.raises(ValueError, match=r"coins has shape \(5,\); allowed: \+1 or -1 for each of the 4 scores"):
        lower_bound(np.zeros(4), coins, 1e-5)
    with pytest.raises(ValueError, match=r"coins .*allowed: \+1 or -1"):
        lower_bound(np.zeros(5), 0 * coins, 1e-5)
    with pytest.raises(ValueError, match="scores has 1 values that are not finite"):
        lower_bound(np.array([1.0, np.nan]), np.ones(2), 1e-5)
    with pytest.raises(ValueError, match=r"confidence=1\.5; allowed"):
        lower_bound(np.zeros(5), coins, 1e-5, 1.5)
    with pytest.raises(ValueError, match="canaries=0; allowed: at least 1"):
        one_run_audit.audit(KEY, guarantee(2.0, 1.0, 4, 1e-5), 0)
