"""An unfinished run goes on only if its source, its shards and its manifest are what they were, and in one process."""

import fcntl
import json
import os

import pytest

from commjax.llm import checkpoints
from commjax.pruning import stream
from tests.pruning import models
from tests.pruning.interrupted_cases import WANDA, failing

pytestmark = pytest.mark.long


def unfinished(source, out, monkeypatch, blocks=2):
    """A run that ended when this many of 3 blocks were written."""
    with monkeypatch.context() as patch:
        failing(patch, blocks + 1)
        with pytest.raises(OSError, match="no space left"):
            stream.prune_folder(source, out, models.windows(), WANDA, progress=False)
    partial = out.with_name(f"{out.name}.partial")
    assert len(stream.read_manifest(partial)["blocks"]) == blocks
    return partial


def test_one_byte_of_the_source_anywhere_makes_it_another_run(tmp_path, monkeypatch):
    """A sample of 64 pages of a file, as there was, does not see a change between them."""
    source = models.folder(tmp_path / "source", vocab_size=20_000)
    partial = unfinished(source, tmp_path / "out", monkeypatch, 0)
    path = max(source.glob("*.safetensors"), key=lambda one: one.stat().st_size)
    size = path.stat().st_size
    pages = [max(0, size - 4096) * i // 63 for i in range(64)]
    at = next(at for at in range(size // 2, size, 4) if all(not page <= at < page + 4096 for page in pages))
    content = bytearray(path.read_bytes())
    content[at] ^= 1  # the last bit of a float32
    path.write_bytes(content)
    before = models.files(partial)
    with pytest.raises(
        ValueError, match=rf"of another run: source is {{'{path.name}': '\w{{64}}'}} there, .* here; remove it"
    ):
        stream.prune_folder(source, tmp_path / "out", models.windows(), WANDA, progress=False)
    assert models.files(partial) == before


@pytest.mark.parametrize("what", ["outer", "first", "last", "lost", "config"])
def test_a_finished_shard_that_was_altered_is_computed_again(what, tmp_path, monkeypatch, capsys):
    source = models.folder(tmp_path / "source")
    stream.prune_folder(source, tmp_path / "whole", models.windows(), WANDA, progress=False)
    partial = unfinished(source, tmp_path / "out", monkeypatch)
    number = {"outer": 1, "first": 2, "last": 3, "lost": 3}.get(what, 0)
    path = partial / (f"model-{number:05d}-of-00004.safetensors" if number else "config.json")
    if what == "lost":
        path.unlink()
    else:
        content = bytearray(path.read_bytes())
        content[-1] ^= 4  # in a file of weights, of the last float32
        path.write_bytes(content)
    layers = stream.prune_folder(source, tmp_path / "out", models.windows(), WANDA)
    assert models.files(tmp_path / "out") == models.files(tmp_path / "whole") and len(layers) == 21
    said = capsys.readouterr().err
    block = {"first": 0, "last": 1, "lost": 1}.get(what)
    assert ("is not as it was written" in said) == (block is not None)
    if block is not None:
        assert f"{path} is not as it was written: block {block} and those after it are computed again\n" in said


def test_the_manifest_has_the_sha256_of_every_shard(tmp_path):
    source = models.folder(tmp_path / "source")
    stream.prune_folder(source, tmp_path / "out", models.windows(), WANDA, progress=False)
    manifest, found = stream.read_manifest(tmp_path / "out"), models.files(tmp_path / "out")
    assert manifest["files"] == {name: sha for name, sha in found.items() if name.endswith(".safetensors")}
    assert len(manifest["files"]) == 4
    wanted = {name: sha for name, sha in models.files(source).items() if name == "config.json" or "safetensors" in name}
    wanted.pop(checkpoints.INDEX)
    assert manifest["source"] == wanted


@pytest.mark.parametrize(
    "change",
    [
        lambda manifest: manifest | {"sparsities": [0.5, 0.5, 0.4]},
        lambda manifest: manifest | {"blocks": [[], [], [], []]},
        lambda manifest: manifest | {"files": {}},
        lambda manifest: {name: value for name, value in manifest.items() if name != "sha256"},
        lambda manifest: [manifest],
        lambda manifest: stream._sealed(manifest | {"blocks": None}),
        lambda manifest: stream._sealed(manifest | {"blocks": [[{"name": 3}]]}),
        lambda manifest: stream._sealed(manifest | {"files": None}),
    ],
)
def test_a_manifest_that_was_altered_is_refused(change, tmp_path, monkeypatch):
    source = models.folder(tmp_path / "source")
    partial = unfinished(source, tmp_path / "out", monkeypatch, 0)
    (partial / stream.MANIFEST).write_text(json.dumps(change(stream.read_manifest(partial))))
    before = models.files(partial)
    with pytest.raises(
        ValueError,
        match=r"out\.partial exists and is no unfinished run \(.*\.json( is not as it was| holds|: (blocks|files)=)",
    ):
        stream.prune_folder(source, tmp_path / "out", models.windows(), WANDA, progress=False)
    assert models.files(partial) == before


@pytest.mark.parametrize("when", [0, 1, 2])
@pytest.mark.parametrize("hidden", [False, True], ids=["as usual", "with the old time and size"])
def test_a_source_that_is_written_while_it_is_read_is_not_published(hidden, when, tmp_path, monkeypatch):
    source = models.folder(tmp_path / "source")
    stream.prune_folder(source, tmp_path / "whole", models.windows(), WANDA, progress=False)
    path = max(source.glob("*.safetensors"))
    before, times, read = path.read_bytes(), path.stat(), checkpoints.read_block

    def rewritten(checkpoint, number):
        if number == when:
            path.write_bytes(before[:-2] + b"\0\0")
            if hidden:
                os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        return read(checkpoint, number)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "read_block", rewritten)
        with pytest.raises(ValueError, match=r"source.* was written while it was read; nothing is published"):
            stream.prune_folder(source, tmp_path / "out", models.windows(), WANDA, progress=False)
    assert not (tmp_path / "out").exists()
    path.write_bytes(before)  # what was computed meanwhile is not used again
    stream.prune_folder(source, tmp_path / "out", models.windows(), WANDA, progress=False)
    assert models.files(tmp_path / "out") == models.files(tmp_path / "whole")


def test_two_processes_do_not_write_one_folder(tmp_path, monkeypatch):
    source = models.folder(tmp_path / "source")
    partial = unfinished(source, tmp_path / "out", monkeypatch, 0)
    handle = os.open(partial, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    try:
        with pytest.raises(
            ValueError, match=r"out\.partial is being written by another process; allowed: one at a time"
        ):
            stream.prune_folder(source, tmp_path / "out", models.windows(), WANDA, progress=False)
    finally:
        os.close(handle)
    stream.prune_folder(source, tmp_path / "out", models.windows(), WANDA, progress=False)
