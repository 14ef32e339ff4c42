"""CIFAR-10 from NumPy files, which hold either pixels or JPEG images."""

import io
import itertools
import os
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from commjax.data import bounded
from commjax.data.images import Images, data_folder


def read(path: str | os.PathLike) -> np.ndarray:
    """Read the array in a .npy or .npy.xz file. Nothing is unpickled.

    Args:
        path: The file.

    Returns:
        The array. A file that is not a readable .npy file raises a ValueError.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     np.save(Path(folder, "y.npy"), np.arange(3))
    ...     read(Path(folder, "y.npy"))
    array([0, 1, 2])
    """
    with bounded.unpacked(path) as file:
        try:
            return _array(file, path)
        except (ValueError, EOFError) as error:
            raise ValueError(f"{path} is not a readable .npy file: {error}") from error


def _array(file: Any, path: str | os.PathLike) -> np.ndarray:
    """Read a .npy array from a stream, like `np.lib.format.read_array`. Check the header before memory is allocated."""
    version = np.lib.format.read_magic(file)
    headers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in headers:
        raise ValueError(f"version {version}; allowed: {', '.join(map(str, headers))}")
    shape, by_columns, dtype = headers[version](file)
    if dtype.hasobject:
        raise ValueError(f"dtype {dtype}; allowed: numbers")
    expected = bounded.check_array(path, shape, dtype.itemsize)
    values = file.read(expected)
    if len(values) != expected:
        raise ValueError(f"{len(values)} bytes of values; shape {shape} of {dtype} has {expected}")
    return np.frombuffer(bytearray(values), dtype).reshape(shape, order="F" if by_columns else "C")


def _part(folder: Path, part: str) -> tuple[np.ndarray, np.ndarray]:
    files_of = [sorted(folder.glob(f"*{part}*_{axis}.npy*")) for axis in "xy"]
    for axis, files in zip("xy", files_of):
        if len(files) != 1:
            names = [file.name for file in files]
            raise FileNotFoundError(
                f"{folder} has {names} for *{part}*_{axis}.npy or .npy.xz; allowed: exactly one file"
            )
    return _checked(folder, part, *(read(files[0]) for files in files_of))


def _checked(folder: Path, part: str, images: np.ndarray, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    if images.dtype != np.uint8 or images.shape[1:] != (32, 32, 3):
        raise ValueError(f"{folder}, {part}: images {images.dtype}{list(images.shape)}; allowed: uint8[N, 32, 32, 3]")
    if labels.shape != images.shape[:1] or labels.max(initial=0) > 9:
        raise ValueError(f"{folder}, {part}: labels of shape {list(labels.shape)}; allowed: one of 0..9 for each image")
    return images.astype(np.float32) / np.float32(255), labels.astype(np.int32)


def _decoder() -> Callable[[io.BytesIO], Any] | None:
    """Pillow's `Image.open`, or None if Pillow (which matplotlib installs) is missing."""
    try:
        from PIL import Image
    except ImportError:
        return None
    return Image.open


def read_jpeg(path: str | os.PathLike) -> tuple[np.ndarray, np.ndarray]:
    """Read the JPEG images of a .npz file.

    The file holds the arrays header, body, offsets and labels. Image i is header + body[offsets[i] : offsets[i + 1]].

    Args:
        path: The .npz file. Decoding needs Pillow.

    Returns:
        The images, uint8 [N, 32, 32, 3] for CIFAR-10, and their labels [N].
    """
    decode = _decoder()
    if decode is None:
        raise ImportError(f"{path} has JPEG images, which need Pillow: pip install pillow")
    try:
        with zipfile.ZipFile(path) as members:
            size = sum(member.file_size for member in members.infolist())
    except zipfile.BadZipFile as error:
        raise ValueError(f"{path} is not a readable .npz file: {error}") from error
    if size > bounded.MOST_ARRAY:
        raise ValueError(f"{path} unpacks to {size} bytes; allowed: {bounded.MOST_ARRAY} at most")
    with np.load(path, allow_pickle=False) as file:
        header, body, ends = file["header"].tobytes(), file["body"].tobytes(), file["offsets"].astype(int).tolist()
        labels = file["labels"].reshape(-1)
    if len(ends) != len(labels) + 1:
        raise ValueError(f"{path}: {len(ends)} offsets for {len(labels)} labels; allowed: one more")
    pictures = [header + body[start:end] for start, end in itertools.pairwise(ends)]
    return np.stack([np.asarray(decode(io.BytesIO(picture)).convert("RGB")) for picture in pictures]), labels


def load(folder: str | os.PathLike | None = None, *, jpeg: bool | None = None) -> Images:
    """Load CIFAR-10 from ``folder/cifar10/``.

    The JPEG files are *train*_jpeg.npz and *test*_jpeg.npz (see `read_jpeg`). They hold all images, with a small loss
    from the compression. The pixel files are *train*_x.npy, *train*_y.npy, *test*_x.npy and *test*_y.npy, each plain or
    packed as .npy.xz: images uint8 [N, 32, 32, 3] and labels.

    Args:
        folder: The folder that contains ``cifar10/``. The default is the environment variable ``COMMJAX_DATA``.
        jpeg: True reads the JPEG files, False the pixel files. None reads the JPEG files if both are there and Pillow
            is installed, and the pixel files otherwise.

    Returns:
        The images, scaled to [0, 1], and their labels.
    """
    place = data_folder("cifar10", folder)
    packed = [sorted(place.glob(f"*{part}*_jpeg.npz")) for part in ("train", "test")]
    if jpeg is None:
        jpeg = all(packed) and _decoder() is not None
    if not jpeg:
        return Images(*_part(place, "train"), *_part(place, "test"))
    for part, files in zip(("train", "test"), packed):
        if len(files) != 1:
            names = [file.name for file in files]
            raise FileNotFoundError(f"{place} has {names} for *{part}*_jpeg.npz; allowed: exactly one file")
    return Images(*(array for (path,) in packed for array in _checked(place, path.name, *read_jpeg(path))))
