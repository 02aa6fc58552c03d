"""Rows of one fixed form on the disk, appended in groups, cut back to what a checkpoint covers."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray


class RowFile:
    """Packed numpy records in a file that is only ever appended to, and cut at the end."""

    def __init__(self, path: Path, dtype: np.dtype[Any]) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.dtype = path, dtype
        self._file = path.open("ab")

    def __enter__(self) -> RowFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def append(self, packed: bytes) -> None:
        """Rows as bytes; on the disk after ``sync``."""
        self._file.write(packed)

    def __len__(self) -> int:
        """Rows so far."""
        return self._file.tell() // self.dtype.itemsize

    def sync(self) -> int:
        """Everything so far is on the disk; how many rows that is."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return len(self)

    def cut(self, rows: int) -> int:
        """Keep only the first rows; how many went. Raises ValueError where there are fewer."""
        self._file.flush()
        there = self.path.stat().st_size // self.dtype.itemsize
        if there < rows:
            raise ValueError(f"{self.path}: {there} rows, and the checkpoint covers {rows}")
        self._file.truncate(rows * self.dtype.itemsize)
        self._file.seek(0, os.SEEK_END)
        return there - rows

    def rows(self) -> NDArray[Any]:
        """All of them."""
        self._file.flush()
        return np.fromfile(self.path, self.dtype)

    def close(self) -> None:
        self._file.close()
