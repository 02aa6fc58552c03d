"""The journal of a run under a real clock: what happened is on the disk before anybody acts on it.

    journal = Journal(folder)                # new, or the one that lies there: half a row at its end is cut off
    coordinator = Coordinator(strategy, journal.log)
    journal.keep_contribution(lease_id, contribution)   # before the server takes it over, and before its row
    journal.rung(now)                        # before each on_timer
    journal.version(version, model)
    journal.sync()                           # once a turn of the loop, before anything is sent

``Recorded`` says which files there are. ``replay`` makes the run again from them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from fedasync.core.log import CANCELLED, DELIVERED, FAILED, IGNORED, REJECTED, EventLog, Row
from fedasync.federated.recorded import (
    CONTRIBUTIONS,
    EVENTS,
    REASONS,
    RING,
    RINGS,
    VERSIONS,
    Recorded,
    digest,
    packed_contribution,
)
from fedasync.runs.record import Record
from fedasync.runs.rows import ROW
from fedasync.runs.run import write

if TYPE_CHECKING:
    from fedasync.aggregation.model import Contribution, Model

_ENDS = frozenset({DELIVERED, REJECTED, FAILED, CANCELLED, IGNORED})


class Journal:
    """The files of a run that goes on. ``log`` is the coordinator's; rows that lie there already count in its length.

    Raises JournalError for damaged files, and OSError, with the file's name, for a folder that cannot be written.
    """

    def __init__(self, folder: Path | str) -> None:
        self.recorded = Recorded(Path(folder))
        contributions = self.recorded.folder / CONTRIBUTIONS
        contributions.mkdir(parents=True, exist_ok=True)
        for torn in contributions.glob(".*.partial"):
            torn.unlink()
        size, rings = self.recorded.size, self.recorded.rings() or []
        self._reasons = self.recorded.reasons
        self._rows = _Appended(self._path(EVENTS), size * ROW.itemsize)
        self._rings = _Appended(self._path(RINGS), len(rings) * RING.size)
        self._versions = _Appended(self._path(VERSIONS), _whole_lines(self._path(VERSIONS)))
        self.log: EventLog = _Continued(self._rows.add, self._reasons, size)
        self._kept = False
        self._pruned = 0

    @property
    def rings(self) -> int:
        """Calls of on_timer so far; a checkpoint says how many it covers."""
        return (self._rings.size + len(self._rings.pending)) // RING.size

    def rung(self, time_s: float) -> None:
        """on_timer is about to be called at this time."""
        self._rings.add(RING.pack(len(self.log), time_s))

    def version(self, version: int, model: Model) -> None:
        """Note what a version that was made is, by its digest."""
        self._versions.add((json.dumps({"version": version, "sha256": digest(model)}) + "\n").encode())

    def keep_contribution(self, lease_id: int, contribution: Contribution) -> None:
        """Write a contribution whole or not at all. Raises OSError."""
        write(self.recorded.path_of(lease_id), packed_contribution(contribution))
        self._kept = True

    def drop_contribution(self, lease_id: int) -> None:
        """It was not used."""
        self.recorded.path_of(lease_id).unlink(missing_ok=True)

    def sync(self) -> None:
        """Have everything so far on the disk: each file with all that is new of it, or as it was.

        Raises OSError, with the file's name, where there is no room; the next call tries again.
        """
        self.log.flush()
        if self._kept:
            sync_folder(self.recorded.folder / CONTRIBUTIONS)
            self._kept = False
        if len(self.log.reasons) > len(self._reasons):  # before the rows that refer to them
            write(self._path(REASONS), (json.dumps(self.log.reasons, indent=1, ensure_ascii=False) + "\n").encode())
            sync_folder(self.recorded.folder)
            self._reasons = list(self.log.reasons)
        for file in (self._rings, self._versions, self._rows):  # rings before the rows that they made
            file.sync()

    def contribution(self, lease_id: int) -> Contribution | None:
        return self.recorded.contribution(lease_id)

    def rows(self, first: int = 0) -> Iterator[Row]:
        """The rows on the disk, from the ``first`` on."""
        return self.recorded.rows(first)

    def record(self) -> Record:
        """All rows, for a summary. Call ``sync`` before."""
        record = Record()
        for packed in self.recorded.packed():
            record.write(packed)
        record.reasons = list(self.log.reasons)
        return record

    def prune(self, covered: int) -> None:
        """Drop the contributions of leases that ended within the first ``covered`` rows: a checkpoint has them."""
        for row in self.recorded.rows(self._pruned):
            if self._pruned >= covered:
                return
            self._pruned += 1
            if row[1] in _ENDS:
                self.drop_contribution(row[2])

    def close(self) -> None:
        for file in (self._rings, self._versions, self._rows):
            file.close()

    def _path(self, name: str) -> Path:
        return self.recorded.folder / name


class _Continued(EventLog):
    """A log of which some rows lie on the disk already."""

    def __init__(self, sink: Callable[[bytes], object], reasons: Sequence[str], written: int) -> None:
        super().__init__(sink)
        self._written = written
        for reason in reasons:
            self.code(reason)

    def __len__(self) -> int:
        return self._written + super().__len__()


class _Appended:
    """A file that grows: all that is pending is added to it, or nothing."""

    def __init__(self, path: Path, size: int) -> None:
        self.path, self.size = path, size
        self.pending = bytearray()
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | getattr(os, "O_BINARY", 0), 0o644)
        os.ftruncate(self._file, size)

    def add(self, content: bytes) -> None:
        self.pending += content

    def sync(self) -> None:
        if not self.pending:
            return
        content = bytes(self.pending)
        try:
            written = 0
            while written < len(content):
                written += os.write(self._file, content[written:])
            os.fsync(self._file)
        except OSError as error:
            os.ftruncate(self._file, self.size)
            error.filename = str(self.path)
            raise
        self.size += len(content)
        self.pending.clear()

    def close(self) -> None:
        os.close(self._file)


def _whole_lines(path: Path) -> int:
    return path.read_bytes().rfind(b"\n") + 1 if path.exists() else 0


def sync_folder(folder: Path) -> None:
    """Have the names in a folder on the disk, where the system can say so."""
    if os.name != "posix":
        return
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
