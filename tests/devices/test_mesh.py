"""Bad arguments of `commjax.devices.mesh`; that devices do not change a trajectory is in `tests/conformance`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commjax.core import placement, runner
from commjax.core.base import Axis, State
from commjax.core.compiled import compiled_sweep
from commjax.devices.collectives import collectives
from commjax.devices.mesh import (
    AXIS,
    client_mesh,
    jit_step,
    merge_rows,
    pad_rows,
    pmap_step,
    shard,
    shard_step,
    split_rows,
)
from tests.registry import build

pytestmark = pytest.mark.slow

CASE = build("gd")
KEY = jax.random.key(0)


def six_clients():
    state = CASE.algorithm.init(CASE.params, CASE.ids[:6])
    return state, jax.tree.map(lambda leaf: leaf[:6], CASE.data)


@pytest.mark.parametrize("count", [-1, 0, 9])
def test_a_number_of_devices_that_is_not_there_is_refused(count):
    message = rf"num_devices must be between 1 and the 8 available, got {count}"
    with pytest.raises(ValueError, match=message):
        client_mesh(count)
    with pytest.raises(ValueError, match=message):
        pmap_step(CASE.algorithm, count)


def test_the_mesh_has_the_first_devices_and_by_default_all():
    assert client_mesh().size == jax.device_count() == 8
    assert list(client_mesh(3).devices) == jax.devices()[:3]
    assert client_mesh(2).axis_names == (AXIS,)


def test_rows_that_do_not_divide_over_the_devices_are_padded_with_the_last_and_lie_whole_on_each():
    state, _ = six_clients()
    assert pad_rows(state.clients, 4).id.tolist() == [0, 1, 2, 3, 4, 5, 5, 5]
    assert pad_rows(state.clients, 3).id is state.clients.id
    with pytest.raises(ValueError, match="6 rows do not divide over 4 devices; see pad_rows"):
        split_rows(state.clients, 4)
    placed = shard(state, client_mesh(4))
    assert placed.clients.id.sharding.is_fully_replicated
    jax.tree.map(np.testing.assert_array_equal, placed, state)


def test_only_a_given_number_of_rows_are_clients():
    state, data = six_clients()
    five = State(state.server, jax.tree.map(lambda leaf: leaf[:5], state.clients))
    wanted, metrics = runner.run(KEY, CASE.algorithm, CASE.hparams, five, jax.tree.map(lambda leaf: leaf[:5], data), 3)
    for devices in (2, 3, 4):
        mesh = client_mesh(devices)
        found, seen = runner.run(KEY, CASE.algorithm, CASE.hparams, state, data, 3, mesh=mesh, n=5)
        np.testing.assert_allclose(found.server.params, wanted.server.params, rtol=1e-12)
        np.testing.assert_allclose(seen.loss, metrics.loss, rtol=1e-12)


@pytest.mark.parametrize("n", [-1, 0, 7, 100])
def test_more_clients_than_rows_and_none_are_refused(n):
    with pytest.raises(ValueError, match=f"n must be between 1 and the 6 rows, got {n}"):
        runner.run(KEY, CASE.algorithm, CASE.hparams, *six_clients(), 1, mesh=client_mesh(2), n=n)


@pytest.mark.parametrize("name", ["gd", "sppm-as"])
@pytest.mark.parametrize(("devices", "at_once"), [(1, None), (2, None), (3, 2), (8, 1)])
def test_settings_that_are_dealt_out_to_devices_are_the_same_sweep(name, devices, at_once):
    case = build(name)
    grid = runner.stack([case.hparams._replace(gamma=case.hparams.gamma * scale) for scale in (0.2, 0.4, 0.6, 0.8, 1)])
    inputs = (jax.random.split(KEY, 2), case.algorithm, grid, case.init(), case.data, 3)
    states, metrics = runner.sweep(*inputs, mesh=client_mesh(devices), at_once=at_once)
    assert len(metrics.loss.sharding.device_set) == devices and metrics.loss.shape == (5, 2, 3)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10), (states, metrics), runner.sweep(*inputs))


def test_of_a_sweep_on_devices_nothing_travels_and_it_refuses_what_a_sweep_refuses():
    grid, keys, mesh = runner.stack([CASE.hparams] * 4), jax.random.split(KEY, 2), client_mesh(2)
    place, rest = placement.Settings(mesh, 4, 2), (CASE.init(), CASE.data, 2)
    inputs = keys, CASE.algorithm, place.deal(grid), place.start(CASE.init()), place.data(CASE.data), 2
    assert collectives(compiled_sweep.lower(*inputs, mesh=mesh).compile()).counts == {}
    states, metrics = runner.sweep(keys, CASE.algorithm, grid, *rest[:2], 0, mesh=mesh)  # no rounds
    assert metrics.loss.shape == (4, 2, 0) and np.all(states.server.round == 0)
    with pytest.raises(ValueError, match="at_once=0; allowed: at least 1"):
        runner.sweep(keys, CASE.algorithm, grid, *rest, at_once=0, mesh=mesh)
    with pytest.raises(ValueError, match="one leading axis for all"):
        runner.sweep(keys, CASE.algorithm, CASE.hparams, *rest, mesh=mesh)
    with pytest.raises(TypeError, match="a row of keys"):
        runner.sweep(KEY, CASE.algorithm, grid, *rest, mesh=mesh)


def test_a_mesh_with_other_axes_is_refused():
    mesh = jax.make_mesh((2, 2), ("data", "model"))
    for make in (shard_step, jit_step):
        with pytest.raises(ValueError, match=r"mesh must have the one axis 'clients' .*got \('data', 'model'\)"):
            make(CASE.algorithm, mesh)
    with pytest.raises(ValueError, match="mesh must have the one axis"):
        shard(CASE.init(), mesh)
    with pytest.raises(ValueError, match="mesh must have the one axis"):
        runner.run(KEY, CASE.algorithm, CASE.hparams, *six_clients(), 1, mesh=mesh)
    with pytest.raises(ValueError, match="mesh must have the one axis"):
        runner.sweep(KEY[None], CASE.algorithm, runner.stack([CASE.hparams]), *six_clients(), 1, mesh=mesh)


def test_the_names_of_padded_axes_differ_with_the_number_of_clients():
    six, seven = Axis(AXIS, 6), Axis(AXIS, 7)
    assert six != seven and hash(six) == hash(Axis(AXIS, 6)) and six == Axis(AXIS, 6)


HLO = """
  %a = (f32[3,4]{1,0}, f64[]) all-reduce(%x, %y), channel_id=1
  %b = bf16[8]{0} all-gather(%z), dimensions={0}
  %c = pred[5]{0} collective-permute(%z)
  %d = f32[100]{0} add(%x, %y)
  %e = (f32[2]{0}, f32[8]{0}) all-gather-start(%x), dimensions={0}
  %f = ((f32[2]{0}, f8e4m3fn[3]{0}), (f32[8]{0}, f8e4m3fn[12]{0})) all-gather-start(%x, %y), dimensions={0}
  %g = (bf16[7]{0}, bf16[7]{0}, u32[], u32[]) collective-permute-start(%x)
  %h = (f32[5]{0}, f32[6]{0}) all-reduce-start(%x, %y)
  %i = f8e5m2[9]{0} all-reduce(%x)
  %j = s4[3]{0} all-to-all(%x)
  %k = f32[8]{0} all-gather-done(%e)
"""


def test_bytes_of_collectives_are_read_from_the_program():
    class Compiled:
        def as_text(self):
            return HLO

    found = collectives(Compiled())
    assert found.counts == {"all-reduce": 3, "all-gather": 3, "collective-permute": 2, "all-to-all": 1}
    sizes = {"a": 3 * 4 * 4 + 8, "b": 16, "c": 5, "e": 32, "f": 32 + 12, "g": 14, "h": 20 + 24, "i": 9, "j": 2}
    assert found.bytes == sum(sizes.values())


def test_splitting_rows_over_devices_keeps_their_order_and_merging_undoes_it():
    rows = {"id": jnp.arange(6), "x": jnp.arange(24.0).reshape(6, 2, 2)}
    split = split_rows(rows, 3)
    assert split["id"].tolist() == [[0, 1], [2, 3], [4, 5]] and split["x"].shape == (3, 2, 2, 2)
    merged = merge_rows(split)
    jax.tree.map(np.testing.assert_array_equal, merged, rows)


def test_a_sharded_state_has_the_server_everywhere_and_each_client_once():
    state = shard(CASE.init(), client_mesh(4))
    assert state.server.params.sharding.is_fully_replicated
    pieces = state.clients.shift.addressable_shards
    assert sorted(piece.data.shape[0] for piece in pieces) == [2, 2, 2, 2]
    assert sorted(int(i) for piece in state.clients.id.addressable_shards for i in piece.data) == list(range(8))
    jax.tree.map(np.testing.assert_array_equal, state, CASE.init())


def test_a_loop_on_a_mesh_that_does_not_stay_finite_is_an_error_with_its_round():
    spoiled = CASE.data._replace(c=CASE.data.c.at[3, 2].set(jnp.nan))
    inputs = KEY, CASE.algorithm, CASE.hparams, CASE.init(), spoiled, 2
    with pytest.raises(runner.DivergedError, match=r"the loss is not finite in round 0 with HParams\("):
        runner.loop(*inputs, mesh=client_mesh(2), progress=False)
    with pytest.raises(ValueError, match="n=3 without a mesh"):
        runner.run(*inputs, n=3)
