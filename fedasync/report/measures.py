"""What a report reads from one run: its curves, its time to the target, its leases."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedasync.report.arrangement import COUNTED, Arrangement, Cell, Facet, Target
from fedasync.report.statistics import Speedup, paired_speedup
from fedasync.runs.measures import lease_table

if TYPE_CHECKING:
    import polars as pl

    from fedasync.report.statistics import Curve
    from fedasync.runs.run import Run

_COUNTED_POINTS = 241


def curve(run: Run, metric: str) -> Curve | None:
    """The metric against virtual time (s); None where the run never evaluated it.

    ``updates`` and ``versions`` are counted in the log, on an even grid of the run's time.
    """
    import polars as pl

    if metric in COUNTED:
        times = np.sort(run.events.filter(pl.col("kind") == COUNTED[metric])["time_s"].to_numpy())
        grid = np.linspace(0.0, float(run.summary["time_s"]), _COUNTED_POINTS)
        return grid, np.searchsorted(times, grid, side="right").astype(np.float64)
    rows = run.metrics.filter(pl.col("name") == metric).sort("time_s", maintain_order=True)
    if rows.is_empty():
        return None
    return rows["time_s"].to_numpy(), rows["value"].to_numpy()


def curves(cell: Cell, metric: str) -> list[Curve]:
    """The curves of a point's runs that have the metric."""
    return [found for run in cell.values() if (found := curve(run, metric)) is not None]


def times_s(cell: Cell, target: Target | None) -> dict[int, float | None]:
    """What speed-ups compare, by seed: the time to the target, or without one the time per applied update.

    None where the target was not reached, or no update applied.
    """
    if target is None:
        return {
            seed: run.summary["time_s"] / run.summary["consumed"] if run.summary["consumed"] else None
            for seed, run in cell.items()
        }
    return {seed: (target.entry(run) or {}).get("reached_s") for seed, run in cell.items()}


def speedup_at(arrangement: Arrangement, series: str, facet: Facet, baseline: str, target: Target | None) -> Speedup:
    """Speed-up of a series over the baseline in the same facet, paired by seed."""
    return paired_speedup(
        times_s(arrangement.at(series, facet), target), times_s(arrangement.at(baseline, facet), target)
    )


def leases(events: pl.DataFrame, end_s: float | None = None) -> pl.DataFrame:
    """`lease_table`, and the ``track`` of each lease: 0, or higher where a worker has several at a time.

    Without ``end_s`` the run ends with its log's last row.
    """
    import polars as pl

    table = lease_table(events, float(events["time_s"].max() or 0) if end_s is None else end_s)  # type: ignore[arg-type]
    track = np.zeros(table.height, np.int64)
    for rows in table.with_row_index("row").group_by("worker").agg("row", "start_s", "end_s").iter_rows():
        track[rows[1]] = tracks(rows[2], rows[3])
    return table.with_columns(track=pl.Series(track))


def tracks(starts: Sequence[float], ends: Iterable[float]) -> list[int]:
    """Give every interval the lowest track that is free at its start, so that none overlap on a track.

    ``starts`` ascend; an interval may begin where another ends.
    """
    free: list[int] = []
    busy: list[tuple[float, int]] = []
    given = []
    for start, end in zip(starts, ends, strict=True):
        while busy and busy[0][0] <= start:
            heapq.heappush(free, heapq.heappop(busy)[1])
        track = heapq.heappop(free) if free else len(busy)
        heapq.heappush(busy, (end, track))
        given.append(track)
    return given
