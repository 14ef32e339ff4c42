"""A job over the devices of one process is the run; its checkpoint goes on on other devices."""

import jax
import numpy as np
import pytest

from commjax.core import checkpoint, runner
from commjax.core.base import State
from commjax.core.checkpoint import CheckpointError
from commjax.devices import hosts
from commjax.devices.mesh import client_mesh
from tests.registry import build

pytestmark = pytest.mark.long

KEY = jax.random.key(3)
CASE = build("ef-bv comp")
N = len(CASE.ids)


def on_mesh(devices, rounds, *, n=N, hparams=CASE.hparams, data=CASE.data, params=CASE.params, shift=None, **options):
    mesh = client_mesh(devices)
    ids = hosts.local_ids(n, mesh)
    own, more = jax.tree.map(lambda leaf: np.asarray(leaf)[ids], (data, {} if shift is None else {"shift": shift}))
    state = hosts.init(CASE.algorithm, params, n, mesh, **hosts.rows(more, n, mesh))
    rows = hosts.rows(own, n, mesh)
    state, record = runner.loop(
        KEY, CASE.algorithm, hparams, state, rows, rounds, mesh=mesh, n=n, **{"chunk": 2, "progress": False, **options}
    )
    return hosts.gathered(state, n), record


def same(found, wanted):
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, rtol=1e-10, atol=1e-13), found, wanted)


@pytest.fixture(scope="module")
def wanted():
    state, metrics = runner.run(KEY, CASE.algorithm, CASE.hparams, CASE.init(), CASE.data, 6)
    return jax.device_get(state), jax.device_get(metrics)


@pytest.mark.parametrize("devices", [1, 3, 8])
def test_a_run_over_a_mesh_is_the_run(devices, wanted):
    state, record = on_mesh(devices, 6)
    same(state, wanted[0])
    for name in ("loss", "bits_up", "bits_down"):
        np.testing.assert_allclose(record.metrics[name], getattr(wanted[1], name), rtol=1e-12)


def test_a_checkpoint_of_one_mesh_goes_on_on_another(tmp_path, wanted):
    path = tmp_path / "run"
    for devices, rounds in ((8, 2), (3, 4), (1, 6)):
        state, record = on_mesh(devices, rounds, checkpoint=path)
    same(state, wanted[0])
    np.testing.assert_allclose(record.metrics["loss"], wanted[1].loss, rtol=1e-10)
    before = path.stat().st_mtime_ns
    same(on_mesh(2, 6, checkpoint=path)[0], wanted[0])
    assert path.stat().st_mtime_ns == before


def test_a_checkpoint_of_a_job_goes_on_without_a_mesh_and_back(tmp_path, wanted):
    path, inputs = tmp_path / "run", (KEY, CASE.algorithm, CASE.hparams, CASE.init(), CASE.data)
    on_mesh(3, 2, checkpoint=path)
    runner.loop(*inputs, 4, chunk=2, checkpoint=path, progress=False)
    same(on_mesh(8, 6, checkpoint=path)[0], wanted[0])


def test_a_checkpoint_of_an_earlier_version_is_named(tmp_path):
    path, whole = tmp_path / "run", jax.device_get(CASE.init())
    checkpoint.save(path, whole, {}, {"hparams type": "", "hparams": "", "key": "", "start": "", "data": ""})
    with pytest.raises(CheckpointError, match=r"run was written by an earlier version, .* remove the file to begin"):
        on_mesh(2, 2, checkpoint=path)


def test_a_checkpoint_of_other_clients_data_or_numbers_is_refused(tmp_path):
    path = tmp_path / "run"
    on_mesh(2, 2, checkpoint=path)
    with pytest.raises(CheckpointError, match=r"clients.* is int64\[8\] there, int64\[7\] here"):
        on_mesh(2, 4, n=7, checkpoint=path)
    changed = jax.tree.map(lambda leaf: np.asarray(leaf).copy(), CASE.data)
    jax.tree.leaves(changed)[0][N - 1] += 1.0
    with pytest.raises(CheckpointError, match="data is"):
        on_mesh(2, 4, data=changed, checkpoint=path)
    with pytest.raises(CheckpointError, match="hparams is"):
        on_mesh(2, 4, hparams=CASE.hparams._replace(gamma=0.5), checkpoint=path)
    with pytest.raises(CheckpointError, match="start is"):
        on_mesh(2, 4, params=CASE.params + 1, checkpoint=path)
    with pytest.raises(CheckpointError, match="clients is"):  # a client that begins elsewhere
        on_mesh(2, 4, shift=np.ones((N, len(CASE.params))), checkpoint=path)
    with pytest.raises(ValueError, match=r"num_rounds is 1, but .*run is in round 2 already"):
        on_mesh(2, 1, checkpoint=path)


def test_rows_that_fill_up_the_devices_are_copies_of_the_last_client_and_are_cut_off():
    mesh = client_mesh(3)
    assert hosts.local_ids(7, mesh).tolist() == [0, 1, 2, 3, 4, 5, 6, 6, 6]
    state = hosts.init(CASE.algorithm, CASE.params, 7, mesh)
    assert state.clients.id.tolist() == [0, 1, 2, 3, 4, 5, 6, 6, 6]
    whole = hosts.gathered(state, 7)
    assert whole.clients.id.tolist() == list(range(7))
    again = hosts.scattered(whole, 7, client_mesh(2))
    assert again.clients.id.tolist() == [*range(7), 6] and not again.clients.id.sharding.is_fully_replicated
    with pytest.raises(ValueError, match="n is 8 clients, the state has 7"):
        hosts.scattered(whole, 8, mesh)


def test_rows_and_states_that_do_not_fit_are_refused():
    mesh = client_mesh(2)
    with pytest.raises(ValueError, match=r"this process has 8 of 8 clients \(see local_ids\), got 5 rows"):
        hosts.rows(np.zeros((5, 2)), 8, mesh)
    with pytest.raises(ValueError, match="n must be at least 1, got 0"):
        hosts.local_ids(0, mesh)
    state = hosts.init(CASE.algorithm, CASE.params, 8, mesh)
    with pytest.raises(ValueError, match="n must be between 1 and the 8 rows, got 9"):
        runner.loop(KEY, CASE.algorithm, CASE.hparams, state, CASE.data, 1, mesh=mesh, n=9)
    with pytest.raises(ValueError, match="data has 7 rows, 8 clients on 2 devices are 8"):
        runner.loop(KEY, CASE.algorithm, CASE.hparams, state, np.zeros((7, 2)), 1, mesh=mesh, n=8)
    with pytest.raises(ValueError, match="per_client has 7 rows, 8 clients on 2 devices are 8"):
        hosts.init(CASE.algorithm, CASE.params, 8, mesh, shift=np.zeros((7, 11)))
    with pytest.raises(ValueError, match="chunk must be at least 1, got 0"):
        runner.loop(KEY, CASE.algorithm, CASE.hparams, state, CASE.data, 1, mesh=mesh, n=8, chunk=0)


def test_a_run_that_diverges_says_so_and_is_not_saved(tmp_path):
    path = tmp_path / "run"
    on_mesh(2, 2, checkpoint=path)
    good = path.read_bytes()
    worse = CASE.hparams._replace(gamma=1.7e308)
    with pytest.raises(runner.DivergedError, match="the loss is not finite in round 1 with"):
        on_mesh(2, 1, hparams=worse, chunk=1, checkpoint=tmp_path / "new")  # the loss of round 0 is, the params are not
    assert not (tmp_path / "new").exists() and path.read_bytes() == good


def test_a_start_of_each_client_s_own_counts_every_client_once():
    case = build("ef21")
    wanted_state = case.algorithm.init(case.params, case.ids[:7], shift=case.per_client["shift"][:7])
    for devices in (2, 3):  # which do not divide 7
        mesh = client_mesh(devices)
        own = hosts.rows(np.asarray(case.per_client["shift"])[hosts.local_ids(7, mesh)], 7, mesh)
        found = hosts.init(case.algorithm, case.params, 7, mesh, shift=own)
        same(hosts.gathered(found, 7), jax.device_get(wanted_state))


def test_a_state_keeps_its_two_places(tmp_path):
    state = hosts.init(CASE.algorithm, CASE.params, N, client_mesh(4))
    assert isinstance(state, State) and state.server.params.sharding.is_fully_replicated
    assert {piece.data.shape[0] for piece in state.clients.shift.addressable_shards} == {2}
