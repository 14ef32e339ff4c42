"""A small Llama that is part of the package, and the text that it was trained on: Python's help topics.

`python -m experiments.symwanda.embedded_llm` trains the model and writes the folder `topics` beside this file: weights,
config, and `training.json` with the losses. The tokens are ASCII codes.
"""

import zlib
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import numpy as np

from commjax.llm import checkpoints
from commjax.llm.base import Model, Params
from commjax.llm.tokens import Tokenizer

FOLDER = Path(str(resources.files("commjax.llm"))) / "topics"


class Corpus(NamedTuple):
    """The ids of the texts.

    Attributes:
        train: The text that the model was trained on.
        held_out: The text that it was not trained on.
    """

    train: np.ndarray
    held_out: np.ndarray


def load() -> tuple[Model, Params]:
    """Load the model and its weights.

    Returns:
        The model and its weights in float32.

    >>> model, params = load()
    >>> model.config.num_hidden_layers, model.config.vocab_size
    (4, 128)
    """
    return checkpoints.load(FOLDER)


def tokenizer() -> Tokenizer:
    """Make the tokenizer of the model: the id of a character is its ASCII code.

    Returns:
        The tokenizer. Characters that are not ASCII become question marks.

    >>> tokenizer().encode("a b"), tokenizer().decode([97, 98])
    ([97, 32, 98], 'ab')
    """

    def encode(text: str) -> list[int]:
        return list(text.encode("ascii", "replace"))

    def decode(ids: Sequence[int]) -> str:
        return bytes(ids).decode("ascii")

    return Tokenizer(encode, decode)


def corpus() -> Corpus:
    """Load the help topics of the running Python.

    A topic is held out if the checksum of its name is a multiple of 8. Other versions of Python have slightly different
    texts.

    Returns:
        The ids of the training text and of the held-out text.

    >>> train, held_out = corpus()
    >>> bool(len(train) > len(held_out) > 20_000)
    True
    """
    from pydoc_data.topics import topics

    parts: tuple[list[str], list[str]] = ([], [])
    for name in sorted(topics):
        parts[zlib.crc32(name.encode()) % 8 == 0].append(topics[name])
    train, held_out = (np.array(tokenizer().encode("\n\n".join(part)), np.int32) for part in parts)
    return Corpus(train, held_out)
