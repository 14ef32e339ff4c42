"""FedP3's payloads: what leaves a client, what it can read, and that the ledger counts these bytes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commjax.algorithms import fedp3
from commjax.algorithms.fedp3 import local_pruning, plans, submodels
from commjax.algorithms.fedp3 import wire as fedp3_wire
from commjax.core import tree
from tests.algorithms.fedp3_cases import (
    DATA,
    GAMMA,
    IDS,
    KEY,
    LAYERS,
    MIXED,
    PARAMS,
    N,
    close,
    loss,
    numpy_client,
    one_round,
    played,
)

pytestmark = pytest.mark.long


@pytest.mark.parametrize(
    "pruning, others",
    [(submodels.magnitude(), "frozen"), (submodels.magnitude(), "free"), (submodels.random(), "frozen")],
    ids=["magnitude", "magnitude, free", "random"],
)
def test_what_is_not_in_l_i_never_leaves_and_the_ledger_is_the_bytes(pruning, others):
    how = {"steps": 2, "pruning": pruning, "others": others}
    state, metrics = one_round(**how)
    method = fedp3.Method(loss, MIXED, **how)
    start, ledger = method.init(PARAMS, IDS), method.ledger(PARAMS)
    ups, downs = [], []
    total = {name: [] for name in LAYERS.names}
    for i in range(N):
        data = jax.tree.map(lambda leaf, i=i: leaf[i], DATA)
        down, up = method.messages(KEY, fedp3.HParams(GAMMA), start, data, i)
        ups.append(8 * len(up))
        downs.append(8 * len(down))
        # Exactly the layers of L_i can be read, and they are the whole message.
        part = fedp3_wire.read_up(fedp3_wire.format_of(MIXED, i, PARAMS, pruning=pruning), up, PARAMS)
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
    server = submodels.server_masks(MIXED, pruning, KEY, PARAMS)
    for i in range(N):
        ratio, form = [0, 1, 1, 2][i], fedp3_wire.format_of(MIXED, i, PARAMS, pruning=pruning)
        sent, masks = submodels.sent(MIXED, MIXED.trained[i], KEY, ratio, PARAMS, server)
        data = fedp3_wire.write_down(form, sent, masks)
        found = fedp3_wire.read_down(form, data, PARAMS, masks)
        close(found, sent, rtol=0)
        for name, mine in zip(LAYERS.names, MIXED.trained[i]):
            kernel = np.asarray(sent[name]["kernel"])
            assert (kernel != 0).sum() == (kernel.size if mine else int(MIXED.keep[i] * kernel.size))
            np.testing.assert_array_equal(sent[name]["bias"], PARAMS[name]["bias"])
        with pytest.raises(ValueError, match="was expected"):
            fedp3_wire.read_down(form, data + b"\0", PARAMS, masks)
        up = fedp3_wire.write_up(form, PARAMS)
        with pytest.raises(ValueError, match=f"a message up of {len(up)} bytes was expected, got {len(up) + 1}"):
            fedp3_wire.read_up(form, up + b"\0", PARAMS)


def test_of_a_large_layer_as_many_weights_are_kept_as_the_ledger_charges():
    """1 - k / size, a float, gave one weight more here: the payload was longer than its bits."""
    shape = 17744, 1024
    found = jnp.arange(np.prod(shape), dtype=jnp.float32).reshape(shape)
    assert int(submodels._best(found, 0.95).sum()) == submodels.kept(found.size, 0.95) == 17_261_363


def test_an_ordered_submodel_of_one_width_travels_alone_and_is_what_the_ledger_counts():
    widths = local_pruning.ordered(np.array([0.5, 1.0, 0.5, 0.75]), 1, everywhere=True)
    plan = plans.everything(LAYERS, N)
    how = {"steps": 2, "local_pruning": widths}
    state, metrics = played("everything", **how)
    method = fedp3.Method(loss, plan, **how)
    start, ledger = method.init(PARAMS, IDS), method.ledger(PARAMS)
    parts = []
    for i in range(N):
        data = jax.tree.map(lambda leaf, i=i: leaf[i], DATA)
        down, up = method.messages(KEY, fedp3.HParams(GAMMA), start, data, i)
        assert (8 * len(up), 8 * len(down)) == (ledger["up"][i], ledger["down"][i])
        form = fedp3_wire.format_of(plan, i, PARAMS, pruning=submodels.magnitude(), local=widths)
        parts.append(fedp3_wire.read_up(form, up, PARAMS))
        low = [0, 2, 0, 1][i]  # of 0.5, 0.75 and 1
        wanted = local_pruning.local_submodel(plan, widths, KEY, low, plan.trained[i], PARAMS)
        close(fedp3_wire.read_down(form, down, PARAMS), wanted, rtol=0)
    # Half of 5-4-3-2: 5 x 2 + 2, 2 x 2 + 2 and 2 x 2 + 2 numbers.
    assert ledger["up"][0] == 64 * (12 + 6 + 6) and ledger["up"][1] == 64 * tree.size(PARAMS)
    assert metrics.bits_up == ledger["up"].mean() and metrics.bits_down == ledger["down"].mean()
    close(state.server.params, jax.tree.map(lambda *rows: sum(rows) / N, *parts))
    some = local_pruning.ordered(0.5, 1)  # layers outside L_i only; where P_i prunes, its mask is what travels
    drawn = fedp3.ledger(MIXED, PARAMS, local_pruning=some)
    plain = fedp3.ledger(MIXED, PARAMS)
    np.testing.assert_array_equal(drawn["up"], plain["up"])
    assert drawn["down"][3] == plain["down"][3] and (drawn["down"][:3] < plain["down"][:3]).all()
    several = local_pruning.ordered(0.5, 3, everywhere=True)
    np.testing.assert_array_equal(fedp3.ledger(plan, PARAMS, local_pruning=several)["up"], 64 * tree.size(PARAMS))
