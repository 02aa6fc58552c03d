"""What a run's summary takes from its log, in one pass."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from math import ceil
from typing import TYPE_CHECKING, Any

import numpy as np

from fedasync.runs.audit import Audit
from fedasync.runs.rows import Rows
from fedasync.runs.verdicts import judge

if TYPE_CHECKING:
    import polars as pl


def told_by_the_log(
    chunks: Iterable[Rows],
    ledger: dict[str, Any],
    metrics: pl.DataFrame,
    *,
    end_s: float,
    slots: int,
    max_staleness: int | None = None,
    server_busy_s: float = 0.0,
    target: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """The summary's ``verdicts``, ``staleness``, ``utilisation``, ``targets`` and ``last_version_s``.

    ``chunks`` are the log's rows (`Record.chunks`, or `chunks_of` a table), ``ledger`` is what was booked meanwhile,
    ``metrics`` the table of evaluations; ``slots`` is the most that may be in flight, ``server_busy_s`` the time in
    steps, and ``target`` maps metrics to the values whose first crossing is looked for.
    """
    wanted = target or {}
    reached = [_reached_s(metrics, name, value) for name, value in wanted.items()]
    audit = Audit(chunks, end_s, [moment for moment in reached if moment is not None])
    return {
        "verdicts": [asdict(verdict) for verdict in judge(audit, ledger, slots, max_staleness)],
        "staleness": _staleness(audit),
        "utilisation": _utilisation(audit, slots, server_busy_s),
        "targets": _targets(audit, wanted, reached),
        "last_version_s": audit.last_version_s,
    }


def _staleness(audit: Audit) -> dict[str, Any]:
    """Staleness of the consumed contributions: mean, quantiles, maximum, and the histogram τ → count."""
    values = np.flatnonzero(audit.histogram)
    if not len(values):
        return {"mean": None, "p50": None, "p90": None, "max": None, "histogram": {}}
    counts = audit.histogram[values]
    up_to = np.cumsum(counts)
    total = int(up_to[-1])

    def quantile(share: float) -> int:
        """The smallest value that at least this share of all does not exceed."""
        return int(values[np.searchsorted(up_to, ceil(share * total - 1e-9))])

    return {
        "mean": int(values @ counts) / total,
        "p50": quantile(0.5),
        "p90": quantile(0.9),
        "max": int(values[-1]),
        "histogram": {str(value): int(count) for value, count in zip(values, counts, strict=True)},
    }


def _utilisation(audit: Audit, slots: int, server_busy_s: float) -> dict[str, float]:
    """Shares of slots × time: ``useful`` work (used, or not yet), ``wasted`` work, and slots that nobody fills.

    ``server`` is the share of time in which the server makes a step.
    """
    total = slots * audit.end_s
    if total <= 0:
        return {"useful": 0.0, "wasted": 0.0, "waiting": 0.0, "server": 0.0}
    wasted = audit.lost_s / total
    useful = (audit.work_s - audit.lost_s) / total
    return {
        "useful": useful,
        "wasted": wasted,
        "waiting": max(0.0, 1.0 - useful - wasted),
        "server": min(1.0, server_busy_s / audit.end_s),
    }


def _reached_s(metrics: pl.DataFrame, name: str, value: float) -> float | None:
    """When (s) a metric first reached a value on the evaluation grid."""
    import polars as pl

    at = (pl.col("name") == name) & (pl.col("value") >= value) & pl.col("value").is_not_nan()
    times = metrics.filter(at)["time_s"]
    return float(times[0]) if len(times) else None


def _targets(audit: Audit, wanted: Mapping[str, float], reached: Sequence[float | None]) -> list[dict[str, Any]]:
    """When each metric reached its target, and after how many applied contributions (the audit's moments)."""
    applied = iter(audit.applied_by)
    return [
        {"metric": name, "value": value, "reached_s": at, "reached_updates": None if at is None else next(applied)}
        for (name, value), at in zip(wanted.items(), reached, strict=True)
    ]
