"""Clipping, Poisson sampling, noise, accountants, and the attack that must stay below their certificates."""

import itertools
import math
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commjax.algorithms.fedp3 import private_training
from commjax.data.stacked import Examples
from commjax.privacy import accounting, mechanism
from commjax.privacy.accounting import Certificate, calibrate, certify
from commjax.theory import ldp_fedp3 as theory

KEY = jax.random.key(0)


# --- clipping and sensitivity


@given(st.integers(0, 10**6), st.floats(0.01, 100))
def test_every_row_is_clipped_exactly_and_by_itself(seed, C):
    rng = np.random.default_rng(seed)
    grads = {
        "w": rng.standard_normal((5, 2, 3)) * 10.0 ** rng.uniform(-2, 2, (5, 1, 1)),
        "b": rng.standard_normal((5, 4)),
    }
    grads["w"][0], grads["b"][0] = 0.0, 0.0
    rows = rng.uniform(size=5) < 0.7
    found, squared = mechanism.clipped_sum(jax.tree.map(jnp.asarray, grads), C, jnp.asarray(rows))
    flat = np.concatenate([grads["b"].reshape(5, -1), grads["w"].reshape(5, -1)], axis=1)
    norms = np.linalg.norm(flat, axis=1)
    np.testing.assert_allclose(squared, norms**2, rtol=1e-12)
    wanted = sum(
        (row * min(1.0, C / norm) if norm else row for row, norm, here in zip(flat, norms, rows) if here), np.zeros(10)
    )
    np.testing.assert_allclose(np.concatenate([found["b"].ravel(), found["w"].ravel()]), wanted, rtol=1e-11, atol=1e-12)
    alone, _ = mechanism.clipped_sum(jax.tree.map(jnp.asarray, grads), C, jnp.arange(5) == 3)
    length = float(jnp.sqrt(sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(alone))))
    assert length == pytest.approx(min(C, norms[3]))


def test_an_infinite_norm_means_no_clipping():
    grads = jnp.asarray([[3.0, 4.0], [0.0, 0.0]])
    found, _ = mechanism.clipped_sum(grads, math.inf, jnp.ones(2, bool))
    np.testing.assert_array_equal(found, [3.0, 4.0])


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e200])
def test_a_row_whose_gradient_overflows_does_not_show(bad):
    """A NaN in the sum would tell that the row was there."""
    grads = jnp.asarray([[0.3, 0.4], [bad, 1.0]])
    found, _ = mechanism.clipped_sum(grads, 1.0, jnp.ones(2, bool))
    np.testing.assert_allclose(found, [0.3, 0.4])


def test_half_precision_is_clipped_in_single():
    rng = np.random.default_rng(1)
    grads = jnp.asarray(rng.standard_normal((50, 400)), jnp.bfloat16)
    found, _ = jax.vmap(lambda row: mechanism.clipped_sum(row[None], 1.0, jnp.ones(1, bool)))(grads)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1.0, rtol=1e-5)


@pytest.mark.parametrize("relation", ["add-remove", "replace-one"])
def test_one_row_moves_the_mean_by_the_sensitivity_and_not_more(relation):
    """Every data set of three rows over a grid, every neighbour, every batch: sums are divided by a fixed b (F17, F18)."""
    C, b = 1.5, 2.0
    values = np.array([-4.0, -1.5, 0.5, 3.0])
    sums = {}
    for rows in itertools.product(values, repeat=3):
        for here in itertools.product((False, True), repeat=3):
            sums[rows, here] = (rows, here)
    total = jax.jit(jax.vmap(lambda rows, here: mechanism.clipped_sum(rows[:, None], C, here)[0][0] / b))
    found = total(*(jnp.asarray([one[part] for one in sums.values()]) for part in (0, 1)))
    sums = dict(zip(sums, found.tolist()))
    moves = []
    for (rows, here), value in sums.items():
        if relation == "replace-one":
            moves += [abs(value - sums[(new, *rows[1:]), here]) for new in values]
        elif here[0]:
            moves.append(abs(value - sums[rows, (False, *here[1:])]))
    assert max(moves) == pytest.approx(theory.sensitivity(C, b, relation))


def test_the_fixed_denominator_is_what_keeps_the_sensitivity():
    """Divided by the number of rows that came, the mean of one row moves by C, not by C / b."""
    alone = mechanism.clipped_sum(jnp.asarray([[5.0], [0.0]]), 1.0, jnp.asarray([True, False]))[0] / 1
    gone = mechanism.clipped_sum(jnp.asarray([[5.0], [0.0]]), 1.0, jnp.asarray([False, False]))[0] / 1
    assert float((alone - gone)[0]) == 1.0 > theory.sensitivity(1.0, 10, "add-remove")


# --- sampling and noise


def test_rows_come_independently_with_the_chance_that_was_asked_for():
    rate, m, trials = 0.3, 4, 20_000
    rows = jnp.asarray([True, True, False, True])
    came = np.asarray(jax.vmap(lambda key: mechanism.poisson(key, rate, rows))(jax.random.split(KEY, trials)))
    assert came.shape == (trials, m) and not came[:, 2].any()
    real = came[:, [0, 1, 3]]
    law = {
        pattern: rate ** sum(pattern) * (1 - rate) ** (3 - sum(pattern))
        for pattern in itertools.product((0, 1), repeat=3)
    }
    for pattern, chance in law.items():
        seen = np.mean(np.all(real == pattern, axis=1))
        assert abs(seen - chance) < 4.5 * math.sqrt(chance * (1 - chance) / trials)
    assert mechanism.poisson(KEY, 1.0, rows).tolist() == rows.tolist()
    assert not mechanism.poisson(KEY, 0.0, rows).any()


@pytest.mark.parametrize("rate", [2e-7, 1e-4, 0.1, 0.3, 0.5, 0.7, 0.999999])
def test_no_row_comes_more_often_than_the_certificate_says(rate, monkeypatch):
    """The 2^32 equally likely words around the limit, one after another."""
    words = np.maximum(0, int(rate * 2**32) + np.arange(-3000, 20))
    monkeypatch.setattr(jax.random, "bits", lambda key, shape, dtype: jnp.asarray(words, dtype))
    came = np.asarray(mechanism.poisson(KEY, rate, jnp.ones(len(words), bool)))
    below = words[came].max() + 1  # so many of the words bring the row
    assert not came[words >= below].any() and below / 2**32 <= rate
    assert below / 2**32 >= rate * (1 - 2**-20) - 2**-32


def test_the_sum_is_made_in_full_precision():
    """Where matrix products are truncated (TPU, TF32), clipped gradients would be longer than C."""
    jaxpr = jax.make_jaxpr(lambda grads: mechanism.clipped_sum(grads, 1.0, jnp.ones(3, bool)))(jnp.ones((3, 2)))
    products = [line for line in str(jaxpr).splitlines() if "dot_general" in line or "precision" in line]
    assert products and any("HIGHEST" in line for line in products)


def test_the_noise_is_standard_in_every_leaf_and_leaves_of_one_shape_and_dtype_are_independent():
    like = {
        "a": jnp.zeros((100, 50)),
        "b": jnp.zeros((100, 50)),
        "c": [jnp.zeros((100, 50)), jnp.zeros(5000, jnp.float32)],
    }
    noise = mechanism.gaussian_like(KEY, like)
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), noise) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), like
    )
    leaves = [np.asarray(leaf, np.float64).ravel() for leaf in jax.tree.leaves(noise)]
    for leaf in leaves:
        assert abs(leaf.mean()) < 0.06 and abs(leaf.std() - 1) < 0.04
    assert np.abs(np.corrcoef(leaves) - np.eye(4)).max() < 0.06
    assert len(np.unique(leaves[:3])) == 15_000


def test_no_leaf_has_the_noise_of_a_key_that_others_split_off():
    noise = mechanism.gaussian_like(KEY, [jnp.zeros(3)] * 3)
    taken = [jax.random.normal(key, (3,)) for key in jax.random.split(KEY)]
    assert not any(np.array_equal(mine, other) for mine in noise for other in taken)


# --- the loss of a row


def good(params, rows):
    return jnp.mean((rows["a"] @ params) ** 2)


def test_a_single_row_has_its_axis_and_weight_1():
    data = Examples(jnp.arange(6.0).reshape(3, 2), jnp.arange(3), jnp.array([0.5, 0.5, 0.0]))
    one = mechanism.single(data, jnp.asarray(1))
    np.testing.assert_array_equal(one.inputs, [[2.0, 3.0]])
    assert one.targets.tolist() == [1] and one.weights.tolist() == [1.0]
    assert mechanism.present(data).tolist() == [True, True, False]
    plain = mechanism.single({"a": jnp.arange(3.0)}, jnp.asarray(2))
    assert plain["a"].tolist() == [2.0] and mechanism.present({"a": jnp.arange(3.0)}).all()


def test_means_over_rows_are_accepted_with_and_without_padding():
    rng = np.random.default_rng(2)
    a, w = jnp.asarray(rng.standard_normal((4, 3))), jnp.asarray(rng.standard_normal(3))
    mechanism.check_per_example(good, w, {"a": a})

    def weighted(params, rows):
        return jnp.sum(rows["weights"] * (rows["a"] @ params) ** 2) + 0.1 * jnp.sum(params**2)

    mechanism.check_per_example(weighted, w, {"a": a, "weights": jnp.array([1 / 3, 1 / 3, 1 / 3, 0.0])})
    with pytest.raises(ValueError, match="loss is not a mean over rows"):
        mechanism.check_per_example(weighted, w, {"a": a, "weights": jnp.array([0.7, 0.1, 0.1, 0.1])})


def test_losses_that_are_not_per_example_are_refused():
    rng = np.random.default_rng(3)
    data, w = {"a": jnp.asarray(rng.standard_normal((4, 3)))}, jnp.asarray(rng.standard_normal(3))
    with pytest.raises(ValueError, match=r"loss returns an array of shape \(4,\); allowed: one number"):
        mechanism.check_per_example(lambda p, rows: (rows["a"] @ p) ** 2, w, data)

    def normalised(p, rows):  # as batch normalisation does
        centred = rows["a"] - jnp.mean(rows["a"], axis=0, keepdims=True)
        return jnp.mean((centred @ p) ** 2)

    def total(p, rows):
        return jnp.sum((rows["a"] @ p) ** 2)

    def contrastive(p, rows):
        scores = rows["a"] @ p
        return jnp.mean(jnp.abs(scores[:, None] - scores[None, :]))

    for loss in (normalised, total, contrastive):
        with pytest.raises(ValueError, match="loss is not a mean over rows: it or its gradient differs by"):
            mechanism.check_per_example(loss, w, data)
    # At w = 0 the values agree (all 0); the gradients must be looked at
    with pytest.raises(ValueError, match="loss is not a mean over rows"):
        mechanism.check_per_example(lambda p, rows: jnp.sum(rows["a"] @ p), 0 * w, data)


def test_a_loss_is_looked_at_where_rows_can_meet():
    """Not only in the initial params, and not in a client whose single row has nobody to meet."""
    rng = np.random.default_rng(3)
    a = jnp.asarray(rng.standard_normal((4, 3)))

    def hidden(p, rows):  # the mean of rows at p = 0, to first order
        return jnp.mean(rows["a"] @ p) + jnp.var(rows["a"] @ p)

    with pytest.raises(ValueError, match="loss is not a mean over rows"):
        mechanism.check_per_example(hidden, jnp.zeros(3), {"a": a})
    counts = jnp.array([[1.0, 0, 0, 0], [0.25] * 4, [0.5, 0.5, 0, 0]])
    found = mechanism.largest({"a": jnp.stack([a, 2 * a, 3 * a]), "weights": counts})
    np.testing.assert_array_equal(found["a"], 2 * a)


def test_data_that_has_no_rows_is_refused():
    for data in ({"a": jnp.zeros((2, 3)), "b": jnp.zeros(3)}, {"a": jnp.zeros(())}, {"a": jnp.zeros((0, 2))}):
        with pytest.raises(ValueError, match=r"every leaf of a client's data must be \[rows, \.\.\.\], got shapes"):
            mechanism.num_rows(data)


# --- accountants


def exact_gaussian_epsilon(mu, delta):
    """Balle and Wang (2018): delta(eps) = Phi(mu/2 - eps/mu) - e^eps Phi(-mu/2 - eps/mu), solved for eps"""
    from scipy.optimize import brentq
    from scipy.stats import norm

    def gap(epsilon):
        return norm.cdf(mu / 2 - epsilon / mu) - math.exp(epsilon) * norm.cdf(-mu / 2 - epsilon / mu) - delta

    return float(np.asarray(brentq(gap, 1e-9, 200.0)))


@pytest.mark.parametrize("relation, reach", [("add-remove", 1), ("replace-one", 2)])
def test_with_full_batches_the_accountants_know_the_gaussian_mechanism(relation, reach):
    for z, K in ((20.0, 100), (60.0, 400)):
        exact = exact_gaussian_epsilon(reach * math.sqrt(K) / z, 1e-5)
        pld = certify(z, 1.0, K, 1e-5, relation=relation).epsilon
        rdp = certify(z, 1.0, K, 1e-5, relation=relation, accountant="rdp").epsilon
        assert exact <= pld <= exact + 5e-3 and pld < rdp < 1.15 * exact


@pytest.mark.parametrize("relation", ["add-remove", "replace-one"])
def test_renyi_is_never_below_the_loss_distribution_and_sampling_helps(relation):
    for z, q, K in ((1.5, 0.1, 50), (3.0, 0.3, 30)):
        pld, rdp = (certify(z, q, K, 1e-5, relation=relation, accountant=name).epsilon for name in ("pld", "rdp"))
        assert pld <= rdp <= 1.3 * pld
        assert pld < certify(z, 1.0, K, 1e-5, relation=relation).epsilon
    assert (
        certify(3.0, 0.3, 30, 1e-5, relation="replace-one").epsilon
        > certify(3.0, 0.3, 30, 1e-5, relation="add-remove").epsilon
    )


def test_the_renyi_divergence_of_a_changed_row_is_that_of_an_independent_quadrature():
    from scipy.integrate import quad

    for order, z, q in ((2.0, 0.8, 0.2), (8.0, 2.0, 0.5), (3.5, 1.0, 0.01)):

        def density(x, sign, z=z, q=q):
            return (1 - q) * math.exp(-(x**2) / (2 * z * z)) + q * math.exp(-((x - sign) ** 2) / (2 * z * z))

        def integrand(x, order=order, z=z):
            return density(x, 1) ** order * density(x, -1) ** (1 - order) / (z * math.sqrt(2 * math.pi))

        value = quad(integrand, -6 * z - 2, order + 6 * z + 2, limit=500)[0]
        assert accounting.renyi_replace_one(order, z, q) == pytest.approx(math.log(value) / (order - 1), rel=1e-6)
    for order, z in ((2.0, 3.0), (64.0, 0.7)):
        assert accounting.renyi_replace_one(order, z, 1.0) == pytest.approx(2 * order / z**2, rel=1e-9)


def test_calibration_is_monotone_least_and_never_above_its_target():
    targets = (0.5, 1.0, 4.0, 8.0)
    found = [calibrate(epsilon, 1e-5, 1.0, 40) for epsilon in targets]
    noises = [one.noise for one in found]
    assert noises == sorted(noises, reverse=True) and noises[0] > 1.8 * noises[1]
    for one, target in zip(found, targets):
        assert one.epsilon <= target < certify(one.noise / 1.002, 1.0, 40, 1e-5).epsilon
        assert one == certify(one.noise, 1.0, 40, 1e-5)
    assert calibrate(1.0, 1e-6, 1.0, 40).noise > noises[1] > calibrate(1.0, 1e-5, 0.2, 40, tolerance=0.05).noise
    assert calibrate(1.0, 1e-5, 1.0, 80).noise > noises[1] > calibrate(1.0, 1e-5, 1.0, 40, relation="add-remove").noise
    assert calibrate(1.0, 1e-5, 1.0, 40, accountant="rdp").noise > noises[1]
    small = calibrate(20.0, 1e-5, 1.0, 1, relation="add-remove")  # below the first guess
    assert (
        small.noise < 0.5
        and small.epsilon <= 20 < certify(small.noise / 1.002, 1.0, 1, 1e-5, relation="add-remove").epsilon
    )


def test_without_noise_there_is_no_privacy():
    assert certify(0.0, 1.0, 1, 1e-5).epsilon == math.inf


def test_a_capacity_is_paid_for_out_of_delta():
    rows, rate, K = 200, 0.1, 50
    enough = certify(2.0, rate, K, 1e-5, capacity=70, rows=rows)
    assert accounting.overflow(70, rows, rate, K) < 1e-15 and enough.capacity == 70
    whole = certify(2.0, rate, K, 1e-5).epsilon
    assert enough.epsilon == pytest.approx(certify(2.0, rate, K, 0.99e-5).epsilon)
    assert whole < enough.epsilon < whole * 1.001
    assert certify(2.0, rate, K, 1e-5, capacity=30, rows=rows).epsilon == math.inf
    assert certify(2.0, rate, K, 1e-5, capacity=rows, rows=rows).epsilon == whole
    from scipy.stats import binom

    wanted = K * sum(binom.pmf(j, rows, rate) for j in range(31, rows + 1))
    assert accounting.overflow(30, rows, rate, K) == pytest.approx(wanted, rel=1e-9)
    with pytest.raises(ValueError, match="capacity=25; allowed: what some noise can reach"):
        calibrate(1.0, 1e-5, rate, K, capacity=25, rows=rows)


def test_with_a_capacity_an_epsilon_beyond_the_exponential_is_infinite(monkeypatch):
    monkeypatch.setattr(accounting, "_accounted", lambda *arguments: 1000.0)
    assert certify(1.0, 0.5, 1, 1e-5).epsilon == 1000
    assert certify(1.0, 0.5, 1, 1e-5, capacity=40, rows=50).epsilon == math.inf


@pytest.mark.parametrize("share, epsilon", [(0.99, 0.5), (1.01, math.inf)])
def test_what_is_set_aside_for_dropped_rows_is_one_hundredth_of_delta(share, epsilon, monkeypatch):
    monkeypatch.setattr(accounting, "_accounted", lambda *arguments: 0.5)
    monkeypatch.setattr(accounting, "overflow", lambda *arguments: share * 1e-7 / (1 + math.exp(0.5)))
    assert certify(1.0, 0.5, 1, 1e-5, capacity=40, rows=50).epsilon == epsilon


def test_the_thesis_s_noise_is_not_what_the_accountant_asks_for():
    """F20: with c = 1 and full batches, epsilon = 1 is missed by both relations"""
    K, m = 1000, 500
    z = math.sqrt(theory.noise_variance(1.0, 1e-5, c=1.0, C=1.0, K=K, m=m)) * m  # sigma = z C / m
    plain, changed = (certify(z, 1.0, K, 1e-5, relation=relation).epsilon for relation in ("add-remove", "replace-one"))
    assert 1.05 < plain < 1.46 and 2.2 < changed < 3.0  # zCDP has 1.46 and 3.00


def test_noise_on_the_weights_is_not_private_enough_for_long_steps():
    """F16: noise sigma on w - gamma g hides g as sigma / gamma would"""
    found = calibrate(1.0, 1e-5, 0.5, 20)
    seen = {gamma: certify(found.noise / gamma, 0.5, 20, 1e-5).epsilon for gamma in (0.5, 2.0)}
    assert seen[0.5] < 0.5 and seen[2.0] > 2.0


def test_bad_arguments_of_the_accountants_are_refused():
    for epsilon in (0.0, -1.0, math.nan):
        with pytest.raises(ValueError, match=r"epsilon=.*; allowed: positive and finite"):
            calibrate(epsilon, 1e-5, 0.1, 10)
    for delta in (0.0, 1.0, -1e-5, math.nan):
        with pytest.raises(ValueError, match=r"delta=.*; allowed: 0 < delta < 1"):
            certify(1.0, 0.1, 10, delta)
    for rate in (0.0, 1.1, math.nan):
        with pytest.raises(ValueError, match=r"rate=.*; allowed: 0 < rate <= 1 \(a batch is not larger than"):
            certify(1.0, rate, 10, 1e-5)
    for noise in (-1.0, math.inf):
        with pytest.raises(ValueError, match=r"noise=.*; allowed: finite and >= 0"):
            certify(noise, 0.1, 10, 1e-5)
    with pytest.raises(ValueError, match="rounds=0; allowed: at least 1"):
        certify(1.0, 0.1, 0, 1e-5)
    with pytest.raises(ValueError, match="accountant='moments'; allowed: 'pld', 'rdp'"):
        certify(1.0, 0.1, 1, 1e-5, accountant="moments")
    with pytest.raises(ValueError, match="relation='swap'; allowed: 'add-remove', 'replace-one'"):
        certify(1.0, 0.1, 1, 1e-5, relation="swap")
    with pytest.raises(ValueError, match="capacity=3; allowed: with the number of rows"):
        certify(1.0, 0.1, 1, 1e-5, capacity=3)


def test_without_the_library_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "dp_accounting", None)
    with pytest.raises(ImportError, match=r"pip install 'commjax\[privacy\]'"):
        certify(1.0, 1.0, 1, 1e-5)


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
    certificate = certify(2.0, 0.5, 3, 1e-5)
    with_canary, without = private_training.canary_scores(KEY, certificate, 10_000)
    assert np.exp(without).mean() == pytest.approx(1, abs=0.05) == np.exp(-with_canary).mean()
    assert with_canary.mean() == pytest.approx(-without.mean(), abs=0.05) and with_canary.mean() > 0.1


def test_the_attack_catches_noise_that_is_too_small():
    """A certificate for 8 times the noise that is drawn: the attack refutes it."""
    honest = certify(8.0, 1.0, 4, 1e-5)
    broken = honest._replace(noise=1.0)
    assert private_training.audit(KEY, broken, 2000) > honest.epsilon > private_training.audit(KEY, honest, 2000)


MUTANTS = {
    "no clipping": ("clip_factor", lambda original: lambda squared, C: jnp.ones_like(squared)),
    "half the noise": ("gaussian_like", lambda original: lambda key, like: jax.tree.map(lambda x: x / 2, original(key, like))),
    "twice the rate": ("poisson", lambda original: lambda key, rate, rows: original(key, 2 * rate, rows)),
}  # fmt: skip


@pytest.mark.parametrize("relation", ["replace-one", "add-remove"])
def test_the_attack_catches_a_broken_mechanism(relation, monkeypatch):
    """At delta = 0.1, where 2000 runs prove most of epsilon."""
    certificate = certify(1.0, 0.4, 2, 0.1, relation=relation)
    assert private_training.audit(KEY, certificate, 2000) < certificate.epsilon
    for name, (broken, how) in MUTANTS.items():
        with monkeypatch.context() as patch:
            patch.setattr(mechanism, broken, how(getattr(mechanism, broken)))

            def build(*args, **kwargs):  # a new object, so that the mutant is compiled
                return private_training._mechanism(None)(*args, **kwargs)

            found = private_training.audit(KEY, certificate, 2000, build=build)
        assert found > 1.2 * certificate.epsilon, name


def test_the_attack_reaches_what_several_clients_send():
    """Two clients, the second without a canary: what is clipped is what is sent, and the whole of epsilon is at stake."""
    certificate = certify(1.0, 0.4, 2, 0.1)
    found = private_training.audit(KEY, certificate, 2000, n=2)
    assert 0.3 < found < certificate.epsilon
    # A whole gradient of norm C has C / sqrt(2) in the coordinate that is sent.
    whole = private_training.audit(KEY, certificate, 2000, n=2, build=private_training.ldp_fedp3.ldp_fedp3)
    assert whole < found


def test_a_capacity_is_part_of_what_is_attacked():
    certificate = certify(2.0, 0.05, 3, 1e-2, capacity=3, rows=4)
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


def test_the_certificate_has_what_a_reader_needs():
    found = certify(2.0, 0.5, 3, 1e-5)
    assert found == Certificate(found.epsilon, 1e-5, 2.0, 0.5, 3, "pld", "replace-one", None)
