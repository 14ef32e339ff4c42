"""The attack on the private mechanism: never above the certificate, and it catches what is broken."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commjax.algorithms.fedp3 import private_training
from commjax.privacy import mechanism
from commjax.privacy.accounting import calibrate, guarantee

pytestmark = pytest.mark.long

KEY = jax.random.key(0)


# --- the attack


@pytest.mark.parametrize(
    "relation, rate", [("replace-one", 1.0), ("add-remove", 1.0), ("replace-one", 0.3), ("add-remove", 0.3)]
)
def test_the_attack_finds_much_of_epsilon_and_never_more_than_the_certificate(relation, rate):
    certificate = calibrate(2.0, 1e-5, rate, 20, relation=relation)
    found = private_training.audit(KEY, certificate, 3000)
    assert 0.4 < found < certificate.epsilon <= 2.0


def test_the_scores_are_the_log_likelihood_ratio_of_the_mechanism():
    """E exp(score) = 1 without the canary, E exp(-score) = 1 with it."""
    certificate = guarantee(2.0, 0.5, 3, 1e-5)
    with_canary, without = private_training.canary_scores(KEY, certificate, 10_000)
    assert np.exp(without).mean() == pytest.approx(1, abs=0.05) == np.exp(-with_canary).mean()
    assert with_canary.mean() == pytest.approx(-without.mean(), abs=0.05) and with_canary.mean() > 0.1


def test_the_attack_catches_noise_that_is_too_small():
    """A certificate for 8 times the noise that is drawn: the attack refutes it."""
    honest = guarantee(8.0, 1.0, 4, 1e-5)
    broken = honest._replace(noise=1.0)
    assert private_training.audit(KEY, broken, 2000) > honest.epsilon > private_training.audit(KEY, honest, 2000)


MUTANTS = {
    "no clipping": ("clip_factor", lambda original: lambda squared, C: jnp.ones_like(squared)),
    "half the noise": (
        "gaussian_like",
        lambda original: lambda key, like: jax.tree.map(lambda x: x / 2, original(key, like)),
    ),
    "twice the rate": ("poisson", lambda original: lambda key, rate, rows: original(key, 2 * rate, rows)),
}


@pytest.mark.parametrize("relation", ["replace-one", "add-remove"])
def test_the_attack_catches_a_broken_mechanism(relation, monkeypatch):
    """At delta = 0.1, where 2000 runs prove most of epsilon."""
    certificate = guarantee(1.0, 0.4, 2, 0.1, relation=relation)
    assert private_training.audit(KEY, certificate, 2000) < certificate.epsilon
    for name, (broken, how) in MUTANTS.items():
        with monkeypatch.context() as patch:
            patch.setattr(mechanism, broken, how(getattr(mechanism, broken)))

            def build(*args, **kwargs):  # a new object, so that the mutant is compiled
                return private_training._mechanism(None)(*args, **kwargs)

            found = private_training.audit(KEY, certificate, 2000, build=build)
        assert found > 1.2 * certificate.epsilon, name


def test_the_attack_reaches_what_several_clients_send():
    """Two clients, the second without a canary: what is clipped is what is sent, and the whole of epsilon is at
    stake."""
    certificate = guarantee(1.0, 0.4, 2, 0.1)
    found = private_training.audit(KEY, certificate, 2000, n=2)
    assert 0.3 < found < certificate.epsilon
    # A whole gradient of norm C has C / sqrt(2) in the coordinate that is sent.
    whole = private_training.audit(KEY, certificate, 2000, n=2, build=private_training.ldp_fedp3.ldp_fedp3)
    assert whole < found


def test_a_capacity_is_part_of_what_is_attacked():
    certificate = guarantee(2.0, 0.05, 3, 1e-2, capacity=3, rows=4)
    assert certificate.epsilon < math.inf
    found = private_training.canary_scores(KEY, certificate, 500, rows=4)
    assert private_training.epsilon_lower_bound(*found, certificate.delta) < certificate.epsilon


def test_clopper_pearson_limits_cover():
    assert private_training._clopper_pearson(0, 10, 0.05) == pytest.approx((0.0, 1 - 0.05 ** (1 / 10)))
    assert private_training._clopper_pearson(10, 10, 0.05) == pytest.approx((0.05 ** (1 / 10), 1.0))
    rng = np.random.default_rng(4)
    limits = [private_training._clopper_pearson(int(hits), 50, 0.025) for hits in rng.binomial(50, 0.2, 500)]
    assert np.mean([low <= 0.2 <= high for low, high in limits]) > 0.93


def test_the_lower_bound_is_right_about_randomized_response_and_about_indifference():
    rng = np.random.default_rng(5)
    epsilon, size = 1.5, 20_000
    truth = math.exp(epsilon) / (1 + math.exp(epsilon))
    inside, outside = (rng.uniform(size=size) < p for p in (truth, 1 - truth))
    found = private_training.epsilon_lower_bound(inside + 0.0, outside + 0.0, 1e-5)
    assert 1.35 < found < epsilon
    # a high score has to speak for the canary
    assert private_training.epsilon_lower_bound(outside + 0.0, inside + 0.0, 1e-5) == 0.0
    same = rng.standard_normal(2000)
    assert private_training.epsilon_lower_bound(same, rng.standard_normal(2000), 1e-5) < 0.2
    assert private_training.epsilon_lower_bound(same + 1.0, same, 0.9) == 0.0  # delta allows all of it


def test_bad_scores_are_refused():
    with pytest.raises(ValueError, match="3 and 9 scores; allowed: at least 4 of each"):
        private_training.epsilon_lower_bound(np.zeros(3), np.zeros(9), 1e-5)
    with pytest.raises(ValueError, match=r"confidence=1\.0; allowed: 0 < confidence < 1"):
        private_training.epsilon_lower_bound(np.zeros(8), np.zeros(8), 1e-5, 1.0)
