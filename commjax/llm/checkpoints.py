"""Read model folders of Hugging Face: config.json and safetensors, in one file or in shards. Nothing is ever unpickled.

A tensor is stored as [out, in] and held as a kernel [in, out]. The dtypes float32, float16 and bfloat16 are kept.
"""

import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np

from commjax.data import bounded
from commjax.llm import architectures, names
from commjax.llm import config as configs
from commjax.llm.base import Layers, Model, Params, Shapes

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZER = "tokenizer.bin"  # the tokenizer of llama2.c; transformers reads any other
_DTYPES = ("F32", "F16", "BF16")
# Old files contain these buffers. They are ignored, because they follow from the config.
_DERIVED = re.compile(r".*rotary_emb\.inv_freq")


class Checkpoint(NamedTuple):
    """A checked model folder: the names, shapes and dtypes of its tensors fit its config.

    Attributes:
        folder: The folder.
        model: The model of its config.
        tensors: Name of a tensor in a causal model -> (file, name in this file).
    """

    folder: Path
    model: Model
    tensors: dict[str, tuple[Path, str]]


def open_folder(folder: str | os.PathLike, *, finite: bool = False) -> Checkpoint:
    """Check a model folder without loading it.

    Only headers are read, except with `finite=True` or a tied head that is stored. A ValueError or FileNotFoundError is
    raised for missing or extra tensors, an index that names a file outside of the folder, shapes that contradict the
    config, other dtypes, and a head that the config ties but whose stored values differ from the embedding.

    Args:
        folder: The model folder.
        finite: True also reads every tensor and refuses NaN and inf.

    Returns:
        The checkpoint.
    """
    folder = Path(folder)
    model = architectures.model(configs.load(folder))
    headers = {path: _header(path) for path in _files(folder)}
    places: dict[str, tuple[Path, str]] = {}
    for path, header in headers.items():
        for stored in header:
            name = _canonical(stored)
            if name in places:
                raise ValueError(
                    f"{folder}: tensor {stored!r} is in {places[name][0].name} and in {path.name}; allowed: once"
                )
            places[name] = path, stored
    _check_index(folder, {stored: path for path, stored in places.values()})

    wanted = names.tensor_shapes(model)
    tied = "lm_head.weight" in places and model.config.tie_word_embeddings
    extra = [
        name
        for name in places
        if name not in wanted and not _DERIVED.fullmatch(name) and not (tied and name == "lm_head.weight")
    ]
    missing = [name for name in wanted if name not in places]
    for what, some in (("missing", missing), ("extra", extra)):
        if some:
            raise ValueError(
                f"{folder}: {len(some)} {what} tensors, first {sorted(some)[0]!r}; allowed: those of config.json"
            )
    for name, shape in wanted.items():
        path, stored = places[name]
        given, dtype = headers[path][stored]
        if given != shape:
            raise ValueError(f"{folder}: {name} has shape {list(given)}; allowed by config.json: {list(shape)}")
        if dtype not in _DTYPES:
            raise ValueError(f"{folder}: {name} has dtype {dtype}; allowed: {', '.join(_DTYPES)}")
    checkpoint = Checkpoint(folder, model, {name: places[name] for name in wanted})
    if tied:
        _check_tied(checkpoint, places["lm_head.weight"])
    if finite:
        _check_finite(checkpoint)
    return checkpoint


def read_block(checkpoint: Checkpoint, number: int) -> Layers:
    """Read the layers of one block from the disk, and nothing else.

    Args:
        checkpoint: The checkpoint.
        number: The number of the block, from 0.

    Returns:
        The layers.
    """
    count = checkpoint.model.config.num_hidden_layers
    if not 0 <= number < count:
        raise ValueError(f"number={number}; allowed: 0 to {count - 1}, the blocks of {checkpoint.folder}")
    return _read(checkpoint, checkpoint.model.block_shapes, names.block_prefixes(checkpoint.model, number))


def read_outer(checkpoint: Checkpoint) -> Layers:
    """Read the layers outside of the blocks from the disk: embeddings, last norm, head.

    Args:
        checkpoint: The checkpoint.

    Returns:
        The layers.
    """
    return _read(checkpoint, checkpoint.model.outer_shapes, checkpoint.model.outer_prefixes)


def load(folder: str | os.PathLike, *, finite: bool = False) -> tuple[Model, Params]:
    """Load a whole model. The folder is checked by `open_folder` first.

    Args:
        folder: The model folder.
        finite: True also refuses NaN and inf in the tensors.

    Returns:
        The model and its weights.

    >>> import tempfile, jax
    >>> from commjax.llm import base, export
    >>> sizes = {"vocab_size": 5, "hidden_size": 4, "intermediate_size": 6, "num_attention_heads": 2}
    >>> config = configs.from_json({"model_type": "llama", "num_hidden_layers": 1, **sizes})
    >>> tiny = architectures.model(config)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     export.save(folder + "/tiny", tiny, base.init(jax.random.key(0), tiny))
    ...     load(folder + "/tiny")[1].blocks[0]["mlp.up_proj"]["kernel"].shape
    (4, 6)
    """
    checkpoint = open_folder(folder, finite=finite)
    blocks = tuple(read_block(checkpoint, i) for i in range(checkpoint.model.config.num_hidden_layers))
    return checkpoint.model, Params(read_outer(checkpoint), blocks)


def _canonical(stored: str) -> str:
    """The name of a tensor in a causal model. A model that was saved without its head lacks the prefix "model."."""
    return stored if stored.startswith(("model.", "lm_head.")) else f"model.{stored}"


def _files(folder: Path) -> list[Path]:
    if (folder / WEIGHTS).is_file():
        return [folder / WEIGHTS]
    files = _index(folder).values()
    for name in files:
        # Links are followed, because download caches consist of links.
        if not isinstance(name, str) or name != os.path.basename(name) or name in ("", ".", "..") or "\\" in name:
            raise ValueError(f"{folder / INDEX} names the file {name!r}; allowed: a file in the same folder")
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder / INDEX} names {name!r}, which is not there")
    return [folder / name for name in sorted(set(files))]


def _index(folder: Path) -> dict[str, str]:
    path = folder / INDEX
    if not path.is_file():
        raise FileNotFoundError(f"no {WEIGHTS} and no {INDEX} in {folder}; allowed: weights in safetensors")
    index = bounded.read_json(path)
    if not isinstance(index, dict) or "weight_map" not in index:
        raise ValueError(f"{path} has no weight_map; allowed: an object with one")
    files = index["weight_map"]
    if not isinstance(files, dict) or not files:
        raise ValueError(f"{path}: weight_map={repr(files)[:60]}; allowed: an object, tensor -> name of its file")
    return files


def _check_index(folder: Path, paths: dict[str, Path]) -> None:
    if (folder / WEIGHTS).is_file():
        return
    said = _index(folder)
    for name in sorted({*said, *paths}):
        held = paths[name].name if name in paths else "no file"
        if said.get(name) != held:
            raise ValueError(
                f"{folder / INDEX}: {name!r} is in {said.get(name, 'no file')}, but {held} has it; allowed: agreement"
            )


def _header(path: Path) -> dict[str, tuple[tuple[int, ...], str]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "numpy") as file:
            slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  not a dict
            return {name: (tuple(part.get_shape()), part.get_dtype()) for name, part in slices.items()}
    except SafetensorError as error:
        raise ValueError(f"{path} is not a readable safetensors file: {error}") from error


def _get(places: Mapping[str, tuple[Path, str]]) -> Iterator[tuple[str, np.ndarray]]:
    """Read tensors one at a time. Each file is opened again, because an open file keeps every page read in memory."""
    from safetensors import safe_open

    for name, (path, stored) in sorted(places.items(), key=lambda place: place[1][0]):
        with safe_open(path, "numpy") as file:
            tensor = file.get_tensor(stored)
        yield name, tensor


def _read(checkpoint: Checkpoint, shapes: Shapes, prefixes: Mapping[str, str]) -> Layers:
    leaves = names.leaves(shapes, prefixes)
    layers: Layers = {layer: {} for layer in shapes}
    for name, tensor in _get({name: checkpoint.tensors[name] for name in leaves}):
        layer, kind = leaves[name]
        layers[layer][kind] = jnp.asarray(tensor.T if kind == "kernel" else tensor)
    return layers


def _check_tied(checkpoint: Checkpoint, head: tuple[Path, str]) -> None:
    name = f"{checkpoint.model.outer_prefixes['embed_tokens']}.weight"
    tensors = dict(_get({"head": head, "embedding": checkpoint.tensors[name]}))
    if tensors["head"].shape != tensors["embedding"].shape or not np.array_equal(tensors["head"], tensors["embedding"]):
        raise ValueError(
            f"{checkpoint.folder}: lm_head.weight differs from {name}; allowed: the same, or tie_word_embeddings=false"
        )


def _check_finite(checkpoint: Checkpoint) -> None:
    for name, tensor in _get(checkpoint.tensors):
        bad = int(np.sum(~np.isfinite(tensor.astype(np.float32))))
        if bad:
            raise ValueError(f"{checkpoint.folder}: {name} has {bad} values that are NaN or infinite; allowed: none")
