"""Bad arguments of `commjax.parallel`; that devices do not change a trajectory is in `tests/conformance`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commjax import parallel
from tests.registry import build

CASE = build("gd")
KEY = jax.random.key(0)


def six_clients():
    state = CASE.algorithm.init(CASE.params, CASE.ids[:6])
    return state, jax.tree.map(lambda leaf: leaf[:6], CASE.data)


@pytest.mark.parametrize("count", [-1, 0, 9])
def test_a_number_of_devices_that_is_not_there_is_refused(count):
    message = rf"num_devices must be between 1 and the 8 available, got {count}"
    with pytest.raises(ValueError, match=message):
        parallel.client_mesh(count)
    with pytest.raises(ValueError, match=message):
        parallel.pmap_step(CASE.algorithm, count)


def test_the_mesh_has_the_first_devices_and_by_default_all():
    assert parallel.client_mesh().size == jax.device_count() == 8
    assert list(parallel.client_mesh(3).devices) == jax.devices()[:3]
    assert parallel.client_mesh(2).axis_names == (parallel.AXIS,)


@pytest.mark.parametrize("devices", [4, 8])
def test_clients_that_do_not_divide_over_the_devices_are_refused(devices):
    state, data = six_clients()
    message = f"6 clients do not divide over {devices} devices"
    mesh = parallel.client_mesh(devices)
    with pytest.raises(ValueError, match=message):
        parallel.shard(state, mesh)
    for step in (parallel.shard_step(CASE.algorithm, mesh), parallel.pmap_step(CASE.algorithm, devices)):
        with pytest.raises(ValueError, match=message):
            step(KEY, CASE.hparams, state, data)


def test_splitting_rows_over_devices_keeps_their_order_and_merging_undoes_it():
    rows = {"id": jnp.arange(6), "x": jnp.arange(24.0).reshape(6, 2, 2)}
    split = parallel.split_rows(rows, 3)
    assert split["id"].tolist() == [[0, 1], [2, 3], [4, 5]] and split["x"].shape == (3, 2, 2, 2)
    merged = parallel.merge_rows(split)
    jax.tree.map(np.testing.assert_array_equal, merged, rows)


def test_a_sharded_state_has_the_server_everywhere_and_each_client_once():
    state = parallel.shard(CASE.init(), parallel.client_mesh(4))
    assert state.server.params.sharding.is_fully_replicated
    pieces = state.clients.shift.addressable_shards
    assert sorted(piece.data.shape[0] for piece in pieces) == [2, 2, 2, 2]
    assert sorted(int(i) for piece in state.clients.id.addressable_shards for i in piece.data) == list(range(8))
    jax.tree.map(np.testing.assert_array_equal, state, CASE.init())
