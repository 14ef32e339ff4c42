"""A model folder pruned into another one: in memory is one block, the one before it until it is written, and the activations.

The work is done in `OUT.partial`, which takes the name OUT at the end.  Every finished block is a shard of its own, with its sha256
in `manifest.json`.  To resume a run that was killed, call it again with the same arguments.  It continues after the last finished
block: it recomputes the activations from the pruned blocks, so that they need no place on the disk, and ends with the same bits.
Every byte of the source is hashed first, so that a run is never continued on another source.  A shard that was altered or lost since
it was written is computed again, with the blocks after it.
"""

import fcntl
import glob
import hashlib
import json
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from commjax import __version__
from commjax.core.checkpoint import digest
from commjax.core.progress import progress_bar
from commjax.data import bounded
from commjax.llm import checkpoints, export, names
from commjax.llm.base import Layers
from commjax.llm.checkpoints import Checkpoint
from commjax.pruning import model as in_memory
from commjax.pruning import recipe as recipes
from commjax.pruning.model import Layer, Windows
from commjax.pruning.recipe import Recipe

MANIFEST = "manifest.json"
_FORMAT = "commjax-pruned-3"
# What `export` calls a file or folder that is being written, and what safetensors calls one.
_TORN = re.compile(r"\..+\.[0-9a-f]{8}|\.tmp[A-Za-z0-9]{6}")


class Stopped(Exception):
    """The caller asked `prune_folder` to stop, and all finished blocks are written."""


def prune_folder(
    source: str | os.PathLike,
    out: str | os.PathLike,
    windows: Windows,
    recipe: Recipe,
    *,
    batch_size: int = 8,
    progress: bool = True,
    stop: Callable[[], bool] = lambda: False,
) -> tuple[Layer, ...]:
    """Prune the Hugging Face folder `source` into the new folder `out`, calibrated on `windows` of tokens.

    `out` loads in transformers as it is.  Everything is checked before any work: the source (names, shapes, NaN), the recipe,
    the windows, that `out` is new.  What OWL asks for is known after a pass of the dense model, and checked before anything is
    written.

    Args:
        source: Model folder.
        out: New folder.
        windows: Tokens to calibrate on, [n, t].
        recipe: How to prune.
        batch_size: Windows at a time.
        progress: Show a progress bar, and say on stderr if finished blocks are computed again.
        stop: Called before the first block and after each one.  If it returns True, the block is written and `Stopped` is
            raised; another call with the same arguments continues.
    Returns:
        What became of every layer, as `manifest.json` has it.
    """
    source, out = Path(source), Path(out)
    export.refuse_existing(out)
    checkpoint = checkpoints.open_folder(source)
    recipes.check(recipe, checkpoint.model)
    in_memory.check_windows(checkpoint.model, windows, batch_size)
    checkpoints.open_folder(source, finite=True)  # last, because it reads everything
    partial = out.with_name(f"{out.name}.partial")
    identity = {
        "format": _FORMAT,
        "commjax": __version__,
        "recipe": recipes.describe(recipe),
        "calibration": {"windows": list(windows.shape), "batch_size": batch_size, "digest": digest(windows)},
        "source": _fingerprint(checkpoint),
    }
    _begin(partial, checkpoint, identity, lambda: _sparsities(checkpoint, windows, recipe, batch_size))
    with _locked(partial):
        manifest = _resume(partial, checkpoint, identity, progress)
        _run(_Job(partial, checkpoint, windows, recipe, batch_size, progress, stop), manifest)
        _end(partial, checkpoint)
        export.publish(partial, out)
    return layers_of(manifest)


def read_manifest(folder: str | os.PathLike) -> dict[str, Any]:
    """What `prune_folder` wrote beside the weights: recipe, calibration, source, every layer, and the sha256 of every file."""
    path = Path(folder) / MANIFEST
    manifest = bounded.read_json(path)
    if not isinstance(manifest, dict):
        raise ValueError(f"{path} holds a {type(manifest).__name__}; allowed: an object")
    return manifest


def layers_of(manifest: dict[str, Any]) -> tuple[Layer, ...]:
    """The layers of a manifest, as `prune_folder` returned them."""
    return tuple(Layer(**one) for block in manifest["blocks"] for one in block)


def _begin(
    partial: Path, checkpoint: Checkpoint, identity: dict[str, Any], sparsities: Callable[[], list[float]]
) -> None:
    """Make the folder of a new run."""
    for torn in partial.parent.glob(f".{glob.escape(partial.name)}.*"):  # of a process killed just here
        if _TORN.fullmatch(torn.name) and torn.is_dir():
            shutil.rmtree(torn)
    if not partial.exists():
        manifest = identity | {"sparsities": sparsities(), "blocks": [], "files": {}}
        with export.writing(partial) as folder:
            export.copy_beside(checkpoint.folder, folder)
            export.write_json(folder / MANIFEST, _sealed(manifest))


@contextmanager
def _locked(partial: Path) -> Iterator[None]:
    """Only one process writes a folder; the lock ends with the process, however it ends."""
    handle = os.open(partial, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"{partial} is being written by another process; allowed: one at a time") from error
        yield
    finally:
        os.close(handle)


def _resume(partial: Path, checkpoint: Checkpoint, identity: dict[str, Any], progress: bool) -> dict[str, Any]:
    """The manifest, without the blocks whose shards are not as they were written."""
    try:
        manifest = read_manifest(partial)
        _check_manifest(manifest)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{partial} exists and is no unfinished run ({error}); allowed: no such folder, or one of this run"
        ) from error
    for name, value in json.loads(json.dumps(identity)).items():
        if manifest.get(name) != value:
            there, here = _differing(manifest.get(name), value)
            raise ValueError(
                f"{partial} is of another run: {name} is {there} there, {here} here; remove it, or choose another folder"
            )
    _remove_torn(partial)
    _forget_altered(partial, checkpoint, manifest, progress)
    return manifest


def _check_manifest(manifest: dict[str, Any]) -> None:
    """ValueError unless the manifest is as it was written; one of another format is left to the comparison with this run."""
    if manifest.get("format") == _FORMAT and manifest.get("sha256") != _sealed(manifest)["sha256"]:
        raise ValueError(f"{MANIFEST} is not as it was written: its sha256 is another")


def _sealed(manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest with the sha256 of all else that it says."""
    said = json.dumps({name: value for name, value in manifest.items() if name != "sha256"}, sort_keys=True)
    return manifest | {"sha256": hashlib.sha256(said.encode()).hexdigest()}


def _differing(there: Any, here: Any) -> tuple[Any, Any]:
    """Of two objects only the entries that differ."""
    if not isinstance(there, dict) or not isinstance(here, dict):
        return there, here
    names = [name for name in {**there, **here} if there.get(name) != here.get(name)]
    return {name: there.get(name) for name in names}, {name: here.get(name) for name in names}


def _remove_torn(partial: Path) -> None:
    """Remove what a killed process was writing."""
    for torn in partial.glob(".*"):
        if _TORN.fullmatch(torn.name) and torn.is_file():
            torn.unlink()


def _forget_altered(partial: Path, checkpoint: Checkpoint, manifest: dict[str, Any], progress: bool) -> None:
    """Drop the blocks from the first whose shard is not as it was written: they are computed again, to the same bits."""
    shards = [_shard(checkpoint, number) for number in range(len(manifest["blocks"]) + 1)]
    good = [_sha256(partial / file) == manifest["files"].get(file, "none") for file in shards]
    if not good[0]:
        manifest["files"].pop(shards[0], None)  # written again from the source
    if all(good[1:]):
        return
    first = good[1:].index(False)
    if progress:
        print(
            f"{partial / shards[first + 1]} is not as it was written: block {first} and those after it are computed again",
            file=sys.stderr,
        )
    del manifest["blocks"][first:]
    kept = set(shards[: first + 1])
    manifest["files"] = {file: sha for file, sha in manifest["files"].items() if file in kept}


def _sparsities(checkpoint: Checkpoint, windows: Windows, recipe: Recipe, batch_size: int) -> list[float]:
    model, outer = checkpoint.model, checkpoints.read_outer(checkpoint)
    blocks = _blocks(checkpoint, 0)
    return in_memory.sparsity_of_blocks(model, outer, blocks, windows, recipe, batch_size).tolist()


class _Job(NamedTuple):
    """What a run was called with."""

    partial: Path
    checkpoint: Checkpoint
    windows: Windows
    recipe: Recipe
    batch_size: int
    progress: bool
    stop: Callable[[], bool]


def _run(job: _Job, manifest: dict[str, Any]) -> None:
    """Write the shards that the manifest does not have."""
    partial, checkpoint, model = job.partial, job.checkpoint, job.checkpoint.model
    count, finished = model.config.num_hidden_layers, len(manifest["blocks"])
    outer = checkpoints.read_outer(checkpoint)
    if _shard(checkpoint, 0) not in manifest["files"]:
        _write(partial, checkpoint, manifest, 0, names.outer_tensors(model, outer))
    if finished == count:
        return
    hidden = in_memory.embed(model, outer, job.windows, job.batch_size)
    del outer
    for number in range(finished):
        in_memory.advance(model, _read_shard(checkpoint, partial, number), hidden)
    layers = len(model.linear)
    # A block is written while the next one is computed.
    with progress_bar("pruning", count * layers, finished * layers, job.progress) as bar, ThreadPoolExecutor(1) as disk:
        pruned = in_memory.pruned_blocks(
            model,
            _blocks(checkpoint, finished),
            hidden,
            job.recipe,
            np.asarray(manifest["sparsities"]),
            finished,
            lambda done, layer: bar(done, {"block": float(layer.block), "error": layer.error}),
        )
        written: Future | None = None
        if job.stop():
            raise _stopped(partial, finished, count)
        for number, (block, found) in enumerate(pruned, finished):
            if written is not None:
                written.result()  # at most one block waits for the disk
            written = disk.submit(_finish, partial, checkpoint, manifest, number, block, found)
            if number + 1 < count and job.stop():
                written.result()
                raise _stopped(partial, number + 1, count)
        if written is not None:
            written.result()


def _stopped(partial: Path, finished: int, count: int) -> Stopped:
    return Stopped(f"stopped with {finished} of {count} blocks in {partial}; the same command again continues")


def _finish(
    partial: Path,
    checkpoint: Checkpoint,
    manifest: dict[str, Any],
    number: int,
    block: Layers,
    found: tuple[Layer, ...],
) -> None:
    """The shard first: what the manifest says is there."""
    tensors = names.block_tensors(checkpoint.model, number, block)
    manifest["blocks"].append([one._asdict() for one in found])
    _write(partial, checkpoint, manifest, number + 1, tensors)


def _write(
    partial: Path, checkpoint: Checkpoint, manifest: dict[str, Any], number: int, tensors: dict[str, np.ndarray]
) -> None:
    """A shard, then the manifest with its sha256."""
    file = _shard(checkpoint, number)
    manifest["files"] = dict(sorted({**manifest["files"], file: export.write_tensors(partial / file, tensors)}.items()))
    export.write_json(partial / MANIFEST, _sealed(manifest))


def _end(partial: Path, checkpoint: Checkpoint) -> None:
    """The index; then the folder is read as anybody will."""
    _remove_torn(partial)
    export.copy_beside(
        checkpoint.folder, partial, omit=(MANIFEST,)
    )  # again: these files have no sha256 in the manifest
    files = {name: _shard(checkpoint, 0) for name in _names(checkpoint, None)}
    for number in range(checkpoint.model.config.num_hidden_layers):
        files |= {name: _shard(checkpoint, number + 1) for name in _names(checkpoint, number)}
    export.write_index(partial, files, sum(_bytes(partial / file) for file in set(files.values())))
    checkpoints.open_folder(partial)


def _bytes(path: Path) -> int:
    """Of the tensors: what comes after the header, whose length comes first."""
    with open(path, "rb") as file:
        return path.stat().st_size - 8 - int.from_bytes(file.read(8), "little")


def _shard(checkpoint: Checkpoint, number: int) -> str:
    """Shard 0 is what is outside of the blocks."""
    return f"model-{number + 1:05d}-of-{checkpoint.model.config.num_hidden_layers + 1:05d}.safetensors"


def _names(checkpoint: Checkpoint, block: int | None) -> Iterable[str]:
    """The tensors of a block, or of what is outside of the blocks."""
    model = checkpoint.model
    if block is None:
        return names.leaves(model.outer_shapes, model.outer_prefixes)
    return names.leaves(model.block_shapes, names.block_prefixes(model, block))


def _blocks(checkpoint: Checkpoint, first: int) -> Iterator[Layers]:
    return (checkpoints.read_block(checkpoint, i) for i in range(first, checkpoint.model.config.num_hidden_layers))


def _read_shard(checkpoint: Checkpoint, partial: Path, number: int) -> Layers:
    path = partial / _shard(checkpoint, number + 1)
    tensors = {name: (path, name) for name in _names(checkpoint, number)}
    return checkpoints.read_block(checkpoint._replace(tensors=tensors), number)


def _fingerprint(checkpoint: Checkpoint) -> dict[str, str | None]:
    """The sha256 of config.json and of every file of weights: every byte of them."""
    files = {checkpoint.folder / "config.json", *(path for path, _ in checkpoint.tensors.values())}
    return {path.name: _sha256(path) for path in sorted(files)}


def _sha256(path: Path) -> str | None:
    """Of a file, read in pieces; None if it is not there."""
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except FileNotFoundError:
        return None
