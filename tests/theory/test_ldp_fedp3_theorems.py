"""LDP-FedP3's theorem, T55 and T56: exact expectations over every batch, every owner and points with the noise's
moments."""

import itertools
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commjax.algorithms.fedp3 import ldp_fedp3
from commjax.compressors import perm_k
from commjax.core.base import Message
from commjax.privacy import mechanism
from commjax.theory import ldp_fedp3 as ldp

GOLDENS = json.loads((Path(__file__).parents[1] / "data" / "goldens_fedp3_theory.json").read_text())
KEY = jax.random.key(0)


def squares(x):
    return np.sum(x**2, axis=-1)


def forced(diagonal):
    """The aggregation sketch whose event is known"""
    return perm_k()._replace(name="forced", compress=lambda key, x, id=0, n=1: Message(x * diagonal[id], jnp.zeros(())))


# --- T55: batches


def poisson_estimates(rows, q):
    """(probability, sum / (q m)) of every batch"""
    m = len(rows)
    for chosen in itertools.product((0, 1), repeat=m):
        keep = np.array(chosen)
        yield float(np.prod(np.where(keep == 1, q, 1 - q))), keep @ rows / (q * m)


def test_poisson_sampling_has_the_variance_of_the_lemma_and_a_fixed_batch_does_not():
    rng, m = np.random.default_rng(8), 5
    for q in (0.2, 0.6, 1.0):
        rows = rng.standard_normal((m, 3))
        C = float(np.sqrt(squares(rows)).max())
        chance, values = map(np.array, zip(*poisson_estimates(rows, q)))
        np.testing.assert_allclose(chance @ values, rows.mean(axis=0), atol=1e-12)
        variance = chance @ squares(values - rows.mean(axis=0))
        assert variance == pytest.approx((1 - q) / (q * m * m) * squares(rows).sum(), abs=1e-12)
        assert variance <= ldp.poisson_variance(C, q, q * m) + 1e-12
    for b in (1, 2, 4):
        batches = np.array([rows[list(chosen)].mean(axis=0) for chosen in itertools.combinations(range(m), b)])
        spread = float(squares(rows - rows.mean(axis=0)).mean())
        assert squares(batches - rows.mean(axis=0)).mean() == pytest.approx(ldp.fixed_variance(spread, m, b))
    # F18: m = 2, b = 1, gradients +-C
    assert ldp.fixed_variance(9.0, 2, 1) == 9.0 > ldp.poisson_variance(3.0, 0.5, 1.0) == 4.5
    equal = np.full((6, 1), 2.0)  # and the lemma is tight where all rows are C
    chance, values = map(np.array, zip(*poisson_estimates(equal, 0.5)))
    assert chance @ squares(values - 2.0) == pytest.approx(ldp.poisson_variance(2.0, 0.5, 3.0))
    assert ldp.sensitivity(3.0, 4, "replace-one") == 1.5 == 2 * ldp.sensitivity(3.0, 4, "add-remove")


# --- T56: LDP-FedP3


def private_moments(monkeypatch, w, data, hparams):
    """(chance, w+) over every batch of two clients with two rows, both owners, and points with the moments of the
    noise."""
    n, m, d = data["a"].shape
    box = {}
    monkeypatch.setattr(mechanism, "poisson", lambda key, rate, rows: box["came"][box["id"]])
    monkeypatch.setattr(mechanism, "gaussian_like", lambda key, like: box["noise"][box["id"]])

    def loss(params, rows):
        return jnp.mean(0.5 * jnp.sum((params[None] - rows["a"]) ** 2, axis=1))

    # `single` and `present` see the client's data; the id travels with it.
    def remember(data):
        box["id"] = data["id"][0]
        return jnp.ones(m, bool)

    monkeypatch.setattr(mechanism, "present", remember)

    def step(diagonal, came, noise):
        box.update(came=came, noise=noise)
        algorithm = ldp_fedp3.ldp_fedp3(loss, forced(diagonal))
        state = algorithm.init(jnp.asarray(w), jnp.arange(n))
        both = {"a": jnp.asarray(data["a"]), "id": jnp.tile(jnp.arange(n)[:, None], (1, m))}
        return algorithm.step(KEY, hparams, state, both)[0].server.params

    S = np.array([[[2.0, 0.0], [0.0, 2.0]], [[0.0, 2.0], [2.0, 0.0]]])  # n = d = 2
    batches = np.array(list(itertools.product((False, True), repeat=n * m))).reshape(-1, n, m)
    chance = np.prod(np.where(batches, hparams.rate, 1 - hparams.rate), axis=(1, 2))
    signs = np.sqrt(d) * np.concatenate([np.eye(d), -np.eye(d)])
    noises = np.array(list(itertools.product(signs, repeat=n)))
    s, b, z = (index.ravel() for index in np.indices((len(S), len(batches), len(noises))))
    found = jax.jit(jax.vmap(step))(jnp.asarray(S[s]), jnp.asarray(batches[b]), jnp.asarray(noises[z]))
    return chance[b] / len(S) / len(noises), np.asarray(found)


def test_one_private_step_descends_as_the_theorem_says_and_poisson_batches_cost_their_share(monkeypatch):
    """T56: an equality where all rows agree, so that neither (1 - q)/b nor d sigma^2 may be left out (F19)"""
    rng = np.random.default_rng(9)
    gamma, z, q, m = 0.3, 0.7, 0.5, 2
    w = np.array([0.6, -0.8])
    for same in (True, False):
        a = np.zeros((2, m, 2)) if same else 0.4 * rng.standard_normal((2, m, 2))
        C = float(np.sqrt(squares(w - a)).max())
        chance, after = private_moments(monkeypatch, w, {"a": a}, ldp_fedp3.HParams(gamma, C, z, q))
        assert chance.sum() == pytest.approx(1)
        center = a.mean(axis=(0, 1))
        np.testing.assert_allclose(chance @ after, w - gamma * (w - center), atol=1e-12)

        def f(x, a=a):
            return squares(x[..., None, None, :] - a).mean(axis=(-1, -2)) / 2

        sigma2 = (z * C / (q * m)) ** 2
        right = f(w) - gamma * squares(w - center)
        right += gamma**2 / 2 * (C**2 * (1 + (1 - q) / (q * m)) + 2 * sigma2)
        assert chance @ f(after) <= right + 1e-12
        if same:
            assert chance @ f(after) == pytest.approx(right, abs=1e-12)
            assert chance @ f(after) > right - gamma**2 / 2 * C**2 * (1 - q) / (q * m) + 1e-3
        # ... of which the bound on the mean is the sum: one round
        drop = squares(w - center)
        assert drop <= ldp.utility(
            float(f(w) - chance @ f(after)), 1.0, C=C, d=2, gamma=gamma, K=1.0, sigma2=sigma2, q=q, b=q * m
        ) * (1 + 1e-12)


def test_the_golden_noise_and_schedules():
    for golden in GOLDENS["ldp_sigma2"]:
        found = ldp.noise_variance(
            float(golden["eps"]),
            golden["delta"],
            c=float(golden["c"]),
            C=float(golden["C"]),
            K=golden["K"],
            m=golden["m"],
        )
        assert found == pytest.approx(golden["sigma2"], rel=1e-12)
    for golden in GOLDENS["ldp_schedule"]:
        arguments = {"L": golden["L"], "delta0": golden["Delta0"], "C": golden["C"], "c": golden["c"]}
        found = ldp.schedule(golden["eps"], golden["delta"], **arguments, d=golden["d"], m=golden["m"])
        wanted = [golden[name] for name in ("K", "gamma", "bound", "comm_cost")]
        np.testing.assert_allclose(found, wanted, rtol=1e-12)
        assert found.K * found.gamma == pytest.approx(golden["gammaK"], rel=1e-12)


@given(
    st.tuples(st.floats(0.1, 10), st.floats(1e-8, 0.1)),
    st.tuples(st.floats(0.1, 10), st.floats(1e-3, 100)),
    st.tuples(st.floats(0.1, 10), st.floats(0.5, 8)),
    st.tuples(st.integers(1, 5000), st.integers(2, 5000)),
    st.floats(0.01, 1),
)
def test_the_schedule_reaches_its_bound(privacy, problem, scales, sizes, q):
    (epsilon, delta), (L, delta0), (C, c), (d, m) = privacy, problem, scales, sizes
    b = q * m
    plan = ldp.schedule(epsilon, delta, L=L, delta0=delta0, C=C, c=c, d=d, m=m, b=b)
    sigma2 = ldp.noise_variance(epsilon, delta, c=c, C=C, K=plan.K, m=m)
    reached = ldp.utility(delta0, L, C=C, d=d, gamma=plan.gamma, K=plan.K, sigma2=sigma2, q=q, b=b)
    assert reached <= plan.bound * (1 + 1e-9) and plan.gamma <= 1 / L
    if plan.gamma < 1 / L:  # both terms are then balanced
        assert reached == pytest.approx(plan.bound, rel=1e-9)
    # F19: without sqrt(Delta_0) the bound is another number
    assert plan.bound / np.sqrt(delta0) == pytest.approx(
        ldp.schedule(epsilon, delta, L=L, delta0=1.0, C=C, c=c, d=d, m=m, b=b).bound, rel=1e-9
    )


def test_the_printed_noise_vanishes_at_epsilon_1():
    """F15: log(1/epsilon)"""
    printed = [1.0 * 1000 * np.log(1 / epsilon) / (500 * epsilon) ** 2 for epsilon in (1.0, 2.0)]
    assert printed[0] == 0 > printed[1]
    right = [ldp.noise_variance(epsilon, 1e-5, c=1.0, C=1.0, K=1000, m=500) for epsilon in (1.0, 2.0)]
    assert right[0] == 4 * right[1] > 0


def test_with_c_equal_to_1_the_formula_is_not_private_enough():
    """F20: full batches, K = 1000, m = 500"""
    sigma = {c: ldp.noise_variance(1.0, 1e-5, c=c, C=1.0, K=1000, m=500) ** 0.5 for c in (1.0, 2.2, 9.0)}
    found = {
        (c, relation): ldp.full_batch_epsilon(sigma[c], 1e-5, C=1.0, K=1000, m=500, relation=relation)
        for c in sigma
        for relation in ("add-remove", "replace-one")
    }
    assert found[1.0, "add-remove"] == pytest.approx(1.46, abs=0.005)
    assert found[1.0, "replace-one"] == pytest.approx(3.00, abs=0.005)
    assert found[2.2, "add-remove"] <= 1 < found[2.2, "replace-one"]
    assert found[9.0, "replace-one"] <= 1


def test_noise_on_the_weights_has_a_floor_that_small_steps_raise():
    """F16"""
    assert ldp.unscaled_floor(2.0, 10, 0.5, 0.01) == pytest.approx(10 * 0.5 * 2 / 0.02)
    scaled = ldp.utility(0.0, 2.0, C=0.0, d=10, gamma=0.01, K=1.0, sigma2=0.5, q=1.0, b=1.0)
    assert ldp.unscaled_floor(2.0, 10, 0.5, 0.01) == pytest.approx(scaled / 0.01**2)


def test_the_table_of_communication():
    found = ldp.communication(2.0, 1e-5, m=300, d=50, n=16, omega=15.0)
    log = np.log(1e5)
    root, square = 300 * 2 * np.sqrt(50) / np.sqrt(log), (300 * 2) ** 2 / log
    assert found["LDP-FedP3"] == pytest.approx(root + square) == found["CDP-SGD"]
    assert found["LDP SVRG/SPIDER"] == pytest.approx(64 * root)
    assert found["SDM-DSGD"] == pytest.approx(16**2 * root + square)
    other = ldp.communication(2.0, 1e-5, m=300, d=50, n=16, omega=3.0)
    assert other["CDP-SGD"] == pytest.approx(8 * root + 4 * square)
    assert other["SDM-DSGD"] == pytest.approx(16**3.5 / 8 * root + 4 * square)


def test_bad_targets_are_refused():
    for epsilon in (0.0, -1.0, np.inf, np.nan):
        with pytest.raises(ValueError, match=r"epsilon=.*; allowed: positive and finite"):
            ldp.noise_variance(float(epsilon), 1e-5, c=1.0, C=1.0, K=1, m=1)
    for delta in (0.0, 1.0, -0.1, np.nan):
        with pytest.raises(ValueError, match=r"delta=.*; allowed: 0 < delta < 1"):
            ldp.schedule(1.0, float(delta), L=1.0, delta0=1.0, C=1.0, c=1.0, d=1, m=1)
    with pytest.raises(ValueError, match="relation='swap'; allowed: 'add-remove', 'replace-one'"):
        ldp.sensitivity(1.0, 1.0, "swap")
