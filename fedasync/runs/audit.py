"""One pass over a log, in blocks of rows: the counts and sums that its verdicts and measures are made from.

Nothing is believed: what a lease did before a row is looked up, whatever the row says. Per lease are kept one byte and
one number, in arrays indexed by the lease's number, which the log gives out in order from 0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from math import fsum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedasync.core.log import (
    ADMITTED,
    CANCELLED,
    COMMITTED,
    CONSUMED,
    DELIVERED,
    FAILED,
    KINDS,
    NONE,
    PUBLISHED,
    REJECTED,
)
from fedasync.runs.rows import Rows

BLOCK = 2**16
"""Rows looked at together: few enough for a processor's cache."""

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Kinds = NDArray[np.int8]

# Where a lease is: 0 before its admission, then one more than the kind of its last row.
_IN_FLIGHT, _BUFFERED = ADMITTED + 1, DELIVERED + 1
_LOST = tuple(kind + 1 for kind in (REJECTED, FAILED, CANCELLED))
_PLACES = len(KINDS) + 1
_LAWFUL = [
    (0, _IN_FLIGHT),
    (_IN_FLIGHT, _BUFFERED),
    (_BUFFERED, CONSUMED + 1),
    *((place, lost) for place in (_IN_FLIGHT, _BUFFERED) for lost in _LOST),
]
_IS_LOST = np.isin(np.arange(_PLACES), _LOST)
_OF_A_LEASE = np.isin(np.arange(len(KINDS)), [ADMITTED, DELIVERED, CONSUMED, REJECTED, FAILED, CANCELLED])
_OF_THE_SERVER = np.isin(np.arange(len(KINDS)), [COMMITTED, PUBLISHED])


class Audit:
    """What a log of ``end_s`` seconds holds, recounted; ``moments`` are times (s) to count applied contributions at.

    ``chunks`` are records of any length, in order (`Record.chunks`, `chunks_of`). Where they are cut makes no
    difference, to the last digit.
    """

    def __init__(
        self, chunks: Iterable[Rows], end_s: float, moments: Sequence[float] = (), *, block: int = BLOCK
    ) -> None:
        self.end_s = end_s
        self.rows = 0
        self.steps_back = 0
        self.misplaced = 0
        """Rows about a lease that was never admitted, and admissions out of the order of the numbers."""
        self.wrong_versions = 0
        self.wrong_staleness = 0
        self.histogram = np.zeros(1, np.int64)
        """How many applied contributions were 0, 1, 2, … versions stale."""
        self.most_in_flight = 0
        self.last_version_s: float | None = None
        self.moments = list(moments)
        self.applied_by = [0] * len(self.moments)
        """How many contributions had been applied by each of the moments, those of that very instant included."""
        self._moves = np.zeros((_PLACES, _PLACES), np.int64)
        self._made = self._shown = self._flying = 0
        self._admitted = NONE
        self._time_s = -np.inf
        self._place = np.zeros(0, np.int8)
        self._seconds = np.zeros(0)  # start of a lease in flight, then how long it was in flight
        self._areas: list[float] = []
        self._stays: list[float] = []
        self._losses: list[float] = []
        with np.errstate(invalid="ignore"):  # a doctored log may hold infinite times: its sums are no numbers
            for rows in _cut(chunks, block):
                self._read(rows)
            flying = np.flatnonzero(self._place == _IN_FLIGHT)
            self._stays.append(float((end_s - self._seconds[flying]).sum()))
        if self.rows:
            self._areas.append(self._flying * (end_s - self._time_s))
        del self._place, self._seconds

    @property
    def admitted(self) -> int:
        """Admissions."""
        return int(self._moves[:, _IN_FLIGHT].sum())

    @property
    def unlawful(self) -> int:
        """Rows that cannot follow on their lease's row before: used twice, ended twice, never admitted."""
        return int(self._moves.sum()) - sum(int(self._moves[move]) for move in _LAWFUL)

    def count(self, kind: int) -> int:
        """Leases whose last row is of this kind: ``ADMITTED`` those in flight, ``DELIVERED`` those buffered."""
        return int(self._moves[:, kind + 1].sum() - self._moves[kind + 1].sum())

    @property
    def applied(self) -> int:
        """Rows ``consumed``."""
        return int(self._moves[:, CONSUMED + 1].sum())

    @property
    def area(self) -> float:
        """Number in flight × time (s), summed over the stretches between rows."""
        return _sum(self._areas)

    @property
    def work_s(self) -> float:
        """Time in flight (s), summed over the leases."""
        return _sum(self._stays)

    @property
    def lost_s(self) -> float:
        """What of it came to nothing (s)."""
        return _sum(self._losses)

    def _read(self, rows: Rows) -> None:
        time_s = rows["time_s"].astype(np.float64)
        kind = rows["kind"].astype(np.int8)
        if kind.min() < 0 or kind.max() >= len(KINDS):
            raise ValueError(f"the log has rows of kind {kind.min() if kind.min() < 0 else kind.max()}: no such kind")
        stretch_s = np.diff(time_s, prepend=self._time_s)
        self.steps_back += int(np.count_nonzero(~(stretch_s >= 0)))  # a time that is no number is a step back too
        made = self._versions(rows, kind, time_s)
        self._staleness(rows, kind, time_s, made)
        flying = self._flying + np.cumsum(self._leases(rows, kind, time_s))
        if self.rows:
            self._areas.append(self._flying * float(stretch_s[0]))
        self._areas.append(float((flying[:-1] * stretch_s[1:]).sum()))
        self.most_in_flight = max(self.most_in_flight, int(flying.max()))
        self._flying, self._time_s = int(flying[-1]), float(time_s[-1])
        self.rows += len(rows)

    def _versions(self, rows: Rows, kind: Kinds, time_s: Floats) -> Ints:
        """Judge bases and versions by the commits and publications before; the versions there were at each row."""
        version = rows["version"].astype(np.int64)
        commits = kind == COMMITTED
        made = self._made + np.cumsum(commits)
        publications = np.flatnonzero(kind == PUBLISHED)
        announced = np.concatenate([[self._shown], version[publications]])
        shown = np.repeat(announced, np.diff(publications, prepend=0, append=len(rows)))
        admissions = kind == ADMITTED
        wrong = version != np.where(admissions, shown, made)
        wrong |= admissions & (rows["base_version"] != shown)
        wrong[publications] = version[publications] > made[publications]
        self.wrong_versions += int(np.count_nonzero(wrong))
        self._made, self._shown = int(made[-1]), int(announced[-1])
        if commits.any():
            self.last_version_s = float(time_s[np.flatnonzero(commits)[-1]])
        return made

    def _staleness(self, rows: Rows, kind: Kinds, time_s: Floats, made: Ints) -> None:
        at = np.flatnonzero(kind == CONSUMED)
        tau, age = (rows[name][at].astype(np.int64) for name in ("staleness", "version"))
        age -= rows["base_version"][at]
        possible = (tau >= 0) & (tau <= made[at])  # no more than the versions that there were, so never a huge array
        self.wrong_staleness += int(np.count_nonzero(~possible | (tau != age)))
        counts = np.bincount(tau[possible], minlength=len(self.histogram))
        counts[: len(self.histogram)] += self.histogram
        self.histogram = counts
        for i, moment in enumerate(self.moments):
            self.applied_by[i] += int(np.count_nonzero(time_s[at] <= moment))

    def _leases(self, rows: Rows, kind: Kinds, time_s: Floats) -> NDArray[np.int8]:
        """Follow every lease from row to row; by how much each row changed the number in flight."""
        change = np.zeros(len(rows), np.int8)
        lease = rows["lease"].astype(np.int64)
        of_a_lease = _OF_A_LEASE.take(kind)
        self.misplaced += int(np.count_nonzero(_OF_THE_SERVER.take(kind) & (lease != NONE)))
        given = lease[kind == ADMITTED]
        if len(given):
            self.misplaced += int(np.count_nonzero(np.diff(given, prepend=self._admitted) != 1))
            self._admitted = int(given[-1])
        # The lease number i is admitted in row i at the earliest: larger numbers were never given out.
        known = of_a_lease & (lease >= 0) & (lease <= np.arange(self.rows, self.rows + len(rows)))
        at = np.flatnonzero(known)
        self.misplaced += int(np.count_nonzero(of_a_lease)) - len(at)
        if not len(at):
            return change
        at = at.take(_order(lease.take(at)))
        lease, place = lease.take(at), kind.take(at) + np.int8(1)
        self._grow(int(lease[-1]) + 1)

        begins = np.append(True, lease[1:] != lease[:-1])  # of the rows of one lease, the first here
        ends = np.append(begins[1:], True)
        was = np.append(np.int8(0), place[:-1])
        was[begins] = self._place.take(lease[begins])
        self._place[lease[ends]] = place[ends]
        moves = np.bincount(was * np.int8(_PLACES) + place, minlength=_PLACES**2)
        self._moves += moves.reshape(_PLACES, _PLACES)

        starts = np.flatnonzero(place == _IN_FLIGHT)
        self._seconds[lease.take(starts)] = time_s.take(at.take(starts))
        stops = np.flatnonzero((was == _IN_FLIGHT) & (place != _IN_FLIGHT))
        stopped = lease.take(stops)
        stays = time_s.take(at.take(stops)) - self._seconds.take(stopped)
        self._seconds[stopped] = stays
        self._stays.append(float(stays.sum()))
        self._losses.append(float(self._seconds[lease[_IS_LOST.take(place)]].sum()))
        change[at[starts]] = was[starts] != _IN_FLIGHT
        change[at[stops]] = -1
        return change

    def _grow(self, leases: int) -> None:
        if leases > len(self._place):
            room = max(leases, 2 * len(self._place))
            place, seconds = np.zeros(room, np.int8), np.zeros(room)  # not in memory before they are written to
            place[: len(self._place)], seconds[: len(self._seconds)] = self._place, self._seconds
            self._place, self._seconds = place, seconds


def _sum(parts: list[float]) -> float:
    """Exact; NaN where a part is no number."""
    return fsum(parts) if np.isfinite(parts).all() else float("nan")


def _order(lease: Ints) -> NDArray[Any]:
    """Indices that sort by lease and keep the order of equal ones: 16 bits at a time, for which numpy counts."""
    digits = lease - lease.min()
    order = np.argsort((digits & 0xFFFF).astype(np.uint16), kind="stable")
    rest = int(digits.max()) >> 16
    while rest:
        digits >>= 16
        order = order[np.argsort((digits[order] & 0xFFFF).astype(np.uint16), kind="stable")]
        rest >>= 16
    return order


def _cut(chunks: Iterable[Rows], size: int) -> Iterator[Rows]:
    """The same rows in blocks of ``size``, the last one shorter."""
    left: Rows | None = None
    for chunk in chunks:
        rows = chunk if left is None else np.concatenate([left, chunk])
        whole = len(rows) - len(rows) % size
        for at in range(0, whole, size):
            yield rows[at : at + size]
        left = rows[whole:] if whole < len(rows) else None
    if left is not None:
        yield left
