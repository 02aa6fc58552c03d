"""The figure of who worked when."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedasync.report import style
from fedasync.report.arrangement import Arrangement, Facet, Runs, arrange, spoken
from fedasync.report.measures import first_leases, leases_between, times_between, tracks
from fedasync.report.spec import Report

if TYPE_CHECKING:
    import polars as pl
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from fedasync.runs.run import Run

_MOST_VERSION_LINES = 48
_MOST_LEASES = 200_000
"""Leases that a panel is made from, if two for each slot need no more: of a longer log only a part is read."""


@style.styled
def timeline(
    runs: Runs,
    report: Report | None = None,
    *,
    facet: Sequence[str] | None = None,
    window_s: tuple[float, float] | None = None,
    command: str = "",
) -> Figure:
    """Who worked when, in the first seed of one facet: a panel a series, a lane a worker, a bar a lease.

    Bars are coloured by what became of the lease; vertical lines are versions. Shown are the busiest lanes in a
    stretch of time, ``window_s`` = (from, to) in virtual seconds. Where most workers are idle most of the time (a
    large population), a lane is a slot of the concurrency instead: it goes to the next lease as soon as it is free.
    Raises ValueError for a facet that does not exist.
    """
    shown = arrange(runs, report, timeline_facet=None if facet is None else tuple(facet), timeline_s=window_s)
    place = facet_of(shown)
    cells = {label: shown.at(label, place) for label in shown.series if shown.at(label, place)}
    seed = min(min(cell) for cell in cells.values())
    drawn = {label: cell.get(seed) or next(iter(cell.values())) for label, cell in cells.items()}
    most = {label: max(_MOST_LEASES, 2 * int(run.summary["ledger"]["in_flight"])) for label, run in drawn.items()}
    first = {label: first_leases(run, most[label]) for label, run in drawn.items()}
    tables = {label: table for label, (table, _) in first.items()}
    by_worker = all(_mostly_busy(table) for table in tables.values())
    asked = shown.report.timeline_s
    window = asked or _window(tables, drawn, min(known_s for _, known_s in first.values()))
    for label, (_, known_s) in first.items():
        if window[1] > known_s:
            tables[label], until_s = leases_between(drawn[label], *window, most[label])
            window = window[0], until_s
    laned = {label: _clip(table if by_worker else _slots(table), window) for label, table in tables.items()}
    lanes = {label: _busiest(table, shown.report.timeline_lanes) for label, table in laned.items()}
    if by_worker:
        import polars as pl

        # The same workers in every panel, so that they can be compared.
        common = _busiest(pl.concat(laned.values()), shown.report.timeline_lanes)
        lanes = dict.fromkeys(laned, common)

    heights = [max(len(lanes[label]), 3) for label in laned]
    figure = style.new_figure(9.6, 0.085 * sum(heights) + 0.42 * len(heights) + 1.2)
    axes = figure.subplots(len(laned), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
    for ax, (label, table) in zip(axes, laned.items(), strict=True):
        _draw_lanes(ax, table, lanes[label])
        every = _draw_versions(ax, drawn[label], window)
        ax.set_xlim(*window)
        ax.set_ylim(max(len(lanes[label]), 3) - 0.4, -0.6)
        ax.set_ylabel("worker" if by_worker else "slot")
        ax.set_yticks(range(len(lanes[label])), _lane_names(lanes[label]) if by_worker else [])
        ax.tick_params(axis="y", length=0, labelsize=5)
        ax.set_title(label, loc="left", fontweight="bold")
        ax.set_title(_counts(drawn[label], window, every), loc="right", fontsize=7, color=style.FAINT)
    axes[-1].set_xlabel(f"{shown.clock} (s)")

    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    there = {outcome for table in laned.values() for outcome in table["outcome"]}
    handles = {name: Patch(color=colour) for name, colour in style.OUTCOMES.items() if name in there}
    names = [{"buffered": "buffered at the end", "in flight": "in flight at the end"}.get(n, n) for n in handles]
    version = Line2D([], [], color=style.INK, lw=0.8, alpha=0.6)
    title = shown.facet_title(place)
    style.title(figure, f"Who worked when ({title})" if title else "Who worked when")
    style.legend(figure, [*handles.values(), version], [*names, "new version"], "lease")
    style.small_print(
        figure,
        "; ".join(f"{label}: seed {run.seed}" for label, run in drawn.items())
        if len({run.seed for run in drawn.values()}) > 1
        else f"Seed {seed}.",
        f"The {shown.report.timeline_lanes} busiest lanes at most.",
        f"Shown up to {window[1]:g} s: more leases follow than can be told apart."
        if asked not in (None, window)
        else "",
        "" if by_worker else "A slot goes to the next lease as soon as it is free, whichever worker holds it.",
        command=command,
    )
    return figure


def facet_of(shown: Arrangement) -> Facet:
    """The facet that the report asks timelines of, else the first. Raises ValueError for one that does not exist."""
    asked = shown.report.timeline_facet
    if not asked:
        return shown.facets[0]
    if asked not in shown.facets:
        axes = ", ".join(shown.facet_axes) or "no axes"
        there = "; ".join(", ".join(facet) for facet in shown.facets)
        raise ValueError(f"report.timeline_facet: no facet ({', '.join(asked)}); there are, by {axes}: {spoken(there)}")
    return asked


def _window(tables: dict[str, pl.DataFrame], drawn: dict[str, Run], known_s: float) -> tuple[float, float]:
    """From time 0 for some leases and some versions of the slowest series, as long as all leases are known."""
    durations = np.concatenate([(table["end_s"] - table["start_s"]).to_numpy() for table in tables.values()])
    end = max(float(run.summary["time_s"]) for run in drawn.values())
    if durations.size == 0 or end <= 0:
        return 0.0, max(end, 1.0)
    lease = float(np.median(durations))
    version = max(float(run.summary["time_s"]) / max(int(run.summary["versions"]), 1) for run in drawn.values())
    length = max(8 * lease, min(3.2 * version, 60 * lease))
    return 0.0, min(length, end, known_s) if length > 0 and known_s > 0 else end


def _mostly_busy(table: pl.DataFrame) -> bool:
    slots = max(tracks(table["start_s"].to_list(), table["end_s"]), default=0) + 1
    return table["worker"].n_unique() <= 3 * slots


def _slots(table: pl.DataFrame) -> pl.DataFrame:
    import polars as pl

    slots = tracks(table["start_s"].to_list(), table["end_s"])
    return table.with_columns(worker=pl.Series(slots, dtype=pl.Int64), track=pl.lit(0, pl.Int64))


def _clip(table: pl.DataFrame, window: tuple[float, float]) -> pl.DataFrame:
    import polars as pl

    return table.filter((pl.col("start_s") < window[1]) & (pl.col("end_s") > window[0])).with_columns(
        pl.col("start_s", "end_s").clip(*window)
    )


def _busiest(table: pl.DataFrame, most: int) -> list[tuple[int, int]]:
    import polars as pl

    busy = (
        table.group_by("worker", "track")
        .agg(busy_s=(pl.col("end_s") - pl.col("start_s")).sum())
        .sort("busy_s", "worker", "track", descending=[True, False, False])
        .head(most)
    )
    return sorted(zip(busy["worker"], busy["track"], strict=True))


def _draw_lanes(ax: Axes, table: pl.DataFrame, lanes: Sequence[tuple[int, int]]) -> None:
    from matplotlib.collections import PolyCollection

    heights = {lane: y for y, lane in enumerate(lanes)}
    corners, colours = [], []
    columns = table.select("worker", "track", "start_s", "end_s", "outcome")
    for worker, track, start, end, outcome in columns.iter_rows():
        y = heights.get((worker, track))
        if y is not None:
            corners.append([(start, y - 0.42), (end, y - 0.42), (end, y + 0.42), (start, y + 0.42)])
            colours.append(style.OUTCOMES[outcome])
    ax.add_collection(PolyCollection(corners, facecolors=colours, edgecolors="white", linewidths=0.4))


def _draw_versions(ax: Axes, run: Run, window: tuple[float, float]) -> int:
    """Draw a line a version, or every n-th; return n."""
    times = times_between(run, "committed", window)
    every = next(n for n in (1, 2, 5, 10, 20, 50, 10**9) if len(times) / n <= _MOST_VERSION_LINES)
    for time in times[every - 1 :: every]:
        ax.axvline(time, color=style.INK, lw=0.6, alpha=0.45)
    return every


def _counts(run: Run, window: tuple[float, float], every: int) -> str:
    versions, updates = (len(times_between(run, kind, window)) for kind in ("committed", "consumed"))
    thinned = f" (a line every {every})" if every > 1 else ""
    return f"{updates} updates in {versions} versions{thinned}"


def _lane_names(lanes: Sequence[tuple[int, int]]) -> list[str]:
    return [f"{worker}" if track == 0 else f"{worker} ({track + 1})" for worker, track in lanes]
