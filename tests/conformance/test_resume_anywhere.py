"""One run, one checkpoint: begun on one device, continued on several and back; also a sweep."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from commjax.core import runner, trackers
from commjax.core.checkpoint import CheckpointError
from commjax.devices.mesh import client_mesh
from tests.registry import build

pytestmark = pytest.mark.slow

KEY = jax.random.key(5)
CASE = build("ef-bv comp")
N = 7  # neither 2 nor 4 devices divide it


def norm(state):
    assert state.clients.id.shape[-1] == N  # no padding
    return {"norm": jnp.linalg.norm(state.server.params, axis=-1), "first": state.clients.shift[..., -1, 0]}


def start():
    return CASE.algorithm.init(CASE.params, CASE.ids[:N]), jax.tree.map(lambda leaf: leaf[:N], CASE.data)


def loop(rounds, devices, key=KEY, hparams=CASE.hparams, **options):
    inputs = key, CASE.algorithm, hparams, *start(), rounds
    mesh = None if devices is None else client_mesh(devices)
    return runner.loop(*inputs, chunk=2, evaluate=norm, progress=False, mesh=mesh, **options)


def close(found, wanted):
    assert found[1].metrics.keys() == wanted[1].metrics.keys()
    for part in ("metrics", "evaluations"):
        for name, values in getattr(wanted[1], part).items():
            np.testing.assert_allclose(getattr(found[1], part)[name], values, rtol=1e-10, atol=1e-13)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-13), found[0], wanted[0])


def same_bits(found, wanted):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


def sweep_inputs():
    grid = runner.stack([CASE.hparams._replace(gamma=CASE.hparams.gamma * c) for c in (0.2, 0.5, 1.0)])
    return {"key": jax.random.split(KEY, 2), "hparams": grid}


@pytest.mark.parametrize("swept", [False, True], ids=["run", "sweep"])
def test_a_run_moves_from_one_device_to_several_and_back_through_one_checkpoint(tmp_path, swept):
    inputs = sweep_inputs() if swept else {}
    wanted = loop(8, None, tracker=trackers.json_lines(tmp_path / "alone"), **inputs)
    for rounds, devices in ((2, None), (4, 4), (6, 2), (8, None)):
        tracker = trackers.json_lines(tmp_path / "log")
        found = loop(rounds, devices, checkpoint=tmp_path / "run", tracker=tracker, **inputs)
    close(found, wanted)
    assert found[1].evaluations["round"].tolist() == [0, 2, 4, 6, 8]
    lines = [len((tmp_path / name).read_text().splitlines()) for name in ("alone", "log")]
    assert lines == [9, 12]  # each of the three stops has one for the evaluation and one for the metrics
    other = jax.random.split(KEY, 3)[1:] if swept else jax.random.key(6)
    with pytest.raises(CheckpointError, match="key is"):
        loop(10, 4, checkpoint=tmp_path / "run", **{**inputs, "key": other})


@pytest.mark.parametrize("devices", [None, 2, 4])
@pytest.mark.parametrize("swept", [False, True], ids=["run", "sweep"])
def test_on_the_same_devices_a_resumed_run_is_the_run_bit_for_bit(tmp_path, devices, swept):
    inputs = sweep_inputs() if swept else {}
    whole = loop(6, devices, **inputs)
    for rounds in (2, 6):
        found = loop(rounds, devices, checkpoint=tmp_path / "run", **inputs)
    same_bits(found[0], whole[0])
    same_bits((found[1].metrics, found[1].evaluations), (whole[1].metrics, whole[1].evaluations))
    close(found, loop(6, None, **inputs))


def test_the_caller_keeps_his_state_and_gets_as_many_rows_as_he_gave():
    state, data = start()
    before = jax.tree.map(np.array, state)
    found, record = runner.loop(
        KEY, CASE.algorithm, CASE.hparams, state, data, 4, chunk=2, mesh=client_mesh(4), progress=False
    )
    same_bits(state, before)
    assert found.clients.id.tolist() == list(range(N)) and record.config["devices"] == 4
    with pytest.raises(ValueError, match="n=3, but the state has 7 rows"):
        runner.loop(KEY, CASE.algorithm, CASE.hparams, state, data, 4, n=3)
    with pytest.raises(ValueError, match="mesh must have the one axis 'clients'"):
        mesh = jax.make_mesh((2,), ("data",))
        runner.loop(KEY, CASE.algorithm, CASE.hparams, state, data, 4, mesh=mesh)
