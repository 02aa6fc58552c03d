"""What a run's log says: every measure is a function of the event table, whatever runtime wrote it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import isnan
from typing import TYPE_CHECKING, Any

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


# Passing: from here on, what simulate.py asks of a whole table until it takes it from `told_by_the_log`.


def staleness(events: pl.DataFrame) -> dict[str, Any]:
    """Staleness of the consumed contributions: mean, quantiles, maximum, and the histogram τ → count."""
    import polars as pl

    tau = events.filter(pl.col("kind") == "consumed")["staleness"].to_numpy().astype(np.int64)
    if not len(tau):
        return {"mean": None, "p50": None, "p90": None, "max": None, "histogram": {}}
    values, counts = np.unique(tau, return_counts=True)
    return {
        "mean": float(tau.mean()),
        "p50": int(np.quantile(tau, 0.5, method="inverted_cdf")),
        "p90": int(np.quantile(tau, 0.9, method="inverted_cdf")),
        "max": int(tau.max()),
        "histogram": {str(value): int(count) for value, count in zip(values, counts, strict=True)},
    }


def utilisation(leases: pl.DataFrame, slots: int, end_s: float, server_busy_s: float) -> dict[str, float]:
    """Shares of slots × time: ``useful`` work (used, or not yet), ``wasted`` work, and slots that nobody fills.

    ``server`` is the share of time in which the server makes a step.
    """
    import polars as pl

    total = slots * end_s
    if total <= 0:
        return {"useful": 0.0, "wasted": 0.0, "waiting": 0.0, "server": 0.0}
    work = leases.select(
        pl.col("outcome").is_in(list(ENDS)).alias("lost"), (pl.col("end_s") - pl.col("start_s")).alias("s")
    )
    wasted = float(work.filter(pl.col("lost"))["s"].sum()) / total
    useful = float(work.filter(~pl.col("lost"))["s"].sum()) / total
    return {
        "useful": useful,
        "wasted": wasted,
        "waiting": max(0.0, 1.0 - useful - wasted),
        "server": min(1.0, server_busy_s / end_s),
    }


def targets(metrics: pl.DataFrame, events: pl.DataFrame, wanted: Mapping[str, float]) -> list[dict[str, Any]]:
    """When each metric first reached its target on the evaluation grid, and after how many applied contributions."""
    import polars as pl

    consumed = events.filter(pl.col("kind") == "consumed")["time_s"].to_numpy()
    found = []
    for name, value in wanted.items():
        reached = metrics.filter((pl.col("name") == name) & (pl.col("value") >= value) & pl.col("value").is_not_nan())[
            "time_s"
        ]
        reached_s = float(reached[0]) if len(reached) else None
        updates = None if reached_s is None else int(np.searchsorted(consumed, reached_s, side="right"))
        found.append({"metric": name, "value": value, "reached_s": reached_s, "reached_updates": updates})
    return found


def last_version_s(events: pl.DataFrame) -> float | None:
    """When the last version was committed."""
    import polars as pl

    times = events.filter(pl.col("kind") == "committed")["time_s"]
    return float(times[-1]) if len(times) else None
