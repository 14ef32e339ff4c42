"""MNIST and Fashion-MNIST from their IDX files."""

import os
import struct
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Float32, Int32

from commjax.data import bounded

NAMES = ("mnist", "fashion_mnist")
_DTYPES = {0x08: "u1", 0x09: "i1", 0x0B: ">i2", 0x0C: ">i4", 0x0D: ">f4", 0x0E: ">f8"}
_MOST_AXES = 8


class Images(NamedTuple):
    """Images with values in [0, 1] and their classes 0, 1, 2, ...

    Attributes:
        train: The training images.
        train_labels: The classes of the training images.
        test: The test images.
        test_labels: The classes of the test images.

    >>> train, test = np.zeros((3, 8, 8, 1), "f4"), np.zeros((1, 8, 8, 1), "f4")
    >>> Images(train, np.zeros(3, "i4"), test, np.zeros(1, "i4")).train.shape
    (3, 8, 8, 1)
    """

    train: Float32[np.ndarray, "N h w c"]
    train_labels: Int32[np.ndarray, "N"]
    test: Float32[np.ndarray, "M h w c"]
    test_labels: Int32[np.ndarray, "M"]


def read_idx(path: str | os.PathLike) -> np.ndarray:
    """Read the array in an IDX file, plain or packed with gzip.

    The file holds two zero bytes, the dtype, the number of axes, the lengths of the axes and the values, all
    big-endian.

    Args:
        path: The file.

    Returns:
        The array, in the byte order of the machine.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "labels-idx1-ubyte")
    ...     _ = path.write_bytes(bytes([0, 0, 8, 1]) + bytes([0, 0, 0, 3]) + bytes([7, 2, 1]))
    ...     read_idx(path)
    array([7, 2, 1], dtype=uint8)
    """
    with open(path, "rb") as raw:
        suffix = ".gz" if raw.read(2) == b"\x1f\x8b" else ""
    with bounded.unpacked(path, suffix) as file:
        header = file.read(4)
        if len(header) < 4 or header[:2] != b"\0\0" or header[2] not in _DTYPES or not 1 <= header[3] <= _MOST_AXES:
            raise ValueError(
                f"{path}: begins with the bytes {header.hex(' ') or 'of no content'}; "
                f"allowed: 00 00, dtype 08, 09, 0b, 0c, 0d or 0e, number of axes 01 to {_MOST_AXES:02x}"
            )
        lengths = file.read(4 * header[3])
        if len(lengths) < 4 * header[3]:
            given, start = 4 + len(lengths), 4 + 4 * header[3]
            raise ValueError(f"{path}: {given} bytes, but the header of {header[3]} axes has {start}")
        shape = struct.unpack(f">{header[3]}I", lengths)
        dtype = np.dtype(_DTYPES[header[2]])
        expected = bounded.check_array(path, shape, dtype.itemsize)
        values = file.read(expected + 1)
    if len(values) != expected:
        more = " or more" if len(values) > expected else ""
        raise ValueError(f"{path}: {len(values)} bytes of values{more}; shape {shape} of {dtype} has {expected}")
    return np.frombuffer(values, dtype).reshape(shape).astype(dtype.newbyteorder("="))


def _part(folder: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    arrays = []
    for stem in (f"{part}-images-idx3-ubyte", f"{part}-labels-idx1-ubyte"):
        path = next((p for p in (folder / f"{stem}.gz", folder / stem) if p.is_file()), None)
        if path is None:
            raise FileNotFoundError(f"no {stem}.gz (or {stem}) in {folder}: put the four IDX files of the set there")
        arrays.append(read_idx(path))
    images, labels = arrays
    if images.dtype != np.uint8 or images.shape[1:] != (28, 28):
        raise ValueError(f"{folder}, {part}: images {images.dtype}{list(images.shape)}; allowed: uint8[N, 28, 28]")
    if labels.shape != images.shape[:1] or labels.max(initial=0) > 9:
        raise ValueError(
            f"{folder}, {part}: labels of shape {list(labels.shape)} up to {labels.max(initial=0)} for {len(images)} "
            "images; allowed: one of 0..9 each"
        )
    return images[..., None].astype(np.float32) / np.float32(255), labels.astype(np.int32)


def load(name: str, folder: str | os.PathLike | None = None) -> Images:
    """Load MNIST or Fashion-MNIST from ``folder/name/``.

    The files are {train,t10k}-images-idx3-ubyte and {train,t10k}-labels-idx1-ubyte, with or without .gz.

    Args:
        name: "mnist" or "fashion_mnist".
        folder: The folder that contains ``name/``. The default is the environment variable ``COMMJAX_DATA``.

    Returns:
        The images and their labels.

    >>> load("cifar10")
    Traceback (most recent call last):
        ...
    ValueError: name='cifar10'; allowed: 'mnist', 'fashion_mnist'
    """
    if name not in NAMES:
        raise ValueError(f"name={name!r}; allowed: {', '.join(map(repr, NAMES))}")
    return Images(*_part(data_folder(name, folder), "train"), *_part(data_folder(name, folder), "t10k"))


def data_folder(name: str, folder: str | os.PathLike | None = None) -> Path:
    """Return ``folder/name``.

    Args:
        name: The name of the subfolder.
        folder: The parent folder. The default is the environment variable ``COMMJAX_DATA``. Without either, a
            FileNotFoundError is raised.

    Returns:
        The path. It need not exist.

    >>> data_folder("mnist", "my_data").as_posix()
    'my_data/mnist'
    """
    folder = folder or os.environ.get("COMMJAX_DATA")
    if not folder:
        raise FileNotFoundError(
            f"no folder for {name}: name one, or set the environment variable COMMJAX_DATA to the folder with {name}/"
        )
    return Path(folder, name)
