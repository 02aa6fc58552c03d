"""Logs written by hand, and runs of a known story."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import polars as pl

from fedasync.core import KINDS, EventLog
from fedasync.runs.measures import event_table

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


def log(rows: Iterable[Row] = STORY) -> EventLog:
    written = EventLog()
    for time_s, kind, lease, worker, base, version, staleness, reason in rows:
        written.append(time_s, KINDS.index(kind), lease, worker, base, version, staleness, reason)
    return written


def table(rows: Iterable[Row] = STORY) -> pl.DataFrame:
    return event_table(log(rows))
