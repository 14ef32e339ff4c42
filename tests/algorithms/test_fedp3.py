"""FedP3: a round against NumPy, its special cases, what goes over the wire, and what is refused."""

from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commjax.algorithms import fedavg, fedp3
from commjax.algorithms.fedp3 import aggregation, layers, plans, submodels
from commjax.algorithms.fedp3 import wire as fedp3_wire
from commjax.core import local, rounds, runner, tree
from commjax.models import layered, networks
from commjax.pruning import scores

N, ROWS, WIDTHS = 4, 6, (5, 4, 3, 2)
KEY, IDS = jax.random.key(3), jnp.arange(N)
RNG = np.random.default_rng(0)
X, Y = RNG.standard_normal((N, ROWS, WIDTHS[0])), RNG.standard_normal((N, ROWS, WIDTHS[-1]))
DATA = {"x": jnp.asarray(X), "y": jnp.asarray(Y)}
PARAMS = {
    name: {"bias": jnp.asarray(RNG.standard_normal(b) / 2), "kernel": jnp.asarray(RNG.standard_normal((a, b)) / 2)}
    for name, a, b in zip(("a", "b", "c"), WIDTHS, WIDTHS[1:])
}
LAYERS = layers.named(PARAMS, final="c")
MIXED = plans.plan(LAYERS, [["a", "c"], ["c"], ["b", "c"], ["a", "b", "c"]], np.array([0.5, 0.7, 0.7, 1.0]))
GAMMA = 0.05


def loss(params, rows):
    """A linear network: its gradients are three matrix products."""
    h = rows["x"]
    for name in ("a", "b", "c"):
        h = h @ params[name]["kernel"] + params[name]["bias"][None]
    return jnp.sum((h - rows["y"]) ** 2) / (2 * len(h))


def numpy_gradient(params, x, y):
    inputs = [x]
    for name in ("a", "b", "c"):
        inputs.append(inputs[-1] @ params[name]["kernel"] + params[name]["bias"])
    back, found = (inputs[-1] - y) / len(x), {}
    for name, h in zip(("c", "b", "a"), inputs[-2::-1]):
        found[name] = {"bias": back.sum(axis=0), "kernel": h.T @ back}
        back = back @ params[name]["kernel"].T
    return found


def as_numpy(params):
    return jax.tree.map(lambda leaf: np.array(leaf), params)


def numpy_prune(kernel, ratio):
    k = int(ratio * kernel.size + 1e-9)
    threshold = np.sort(np.abs(kernel).ravel())[kernel.size - k]
    return np.where(np.abs(kernel) >= threshold, kernel, 0.0)


def numpy_client(params, plan, i, steps, train_others=None):
    """`train_others`: None, "masked" or "free"."""
    model = as_numpy(params)
    names = [name for name, yes in zip(LAYERS.names, plan.trained[i]) if yes]
    masks = {}
    for name in set(LAYERS.names) - set(names):
        pruned = numpy_prune(model[name]["kernel"], plan.keep[i])
        masks[name] = pruned != 0
        model[name]["kernel"] = pruned
    for _ in range(steps):
        grad = numpy_gradient(model, X[i], Y[i])
        for name in LAYERS.names:
            if name not in names and train_others is None:
                continue
            mask = masks[name] if name in masks and train_others == "masked" else 1.0
            model[name]["bias"] -= GAMMA * grad[name]["bias"]
            model[name]["kernel"] -= GAMMA * grad[name]["kernel"] * mask
    return model, names


def numpy_round(params, plan, steps, weight=lambda names: 1.0, train_others=None, members: Any = range(N)):
    sent = [numpy_client(params, plan, i, steps, train_others) for i in members]
    out = as_numpy(params)
    for name in LAYERS.names:
        holders = [(weight(names), model[name]) for model, names in sent if name in names]
        total = sum(w for w, _ in holders)
        for part in ("bias", "kernel"):
            if holders:
                out[name][part] = sum(w * layer[part] for w, layer in holders) / total
    return out


def played(plan_name="mixed", steps=2, over: Any = rounds.one_by_one, **how):
    plan = MIXED if plan_name == "mixed" else plans.everything(LAYERS, N)
    algorithm = fedp3.fedp3(loss, plan, steps=steps, over=over, **how)
    return jax.jit(algorithm.step)(KEY, fedp3.HParams(GAMMA), algorithm.init(PARAMS, IDS), DATA)


one_round = cache(played)


def close(found, wanted, rtol=1e-11):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, other, rtol=rtol, atol=1e-13)


@pytest.mark.parametrize(
    "others, over",
    [(others, rounds.one_by_one) for others in ("frozen", "masked", "free")]
    + [("frozen", jax.vmap), ("masked", jax.vmap)],
)
def test_a_round_is_the_oracle_s(over, others):
    state, _ = one_round(over=over, others=others)
    wanted = numpy_round(PARAMS, MIXED, 2, train_others=None if others == "frozen" else others)
    close(state.server.params, wanted)


def test_weighted_averaging_counts_layers_and_is_normalised_over_holders():
    state, _ = one_round(aggregate=aggregation.weighted())
    close(state.server.params, numpy_round(PARAMS, MIXED, 2, weight=len))


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


def test_the_golden_weighted_mean_is_17_5():
    # Three clients with 2, 6 and 4 layers (twice the golden's, for all train the last one); the first two hold `a` and sent 10 and 20.
    six = layers.Layers(tuple("abcdef"), tuple(range(6)))
    plan = plans.plan(six, ["af", "abcdef", "bcdf"])
    sent = {name: jnp.array([10.0, 20.0, 1e9]) for name in "abcdef"}

    def mean(how):
        weight = aggregation.weights(jnp.asarray(how.logits(plan)), jnp.asarray(plan.trained))
        return float(aggregation.joined(six, sent, weight)["a"])

    assert mean(aggregation.weighted()) == pytest.approx(17.5, abs=1e-13)
    assert mean(aggregation.simple()) == 15.0
    printed = (2 * 10 + 6 * 20) / 12  # F8: the weights sum to 8/12
    assert printed == pytest.approx(11.666666666666666)


HELD = {"x": DATA["x"][1], "y": DATA["y"][1]}


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

    start = jnp.asarray(aggregation.weighted().logits(MIXED))
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
    def lower(plan):
        return aggregation.weighted().logits(plan) - 4.0

    ends = []
    for start in (aggregation.weighted(), aggregation.Aggregation("lower", lower)):
        state, _ = played(aggregate=aggregation.attention(HELD, steps=2, stepsize=0.02, start=start))
        ends.append(state)
    close(ends[1].server, ends[0].server, rtol=1e-9)
    np.testing.assert_allclose(ends[1].clients.logits + 4, ends[0].clients.logits, rtol=1e-9, atol=1e-12)


def test_learned_logits_stay_within_20():
    updates = {"a": jnp.array([1.0, -1.0])}
    one = layers.Layers(("a",), (0,))
    how = aggregation.attention(None, steps=2, stepsize=1e6)
    found = aggregation.learned(
        how,
        lambda params, _: params["a"],
        one,
        {"a": jnp.array(0.0)},
        updates,
        jnp.zeros((2, 1)),
        jnp.ones((2, 1), bool),
    )
    assert found.tolist() == [[-20.0], [20.0]]
    assert aggregation.attention(None)[3:] == (3, 1.0)


@pytest.mark.parametrize(
    "pruning, others",
    [(submodels.magnitude(), "frozen"), (submodels.magnitude(), "free"), (submodels.random(), "frozen")],
    ids=["magnitude", "magnitude, free", "random"],
)
def test_what_is_not_in_l_i_never_leaves_and_the_ledger_is_the_bytes(pruning, others):
    how = {"steps": 2, "pruning": pruning, "others": others}
    state, metrics = one_round(**how)
    start = fedp3.fedp3(loss, MIXED, **how).init(PARAMS, IDS)
    ledger = fedp3.ledger(MIXED, PARAMS, pruning)
    ups, downs = [], []
    total = {name: [] for name in LAYERS.names}
    for i in range(N):
        data = jax.tree.map(lambda leaf, i=i: leaf[i], DATA)
        down, up = fedp3.messages(KEY, fedp3.HParams(GAMMA), start, data, i, loss, MIXED, **how)
        ups.append(8 * len(up))
        downs.append(8 * len(down))
        # Exactly the layers of L_i can be read, and they are the whole message.
        part = fedp3_wire.read_up(MIXED, i, up, PARAMS)
        names = [name for name, yes in zip(LAYERS.names, MIXED.trained[i]) if yes]
        assert {name for name in LAYERS.names if jax.tree.leaves(part[name])} == set(names)
        assert len(up) == sum(leaf.nbytes for name in names for leaf in jax.tree.leaves(PARAMS[name]))
        for name in names:
            total[name].append(part[name])
        # Nor is any number of the other layers in it, neither as sent nor as trained and thrown away.
        numbers = set(np.frombuffer(up, np.float64).tolist())
        if pruning.name == "magnitude":
            local_model, _ = numpy_client(PARAMS, MIXED, i, 2, None if others == "frozen" else "free")
            for name in set(LAYERS.names) - set(names):
                for leaf in (*jax.tree.leaves(PARAMS[name]), *jax.tree.leaves(local_model[name])):
                    assert not numbers & (set(np.ravel(leaf).tolist()) - {0.0})
    np.testing.assert_array_equal(ledger["up"], ups)
    np.testing.assert_array_equal(ledger["down"], downs)
    assert metrics.bits_up == np.mean(ups) and metrics.bits_down == np.mean(downs)
    # The server needs nothing else: the bytes give its next model.
    close(state.server.params, {k: jax.tree.map(lambda *rows: sum(rows) / len(rows), *v) for k, v in total.items()})


@pytest.mark.parametrize("pruning", [submodels.magnitude(), submodels.random()], ids=lambda p: p.name)
def test_a_client_reads_what_the_server_wrote(pruning):
    made = submodels.server_masks(MIXED, pruning, KEY, PARAMS)
    for i in range(N):
        sent, masks = fedp3_wire.sent(MIXED, MIXED.trained[i], KEY, i, PARAMS, made)
        data = fedp3_wire.write_down(MIXED, pruning, i, sent, masks)
        found = fedp3_wire.read_down(MIXED, pruning, i, data, PARAMS, masks)
        close(found, sent, rtol=0)
        for name, mine in zip(LAYERS.names, MIXED.trained[i]):
            kernel = np.asarray(sent[name]["kernel"])
            assert (kernel != 0).sum() == (kernel.size if mine else int(MIXED.keep[i] * kernel.size))
            np.testing.assert_array_equal(sent[name]["bias"], PARAMS[name]["bias"])
        with pytest.raises(ValueError, match="was expected"):
            fedp3_wire.read_down(MIXED, pruning, i, data + b"\0", PARAMS, masks)
        up = fedp3_wire.write_up(MIXED, i, PARAMS)
        with pytest.raises(ValueError, match=f"a message up of {len(up)} bytes was expected, got {len(up) + 1}"):
            fedp3_wire.read_up(MIXED, i, up + b"\0", PARAMS)


def test_of_a_large_layer_as_many_weights_are_kept_as_the_ledger_charges():
    """1 - k / size, a float, gave one weight more here: the letter was longer than its price."""
    shape = 17744, 1024
    found = jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape)
    assert int(submodels._best(found, 0.95).sum()) == submodels.kept(found.size, 0.95) == 17_261_363


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
    first = np.asarray(jax.nn.relu(networks.Conv(4, 5, dtype=jnp.float64).apply({"params": params["conv1"]}, IMAGES)))
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
    how = {"steps": 2, "others": others, "local_pruning": getattr(submodels, kind)(0.4, 3)}
    pruned, plain = one_round(over=jax.vmap, **how)[0], one_round(over=jax.vmap, steps=2, others=others)[0]
    assert np.abs(pruned.server.params["c"]["kernel"] - plain.server.params["c"]["kernel"]).max() > 1e-4
    whole, _ = one_round("everything", over=jax.vmap, **how)
    close(whole.server, one_round("everything", over=jax.vmap)[0].server, rtol=0)
    close(one_round(**how)[0].server, pruned.server)


def test_ordered_dropout_keeps_the_first_inputs_and_outputs_and_both_ends_whole():
    plan = plans.plan(LAYERS, [["c"]])
    ones = jax.tree.map(jnp.ones_like, PARAMS)
    half = submodels.ordered(0.5, 1, everywhere=True)
    found = submodels.local_submodel(plan, half, KEY, 0, plan.trained[0], ones)
    a, b, c = (np.asarray(found[name]["kernel"]) for name in "abc")
    assert a[:, :2].all() and not a[:, 2:].any()  # 5 inputs whole, 2 of 4 outputs
    assert b[:2, :2].all() and b.sum() == 4  # 2 of 4, ceil(1.5) of 3
    assert c[:2].all() and not c[2:].any()  # ceil(1.5) of 3 inputs, the outputs whole
    assert found["a"]["bias"].tolist() == [1, 1, 0, 0] and found["c"]["bias"].tolist() == [1, 1]
    own = submodels.local_submodel(plan, submodels.ordered(0.5, 1), KEY, 0, plan.trained[0], ones)
    np.testing.assert_array_equal(own["c"]["kernel"], ones["c"]["kernel"])
    np.testing.assert_array_equal(own["a"]["kernel"], a)


CNN = layered.LayeredCnn(classes=3, width=4, hidden=6, dtype=jnp.float64)
IMAGES = jnp.asarray(np.random.default_rng(7).random((2, 16, 16, 1)))


def test_ordered_dropout_of_a_cnn_is_the_network_of_the_first_channels():
    """FjORD's submodel: with half of the channels and features cut away, a network of half the width has the same outputs."""
    params = CNN.init(jax.random.key(0), IMAGES)["params"]
    names = layered.layers(params)
    half = submodels.ordered(0.5, 1, everywhere=True)
    cut = submodels.local_submodel(plans.everything(names, 1), half, KEY, 0, np.ones(5, bool), params)
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
    found = submodels.local_submodel(plan, half, KEY, 0, plan.trained[0], wide)
    assert np.flatnonzero(np.asarray(found["b"])[:, 0]).tolist() == [0, 1, 4, 5, 8, 9, 12, 13]


def test_an_ordered_submodel_of_one_width_travels_alone_and_is_what_the_ledger_counts():
    widths = submodels.ordered(np.array([0.5, 1.0, 0.5, 0.75]), 1, everywhere=True)
    plan = plans.everything(LAYERS, N)
    how = {"steps": 2, "local_pruning": widths}
    state, metrics = played("everything", **how)
    start = fedp3.fedp3(loss, plan, **how).init(PARAMS, IDS)
    ledger = fedp3.ledger(plan, PARAMS, local_pruning=widths)
    parts = []
    for i in range(N):
        data = jax.tree.map(lambda leaf, i=i: leaf[i], DATA)
        down, up = fedp3.messages(KEY, fedp3.HParams(GAMMA), start, data, i, loss, plan, **how)
        assert (8 * len(up), 8 * len(down)) == (ledger["up"][i], ledger["down"][i])
        blocks = fedp3_wire.used(plan, widths, i, PARAMS)
        parts.append(fedp3_wire.read_up(plan, i, up, PARAMS, blocks))
        received = fedp3_wire.read_down(plan, submodels.magnitude(), i, down, PARAMS, blocks=blocks)
        close(received, submodels.local_submodel(plan, widths, KEY, i, plan.trained[i], PARAMS), rtol=0)
    # Half of 5-4-3-2: 5 x 2 + 2, 2 x 2 + 2 and 2 x 2 + 2 numbers.
    assert ledger["up"][0] == 64 * (12 + 6 + 6) and ledger["up"][1] == 64 * tree.size(PARAMS)
    assert metrics.bits_up == ledger["up"].mean() and metrics.bits_down == ledger["down"].mean()
    close(state.server.params, jax.tree.map(lambda *rows: sum(rows) / N, *parts))
    some = submodels.ordered(0.5, 1)  # layers outside L_i only; where P_i prunes, its mask is what travels
    drawn = fedp3.ledger(MIXED, PARAMS, local_pruning=some)
    plain = fedp3.ledger(MIXED, PARAMS)
    np.testing.assert_array_equal(drawn["up"], plain["up"])
    assert drawn["down"][3] == plain["down"][3] and (drawn["down"][:3] < plain["down"][:3]).all()
    several = submodels.ordered(0.5, 3, everywhere=True)
    np.testing.assert_array_equal(fedp3.ledger(plan, PARAMS, local_pruning=several)["up"], 64 * tree.size(PARAMS))


def test_local_models_are_what_clients_have_before_they_throw_layers_away():
    algorithm = fedp3.fedp3(loss, MIXED, steps=2)
    state = algorithm.init(PARAMS, IDS)
    for others in ("frozen", "masked", "free"):
        found = fedp3.local_models(KEY, fedp3.HParams(GAMMA), state, DATA, loss, MIXED, steps=2, others=others)
        for i in range(N):
            wanted, _ = numpy_client(PARAMS, MIXED, i, 2, None if others == "frozen" else others)
            close(jax.tree.map(lambda leaf, i=i: leaf[i], found), wanted)
    half = submodels.ordered(0.5, 3)
    cut = fedp3.local_models(
        KEY, fedp3.HParams(0.0), state, DATA, loss, MIXED, steps=1, local_pruning=half,
        use=lambda model, data: (model["a"]["kernel"], data["x"].shape),
    )[0]  # fmt: skip
    assert not np.asarray(cut)[1:3, :, 2:].any() and np.asarray(cut)[0].all()  # client 0 trains `a`


def test_uniform_pruning_keeps_each_weight_with_probability_q():
    big = {"a": {"kernel": jnp.ones((300, 201)), "bias": jnp.ones(201)}, "c": {"kernel": jnp.ones((201, 2))}}
    plan = plans.plan(layers.named(big, final="c"), [["c"]])
    found = submodels.local_submodel(plan, submodels.uniform(0.3, 1), KEY, 0, plan.trained[0], big)
    assert abs(float(found["a"]["kernel"].mean()) - 0.3) < 0.01
    assert found["a"]["bias"].all() and found["c"]["kernel"].all()


def test_ratios_are_uniform_on_an_even_grid_up_to_one():
    pruning = submodels.uniform(np.array([0.4, 0.8]), 3)
    draws = jax.vmap(lambda key: submodels._ratio(pruning, key, 0))(jax.random.split(KEY, 900))
    values, counts = np.unique(np.round(np.asarray(draws), 12), return_counts=True)
    np.testing.assert_allclose(values, [0.4, 0.7, 1.0])
    assert counts.min() > 240
    assert float(submodels._ratio(submodels.ordered(np.array([0.4, 0.8]), 1), KEY, 1)) == 0.8


def test_fjord_s_submodels_are_a_configuration():
    # HeteroFL's widths, one a client: what is outside the submodel comes back as it was.
    widths = submodels.ordered(np.full(N, 0.5), 1, everywhere=True)
    state, _ = played("everything", local_pruning=widths)
    moved = jax.tree.map(lambda new, old: np.asarray(new != old), state.server.params, PARAMS)
    assert moved["b"]["kernel"][:2, :2].all() and moved["b"]["kernel"].sum() == 4
    assert moved["a"]["kernel"][:, :2].all() and not moved["a"]["kernel"][:, 2:].any()


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
    deployed = fedp3.deployed(plan, again.server, client)
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


@pytest.mark.parametrize(
    "how, words",
    [
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"steps": 1, "cohort": 0}, "cohort must be at least 1"),
    ],
)
def test_bad_options_are_refused(how, words):
    with pytest.raises(ValueError, match=words):
        fedp3.fedp3(loss, MIXED, **how)


@pytest.mark.parametrize(
    "how, words",
    [
        ({"pruning": submodels.by_score({"a": scores.ri()})}, "score: none for layer 'b', which is pruned; allowed: one for"),
        ({"pruning": submodels.by_score({"z": scores.ri()})}, "score: no layer 'z'"),
        ({"local_pruning": submodels.ordered(np.array([0.5, 0.7]))}, "low: 2 ratios of local pruning; allowed: one number or one for each of 4"),
        ({"local_pruning": submodels.uniform(np.full(3, 0.5))}, "low: 3 ratios of local pruning"),
    ],
)  # fmt: skip
def test_options_that_do_not_fit_the_plan_are_refused(how, words):
    with pytest.raises(ValueError, match=words):
        fedp3.fedp3(loss, MIXED, steps=1, **how).init(PARAMS, IDS)


def test_a_batch_larger_than_a_client_s_rows_is_refused():
    algorithm = fedp3.fedp3(loss, MIXED, local.minibatch(7), steps=1)
    with pytest.raises(ValueError, match="sample draws batches of 7, but a client has 6 rows; allowed: at most 6"):
        algorithm.step(KEY, fedp3.HParams(GAMMA), algorithm.init(PARAMS, IDS), DATA)
    padded = {**DATA, "weights": jnp.ones((N, ROWS)).at[2, 3:].set(0.0)}
    four = fedp3.fedp3(loss, MIXED, local.minibatch(4), steps=1)
    with pytest.raises(ValueError, match="batch=4, but client 2 has 3 rows"):
        four.init(PARAMS, IDS, data=padded)
    four.init(PARAMS, IDS, data=DATA)


def test_a_plan_for_other_clients_or_params_is_refused():
    algorithm = fedp3.fedp3(loss, MIXED, steps=1)
    with pytest.raises(ValueError, match="ids: 3 clients, but the plan is for 4"):
        algorithm.init(PARAMS, jnp.arange(3))
    with pytest.raises(ValueError, match="params have 2 leaves, the plan's layers 6"):
        algorithm.init({"a": PARAMS["a"]}, IDS)


def test_bad_pruning_is_refused():
    for low in (0.0, 1.5, np.array([0.5, -1.0])):
        with pytest.raises(ValueError, match="allowed: 0 < low <= 1"):
            submodels.uniform(low)
    with pytest.raises(ValueError, match="levels=0; allowed: at least 1"):
        submodels.ordered(0.5, 0)
    with pytest.raises(ValueError, match=r"steps=-1, stepsize=1\.0; allowed"):
        aggregation.attention(HELD, steps=-1)
    with pytest.raises(ValueError, match=r"stepsize=0\.0; allowed"):
        aggregation.attention(HELD, stepsize=0.0)


def test_a_batch_larger_than_a_client_s_data_is_refused():
    local.check_batch(ROWS, DATA)
    with pytest.raises(ValueError, match="batch=7, but client 0 has 6 rows; allowed: 1 to 6"):
        local.check_batch(7, DATA)
    weights = jnp.asarray([[0.5, 0.5, 0.0], [1.0, 0.0, 0.0]])
    local.check_batch(1, {"x": jnp.ones((2, 3)), "weights": weights})
    with pytest.raises(ValueError, match="batch=2, but client 1 has 1 rows; allowed: 1 to 1"):
        local.check_batch(2, {"x": jnp.ones((2, 3)), "weights": weights})
    with pytest.raises(ValueError, match="batch=0"):
        local.check_batch(0, DATA)


@pytest.mark.parametrize("over", [rounds.one_by_one, jax.vmap], ids=["branches", "vmap"])
def test_one_program_serves_plans_that_stand_one_beneath_the_other(over):
    several = plans.beneath([plans.everything(LAYERS, N), MIXED])
    algorithm = fedp3.fedp3(loss, several, steps=2, over=over)
    start = algorithm.init(PARAMS, IDS, rows=np.arange(N) + N)
    found, metrics = jax.jit(algorithm.step)(KEY, fedp3.HParams(GAMMA), start, DATA)
    wanted, price = one_round(over=over)
    close(found.server, wanted.server)
    close(metrics, price)
    own = jax.tree.map(lambda leaf: leaf[1], DATA)
    how: Any = {"loss": loss, "steps": 2}
    message = fedp3.messages(KEY, fedp3.HParams(GAMMA), start, own, 1, plan=several, **how)
    plain = fedp3.fedp3(loss, MIXED, steps=2).init(PARAMS, IDS)
    assert message == fedp3.messages(KEY, fedp3.HParams(GAMMA), plain, own, 1, plan=MIXED, **how)
    with pytest.raises(ValueError, match=r"rows=\[0 1 2 8\]; allowed: for each of 4 clients a row of the plan, 0 to 7"):
        algorithm.init(PARAMS, IDS, rows=np.array([0, 1, 2, 8]))
    with pytest.raises(ValueError, match=r"rows=\[0 1\]; allowed: for each of 4 clients"):
        algorithm.init(PARAMS, IDS, rows=np.array([0, 1]))
