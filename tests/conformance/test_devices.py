"""Any number of devices, also one that does not divide the clients, gives every algorithm's trajectory; what travels is as computed."""

from functools import cache

import jax
import numpy as np
import pytest

from commjax import parallel, runner
from tests import registry
from tests.conformance.test_algorithms import ALL, KEY, close, compile_quickly, trajectory
from tests.registry import build

__all__ = ["compile_quickly"]  # the fixture

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


# `test_algorithms` has 8 and 2 devices; here the others, of which 3 does not divide the 8 clients.
@ALL
@pytest.mark.parametrize("way, devices", [("shard_map", 3), ("sharded jit", 4)])
def test_devices_do_not_change_the_trajectory(name, way, devices):
    same_trajectory(name, way, devices)


# 2, 4 and 8 devices meet every algorithm above and in `test_algorithms`, each in one way: here 1 and 7 do, the ways in turn, and every
# way meets 2, 4 and 8 with some algorithms, others each time.
TURNS = [
    (name, list(WAYS)[(i + j) % 3], devices)
    for j, devices in enumerate((1, 7))
    for i, name in enumerate(registry.NAMES)
]
TURNS += [
    (name, way, devices)
    for i, way in enumerate(WAYS)
    for j, devices in enumerate((2, 4, 8))
    for name in registry.NAMES[(i + 3 * j) % 8 :: 8]
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


@pytest.mark.parametrize("devices", [1, 2, 4, 8])
def test_a_round_reduces_one_message_its_price_and_one_loss_in_one_operation(devices):
    jax.config.update("jax_disable_most_optimizations", False)  # XLA's own programs are what is looked at
    for name in ("ef-bv comp", "scaffold", "fedavg", "ef-bv network"):
        case = build(name)
        inputs = (case.hparams, case.init(), case.data)
        wanted = parallel.bytes_up(case.algorithm, *inputs)
        for step in (WAYS["shard_map"], WAYS["pmap"]):
            compiled = step(case.algorithm, devices).lower(KEY, *inputs).compile()
            moved = ({}, 0) if devices == 1 else ({"all-reduce": 1}, wanted)
            assert parallel.collectives(compiled) == moved, name
        # The compiler of a sharded jit decides by itself how it reduces; on one device nothing moves.
        found = parallel.collectives(WAYS["sharded jit"](case.algorithm, devices).lower(KEY, *inputs).compile())
        assert found == ({}, 0) if devices == 1 else found.counts, name
    jax.config.update("jax_disable_most_optimizations", True)


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
