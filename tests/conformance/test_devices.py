"""Any number of devices, also one that does not divide the clients, gives every algorithm's trajectory and bytes."""

from functools import cache

import jax
import numpy as np
import pytest

from commjax.core import runner
from commjax.devices.collectives import bytes_up, collectives
from commjax.devices.mesh import client_mesh, jit_step, pmap_step, shard_step
from tests import registry
from tests.conformance.test_algorithms import KEY, close, trajectory
from tests.registry import build

pytestmark = pytest.mark.long

mesh = cache(client_mesh)
WAYS = {
    "shard_map": lambda algorithm, devices: shard_step(algorithm, mesh(devices)),
    "pmap": pmap_step,
    "sharded jit": lambda algorithm, devices: jit_step(algorithm, mesh(devices)),
}


def same_trajectory(name, way, devices, rounds=2):
    case = build(name)
    step, state = WAYS[way](case.algorithm, devices), case.init()
    for wanted in trajectory(name)[:rounds]:
        state, metrics = step(KEY, case.hparams, state, case.data)
        if registry.N % devices == 0:
            assert len(state.clients.id.devices()) == devices
        close(jax.device_get((state, metrics)), jax.device_get(wanted))


# Every algorithm on 3 devices, which do not divide the 8 clients, and the ways in turn on numbers that do.
TURNS = [(name, "shard_map", 3) for name in registry.DISTINCT]
TURNS += [
    (name, *[("pmap", 4), ("sharded jit", 2), ("shard_map", 8)][i % 3]) for i, name in enumerate(registry.DISTINCT)
]
# m-nice draws one event that all devices must agree on.
TURNS += [("ef-bv m-nice", *turn) for turn in (("shard_map", 1), ("pmap", 1), ("pmap", 5), ("sharded jit", 7))]


@pytest.mark.parametrize("name, way, devices", TURNS)
def test_devices_do_not_change_the_trajectory(name, way, devices):
    same_trajectory(name, way, devices)


EXCHANGE_ONCE = [name for name in registry.NAMES if build(name).algorithm.exchange is not None]


# EF-BV on every number of devices, every other method on one.
REDUCED = {
    1: ["ef-bv comp", "scaffold"],
    2: ["ef-bv comp", "scaffold"],
    4: ["ef-bv comp", "fedavg"],
    8: ["ef-bv comp", "ef-bv network"],
}


@pytest.mark.parametrize("devices", REDUCED)
def test_a_round_reduces_one_message_its_price_and_one_loss_in_one_operation(devices):
    moved = lambda wanted: ({}, 0) if devices == 1 else ({"all-reduce": 1}, wanted)  # noqa: E731
    for name, ways in zip(REDUCED[devices], (["shard_map", "sharded jit"], ["shard_map", "pmap"]), strict=True):
        case = build(name)
        inputs = (case.hparams, case.init(), case.data)
        wanted = bytes_up(case.algorithm, *inputs)
        for way in ways:
            found = collectives(WAYS[way](case.algorithm, devices).lower(KEY, *inputs).compile())
            # The compiler of a sharded jit decides by itself how it reduces; on one device nothing moves.
            assert found == moved(wanted) if way != "sharded jit" or devices == 1 else found.counts, name


def test_the_bytes_of_a_round_are_those_of_the_vectors_that_go_up():
    def of(name):
        case = build(name)
        return bytes_up(case.algorithm, case.hparams, case.init(), case.data)

    d, double = registry.D, 8
    assert of("ef-bv comp") == of("fedavg") == (d + 2) * double and of("scaffold") == (2 * d + 2) * double
    assert "ef-bv comp" in EXCHANGE_ONCE
    with pytest.raises(ValueError, match="exchanges more than once a round"):
        of("sppm-as")


@pytest.mark.parametrize("devices", [3, 4])
def test_a_whole_run_on_a_mesh_is_the_run_on_one_device(devices):
    case = build("ef-bv comp")
    wanted = runner.run(KEY, case.algorithm, case.hparams, case.init(), case.data, 4)
    found = runner.run(KEY, case.algorithm, case.hparams, case.init(), case.data, 4, mesh=mesh(devices))
    close(jax.device_get(found), jax.device_get(wanted))
    np.testing.assert_array_equal(found[0].clients.id, case.ids)
