"""FedP3: a round against NumPy, its special cases, what clients hold, several plans in one program."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commjax.algorithms import fedavg, fedp3
from commjax.algorithms.fedp3 import layers, local_pruning, plans
from commjax.core import local, rounds, runner, tree
from tests.algorithms.fedp3_cases import (
    DATA,
    GAMMA,
    IDS,
    KEY,
    LAYERS,
    MIXED,
    PARAMS,
    N,
    X,
    Y,
    as_numpy,
    close,
    loss,
    numpy_client,
    numpy_round,
    one_round,
)

pytestmark = pytest.mark.long


@pytest.mark.parametrize(
    "others, over",
    [(others, rounds.one_by_one) for others in ("frozen", "masked", "free")]
    + [("frozen", jax.vmap), ("masked", jax.vmap)],
)
def test_a_round_is_the_oracle_s(over, others):
    state, _ = one_round(over=over, others=others)
    wanted = numpy_round(PARAMS, MIXED, 2, train_others=None if others == "frozen" else others)
    close(state.server.params, wanted)


def test_the_loss_is_that_of_the_deployed_models_at_the_start_of_the_round():
    _, metrics = one_round()
    models = [numpy_client(PARAMS, MIXED, i, 0)[0] for i in range(N)]
    wanted = np.mean([loss(model, {"x": X[i], "y": Y[i]}) for i, model in enumerate(models)])
    np.testing.assert_allclose(metrics.loss, wanted, rtol=1e-12)


@pytest.mark.parametrize("over, cohort", [(rounds.one_by_one, None), (jax.vmap, 2)], ids=["branches", "vmap, cohort"])
def test_all_layers_and_no_pruning_is_fedavg(over, cohort):
    sample = local.minibatch(3)
    plan = plans.everything(LAYERS, N)
    ours = fedp3.fedp3(loss, plan, sample, steps=3, cohort=cohort, over=over)
    theirs = fedavg.fedavg(jax.value_and_grad(loss), sample, steps=3, cohort=cohort, over=over)
    found, seen = runner.run(KEY, ours, fedp3.HParams(GAMMA, 0.8), ours.init(PARAMS, IDS), DATA, 3)
    wanted, expected = runner.run(KEY, theirs, fedavg.HParams(GAMMA, 0.8), theirs.init(PARAMS, IDS), DATA, 3)
    close((found.server, seen), (wanted.server, expected))


def test_one_group_that_takes_one_step_is_centralized_sgd():
    state, _ = one_round("everything", steps=1)
    pooled = {name: jnp.concatenate(list(rows)) for name, rows in DATA.items()}
    close(state.server.params, tree.add_scaled(PARAMS, -GAMMA, jax.grad(loss)(PARAMS, pooled)))


def test_a_layer_that_nobody_held_keeps_its_value():
    plan = plans.plan(LAYERS, [["c"], ["a", "c"], ["c"], ["c"]])
    algorithm = fedp3.fedp3(loss, plan, steps=1)
    state, _ = algorithm.step(KEY, fedp3.HParams(GAMMA), algorithm.init(PARAMS, IDS), DATA)
    close(state.server.params["b"], PARAMS["b"], rtol=0)
    assert np.abs(state.server.params["a"]["kernel"] - PARAMS["a"]["kernel"]).max() > 1e-4


def test_a_layer_whose_holders_are_not_in_the_cohort_keeps_its_value():
    plan = plans.plan(LAYERS, [["a", "c"], ["b", "c"], ["b", "c"], ["b", "c"]])
    algorithm = fedp3.fedp3(loss, plan, steps=1, cohort=2)
    step, seen = jax.jit(algorithm.step), set()
    for number in range(12):
        key = jax.random.key(number)
        state, _ = step(key, fedp3.HParams(GAMMA), algorithm.init(PARAMS, IDS), DATA)
        draw = jax.random.fold_in(jax.random.fold_in(key, 0), N)
        members = np.flatnonzero(rounds.cohort_members(draw, IDS, N, 2))
        close(state.server.params, numpy_round(PARAMS, plan, 1, members=members))
        seen.add(0 in members)
    assert seen == {True, False}


def test_local_models_are_what_clients_have_before_they_throw_layers_away():
    state = fedp3.Method(loss, MIXED, steps=2).init(PARAMS, IDS)
    for others in ("frozen", "masked", "free"):
        method = fedp3.Method(loss, MIXED, steps=2, others=others)
        found = method.local_models(KEY, fedp3.HParams(GAMMA), state, DATA)
        for i in range(N):
            wanted, _ = numpy_client(PARAMS, MIXED, i, 2, None if others == "frozen" else others)
            close(jax.tree.map(lambda leaf, i=i: leaf[i], found), wanted)
    half = local_pruning.ordered(0.5, 3)
    cut = fedp3.Method(loss, MIXED, steps=1, local_pruning=half).local_models(
        KEY,
        fedp3.HParams(0.0),
        state,
        DATA,
        use=lambda model, data: (model["a"]["kernel"], data["x"].shape),
    )[0]
    assert not np.asarray(cut)[1:3, :, 2:].any() and np.asarray(cut)[0].all()  # client 0 trains `a`


def test_local_heads_stay_with_their_clients_and_are_sent_up():
    plan = plans.consecutive(LAYERS, N, 1, keep=0.7)
    algorithm = fedp3.released(loss, plan, local.all_rows, steps=2)
    state = algorithm.init(PARAMS, IDS)
    step = jax.jit(algorithm.step)
    state, metrics = step(KEY, fedp3.HParams(GAMMA), state, DATA)
    models = [numpy_client(PARAMS, plan, i, 2, "free")[0] for i in range(N)]
    close(state.clients.head["c"], jax.tree.map(lambda *rows: np.stack(rows), *[model["c"] for model in models]))
    close(state.server.params["c"], jax.tree.map(lambda leaf: leaf.mean(axis=0), state.clients.head["c"]))
    bits = fedp3.ledger(plan, PARAMS, local_head=True)
    assert metrics.bits_down == bits["down"].mean() < fedp3.ledger(plan, PARAMS)["down"].mean()
    again, _ = step(KEY, fedp3.HParams(GAMMA), state, DATA)
    start = {
        **as_numpy(state.server.params),
        "c": jax.tree.map(lambda leaf: np.array(leaf[1]), state.clients.head["c"]),
    }
    wanted, _ = numpy_client(start, plan, 1, 2, "free")
    close(jax.tree.map(lambda leaf: leaf[1], again.clients.head["c"]), wanted["c"])
    client = jax.tree.map(lambda leaf: leaf[1], again.clients)
    deployed = fedp3.deployed(again.server, client)
    close(deployed, {**again.server.params, "c": client.head["c"]}, rtol=0)


def test_frozen_layers_are_not_differentiated():
    def flops(plan):
        algorithm = fedp3.fedp3(wide, plan, steps=1)
        step = jax.jit(algorithm.step).lower(
            KEY, fedp3.HParams(GAMMA), algorithm.init(big, IDS[:1]), {"x": jnp.ones((1, 8, 64))}
        )
        cost: Any = step.compile().cost_analysis()
        return (cost[0] if isinstance(cost, list) else cost)["flops"]

    def wide(params, rows):
        return jnp.mean((rows["x"] @ params["a"] @ params["b"] @ params["c"]) ** 2)

    big = {name: jnp.ones((64, 64)) for name in "abc"}
    names = layers.named(big, final="c")
    everything, last = (flops(plans.plan(names, [chosen])) for chosen in (["a", "b", "c"], ["c"]))
    assert last < 0.75 * everything


@pytest.mark.parametrize("over", [rounds.one_by_one, jax.vmap], ids=["branches", "vmap"])
def test_one_program_serves_several_plans(over):
    several = plans.kinds([plans.everything(LAYERS, N), MIXED])
    method = fedp3.Method(loss, several, steps=2, over=over)
    algorithm = method.algorithm()
    start = algorithm.init(PARAMS, IDS, plan=MIXED)
    state, metrics = jax.jit(algorithm.step)(KEY, fedp3.HParams(GAMMA), start, DATA)
    wanted, expected = one_round(over=over)
    close(state.server, wanted.server)
    close(metrics, expected)
    data = jax.tree.map(lambda leaf: leaf[1], DATA)
    plain = fedp3.Method(loss, MIXED, steps=2)
    message = method.messages(KEY, fedp3.HParams(GAMMA), start, data, 1)
    assert message == plain.messages(KEY, fedp3.HParams(GAMMA), plain.init(PARAMS, IDS), data, 1)
    few = fedp3.Method(loss, plans.everything(LAYERS, N), steps=2)
    with pytest.raises(ValueError, match=r"client 0 trains \['a', 'c'\]; allowed: the layer sets of the method's plan"):
        few.init(PARAMS, IDS, plan=MIXED)
    with pytest.raises(ValueError, match=r"plan has the layers .*; allowed: those of the method"):
        few.init(PARAMS, IDS, plan=MIXED._replace(layers=LAYERS._replace(names=("x", "y", "z"))))
    with pytest.raises(ValueError, match=r"client 0 has keep=0.6; allowed: \[0.5, 0.7, 1.0\]"):
        algorithm.init(PARAMS, IDS, plan=plans.everything(LAYERS, N)._replace(keep=np.full(N, 0.6)))
    with pytest.raises(ValueError, match="ids: 4 clients, but the plan is for 2"):
        algorithm.init(PARAMS, IDS, plan=plans.everything(LAYERS, 2))
