"""Text files, and what calibration and perplexity read of them with the tokenizer of a model folder."""

import json
import os
from pathlib import Path

from commjax.data import download
from commjax.llm import checkpoints, perplexity, tokens
from commjax.llm.perplexity import Losses
from commjax.llm.tokens import Windows

LONGEST = 2048  # tokens of a window where the model could read more, as in the papers


def documents(path: str | os.PathLike) -> list[str]:
    """Plain text is one document; .json is a list of texts, .jsonl a text or an object with "text" a line; .xz, .gz, .bz2 of these.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "two.jsonl").write_text('{"text": "one"}\\n"two"\\n')
    ...     documents(Path(folder, "two.jsonl"))
    ['one', 'two']
    """
    path = Path(path)
    with open(path, "rb") as raw:
        text = download.unpack(raw, path.suffix).read().decode("utf-8")
    kind = Path(path.stem).suffix if path.suffix in download.PACKED_SUFFIXES else path.suffix
    if kind not in (".json", ".jsonl"):
        return [text]
    try:
        # Not splitlines: U+2028 and U+0085 may stand in a JSON text.
        found = json.loads(text) if kind == ".json" else [json.loads(line) for line in text.split("\n") if line.strip()]
        found = [one["text"] if isinstance(one, dict) else one for one in found]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not {kind[1:]} of texts: {error!r}") from error
    if not found or not all(isinstance(one, str) for one in found):
        raise ValueError(f"{path} holds no list of texts; allowed: strings, or objects with a string 'text'")
    return found


def window_length(folder: str | os.PathLike, length: int | None = None) -> int:
    """`length`, by default the longest that the model reads, 2048 at most."""
    most = checkpoints.configs.load(folder).max_position_embeddings
    length = min(most, LONGEST) if length is None else length
    if not 2 <= length <= most:
        raise ValueError(f"window={length}; allowed: 2 to max_position_embeddings={most}")
    return length


def calibration(
    folder: str | os.PathLike, path: str | os.PathLike, *, samples: int = 128, length: int | None = None, seed: int = 0
) -> Windows:
    """Random windows of a text file: of one text anywhere, of many documents as the loader of C4 draws them."""
    length, found, encode = window_length(folder, length), documents(path), tokens.load(folder).encode
    try:
        if len(found) == 1:
            return tokens.random_windows(encode(found[0]), length, samples, seed)
        return tokens.document_windows(found, encode, length, samples, seed)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error


def losses(
    folder: str | os.PathLike, path: str | os.PathLike, *, length: int | None = None, batch_size: int = 8
) -> Losses:
    """Of a model folder, read a block at a time, on all windows of a text file; documents are joined by a blank line.

    `perplexity.perplexity` of it is the figure of the papers.
    """
    length, found, encode = window_length(folder, length), documents(path), tokens.load(folder).encode
    try:
        windows = tokens.evaluation_windows(encode("\n\n".join(found)), length)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    checkpoint = checkpoints.open_folder(folder)
    numbers = range(checkpoint.model.config.num_hidden_layers)
    blocks = (checkpoints.read_block(checkpoint, i) for i in numbers)
    return perplexity.losses(
        checkpoint.model, checkpoints.read_outer(checkpoint), blocks, windows, batch_size=batch_size
    )
