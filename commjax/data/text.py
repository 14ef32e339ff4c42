"""Text by speaker, cut into windows of characters. The task is to predict the next character."""

import os
import re
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int32

from commjax.data.images import data_folder

PADDING, UNKNOWN = 0, 1
_OPENING = re.compile(r"\s*(\S[^\n]*?)\s*:\s*")


class Windows(NamedTuple):
    """The windows of all speakers, one a row. ``partition.by_group(speakers)`` makes each speaker a client.

    Attributes:
        inputs: The ids of the characters, ``PADDING`` after the end of a speaker's text.
        targets: ``inputs`` shifted by one character, padded in the same way.
        speakers: The name of the speaker of each window, [N].
        vocabulary: The characters in the order of their ids, which start at 2.

    >>> Windows(np.array([[2, 3]], "i4"), np.array([[3, 0]], "i4"), np.array(["A"]), "ab").mask
    array([[ True, False]])
    """

    inputs: Int32[np.ndarray, "N length"]
    targets: Int32[np.ndarray, "N length"]
    speakers: np.ndarray
    vocabulary: str

    @property
    def mask(self) -> Bool[np.ndarray, "N length"]:
        """True where there is a character to predict."""
        return self.targets != PADDING

    @property
    def num_ids(self) -> int:
        """The number of ids: padding, unknown and the characters. It is the width of a network's last layer."""
        return len(self.vocabulary) + 2


def speeches(text: str) -> list[tuple[str, str]]:
    """Split a text into speeches.

    A line "NAME:" starts a speech, and a blank line ends it. Speeches without words are dropped.

    Args:
        text: The text.

    Returns:
        The pairs (speaker, speech) in order.

    >>> speeches("First Citizen:\\nSpeak:\\nspeak.\\n\\nAll:\\nResolved.\\n")
    [('First Citizen', 'Speak:\\nspeak.'), ('All', 'Resolved.')]
    """
    pairs = []
    for block in re.split(r"\n[ \t]*\n\s*", text.replace("\r\n", "\n").strip()):
        opening, _, speech = block.partition("\n")
        name = _OPENING.fullmatch(opening)
        if name is None:
            raise ValueError(f"text: a block begins with {opening[:60]!r}; allowed: a line 'NAME:', then the speech")
        if speech.strip():
            pairs.append((" ".join(name[1].split()), speech))
    return pairs


def encode(text: str, vocabulary: str) -> Int32[np.ndarray, "N"]:
    """Convert a text to ids.

    Args:
        text: The text.
        vocabulary: The characters that have the ids 2, 3, ... in this order. Any other character gets ``UNKNOWN``.

    Returns:
        The id of each character.

    >>> encode("abz", "ab")
    array([2, 3, 1], dtype=int32)
    """
    ids = {character: i for i, character in enumerate(vocabulary, 2)}
    return np.array([ids.get(character, UNKNOWN) for character in text], np.int32)


def decode(ids: Int32[np.ndarray, "N"], vocabulary: str) -> str:
    """Convert ids to a text.

    Args:
        ids: The ids.
        vocabulary: The characters of the ids 2, 3, ...

    Returns:
        The text. Padding gives no character, unknown gives U+FFFD.

    >>> decode(encode("abba", "ab"), "ab")
    'abba'
    """
    characters = ["", "\N{REPLACEMENT CHARACTER}", *vocabulary]
    return "".join(characters[i] for i in ids)


def roles(text: str, *, length: int = 80, minimum: int = 1, vocabulary: str | None = None) -> Windows:
    """Join the speeches of each speaker by a line feed and cut them into windows.

    Every character except a speaker's first is the target of exactly one window. The last window is padded.

    Thesis: Sec. 3.3.2 (Shakespeare, next character).
    Differs (docs/errata.md): S9 (the thesis does not say which Shakespeare text). In the LEAF and TFF files, which have
    1129 and 715 clients, a client is a role in one play.

    Args:
        text: The text, as in ``speeches``.
        length: The number of characters of a window.
        minimum: Speakers with fewer windows are dropped.
        vocabulary: The characters, each once. The default is the sorted characters of ``text``.

    Returns:
        The windows of all speakers, sorted by name.

    >>> windows = roles("A:\\nabcd\\n\\nB:\\nb\\n", length=2)
    >>> [decode(ids, windows.vocabulary) for ids in windows.inputs]
    ['ab', 'c']
    >>> [decode(ids, windows.vocabulary) for ids in windows.targets]
    ['bc', 'd']
    """
    if length < 1 or minimum < 1:
        raise ValueError(f"length={length}, minimum={minimum}; allowed: at least 1 each")
    vocabulary = "".join(sorted(set(text))) if vocabulary is None else vocabulary
    if len(set(vocabulary)) != len(vocabulary):
        raise ValueError(f"vocabulary={vocabulary!r}; allowed: every character once")
    spoken: dict[str, list[str]] = {}
    for speaker, speech in speeches(text):
        spoken.setdefault(speaker, []).append(speech)
    rows, speakers = [], []
    for speaker in sorted(spoken):
        ids = encode("\n".join(spoken[speaker]), vocabulary)
        count = -(-(len(ids) - 1) // length)
        if count < minimum:
            continue
        shifted = np.full((2, count * length), PADDING, np.int32)
        shifted[:, : len(ids) - 1] = ids[:-1], ids[1:]
        rows.append(shifted.reshape(2, count, length))
        speakers += [speaker] * count
    if not rows:
        raise ValueError(f"no speaker has minimum={minimum} windows of length={length}; allowed: what the text has")
    inputs, targets = np.concatenate(rows, axis=1)
    return Windows(inputs, targets, np.array(speakers), vocabulary)


def load(name: str = "shakespeare", folder: str | os.PathLike | None = None) -> str:
    """Read the text ``folder/name/input.txt``.

    Args:
        name: The name of the subfolder.
        folder: The folder that contains ``name/``. The default is the environment variable ``COMMJAX_DATA``.

    Returns:
        The text.

    >>> import pathlib, tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = pathlib.Path(folder, "shakespeare", "input.txt")
    ...     path.parent.mkdir()
    ...     _ = path.write_text("All:\\nSpeak.")
    ...     load(folder=folder)
    'All:\\nSpeak.'
    """
    path = data_folder(name, folder) / "input.txt"
    if not path.is_file():
        raise FileNotFoundError(
            f"no {path}: put the text there, a line 'NAME:' before and a blank line after each speech"
        )
    return path.read_text(encoding="utf-8")
