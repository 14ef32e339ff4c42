"""IDX files: what is written is read back, and what is not IDX is refused by name."""

import gzip
import struct

import numpy as np
import pytest

from commjax.data import embedded, images

CODES = {"u1": 0x08, "i1": 0x09, "i2": 0x0B, "i4": 0x0C, "f4": 0x0D, "f8": 0x0E}


def idx_bytes(array, code=None):
    array = np.asarray(array)
    kind = array.dtype.str[1:]
    header = bytes([0, 0, CODES[kind] if code is None else code, array.ndim])
    return header + struct.pack(f">{array.ndim}I", *array.shape) + array.astype(f">{kind}").tobytes()


@pytest.mark.parametrize("dtype", CODES)
@pytest.mark.parametrize("shape", [(5,), (2, 3), (2, 3, 4), (0, 3)])
@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_every_dtype_and_shape_is_read_back_plain_or_packed(tmp_path, dtype, shape, pack):
    array = (np.arange(np.prod(shape)).reshape(shape) * 3 - 4).astype(dtype)
    path = tmp_path / "array"
    path.write_bytes(pack(idx_bytes(array)))
    found = images.read_idx(path)
    assert found.dtype == np.dtype(dtype) and found.dtype.isnative
    np.testing.assert_array_equal(found, array)
    assert found.flags.writeable


WHOLE = idx_bytes(np.arange(6, dtype=np.uint8).reshape(2, 3))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "begins with the bytes of no content; allowed: 00 00, dtype"),
        (b"\0\0\x08", "begins with the bytes 00 00 08; allowed"),
        (b"<html>", "begins with the bytes 3c 68 74 6d; allowed"),
        (b"\0\0\x07\x01" + WHOLE[4:], "begins with the bytes 00 00 07 01; allowed"),
        (b"\0\0\x08\x00\x01", "begins with the bytes 00 00 08 00; allowed"),
        (b"\0\1\x08\x02" + WHOLE[4:], "begins with the bytes 00 01 08 02; allowed"),
        (WHOLE[:7], "7 bytes, but the header of 2 axes has 12"),
        (WHOLE[:11], "11 bytes, but the header of 2 axes has 12"),
        (WHOLE[:-1], r"5 bytes of values; shape \(2, 3\) of uint8 has 6"),
        (b"\0\0\x08\x09" + WHOLE[4:] * 9, "begins with the bytes 00 00 08 09; allowed: .*axes 01 to 08"),
        (
            b"\0\0\x08\x02" + struct.pack(">2I", 10**9, 10**4),
            r"announces an array of shape \(1000000000, 10000\), 1000.* bytes; allowed: 4294967296",
        ),
        (b"\0\0\x0e\x03" + struct.pack(">3I", 0, 2**32 - 1, 2**32 - 1), r"announces an array of shape \(0, 4294967295"),
        (WHOLE + b"\0", r"7 bytes of values or more; shape \(2, 3\) of uint8 has 6"),
        (idx_bytes(np.zeros(3, "f8"))[:-8], r"16 bytes of values; shape \(3,\) of >f8 has 24"),
        (gzip.compress(WHOLE, mtime=0)[:-9], "cannot be unpacked as .gz"),
        (gzip.compress(WHOLE, mtime=0)[:-8] + b"12345678", "cannot be unpacked as .gz"),
        (b"\x1f\x8b\x08\0\0\0\0\0\0\0\xff\xff", "cannot be unpacked as .gz"),
    ],
)
def test_foreign_and_truncated_files_are_refused_with_file_and_finding(tmp_path, content, message):
    path = tmp_path / "train-images"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=f"train-images:? {message}"):
        images.read_idx(path)


def test_a_file_with_only_a_header_is_an_array_without_rows(tmp_path):
    path = tmp_path / "empty"
    path.write_bytes(WHOLE[:4] + struct.pack(">2I", 0, 3))
    assert images.read_idx(path).shape == (0, 3)


def write_set(folder, num_train=4, num_test=2, suffix=".gz", pixels=None, labels=None):
    folder.mkdir()
    pack = gzip.compress if suffix else bytes
    for part, rows in [("train", num_train), ("t10k", num_test)]:
        pixel = np.arange(rows * 784).reshape(rows, 28, 28).astype(np.uint8) if pixels is None else pixels
        label = np.arange(rows, dtype=np.uint8) if labels is None else labels
        (folder / f"{part}-images-idx3-ubyte{suffix}").write_bytes(pack(idx_bytes(pixel)))
        (folder / f"{part}-labels-idx1-ubyte{suffix}").write_bytes(pack(idx_bytes(label)))


@pytest.mark.parametrize("suffix", ["", ".gz"])
@pytest.mark.parametrize("name", ["mnist", "fashion_mnist"])
def test_load_scales_to_the_unit_interval_and_keeps_the_order(tmp_path, monkeypatch, name, suffix):
    write_set(tmp_path / name, suffix=suffix)
    monkeypatch.setenv("COMMJAX_DATA", str(tmp_path))
    for data in (images.load(name), images.load(name, tmp_path)):
        assert data.train.shape == (4, 28, 28, 1) and data.test.shape == (2, 28, 28, 1)
        assert data.train.dtype == data.test.dtype == np.float32
        assert data.train_labels.dtype == data.test_labels.dtype == np.int32
        expected = (np.arange(4 * 784) % 256 / 255).reshape(4, 28, 28, 1)
        np.testing.assert_allclose(data.train, expected, rtol=1e-6)
        assert data.train.max() == 1 and data.train.min() == 0
        np.testing.assert_array_equal(data.test, data.train[:2])
        assert data.train_labels.tolist() == [0, 1, 2, 3] and data.test_labels.tolist() == [0, 1]


def test_missing_files_say_where_to_put_them(tmp_path, monkeypatch):
    monkeypatch.delenv("COMMJAX_DATA", raising=False)
    with pytest.raises(FileNotFoundError, match=r"no folder for mnist: .* COMMJAX_DATA to the folder with mnist/"):
        images.load("mnist")
    with pytest.raises(FileNotFoundError, match=r"no train-images-idx3-ubyte.gz .* in .*/mnist: put the four"):
        images.load("mnist", tmp_path)
    write_set(tmp_path / "mnist")
    (tmp_path / "mnist" / "t10k-labels-idx1-ubyte.gz").unlink()
    with pytest.raises(FileNotFoundError, match=r"no t10k-labels-idx1-ubyte.gz"):
        images.load("mnist", tmp_path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"pixels": np.zeros((4, 28, 27), "u1")}, r"mnist, train: images uint8\[4, 28, 27\]; allowed"),
        ({"pixels": np.zeros((4, 28, 28), "i2")}, r"mnist, train: images int16\[4, 28, 28\]; allowed"),
        ({"pixels": np.zeros(4, "u1")}, r"mnist, train: images uint8\[4\]; allowed"),
        ({"labels": np.zeros(3, "u1")}, r"mnist, train: labels of shape \[3\] up to 0 for 4 images"),
        ({"labels": np.zeros((4, 1), "u1")}, r"mnist, train: labels of shape \[4, 1\] up to 0 for 4 images"),
        ({"labels": np.full(4, 10, "u1")}, r"mnist, train: labels of shape \[4\] up to 10 for 4 images"),
    ],
)
def test_sets_that_are_not_what_they_are_called_are_refused(tmp_path, change, message):
    write_set(tmp_path / "mnist", **change)
    with pytest.raises(ValueError, match=message):
        images.load("mnist", tmp_path)


def test_labels_up_to_nine_are_allowed(tmp_path):
    write_set(tmp_path / "mnist", num_test=4, labels=np.full(4, 9, "u1"))
    assert images.load("mnist", tmp_path).test_labels.tolist() == [9] * 4


def test_an_unknown_name_is_refused():
    with pytest.raises(ValueError, match="name='emnist'; allowed: 'mnist', 'fashion_mnist'"):
        images.load("emnist")


def test_digits_are_all_there_once_in_a_stratified_split():
    data = embedded.digits()
    assert data.train.shape == (1438, 8, 8, 1) and data.test.shape == (359, 8, 8, 1)
    assert data.train.dtype == data.test.dtype == np.float32
    assert data.train_labels.dtype == data.test_labels.dtype == np.int32
    assert data.train.min() == 0 and data.train.max() == 1
    from sklearn.datasets import load_digits

    raw = load_digits()
    found = np.concatenate([data.train, data.test]).reshape(-1, 64) * 16
    labels = np.concatenate([data.train_labels, data.test_labels])
    rows = sorted((*row, label) for row, label in zip(found, labels))
    assert rows == sorted((*row, label) for row, label in zip(raw.data, raw.target))
    sizes = np.bincount(raw.target)
    np.testing.assert_allclose(np.bincount(data.test_labels) / sizes, 0.2, atol=0.5 / sizes.min())
    for one, other in zip(data, embedded.digits()):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("name", images.NAMES)
def test_the_real_sets_have_their_published_sizes(real_data, name):
    data = images.load(name, real_data)
    assert data.train.shape == (60000, 28, 28, 1) and data.test.shape == (10000, 28, 28, 1)
    mean, first = {"mnist": (0.13066, 5), "fashion_mnist": (0.28604, 9)}[name]
    np.testing.assert_allclose(data.train.mean(dtype=np.float64), mean, atol=1e-5)
    assert data.train_labels[0] == first
    assert set(data.test_labels) == set(range(10))
