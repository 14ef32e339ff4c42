"""Model folders: read a block at a time, and refused before any work if they do not fit their config."""

import json
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from commjax.llm import base, checkpoints
from tests.llm import tiny

pytestmark = pytest.mark.slow

CASE = "llama grouped queries"
Q = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def folder(tmp_path):
    return tiny.golden(tmp_path / "model", CASE)


def tensors():
    return tiny.weights(tiny.goldens()[CASE]["tensors"])


def rewrite(folder, change):
    found = tensors()
    change(found)
    save_file(found, folder / "model.safetensors")
    return folder


def shard(folder, parts=2):
    """The same model in shards, as transformers names them; returns the index."""
    (folder / "model.safetensors").unlink()
    names = [f"model-{i + 1:05d}-of-{parts:05d}.safetensors" for i in range(parts)]
    index = {name: names[i % parts] for i, name in enumerate(tensors())}
    for file in names:
        save_file({name: tensors()[name] for name in index if index[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": index}))
    return index


def same(a, b):
    return jax.tree.structure(a) == jax.tree.structure(b) and all(
        x.dtype == y.dtype and np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b))
    )


def test_kernels_are_transposed_and_everything_else_is_kept(folder):
    checkpoint, stored = checkpoints.open_folder(folder), tensors()
    block, outer = checkpoints.read_block(checkpoint, 1), checkpoints.read_outer(checkpoint)
    assert set(block) == set(checkpoint.model.block_shapes)
    np.testing.assert_array_equal(block["self_attn.q_proj"]["kernel"], stored[Q].T)
    np.testing.assert_array_equal(block["input_layernorm"]["scale"], stored["model.layers.1.input_layernorm.weight"])
    np.testing.assert_array_equal(outer["embed_tokens"]["embedding"], stored["model.embed_tokens.weight"])
    np.testing.assert_array_equal(outer["lm_head"]["kernel"], stored["lm_head.weight"].T)
    shapes = jax.tree.map(jnp.shape, block, is_leaf=lambda leaf: isinstance(leaf, jax.Array))
    assert shapes == checkpoint.model.block_shapes


def test_a_block_is_read_without_the_rest(folder, monkeypatch):
    import safetensors

    read = []

    class Spy:
        def __init__(self, *args):
            self.file = opened(*args)

        def __enter__(self):
            self.inside = self.file.__enter__()
            return self

        def __exit__(self, *args):
            return self.file.__exit__(*args)

        def get_tensor(self, name):
            read.append(name)
            return self.inside.get_tensor(name)

    checkpoint, opened = checkpoints.open_folder(folder), safetensors.safe_open
    monkeypatch.setattr(safetensors, "safe_open", Spy)
    checkpoints.read_block(checkpoint, 1)
    assert len(read) == 9 and all(name.startswith("model.layers.1.") for name in read)


def test_shards_are_the_same_model(folder):
    _, whole = checkpoints.load(folder)
    shard(folder, 3)
    _, parts = checkpoints.load(folder)
    assert same(whole, parts)


def test_one_file_goes_before_an_index(folder):
    """As in transformers."""
    (folder / "model.safetensors.index.json").write_text("broken")
    checkpoints.load(folder)


def test_a_model_saved_without_its_head_is_read(tmp_path):
    case = "llama tied"
    found = {name.removeprefix("model."): one for name, one in tiny.weights(tiny.goldens()[case]["tensors"]).items()}
    _, bare = checkpoints.load(tiny.write(tmp_path / "bare", tiny.goldens()[case]["config"], found))
    _, whole = checkpoints.load(tiny.golden(tmp_path / "whole", case))
    assert same(bare, whole)


def test_old_buffers_are_passed_over(folder):
    rewrite(
        folder, lambda found: found.update({"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(2, np.float32)})
    )
    checkpoints.load(folder)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, np.float16, np.float32])
def test_dtypes_are_kept(folder, dtype):
    def cast(found):
        found.update({name: one.astype(dtype) for name, one in found.items()})

    model, params = checkpoints.load(rewrite(folder, cast))
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(dtype)}
    logits = base.forward(model, params, jnp.asarray(tiny.tokens(CASE)))
    assert logits.dtype == dtype
    # Rounding: torch's own bfloat16 and float16 logits are 0.05 and 0.006 away from its float32 ones.
    bound = {"bfloat16": 0.06, "float16": 0.007, "float32": 1e-5}[np.dtype(dtype).name]
    error = np.asarray(logits.astype(jnp.float32)) - tiny.logits(CASE)
    assert np.sqrt(np.mean(error**2)) < bound


def test_norms_in_float32_beside_kernels_in_bfloat16_are_read(folder):
    def cast(found):
        found.update({name: one.astype(jnp.bfloat16) for name, one in found.items() if one.ndim == 2})

    model, params = checkpoints.load(rewrite(folder, cast))
    assert params.outer["norm"]["scale"].dtype == jnp.float32
    assert base.forward(model, params, jnp.asarray(tiny.tokens(CASE))).dtype == jnp.bfloat16


def bad(found):
    found[Q][3, 4] = np.nan
    found[Q][3, 5] = -np.inf


def test_values_that_are_no_numbers_are_found_on_request(folder):
    checkpoints.load(rewrite(folder, bad))
    with pytest.raises(
        ValueError, match=r"model\.layers\.1.*q_proj.weight has 2 values that are NaN or infinite; allowed: none"
    ):
        checkpoints.load(folder, finite=True)
    checkpoints.load(rewrite(folder, lambda found: None), finite=True)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda found: found.pop(Q), rf"1 missing tensors, first '{Q}'; allowed: those of config.json"),
        (lambda found: found.update(z=np.ones(1, np.float32)), r"1 extra tensors, first 'model.z'; allowed"),
        (
            lambda found: found.update({Q: found[Q][:-1]}),
            r"q_proj.weight has shape \[15, 16\]; allowed by config.json: \[16, 16\]",
        ),
        (lambda found: found.update({Q: found[Q].astype(np.float64)}), r"has dtype F64; allowed: F32, F16, BF16"),
        (lambda found: found.update({Q: found[Q].astype(np.int8)}), r"has dtype I8; allowed"),
        (
            lambda found: found.update({Q[6:]: found[Q]}),
            r"tensor .*q_proj.weight' is in model.safetensors and in model",
        ),
    ],
)
def test_tensors_that_contradict_the_config_are_refused(folder, change, message):
    with pytest.raises(ValueError, match=message):
        checkpoints.open_folder(rewrite(folder, change))


def test_a_tied_head_may_be_stored_if_it_is_the_embedding(tmp_path):
    case = "opt pre-norm"
    folder = tiny.golden(tmp_path, case)
    found = load_file(folder / "model.safetensors")
    found["lm_head.weight"] = found["model.decoder.embed_tokens.weight"].copy()
    save_file(found, folder / "model.safetensors")
    checkpoints.load(folder)
    found["lm_head.weight"][2, 3] += 1
    save_file(found, folder / "model.safetensors")
    with pytest.raises(
        ValueError, match=r"lm_head.weight differs from model.decoder.embed_tokens.weight; allowed: the same"
    ):
        checkpoints.open_folder(folder)
    found["lm_head.weight"] = found["lm_head.weight"][1:]
    save_file(found, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"lm_head.weight differs"):
        checkpoints.open_folder(folder)


@pytest.mark.parametrize(
    "name", ["../model.safetensors", "/etc/hosts", "sub/x.safetensors", "..", ".", "", "a\\b", 3, None, ["f"]]
)
def test_an_index_may_not_leave_the_folder(folder, name):
    index = shard(folder)
    (folder / "sub").mkdir()
    (folder / "sub" / "x.safetensors").write_bytes(b"")
    index[Q] = name
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    with pytest.raises(ValueError, match=r"index.json names the file .*; allowed: a file in the same folder"):
        checkpoints.open_folder(folder)


def test_an_index_that_disagrees_with_its_files_is_refused(folder):
    index = shard(folder)
    path = folder / "model.safetensors.index.json"
    one, two = sorted(set(index.values()))
    for change, message in (
        ({"ghost": one}, rf"'ghost' is in {one}, but no file has it; allowed: agreement"),
        ({Q: one if index[Q] == two else two}, rf"'{Q}' is in .*, but {index[Q]} has it"),
    ):
        path.write_text(json.dumps({"weight_map": index | change}))
        with pytest.raises(ValueError, match=message):
            checkpoints.open_folder(folder)
    path.write_text(json.dumps({"weight_map": {name: file for name, file in index.items() if name != Q}}))
    with pytest.raises(ValueError, match=rf"'{Q}' is in no file, but {index[Q]} has it"):
        checkpoints.open_folder(folder)
    path.write_text(json.dumps({"weight_map": index}))
    save_file({Q: tensors()[Q]} | load_file(folder / one), folder / one)
    save_file({Q: tensors()[Q]} | load_file(folder / two), folder / two)
    with pytest.raises(ValueError, match=rf"tensor '{Q}' is in {one} and in {two}; allowed: once"):
        checkpoints.open_folder(folder)
    (folder / two).unlink()
    with pytest.raises(FileNotFoundError, match=rf"names '{two}', which is not there"):
        checkpoints.open_folder(folder)


@pytest.mark.parametrize("text", ["{", "{}", "[]", '{"weight_map": {}}', '{"weight_map": [1]}'])
def test_a_broken_index_is_refused(folder, text):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(ValueError, match=r"index.json.*(is not JSON|weight_map)"):
        checkpoints.open_folder(folder)


def test_files_that_are_no_safetensors_are_refused(folder):
    (folder / "model.safetensors").write_bytes(b"PK\3\4 a pickle")
    with pytest.raises(ValueError, match=r"model.safetensors is not a readable safetensors file"):
        checkpoints.open_folder(folder)
    os.rename(folder / "model.safetensors", folder / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match=r"no model.safetensors and no .* allowed: weights in safetensors"):
        checkpoints.open_folder(folder)


@pytest.mark.parametrize("number", [-1, 2])
def test_there_are_as_many_blocks_as_the_config_says(folder, number):
    with pytest.raises(ValueError, match=rf"number={number}; allowed: 0 to 1, the blocks of"):
        checkpoints.read_block(checkpoints.open_folder(folder), number)
