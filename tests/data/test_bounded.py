"""Files that were made to exhaust memory, and damaged ones: one error that names the file."""

import bz2
import gzip
import lzma
import tracemalloc

import numpy as np
import pytest

from commjax.data import bounded, cifar, images, libsvm
from commjax.llm import texts
from commjax.pruning import zeroshot

PACK = {".gz": gzip.compress, ".bz2": bz2.compress, ".xz": lzma.compress}
READERS = {
    "text": texts.documents,
    "questions": lambda path: zeroshot.read(path, zeroshot.boolq),
    "libsvm": libsvm.read,
    "scan": libsvm.scan,
    "npy": cifar.read,
}


@pytest.fixture(params=PACK)
def packed(request, tmp_path):
    def write(content):
        path = tmp_path / f"bomb{request.param}"
        path.write_bytes(PACK[request.param](content))
        return path

    return write


@pytest.mark.parametrize("reader", READERS)
def test_a_bomb_is_refused_before_it_fills_the_memory(reader, packed, monkeypatch):
    """Twenty megabytes of one letter in a few kilobytes, with limits a thousandth of the real ones."""
    monkeypatch.setattr(bounded, "ALWAYS_ALLOWED", 2**17)
    monkeypatch.setattr(bounded, "MOST_LINE", 2**20)
    monkeypatch.setattr(bounded, "MOST_RATIO", 2)
    header = (
        b"\x93NUMPY\x01\0v\0" + b"{'descr': '|u1', 'fortran_order': False, 'shape': (20000000,), }".ljust(117) + b"\n"
    )
    path = packed((header if reader == "npy" else b"") + b"1" * 20_000_000)
    tracemalloc.start()
    try:
        with pytest.raises(
            ValueError, match=rf"{path.name} holds more than \d+ bytes of text; allowed: 2 times the \d+ bytes"
        ):
            READERS[reader](path)
        assert tracemalloc.get_traced_memory()[1] < (42_000_000 if reader == "npy" else 12_000_000)
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("cut", [0, 5, 30])
def test_a_file_that_ends_too_early_is_named(reader, cut, packed):
    path = packed(np.random.default_rng(0).bytes(3000).hex().encode())
    path.write_bytes(path.read_bytes()[:cut] or b"no packed file")
    with pytest.raises(ValueError, match=rf"{path.name} (cannot be unpacked as {path.suffix}|is not a readable)"):
        READERS[reader](path)


def test_limits_on_lines_texts_json_and_announced_arrays(tmp_path, monkeypatch):
    path = tmp_path / "x"
    path.write_bytes(b"1" * 5000)
    monkeypatch.setattr(bounded, "MOST_LINE", 4999)
    with pytest.raises(ValueError, match="x has a line of more than 4999 bytes; allowed: 4999 at most"):
        libsvm.read(path)
    monkeypatch.setattr(bounded, "MOST_LINE", 5000)
    assert list(bounded.lines(path)) == [b"1" * 5000]
    monkeypatch.setattr(bounded, "MOST_TEXT", 4999)
    with pytest.raises(ValueError, match="x holds more than 4999 bytes of text; allowed: 4999 bytes at most"):
        bounded.text(path)
    monkeypatch.setattr(bounded, "MOST_TEXT", 5000)
    assert bounded.text(path) == "1" * 5000
    monkeypatch.setattr(bounded, "MOST_JSON", 4999)
    with pytest.raises(ValueError, match="x holds more than 4999 bytes"):
        bounded.read_json(path)
    path.write_bytes(b"\xff")
    with pytest.raises(ValueError, match=r"x is not UTF-8 text: .*; allowed: UTF-8"):
        bounded.text(path)
    path.write_text("[" * 4000)
    with pytest.raises(ValueError, match="x is not JSON: nested too deeply"):
        bounded.read_json(path)
    header = b"\x93NUMPY\x01\0v\0" + b"{'descr': '<f8', 'fortran_order': False, 'shape': (10000000000000,), }".ljust(
        117
    )
    path.write_bytes(header + b"\n")
    with pytest.raises(
        ValueError, match=r"x announces an array of shape \(10000000000000,\), 80000000000000 bytes; allowed"
    ):
        cifar.read(path)


def test_a_npy_file_is_read_as_numpy_reads_it(tmp_path):
    for array in (np.arange(6).reshape(2, 3), np.asfortranarray(np.arange(6.0).reshape(2, 3)), np.zeros((0, 2), "u1")):
        np.save(tmp_path / "x.npy", array)
        found = cifar.read(tmp_path / "x.npy")
        assert found.dtype == array.dtype and found.flags.writeable
        np.testing.assert_array_equal(found, array)
    np.save(tmp_path / "x.npy", np.array([{}]), allow_pickle=True)
    with pytest.raises(ValueError, match="dtype object; allowed: numbers"):
        cifar.read(tmp_path / "x.npy")


def test_an_idx_bomb_stops_at_what_its_header_says(tmp_path):
    path = tmp_path / "train-labels"
    path.write_bytes(gzip.compress(bytes([0, 0, 8, 1, 0, 0, 0, 3]) + bytes(50_000_000), 1))
    tracemalloc.start()
    try:
        with pytest.raises(ValueError, match=r"train-labels: 4 bytes of values or more; shape \(3,\) of uint8 has 3"):
            images.read_idx(path)
        assert tracemalloc.get_traced_memory()[1] < 2_000_000
    finally:
        tracemalloc.stop()
