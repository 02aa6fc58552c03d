"""The IDX format of MNIST and the data sets made in its likeness: one array a file, plain or gzipped."""

from __future__ import annotations

import gzip
import zlib
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedasync.workloads.images import Samples

DTYPES: dict[int, np.dtype[Any]] = {
    0x08: np.dtype(">u1"),
    0x09: np.dtype(">i1"),
    0x0B: np.dtype(">i2"),
    0x0C: np.dtype(">i4"),
    0x0D: np.dtype(">f4"),
    0x0E: np.dtype(">f8"),
}
"""Third byte of the header → type of the elements, big-endian."""


def read_idx(file: Path) -> NDArray[Any]:
    """The array in an IDX file, in the machine's byte order.

    The header is two zero bytes, the code of the type, the number of dimensions, and each dimension as a big-endian
    32-bit integer (LeCun, Cortes and Burges, "The MNIST database of handwritten digits").
    Raises ValueError for anything else, and for more or fewer elements than the header promises.
    """
    raw = file.read_bytes()
    if raw[:2] == b"\x1f\x8b":
        try:
            raw = gzip.decompress(raw)
        except (OSError, EOFError, zlib.error) as error:
            raise ValueError(f"{file} is no whole gzip file: {error}") from error
    if len(raw) < 4 or raw[:2] != b"\0\0" or raw[2] not in DTYPES or len(raw) < 4 + 4 * raw[3]:
        raise ValueError(f"{file} is no IDX file: it begins with {raw[:4].hex(' ') or 'nothing'}; 00 00 08 03 would do")
    shape = tuple(int(n) for n in np.frombuffer(raw, ">u4", count=raw[3], offset=4))
    dtype, start = DTYPES[raw[2]], 4 + 4 * raw[3]
    promised = prod(shape) * dtype.itemsize
    if len(raw) - start != promised:
        raise ValueError(f"{file}: the header promises {promised} bytes of {list(shape)}, there are {len(raw) - start}")
    array: NDArray[Any] = np.frombuffer(raw, dtype, offset=start)
    return array.astype(dtype.newbyteorder("=")).reshape(shape)


def read_image_folder(folder: Path) -> tuple[Samples, Samples, tuple[int, int, int]]:
    """Training images, test images, and their shape (1, height, width), from the four files of MNIST's naming.

    ``train-images-idx3-ubyte``, ``train-labels-idx1-ubyte``, ``t10k-…`` of each; with or without ``.gz``. The arrays
    of pixels (0 … 1) and labels are kept and shared: only read them.
    Raises ValueError for a missing file and for files that do not fit together.
    """
    files = [_file(folder, f"{part}-{kind}") for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1")]
    stamps = tuple((file.stat().st_mtime_ns, file.stat().st_size) for file in files)
    return _images(tuple(files), stamps)


@lru_cache(maxsize=2)  # a study makes the workload once a run
def _images(
    files: tuple[Path, ...], _stamps: tuple[tuple[int, int], ...]
) -> tuple[Samples, Samples, tuple[int, int, int]]:
    pixels, labels, test_pixels, test_labels = (read_idx(file) for file in files)
    for file, array, dimensions in zip(files, (pixels, labels, test_pixels, test_labels), (3, 1, 3, 1), strict=True):
        if array.dtype != np.uint8 or array.ndim != dimensions or not array.size:
            raise ValueError(
                f"{file}: got {array.dtype} of shape {list(array.shape)};"
                f" bytes in {dimensions} dimension{'s' * (dimensions > 1)}, at least one, would do"
            )
    for i, images, own in ((0, pixels, labels), (2, test_pixels, test_labels)):
        if len(images) != len(own):
            raise ValueError(f"{files[i]} and {files[i + 1].name} must be as many, got {len(images)} and {len(own)}")
    if pixels.shape[1:] != test_pixels.shape[1:]:
        raise ValueError(
            f"{files[2]}: images of {list(test_pixels.shape[1:])}; {list(pixels.shape[1:])} as in training would do"
        )
    height, width = pixels.shape[1:]
    return _scaled(pixels, labels), _scaled(test_pixels, test_labels), (1, height, width)


def _scaled(pixels: NDArray[Any], labels: NDArray[Any]) -> Samples:
    return pixels.reshape(len(pixels), -1).astype(np.float32) / np.float32(255), labels.astype(np.int64)


def _file(folder: Path, name: str) -> Path:
    for file in (folder / f"{name}-ubyte", folder / f"{name}-ubyte.gz"):
        if file.is_file():
            return file
    raise ValueError(f"{folder} holds no {name}-ubyte, plain or .gz")
