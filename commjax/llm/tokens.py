"""Tokenizers from a model folder, and the windows of tokens for calibration and perplexity."""

import heapq
import os
import random
import struct
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int32

from commjax.data import bounded
from commjax.llm.checkpoints import TOKENIZER

BOS, _FIRST_BYTE = 1, 3  # ids of llama2.c: 0 unknown, 1 begin, 2 end, then the 256 bytes

Windows = Int32[np.ndarray, "n length"]


class Tokenizer(NamedTuple):
    """The two functions of a tokenizer.

    Attributes:
        encode: Function of a text that returns its ids, starting with the first token that the model expects.
        decode: Function of ids that returns the text.
    """

    encode: Callable[[str], list[int]]
    decode: Callable[[Sequence[int]], str]


def load(folder: str | os.PathLike) -> Tokenizer:
    """Load the tokenizer of a model folder.

    Args:
        folder: The model folder, with `tokenizer.bin` of llama2.c or with files that transformers reads (offline).

    Returns:
        The tokenizer.
    """
    folder = Path(folder)
    if (folder / TOKENIZER).is_file():
        return llama2c(folder / TOKENIZER)
    try:
        from transformers import AutoTokenizer
        from transformers.utils import logging
    except ImportError as error:
        raise ImportError("reading a tokenizer needs transformers: pip install 'commjax[llm]'") from error
    if not any(folder.glob("tokenizer*")) and not (folder / "vocab.json").is_file():
        raise ValueError(
            f"{folder} has no tokenizer; allowed: tokenizer.bin of llama2.c, or Hugging Face's files "
            "(tokenizer.json, vocab.json, ...)"
        )
    # For a damaged folder, transformers raises exceptions of any type: Exception itself, KeyError, TypeError.
    verbosity = logging.get_verbosity()
    try:
        logging.set_verbosity_error()
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ValueError(
            f"{folder}: transformers cannot read its tokenizer, {type(error).__name__}: "
            f"{str(error).partition(chr(10))[0]}; "
            "allowed: files that it reads without running code of the folder"
        ) from error
    finally:
        logging.set_verbosity(verbosity)
    return Tokenizer(lambda text: list(tokenizer(text)["input_ids"]), lambda ids: str(tokenizer.decode(list(ids))))


def llama2c(path: str | os.PathLike) -> Tokenizer:
    """Load a llama2.c tokenizer.

    A text is encoded as BOS (the token that begins a text), a leading space and the characters; characters that are not
    tokens become bytes. Then the two neighbouring tokens whose union has the best score are joined, the leftmost first
    among equals, until no union is a token.

    The file holds the length of the longest token (int32), and for each token its score (float32), its length (int32)
    and its bytes.

    Args:
        path: The file.

    Returns:
        The tokenizer.
    """
    pieces, scores = _pieces(Path(path))
    ids: dict[bytes, int] = {}
    for i, piece in enumerate(pieces):
        ids.setdefault(piece, i)

    def encode(text: str) -> list[int]:
        start = [id for character in (" " + text if text else "") for id in _character(ids, character)]
        return [BOS, *_merge(start, pieces, scores, ids)]

    def decode(given: Sequence[int]) -> str:
        data = b"".join(_bytes(pieces, i) for i in given if i not in (BOS, BOS + 1))
        return data.decode("utf-8", "replace").removeprefix(" ")

    return Tokenizer(encode, decode)


def _pieces(path: Path) -> tuple[list[bytes], list[float]]:
    data, at = bounded.content(path), 4
    pieces, scores = [], []
    try:
        longest = struct.unpack_from("<i", data)[0]
        while at < len(data):
            score, length = struct.unpack_from("<fi", data, at)
            at += 8 + length
            if not 0 <= length <= longest or at > len(data):
                raise struct.error(f"token {len(pieces)} has length {length}")
            pieces.append(data[at - length : at])
            scores.append(score)
    except struct.error as error:
        raise ValueError(f"{path} is not a llama2.c tokenizer: {error}") from error
    if len(pieces) < _FIRST_BYTE + 256:
        raise ValueError(
            f"{path} has {len(pieces)} tokens; allowed: at least {_FIRST_BYTE + 256}, of which 256 are bytes"
        )
    return pieces, scores


def _character(ids: dict[bytes, int], character: str) -> list[int]:
    data = character.encode("utf-8", "surrogatepass")
    return [ids[data]] if data in ids else [byte + _FIRST_BYTE for byte in data]


def _bytes(pieces: list[bytes], i: int) -> bytes:
    byte = i - _FIRST_BYTE
    return bytes([byte]) if 0 <= byte < 256 else pieces[i]


def _merge(start: list[int], pieces: list[bytes], scores: list[float], ids: dict[bytes, int]) -> list[int]:
    """Join neighbours with a linked list of tokens and a heap of possible unions: n log n instead of llama2.c's n^2."""
    tokens: list[int | None] = list(start)
    count, before, after = len(start), list(range(-1, len(start) - 1)), list(range(1, len(start) + 1))
    heap: list[tuple[float, int, int, int, int]] = []
    neighbours = [(left, left + 1) for left in range(count - 1)]
    while True:
        for left, right in neighbours:
            if left >= 0 and right < count:
                a, b = tokens[left], tokens[right]
                assert a is not None and b is not None
                union = ids.get(pieces[a] + pieces[b])
                if union is not None:
                    heapq.heappush(heap, (-scores[union], left, a, b, union))
        if not heap:
            return [token for token in tokens if token is not None]
        _, left, a, b, union = heapq.heappop(heap)
        right, neighbours = after[left], []
        # The entry is stale if either token has been joined to another one since.
        if tokens[left] == a and right < count and tokens[right] == b:
            tokens[left], tokens[right], after[left] = union, None, after[right]
            if after[left] < count:
                before[after[left]] = left
            neighbours = [(before[left], left), (left, after[left])]


def evaluation_windows(ids: Sequence[int], length: int) -> Windows:
    """Cut a text into floor(n / length) adjacent windows.

    The remaining tokens are dropped. No BOS is added to a window.

    Args:
        ids: The n tokens of the text.
        length: The length of a window.

    Returns:
        The windows.

    >>> evaluation_windows([5, 6, 7, 8, 9], 2).tolist()
    [[5, 6], [7, 8]]
    """
    _check_length(length)
    count = len(ids) // length
    if count == 0:
        raise ValueError(f"ids has {len(ids)} tokens; allowed: at least one window of length={length}")
    return np.asarray(ids[: count * length], np.int32).reshape(count, length)


def random_windows(ids: Sequence[int], length: int, count: int, seed: int) -> Windows:
    """Draw windows of one text, each with a uniform start in 0..n-length-1 (Wanda's loader of WikiText-2).

    Args:
        ids: The n tokens of the text.
        length: The length of a window.
        count: The number of windows.
        seed: The seed of the draw.

    Returns:
        The windows.

    >>> random_windows(range(10), 3, 2, seed=0).tolist()
    [[6, 7, 8], [3, 4, 5]]
    """
    _check_length(length, count)
    if len(ids) <= length:
        raise ValueError(f"ids has {len(ids)} tokens; allowed: more than one window of length={length}")
    draw = random.Random(seed)
    starts = np.array([draw.randint(0, len(ids) - length - 1) for _ in range(count)])
    return np.asarray(ids, np.int32)[starts[:, None] + np.arange(length)]


def document_windows(
    documents: Sequence[str], encode: Callable[[str], list[int]], length: int, count: int, seed: int
) -> Windows:
    """Draw windows from documents (Wanda's loader of C4).

    For each window, documents are drawn until one has more than `length` tokens. The start in it is uniform.

    Args:
        documents: The documents.
        encode: Function of a text that returns its ids.
        length: The length of a window.
        count: The number of windows.
        seed: The seed of the draw.

    Returns:
        The windows.

    >>> document_windows(["short", "a long text"], lambda text: list(text.encode()), 9, 1, seed=0).shape
    (1, 9)
    """
    _check_length(length, count)
    draw, short = random.Random(seed), set()

    def window() -> list[int]:
        while len(short) < len(documents):
            i = draw.randint(0, len(documents) - 1)
            ids = [] if i in short else encode(documents[i])
            if len(ids) > length:
                start = draw.randint(0, len(ids) - length - 1)
                return ids[start : start + length]
            short.add(i)
        raise ValueError(
            f"none of {len(documents)} documents has more than length={length} tokens; allowed: at least one"
        )

    return np.array([window() for _ in range(count)], np.int32)


def padded(rows: Sequence[Sequence[int]], length: int) -> tuple[Windows, Int32[np.ndarray, "n"]]:
    """Cut texts to `length` tokens, or fill them up with 0.

    Args:
        rows: The tokens of each text.
        length: The length of a window.

    Returns:
        The windows, and the number of real tokens of each window.

    >>> [part.tolist() for part in padded([[7], [7, 8, 9]], 2)]
    [[[7, 0], [7, 8]], [1, 2]]
    """
    _check_length(length)
    windows = np.zeros((len(rows), length), np.int32)
    for window, row in zip(windows, rows):
        window[: len(row)] = row[:length]
    return windows, np.array([min(len(row), length) for row in rows], np.int32)


def _check_length(length: int, count: int = 1) -> None:
    if length < 1 or count < 1:
        raise ValueError(f"length={length}, count={count}; allowed: at least 1 each")
