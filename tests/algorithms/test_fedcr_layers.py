"""FedCR on layers: FedCR where all are trained, layers that stay, what is sent, errors."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commjax.algorithms import fedcr
from commjax.algorithms.fedcr import distributions, method
from commjax.algorithms.fedcr import layers as fedcr_layers
from commjax.algorithms.fedp3 import layers, plans, submodels
from commjax.data.stacked import Examples

pytestmark = pytest.mark.long

N, ROWS, D, Z, CLASSES = 3, 4, 5, 2, 3
RNG = np.random.default_rng(0)
DATA = Examples(
    jnp.asarray(RNG.standard_normal((N, ROWS, D))),
    jnp.asarray(RNG.integers(0, CLASSES, (N, ROWS)), jnp.int32),
    jnp.full((N, ROWS), 1 / ROWS),
)
PARAMS = {
    "body": {"a": jnp.asarray(RNG.standard_normal((D, 4)) / 2), "b": jnp.asarray(RNG.standard_normal((4, 2 * Z)) / 2)},
    "head": jnp.asarray(RNG.standard_normal((Z, CLASSES))),
}
LAYERS = layers.named(PARAMS, final="head", groups={"a": ["body/a"], "b": ["body/b"], "head": ["head"]})
SOME = plans.plan(LAYERS, [["a", "head"], ["a", "head"], ["head"]], 0.5)
NETWORK = fedcr.Network(
    lambda body, x: fedcr.gaussian(jnp.tanh(x @ body["a"]) @ body["b"]), lambda head, z: z @ head, CLASSES, Z
)
HPARAMS, KEY = fedcr.HParams(0.05, 0.1, 0.7), jax.random.key(0)


def rounds(algorithm, state, count=2):
    step = jax.jit(algorithm.step)
    for _ in range(count):
        state, metrics = step(KEY, HPARAMS, state, DATA)
    return state, metrics


def largest(weights):
    """The larger half stays"""
    size = jnp.abs(weights)
    return jnp.where(size >= jnp.sort(size.reshape(-1))[size.size // 2], weights, 0.0)


@pytest.mark.parametrize("cohort", [None, 2])
def test_all_layers_are_fedcr(cohort):
    mine = fedcr_layers.fedcr_layers(NETWORK, plans.everything(LAYERS, N), steps=2, cohort=cohort)
    plain = fedcr.fedcr(NETWORK, steps=2, cohort=cohort)
    found, metrics = rounds(mine, mine.init(PARAMS, jnp.arange(N)))
    wanted, price = rounds(plain, plain.init(PARAMS, jnp.arange(N)))
    for a, b in zip(
        jax.tree.leaves((found.server, found.clients.head)), jax.tree.leaves((wanted.server, wanted.clients.head))
    ):
        np.testing.assert_allclose(a, b, rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(metrics, price, rtol=1e-12)


def test_a_layer_moves_by_the_mean_of_its_holders_and_stays_where_there_are_none():
    algorithm = fedcr_layers.fedcr_layers(NETWORK, SOME, steps=1)
    start = algorithm.init(PARAMS, jnp.arange(N))
    state, metrics = rounds(algorithm, start, 1)
    np.testing.assert_array_equal(state.server.params["body"]["b"], PARAMS["body"]["b"])
    np.testing.assert_array_equal(state.server.params["head"], PARAMS["head"])
    pruned = {"b": largest(PARAMS["body"]["b"])}
    moves, experts = [], []
    for i in range(N):
        key = jax.random.fold_in(jax.random.fold_in(KEY, 0), i)
        data = Examples(*(leaf[i] for leaf in DATA))
        a = PARAMS["body"]["a"]
        if i == 2:  # holds neither: a is pruned too, 10 of 20 stay
            a = largest(a)
        begin = {"body": {**pruned, "a": a}, "head": PARAMS["head"]}
        yes = {"body": {"a": i != 2, "b": False}, "head": True}
        work = method.Local(key, HPARAMS, start.server.classes, begin, data, yes)
        model, _ = method.train(NETWORK, lambda key, data: data, 1, work)
        np.testing.assert_allclose(state.clients.head[i], model["head"], rtol=1e-10)
        np.testing.assert_array_equal(model["body"]["b"], pruned["b"])
        experts.append(method.experts_of(NETWORK, model, data))
        moves.append(model["body"]["a"])
    np.testing.assert_allclose(state.server.params["body"]["a"], (moves[0] + moves[1]) / 2, rtol=1e-10)
    total = jax.tree.map(lambda *rows: sum(rows), *experts)
    wanted = distributions.known(HPARAMS, start.server.classes, total)
    np.testing.assert_allclose(state.server.classes.mean, wanted.mean, rtol=1e-10)
    classes = 64 * 2 * CLASSES * Z
    bits = fedcr_layers.ledger(SOME, start.server)
    np.testing.assert_array_equal(bits["up"], [64 * 20 + classes, 64 * 20 + classes, classes])
    assert metrics.bits_up == pytest.approx(bits["up"].mean()) and metrics.bits_down == pytest.approx(
        bits["down"].mean()
    )
    assert bits["down"][0] == 64 * 20 + 64 * 8 + 16 + classes  # a whole; of b 8 values and a bitmap; the head never
    assert fedcr_layers.ledger(SOME, start.server, submodels.random())["down"][0] == bits["down"][0] - 16


def test_one_program_serves_several_plans():
    several = plans.kinds([plans.everything(LAYERS, N), SOME])
    single, both = (fedcr_layers.fedcr_layers(NETWORK, plan, steps=1, cohort=2) for plan in (SOME, several))
    wanted, price = rounds(single, single.init(PARAMS, jnp.arange(N)), 1)
    found, metrics = rounds(both, both.init(PARAMS, jnp.arange(N), plan=SOME), 1)
    np.testing.assert_allclose(found.server.params["body"]["a"], wanted.server.params["body"]["a"], rtol=1e-12)
    np.testing.assert_allclose(metrics, price, rtol=1e-12)


def test_bad_input_is_refused():
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        fedcr_layers.fedcr_layers(NETWORK, SOME, steps=0)
    algorithm = fedcr_layers.fedcr_layers(NETWORK, SOME, steps=1)
    with pytest.raises(ValueError, match="ids: 2 clients, but the plan is for 3"):
        algorithm.init(PARAMS, jnp.arange(2))
    with pytest.raises(ValueError, match=r"client 0 trains \['a', 'b', 'head'\]; allowed: the layer sets of"):
        algorithm.init(PARAMS, jnp.arange(N), plan=plans.everything(LAYERS, N))
    wrong = layers.Layers(("a", "rest"), (0, 1, 1))
    with pytest.raises(ValueError, match="the final layer 'rest' is not the head"):
        fedcr_layers.fedcr_layers(NETWORK, plans.everything(wrong, N), steps=1).init(PARAMS, jnp.arange(N))
