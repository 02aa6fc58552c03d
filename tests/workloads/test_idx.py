"""The IDX format: what is written comes back, and anything else is refused in one line."""

from __future__ import annotations

import gzip
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays

from fedasync.workloads.idx import DTYPES, read_idx, read_image_folder


def idx(array: np.ndarray) -> bytes:
    """The bytes of an array in the format, written from its description."""
    code = next(code for code, dtype in DTYPES.items() if dtype == array.dtype.newbyteorder(">"))
    sizes = struct.pack(f">{array.ndim}I", *array.shape)
    return bytes([0, 0, code, array.ndim]) + sizes + array.astype(DTYPES[code]).tobytes()


@given(
    st.sampled_from([np.uint8, np.int8, np.int16, np.int32, np.float32, np.float64]).flatmap(
        lambda dtype: arrays(dtype, array_shapes(max_dims=4, max_side=5))
    ),
    st.booleans(),
)
def test_what_is_written_comes_back(tmp_path_factory: Any, array: np.ndarray, compressed: bool) -> None:
    file = tmp_path_factory.mktemp("idx") / "some"
    file.write_bytes(gzip.compress(idx(array), mtime=0) if compressed else idx(array))
    found = read_idx(file)
    assert found.dtype == array.dtype
    assert found.shape == array.shape
    assert found.tobytes() == array.tobytes()


LABELS = idx(np.arange(5, dtype=np.uint8))


@pytest.mark.parametrize(
    ("raw", "said"),
    [
        (b"", "is no IDX file: it begins with nothing"),
        (b"\0\0\x08", "is no IDX file: it begins with 00 00 08;"),
        (b"PNG..........", "is no IDX file: it begins with 50 4e 47 2e; 00 00 08 03 would do"),
        (b"\0\0\x0a" + LABELS[3:], "is no IDX file"),
        (LABELS[:6], "is no IDX file"),
        (LABELS[:-1], r"the header promises 5 bytes of \[5\], there are 4"),
        (LABELS + b"\0", r"the header promises 5 bytes of \[5\], there are 6"),
        (gzip.compress(LABELS, mtime=0)[:-9], "is no whole gzip file"),
    ],
)
def test_what_is_no_idx_file_is_refused(tmp_path: Path, raw: bytes, said: str) -> None:
    (tmp_path / "some").write_bytes(raw)
    with pytest.raises(ValueError, match=said) as info:
        read_idx(tmp_path / "some")
    assert "\n" not in str(info.value)


def folder(path: Path, train: np.ndarray, labels: np.ndarray, test: np.ndarray, test_labels: np.ndarray) -> Path:
    """The four files, some of them compressed."""
    path.mkdir(exist_ok=True)
    (path / "train-images-idx3-ubyte.gz").write_bytes(gzip.compress(idx(train), mtime=0))
    (path / "train-labels-idx1-ubyte").write_bytes(idx(labels))
    (path / "t10k-images-idx3-ubyte").write_bytes(idx(test))
    (path / "t10k-labels-idx1-ubyte.gz").write_bytes(gzip.compress(idx(test_labels), mtime=0))
    return path


def content(**changed: np.ndarray) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "train": rng.integers(0, 256, (6, 5, 4), dtype=np.uint8),
        "labels": np.arange(6, dtype=np.uint8) % 3,
        "test": rng.integers(0, 256, (3, 5, 4), dtype=np.uint8),
        "test_labels": np.arange(3, dtype=np.uint8),
    } | changed


def test_a_folder_is_read_as_flat_pixels_from_0_to_1(tmp_path: Path) -> None:
    written = content()
    (pixels, labels), (test, test_labels), shape = read_image_folder(folder(tmp_path, **written))
    assert shape == (1, 5, 4)
    assert pixels.shape == (6, 20)
    assert np.array_equal(np.rint(pixels * 255).astype(np.uint8).reshape(6, 5, 4), written["train"])
    assert np.array_equal(np.rint(test * 255).astype(np.uint8).reshape(3, 5, 4), written["test"])
    assert labels.tolist() == [0, 1, 2, 0, 1, 2]
    assert test_labels.tolist() == [0, 1, 2]


def test_a_file_that_changed_is_read_again(tmp_path: Path) -> None:
    folder(tmp_path, **content())
    before = read_image_folder(tmp_path)
    assert read_image_folder(tmp_path)[0][0] is before[0][0]
    folder(tmp_path, **content(train=np.zeros((7, 5, 4), np.uint8), labels=np.zeros(7, np.uint8)))
    assert len(read_image_folder(tmp_path)[0][0]) == 7


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"labels": np.zeros(5, np.uint8)}, "train-labels-idx1-ubyte must be as many, got 6 and 5"),
        ({"test_labels": np.zeros(2, np.uint8)}, "t10k-labels-idx1-ubyte.gz must be as many, got 3 and 2"),
        ({"test": np.zeros((3, 4, 5), np.uint8)}, r"images of \[4, 5\]; \[5, 4\] as in training would do"),
        ({"labels": np.zeros(6, np.int32)}, r"got int32 of shape \[6\]; bytes in 1 dimension, at least one"),
        ({"train": np.zeros((6, 20), np.uint8)}, r"got uint8 of shape \[6, 20\]; bytes in 3 dimensions"),
    ],
)
def test_files_that_do_not_fit_together_are_refused(tmp_path: Path, changed: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said) as info:
        read_image_folder(folder(tmp_path, **content(**changed)))
    assert "\n" not in str(info.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    (folder(tmp_path, **content()) / "t10k-images-idx3-ubyte").unlink()
    with pytest.raises(ValueError, match=r"holds no t10k-images-idx3-ubyte, plain or \.gz"):
        read_image_folder(tmp_path)
