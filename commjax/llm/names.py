"""The names and layouts of a model's layers in a checkpoint. A checkpoint stores [out, in]; kernels are [in, out]."""

from collections.abc import Mapping

import numpy as np

from commjax.llm.base import Layers, Model, Shapes

_LEAVES = {"kernel": "weight", "scale": "weight", "embedding": "weight", "bias": "bias"}


def block_tensors(model: Model, number: int, layers: Layers) -> dict[str, np.ndarray]:
    """Convert the layers of a block to the tensors of a checkpoint.

    Args:
        model: The model.
        number: The number of the block.
        layers: The layers. A ValueError is raised if their shapes do not fit the config.

    Returns:
        Name of Hugging Face -> tensor [out, in].
    """
    return _tensors(layers, model.block_shapes, block_prefixes(model, number))


def outer_tensors(model: Model, layers: Layers) -> dict[str, np.ndarray]:
    """Convert the layers outside of the blocks to the tensors of a checkpoint.

    Args:
        model: The model.
        layers: The layers. A ValueError is raised if their shapes do not fit the config.

    Returns:
        Name of Hugging Face -> tensor [out, in].
    """
    return _tensors(layers, model.outer_shapes, model.outer_prefixes)


def tensor_shapes(model: Model) -> dict[str, tuple[int, ...]]:
    """List every tensor that a checkpoint of the model holds, with its stored shape.

    Args:
        model: The model.

    Returns:
        Name of the tensor -> stored shape.

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
    """The prefix of the tensor names of each layer in block `number`.

    Args:
        model: The model.
        number: The number of the block.

    Returns:
        Layer -> prefix.
    """
    return {layer: model.block_prefix.format(number) + layer for layer in model.block_shapes}


def leaves(shapes: Shapes, prefixes: Mapping[str, str]) -> dict[str, tuple[str, str]]:
    """Map the names of tensors to the leaves of layers.

    Args:
        shapes: The shapes of the layers.
        prefixes: Layer -> prefix of its tensors.

    Returns:
        Name of a tensor -> (layer, leaf), such as ("fc1", "kernel").
    """
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
