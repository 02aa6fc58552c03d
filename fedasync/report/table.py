"""The table of a study: a row a point, as numbers for programs and as text for people."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedasync.report.arrangement import COUNTED, Arrangement, Facet, Runs, Target, arrange, spoken
from fedasync.report.measures import speedup_at
from fedasync.report.spec import Report
from fedasync.report.statistics import (
    Interval,
    Speedup,
    histogram_quantile,
    mean_interval,
    pooled_staleness,
)
from fedasync.report.style import times
from fedasync.runs.run import Run, write

if TYPE_CHECKING:
    import polars as pl
    from rich.table import Table


@dataclass(frozen=True)
class _Point:
    """A series in a facet, over its seeds; None where there is nothing to say."""

    labels: dict[str, str]
    seeds: int
    final: Interval | None
    diverged: int
    best: float | None
    reached: int
    time_s: Interval | None
    missed_by: float | None
    speedup: Speedup | None
    updates: float
    versions: float
    staleness: tuple[float, int, int] | None
    useful: float
    wasted: float


def summary_table(runs: Runs, report: Report | None = None) -> pl.DataFrame:
    """A row per series × facet with numbers only, for programs.

    Columns: the axes; ``seeds``; ``metric``, ``final``, ``final_half_width`` (95 % t-interval over seeds), ``best``;
    ``target``, ``reached`` (seeds that did), ``time_to_target_s`` and ``time_to_target_half_width_s`` over those,
    ``missed_by`` (mean distance of the best value from the target over the others); ``speedup``, ``speedup_low``,
    ``speedup_high``, ``speedup_pairs`` over the report's baseline; ``updates``, ``versions``; ``staleness_mean``,
    ``staleness_p90``, ``staleness_max`` (versions, pooled over seeds); ``useful_share``, ``wasted_share``.
    Raises ValueError for names the runs do not have.
    """
    import polars as pl

    shown = arrange(runs, report)
    metric, target = shown.metric(), shown.target()
    rows = []
    for point in _points(shown):
        mean, p90, largest = point.staleness or (None, None, None)
        up = point.speedup
        rows.append(
            {
                **point.labels,
                "seeds": point.seeds,
                "metric": metric,
                "final": point.final and point.final.mean,
                "final_half_width": point.final and point.final.half_width,
                "best": point.best,
                "target": str(target) if target else None,
                "reached": point.reached if target else None,
                "time_to_target_s": point.time_s and point.time_s.mean,
                "time_to_target_half_width_s": point.time_s and point.time_s.half_width,
                "missed_by": point.missed_by,
                "speedup": up and up.ratio,
                "speedup_low": up and up.low,
                "speedup_high": up and up.high,
                "speedup_pairs": up and up.pairs,
                "updates": point.updates,
                "versions": point.versions,
                "staleness_mean": mean,
                "staleness_p90": p90,
                "staleness_max": largest,
                "useful_share": point.useful,
                "wasted_share": point.wasted,
            }
        )
    return pl.DataFrame(rows, infer_schema_length=None, schema_overrides=dict.fromkeys(_FLOATS, pl.Float64))


_FLOATS = (
    *("final", "final_half_width", "best", "time_to_target_s", "time_to_target_half_width_s", "missed_by"),
    *("speedup", "speedup_low", "speedup_high", "updates", "versions", "staleness_mean"),
    *("useful_share", "wasted_share"),
)


def readable_table(runs: Runs, report: Report | None = None) -> pl.DataFrame:
    """`summary_table` as text for people: ``0.931 ± 0.004``, ``4/5, missed by 0.012``, ``3.2× [2.8, 3.7]``.

    Columns that would be empty are left out. Raises ValueError as `summary_table` does.
    """
    import polars as pl

    shown = arrange(runs, report)
    target = shown.target()
    metric = spoken(shown.metric())
    goal = f"time to {target} (s)"
    ratio = f"speed-up over {shown.report.baseline}"
    rows = []
    for point in _points(shown):
        row = dict(point.labels)
        row["seeds"] = str(point.seeds)
        lost = f" ({point.diverged} of {point.seeds} diverged)" if point.diverged else ""
        row[metric] = plus_minus(point.final) + lost
        row[f"best {metric}"] = number(point.best)
        if target is not None:
            row[goal] = plus_minus(point.time_s)
            missed = "" if point.missed_by is None else f", missed by {number(point.missed_by)}"
            row["reached"] = f"{point.reached}/{point.seeds}{missed}"
        if shown.report.baseline is not None:
            row[ratio] = _ratio(point)
        row["updates"] = number(point.updates)
        row["versions"] = number(point.versions)
        row["staleness mean / p90 / max"] = " / ".join(number(x) for x in point.staleness or ()) or "–"
        row["useful"] = f"{100 * point.useful:.0f} %"
        row["wasted"] = f"{100 * point.wasted:.0f} %"
        rows.append(row)
    if shown.metric() in ("updates", "versions"):
        for row in rows:
            # The metric is one of the columns that stand in every table.
            row.pop(f"best {metric}")
    return pl.DataFrame(rows)


def _points(shown: Arrangement) -> Iterable[_Point]:
    target = shown.target()
    # A facet at a time: the strategies to compare stand under each other.
    for facet in shown.facets:
        for series in shown.series:
            if shown.at(series, facet):
                yield _point(shown, series, facet, target)


def _point(shown: Arrangement, series: str, facet: Facet, target: Target | None) -> _Point:
    metric = shown.metric()
    runs = list(shown.at(series, facet).values())
    ends = [_value(run, "final", metric) for run in runs if not run.summary["timing_only"] or metric in COUNTED]
    finals = [value for value in ends if value is not None and math.isfinite(value)]
    bests = [value for run in runs if (value := _value(run, "best", metric)) is not None]
    times, misses = [], []
    for run in runs if target else []:
        entry = target.entry(run) if target else None
        if entry is None:
            continue
        if entry["reached_s"] is not None:
            times.append(float(entry["reached_s"]))
        elif (best := run.summary["best"].get(entry["metric"])) is not None:
            misses.append(abs(float(entry["value"]) - float(best)))
    base = shown.report.baseline
    histogram = pooled_staleness(run.summary["staleness"]["histogram"] for run in runs)
    total = sum(histogram.values())
    return _Point(
        labels={shown.report.series: series, **dict(zip(shown.facet_axes, facet, strict=True))},
        seeds=len(runs),
        final=mean_interval(finals) if finals else None,
        diverged=sum(metric in run.summary["final"] for run in runs) - len(finals) if metric not in COUNTED else 0,
        best=sum(bests) / len(bests) if bests else None,
        reached=len(times),
        time_s=mean_interval(times) if times else None,
        missed_by=sum(misses) / len(misses) if misses else None,
        speedup=None if base in (None, series) else speedup_at(shown, series, facet, str(base), target),
        updates=_mean(run.summary["consumed"] for run in runs),
        versions=_mean(run.summary["versions"] for run in runs),
        staleness=(
            sum(value * count for value, count in histogram.items()) / total,
            histogram_quantile(histogram, 0.9),
            max(histogram),
        )
        if total
        else None,
        useful=_mean(run.summary["utilisation"]["useful"] for run in runs),
        wasted=_mean(run.summary["utilisation"]["wasted"] for run in runs),
    )


def _value(run: Run, which: str, metric: str) -> float | None:
    if metric in ("updates", "versions"):
        return float(run.summary["consumed" if metric == "updates" else "versions"])
    value = run.summary[which].get(metric)
    return None if value is None else float(value)


def _mean(values: Iterable[float]) -> float:
    return mean_interval(values).mean


def _ratio(point: _Point) -> str:
    found = point.speedup
    if found is None:
        return "1×"
    if found.ratio is None:
        return found.note() or "–"
    spread = "" if found.low is None or found.high is None else _range(found.low, found.high)
    note = f" ({found.note()})" if found.note() else ""
    return f"{times(found.ratio)}{spread}{note}"


def _range(low: float, high: float) -> str:
    return f" [{times(low)}, {times(high)}]".replace("×", "")


def number(value: float | None) -> str:
    """A number at four significant digits, whole from 1000 on; a dash for none."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def plus_minus(interval: Interval | None) -> str:
    """``0.931 ± 0.004``: both to the second digit of the half width; without one, the mean alone."""
    if interval is None:
        return "–"
    half = interval.half_width
    if half is None or half == 0 or not math.isfinite(half):
        return number(interval.mean)
    decimals = max(0, 1 - math.floor(math.log10(half)))
    return f"{interval.mean:.{decimals}f} ± {half:.{decimals}f}"


def markdown(frame: pl.DataFrame) -> str:
    """A table in GitHub's Markdown; numbers at four digits and to the right, missing values as a dash."""
    numeric = [dtype.is_numeric() for dtype in frame.dtypes]

    def line(cells: Iterable[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|").replace("\n", " ") for cell in cells) + " |"

    rule = "|" + "|".join(" ---: " if right else " --- " for right in numeric) + "|"
    return "\n".join([line(frame.columns), rule, *(line(_cells(row)) for row in frame.iter_rows())]) + "\n"


def rich_table(frame: pl.DataFrame, title: str = "") -> Table:
    """The table for a terminal."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title or None, title_justify="left", header_style="bold")
    for name, dtype in frame.schema.items():
        table.add_column(Text(name), justify="right" if dtype.is_numeric() else "left", overflow="fold")
    for row in frame.iter_rows():
        # Text, since labels such as "[K=10]" would be read as markup.
        table.add_row(*(Text(cell) for cell in _cells(row)))
    return table


def brief_tables(runs: Runs, report: Report | None = None) -> list[Table]:
    """`readable_table` for a terminal: a table a facet, without the columns that are only for the record."""
    import polars as pl

    shown = arrange(runs, report)
    frame = readable_table(runs, report)
    axes = [spoken(axis) for axis in shown.facet_axes]
    record = {"seeds", "versions", f"best {spoken(shown.metric())}"} - {spoken(shown.metric())}
    columns = [name for name in frame.columns if name not in record and name not in axes]
    tables = []
    for facet in shown.facets:
        here = [pl.col(axis) == label for axis, label in zip(axes, facet, strict=True)]
        tables.append(rich_table(frame.filter(*here).select(columns), shown.facet_title(facet)))
    return tables


def write_table(frame: pl.DataFrame, folder: Path, name: str, text: str | None = None) -> list[Path]:
    """Write NAME.csv and NAME.md (``text`` if given, else the table's own Markdown); return the two paths."""
    folder.mkdir(parents=True, exist_ok=True)
    csv, md = folder / f"{name}.csv", folder / f"{name}.md"
    write(csv, frame.write_csv().encode())
    write(md, (markdown(frame) if text is None else text).encode())
    return [csv, md]


def _cells(row: tuple[object, ...]) -> list[str]:
    return [
        "–"
        if value is None
        else number(value)
        if isinstance(value, int | float) and not isinstance(value, bool)
        else str(value)
        for value in row
    ]
