"""FedP3 on payloads: every way to prune, to train and to join is the simulation's, bit for bit, at the ledger's
price."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commjax.algorithms import fedp3
from commjax.algorithms.fedp3 import aggregation, layers, local_pruning, plans, submodels
from commjax.federation.exchange import Contract
from commjax.problems import quadratic
from tests.federation import test_exchange
from tests.federation.exchange_cases import Federation, equal_bits, rows, shared
from tests.registry import tree_loss

pytestmark = pytest.mark.long

N, KEY = 4, jax.random.key(5)
DATA = jax.tree.map(jnp.asarray, quadratic.random(1, N, 20, mu=0.5, L=2.0))
FLAT = jnp.linspace(-1.0, 1.3, 20)
PARAMS = {
    "a": {"bias": FLAT[:4], "kernel": FLAT[4:10].reshape(2, 3)},
    "b": {"kernel": FLAT[10:16].reshape(3, 2)},
    "head": {"kernel": FLAT[16:].reshape(2, 2)},
}
FOUND = layers.named(PARAMS, final="head")
TRAINED = [["a", "head"], ["b", "head"], ["head"], ["a", "b", "head"]]
ATTENTION = aggregation.attention(jax.tree.map(lambda leaf: leaf[0], DATA), steps=2, stepsize=0.5)
WAYS = {
    "magnitude, ratios, masked": (
        np.array([0.5, 0.7, 0.5, 0.9]),
        {"others": "masked", "aggregate": aggregation.weighted()},
    ),
    "random, free, a cohort": (0.6, {"pruning": submodels.random(), "others": "free", "cohort": 3}),
    "blocks of ordered dropout": (0.6, {"local_pruning": local_pruning.ordered(0.5, 1, everywhere=True)}),
    "released, own heads": (0.9, {"others": "free", "local_head": True}),
    "learned weights, a cohort": (0.6, {"cohort": 3, "aggregate": ATTENTION}),
}


@pytest.mark.parametrize("way", WAYS)
def test_letters_are_the_simulation(way):
    keep, how = WAYS[way]
    algorithm = fedp3.fedp3(tree_loss, plans.plan(FOUND, TRAINED, keep), steps=2, **how)
    contract = Contract(algorithm, fedp3.HParams(0.2), lambda ids: algorithm.init(PARAMS, ids), N, KEY)
    federation, state = Federation(contract, DATA), contract.init(jnp.arange(N))
    step, key = jax.jit(algorithm.step), jax.random.split(KEY)[0]
    sizes = set()
    for _ in range(2):
        downloads, uploads, report = federation.round()
        state, metrics = step(key, contract.hparams, state, DATA)
        equal_bits(*shared(federation.server, state.server))
        for i in range(N):
            equal_bits(*shared(federation.row(i), rows(state.clients, i)))
        if state.clients.logits is not None:  # the server's, where it is not where the clients are
            np.testing.assert_allclose(federation.server.logits, state.clients.logits, rtol=1e-12)
            assert len(np.unique(np.asarray(state.clients.logits)[:, -1])) >= 3  # those of the cohort moved
        assert (report.bits_up, report.bits_down) == (float(metrics.bits_up), float(metrics.bits_down))
        for messages, bits in ((downloads, report.bits_down), (uploads, report.bits_up)):
            assert 8 * sum(len(one) - test_exchange.HEADER_BYTES for one in messages.values()) == bits * N
            sizes |= {len(one) for one in messages.values()}
    assert len(sizes) > 3  # what a client is sent and sends is its own


def test_a_plan_for_others_is_refused():
    algorithm = fedp3.fedp3(tree_loss, plans.everything(FOUND, N), steps=1)
    assert algorithm.init(PARAMS, jnp.array([3])).clients.id.tolist() == [3]
    with pytest.raises(ValueError, match="ids: 3 clients, but the plan is for 4"):
        algorithm.init(PARAMS, jnp.arange(3))


def test_a_state_of_another_plan_is_refused():
    method = fedp3.Method(tree_loss, plans.plan(FOUND, TRAINED, 0.5), steps=1)
    algorithm = method.algorithm()
    moved = algorithm.init(PARAMS, jnp.arange(N), plan=plans.plan(FOUND, TRAINED[::-1], 0.5))
    assert algorithm.exchange is not None and algorithm.exchange.start is not None
    with pytest.raises(ValueError, match="plan: remote clients follow the plan of the method"):
        algorithm.exchange.start(moved)
