"""Prune a model folder into another one, with little memory.

Memory holds one block, the block before it until it is written, and the activations.

The work is done in `OUT.partial`, which is renamed to OUT at the end.  Every finished block is a shard of its own, with
its sha256 in `manifest.json`.  To resume a run that was killed, call it again with the same arguments.  It continues
after the last finished block and ends with the same bits: it recomputes the activations from the pruned blocks, so they
are not stored on disk.  Every byte of the source is hashed first, so that a run is never continued on another source,
and again before the result is published: a source that is written meanwhile ends the run with an error.  A shard that
was altered or lost since it was written is computed again, with the blocks after it.
"""

import fcntl
import glob
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from commjax import __version__
from commjax.core.files import is_temporary
from commjax.core.identity import digest
from commjax.core.progress import progress_bar
from commjax.data import bounded
from commjax.llm import checkpoints, export, names
from commjax.llm.base import Layers
from commjax.llm.checkpoints import Checkpoint
from commjax.pruning import model as in_memory
from commjax.pruning import recipe as recipes
from commjax.pruning import shards
from commjax.pruning.model import Layer, Windows
from commjax.pruning.recipe import Recipe

MANIFEST = "manifest.json"
_FORMAT = "commjax-pruned-3"


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
    """Prune the Hugging Face folder `source` into the new folder `out`, which transformers can load.

    Everything is checked before any work: the source (names, shapes, NaN), the recipe, the windows, and that `out` is
    new.  OWL's sparsities are known after a pass of the dense model; they are checked before anything is written.

    Args:
        source: Model folder.
        out: New folder.
        windows: Tokens to calibrate on, [n, t].
        recipe: How to prune.
        batch_size: Windows per batch.
        progress: Show a progress bar, and report on stderr if finished blocks are computed again.
        stop: Called before the first block and after each one.  If it returns True, the block is written and `Stopped`
            is raised; another call with the same arguments continues.

    Returns:
        The result of every layer, as `manifest.json` has it.
    """
    source, out = Path(source), Path(out)
    export.refuse_existing(out)
    checkpoint = checkpoints.open_folder(source)
    stamps = shards.stamps(checkpoint)
    recipes.check(recipe, checkpoint.model)
    in_memory.check_windows(checkpoint.model, windows, batch_size)
    checkpoint = checkpoints.open_folder(source, finite=True)  # last, because it reads everything
    partial = out.with_name(f"{out.name}.partial")
    identity = {
        "format": _FORMAT,
        "commjax": __version__,
        "recipe": recipes.describe(recipe),
        "calibration": {"windows": list(windows.shape), "batch_size": batch_size, "digest": digest(windows)},
        "source": shards.fingerprint(checkpoint),
    }
    job = _Job(partial, checkpoint, stamps, windows, recipe, batch_size, progress, stop)
    _begin(job, identity)
    with _locked(partial):
        manifest = _resume(partial, checkpoint, identity, progress)
        _run(job, manifest)
        _end(partial, checkpoint)
        if shards.fingerprint(checkpoint) != identity["source"]:
            shutil.rmtree(partial)  # nobody knows which blocks are of which source
            raise ValueError(f"{source} was written while it was read; nothing is published; start again")
        export.publish(partial, out)
    return layers_of(manifest)


def read_manifest(folder: str | os.PathLike) -> dict[str, Any]:
    """Read the manifest that `prune_folder` wrote beside the weights.

    Args:
        folder: Folder of a pruned model, or of an unfinished run.

    Returns:
        The recipe, the calibration, the source, every layer, and the sha256 of every file.
    """
    path = Path(folder) / MANIFEST
    manifest = bounded.read_json(path)
    if not isinstance(manifest, dict):
        raise ValueError(f"{path} holds a {type(manifest).__name__}; allowed: an object")
    return manifest


def layers_of(manifest: dict[str, Any]) -> tuple[Layer, ...]:
    """Return the layers of a manifest, as `prune_folder` returned them.

    Args:
        manifest: The manifest.

    Returns:
        The result of every layer.  Raises a ValueError if the manifest has no such list.
    """
    try:
        return tuple(Layer(**layer) for block in manifest["blocks"] for layer in block)
    except (KeyError, TypeError) as error:
        text = repr(manifest.get("blocks"))[:60]
        raise ValueError(f"{MANIFEST}: blocks={text}; allowed: a list of blocks, each a list of layers") from error


class _Job(NamedTuple):
    """Arguments of a run."""

    partial: Path
    checkpoint: Checkpoint
    stamps: shards.Stamps
    windows: Windows
    recipe: Recipe
    batch_size: int
    progress: bool
    stop: Callable[[], bool]


def _begin(job: _Job, identity: dict[str, Any]) -> None:
    """Create the folder of a new run."""
    partial = job.partial
    # Folders that were left by a process that was killed in this function.
    for torn in partial.parent.glob(f".{glob.escape(partial.name)}.*"):
        if is_temporary(torn.name, partial.name) and torn.is_dir():
            shutil.rmtree(torn)
    if not partial.exists():
        manifest = identity | {"sparsities": _sparsities(job), "blocks": [], "files": {}}
        shards.check_unchanged(job.stamps)
        with export.writing(partial) as folder:
            export.copy_beside(job.checkpoint.folder, folder)
            export.write_json(folder / MANIFEST, _sealed(manifest))


@contextmanager
def _locked(partial: Path) -> Iterator[None]:
    """Hold a lock, so that one process writes the folder.  The lock ends with the process, even if it is killed."""
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
    """Read the manifest, without the blocks whose shards are not as they were written."""
    try:
        manifest = read_manifest(partial)
        _check_manifest(manifest)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{partial} exists and is no unfinished run ({error}); allowed: no such folder, or one of this run"
        ) from error
    for name, value in json.loads(json.dumps(identity)).items():
        if manifest.get(name) != value:
            written, wanted = _differing(manifest.get(name), value)
            raise ValueError(
                f"{partial} is of another run: {name} is {written} there, {wanted} here; remove it, or choose another "
                "folder"
            )
    _remove_torn(partial)
    _forget_altered(partial, checkpoint, manifest, progress)
    return manifest


def _check_manifest(manifest: dict[str, Any]) -> None:
    """Raise a ValueError unless the manifest is as it was written.  `_resume` refuses a manifest of another format."""
    layers_of(manifest)
    if not isinstance(manifest.get("files"), dict):
        raise ValueError(f"{MANIFEST}: files={manifest.get('files')!r}; allowed: an object, file -> sha256")
    if manifest.get("format") == _FORMAT and manifest.get("sha256") != _sealed(manifest)["sha256"]:
        raise ValueError(f"{MANIFEST} is not as it was written: its sha256 is another")


def _sealed(manifest: dict[str, Any]) -> dict[str, Any]:
    """The manifest with the sha256 of its other entries."""
    said = json.dumps({name: value for name, value in manifest.items() if name != "sha256"}, sort_keys=True)
    return manifest | {"sha256": hashlib.sha256(said.encode()).hexdigest()}


def _differing(written: Any, wanted: Any) -> tuple[Any, Any]:
    """Reduce two dictionaries to the entries that differ."""
    if not isinstance(written, dict) or not isinstance(wanted, dict):
        return written, wanted
    names = [name for name in {**written, **wanted} if written.get(name) != wanted.get(name)]
    return {name: written.get(name) for name in names}, {name: wanted.get(name) for name in names}


def _remove_torn(partial: Path) -> None:
    """Remove the files that a killed process was writing."""
    for torn in partial.glob(".*"):
        if is_temporary(torn.name) and torn.is_file():
            torn.unlink()


def _forget_altered(partial: Path, checkpoint: Checkpoint, manifest: dict[str, Any], progress: bool) -> None:
    """Drop the first block whose shard is not as it was written, and all blocks after it.

    They are computed again, with the same bits.
    """
    files = [shards.file_name(checkpoint, number) for number in range(len(manifest["blocks"]) + 1)]
    good = [shards.sha256(partial / file) == manifest["files"].get(file, "none") for file in files]
    if not good[0]:
        manifest["files"].pop(files[0], None)  # it is written again from the source
    if all(good[1:]):
        return
    first = good[1:].index(False)
    if progress:
        print(
            f"{partial / files[first + 1]} is not as it was written: block {first} and those after it are computed "
            "again",
            file=sys.stderr,
        )
    del manifest["blocks"][first:]
    kept = set(files[: first + 1])
    manifest["files"] = {file: sha for file, sha in manifest["files"].items() if file in kept}


def _sparsities(job: _Job) -> list[float]:
    model, outer = job.checkpoint.model, checkpoints.read_outer(job.checkpoint)
    blocks = _blocks(job.checkpoint, 0)
    return in_memory.sparsity_of_blocks(model, outer, blocks, job.windows, job.recipe, job.batch_size).tolist()


def _run(job: _Job, manifest: dict[str, Any]) -> None:
    """Write the shards that the manifest does not have."""
    partial, checkpoint, model = job.partial, job.checkpoint, job.checkpoint.model
    count, finished = model.config.num_hidden_layers, len(manifest["blocks"])
    outer = checkpoints.read_outer(checkpoint)
    if shards.file_name(checkpoint, 0) not in manifest["files"]:
        _write(job, manifest, 0, names.outer_tensors(model, outer))
    if finished == count:
        return
    hidden = in_memory.embed(model, outer, job.windows, job.batch_size)
    del outer
    for number in range(finished):
        in_memory.advance(model, shards.read_block(checkpoint, partial, number), hidden)
    per_block = len(model.linear)
    # A block is written while the next one is computed.
    progress = progress_bar("pruning", count * per_block, finished * per_block, job.progress)
    with progress as bar, ThreadPoolExecutor(1) as disk:
        pruned = in_memory.pruned_blocks(
            model,
            _blocks(checkpoint, finished),
            hidden,
            job.recipe,
            np.asarray(manifest["sparsities"]),
            first=finished,
            told=lambda done, layer: bar(done, {"block": float(layer.block), "error": layer.error}),
        )
        written: Future | None = None
        if job.stop():
            raise _stopped(partial, finished, count)
        for number, (block, layers) in enumerate(pruned, finished):
            if written is not None:
                written.result()  # at most one block waits for the disk
            written = disk.submit(_finish, job, manifest, number, block, layers)
            if number + 1 < count and job.stop():
                written.result()
                raise _stopped(partial, number + 1, count)
        if written is not None:
            written.result()


def _stopped(partial: Path, finished: int, count: int) -> Stopped:
    return Stopped(f"stopped with {finished} of {count} blocks in {partial}; the same command again continues")


def _finish(job: _Job, manifest: dict[str, Any], number: int, block: Layers, layers: tuple[Layer, ...]) -> None:
    """Write the shard of a block, then the manifest, so that the manifest lists only shards that exist."""
    tensors = names.block_tensors(job.checkpoint.model, number, block)
    manifest["blocks"].append([layer._asdict() for layer in layers])
    _write(job, manifest, number + 1, tensors)


def _write(job: _Job, manifest: dict[str, Any], number: int, tensors: dict[str, np.ndarray]) -> None:
    """Write a shard, then the manifest with its sha256; first make sure that the source is what it was."""
    shards.check_unchanged(job.stamps)
    partial, file = job.partial, shards.file_name(job.checkpoint, number)
    manifest["files"] = dict(sorted({**manifest["files"], file: export.write_tensors(partial / file, tensors)}.items()))
    export.write_json(partial / MANIFEST, _sealed(manifest))


def _end(partial: Path, checkpoint: Checkpoint) -> None:
    """Write the index, then open the folder as a user would."""
    _remove_torn(partial)
    # Copied again, because the manifest has no sha256 of these files.
    export.copy_beside(checkpoint.folder, partial, omit=(MANIFEST,))
    files = {name: shards.file_name(checkpoint, 0) for name in shards.tensor_names(checkpoint, None)}
    for number in range(checkpoint.model.config.num_hidden_layers):
        files |= {name: shards.file_name(checkpoint, number + 1) for name in shards.tensor_names(checkpoint, number)}
    export.write_index(partial, files, sum(shards.tensor_bytes(partial / file) for file in set(files.values())))
    checkpoints.open_folder(partial)


def _blocks(checkpoint: Checkpoint, first: int) -> Iterator[Layers]:
    return (checkpoints.read_block(checkpoint, i) for i in range(first, checkpoint.model.config.num_hidden_layers))
