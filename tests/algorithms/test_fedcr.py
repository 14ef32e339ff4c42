"""FedCR: one round against NumPy and scipy-free formulas, heads that stay, prices, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commjax.algorithms import fedcr
from commjax.algorithms.fedcr import method
from commjax.data.stacked import Examples

pytestmark = pytest.mark.long

N, ROWS, D, Z, CLASSES = 3, 4, 5, 2, 3
RNG = np.random.default_rng(0)
TARGETS = np.array([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 0, 0]], np.int32)  # nobody has class 2
DATA = Examples(
    jnp.asarray(RNG.standard_normal((N, ROWS, D))),
    jnp.asarray(TARGETS),
    jnp.asarray([[0.25] * 4, [0.25] * 4, [1 / 3] * 3 + [0.0]]),  # the last row of client 2 is padding
)
PARAMS = {
    "body": jnp.asarray(RNG.standard_normal((D, 2 * Z)) / 4),
    "head": jnp.asarray(RNG.standard_normal((Z, CLASSES))),
}
KEY = jax.random.key(0)


def network():
    return fedcr.Network(lambda body, x: fedcr.gaussian(x @ body), lambda head, z: z @ head, CLASSES, Z)


def softplus(x):
    return np.log1p(np.exp(x))


def step(algorithm, hparams, state):
    return jax.jit(algorithm.step)(KEY, hparams, state, DATA)


def test_the_divergence_of_normals_is_the_integral():
    q, p = (np.array([0.3]), np.array([0.7])), (np.array([-0.5]), np.array([1.3]))
    x = np.linspace(-12, 12, 200001)

    def log_density(mean, scale):
        return -((x - mean) ** 2) / (2 * scale**2) - np.log(scale * np.sqrt(2 * np.pi))

    integrand = np.exp(log_density(*q)) * (log_density(*q) - log_density(*p))
    wanted = integrand.sum() * (x[1] - x[0])
    found = fedcr.divergence(fedcr.Normal(*map(jnp.asarray, q)), fedcr.Normal(*map(jnp.asarray, p)))
    assert float(found) == pytest.approx(wanted, rel=1e-6)


def test_global_class_distributions_are_products_of_experts_over_rows_and_clients():
    algorithm = fedcr.fedcr(network(), steps=1)
    state, _ = step(algorithm, fedcr.HParams(0.0, 0.1, 1.0), algorithm.init(PARAMS, jnp.arange(N)))
    outputs = np.asarray(DATA.inputs) @ np.asarray(PARAMS["body"])
    mu, precision = outputs[..., :Z], softplus(outputs[..., Z:]) ** -2.0
    real = np.asarray(DATA.weights) > 0
    for c in range(2):
        mine = (c == TARGETS) & real
        total = 1 + precision[mine].sum(axis=0)
        np.testing.assert_allclose(state.server.classes.scale[c], total**-0.5, rtol=1e-12)
        np.testing.assert_allclose(state.server.classes.mean[c], (precision * mu)[mine].sum(axis=0) / total, rtol=1e-12)
    np.testing.assert_array_equal(state.server.classes.mean[2], 0)
    np.testing.assert_array_equal(state.server.classes.scale[2], 1)
    half, _ = step(algorithm, fedcr.HParams(0.0, 0.1, 0.5), algorithm.init(PARAMS, jnp.arange(N)))
    np.testing.assert_allclose(half.server.classes.scale[0], (1 + state.server.classes.scale[0]) / 2, rtol=1e-12)


def test_a_step_descends_the_loss_written_out():
    algorithm = fedcr.fedcr(network(), steps=1)
    start = algorithm.init(PARAMS, jnp.arange(N))
    known = fedcr.Normal(jnp.asarray(RNG.standard_normal((CLASSES, Z))), jnp.asarray(RNG.uniform(0.5, 2, (CLASSES, Z))))
    start = start._replace(server=start.server._replace(classes=known))
    beta, gamma = 0.3, 0.05
    state, metrics = step(algorithm, fedcr.HParams(gamma, beta, clip=jnp.inf), start)

    def client_loss(model, i):
        key = jax.random.split(jax.random.fold_in(jax.random.fold_in(jax.random.fold_in(KEY, 0), i), 0))[1]
        outputs = DATA.inputs[i] @ model["body"]
        mu, sigma = outputs[:, :Z], jnp.log1p(jnp.exp(outputs[:, Z:]))
        z = mu + sigma * jax.random.normal(key, mu.shape, mu.dtype)
        scores = z @ model["head"]
        entropy = jax.nn.logsumexp(scores, axis=1) - scores[jnp.arange(ROWS), TARGETS[i]]
        m, s = known.mean[TARGETS[i]], known.scale[TARGETS[i]]
        kl = jnp.sum(jnp.log(sigma / s) + (s**2 + (m - mu) ** 2) / (2 * sigma**2) - 0.5, axis=1)
        return jnp.sum(DATA.weights[i] * (entropy + beta * kl))

    bodies = []
    for i in range(N):
        grad = jax.grad(client_loss)(PARAMS, i)
        np.testing.assert_allclose(state.clients.head[i], PARAMS["head"] - gamma * grad["head"], rtol=1e-9)
        bodies.append(PARAMS["body"] - gamma * grad["body"])
    np.testing.assert_allclose(state.server.params["body"], np.mean(bodies, axis=0), rtol=1e-9)
    np.testing.assert_array_equal(state.server.params["head"], PARAMS["head"])
    np.testing.assert_allclose(metrics.loss, np.mean([client_loss(PARAMS, i) for i in range(N)]), rtol=1e-9)


def sharp():
    """Deviations of about 0.05 where the class distributions are 3 away: the divergence has gradients in the
    hundreds."""
    body = jnp.concatenate([PARAMS["body"][:, :Z], jnp.zeros((D, Z))], axis=1)
    bias = fedcr.Network(
        lambda body, x: fedcr.gaussian(x @ body - jnp.array([[0.0] * Z + [3.0] * Z])), network().head, CLASSES, Z
    )
    far = fedcr.Normal(jnp.full((CLASSES, Z), 3.0), jnp.full((CLASSES, Z), 0.01))
    return bias, {"body": body, "head": PARAMS["head"]}, far


def moved(params, model):
    return float(jnp.sqrt(sum(jnp.sum((a - b) ** 2) for a, b in zip(jax.tree.leaves(params), jax.tree.leaves(model)))))


def test_a_gradient_is_shortened_to_the_clip_and_no_other_is():
    net, params, far = sharp()
    data = Examples(*(leaf[0] for leaf in DATA))

    def after(clip, moves=None):
        hparams = fedcr.HParams(0.1, 0.3, clip=clip)
        return method.train(net, lambda key, data: data, 1, method.Local(KEY, hparams, far, params, data, moves))[0]

    whole = moved(params, after(jnp.inf)) / 0.1
    assert whole > 100
    for clip, length in ((10.0, 10.0), (whole * 0.999, whole * 0.999), (whole * 1.001, whole)):
        assert moved(params, after(clip)) / 0.1 == pytest.approx(length, rel=1e-9)
    for short, long in zip(jax.tree.leaves(after(10.0)), jax.tree.leaves(after(jnp.inf))):  # the same direction
        start = params["body"] if short.shape == params["body"].shape else params["head"]
        np.testing.assert_allclose(short - start, (long - start) * 10 / whole, rtol=1e-9, atol=1e-14)
    alone = after(10.0, {"body": False, "head": True})  # what is not trained does not count
    np.testing.assert_array_equal(alone["head"], after(jnp.inf)["head"])
    assert moved(params["head"], after(10.0)["head"]) < moved(params["head"], alone["head"]) / 10


def test_without_the_clip_small_deviations_run_away_and_with_it_they_do_not():
    """F27: the divergence has the curvature beta / sigma^2, which no stepsize is small enough for."""
    net, params, far = sharp()

    def losses(clip):
        algorithm = fedcr.fedcr(net, steps=5)
        state = algorithm.init(params, jnp.arange(N))
        state, found = state._replace(server=state.server._replace(classes=far)), []
        for _ in range(6):
            state, metrics = step(algorithm, fedcr.HParams(0.1, 0.01, clip=clip), state)
            found.append(float(metrics.loss))
        return np.array(found)

    assert not np.isfinite(losses(jnp.inf)).all()
    assert np.isfinite(losses(fedcr.HParams(0.1, 0.01).clip)).all()


def test_bits_are_those_of_the_body_and_the_class_distributions():
    algorithm = fedcr.fedcr(network(), steps=2, cohort=2)
    state, metrics = step(algorithm, fedcr.HParams(0.1, 0.01), algorithm.init(PARAMS, jnp.arange(N)))
    whole = 64 * (D * 2 * Z + 2 * CLASSES * Z)
    assert metrics.bits_up == pytest.approx(whole * 2 / 3) and metrics.bits_down == pytest.approx(whole * 2 / 3)
    moved = np.abs(np.asarray(state.clients.head) - np.asarray(PARAMS["head"])).max(axis=(1, 2)) > 0
    assert moved.sum() == 2  # a client that does not take part keeps its head
    model = fedcr.deployed(state.server, jax.tree.map(lambda leaf: leaf[1], state.clients))
    np.testing.assert_array_equal(model["head"], state.clients.head[1])


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        fedcr.fedcr(network(), steps=0)
    with pytest.raises(ValueError, match=r"params has \['body'\]; allowed: 'body' and 'head'"):
        fedcr.fedcr(network(), steps=1).init({"body": PARAMS["body"]}, jnp.arange(N))
