"""How a model's layers are called and laid out in a checkpoint: [out, in] there, kernels [in, out] here."""

from collections.abc import Mapping

import numpy as np

from commjax.llm.base import Layers, Model, Shapes

_LEAVES = {"kernel": "weight", "scale": "weight", "embedding": "weight", "bias": "bias"}


def block_tensors(model: Model, number: int, layers: Layers) -> dict[str, np.ndarray]:
    """A block as it is stored: names of Hugging Face, [out, in]."""
    return _tensors(layers, model.block_shapes, block_prefixes(model, number))


def outer_tensors(model: Model, layers: Layers) -> dict[str, np.ndarray]:
    """What is outside of the blocks, as it is stored."""
    return _tensors(layers, model.outer_shapes, model.outer_prefixes)


def tensor_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """Every tensor that a checkpoint of the model holds, with its stored shape.

    >>> from commjax.llm import config, opt
    >>> tensor_shapes(opt.model(config.from_json({"model_type": "opt"})))["model.decoder.layers.0.fc1.weight"]
    (3072, 768)
    """
    parts = [(model.outer_shapes, model.outer_prefixes)]
    parts += [(model.block_shapes, block_prefixes(model, i)) for i in range(model.config.num_hidden_layers)]
    return {
        name: shapes[layer][kind][::-1] if kind == "kernel" else shapes[layer][kind]
        for shapes, prefixes in parts
        for name, (layer, kind) in leaves(shapes, prefixes).items()
    }


def block_prefixes(model: Model, number: int) -> dict[str, str]:
    """layer -> the start of its tensors' names, in block `number`."""
    return {layer: model.block_prefix.format(number) + layer for layer in model.block_shapes}


def leaves(shapes: Shapes, prefixes: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Name of a tensor -> (layer, leaf of it)."""
    return {f"{prefixes[layer]}.{_LEAVES[kind]}": (layer, kind) for layer, kinds in shapes.items() for kind in kinds}


def _tensors(layers: Layers, shapes: Shapes, prefixes: Mapping[str, str]) -> dict[str, np.ndarray]:
    given = {layer: {kind: tuple(leaf.shape) for kind, leaf in kinds.items()} for layer, kinds in layers.items()}
    if given != shapes:
        name = next(name for name in {**shapes, **given} if given.get(name) != shapes.get(name))
        raise ValueError(
            f"layer {name!r} is {given.get(name, 'absent')}; allowed by the config: {shapes.get(name, 'no such layer')}"
        )
    return {
        name: np.asarray(layers[layer][kind]).T if kind == "kernel" else np.asarray(layers[layer][kind])
        for name, (layer, kind) in leaves(shapes, prefixes).items()
    }
