"""Logs written by hand, and runs of a known story."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from random import Random
from typing import Any

import polars as pl

from fedasync.core import KINDS, EventLog
from fedasync.runs.measures import event_table
from fedasync.runs.record import Record
from fedasync.runs.rows import Rows

SCHEMA = {
    "time_s": pl.Float64,
    "kind": pl.String,
    "lease": pl.Int64,
    "worker": pl.Int64,
    "base_version": pl.Int64,
    "version": pl.Int64,
    "staleness": pl.Int64,
    "reason": pl.String,
}

Row = tuple[float, str, int, int, int, int, int, str | None]

STORY: list[Row] = [
    (0.0, "admitted", 0, 5, 0, 0, -1, None),
    (0.0, "admitted", 1, 6, 0, 0, -1, None),
    (1.0, "delivered", 0, 5, 0, 0, 0, None),
    (1.0, "consumed", 0, 5, 0, 0, 0, None),
    (1.0, "committed", -1, -1, -1, 1, -1, None),
    (1.0, "published", -1, -1, -1, 1, -1, None),
    (1.0, "admitted", 2, 5, 1, 1, -1, None),
    (2.0, "delivered", 1, 6, 0, 1, 1, None),
    (2.5, "consumed", 1, 6, 0, 1, 1, None),
    (2.5, "committed", -1, -1, -1, 2, -1, None),
    (2.5, "published", -1, -1, -1, 2, -1, None),
    (2.5, "admitted", 3, 6, 2, 2, -1, None),
    (3.0, "failed", 2, 5, 1, 2, 1, "crash"),
    (3.0, "admitted", 4, 7, 2, 2, -1, None),
    (3.5, "rejected", 3, 6, 2, 2, 0, "not finite"),
    (3.5, "admitted", 5, 8, 2, 2, -1, None),
    (4.0, "ignored", 2, -1, -1, 2, -1, "the lease had ended"),
    (4.5, "delivered", 4, 7, 2, 2, 0, None),
    (4.5, "admitted", 6, 5, 2, 2, -1, None),
    (5.0, "cancelled", 5, 8, 2, 2, 0, "over-selected"),
]
"""Seven leases, one for each thing that may become of one; the run ends at 6 s."""

END_S = 6.0
LEDGER: dict[str, Any] = {
    "admitted": 7,
    "in_flight": 1,
    "buffered": 1,
    "consumed": 2,
    "rejected": {"not finite": 1},
    "failed": {"crash": 1},
    "cancelled": {"over-selected": 1},
    "ignored": 1,
}


def log(rows: Iterable[Row] = STORY, written: EventLog | None = None) -> EventLog:
    written = EventLog() if written is None else written
    for time_s, kind, lease, worker, base, version, staleness, reason in rows:
        code = -1 if reason is None else written.code(reason)
        written.append((time_s, KINDS.index(kind), lease, worker, base, version, staleness, code))
    return written


def table(rows: Iterable[Row] = STORY) -> pl.DataFrame:
    return event_table(log(rows))


def record(rows: Iterable[Row] = STORY, memory: int = 2**20) -> Record:
    made = Record(memory)
    made.complete(log(rows, EventLog(made.write)))
    return made


def cut(rows: Rows, places: Iterable[int]) -> Iterator[Rows]:
    """The rows in pieces that begin at these places."""
    places = sorted({0, *places, len(rows)})
    yield from (rows[begin:end] for begin, end in pairwise(places))


class Story:
    """A valid log of random things that happen, and the ledger that a coordinator would have kept meanwhile."""

    def __init__(self, seed: int, steps: int = 60) -> None:
        self.rows: list[Row] = []
        self.now = 0.0
        self._random = Random(seed)
        self._base: list[int] = []
        self._flying: list[int] = []
        self._waiting: list[int] = []
        self._made = self._shown = self._consumed = self._ignored = 0
        self._lost = {kind: Counter[str]() for kind in ("rejected", "failed", "cancelled")}
        self.most = 0
        for _ in range(steps):
            self._random.choice([self._admit, self._admit, self._deliver, self._deliver, self._lose, self._step])()
            self.most = max(self.most, len(self._flying))
            self.now += self._random.choice([0.0, 0.0, self._random.expovariate(1.0), 1e-9])
        self.end_s = self.now
        self.ledger: dict[str, Any] = {
            "admitted": len(self._base),
            "in_flight": len(self._flying),
            "buffered": len(self._waiting),
            "consumed": self._consumed,
            **{kind: dict(reasons) for kind, reasons in self._lost.items()},
            "ignored": self._ignored,
        }

    def _row(self, kind: str, lease: int, reason: str | None = None) -> None:
        base = self._base[lease]
        staleness = -1 if kind == "admitted" else self._made - base
        version = base if kind == "admitted" else self._made
        self.rows.append((self.now, kind, lease, lease % 7, base, version, staleness, reason))

    def _pop(self, leases: list[int]) -> int:
        return leases.pop(self._random.randrange(len(leases)))

    def _admit(self) -> None:
        for _ in range(self._random.randint(1, 4)):
            self._base.append(self._shown)
            self._flying.append(len(self._base) - 1)
            self._row("admitted", self._flying[-1])

    def _deliver(self) -> None:
        if self._flying:
            self._waiting.append(self._pop(self._flying))
            self._row("delivered", self._waiting[-1])

    def _lose(self) -> None:
        if place := self._random.choice([self._flying, self._waiting]):
            lease, kind = self._pop(place), self._random.choice(["rejected", "failed", "cancelled"])
            reason = self._random.choice(["stale", "crash", "λ"])
            self._row(kind, lease, reason)
            self._lost[kind][reason] += 1
            if self._random.random() < 0.3:
                self._ignored += 1
                self.rows.append((self.now, "ignored", lease, -1, -1, self._made, -1, "the lease had ended"))

    def _step(self) -> None:
        for _ in range(self._random.randint(0, len(self._waiting))):
            self._row("consumed", self._pop(self._waiting))
            self._consumed += 1
        self._made += 1
        kinds: Sequence[str] = ("committed", "published") if self._random.random() < 0.7 else ("committed",)
        for kind in kinds:
            self.rows.append((self.now, kind, -1, -1, -1, self._made, -1, None))
        self._shown = self._made if "published" in kinds else self._shown
