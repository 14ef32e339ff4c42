"""Any number of devices, also one that does not divide the clients, gives every algorithm's trajectory; what travels is as computed."""

from functools import cache

import jax
import numpy as np
import pytest

from commjax import parallel, runner
from tests import registry
from tests.conformance.test_algorithms import ALL, KEY, close, trajectory
from tests.registry import build

mesh = cache(parallel.client_mesh)
WAYS = {
    "shard_map": lambda algorithm, devices: parallel.shard_step(algorithm, mesh(devices)),
    "pmap": parallel.pmap_step,
    "sharded jit": lambda algorithm, devices: parallel.jit_step(algorithm, mesh(devices)),
}


def same_trajectory(name, way, devices, rounds=2):
    case = build(name)
    step, state = WAYS[way](case.algorithm, devices), case.init()
    for wanted in trajectory(name)[:rounds]:
        state, metrics = step(KEY, case.hparams, state, case.data)
        close(jax.device_get((state, metrics)), jax.device_get(wanted))


# `test_algorithms` has 8, 4 and 2 devices for every algorithm, each in one way; here 3, which do not divide the 8 clients, and 1.
@ALL
def test_devices_that_do_not_divide_the_clients_do_not_change_the_trajectory(name):
    same_trajectory(name, "shard_map", 3)


# On 1 device all algorithms, the ways in turn; every way on 2, 4, 7 and 8 with some algorithms, others each time.
TURNS = [(name, list(WAYS)[i % 3], 1) for i, name in enumerate(registry.NAMES)]
MET = {("shard_map", 8), ("pmap", 4), ("sharded jit", 2)}  # by all, in `test_algorithms`
TURNS += [
    (name, way, devices)
    for i, way in enumerate(WAYS)
    for j, devices in enumerate((2, 4, 7, 8))
    if (way, devices) not in MET
    for name in registry.NAMES[4 * i + j :: 16]
]


@pytest.mark.slow
@pytest.mark.parametrize("name, way, devices", TURNS)
def test_every_way_on_every_number_of_devices_gives_the_same_trajectory(name, way, devices):
    same_trajectory(name, way, devices)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("devices", [3, 5])
def test_rows_that_fill_up_the_devices_do_not_count(way, devices):
    same_trajectory("ef-bv m-nice", way, devices, rounds=3)


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
        wanted = parallel.bytes_up(case.algorithm, *inputs)
        for way in ways:
            found = parallel.collectives(WAYS[way](case.algorithm, devices).lower(KEY, *inputs).compile())
            # The compiler of a sharded jit decides by itself how it reduces; on one device nothing moves.
            assert found == moved(wanted) if way != "sharded jit" or devices == 1 else found.counts, name


def test_the_bytes_of_a_round_are_those_of_the_vectors_that_go_up():
    def of(name):
        case = build(name)
        return parallel.bytes_up(case.algorithm, case.hparams, case.init(), case.data)

    d, double = registry.D, 8
    assert of("ef-bv comp") == of("fedavg") == (d + 2) * double and of("scaffold") == (2 * d + 2) * double
    assert "ef-bv comp" in EXCHANGE_ONCE
    with pytest.raises(ValueError, match="exchanges more than once a round"):
        of("sppm-as")


@pytest.mark.parametrize("devices", [3, 4])
def test_a_whole_run_on_a_mesh_is_the_run_on_one_device(devices):
    case = build("ef-bv comp")
    wanted = runner.run(KEY, case.algorithm, case.hparams, case.init(), case.data, 4)
    found = parallel.run(KEY, case.algorithm, case.hparams, case.init(), case.data, 4, mesh(devices))
    close(jax.device_get(found), jax.device_get(wanted))
    np.testing.assert_array_equal(found[0].clients.id, case.ids)
