"""The reader of CIFAR-10: raw and JPEG files, and what it refuses."""

import io
import lzma

import numpy as np
import pytest

from commjax.data import cifar


def test_jpeg_images_are_decoded_where_pillow_is(tmp_path, monkeypatch):
    image = pytest.importorskip("PIL.Image")
    flat = [np.full((32, 32, 3), 60 * i, np.uint8) for i in range(3)]
    files = []
    for picture in flat:
        buffer = io.BytesIO()
        image.fromarray(picture).save(buffer, "JPEG")
        files.append(buffer.getvalue())
    start = next(i for i, letters in enumerate(zip(*files)) if len(set(letters)) > 1)
    bodies = [file[start:] for file in files]
    arrays = {"header": np.frombuffer(files[0][:start], np.uint8), "body": np.frombuffer(b"".join(bodies), np.uint8)}
    arrays |= {"offsets": np.cumsum([0, *map(len, bodies)]).astype(np.int32), "labels": np.arange(3, dtype=np.uint8)}
    write_cifar(tmp_path, rows=2)
    for part in ("train", "test"):
        np.savez(tmp_path / "cifar10" / f"some_{part}_jpeg.npz", **arrays)
    found = cifar.load(tmp_path)
    assert np.abs(found.train * 255 - np.stack(flat)).max() < 3 and found.test_labels.tolist() == [0, 1, 2]
    assert len(cifar.load(tmp_path, jpeg=False).train) == 2
    monkeypatch.setattr(cifar, "_decoder", lambda: None)
    assert len(cifar.load(tmp_path).train) == 2
    with pytest.raises(ImportError, match="pip install pillow"):
        cifar.load(tmp_path, jpeg=True)


def write_cifar(folder, rows=3, **change):
    rng = np.random.default_rng(0)
    arrays = {"x": rng.integers(0, 256, (rows, 32, 32, 3), np.uint8), "y": np.arange(rows, dtype=np.uint8)} | change
    (folder / "cifar10").mkdir(exist_ok=True)
    for part in ("train", "test"):
        with lzma.open(folder / "cifar10" / f"some_{part}_x.npy.xz", "wb") as file:
            np.save(file, arrays["x"])
        np.save(folder / "cifar10" / f"some_{part}_y.npy", arrays["y"])
    return arrays


def test_cifar_files_are_read(tmp_path):
    wanted = write_cifar(tmp_path)
    found = cifar.load(tmp_path)
    np.testing.assert_array_equal(np.round(found.train * 255), wanted["x"])
    assert found.test_labels.tolist() == [0, 1, 2] and found.train.dtype == np.float32


@pytest.mark.parametrize(
    "change, words",
    [
        ({"x": np.zeros((3, 32, 32), np.uint8)}, "allowed: uint8"),
        ({"x": np.zeros((3, 32, 32, 3), np.float32)}, "allowed: uint8"),
        ({"y": np.array([0, 1, 10], np.uint8)}, "allowed: one of 0..9"),
        ({"y": np.array([0, 1], np.uint8)}, "allowed: one of 0..9"),
    ],
)
def test_cifar_files_of_another_kind_are_refused(tmp_path, change, words):
    write_cifar(tmp_path, **change)
    with pytest.raises(ValueError, match=words):
        cifar.load(tmp_path)


def test_missing_or_ambiguous_cifar_files_are_named(tmp_path):
    write_cifar(tmp_path)
    np.save(tmp_path / "cifar10" / "other_test_y.npy", np.zeros(3))
    with pytest.raises(FileNotFoundError, match=r"other_test_y.npy.*allowed: exactly one file"):
        cifar.load(tmp_path)
