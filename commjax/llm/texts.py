"""Text files, and what calibration and perplexity read of them with the tokenizer of a model folder."""

import os
from pathlib import Path

from commjax.data import bounded
from commjax.llm import checkpoints, perplexity, tokens
from commjax.llm.perplexity import Losses
from commjax.llm.tokens import Windows

LONGEST = 2048  # tokens of a window where the model could read more, as in the papers
MOST_SAMPLES = 2**17  # windows of a calibration; the papers have 128
MOST_TOKENS = 2**26  # of all windows; the papers have 2^18


def documents(path: str | os.PathLike) -> list[str]:
    """Plain text is one document; .json is a list of texts, .jsonl a text or an object with "text" a line; .xz, .gz, .bz2 of these.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "two.jsonl").write_text('{"text": "one"}\\n"two"\\n')
    ...     documents(Path(folder, "two.jsonl"))
    ['one', 'two']
    """
    path = Path(path)
    text = bounded.text(path)
    kind = Path(path.stem).suffix if path.suffix in bounded.PACKED_SUFFIXES else path.suffix
    if kind not in (".json", ".jsonl"):
        return [text]
    try:
        # Not splitlines: U+2028 and U+0085 may stand in a JSON text.
        parts = [text] if kind == ".json" else [line for line in text.split("\n") if line.strip()]
        found = [bounded.parse_json(part, path) for part in parts]
        found = [one["text"] if isinstance(one, dict) else one for one in (found[0] if kind == ".json" else found)]
    except (KeyError, TypeError) as error:
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
    length = window_length(folder, length)
    if samples > MOST_SAMPLES or samples * length > MOST_TOKENS:
        raise ValueError(
            f"samples={samples} windows of {length} tokens; allowed: {MOST_SAMPLES} windows, {MOST_TOKENS} tokens, at most"
        )
    found, encode = documents(path), tokens.load(folder).encode
    try:
        if len(found) == 1:
            windows = tokens.random_windows(encode(found[0]), length, samples, seed)
        else:
            windows = tokens.document_windows(found, encode, length, samples, seed)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    _check_vocabulary(folder, windows)
    return windows


def _check_vocabulary(folder: str | os.PathLike, windows: Windows) -> None:
    size = checkpoints.configs.load(folder).vocab_size
    if windows.max() >= size:
        raise ValueError(
            f"{folder}: its tokenizer gives tokens up to {windows.max()}; allowed by config.json: 0 to {size - 1}"
        )


def losses(
    folder: str | os.PathLike, path: str | os.PathLike, *, length: int | None = None, batch_size: int = 8
) -> Losses:
    """Of a model folder, read a block at a time, on all windows of a text file; documents are joined by a blank line.

    `perplexity.perplexity` of it is the figure of the papers.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}; allowed: at least 1")
    checkpoint = checkpoints.open_folder(folder)
    length, found, encode = window_length(folder, length), documents(path), tokens.load(folder).encode
    try:
        windows = tokens.evaluation_windows(encode("\n\n".join(found)), length)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    if windows.size > MOST_TOKENS:
        raise ValueError(
            f"{path} has {windows.size} tokens; allowed: {MOST_TOKENS} at most, whose activations are in memory"
        )
    _check_vocabulary(folder, windows)
    numbers = range(checkpoint.model.config.num_hidden_layers)
    blocks = (checkpoints.read_block(checkpoint, i) for i in numbers)
    return perplexity.losses(
        checkpoint.model, checkpoints.read_outer(checkpoint), blocks, windows, batch_size=batch_size
    )
