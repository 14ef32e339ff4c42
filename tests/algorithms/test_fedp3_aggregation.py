"""FedP3's server: simple, weighted and learned means over the holders of a layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commjax.algorithms.fedp3 import aggregation, layers, plans
from tests.algorithms.fedp3_cases import (
    HELD,
    LAYERS,
    MIXED,
    PARAMS,
    N,
    close,
    loss,
    numpy_client,
    numpy_round,
    one_round,
    played,
)

pytestmark = pytest.mark.long


def test_weighted_averaging_counts_layers_and_is_normalised_over_holders():
    state, _ = one_round(aggregate=aggregation.weighted())
    close(state.server.params, numpy_round(PARAMS, MIXED, 2, weight=len))


def test_the_golden_weighted_mean_is_17_5():
    # Three clients with 2, 6 and 4 layers (twice the golden's, for all train the last one).  The first two hold `a` and
    # sent 10 and 20.
    six = layers.Layers(tuple("abcdef"), tuple(range(6)))
    plan = plans.plan(six, ["af", "abcdef", "bcdf"])
    sent = {name: jnp.array([10.0, 20.0, 1e9]) for name in "abcdef"}

    def mean(rule):
        weight = aggregation.weights(jnp.asarray(rule.logits(plan.trained)), jnp.asarray(plan.trained))
        return float(aggregation.joined(six, sent, weight)["a"])

    assert mean(aggregation.weighted()) == pytest.approx(17.5, abs=1e-13)
    assert mean(aggregation.simple()) == 15.0
    printed = (2 * 10 + 6 * 20) / 12  # F8: the weights sum to 8/12
    assert printed == pytest.approx(11.666666666666666)


@pytest.mark.parametrize("start", [aggregation.simple(), aggregation.weighted()], ids=["simple", "weighted"])
def test_attention_that_does_not_learn_is_what_it_starts_from(start):
    found, _ = one_round(aggregate=aggregation.attention(None, steps=0, start=start))
    wanted, _ = one_round(aggregate=start)
    close(found.server, wanted.server, rtol=0)


def test_attention_descends_the_exact_gradient_of_the_held_loss():
    sent = [numpy_client(PARAMS, MIXED, i, 2) for i in range(N)]
    rows = jax.tree.map(lambda *leaves: jnp.stack(leaves), *[model for model, _ in sent])
    holds = jnp.asarray(MIXED.trained)

    def held_loss(logits):
        share = jnp.where(holds, jnp.exp(logits), 0)
        share = share / share.sum(axis=0)[None]
        joined = {
            name: jax.tree.map(lambda leaf, l=l: jnp.tensordot(share[:, l], leaf, 1), rows[name])
            for l, name in enumerate(LAYERS.names)
        }
        return loss(joined, HELD)

    start = jnp.asarray(aggregation.weighted().logits(MIXED.trained))
    wanted = start - 0.02 * jax.grad(held_loss)(start)
    how = aggregation.attention(HELD, steps=1, stepsize=0.02, start=aggregation.weighted())
    state, _ = played(aggregate=how)
    np.testing.assert_allclose(state.clients.logits, wanted, rtol=1e-9)
    assert np.abs(wanted - start)[MIXED.trained].max() > 1e-3
    many = aggregation.attention(HELD, steps=4, stepsize=0.02, start=aggregation.weighted())
    learned, _ = played(aggregate=many)
    assert loss(learned.server.params, HELD) < held_loss(start)
    np.testing.assert_allclose(held_loss(learned.clients.logits), loss(learned.server.params, HELD), rtol=1e-10)


def test_attention_does_not_see_a_shift_of_all_logits():
    def lower(trained):
        return aggregation.weighted().logits(trained) - 4.0

    ends = []
    for start in (aggregation.weighted(), aggregation.Aggregation("lower", lower)):
        state, _ = played(aggregate=aggregation.attention(HELD, steps=2, stepsize=0.02, start=start))
        ends.append(state)
    close(ends[1].server, ends[0].server, rtol=1e-9)
    np.testing.assert_allclose(ends[1].clients.logits + 4, ends[0].clients.logits, rtol=1e-9, atol=1e-12)


def test_learned_logits_stay_within_20():
    updates = {"a": jnp.array([1.0, -1.0])}
    single = layers.Layers(("a",), (0,))
    rule = aggregation.attention(None, steps=2, stepsize=1e6)
    uploads = aggregation.Uploads(updates, jnp.ones((2, 1), bool), jnp.zeros((2, 1)))
    found = aggregation.learned(rule, lambda params, _: params["a"], single, {"a": jnp.array(0.0)}, uploads)
    assert found.tolist() == [[-20.0], [20.0]]
    assert aggregation.attention(None)[3:] == (3, 1.0)
