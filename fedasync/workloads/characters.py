"""Text as numbers: one of a fixed vocabulary for each character."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

VOCABULARY = 97
"""Id 0 is any other character, 1 a line break, 2 … 96 the printable ASCII characters from space to tilde."""
_IDS = np.zeros(128, dtype=np.uint8)
_IDS[ord("\n")] = 1
_IDS[32:127] = np.arange(2, 97)


def encode(text: str) -> NDArray[np.uint8]:
    """One id of ``VOCABULARY`` for each character."""
    points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    return np.where(points < len(_IDS), _IDS[np.minimum(points, len(_IDS) - 1)], np.uint8(0))


def decode(ids: NDArray[np.integer]) -> str:
    """The text of ids; a replacement character for 0."""
    letters = "\ufffd\n" + "".join(map(chr, range(32, 127)))
    return "".join(letters[i] for i in ids)
