"""The LIBSVM reader: what it reads, what it refuses, and where it looks."""

import bz2
import gzip
import io
import lzma
import os
import sys
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from commjax.data import bounded, embedded, libsvm, libsvm_text

requires_data = pytest.mark.skipif("COMMJAX_DATA" not in os.environ, reason="COMMJAX_DATA names no data folder")

TEXT = "2 1:0.5 3:-1e-3\n\n1 2:4 # a comment 7:7\r\n# only a comment\n2\n"
FEATURES = [[0.5, 0, -1e-3], [0, 4, 0], [0, 0, 0]]


def test_a_small_file_is_read_exactly():
    dataset = libsvm.read(io.StringIO(TEXT))
    np.testing.assert_array_equal(dataset.features, FEATURES)
    np.testing.assert_array_equal(dataset.labels, [1, -1, 1])
    assert dataset.features.dtype == dataset.labels.dtype == np.float64


def test_n_features_adds_columns_that_never_occur():
    dataset = libsvm.read(io.BytesIO(TEXT.encode()), n_features=5)
    np.testing.assert_array_equal(dataset.features, np.pad(FEATURES, ((0, 0), (0, 2))))


@pytest.mark.parametrize(
    ("suffix", "pack"), [("", bytes), (".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)]
)
def test_the_suffix_says_how_a_file_is_packed(tmp_path, suffix, pack):
    path = tmp_path / f"little{suffix}"
    path.write_bytes(pack(TEXT.encode()))
    dataset = libsvm.read(path)
    np.testing.assert_array_equal(dataset.features, FEATURES)
    assert dataset.name == "little"


@pytest.mark.parametrize(
    ("labels", "signs"), [("0 1", [-1, 1]), ("2 1", [1, -1]), ("+1 -1", [1, -1]), ("3 -7", [1, -1])]
)
def test_the_smaller_label_becomes_minus_one(labels, signs):
    text = "\n".join(f"{label} 1:1" for label in labels.split())
    np.testing.assert_array_equal(libsvm.read(io.StringIO(text)).labels, signs)


@given(
    hnp.arrays(np.float64, (4, 3), elements=st.floats(allow_nan=False, allow_infinity=False, allow_subnormal=False)),
    st.permutations([-1.0, 1.0, 1.0, -1.0]),
)
@settings(deadline=None, max_examples=30)
def test_what_is_written_is_read_back_bit_for_bit(tmp_path_factory, features, labels):
    path = tmp_path_factory.mktemp("round") / "trip"
    libsvm.write(path, libsvm.Dataset(features, np.array(labels), "trip"))
    back = libsvm.read(path, n_features=3)
    np.testing.assert_array_equal(back.features, features)
    np.testing.assert_array_equal(back.labels, labels)


BAD_LINES = {
    "not LIBSVM": ("does not parse", "label index:value"),
    "1:2 3": ("does not parse", "label index:value"),
    "1 2:3 4": ("does not parse", "label index:value"),
    "1 2:": ("does not parse", "label index:value"),
    "1 qid:1 2:3": ("does not parse", "label index:value"),
    "1 1.0:3": ("does not parse", "label index:value"),
    "1 1:1_0": ("does not parse", "label index:value"),
    "1 99999999999:1": ("does not parse", "label index:value"),
    "\xff\xfe 1:1": ("label \xff\xfe", "a finite number"),
    "1 1:x": ("value x", "a finite number"),
    "1 1:nan": ("value nan", "a finite number"),
    "1 1:-inf": ("value -inf", "a finite number"),
    "inf 1:1": ("label inf", "a finite number"),
    "x 1:1": ("label x", "a finite number"),
    "1 0:1": ("index 0", "1, 2, 3, ..."),
    "1 -3:1": ("index -3", "1, 2, 3, ..."),
    "1 2:1 1:1": ("unsorted or repeated index 1", "ascending"),
    "1 2:1 2:1": ("unsorted or repeated index 2", "ascending"),
    "1 9:1": ("index 9", "1 to n_features=8"),
    "1 999999999:1": ("index 999999999", "1 to n_features=8"),
}


@pytest.mark.parametrize("line", BAD_LINES)
def test_a_bad_line_is_refused_with_file_line_and_text(tmp_path, line):
    path = tmp_path / "bad"
    path.write_bytes(f"1 8:1\n# comment\n2 1:1 3:2\n{line}\n1 1:1\n".encode("latin-1"))
    with pytest.raises(ValueError) as error:
        libsvm.read(path, n_features=8)
    given, allowed = BAD_LINES[line]
    for part in ("bad, line 4: ", given, f"allowed: {allowed}", repr(line)):
        assert part in str(error.value)


def test_an_array_that_no_memory_holds_is_refused_before_it_is_made(tmp_path):
    """Dense arrays: two rows of 999999999 features have 16 GB."""
    path = tmp_path / "wide"
    for text, message in (
        ("1 999999999:1\n2 1:1\n", r"wide, line 1: index 999999999; allowed: 1 to 33554432"),
        (
            "1 33554432:1\n2 1:1\n" * 20,
            r"wide: 40 rows of 33554432 features are 1342177280 numbers; allowed: 1073741824 at most",
        ),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            libsvm.read(path)
        with pytest.raises(ValueError, match=message):
            libsvm.read_rows(libsvm.scan(path), np.arange(40))
    path.write_text("1 1:1\n2 1:1\n")
    with pytest.raises(ValueError, match=r"wide: 2 rows of 1000000000 features"):
        libsvm.load(path, n_features=10**9)
    path.write_bytes(b"1 1:1\n2 \xb2:1\n")  # a digit for str.isdigit, not for int
    with pytest.raises(ValueError, match="wide, line 2: the line does not parse"):
        libsvm.read_rows(libsvm.scan(path), np.arange(2))


@pytest.mark.parametrize("text", ["", "\n\n", "# only a comment\n"])
def test_a_file_without_rows_is_refused(text):
    with pytest.raises(ValueError, match="no rows"):
        libsvm.read(io.StringIO(text))


@pytest.mark.parametrize(("text", "count"), [("1 1:1\n1 1:2", 1), ("1 1:1\n2 1:1\n3 1:1", 3)])
def test_anything_but_two_classes_is_refused(text, count):
    with pytest.raises(ValueError, match=rf"{count} distinct label.*exactly two"):
        libsvm.read(io.StringIO(text))


def with_rows(path, count, width=6):
    rng = np.random.default_rng(count)
    features = np.where(rng.random((count, width)) < 0.7, rng.standard_normal((count, width)), 0.0)
    features[0, -1] = 1.0
    dataset = libsvm.Dataset(features, np.where(np.arange(count) % 3 == 0, 1.0, -1.0), path.name)
    libsvm.write(path, dataset)
    return dataset


@pytest.mark.parametrize(
    ("suffix", "pack"), [("", bytes), (".gz", gzip.compress), (".bz2", bz2.compress), (".xz", lzma.compress)]
)
def test_a_scan_has_what_the_whole_file_has_and_some_rows_are_those_of_the_whole(tmp_path, suffix, pack):
    path = tmp_path / f"little{suffix}"
    path.write_bytes(pack(TEXT.encode()))
    summary = libsvm.scan("little", folder=tmp_path)
    assert summary == libsvm.Summary(path, 3, 3, (1.0, 2.0))
    assert libsvm.scan(path, n_features=7).width == 7
    for rows in ([0], [1], [2], [0, 2], [0, 1, 2]):
        dataset = libsvm.read_rows(summary, np.array(rows))
        np.testing.assert_array_equal(dataset.features, np.array(FEATURES)[rows])
        np.testing.assert_array_equal(dataset.labels, np.array([1.0, -1.0, 1.0])[rows])
        assert dataset.name == "little"


def test_what_is_read_for_some_clients_is_theirs(tmp_path):
    whole = with_rows(tmp_path / "w", 30)
    dataset, mine = libsvm.read_parts(libsvm.scan(tmp_path / "w"), [np.array([7, 3]), np.array([3, 29])])
    assert [ids.tolist() for ids in mine] == [[1, 0], [0, 2]]
    np.testing.assert_array_equal(dataset.features, whole.features[[3, 7, 29]])
    np.testing.assert_array_equal(dataset.labels, whole.labels[[3, 7, 29]])


def test_memory_is_that_of_the_rows_that_are_read_not_of_the_file(tmp_path):
    with_rows(tmp_path / "w", 4000, 20)
    summary = libsvm.scan(tmp_path / "w")

    def peak(job):
        tracemalloc.start()
        job()
        found = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return found

    whole = peak(lambda: libsvm.read(tmp_path / "w"))
    assert peak(lambda: libsvm.scan(tmp_path / "w")) < whole / 20
    assert peak(lambda: libsvm.read_rows(summary, np.arange(0, 4000, 40))) < whole / 20


def test_lines_of_others_are_neither_parsed_nor_refused_but_counted(tmp_path, monkeypatch):
    path = tmp_path / "mixed"
    path.write_text("1 1:1\n\n2 1:rubbish 3:1\n# none\n1 2:2\n2 3:1 1:1\n")
    summary = libsvm.scan(path)
    assert summary[1:] == (4, 3, (1.0, 2.0))
    parsed = []
    pattern = libsvm_text.LINE
    seen = SimpleNamespace(fullmatch=lambda line: parsed.append(line) or pattern.fullmatch(line))
    monkeypatch.setattr(libsvm_text, "LINE", seen)
    np.testing.assert_array_equal(libsvm.read_rows(summary, np.array([0, 2])).features, [[1, 0, 0], [0, 2, 0]])
    assert parsed == ["1 1:1", "1 2:2"]
    with pytest.raises(ValueError, match=r"mixed, line 3: value rubbish.*'2 1:rubbish 3:1'"):
        libsvm.read_rows(summary, np.array([1]))
    with pytest.raises(ValueError, match="mixed, line 6: unsorted"):
        libsvm.read_rows(summary, np.array([3]))


def test_rows_and_files_that_do_not_fit_are_refused(tmp_path):
    with_rows(tmp_path / "w", 5)
    summary = libsvm.scan(tmp_path / "w")
    for rows in ([], [1, 1], [2, 1], [-1, 0]):
        with pytest.raises(ValueError, match=r"rows=.*allowed: at least one, ascending, from 0 to 4"):
            libsvm.read_rows(summary, np.array(rows, int))
    with pytest.raises(ValueError, match="w: row 5 is wanted; allowed: 0 to 4, the file has no more"):
        libsvm.read_rows(summary, np.array([3, 5, 7]))
    with pytest.raises(ValueError, match=r"w, line 1: label \+1; allowed: -1 or 3"):
        libsvm.read_rows(summary._replace(classes=(-1.0, 3.0)), np.array([0]))
    for text, why in (("", "no rows"), ("1 1:1\n1 2:1\n", "1 distinct label"), ("x 1:1\n", "line 1: label x")):
        (tmp_path / "bad").write_text(text)
        with pytest.raises(ValueError, match=why):
            libsvm.scan(tmp_path / "bad")


def tiny(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    libsvm.write(path, libsvm.Dataset(np.array([[value], [1.0]]), np.array([-1.0, 1.0]), "tiny"))


def test_load_prefers_path_then_folder_then_its_subfolder_then_cache(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COMMJAX_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COMMJAX_DATA", str(tmp_path / "data"))
    monkeypatch.setenv("COMMJAX_TRUST_FIRST_USE", "1")
    places = ["cache/tiny", "data/libsvm/tiny", "data/tiny", "tiny"]
    for value, place in enumerate(places, start=2):
        tiny(tmp_path / place, float(value))
        assert libsvm.load("tiny").features[0, 0] == value
    tiny(tmp_path / "other" / "small", 9.0)
    assert libsvm.load("small", folder=tmp_path / "other").features[0, 0] == 9
    assert libsvm.load("small", cache=tmp_path / "other").features[0, 0] == 9
    assert libsvm.load(tmp_path / "other" / "small").name == "small"


@pytest.mark.parametrize("suffix", ["", ".xz", ".gz", ".bz2", ".t", ".t.xz"])
def test_known_names_have_their_known_width(tmp_path, suffix):
    path = tmp_path / f"ijcnn1{suffix}"
    with bounded._UNPACK.get(path.suffix, open)(path, "wb") as file:
        file.write(b"1 1:1\n-1 2:1\n")
    name = "ijcnn1.t" if ".t" in suffix else "ijcnn1"
    assert libsvm.load(name, folder=tmp_path).features.shape == (2, 22)
    assert libsvm.load(path, n_features=30).features.shape == (2, 30)


@pytest.mark.parametrize("name", ["../secret", "no/such/file", "", ".."])
def test_a_name_that_is_no_file_and_no_data_set_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match="allowed: an existing path, or a name"):
        libsvm.load(name, folder=tmp_path, cache=tmp_path, url="http://127.0.0.1:9/")


@requires_data
@pytest.mark.parametrize(
    ("name", "shape", "nonzeros", "positive"),
    [
        ("mushrooms", (8124, 112), 170604, 4208),
        ("phishing", (11055, 68), 331650, 6157),
        ("a1a", (1605, 123), 22249, 395),
    ],
)
def test_real_sets_have_their_published_counts(name, shape, nonzeros, positive):
    dataset = libsvm.load(name)
    assert dataset.features.shape == shape
    assert np.count_nonzero(dataset.features) == nonzeros
    assert np.count_nonzero(dataset.labels == 1) == positive


def test_breast_cancer_is_standardised():
    dataset = embedded.breast_cancer()
    np.testing.assert_allclose(dataset.features.mean(axis=0), 0, atol=1e-12)
    np.testing.assert_allclose(dataset.features.var(axis=0), 1, rtol=1e-12)
    assert [np.sum(dataset.labels == sign) for sign in (-1, 1)] == [212, 357]


def test_breast_cancer_without_scikit_learn_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r"commjax\[data\]"):
        embedded.breast_cancer()
