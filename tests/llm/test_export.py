"""What is written is read back bit for bit, and appears all at once or not at all."""

import hashlib
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from commjax import llm
from commjax.llm import checkpoints, config, export, names
from tests.llm import tiny
from tests.llm.test_checkpoints import same

pytestmark = pytest.mark.slow


def cast(params, dtype):
    return jax.tree.map(lambda leaf: leaf.astype(dtype), params)


@pytest.mark.parametrize("case", tiny.CASES)
def test_a_round_trip_changes_nothing(case, tmp_path):
    source = tiny.golden(tmp_path / "source", case)
    model, params = llm.load(source)
    llm.save(tmp_path / "copy", model, params)
    again, found = llm.load(tmp_path / "copy")
    assert again is model and same(found, params)
    before, after = (load_file(folder / "model.safetensors") for folder in (source, tmp_path / "copy"))
    assert before.keys() == after.keys()
    assert all(np.array_equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_shards_and_dtypes(dtype, tmp_path):
    model, params = llm.load(tiny.golden(tmp_path / "source", "llama biases"))
    params = cast(params, dtype)
    llm.save(tmp_path / "copy", model, params, shard_bytes=2000)
    files = sorted(path.name for path in tmp_path.glob("copy/*.safetensors"))
    assert len(files) > 2 and files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "copy" / checkpoints.INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    sizes = {name: sum(one.nbytes for one in load_file(tmp_path / "copy" / name).values()) for name in files}
    counts = {name: len(load_file(tmp_path / "copy" / name)) for name in files}
    assert all(sizes[name] <= 2000 or counts[name] == 1 for name in files)
    again, found = llm.load(tmp_path / "copy")
    assert same(found, params) and again.config == model.config._replace(dtype=dtype)


def test_a_shard_is_filled_to_the_last_byte(tmp_path):
    model, params = llm.load(tiny.golden(tmp_path / "source", "llama tied"))
    total = sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    llm.save(tmp_path / "one", model, params, shard_bytes=total)
    llm.save(tmp_path / "two", model, params, shard_bytes=total - 1)
    assert (tmp_path / "one" / checkpoints.WEIGHTS).is_file()
    assert len(list((tmp_path / "two").glob("*.safetensors"))) == 2


def test_transposed_views_are_written_as_what_they_show(tmp_path):
    """safetensors itself would write the memory beneath a view."""
    matrix = np.arange(6, dtype=np.float32).reshape(2, 3)
    export.write_tensors(tmp_path / "x.safetensors", {"matrix": matrix.T})
    np.testing.assert_array_equal(load_file(tmp_path / "x.safetensors")["matrix"], matrix.T)
    assert [path.name for path in tmp_path.iterdir()] == ["x.safetensors"]


def test_a_file_is_what_safetensors_writes(tmp_path):
    """Byte for byte, whatever the dtypes and names; and the sha256 is that of the file."""
    random, tensors = np.random.default_rng(0), {}
    for i, (dtype, _) in enumerate(export._DTYPES * 2):
        tensors[f"{(7 * i) % 26:02d} {chr(228)}"] = (random.random((3, 2 + i)) * 2).astype(jnp.dtype(dtype))
    tensors |= {"empty": np.zeros((0, 3), np.float32), "scalar": np.full((), 3.0)}
    save_file(tensors, tmp_path / "theirs", {"format": "pt"})
    sha256 = export.write_tensors(tmp_path / "ours", tensors)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert sha256 == hashlib.sha256((tmp_path / "ours").read_bytes()).hexdigest()


def test_an_existing_folder_is_refused_and_untouched(tmp_path):
    model, params = llm.load(tiny.golden(tmp_path / "source", "llama tied"))
    (tmp_path / "there").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for name in ("there", "link", "source"):
        with pytest.raises(ValueError, match=rf"folder='.*{name}' exists; allowed: a new folder"):
            llm.save(tmp_path / name, model, params)
    assert list((tmp_path / "there").iterdir()) == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["link", "source", "there"]


def test_a_failure_leaves_nothing(tmp_path):
    model, params = llm.load(tiny.golden(tmp_path / "source", "llama tied"))
    with pytest.raises(RuntimeError, match="full disk"), export.writing(tmp_path / "new") as temporary:
        export.write_model(temporary, model, params)
        assert not (tmp_path / "new").exists()
        raise RuntimeError("full disk")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
    with pytest.raises(ValueError, match="object has dtype object; allowed: bool, uint8"):
        export.write_tensors(tmp_path / "x.safetensors", {"object": np.array([object()])})
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_somebody_else_who_was_faster_is_not_overwritten(tmp_path):
    with pytest.raises(ValueError, match="exists"), export.writing(tmp_path / "new") as temporary:
        (temporary / "mine").touch()
        (tmp_path / "new").mkdir()
    assert list((tmp_path / "new").iterdir()) == [] and len(list(tmp_path.iterdir())) == 1


def test_folders_above_are_made(tmp_path):
    model, params = llm.load(tiny.golden(tmp_path / "source", "llama tied"))
    llm.save(tmp_path / "a" / "b", model, params)
    assert (tmp_path / "a" / "b" / "config.json").is_file()


def test_params_that_contradict_the_model_are_refused(tmp_path):
    model, params = llm.load(tiny.golden(tmp_path / "source", "llama tied"))
    with pytest.raises(ValueError, match=r"params has 1 blocks; allowed: num_hidden_layers=2"):
        llm.save(tmp_path / "new", model, params._replace(blocks=params.blocks[:1]))
    with pytest.raises(ValueError, match=r"shard_bytes=0; allowed: at least 1"):
        llm.save(tmp_path / "new", model, params, shard_bytes=0)
    for change, message in (
        (
            {"mlp.up_proj": {"kernel": jnp.ones((2, 3))}},
            r"layer 'mlp.up_proj' is .*\(2, 3\).*; allowed by the config: .*\(16, 20\)",
        ),
        ({"mlp.up": {}}, r"layer 'mlp.up' is {}; allowed by the config: no such layer"),
    ):
        with pytest.raises(ValueError, match=message):
            names.block_tensors(model, 0, params.blocks[0] | change)
    with pytest.raises(ValueError, match=r"layer 'norm' is absent; allowed by the config"):
        names.outer_tensors(model, {"embed_tokens": params.outer["embed_tokens"]})
    assert not (tmp_path / "new").exists()


def test_what_is_no_weights_is_copied(tmp_path):
    source, out = tiny.golden(tmp_path / "source", "llama tied"), tmp_path / "out"
    beside = [
        "generation_config.json",
        "tokenizer.json",
        "tokenizer.model",
        "merges.txt",
        "chat_template.jinja",
        "tokenizer.bin",
    ]
    for name in [*beside, checkpoints.INDEX, "pytorch_model.bin"]:
        (source / name).write_text(name)
    (source / "onnx.json").mkdir()
    out.mkdir()
    export.copy_beside(source, out)
    assert sorted(path.name for path in out.iterdir()) == sorted([*beside, "config.json"])
    assert (out / "tokenizer.json").read_text() == "tokenizer.json"
    assert config.load(out) == config.load(source)
