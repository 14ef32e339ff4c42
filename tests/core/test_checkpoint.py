"""The checkpoint file: exact, and refused with a reason when it is damaged or not this run's."""

import gc
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save as to_bytes

from commjax.core import checkpoint, identity
from commjax.core.checkpoint import CheckpointError
from tests.core.checkpoint_cases import HISTORY, IDENTITY, LIKE, saved, state


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
    assert checkpoint.load_all(path, state())[2] == IDENTITY
    for name, value in {"key": "01", "hparams": "[0.2]", "program": "ab"}.items():
        with pytest.raises(CheckpointError, match=f"another run: {name} is .* there, .*{value[-3:-1]}"):
            checkpoint.load(path, state(), {**IDENTITY, name: value})


def test_long_texts_are_shortened_in_messages(tmp_path):
    path = tmp_path / "run"
    for length, end in ((200, "x there"), (201, r"x\.\.\. there")):
        checkpoint.save(path, LIKE, {}, {"key": "x" * length})
        with pytest.raises(CheckpointError, match=f"key is x{{199}}{end}, 00 here"):
            checkpoint.load(path, LIKE, {"key": "00"})


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


def content(loaded):
    """All that `load` returns, as bytes."""
    (found, history) = loaded
    arrays = [*identity.leaves_by_name(found).items(), *sorted(history.items())]
    return [(name, str(array.dtype), array.shape, np.asarray(array).tobytes()) for name, array in arrays]


def test_each_of_3000_flipped_bits_is_refused_or_changes_nothing(tmp_path):
    path, like = saved(tmp_path / "run"), jax.tree.map(np.asarray, state())
    good, wanted = path.read_bytes(), content(checkpoint.load(path, like, IDENTITY))
    header = int.from_bytes(good[:8], "little") + 8
    rng = np.random.default_rng(0)
    bits = np.unique(np.concatenate([np.arange(64), rng.choice(8 * len(good), 3000, replace=False)]))
    assert np.sum(bits >= 8 * header) > 400  # in tensors
    for bit in bits.tolist():
        bad = bytearray(good)
        bad[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bad)
        try:
            found = content(checkpoint.load(path, like, IDENTITY))
        except CheckpointError as error:
            assert str(path) in str(error), bit
        else:
            assert found == wanted and bit < 8 * header, bit  # the header's JSON, spelled otherwise


def test_every_truncation_and_extension_is_refused(tmp_path):
    good = saved(tmp_path / "run").read_bytes()
    for bad in [*(good[:length] for length in (*range(0, len(good), 97), len(good) - 1)), good + b"\0", good + good]:
        (tmp_path / "cut").write_bytes(bad)
        with pytest.raises(CheckpointError, match="cut is not a readable checkpoint"):
            checkpoint.load(tmp_path / "cut", state())


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    for path in (tmp_path / "nothing", tmp_path):
        with pytest.raises(CheckpointError, match="is not a readable checkpoint"):
            checkpoint.load(path, state())


def test_a_safetensors_file_of_something_else_is_refused(tmp_path):
    path = tmp_path / "weights"
    for dtype in (np.float64, np.float32, jnp.bfloat16):
        path.write_bytes(to_bytes({"w": np.ones(2, dtype)}))
        with pytest.raises(CheckpointError, match="weights has format None, expected 'commjax-checkpoint-2'"):
            checkpoint.load(path, state())


def test_a_checkpoint_of_the_format_without_a_checksum_is_named(tmp_path):
    path = tmp_path / "old"
    path.write_bytes(to_bytes({"history/loss": np.ones(2)}, {"format": "commjax-checkpoint-1", "structure": "{}"}))
    with pytest.raises(CheckpointError, match=r"old has format 'commjax-checkpoint-1', which has no checksum.* remove"):
        checkpoint.load(path, {})


STRUCTURE = json.dumps({"['x']": "float64[2]"})
RAW = np.ones(2).view(np.uint8)


def forged(path, arrays, **metadata):
    """A file whose digest is right and whose content `save` would never write."""
    metadata = {"format": "commjax-checkpoint-2", **metadata}
    metadata = {"sha256": checkpoint._content_digest(arrays, metadata), **metadata}
    path.write_bytes(to_bytes(arrays, metadata))
    return path


@pytest.mark.parametrize(
    "structure",
    [
        None,
        "",
        "{",
        "null",
        "3",
        '"text"',
        "[]",
        '["x"]',
        "[" * 100_000,
        '{"a":' * 100_000,
        "{\"['x']\": 3}",
        "{\"['x']\": null}",
        '{"[\'x\']": {"[\'x\']": "float64[2]"}}',
        '{"[\'x\']": ["float64[2]"]}',
        "9" * 5000,
        "NaN",
        "\ud800",
    ],
)
@pytest.mark.parametrize("part", ["structure", "identity"])
def test_metadata_of_other_types_or_endless_depth_is_refused(tmp_path, part, structure):
    metadata = {"structure": STRUCTURE, "identity": "{}", part: structure}
    metadata = {name: text for name, text in metadata.items() if text is not None}
    try:
        path = forged(tmp_path / "forged", {"state/['x']": RAW}, **metadata)
    except UnicodeEncodeError:
        return  # safetensors does not write it
    with pytest.raises(CheckpointError, match=f"forged is not a readable checkpoint: .*{part}"):
        checkpoint.load(path, LIKE, {"key": "00"})


@pytest.mark.parametrize(
    "arrays, message",
    [
        ({}, r"\['x'\] is absent, expected float64\[2\]"),
        ({"state/['x']": RAW[:15]}, r"\['x'\] is 15 bytes, expected float64\[2\]"),
        ({"state/['x']": np.zeros(17, np.uint8)}, r"\['x'\] is 17 bytes"),
        ({"state/['x']": np.zeros(0, np.uint8)}, r"\['x'\] is 0 bytes"),
        ({"state/['x']": np.ones(2)}, r"tensor \"state/\['x'\]\" is F64, expected U8"),
        ({"state/['x']": RAW, "history/loss": np.ones(2, np.float32)}, "tensor 'history/loss' is F32, expected F64"),
        ({"state/['x']": RAW, "history/loss": np.ones(2, np.int64)}, "tensor 'history/loss' is I64, expected F64"),
        ({"state/['x']": RAW, "state/['y']": RAW}, r"tensor \"state/\['y'\]\" has no place in its structure"),
        ({"state/['x']": RAW, "stranger": RAW}, "tensor 'stranger' is U8, expected no such tensor"),
    ],
)
def test_tensors_that_do_not_fit_the_structure_are_refused(tmp_path, arrays, message):
    path = forged(tmp_path / "forged", arrays, structure=STRUCTURE, identity="{}")
    with pytest.raises(CheckpointError, match=f"forged is not a readable checkpoint: {message}"):
        checkpoint.load(path, LIKE)


def test_a_fingerprint_tells_keys_hparams_types_and_parts_apart():
    key, hparams = jax.random.key(0), (0.1, jnp.asarray([1.0, 2.0]))
    one = identity.fingerprint(key, hparams, data={"x": np.ones(2)})
    assert one == identity.fingerprint(key, (jnp.asarray(0.1), np.array([1.0, 2.0])), data={"x": jnp.ones(2)})
    assert one["hparams"] == "[0.1, [1.0, 2.0]]" and one["hparams type"] == "builtins.tuple"
    others = {
        "key": identity.fingerprint(jax.random.key(1), hparams, data={"x": np.ones(2)}),
        "hparams": identity.fingerprint(key, (0.1 + 1e-16, jnp.asarray([1.0, 2.0])), data={"x": np.ones(2)}),
        "hparams type": identity.fingerprint(key, list(hparams), data={"x": np.ones(2)}),
        "data": identity.fingerprint(key, hparams, data={"x": np.array([1.0, 1.0 + 1e-15])}),
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
    digests = {identity.digest(tree) for tree in trees}
    assert len(digests) == len(trees) and {len(digest) for digest in digests} == {16}  # files of earlier runs hold them


def test_a_large_array_is_read_once_and_forgotten_with_it(monkeypatch):
    monkeypatch.setattr(identity, "_LARGE", 15)
    reads, sha = [], identity.hashlib.sha256
    monkeypatch.setattr(identity.hashlib, "sha256", lambda *data: reads.append(len(data)) or sha(*data))
    x = jnp.arange(4.0)
    one = identity.digest({"x": x})
    assert one == identity.digest({"x": x}) and sum(reads) == 1
    assert one == identity.digest({"x": jnp.array(x)}) != identity.digest({"x": x + 1})
    assert one != identity.digest({"x": x.reshape(2, 2)}) and one != identity.digest({"y": x})
    number = id(x)
    assert identity._seen[number][0]() is x
    del x
    gc.collect()
    assert number not in identity._seen
