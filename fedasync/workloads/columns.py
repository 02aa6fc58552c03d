"""Columns of a Hugging Face data set as the arrays that a module takes."""

from __future__ import annotations

from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from datasets import Dataset

Kind = Literal["image", "text", "vector"]

BYTES = 257
"""Ids of text: 0 fills up, 1 + b is the byte b of UTF-8."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column, read."""

    values: NDArray[Any]
    """[N, n]: pixels (0 … 1), ids of bytes, or numbers."""
    kind: Kind
    shape: tuple[int, ...]
    """Of one sample: (channels, height, width) of an image, (n,) of others."""


def read_column(dataset: Dataset, name: str, sequence_length: int) -> Column:
    """Read an image, text or number column, or one of equally long arrays of numbers, from all rows.

    Images of 8 bits a channel are scaled to 0 … 1. Of texts the last ``sequence_length`` bytes of their UTF-8 are
    taken, and shorter ones filled up at the front. Raises ValueError for anything else.
    """
    from datasets import Image, Value

    feature = dataset.features[name]
    if isinstance(feature, Image):
        return _images(dataset, name)
    if isinstance(feature, Value) and feature.dtype in ("string", "large_string"):
        return Column(_bytes(raw_column(dataset, name), sequence_length, name), "text", (sequence_length,))
    values = raw_column(dataset, name)
    if type(feature).__name__ == "ClassLabel" or not _is_numeric(values):
        raise ValueError(
            f"column {name!r} is {feature}; images, texts, numbers, and arrays of numbers of one length, would do"
        )
    numbers = values.reshape(len(values), -1).astype(np.float64)
    if not np.isfinite(numbers).all():
        raise ValueError(f"column {name!r} has missing or infinite numbers in {(~np.isfinite(numbers)).sum()} places")
    return Column(numbers, "vector", numbers.shape[1:])


def raw_column(dataset: Dataset, name: str) -> NDArray[Any]:
    """The values of a column as numpy sees them."""
    values: NDArray[Any] = np.asarray(dataset.select_columns([name]).with_format("numpy")[:][name])
    if values.dtype == object and all(value is None or isinstance(value, Real) for value in values.flat):
        return values.astype(np.float64)  # a missing number (datasets before 5): not a number, as later ones have it
    return values


def _is_numeric(values: NDArray[Any]) -> bool:
    return np.issubdtype(values.dtype, np.number) or values.dtype == np.bool_


def _images(dataset: Dataset, name: str) -> Column:
    pixels: list[NDArray[Any]] = []
    for row, image in enumerate(dataset.select_columns([name])):
        if image[name] is None:
            raise ValueError(f"column {name!r} has no image in row {row}")
        one = np.asarray(image[name])
        if one.dtype != np.uint8 or (pixels and one.shape != pixels[0].shape):
            wanted = f"{list(pixels[0].shape)} as before" if pixels else "8 bits a channel"
            raise ValueError(f"column {name!r}: row {row} is {one.dtype} of shape {list(one.shape)}; {wanted} would do")
        pixels.append(one)
    stack = np.stack(pixels)
    stack = stack[:, None] if stack.ndim == 3 else stack.transpose(0, 3, 1, 2)
    flat = stack.reshape(len(stack), -1).astype(np.float32) / np.float32(255)
    return Column(flat, "image", stack.shape[1:])


def _bytes(values: NDArray[Any], length: int, name: str) -> NDArray[np.int16]:
    ids = np.zeros((len(values), length), dtype=np.int16)
    for row, text in enumerate(values):
        if not isinstance(text, str):
            raise ValueError(f"column {name!r} has no text in row {row}")
        tail = np.frombuffer(text.encode(), np.uint8)[-length:]
        ids[row, length - len(tail) :] = tail.astype(np.int16) + 1
    return ids
