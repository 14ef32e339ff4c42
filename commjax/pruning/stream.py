"""A model folder pruned into another one: in memory is one block, the one before it until it is written, and the activations.

The work is done in `OUT.partial`, which takes the name OUT at the end.  Every finished block is a shard of its own and a line in
`manifest.json`; a run that was killed, however, is called again with the same arguments and goes on after the last of them.  It
recomputes the activations from the pruned blocks, so that they need no place on the disk, and ends with the same bits.
"""

import glob
import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from commjax import __version__
from commjax.checkpoint import digest
from commjax.llm import checkpoints, export, names
from commjax.llm.base import Layers
from commjax.llm.checkpoints import Checkpoint
from commjax.progress import progress_bar
from commjax.pruning import model as in_memory
from commjax.pruning import recipe as recipes
from commjax.pruning.model import Layer, Windows
from commjax.pruning.recipe import Recipe

MANIFEST = "manifest.json"
_FORMAT = "commjax-pruned-2"
_TORN = re.compile(r"\..+\.[0-9a-f]{8}")  # what `export` calls a file or folder that is being written
_PAGE, _PAGES = 4096, 64  # of every file, for its fingerprint


def prune_folder(
    source: str | os.PathLike,
    out: str | os.PathLike,
    windows: Windows,
    recipe: Recipe,
    *,
    batch_size: int = 8,
    progress: bool = True,
) -> tuple[Layer, ...]:
    """Prune the Hugging Face folder `source` into the new folder `out`, calibrated on `windows` of tokens.

    `out` loads in transformers as it is.  Everything is checked before any work: the source (names, shapes, NaN), the recipe,
    the windows, that `out` is new.  What OWL asks for is known after a pass of the dense model, and checked before anything is
    written.  Returns what became of every layer, as `manifest.json` has it.
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
    manifest = _begin(partial, checkpoint, identity, lambda: _sparsities(checkpoint, windows, recipe, batch_size))
    _run(partial, checkpoint, windows, recipe, batch_size, progress, manifest)
    _end(partial, checkpoint)
    export.publish(partial, out)
    return layers_of(manifest)


def read_manifest(folder: str | os.PathLike) -> dict[str, Any]:
    """What `prune_folder` wrote beside the weights: recipe, calibration, source, and every layer."""
    return json.loads((Path(folder) / MANIFEST).read_text(encoding="utf-8"))


def layers_of(manifest: dict[str, Any]) -> tuple[Layer, ...]:
    """The layers of a manifest, as `prune_folder` returned them."""
    return tuple(Layer(**one) for block in manifest["blocks"] for one in block)


def _begin(
    partial: Path, checkpoint: Checkpoint, identity: dict[str, Any], sparsities: Callable[[], list[float]]
) -> dict[str, Any]:
    """The manifest of a new run, or of the one to be continued."""
    for torn in partial.parent.glob(f".{glob.escape(partial.name)}.*"):  # of a process killed just here
        if _TORN.fullmatch(torn.name) and torn.is_dir():
            shutil.rmtree(torn)
    if not partial.exists():
        manifest = identity | {"sparsities": sparsities(), "blocks": []}
        with export.writing(partial) as folder:
            export.copy_beside(checkpoint.folder, folder)
            export.write_json(folder / MANIFEST, manifest)
        return manifest
    try:
        manifest = read_manifest(partial)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"{partial} exists and is no unfinished run ({error}); allowed: no such folder, or one of this run"
        ) from error
    for name, value in json.loads(json.dumps(identity)).items():
        if manifest.get(name) != value:
            raise ValueError(
                f"{partial} is of another run: {name} is {manifest.get(name)} there, {value} here; remove it, or choose "
                "another folder"
            )
    for torn in partial.glob(".*"):  # what a killed process was writing
        if _TORN.fullmatch(torn.name) and torn.is_file():
            torn.unlink()
    return manifest


def _sparsities(checkpoint: Checkpoint, windows: Windows, recipe: Recipe, batch_size: int) -> list[float]:
    model, outer = checkpoint.model, checkpoints.read_outer(checkpoint)
    blocks = _blocks(checkpoint, 0)
    return in_memory.sparsity_of_blocks(model, outer, blocks, windows, recipe, batch_size).tolist()


def _run(
    partial: Path,
    checkpoint: Checkpoint,
    windows: Windows,
    recipe: Recipe,
    batch_size: int,
    progress: bool,
    manifest: dict[str, Any],
) -> None:
    model = checkpoint.model
    count, finished = model.config.num_hidden_layers, len(manifest["blocks"])
    outer = checkpoints.read_outer(checkpoint)
    if not (partial / _shard(checkpoint, 0)).exists():
        export.write_tensors(partial / _shard(checkpoint, 0), names.outer_tensors(model, outer))
    if finished == count:
        return
    hidden = in_memory.embed(model, outer, windows, batch_size)
    del outer
    for number in range(finished):
        in_memory.advance(model, _read_shard(checkpoint, partial, number), hidden)
    layers = len(model.linear)
    # A block is written while the next one is computed.
    with progress_bar("pruning", count * layers, finished * layers, progress) as bar, ThreadPoolExecutor(1) as disk:
        pruned = in_memory.pruned_blocks(
            model,
            _blocks(checkpoint, finished),
            hidden,
            recipe,
            np.asarray(manifest["sparsities"]),
            finished,
            lambda done, layer: bar(done, {"block": float(layer.block), "error": layer.error}),
        )
        written: Future | None = None
        for number, (block, found) in enumerate(pruned, finished):
            if written is not None:
                written.result()  # at most one block waits for the disk
            written = disk.submit(_finish, partial, checkpoint, manifest, number, block, found)
        if written is not None:
            written.result()


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
    export.write_tensors(partial / _shard(checkpoint, number + 1), tensors)
    manifest["blocks"].append([one._asdict() for one in found])
    export.write_json(partial / MANIFEST, manifest)


def _end(partial: Path, checkpoint: Checkpoint) -> None:
    """The index; then the folder is read as anybody will."""
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


def _fingerprint(checkpoint: Checkpoint) -> str:
    """Changes with the config, with the names and sizes of the files, and with their bytes at 64 places of each."""
    sha = hashlib.sha256((checkpoint.folder / "config.json").read_bytes())
    for path in sorted({path for path, _ in checkpoint.tensors.values()}):
        size = path.stat().st_size
        sha.update(f"{path.name} {size} ".encode())
        with open(path, "rb") as file:
            for i in range(_PAGES):
                file.seek(max(0, size - _PAGE) * i // (_PAGES - 1))
                sha.update(file.read(_PAGE))
    return sha.hexdigest()[:16]
