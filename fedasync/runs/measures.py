"""What a run leaves as tables: its log, a row a lease, the last and best of its metrics."""

from __future__ import annotations

from collections.abc import Sequence
from math import isnan
from typing import TYPE_CHECKING

import numpy as np

from fedasync.core.log import EventLog
from fedasync.runs.rows import ROW, frame

if TYPE_CHECKING:
    import polars as pl

ENDS = ("rejected", "failed", "cancelled")
"""Kinds that end a lease without use."""


def event_table(log: EventLog) -> pl.DataFrame:
    """A log that kept its rows, as a table; the log may go on afterwards. Raises ValueError when a sink has them."""
    log.flush()
    rows = np.frombuffer(b"".join(log.packed), ROW)
    if len(rows) < len(log):
        raise ValueError(f"{len(log) - len(rows)} of the log's {len(log)} rows went to its sink: ask that one")
    return frame(rows, log.reasons)


def lease_table(events: pl.DataFrame, end_s: float) -> pl.DataFrame:
    """A row a lease, by start: ``lease, worker, base_version, start_s, end_s, outcome, staleness, reason``.

    A lease ends when its result arrives or when it is given up; one in flight ends at ``end_s``, the run's end.
    ``outcome`` is ``consumed``, ``buffered``, ``in flight``, ``rejected``, ``failed`` or ``cancelled``.
    """
    import polars as pl

    kind = pl.col("kind")
    starts = events.filter(kind == "admitted").select("lease", "worker", "base_version", start_s="time_s")
    ends = (
        events.filter(kind.is_in(["delivered", "consumed", *ENDS]))
        .group_by("lease")
        .agg(
            end_s=pl.col("time_s").filter(kind != "consumed").first(),
            outcome=kind.last(),
            staleness=pl.col("staleness").last(),
            reason=pl.col("reason").last(),
        )
    )
    return (
        starts.join(ends, on="lease", how="left")
        .with_columns(
            pl.col("end_s").fill_null(end_s),
            pl.col("outcome").fill_null("in flight").replace("delivered", "buffered"),
        )
        .sort("start_s", "lease")
    )


def last_and_best(metrics: pl.DataFrame) -> tuple[dict[str, float], dict[str, float]]:
    """The last value of each metric, and its largest."""
    last: dict[str, float] = {}
    best: dict[str, float] = {}
    names: Sequence[str] = metrics["name"].to_list()
    for name, value in zip(names, metrics["value"].to_list(), strict=True):
        last[name] = value
        best[name] = value if isnan(best.get(name, value)) else max(best.get(name, value), value)
    return last, best
