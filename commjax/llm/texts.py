"""Read text files for calibration and perplexity, with the tokenizer of a model folder."""

import os
from pathlib import Path

from commjax.data import bounded
from commjax.llm import checkpoints, perplexity, tokens
from commjax.llm.perplexity import Losses
from commjax.llm.tokens import Windows

LONGEST = 2048  # default length of a window if the model allows more, as in the papers
MOST_SAMPLES = 2**17  # limit of windows of a calibration; the papers use 128
MOST_TOKENS = 2**26  # limit of tokens of all windows; the papers use 2^18


def documents(path: str | os.PathLike) -> list[str]:
    """Read the documents of a text file.

        .json      a list of texts, or of objects with a "text"
        .jsonl     one text, or one object with a "text", per line
        others     plain text, one document

    Args:
        path: The file, plain or packed as .xz, .gz or .bz2.

    Returns:
        The documents.

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
        # Not splitlines, which also splits at U+2028 and U+0085: these may occur in a JSON text.
        parts = [text] if kind == ".json" else [line for line in text.split("\n") if line.strip()]
        values = [bounded.parse_json(part, path) for part in parts]
        entries = values[0] if kind == ".json" else values
        texts = [entry["text"] if isinstance(entry, dict) else entry for entry in entries]
    except (KeyError, TypeError) as error:
        raise ValueError(f"{path} is not {kind[1:]} of texts: {error!r}") from error
    if not texts or not all(isinstance(entry, str) for entry in texts):
        raise ValueError(f"{path} holds no list of texts; allowed: strings, or objects with a string 'text'")
    return texts


def window_length(folder: str | os.PathLike, length: int | None = None) -> int:
    """Choose the length of windows for a model.

    Args:
        folder: The model folder.
        length: The length, at most that of the model. The default is the model's longest, but at most 2048 (`LONGEST`).

    Returns:
        The length.
    """
    most = checkpoints.configs.load(folder).max_position_embeddings
    length = min(most, LONGEST) if length is None else length
    if not 2 <= length <= most:
        raise ValueError(f"window={length}; allowed: 2 to max_position_embeddings={most}")
    return length


def calibration(
    folder: str | os.PathLike, path: str | os.PathLike, *, samples: int = 128, length: int | None = None, seed: int = 0
) -> Windows:
    """Draw random windows from a text file for calibration.

    A file with one document gives windows that start anywhere (`tokens.random_windows`). A file with many documents
    gives windows as Wanda's loader of C4 draws them (`tokens.document_windows`).

    Args:
        folder: The model folder, with its tokenizer.
        path: The text file, as in `documents`.
        samples: The number of windows.
        length: The length of a window, as in `window_length`.
        seed: The seed of the draw.

    Returns:
        The windows.
    """
    length = window_length(folder, length)
    if samples > MOST_SAMPLES or samples * length > MOST_TOKENS:
        raise ValueError(
            f"samples={samples} windows of {length} tokens; "
            f"allowed: {MOST_SAMPLES} windows, {MOST_TOKENS} tokens, at most"
        )
    texts, encode = documents(path), tokens.load(folder).encode
    try:
        if len(texts) == 1:
            windows = tokens.random_windows(encode(texts[0]), length, samples, seed)
        else:
            windows = tokens.document_windows(texts, encode, length, samples, seed)
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
    """Compute the losses of a model folder on all windows of a text file.

    The model is read one block at a time. Documents are joined by a blank line. `perplexity.perplexity` of the result
    is the perplexity of the papers.

    Args:
        folder: The model folder, with its tokenizer.
        path: The text file, as in `documents`.
        length: The length of a window, as in `window_length`.
        batch_size: The number of windows that go through a block at once.

    Returns:
        The loss of each window.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size={batch_size}; allowed: at least 1")
    checkpoint = checkpoints.open_folder(folder)
    length, texts, encode = window_length(folder, length), documents(path), tokens.load(folder).encode
    try:
        windows = tokens.evaluation_windows(encode("\n\n".join(texts)), length)
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
