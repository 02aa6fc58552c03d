"""What a report reads from one run: its curves, its time to the target, whether it diverged, its leases."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedasync.report.arrangement import COUNTED, Arrangement, Cell, Facet, Target
from fedasync.report.paired import Missed, Speedup, Time, paired_speedup
from fedasync.runs.measures import ENDS, lease_table

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
        counted = pl.col("kind") == COUNTED[metric]
        times = run.read_events(lambda events: events.filter(counted).select("time_s"))["time_s"].sort().to_numpy()
        grid = np.linspace(0.0, float(run.summary["time_s"]), _COUNTED_POINTS)
        return grid, np.searchsorted(times, grid, side="right").astype(np.float64)
    rows = run.metrics.filter(pl.col("name") == metric).sort("time_s", maintain_order=True)
    if rows.is_empty():
        return None
    return rows["time_s"].to_numpy(), rows["value"].to_numpy()


def curves(cell: Cell, metric: str) -> list[Curve]:
    """The curves of a point's runs that have the metric."""
    return [found for run in cell.values() if (found := curve(run, metric)) is not None]


def diverged(run: Run, metric: str | None = None) -> bool:
    """Whether the run ended because it diverged; with a metric, also whether its last value is not finite."""
    if str(run.summary.get("ended", "")).startswith("diverged"):
        return True
    if metric is None or metric in COUNTED or metric not in run.summary["final"]:
        return False
    last = run.summary["final"][metric]
    return last is None or not math.isfinite(last)


def times_s(shown: Arrangement, series: str, facet: Facet, target: Target | None) -> dict[int, Time]:
    """What speed-ups compare, by seed: the time to the target, or without one the time per applied update.

    `Missed` where the run ended before it reached the target; None where it had none, or no update was applied. A run
    that diverged before will never reach it. It has missed it until the last of the facet's runs ended, since so long
    it might have run: its own end would make it look the faster, the sooner it diverged. The time per update is a
    rate, which it has as others do.
    """
    cell = shown.at(series, facet)
    if target is None:
        return {
            seed: run.summary["time_s"] / run.summary["consumed"] if run.summary["consumed"] else None
            for seed, run in cell.items()
        }
    last_end_s = max(
        (float(run.summary["time_s"]) for label in shown.series for run in shown.at(label, facet).values()), default=0.0
    )
    found: dict[int, Time] = {}
    for seed, run in cell.items():
        entry = target.entry(run)
        if entry is None:
            found[seed] = None
        else:
            reached_s, lost = entry["reached_s"], diverged(run)
            until_s = last_end_s if lost else float(run.summary["time_s"])
            found[seed] = Missed(until_s, lost) if reached_s is None else float(reached_s)
    return found


def speedup_at(shown: Arrangement, series: str, facet: Facet, baseline: str, target: Target | None) -> Speedup:
    """Speed-up of a series over the baseline in the same facet, paired by seed."""
    return paired_speedup(times_s(shown, series, facet, target), times_s(shown, baseline, facet, target))


def value_at(run: Run, metric: str, time_s: float) -> float | None:
    """What a metric was when the clock stood at ``time_s``: its last evaluation up to then; None where there is none.

    ``updates`` and ``versions`` are counted. Of a run that diverged it is the last finite one.
    """
    import polars as pl

    if metric in COUNTED:
        if time_s >= float(run.summary["time_s"]):
            return float(run.summary["consumed" if metric == "updates" else "versions"])
        counted = (pl.col("kind") == COUNTED[metric]) & (pl.col("time_s") <= time_s)
        return float(run.read_events(lambda events: events.filter(counted).select("time_s")).height)
    rows = run.metrics.filter((pl.col("name") == metric) & (pl.col("time_s") <= time_s)).sort(
        "time_s", maintain_order=True
    )
    if diverged(run):
        rows = rows.filter(pl.col("value").is_finite())
    return None if rows.is_empty() else float(rows["value"][-1])


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


def first_leases(run: Run, most: int) -> tuple[pl.DataFrame, float]:
    """`leases` of the first ``most`` that were given out, and the time (s) up to which no other was."""
    import polars as pl

    end_s = float(run.summary["time_s"])
    events = run.read_events(lambda log: log.filter(pl.col("lease") <= most))
    table = leases(events, end_s)
    return table.head(most), float(table["start_s"][most]) if table.height > most else end_s


def leases_between(run: Run, from_s: float, to_s: float, most: int) -> tuple[pl.DataFrame, float]:
    """`leases` that were in flight at some time from ``from_s`` to ``to_s``, and the time up to which those are all.

    That is ``to_s``, or less where there are more than ``most``: then those that started first are taken.
    """
    import polars as pl

    kind, time_s = pl.col("kind"), pl.col("time_s")
    before = run.read_events(lambda log: log.filter(time_s <= from_s, kind == "admitted").select("lease"))
    is_there = np.zeros(before.height, np.bool_)
    is_there[before["lease"].to_numpy()] = True  # leases are numbered from 0 as they are given out
    stopped = kind.is_in(["delivered", *ENDS])
    ended = run.read_events(lambda log: log.filter(time_s <= from_s, stopped).select("lease"))
    is_there[ended["lease"].to_numpy()] = False
    inside = (time_s > from_s) & (time_s < to_s)
    begun = run.read_events(lambda log: log.filter(inside, kind == "admitted").select("time_s", "lease"))
    there = np.flatnonzero(is_there)
    more = max(most - len(there), 0)
    chosen = [*there[:most].tolist(), *begun["lease"][:more].to_list()]
    wanted = pl.col("lease").is_between(min(chosen, default=0), max(chosen, default=0)) & pl.col("lease").is_in(chosen)
    table = leases(run.read_events(lambda log: log.filter(wanted)), float(run.summary["time_s"]))
    return table, float(begun["time_s"][more]) if begun.height > more else to_s


def times_between(run: Run, kind: str, window_s: tuple[float, float]) -> list[float]:
    """When (s) rows of a kind happened, in a stretch of time with both its ends."""
    import polars as pl

    inside = (pl.col("kind") == kind) & pl.col("time_s").is_between(*window_s)
    return run.read_events(lambda log: log.filter(inside).select("time_s"))["time_s"].to_list()


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
