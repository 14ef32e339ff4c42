"""FedP3's submodels: masks by score and at random, uniform pruning, ordered dropout."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commjax.algorithms import fedp3
from commjax.algorithms.fedp3 import layers, local_pruning, plans, submodels
from commjax.models import layered, networks
from commjax.pruning import scores
from tests.algorithms.fedp3_cases import KEY, LAYERS, PARAMS, N, close, one_round, played

pytestmark = pytest.mark.long


def test_scores_of_the_pruning_package_make_masks():
    plan = plans.plan(LAYERS, [["c"]], 0.5)
    kernel = PARAMS["b"]["kernel"]
    made: Any = submodels.server_masks(plan, submodels.by_score(scores.ri()), KEY, PARAMS)
    found = np.asarray(scores.ri()(kernel))
    np.testing.assert_array_equal(made[3][0], found >= np.sort(found.ravel())[6])
    assert made[0] is None and made[5] is None  # a bias; the layer that the client trains
    each = submodels.by_score({"a": scores.magnitude(), "b": scores.ri()})
    mixed: Any = submodels.server_masks(plan, each, KEY, PARAMS)
    np.testing.assert_array_equal(mixed[3], made[3])
    first = np.abs(np.asarray(PARAMS["a"]["kernel"]))
    np.testing.assert_array_equal(mixed[1][0], first >= np.sort(first.ravel())[10])


def test_scores_that_need_activations_take_them_from_a_batch_of_the_server():
    params = CNN.init(jax.random.key(0), IMAGES)["params"]
    names = layered.layers(params)
    plan = plans.plan(names, [["ffc"]], 0.5)
    statistics = layered.statistics(CNN, IMAGES)
    made: Any = submodels.server_masks(plan, submodels.by_score(scores.wanda(), statistics=statistics), KEY, params)
    masks = dict(zip(layers.paths_of(params), made))
    assert masks["ffc/kernel"] is None and masks["fc1/kernel"].sum() == 12
    # By hand: inputs of conv2 are 5 x 5 patches of what conv1 and pooling leave, here one place of 5 x 5 in 6 x 6.
    first = np.asarray(jax.nn.relu(networks.conv(4, 5, dtype=jnp.float64).apply({"params": params["conv1"]}, IMAGES)))
    pooled = first.reshape(2, 6, 2, 6, 2, 4).max(axis=(2, 4))
    patches = np.stack([pooled[:, i : i + 5, j : j + 5] for i in range(2) for j in range(2)])
    score = np.abs(params["conv2"]["kernel"]) * np.sqrt((patches**2).sum(axis=(0, 1)))[..., None]
    wanted = score >= np.sort(score.ravel())[score.size // 2]
    np.testing.assert_array_equal(masks["conv2/kernel"][0], wanted)
    for needy in (scores.wanda(), scores.ria()):
        with pytest.raises(ValueError, match="stats"):
            submodels.server_masks(plan, submodels.by_score(needy), KEY, params)
    with pytest.raises(ValueError, match="statistics has none of 'conv1/kernel'; allowed: of every pruned kernel"):
        submodels.server_masks(plan, submodels.by_score(scores.wanda(), statistics=lambda p: {}), KEY, params)


def test_random_masks_differ_between_clients_and_rounds_and_cost_no_positions():
    plan = plans.plan(LAYERS, [["c"]] * 2, 0.5)
    masks = [submodels.client_mask(plan, jax.random.key(k), 0, 1, PARAMS["a"]["kernel"], None) for k in range(2)]
    assert (masks[0] != masks[1]).any() and masks[0].sum() == masks[1].sum() == 10
    drawn, made = (fedp3.ledger(plan, PARAMS, how)["down"] for how in (submodels.random(), submodels.magnitude()))
    np.testing.assert_array_equal(made - drawn, 24 + 16)  # two bitmaps of 20 and 12 bits, in whole bytes


@pytest.mark.parametrize("kind, others", [("uniform", "frozen"), ("ordered", "masked")])
def test_local_pruning_acts_on_the_layers_outside_l_i_only(kind, others):
    how = {"steps": 2, "others": others, "local_pruning": getattr(local_pruning, kind)(0.4, 3)}
    pruned, plain = one_round(over=jax.vmap, **how)[0], one_round(over=jax.vmap, steps=2, others=others)[0]
    assert np.abs(pruned.server.params["c"]["kernel"] - plain.server.params["c"]["kernel"]).max() > 1e-4
    whole, _ = one_round("everything", over=jax.vmap, **how)
    close(whole.server, one_round("everything", over=jax.vmap)[0].server, rtol=0)
    close(one_round(**how)[0].server, pruned.server)


def test_ordered_dropout_keeps_the_first_inputs_and_outputs_and_both_ends_whole():
    plan = plans.plan(LAYERS, [["c"]])
    ones = jax.tree.map(jnp.ones_like, PARAMS)
    half = local_pruning.ordered(0.5, 1, everywhere=True)
    found = local_pruning.local_submodel(plan, half, KEY, 0, plan.trained[0], ones)
    a, b, c = (np.asarray(found[name]["kernel"]) for name in "abc")
    assert a[:, :2].all() and not a[:, 2:].any()  # 5 inputs whole, 2 of 4 outputs
    assert b[:2, :2].all() and b.sum() == 4  # 2 of 4, ceil(1.5) of 3
    assert c[:2].all() and not c[2:].any()  # ceil(1.5) of 3 inputs, the outputs whole
    assert found["a"]["bias"].tolist() == [1, 1, 0, 0] and found["c"]["bias"].tolist() == [1, 1]
    own = local_pruning.local_submodel(plan, local_pruning.ordered(0.5, 1), KEY, 0, plan.trained[0], ones)
    np.testing.assert_array_equal(own["c"]["kernel"], ones["c"]["kernel"])
    np.testing.assert_array_equal(own["a"]["kernel"], a)


CNN = layered.LayeredCnn(classes=3, width=4, hidden=6, dtype=jnp.float64)
IMAGES = jnp.asarray(np.random.default_rng(7).random((2, 16, 16, 1)))


def test_ordered_dropout_of_a_cnn_is_the_network_of_the_first_channels():
    """FjORD's submodel: half of the channels and features have the outputs of a network of half the width."""
    params = CNN.init(jax.random.key(0), IMAGES)["params"]
    names = layered.layers(params)
    half = local_pruning.ordered(0.5, 1, everywhere=True)
    cut = local_pruning.local_submodel(plans.everything(names, 1), half, KEY, 0, np.ones(5, bool), params)
    small: Any = {
        "conv1": {"kernel": params["conv1"]["kernel"][..., :2], "bias": params["conv1"]["bias"][:2]},
        "conv2": {"kernel": params["conv2"]["kernel"][:, :, :2, :2], "bias": params["conv2"]["bias"][:2]},
        "fc1": {"kernel": params["fc1"]["kernel"].reshape(1, 1, 4, 6)[:, :, :2, :3].reshape(2, 3)},
        "fc2": {"kernel": params["fc2"]["kernel"][:3, :3]},
        "ffc": {"kernel": params["ffc"]["kernel"][:3]},
    }
    narrow = layered.LayeredCnn(classes=3, width=2, hidden=3, dtype=jnp.float64)
    np.testing.assert_allclose(
        CNN.apply({"params": cut}, IMAGES), narrow.apply({"params": small}, IMAGES), rtol=1e-12, atol=1e-12
    )
    # An image of 2 x 2 places: channel c of a place is input 4 place + c.
    wide = {"a": jnp.ones((3, 3, 1, 4)), "b": jnp.ones((16, 6)), "c": jnp.ones((6, 2))}
    plan = plans.everything(layers.named(wide, final="c"), 1)
    found = local_pruning.local_submodel(plan, half, KEY, 0, plan.trained[0], wide)
    assert np.flatnonzero(np.asarray(found["b"])[:, 0]).tolist() == [0, 1, 4, 5, 8, 9, 12, 13]


def test_uniform_pruning_keeps_each_weight_with_probability_q():
    big = {"a": {"kernel": jnp.ones((300, 201)), "bias": jnp.ones(201)}, "c": {"kernel": jnp.ones((201, 2))}}
    plan = plans.plan(layers.named(big, final="c"), [["c"]])
    found = local_pruning.local_submodel(plan, local_pruning.uniform(0.3, 1), KEY, 0, plan.trained[0], big)
    assert abs(float(found["a"]["kernel"].mean()) - 0.3) < 0.01
    assert found["a"]["bias"].all() and found["c"]["kernel"].all()


def drawn(pruning, low, key):
    plan = plans.everything(LAYERS, 2)
    return jnp.asarray(local_pruning._grid(pruning, plan))[low, local_pruning._level(pruning, key)]


def test_ratios_are_uniform_on_an_even_grid_up_to_one():
    pruning = local_pruning.uniform(np.array([0.4, 0.8]), 3)
    draws = jax.vmap(lambda key: drawn(pruning, 0, key))(jax.random.split(KEY, 900))
    values, counts = np.unique(np.round(np.asarray(draws), 12), return_counts=True)
    np.testing.assert_allclose(values, [0.4, 0.7, 1.0])
    assert counts.min() > 240
    assert float(drawn(local_pruning.ordered(np.array([0.4, 0.8]), 1), 1, KEY)) == 0.8


def test_fjord_s_submodels_are_a_configuration():
    # HeteroFL's widths, one a client: what is outside the submodel comes back as it was.
    widths = local_pruning.ordered(np.full(N, 0.5), 1, everywhere=True)
    state, _ = played("everything", local_pruning=widths)
    moved = jax.tree.map(lambda new, old: np.asarray(new != old), state.server.params, PARAMS)
    assert moved["b"]["kernel"][:2, :2].all() and moved["b"]["kernel"].sum() == 4
    assert moved["a"]["kernel"][:, :2].all() and not moved["a"]["kernel"][:, 2:].any()


def test_the_smallest_ratio_can_be_the_keep_ratio():
    keep = np.array([0.5, 0.9, 0.5, 0.7])
    plan = plans.everything(LAYERS, N)._replace(keep=keep)
    for make in (local_pruning.uniform, local_pruning.ordered):
        ours, theirs = make("keep", 3), make(keep, 3)
        np.testing.assert_array_equal(local_pruning._grid(ours, plan), local_pruning._grid(theirs, plan))
        numbers = local_pruning.low_numbers(ours, plan, plan)
        assert numbers.tolist() == local_pruning.low_numbers(theirs, plan, plan).tolist() == [0, 2, 0, 1]


def test_another_word_than_keep_is_refused():
    with pytest.raises(ValueError, match="low='least'; allowed: 'keep', or numbers"):
        local_pruning._checked(local_pruning.fixed()._replace(low="least"))
