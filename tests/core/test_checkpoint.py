"""The checkpoint file: exact, atomic, and refused with a reason when it is not this run's."""

import gc
import json
import os
import stat

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save as to_bytes

from commjax import checkpoint
from commjax.base import State
from commjax.checkpoint import CheckpointError

HISTORY = {"loss": np.array([1.0, 0.1 + 0.2]), "eval/accuracy": np.array([[0.5, np.nan], [1e-300, -0.0]])}
IDENTITY = {"key": "00", "hparams": "[0.1]"}


def state(dtype=jnp.float64):
    values = np.random.default_rng(0).standard_normal((3, 4))
    server = {
        "round": jnp.asarray(7, jnp.int32),
        "params": {"w": jnp.asarray(values, dtype), "empty": jnp.zeros((0, 2))},
    }
    return State(
        server,
        {
            "id": jnp.arange(3),
            "h": [jnp.asarray(values * 1e-3, dtype)],
            "on": jnp.asarray([True, False, True]),
        },
    )


def saved(path, content=None):
    checkpoint.save(path, state() if content is None else content, HISTORY, IDENTITY)
    return path


@pytest.mark.parametrize("dtype", [jnp.float64, jnp.float32, jnp.bfloat16, jnp.float16, jnp.int32, jnp.uint8])
def test_every_dtype_comes_back_bit_for_bit(tmp_path, dtype):
    wanted = state(dtype)
    path = saved(tmp_path / "run", wanted)
    found, history = checkpoint.load(path, jax.tree.map(jnp.zeros_like, wanted), IDENTITY)
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape and isinstance(one, jax.Array)
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()
    assert history.keys() == HISTORY.keys()
    for name, values in HISTORY.items():
        assert history[name].tobytes() == values.tobytes() and history[name].shape == values.shape


def test_nan_infinity_and_signed_zero_are_kept(tmp_path):
    strange = {"x": jnp.asarray([jnp.nan, jnp.inf, -jnp.inf, -0.0, 5e-324])}
    found, _ = checkpoint.load(saved(tmp_path / "run", strange), strange)
    assert np.asarray(found["x"]).tobytes() == np.asarray(strange["x"]).tobytes()


def test_a_loaded_state_is_placed_where_the_given_one_is(tmp_path):
    device = jax.devices()[3]
    like = jax.device_put(state(), device)
    found, _ = checkpoint.load(saved(tmp_path / "run"), like)
    assert all(leaf.devices() == {device} for leaf in jax.tree.leaves(found))
    free, _ = checkpoint.load(tmp_path / "run", state())
    assert not any(leaf.committed for leaf in jax.tree.leaves(free))


def test_the_identity_is_checked_only_if_it_is_given(tmp_path):
    path = saved(tmp_path / "run")
    assert checkpoint.load(path, state())[0].server["round"] == 7
    assert checkpoint.load(path, state(), {"key": "00"})[0].server["round"] == 7
    for name, value in {"key": "01", "hparams": "[0.2]", "program": "ab"}.items():
        with pytest.raises(CheckpointError, match=f"another run: {name} is .* there, .*{value[-3:-1]}"):
            checkpoint.load(path, state(), {**IDENTITY, name: value})


def changed(part):
    one = state()
    if part == "shape":
        return one._replace(
            clients={**one.clients, "id": jnp.arange(4)}
        ), r"\.clients\['id'\] is int64\[3\] there, int64\[4\]"
    if part == "dtype":
        return one._replace(
            server={**one.server, "round": jnp.asarray(7, jnp.int64)}
        ), r"\['round'\] is int32\[\] .*int64\[\]"
    if part == "missing here":
        return one._replace(
            clients={"id": one.clients["id"], "on": one.clients["on"]}
        ), r"\['h'\]\[0\] is .* absent here"
    return one._replace(server={**one.server, "extra": jnp.ones(2)}), r"\['extra'\] is absent there, float64\[2\] here"


@pytest.mark.parametrize("part", ["shape", "dtype", "missing here", "missing there"])
def test_another_structure_is_refused_by_the_name_of_the_leaf(tmp_path, part):
    like, message = changed(part)
    with pytest.raises(CheckpointError, match=f"another structure: .*{message}"):
        checkpoint.load(saved(tmp_path / "run"), like)


@pytest.mark.parametrize("content", [b"", b"garbage", b"\xff" * 64, b'{"json": true}'])
def test_garbage_is_refused(tmp_path, content):
    path = tmp_path / "run"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match="run is not a readable checkpoint"):
        checkpoint.load(path, state())


def test_every_truncation_is_refused(tmp_path):
    content = saved(tmp_path / "run").read_bytes()
    for length in [*range(0, len(content), 97), len(content) - 1]:
        (tmp_path / "cut").write_bytes(content[:length])
        with pytest.raises(CheckpointError, match="cut is not a readable checkpoint"):
            checkpoint.load(tmp_path / "cut", state())


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    for path in (tmp_path / "nothing", tmp_path):
        with pytest.raises(CheckpointError, match="is not a readable checkpoint"):
            checkpoint.load(path, state())


def test_a_safetensors_file_of_something_else_is_refused(tmp_path):
    path = tmp_path / "weights"
    path.write_bytes(to_bytes({"w": np.ones(2)}))
    with pytest.raises(CheckpointError, match="weights has format None, expected 'commjax-checkpoint-1'"):
        checkpoint.load(path, state())
    structure = json.dumps({"['x']": "float64[2]"})
    for metadata in (
        {},
        {"structure": structure},
        {"structure": structure, "identity": "{}"},
        {"structure": "{", "identity": "{}"},
    ):
        path.write_bytes(to_bytes({"w": np.ones(2)}, {"format": "commjax-checkpoint-1", **metadata}))
        with pytest.raises(CheckpointError, match="weights is not a readable checkpoint"):
            checkpoint.load(path, {"x": jnp.ones(2)})


@pytest.mark.parametrize("broken", ["replace", "fsync"])
def test_a_write_that_fails_leaves_the_old_file_and_no_other(tmp_path, monkeypatch, broken):
    path = saved(tmp_path / "run")
    before = path.read_bytes()

    def fail(*arguments):
        raise OSError("no space left on device")

    monkeypatch.setattr(os, broken, fail)
    with pytest.raises(OSError, match="no space left"):
        checkpoint.save(path, jax.tree.map(jnp.zeros_like, state()), HISTORY, IDENTITY)
    monkeypatch.undo()
    assert path.read_bytes() == before and [one.name for one in tmp_path.iterdir()] == ["run"]


def test_the_new_file_is_complete_on_disk_before_it_takes_the_name(tmp_path, monkeypatch):
    events, fsync, replace = [], os.fsync, os.replace

    def spy_fsync(handle):
        kind = "folder" if stat.S_ISDIR(os.fstat(handle).st_mode) else f"file of {os.fstat(handle).st_size}"
        events.append(kind)
        fsync(handle)

    def spy_replace(source, target):
        events.append("replace")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", spy_fsync)
    monkeypatch.setattr(os, "replace", spy_replace)
    checkpoint.write_atomically(tmp_path / "file", b"12345")
    assert events == ["file of 5", "replace", "folder"]


def test_folders_are_made_and_files_have_ordinary_permissions(tmp_path):
    path = tmp_path / "new" / "deeper" / "file"
    checkpoint.write_atomically(path, b"content")
    (tmp_path / "plain").write_bytes(b"")
    assert path.read_bytes() == b"content" and path.stat().st_mode == (tmp_path / "plain").stat().st_mode
    checkpoint.write_atomically(str(path), b"other")
    assert path.read_bytes() == b"other" and len(list(path.parent.iterdir())) == 1


def test_a_fingerprint_tells_keys_hparams_types_and_parts_apart():
    key, hparams = jax.random.key(0), (0.1, jnp.asarray([1.0, 2.0]))
    one = checkpoint.fingerprint(key, hparams, data={"x": np.ones(2)})
    assert one == checkpoint.fingerprint(key, (jnp.asarray(0.1), np.array([1.0, 2.0])), data={"x": jnp.ones(2)})
    assert one["hparams"] == "[0.1, [1.0, 2.0]]" and one["hparams type"] == "builtins.tuple"
    others = {
        "key": checkpoint.fingerprint(jax.random.key(1), hparams, data={"x": np.ones(2)}),
        "hparams": checkpoint.fingerprint(key, (0.1 + 1e-16, jnp.asarray([1.0, 2.0])), data={"x": np.ones(2)}),
        "hparams type": checkpoint.fingerprint(key, list(hparams), data={"x": np.ones(2)}),
        "data": checkpoint.fingerprint(key, hparams, data={"x": np.array([1.0, 1.0 + 1e-15])}),
    }
    for name, other in others.items():
        assert {part for part in one if one[part] != other[part]} == {name}


def test_a_digest_changes_with_names_shapes_dtypes_and_texts():
    x = np.zeros(4)
    trees = [
        {"x": x},
        {"y": x},
        {"x": x.reshape(2, 2)},
        {"x": x.astype(np.float32)},
        {"x": x.view(np.int64)},
        {"x": "a"},
        {"x": "b"},
    ]
    trees += [{"x": jax.random.key(seed)} for seed in (0, 1)]
    assert len({checkpoint.digest(tree) for tree in trees}) == len(trees)


def test_a_large_array_is_read_once_and_forgotten_with_it(monkeypatch):
    monkeypatch.setattr(checkpoint, "_LARGE", 15)
    reads, sha = [], checkpoint.hashlib.sha256
    monkeypatch.setattr(checkpoint.hashlib, "sha256", lambda *data: reads.append(len(data)) or sha(*data))
    x = jnp.arange(4.0)
    one = checkpoint.digest({"x": x})
    assert one == checkpoint.digest({"x": x}) and sum(reads) == 1
    assert one == checkpoint.digest({"x": jnp.array(x)}) != checkpoint.digest({"x": x + 1})
    assert one != checkpoint.digest({"x": x.reshape(2, 2)}) and one != checkpoint.digest({"y": x})
    number = id(x)
    assert checkpoint._seen[number][0]() is x
    del x
    gc.collect()
    assert number not in checkpoint._seen
