"""LDP-FedP3: a NumPy oracle, the noise that is really drawn, its special cases, its errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commjax.algorithms.fedp3 import ldp_fedp3, private_training, sketched
from commjax.compressors import identity, perm_k
from commjax.core import runner
from commjax.core.base import Message, Round, State
from commjax.privacy import accounting, mechanism
from commjax.theory import ldp_fedp3 as theory

pytestmark = pytest.mark.long

N, M, D = 3, 5, 7
KEY = jax.random.key(5)
IDS = jnp.arange(N)
RNG = np.random.default_rng(0)
A, B = RNG.standard_normal((N, M, D)), 3 * RNG.standard_normal((N, M))
WEIGHTS = np.array([[0.2] * 5, [0.25] * 4 + [0.0], [0.5] * 2 + [0.0] * 3])
DATA = {"a": jnp.asarray(A), "b": jnp.asarray(B)}
PADDED = {**DATA, "weights": jnp.asarray(WEIGHTS)}


def loss(params, rows):
    return 0.5 * jnp.mean((rows["a"] @ params - rows["b"]) ** 2)


def weighted(params, rows):
    return 0.5 * jnp.sum(rows["weights"] * (rows["a"] @ params - rows["b"]) ** 2)


def one_round(algorithm, hparams, w, data, key=KEY):
    return algorithm.step(key, hparams, algorithm.init(jnp.asarray(w), IDS), data)


@pytest.mark.parametrize("clipped", ["whole", "sent"])
@pytest.mark.parametrize("padded", [False, True])
def test_a_round_is_that_of_the_oracle(clipped, padded):
    """Batches, noise and owners are the package's events; clipping, scaling and averaging are NumPy's."""
    gamma, C, z, q = 0.3, 1.5, 0.4, 0.6
    w, key = np.linspace(-1, 1, D), jax.random.fold_in(KEY, 0)
    wanted = np.zeros(D)
    for i in range(N):
        m = int((WEIGHTS[i] > 0).sum()) if padded else M
        own = jax.random.fold_in(key, i)
        came = np.asarray(mechanism.poisson(sketched.use_key(own, 2), q, jnp.arange(M) < m))
        noise = np.asarray(mechanism.gaussian_like(sketched.use_key(own, 3), jnp.zeros(D)))
        S = np.asarray(perm_k().compress(key, jnp.ones(D), i, N).value)
        total = np.zeros(D)
        for j in np.flatnonzero(came):
            g = (A[i, j] @ w - B[i, j]) * A[i, j]
            g = g * (S > 0) if clipped == "sent" else g
            total += g * min(1, C / np.linalg.norm(g))
        wanted += S * (w - gamma * (total + z * C * noise) / (q * m)) / N
    algorithm = ldp_fedp3.ldp_fedp3(weighted if padded else loss, clipped=clipped)
    state, metrics = one_round(algorithm, ldp_fedp3.HParams(gamma, C, z, q), w, PADDED if padded else DATA)
    np.testing.assert_allclose(state.server.params, wanted, rtol=1e-12)
    shares = WEIGHTS if padded else np.full((N, M), 1 / M)
    assert metrics.loss == pytest.approx(np.sum(shares * (A @ w - B) ** 2) / 2 / N)
    assert metrics.bits_up == pytest.approx(64 * D / N) and metrics.bits_down == 64 * D


def test_without_noise_and_clipping_it_is_the_sketched_algorithm():
    ours = ldp_fedp3.ldp_fedp3(loss)
    plain = sketched.sketched(jax.value_and_grad(loss))
    left, _ = runner.run(KEY, ours, ldp_fedp3.HParams(0.1, np.inf, 0.0, 1.0), ours.init(jnp.ones(D), IDS), DATA, 6)
    right, _ = runner.run(KEY, plain, sketched.HParams(0.1), plain.init(jnp.ones(D), IDS), DATA, 6)
    np.testing.assert_allclose(left.server.params, right.server.params, rtol=1e-12)


def test_a_row_beyond_the_clipping_norm_changes_nothing_but_its_direction():
    far = {**DATA, "b": DATA["b"].at[0, 0].multiply(1e6)}
    farther = {**DATA, "b": DATA["b"].at[0, 0].multiply(1e9)}
    algorithm, hparams = ldp_fedp3.ldp_fedp3(loss), ldp_fedp3.HParams(0.1, 1.0, 0.5, 1.0)
    left, right = (one_round(algorithm, hparams, np.ones(D), data)[0].server.params for data in (far, farther))
    np.testing.assert_allclose(left, right, rtol=1e-5)


@pytest.fixture(scope="module")
def noisy_rounds():
    """w - w+ over many keys at a point where all gradients vanish: what is left is noise.  And whose it was."""
    z, C, q, gamma, trials = 0.8, 2.0, 0.5, 0.25, 6000
    data = {"a": jnp.zeros((2, 4, 6)), "b": jnp.zeros((2, 4))}
    algorithm = ldp_fedp3.ldp_fedp3(loss)
    state = algorithm.init(jnp.zeros(6), jnp.arange(2))

    def one(key):
        after, _ = algorithm.step(key, ldp_fedp3.HParams(gamma, C, z, q), state, data)
        owner = perm_k().compress(jax.random.fold_in(key, 0), jnp.ones(6), 0, 2).value > 0
        return after.server.params, owner

    moved, owner = jax.jit(jax.vmap(one))(jax.random.split(KEY, trials))
    return np.asarray(moved), np.asarray(owner), gamma * z * C / (q * 4)


def test_the_noise_that_is_drawn_has_the_calibrated_deviation(noisy_rounds):
    """gamma z C / (q m) on every coordinate, whoever owns it: F16"""
    moved, owner, deviation = noisy_rounds
    for mine in (owner, ~owner):
        found = moved[mine]
        assert abs(found.std() / deviation - 1) < 0.02 and abs(found.mean()) < 0.02 * deviation
        kurtosis = np.mean(found**4) / np.mean(found**2) ** 2
        assert abs(kurtosis - 3) < 0.15
    covariance = np.cov(moved.T) / deviation**2
    assert np.abs(covariance - np.eye(6)).max() < 0.08


def test_the_noise_differs_between_layers_clients_and_rounds():
    """The step's own messages at a point without gradients: 2 x 3 x 3 vectors of one shape, pairwise independent."""

    def flat(params, rows):
        return jnp.mean(rows["a"]) * sum(jnp.sum(leaf) for leaf in jax.tree.leaves(params))

    layers, size = {"first": jnp.zeros(300), "second": jnp.zeros(300)}, 300
    data, hparams = {"a": jnp.zeros((3, 4))}, ldp_fedp3.HParams(1.0, 1.0, 4.0, 1.0)
    algorithm = ldp_fedp3.ldp_fedp3(flat, identity())

    @jax.jit
    def messages(round):
        server = algorithm.init(layers, IDS).server._replace(round=round)

        def one(id, rows):
            parts = Round(jax.random.fold_in(KEY, round), id, N, lambda x: Message(x, jnp.zeros(())))
            return algorithm.exchange.client_step(parts, hparams, server, sketched.Client(id), rows)[1].value

        sent = jax.vmap(one)(IDS, data)
        after, _ = algorithm.step(KEY, hparams, State(server, sketched.Client(IDS)), data)
        return sent, after.server.params

    rounds = [messages(jnp.asarray(round)) for round in range(3)]
    for sent, after in rounds:  # these are the messages of the step
        jax.tree.map(lambda rows, new: np.testing.assert_allclose(rows.mean(axis=0), new, rtol=1e-12), sent, after)
    noise = np.concatenate([np.asarray(leaf) for sent, _ in rounds for leaf in jax.tree.leaves(sent)])
    assert noise.shape == (18, size) and len(np.unique(noise)) == 18 * size
    assert np.abs(noise.std(axis=1) - 1).max() < 0.2  # z C / (q m) = 4 / 4
    assert np.abs(np.corrcoef(noise) - np.eye(18)).max() < 5 / np.sqrt(size)


def test_the_noise_does_not_know_who_owns_the_coordinate(noisy_rounds):
    """A key that perm-k had split off would put a client's negative noise where its coordinates are."""
    moved, owner, deviation = noisy_rounds
    for j in range(6):
        gap = moved[owner[:, j], j].mean() - moved[~owner[:, j], j].mean()
        assert abs(gap) < 0.12 * deviation


@pytest.mark.parametrize("public", [5, None])
def test_a_row_more_or_less_does_not_change_the_scale_of_the_noise(public):
    """5, 4 and 1 rows, all with gradient 0: with a public m nothing tells them apart; counted, the noise does."""
    algorithm = ldp_fedp3.ldp_fedp3(weighted, identity(), rows=public)
    stds, hparams = [], ldp_fedp3.HParams(1.0, 1.0, 10.0, 1.0)
    for m in (5, 4, 1):
        shares = jnp.where(jnp.arange(5) < m, 1 / m, 0.0)
        data = {"a": jnp.zeros((1, 5, 4000)), "b": jnp.zeros((1, 5)), "weights": shares[None]}
        after, _ = algorithm.step(KEY, hparams, algorithm.init(jnp.zeros(4000), jnp.arange(1)), data)
        stds.append(np.asarray(after.server.params).std())
    assert np.divide(stds, stds[0]) == pytest.approx([1.0, 1.0, 1.0] if public else [1.0, 1.25, 5.0], rel=1e-6)
    assert stds[0] == pytest.approx(10 / 5, rel=0.05)


def test_a_private_run_divides_by_what_is_public():
    data = {"a": jnp.zeros((2, 5, 300)), "b": jnp.zeros((2, 5)), "weights": jnp.asarray(WEIGHTS[:2])}
    how = {"epsilon": 8.0, "delta": 1e-5, "gamma": 1.0, "clip": 1.0, "accountant": "rdp", "sketch": identity()}

    def std(batch, **more):
        found = private_training.train(KEY, weighted, jnp.zeros(300), data, 1, batch=batch, **how, **more)
        return np.asarray(found.state.server.params).std() / found.certificate.noise, found.certificate

    hidden, certificate = std(5.0, relation="add-remove")  # 5 and 4 rows, room for 5
    assert certificate.rate == 1.0 and hidden == pytest.approx(1 / 5 / np.sqrt(2), rel=0.1)
    assert std(10.0, relation="add-remove", rows=10)[0] == pytest.approx(1 / 10 / np.sqrt(2), rel=0.1)
    counted = std(4.0)[0]
    assert counted == pytest.approx(np.sqrt(1 / 25 + 1 / 16) / 2, rel=0.1)
    with pytest.raises(ValueError, match=r"rows=4, but client 0 has 5; allowed: at least as many as it has"):
        std(4.0, rows=4)
    with pytest.raises(ValueError, match=r"rows=0; allowed: at least 1"):
        ldp_fedp3.ldp_fedp3(loss, rows=0)


def test_calibrated_noise_reaches_the_step():
    hparams, certificate = ldp_fedp3.calibrated(4.0, 1e-5, gamma=0.2, clip=1.5, batch=4.0, rows=4, rounds=10)
    assert hparams == (0.2, 1.5, certificate.noise, 1.0) and certificate.rounds == 10
    data = {"a": jnp.zeros((1, 4, 400)), "b": jnp.zeros((1, 4))}
    algorithm = ldp_fedp3.ldp_fedp3(loss)
    after, _ = algorithm.step(KEY, hparams, algorithm.init(jnp.zeros(400), jnp.arange(1)), data)
    assert np.asarray(after.server.params).std() == pytest.approx(0.2 * certificate.noise * 1.5 / 4, rel=0.1)


def test_clients_of_different_sizes_share_a_rate_and_have_a_certificate_each():
    hparams, certificate = ldp_fedp3.calibrated(
        4.0, 1e-5, gamma=0.1, clip=1.0, batch=2.0, rows=[8, 4, 6], rounds=10, capacity=8
    )
    assert hparams.rate == 0.5 == certificate.rate and certificate.capacity == 8


def test_a_capacity_that_is_never_reached_changes_nothing_and_a_small_one_drops_the_last_rows():
    hparams = ldp_fedp3.HParams(0.1, 1.0, 0.0, 0.4)
    whole, _ = one_round(ldp_fedp3.ldp_fedp3(loss), hparams, np.ones(D), DATA)
    keys = [sketched.use_key(jax.random.fold_in(jax.random.fold_in(KEY, 0), i), 2) for i in range(N)]
    came = [int(mechanism.poisson(key, 0.4, jnp.ones(M, bool)).sum()) for key in keys]
    assert 1 < max(came) < M
    same, _ = one_round(ldp_fedp3.ldp_fedp3(loss, capacity=max(came)), hparams, np.ones(D), DATA)
    fewer, _ = one_round(ldp_fedp3.ldp_fedp3(loss, capacity=max(came) - 1), hparams, np.ones(D), DATA)
    np.testing.assert_allclose(same.server.params, whole.server.params, rtol=1e-12)
    assert np.abs(np.asarray(fewer.server.params - whole.server.params)).max() > 1e-3


def test_clipping_what_is_sent_needs_a_norm_smaller_by_the_root_of_n():
    """The part that a client sends has |g|^2 / n on average, so that its noise may be smaller by sqrt(n)."""
    g = np.random.default_rng(1).standard_normal(D)

    def part(key):
        return jnp.sum(jnp.where(perm_k().compress(key, jnp.ones(D), 0, N).value > 0, g, 0.0) ** 2)

    found = np.mean(jax.vmap(part)(jax.random.split(KEY, 3000)))
    assert found == pytest.approx(g @ g / N, rel=0.05)


def test_the_thesis_s_parameters():
    arguments = {"L": 2.0, "delta0": 10.0, "d": 100, "c": 1.0}
    hparams, rounds = ldp_fedp3.theoretical(1.0, 1e-5, clip=1.5, rows=500, batch=50.0, **arguments)
    plan = theory.schedule(1.0, 1e-5, C=1.5, m=500, **arguments)
    assert rounds == np.ceil(plan.K) and hparams.gamma == plan.gamma and hparams.rate == 0.1 and hparams.clip == 1.5
    sigma2 = theory.noise_variance(1.0, 1e-5, c=1.0, C=1.5, K=rounds, m=500)
    assert (hparams.noise * 1.5 / 50) ** 2 == pytest.approx(sigma2)  # z C / b is sigma


def test_a_run_returns_its_certificate_and_learns():
    rng = np.random.default_rng(2)
    a = rng.standard_normal((4, 200, 4))
    data = {"a": jnp.asarray(a), "b": jnp.asarray(a @ np.array([1.0, -1.0, 0.5, 0.0]))}
    found = private_training.train(
        KEY, loss, jnp.zeros(4), data, 40, epsilon=8.0, delta=1e-5, gamma=0.3, clip=1.0, batch=200.0, clipped="sent"
    )
    assert found.certificate == accounting.guarantee(found.certificate.noise, 1.0, 40, 1e-5)
    assert 7.9 < found.certificate.epsilon <= 8
    assert found.metrics.loss.shape == (40,) and found.metrics.loss[-1] < 0.3 * found.metrics.loss[0]


def test_the_dense_variant_averages_the_noise_of_all_clients():
    """S = I: n times the bits, sqrt(n) times less noise"""
    data = {"a": jnp.zeros((N, 4, 600)), "b": jnp.zeros((N, 4))}
    stds = []
    for sketch in (identity(), perm_k()):
        algorithm = ldp_fedp3.ldp_fedp3(loss, sketch)
        after, _ = algorithm.step(KEY, ldp_fedp3.HParams(1.0, 1.0, 1.0, 1.0), algorithm.init(jnp.zeros(600), IDS), data)
        stds.append(np.asarray(after.server.params).std())
    assert stds[1] / stds[0] == pytest.approx(np.sqrt(N), rel=0.12)


def test_bad_input_is_refused():
    good = {"gamma": 0.1, "clip": 1.0, "batch": 4.0, "rows": 10, "rounds": 5}
    for change, match in (
        ({"batch": 11.0}, r"batch=11.0; allowed: positive, at most the 10 rows of a client"),
        ({"batch": 0.0}, r"batch=0.0; allowed: positive"),
        ({"batch": 4.0, "rows": [10, 3]}, r"batch=4.0; allowed: positive, at most the 3 rows"),
        ({"clip": np.inf}, r"clip=inf; allowed: positive and finite \(without clipping there is no privacy\)"),
        ({"clip": 0.0}, r"clip=0.0; allowed: positive and finite"),
        ({"gamma": -1.0}, r"gamma=-1.0; allowed: positive and finite"),
    ):
        with pytest.raises(ValueError, match=match):
            ldp_fedp3.calibrated(1.0, 1e-5, **{**good, **change})
    for epsilon in (0.0, -2.0):
        with pytest.raises(ValueError, match=r"epsilon=.*; allowed: positive and finite"):
            ldp_fedp3.calibrated(epsilon, 1e-5, **good)
    for delta in (0.0, 1.0):
        with pytest.raises(ValueError, match=r"delta=.*; allowed: 0 < delta < 1"):
            ldp_fedp3.calibrated(1.0, delta, **good)
    for batch in (501.0, 0.0):
        with pytest.raises(ValueError, match=rf"batch={batch}; allowed: positive, at most the 500 rows"):
            ldp_fedp3.theoretical(1.0, 1e-5, L=1.0, delta0=1.0, clip=1.0, d=2, rows=500, batch=batch, c=1.0)
    with pytest.raises(ValueError, match="capacity=0; allowed: at least 1 row"):
        ldp_fedp3.ldp_fedp3(loss, capacity=0)
    with pytest.raises(ValueError, match="3 clients share out d = 2 coordinates"):
        ldp_fedp3.ldp_fedp3(loss).init(jnp.ones(2), IDS)


def test_a_client_without_rows_is_refused_and_does_not_make_the_model_infinite():
    empty = {**PADDED, "weights": PADDED["weights"].at[1].set(0.0)}
    algorithm = ldp_fedp3.ldp_fedp3(weighted)
    with pytest.raises(ValueError, match=r"data: client 1 has 0 rows; allowed: at least 1 \(or public `rows`\)"):
        algorithm.init(jnp.ones(D), IDS, data=empty)
    ldp_fedp3.ldp_fedp3(weighted, rows=5).init(jnp.ones(D), IDS, data=empty)
    after, _ = one_round(algorithm, ldp_fedp3.HParams(0.1, 1.0, 0.5, 0.5), np.ones(D), empty)
    assert np.isfinite(after.server.params).all()


def test_a_loss_that_is_not_per_example_is_refused_before_the_run():
    def batch_normalised(params, rows):
        scores = rows["a"] @ params
        return jnp.mean((scores - jnp.mean(scores) - rows["b"]) ** 2)

    with pytest.raises(ValueError, match="loss is not a mean over rows"):
        ldp_fedp3.ldp_fedp3(batch_normalised).init(jnp.ones(D), IDS, data=DATA)
    with pytest.raises(ValueError, match=r"loss returns an array of shape \(5,\); allowed: one number"):
        ldp_fedp3.ldp_fedp3(lambda params, rows: rows["a"] @ params).init(jnp.ones(D), IDS, data=DATA)
    with pytest.raises(ValueError, match=r"every leaf of a client's data must be \[rows"):
        ldp_fedp3.ldp_fedp3(loss).init(jnp.ones(D), IDS, data={"a": jnp.ones((N, 2, 3)), "b": jnp.ones((N, 4))})
    ldp_fedp3.ldp_fedp3(weighted).init(jnp.ones(D), IDS, data=PADDED)


def test_noise_without_clipping_is_refused():
    with pytest.raises(ValueError, match="clip=inf; allowed: positive and finite"):
        ldp_fedp3.check(ldp_fedp3.HParams(0.1, np.inf, 1.0, 1.0), 4)
    ldp_fedp3.check(ldp_fedp3.HParams(0.1, np.inf, 0.0, 1.0), 4)
