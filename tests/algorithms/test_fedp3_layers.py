"""Named layers and plans: what belongs to which, who trains what, and the thesis's counts."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commjax.algorithms.fedp3 import layers, plans
from commjax.algorithms.fedp3.layers import Layers
from commjax.models import layered, networks, resnet

pytestmark = pytest.mark.long

FIVE = Layers(("conv1", "conv2", "fc1", "fc2", "ffc"), (0, 1, 2, 3, 4))
CIFAR10 = np.array([4864, 102464, 1638400, 1048576, 10240])
PARAMS = {
    "Dense_10": {"bias": jnp.ones(2), "kernel": jnp.ones((3, 2))},
    "Dense_2": {"kernel": jnp.ones((4, 3), jnp.float32)},
    "head": jnp.ones((2, 1)),
}


def shapes(module, *image):
    return jax.eval_shape(module.init, jax.random.key(0), jnp.ones((1, *image), jnp.float32))["params"]


def test_top_level_modules_are_layers_in_natural_order_with_the_final_one_last():
    found = layers.named(PARAMS, final="Dense_2")
    assert found == Layers(("Dense_10", "head", "Dense_2"), (0, 0, 2, 1))
    assert layers.named(PARAMS, final="head").names == ("Dense_2", "Dense_10", "head")
    assert layers.sizes(found, PARAMS).tolist() == [8, 2, 12]
    assert layers.bits(found, PARAMS).tolist() == [8 * 64, 2 * 64, 12 * 32]


def test_groups_name_layers_of_one_s_own_in_their_order():
    groups = {"weights": ["Dense_2", "Dense_10/kernel"], "rest": ["Dense_10/bias"], "out": ["head"]}
    assert layers.named(PARAMS, final="out", groups=groups) == Layers(("weights", "rest", "out"), (1, 0, 0, 2))


@pytest.mark.parametrize(
    "groups, words",
    [
        ({"a": ["Dense_2"], "out": ["head"]}, "Dense_10/bias is in \\[\\]; allowed: exactly one"),
        ({"a": ["Dense_2", "Dense_10"], "b": ["Dense_10/bias"], "out": ["head"]}, "Dense_10/bias is in \\['a', 'b'\\]"),
        ({"a": ["Dense_2", "Dense_10", "Dense_1"], "out": ["head"]}, "no leaf at \\['Dense_1'\\]"),
    ],
)
def test_groups_that_are_no_partition_are_refused(groups, words):
    with pytest.raises(ValueError, match=words):
        layers.named(PARAMS, final="out", groups=groups)


def test_an_unknown_layer_is_named_beside_the_known_ones():
    with pytest.raises(ValueError, match="final: no layer 'fc9'; allowed: 'Dense_2', 'Dense_10', 'head'"):
        layers.named(PARAMS, final="fc9")
    with pytest.raises(ValueError, match="layers: no layer 'fc3'; allowed: 'conv1', 'conv2', 'fc1', 'fc2', 'ffc'"):
        plans.plan(FIVE, [["ffc"], ["fc3", "ffc"]])
    with pytest.raises(ValueError, match="name: no layer 'fc3'"):
        plans.holding(plans.everything(FIVE, 2), "fc3")


def test_a_tree_is_split_into_parts_and_joined_again():
    found = layers.named(PARAMS, final="head")
    inside, outside = layers.split(found, PARAMS, [False, True, False])
    assert inside["Dense_2"] == {"kernel": None} and outside["Dense_10"] == {"bias": None, "kernel": None}
    assert len(jax.tree.leaves(inside)) == 2 and len(jax.tree.leaves(outside)) == 2
    assert layers.join(inside, outside) == layers.join(outside, inside) == PARAMS
    assert layers.by_leaf(found, PARAMS, ["a", "b", "c"])["Dense_10"] == {"bias": "b", "kernel": "b"}


def test_a_client_without_layers_and_ratios_outside_0_to_1_are_refused():
    with pytest.raises(ValueError, match="client 1 has no layers; allowed: at least one of conv1"):
        plans.plan(FIVE, [["ffc"], []])
    with pytest.raises(ValueError, match="trained is empty"):
        plans.plan(FIVE, [])
    for keep in (0.0, 1.01, -0.5, float("nan"), np.full(3, 0.5), np.array([0.5, 0.0])):
        with pytest.raises(ValueError, match="allowed: 0 < keep <= 1, one number or one for each of 2 clients"):
            plans.plan(FIVE, [["ffc"], ["fc1", "ffc"]], keep)
    with pytest.raises(
        ValueError, match="client 1 does not train the final layer 'ffc'; allowed: plans in which all do"
    ):
        plans.plan(FIVE, [["ffc"], ["fc1"]])
    for n in (0, -1):
        for make in (
            plans.everything,
            lambda *a: plans.opu(*a, 1),
            lambda *a: plans.consecutive(*a, 1),
            lambda *a: plans.without(*a, [["fc1"]]),
        ):
            with pytest.raises(ValueError, match=f"n={n}; allowed: at least 1 client"):
                make(FIVE, n)
    with pytest.raises(ValueError, match="no clients"):
        plans.checked(FIVE, np.ones((0, 5), bool))
    with pytest.raises(ValueError, match="trained has shape"):
        plans.checked(FIVE, np.ones((2, 4), bool))


@pytest.mark.parametrize("counts", [(3,), (2,), (1,), (1, 2, 3), (2, 3)])
def test_opu_draws_so_many_layers_uniformly_and_always_the_final_one(counts):
    found = plans.opu(FIVE, 4000, *counts, seed=1, keep=0.9)
    assert found.trained[:, -1].all() and (found.keep == 0.9).all()
    numbers, occurs = np.unique(found.trained.sum(axis=1) - 1, return_counts=True)
    assert tuple(numbers) == counts
    assert np.abs(occurs / 4000 - 1 / len(counts)).max() < 0.03
    assert np.abs(found.trained[:, :-1].mean(axis=0) - np.mean(counts) / 4).max() < 0.03
    again = plans.opu(FIVE, 4000, *counts, seed=2)
    assert (again.trained != found.trained).any()


def test_lower_b_is_opu_of_one_and_bad_counts_are_refused():
    np.testing.assert_array_equal(plans.lower_b(FIVE, 9, seed=3).trained, plans.opu(FIVE, 9, 1, seed=3).trained)
    for counts in ((), (0,), (5,), (2, 5)):
        with pytest.raises(ValueError, match="allowed: numbers from 1 to the 4 layers"):
            plans.opu(FIVE, 3, *counts)


def test_the_released_assignment_is_by_client_number():
    found = plans.consecutive(FIVE, 100, 2).trained
    assert found[:25, [0, 1]].all() and not found[:25, [2, 3]].any()
    assert found[75:, [3, 0]].all() and not found[75:, [1, 2]].any() and found[:, 4].all()
    with pytest.raises(ValueError, match="count=5; allowed: 1 to the 4"):
        plans.consecutive(FIVE, 100, 5)


def test_without_leaves_out_one_of_the_sets():
    found = plans.without(FIVE, 500, [["fc1"], ["fc2", "conv1"]], keep=0.5)
    assert {tuple(row) for row in found.trained} == {(True, True, False, True, True), (False, True, True, False, True)}
    assert 180 < (~found.trained[:, 2]).sum() < 320
    with pytest.raises(ValueError, match="sets is empty"):
        plans.without(FIVE, 3, [])


def test_kept_counts_are_rounded_down_but_never_to_nothing():
    assert [layers.kept(100, 0.29), layers.kept(9, 0.9), layers.kept(5, 0.1), layers.kept(7, 1.0)] == [29, 8, 1, 7]


def test_kinds_are_the_different_clients_of_several_plans():
    drawn = [plans.lower_b(FIVE, 3, keep=0.7), plans.opu(FIVE, 2, 3, keep=0.9)]
    found = plans.kinds(drawn)
    wanted = {(tuple(row), keep) for plan in drawn for row, keep in zip(plan.trained.tolist(), plan.keep.tolist())}
    assert {(tuple(row), keep) for row, keep in zip(found.trained.tolist(), found.keep.tolist())} == wanted
    assert len(found.keep) == len(wanted)
    other = Layers(("a", "ffc"), (0, 1))
    for several in ([], [found, plans.everything(other, 2)]):
        words = f"{len(several)} plans; allowed: at least one, and all of the same layers"
        with pytest.raises(ValueError, match=words):
            plans.kinds(several)


def test_a_plan_as_data_says_which_branch_and_which_ratio():
    assert plans.everything(FIVE, 1).trained.tolist() == [[True] * 5]
    plan = plans.lower_b(FIVE, 6, keep=np.array([0.7, 0.5, 0.7, 1.0, 0.5, 0.5]))
    found = layers.assigned(plan, plan, np.zeros(6, int), jnp.arange(6)[::-1])
    np.testing.assert_array_equal(found.trained, plan.trained[::-1])
    np.testing.assert_array_equal(layers.layer_sets(plan)[found.layer_set], plan.trained[::-1])
    np.testing.assert_array_equal(layers.ratios(plan)[found.ratio], plan.keep[::-1])
    layers.check_clients(plan, 6)
    with pytest.raises(ValueError, match="ids: 2 clients, but the plan is for 6"):
        layers.check_clients(plan, 2)


def test_plans_are_drawn_from_seed_0_and_prune_nothing_unless_told():
    for make in (
        lambda **how: plans.opu(FIVE, 40, 2, **how),
        lambda **how: plans.lower_b(FIVE, 40, **how),
        lambda **how: plans.without(FIVE, 40, [["fc1"], ["fc2"]], **how),
    ):
        found, told = make(), make(seed=0, keep=1.0)
        np.testing.assert_array_equal(found.trained, told.trained)
        np.testing.assert_array_equal(found.keep, told.keep)
        assert (make(seed=1).trained != found.trained).any()


def test_holders_are_counted():
    assert plans.holding(plans.plan(FIVE, [["fc1", "ffc"], ["ffc"], ["fc1", "ffc"]]), "fc1").tolist() == [0, 2]


@pytest.mark.parametrize(
    "module, image, counts",
    [
        (layered.LayeredCnn(), (32, 32, 3), [4864, 102464, 1638400, 1048576, 10240]),
        (layered.LayeredCnn(classes=100), (32, 32, 3), [4864, 102464, 1638400, 1048576, 102400]),
        (layered.LayeredCnn(side=32), (28, 28, 1), [1664, 102464, 1638400, 1048576, 10240]),
        (layered.LayeredMlp(), (28, 28, 1), [802816, 1048576, 1048576, 10240]),
    ],
    ids=["CIFAR10", "CIFAR100", "FashionMNIST", "EMNIST-L"],
)
def test_the_table_s_networks_have_the_table_s_counts(module, image, counts):
    params = shapes(module, *image)
    found = layered.layers(params)
    assert found.names[-1] == "ffc"
    assert layers.sizes(found, params).tolist() == counts


# fedp3_params of the goldens: what a LowerB client sends, (max - min) / min in percent, and what it deploys.
@pytest.mark.parametrize(
    "sizes, spread",
    [
        ([4864, 102464, 1638400, 1048576, 10240], 10815.25),
        ([4864, 102464, 1638400, 1048576, 102400], 1522.91),
        ([1664, 102464, 1638400, 1048576, 10240], 13749.46),
        ([802816, 1048576, 1048576, 10240], 30.23),
    ],
)
def test_the_printed_ratios_are_percentages_of_uplink_sizes(sizes, spread):
    layer_set = Layers(tuple(map(str, range(len(sizes)))), tuple(range(len(sizes))))
    one_each = plans.plan(layer_set, [[name, layer_set.names[-1]] for name in layer_set.names[:-1]])
    assert round(plans.relative_spread(plans.uplink_sizes(one_each, np.array(sizes))), 2) == spread


def test_deployed_sizes_and_expected_shares_are_the_goldens():
    one_each = plans.plan(FIVE, [[name, "ffc"] for name in FIVE.names[:-1]], 0.5)
    assert plans.uplink_sizes(one_each, CIFAR10).tolist() == [15104, 112704, 1648640, 1058816]
    deployed = plans.deployed_sizes(one_each, CIFAR10)
    np.testing.assert_allclose(deployed, [1409824, 1458624, 2226592, 1931680])
    assert round(plans.relative_spread(deployed), 2) == 57.93
    assert round(100 * (1 - deployed.min() / deployed.max()), 2) == 36.68  # F3: smaller by this, not by 57.93 %
    for count, share in ((1, 0.2527384130896146), (2, 0.5018256087264097), (3, 0.7509128043632048)):
        sent = plans.uplink_sizes(plans.opu(FIVE, 20000, count), CIFAR10) / CIFAR10.sum()
        assert abs(sent.mean() - share) < 0.005
        hidden = CIFAR10[:-1].sum()
        assert share == pytest.approx((count / 4 * hidden + CIFAR10[-1]) / CIFAR10.sum(), rel=1e-12)


def test_resnet_18_has_18_layers_in_four_blocks():
    params = shapes(resnet.ResNet18(), 32, 32, 3)
    found = resnet.layers(params)
    assert len(found.names) == 18 and found.names[0] == "input" and found.names[-1] == "output"
    sizes = dict(zip(found.names, layers.sizes(found, params)))
    assert sum(sizes.values()) == 11_173_962
    assert sizes["b1_1"] == 9 * 64 * 64 + 128
    assert sizes["b2_2"] == 9 * 128 * 128 + 256 + 64 * 128 + 256  # with the skip connection
    assert sizes["b4_1"] == 9 * 256 * 512 + 1024


def test_resnet_18_shapes_and_skips():
    module = resnet.ResNet18(classes=3, width=4, groups=2)
    params = jax.tree.map(lambda leaf: jnp.full(leaf.shape, 0.01, jnp.float32), shapes(module, 8, 8, 3))
    # With every norm's scale and bias at 0 a block is its skip connection, so blocks 2 to 4 give 0, and the head its
    # bias.
    still = jax.tree.map_with_path(lambda path, leaf: leaf * 0 if "norm" in str(path) else leaf, params)
    still["output"]["bias"] = jnp.array([1.0, 2.0, 3.0], jnp.float32)
    out = jax.jit(module.apply)({"params": still}, jnp.ones((2, 8, 8, 3), jnp.float32))
    np.testing.assert_array_equal(out, [[1, 2, 3], [1, 2, 3]])


@pytest.mark.parametrize("name, dropped", [("Full", 0), ("-B2-B3 (full)", 4), ("-B2 (part)", 2), ("-B3 (part)", 2)])
def test_resnet_variants_leave_out_what_they_say(name, dropped):
    params = shapes(resnet.ResNet18(width=4, groups=2), 32, 32, 3)
    found = resnet.variant(resnet.layers(params), 40, name, seed=1)
    assert (found.keep == 0.9).all() and set((~found.trained).sum(axis=1)) == {dropped}
    out = {found.layers.names[at] for at in np.flatnonzero((~found.trained).any(axis=0))}
    assert (
        out
        == {
            "Full": set(),
            "-B2-B3 (full)": {*resnet.block_layers(2), *resnet.block_layers(3)},
            "-B2 (part)": set(resnet.block_layers(2)),
            "-B3 (part)": set(resnet.block_layers(3)),
        }[name]
    )


def test_an_unknown_variant_is_refused():
    params = shapes(resnet.ResNet18(width=4, groups=2), 32, 32, 3)
    with pytest.raises(ValueError, match="name='-B4'; allowed: 'Full'"):
        resnet.variant(resnet.layers(params), 2, "-B4")


# fedp3_resnet of the goldens (F6): a saving in layers, halved since the downlink is whole; times the keep ratio.
def test_the_printed_savings_of_resnet_are_halves_of_layer_counts():
    for dropped, saving, beside in ((2, 6.25, 15.625), (4, 12.5, 21.25)):
        assert 100 * dropped / 16 / 2 == saving
        assert 100 * (1 - 0.9 * (1 - saving / 100)) == pytest.approx(beside)


@pytest.mark.parametrize("padding, stride", [("VALID", 1), ("SAME", 1), ("SAME", 2)])
def test_statistics_measure_the_patches_of_a_convolution(padding, stride):
    module, images = networks.conv(2, 3, padding, stride=stride), np.arange(72.0, dtype=np.float32).reshape(1, 6, 6, 2)
    params = module.init(jax.random.key(0), images)["params"]
    around = {("VALID", 1): (0, 0), ("SAME", 1): (1, 1), ("SAME", 2): (0, 1)}[padding, stride]
    x = np.pad(images[0], (around, around, (0, 0)))
    places = range(0, len(x) - 2, stride)
    patches = np.stack([x[i : i + 3, j : j + 3].ravel() for i in places for j in places])
    measured = layered.statistics(module, images)(params)["kernel"]
    np.testing.assert_allclose(measured.squares.hi, (patches**2).sum(axis=0), rtol=1e-6)


def test_statistics_refuse_a_convolution_in_groups():
    module, images = nn.Conv(2, (3, 3), feature_group_count=2), jnp.ones((1, 6, 6, 2), jnp.float32)
    params = module.init(jax.random.key(0), images)["params"]
    with pytest.raises(ValueError, match="feature_group_count=2; allowed: 1"):
        layered.statistics(module, images)(params)
