"""Windows of a text: every character is predicted once, by whoever speaks it."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commjax.data import partition, text

PLAY = """\
First Citizen:
Before we proceed
hear me:

All:
Speak, speak.

TITUS:

LADY  CAPULET:
Go.


First Citizen:
Resolved.
"""


def test_a_name_opens_a_speech_and_a_blank_line_ends_it():
    assert text.speeches(PLAY) == [
        ("First Citizen", "Before we proceed\nhear me:"),
        ("All", "Speak, speak."),
        ("LADY CAPULET", "Go."),
        ("First Citizen", "Resolved."),
    ]
    assert text.speeches(PLAY.replace("\n", "\r\n")) == text.speeches(PLAY)
    assert text.speeches("\n\n" + PLAY.replace("\n\n", "\n \t\n")) == text.speeches(PLAY)


@pytest.mark.parametrize("bad", ["no name", "A:\nhello\n\nlost line\nmore", "", ":\nhello"])
def test_a_block_without_a_name_is_refused(bad):
    with pytest.raises(ValueError, match=r"text: a block begins with .* allowed: a line 'NAME:'"):
        text.speeches(bad)


def test_ids_begin_after_padding_and_unknown():
    assert text.encode("cab?", "abc").tolist() == [4, 2, 3, text.UNKNOWN]
    assert text.encode("", "abc").shape == (0,) and text.encode("a", "a").dtype == np.int32
    assert text.decode(np.array([2, 0, 1, 4], np.int32), "abc") == "a\N{REPLACEMENT CHARACTER}c"


def test_windows_are_the_speakers_texts_shifted_by_one():
    windows = text.roles(PLAY, length=5)
    vocabulary = windows.vocabulary
    assert vocabulary == "".join(sorted(set(PLAY))) and windows.num_ids == len(vocabulary) + 2
    assert windows.inputs.shape == windows.targets.shape == windows.mask.shape
    names, rows = partition.by_group(windows.speakers)
    assert names.tolist() == ["All", "First Citizen", "LADY CAPULET"]
    said = {"All": "Speak, speak.", "First Citizen": "Before we proceed\nhear me:\nResolved.", "LADY CAPULET": "Go."}
    for name, ids in zip(names, rows):
        assert text.decode(windows.inputs[ids].ravel(), vocabulary) == said[name][:-1]
        assert text.decode(windows.targets[ids].ravel(), vocabulary) == said[name][1:]
        assert len(ids) == int(np.ceil((len(said[name]) - 1) / 5))
        # Only the end of the last window is padded.
        assert windows.mask[ids].sum() == len(said[name]) - 1
        assert windows.mask[ids].ravel()[: len(said[name]) - 1].all()
    assert windows.inputs.max() < windows.num_ids
    np.testing.assert_array_equal(windows.mask, windows.inputs > 0)
    assert (windows.inputs != text.UNKNOWN).all()


@given(st.integers(1, 30), st.integers(1, 12))
def test_the_number_of_windows_is_right_at_every_length(characters, length):
    source = "A:\n" + "x" * characters + "\n\nB:\nyyyy"
    windows = text.roles(source, length=length)
    expected = {"A": -(-(characters - 1) // length), "B": -(-3 // length)}
    for name, count in expected.items():
        assert (windows.speakers == name).sum() == count
    assert windows.mask.sum() == characters - 1 + 3


def test_speakers_with_few_windows_are_dropped():
    # 40, 12 and 2 transitions
    assert set(text.roles(PLAY, length=6, minimum=1).speakers) == {"All", "First Citizen", "LADY CAPULET"}
    assert set(text.roles(PLAY, length=6, minimum=2).speakers) == {"All", "First Citizen"}
    assert set(text.roles(PLAY, length=6, minimum=3).speakers) == {"First Citizen"}
    with pytest.raises(ValueError, match="no speaker has minimum=9 windows of length=6"):
        text.roles(PLAY, length=6, minimum=9)
    with pytest.raises(ValueError, match="no speaker has minimum=1 windows"):
        text.roles("A:\nx", length=6)


def test_a_given_vocabulary_makes_other_characters_unknown():
    windows = text.roles("A:\nabcab", length=4, vocabulary="ba")
    assert windows.vocabulary == "ba" and windows.num_ids == 4
    assert windows.inputs.tolist() == [[3, 2, text.UNKNOWN, 3]]
    assert windows.targets.tolist() == [[2, text.UNKNOWN, 3, 2]]
    assert windows.mask.all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"length": 0}, "length=0, minimum=1; allowed: at least 1"),
        ({"minimum": 0}, "length=80, minimum=0; allowed: at least 1"),
        ({"vocabulary": "aba"}, "vocabulary='aba'; allowed: every character once"),
    ],
)
def test_bad_arguments_are_refused_with_their_values(options, message):
    with pytest.raises(ValueError, match=message):
        text.roles(PLAY, **options)


def test_the_default_window_has_80_characters():
    assert text.roles("A:\n" + "xy" * 100).inputs.shape == (3, 80)


def test_load_reads_the_folder_or_says_where_to_put_the_text(tmp_path, monkeypatch):
    monkeypatch.delenv("COMMJAX_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match=r"no folder for shakespeare: .* COMMJAX_DATA"):
        text.load()
    with pytest.raises(FileNotFoundError, match=r"no .*shakespeare.input.txt: put the text there"):
        text.load(folder=tmp_path)
    (tmp_path / "play").mkdir()
    (tmp_path / "play" / "input.txt").write_text(PLAY, encoding="utf-8")
    monkeypatch.setenv("COMMJAX_DATA", str(tmp_path))
    assert text.load("play") == text.load("play", tmp_path) == PLAY


def test_the_real_text_has_298_speakers_who_say_something(real_data):
    windows = text.roles(text.load(folder=real_data))
    names, rows = partition.by_group(windows.speakers)
    assert len(names) == 298 and "LADY CAPULET" in names
    assert windows.num_ids == 67 and windows.inputs.shape == (12989, 80)
    assert min(map(len, rows)) == 1
    assert windows.mask.sum() == 1027256
