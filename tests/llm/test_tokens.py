"""llama2.c's tokens against its own quadratic loop, and the windows of the pruning papers."""

import random
import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from commjax.llm import tokens

pytestmark = pytest.mark.slow

PIECES = [" ", "a", "b", "c", "ab", "bc", "aa", "abc", " a", "é", "aaa", "<0", "x"]
SCORES = [-9.0, -9.0, -9.0, -9.0, -1.0, -0.5, -2.0, -3.0, -1.0, -9.0, -2.0, -1.0, -9.0]


def write(path, pieces=PIECES, scores=SCORES, longest=8, bytes_too=True):
    entries = [("<unk>", 0.0), ("\n<s>\n", 0.0), ("\n</s>\n", 0.0), *((f"<0x{i:02X}>", 0.0) for i in range(256))]
    entries = [*(entries if bytes_too else []), *zip(pieces, scores)]
    data = struct.pack("<i", longest)
    for piece, score in entries:
        data += struct.pack("<fi", score, len(piece.encode())) + piece.encode()
    path.write_bytes(data)
    return [piece.encode() for piece, _ in entries], [score for _, score in entries]


def quadratic(text, pieces, scores):
    """encode() of llama2.c's run.c, line by line."""
    lookup = {}
    for i, piece in enumerate(pieces):
        lookup.setdefault(piece, i)
    ids = []
    for character in (" " + text) if text else "":
        data = character.encode()
        ids += [lookup[data]] if data in lookup else [3 + byte for byte in data]
    while True:
        best, place, union = -1e10, -1, -1
        for i in range(len(ids) - 1):
            id = lookup.get(pieces[ids[i]] + pieces[ids[i + 1]], -1)
            if id != -1 and scores[id] > best:
                best, place, union = scores[id], i, id
        if place == -1:
            return [1, *ids]
        ids[place : place + 2] = [union]


@pytest.fixture(scope="module")
def toy(tmp_path_factory):
    path = tmp_path_factory.mktemp("tokens") / "tokenizer.bin"
    table = write(path)
    return tokens.llama2c(path), *table


@given(text=st.text(alphabet="aabbc é\n<0x", max_size=30))
def test_the_heap_joins_as_the_loop_does(toy, text):
    tokenizer, pieces, scores = toy
    ids = tokenizer.encode(text)
    assert ids == quadratic(text, pieces, scores)
    assert tokenizer.decode(ids) == text


@given(text=st.text(max_size=20))
def test_every_text_comes_back(toy, text):
    tokenizer = toy[0]
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_few_texts_by_hand(toy):
    tokenizer, pieces, _ = toy
    names = {piece.decode(): i for i, piece in enumerate(pieces)}
    assert tokenizer.encode("") == [1]
    assert tokenizer.encode("b") == [1, names[" "], names["b"]]
    # "bc" (-0.5) goes before "ab" (-1) and " a" (-1), of which the left one would be first.
    assert tokenizer.encode("abc") == [1, names[" a"], names["bc"]]
    assert tokenizer.encode("\n") == [1, names[" "], 3 + 10]
    assert tokenizer.encode("€") == [1, names[" "], *(3 + byte for byte in "€".encode())]
    assert tokenizer.decode([1, names[" a"], names["b"], 2]) == "ab"
    assert tokenizer.decode([3 + 0xE2, 3 + 0x82]) == "\N{REPLACEMENT CHARACTER}"


def test_real_tokens_equal_the_loop(real_data):
    import json
    import lzma

    path = f"{real_data}/stories/tok512.bin"
    tokenizer = tokens.llama2c(path)
    pieces, scores = tokens._pieces(tokens.Path(path))
    assert len(pieces) == 512
    with lzma.open(f"{real_data}/stories/tinystories_train_first1000.json.xz") as file:
        stories = json.load(file)
    for story in stories[:5]:
        assert tokenizer.encode(story) == quadratic(story, pieces, scores)
    assert all(tokenizer.decode(tokenizer.encode(story)) == story for story in stories[5:200])


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "is not a llama2.c tokenizer"),
        (struct.pack("<i", 8) + b"abc", "is not a llama2.c tokenizer"),
        (struct.pack("<ifi", 8, 0.0, 3) + b"ab", "token 0 has length 3"),
        (struct.pack("<ifi", 8, 0.0, 9) + b"abcdefghi", "token 0 has length 9"),
        (struct.pack("<ifi", 8, 0.0, -1), "token 0 has length -1"),
        (struct.pack("<ifi", 8, 0.0, 1) + b"a", "has 1 tokens; allowed: at least 259"),
    ],
)
def test_files_that_are_no_tokenizers_are_refused(tmp_path, data, message):
    (tmp_path / "tokenizer.bin").write_bytes(data)
    with pytest.raises(ValueError, match=message):
        tokens.llama2c(tmp_path / "tokenizer.bin")


def test_the_bytes_alone_are_a_tokenizer(tmp_path):
    write(tmp_path / "tokenizer.bin", [], [])
    assert tokens.llama2c(tmp_path / "tokenizer.bin").encode("a") == [1, 3 + 32, 3 + 97]


def test_a_folder_with_llama2c_tokens_needs_no_transformers(tmp_path, monkeypatch):
    import sys

    write(tmp_path / "tokenizer.bin")
    monkeypatch.setitem(sys.modules, "transformers", None)
    assert tokens.load(tmp_path).encode("") == [1]
    (tmp_path / "tokenizer.bin").unlink()
    with pytest.raises(ImportError, match=r"needs transformers: pip install 'commjax\[llm\]'"):
        tokens.load(tmp_path)


@pytest.mark.extra
def test_a_folder_of_hugging_face(tmp_path):
    pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers, processors

    words = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "a": 2, "b": 3}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()  # pyright: ignore[reportAttributeAccessIssue]
    words.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])  # pyright: ignore
    words.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    found = tokens.load(tmp_path)
    assert found.encode("a b z") == [1, 2, 3, 0] and found.decode([2, 3]) == "a b"


def test_evaluation_windows_lie_side_by_side():
    windows = tokens.evaluation_windows(range(11), 3)
    assert windows.tolist() == [[0, 1, 2], [3, 4, 5], [6, 7, 8]] and windows.dtype == np.int32
    assert tokens.evaluation_windows([4, 5], 2).tolist() == [[4, 5]]
    assert tokens.evaluation_windows([4, 5], 1).tolist() == [[4], [5]]
    with pytest.raises(ValueError, match=r"ids has 2 tokens; allowed: at least one window of length=3"):
        tokens.evaluation_windows([1, 2], 3)
    with pytest.raises(ValueError, match=r"length=0, count=1; allowed: at least 1 each"):
        tokens.evaluation_windows([1, 2], 0)


def test_random_windows_are_those_of_wanda():
    """get_wikitext2 of its data.py: random.seed(seed); i = random.randint(0, n - seqlen - 1)."""
    ids = list(range(100, 200))
    random.seed(3)
    starts = [random.randint(0, 100 - 7 - 1) for _ in range(5)]
    found = tokens.random_windows(ids, 7, 5, seed=3)
    assert found.tolist() == [ids[i : i + 7] for i in starts] and found.dtype == np.int32
    assert tokens.random_windows(ids, 99, 3, seed=0).tolist() == [ids[:99]] * 3
    with pytest.raises(ValueError, match=r"ids has 100 tokens; allowed: more than one window of length=100"):
        tokens.random_windows(ids, 100, 1, seed=0)
    assert tokens.random_windows(ids, 1, 1, seed=0).shape == (1, 1)
    with pytest.raises(ValueError, match=r"length=7, count=0; allowed"):
        tokens.random_windows(ids, 7, 0, seed=0)


def test_document_windows_are_those_of_wanda():
    """get_c4: draw documents until one has more than seqlen tokens, then a start."""
    documents = ["x" * n for n in (3, 4, 5, 30, 2, 50)]

    def encode(text):
        return [len(text) + i for i in range(len(text))]

    random.seed(11)
    wanted = []
    for _ in range(6):
        while True:
            ids = encode(documents[random.randint(0, len(documents) - 1)])
            if len(ids) > 4:
                break
        i = random.randint(0, len(ids) - 4 - 1)
        wanted.append(ids[i : i + 4])
    assert tokens.document_windows(documents, encode, 4, 6, seed=11).tolist() == wanted


def test_documents_that_are_all_too_short_do_not_loop_for_ever():
    with pytest.raises(ValueError, match=r"none of 3 documents has more than length=4 tokens; allowed: at least one"):
        tokens.document_windows(["abcd", "a", ""], lambda text: list(text.encode()), 4, 1, seed=0)
    with pytest.raises(ValueError, match=r"none of 0 documents"):
        tokens.document_windows([], lambda text: [], 4, 1, seed=0)
    with pytest.raises(ValueError, match=r"length=0, count=1; allowed"):
        tokens.document_windows(["a"], lambda text: [], 0, 1, seed=0)


def test_padding():
    windows, lengths = tokens.padded([[1, 2], [1, 2, 3, 4], [5]], 3)
    assert windows.tolist() == [[1, 2, 0], [1, 2, 3], [5, 0, 0]] and lengths.tolist() == [2, 3, 1]
    with pytest.raises(ValueError, match="length=0"):
        tokens.padded([[1]], 0)


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    pytest.importorskip("transformers")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ValueError, match=r"has no tokenizer; allowed: tokenizer.bin of llama2.c, or Hugging Face"):
        tokens.load(tmp_path)
