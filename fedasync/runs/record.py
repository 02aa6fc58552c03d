"""A run's log, while it is written and afterwards: packed rows in memory, beyond a bound in a file without a name."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from tempfile import SpooledTemporaryFile, gettempdir
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from fedasync.core.log import EventLog
from fedasync.runs.rows import CHUNK, ROW, Rows, frame, schema

if TYPE_CHECKING:
    import polars as pl

MEMORY = 64 * 2**20
"""Bytes that a record holds in memory (1.8 million rows) before it moves to a file in the directory for such files."""


class LogWriteError(OSError):
    """There is no room for a log in the directory for temporary files."""


class Record:
    """The rows of a log, of any number, in bounded memory::

        record = Record()
        log = EventLog(record.write)
        ...                           # somebody appends to the log
        record.complete(log)

    The file lies in $TMPDIR, or where the system has such files, takes 41 bytes a row, and goes when the record does.
    """

    def __init__(self, memory: int = MEMORY) -> None:
        self.reasons: list[str] = []
        self._bytes = 0
        self._memory = memory
        self._open()

    def _open(self) -> None:
        self._file = SpooledTemporaryFile(max_size=self._memory)  # noqa: SIM115  lives as long as the record
        self._lock = Lock()  # polars reads from a thread of its own
        weakref.finalize(self, self._file.close)

    def __len__(self) -> int:
        """Rows."""
        return self._bytes // ROW.itemsize

    def write(self, packed: bytes) -> None:
        """Append packed rows. Raises OSError when there is no room for them."""
        with self._lock:
            try:
                self._file.seek(0, 2)
                self._file.write(packed)
            except OSError as error:
                raise LogWriteError(error.errno, error.strerror, gettempdir()) from error
            self._bytes += len(packed)

    def complete(self, log: EventLog) -> None:
        """Take what the log has not written yet, and the texts of its reasons."""
        log.flush()
        self.reasons = log.reasons

    def chunks(self, size: int = CHUNK) -> Iterator[Rows]:
        """The rows so far, in order, ``size`` at a time."""
        step, end = size * ROW.itemsize, self._bytes
        for at in range(0, end, step):
            with self._lock:
                self._file.seek(at)
                packed = self._file.read(min(step, end - at))
            yield np.frombuffer(packed, ROW)

    def table(self) -> pl.DataFrame:
        """All rows as one table: some 80 bytes a row."""
        import polars as pl

        return pl.concat([frame(rows, self.reasons) for rows in self.chunks()] or [schema().to_frame()])

    def scan(self) -> pl.LazyFrame:
        """The table for a query that needs no more than a part of it at a time (``collect(engine="streaming")``)."""
        from polars.io.plugins import register_io_source

        def parts(
            columns: list[str] | None, predicate: pl.Expr | None, most: int | None, _: int | None
        ) -> Iterator[pl.DataFrame]:
            left = len(self) if most is None else most
            for rows in self.chunks():
                part = frame(rows[:left], self.reasons)
                left -= len(part)
                part = part if predicate is None else part.filter(predicate)
                yield part if columns is None else part.select(columns)
                if left <= 0:
                    return

        return register_io_source(parts, schema=schema())

    def __getstate__(self) -> dict[str, Any]:
        """Bytes in place of the file, which no other process can open."""
        packed = [rows.tobytes() for rows in self.chunks()]
        return {"reasons": self.reasons, "memory": self._memory, "packed": packed}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.reasons, self._memory, self._bytes = state["reasons"], state["memory"], 0
        self._open()
        for packed in state["packed"]:
            self.write(packed)
