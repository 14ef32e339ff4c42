"""Text by speaker: windows of characters, each to be continued by the next character."""

import os
import re
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Int32

from commjax.data.images import data_folder

PADDING, UNKNOWN = 0, 1
_OPENING = re.compile(r"\s*(\S[^\n]*?)\s*:\s*")


class Windows(NamedTuple):
    """Windows of all speakers, one a row; ``partition.by_group(speakers)`` makes speakers clients.

    ``targets`` is ``inputs`` one character on; both are ``PADDING`` after the end of a speaker's text.

    >>> Windows(np.array([[2, 3]], "i4"), np.array([[3, 0]], "i4"), np.array(["A"]), "ab").mask
    array([[ True, False]])
    """

    inputs: Int32[np.ndarray, "N length"]
    targets: Int32[np.ndarray, "N length"]
    speakers: np.ndarray  # [N], names
    vocabulary: str

    @property
    def mask(self) -> Bool[np.ndarray, "N length"]:
        """Where there is a character to predict."""
        return self.targets != PADDING

    @property
    def num_ids(self) -> int:
        """Padding, unknown, and the characters: the width of a network's last layer."""
        return len(self.vocabulary) + 2


def speeches(text: str) -> list[tuple[str, str]]:
    """(speaker, speech) in order: a line "NAME:" opens a speech, a blank line ends it; speeches of no words are dropped.

    >>> speeches("First Citizen:\\nSpeak:\\nspeak.\\n\\nAll:\\nResolved.\\n")
    [('First Citizen', 'Speak:\\nspeak.'), ('All', 'Resolved.')]
    """
    found = []
    for block in re.split(r"\n[ \t]*\n\s*", text.replace("\r\n", "\n").strip()):
        opening, _, speech = block.partition("\n")
        name = _OPENING.fullmatch(opening)
        if name is None:
            raise ValueError(f"text: a block begins with {opening[:60]!r}; allowed: a line 'NAME:', then the speech")
        if speech.strip():
            found.append((" ".join(name[1].split()), speech))
    return found


def encode(text: str, vocabulary: str) -> Int32[np.ndarray, "N"]:
    """The id of each character: 2, 3, ... in the order of ``vocabulary``; ``UNKNOWN`` if it is not there.

    >>> encode("abz", "ab")
    array([2, 3, 1], dtype=int32)
    """
    ids = {character: i for i, character in enumerate(vocabulary, 2)}
    return np.array([ids.get(character, UNKNOWN) for character in text], np.int32)


def decode(ids: Int32[np.ndarray, "N"], vocabulary: str) -> str:
    """The text of ``ids``: no character for padding, U+FFFD for unknown.

    >>> decode(encode("abba", "ab"), "ab")
    'abba'
    """
    characters = ["", "\N{REPLACEMENT CHARACTER}", *vocabulary]
    return "".join(characters[i] for i in ids)


def roles(text: str, *, length: int = 80, minimum: int = 1, vocabulary: str | None = None) -> Windows:
    """Each speaker's speeches, joined by a line feed and cut into windows of ``length`` characters.

    Every character but a speaker's first is the target of exactly one window; the last window is padded. Speakers
    with fewer than ``minimum`` windows are dropped. ``vocabulary``: default, the sorted characters of ``text``.

    Thesis: L1468 (Shakespeare, next character).
    Differs: S9; the LEAF and TFF files, with a client a role *and play*, are other texts with 715 or 1129 clients.

    >>> windows = roles("A:\\nabcd\\n\\nB:\\nb\\n", length=2)
    >>> [decode(ids, windows.vocabulary) for ids in windows.inputs], [decode(ids, windows.vocabulary) for ids in windows.targets]
    (['ab', 'c'], ['bc', 'd'])
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
    """The text of ``folder/name/input.txt`` (folder defaults to the environment variable ``COMMJAX_DATA``).

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
