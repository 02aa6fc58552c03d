"""The table of a study: a row a point, as numbers for programs and as text for people."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from fedasync.report.arrangement import Arrangement, Facet, Runs, Target, arrange, spoken
from fedasync.report.comparisons import Judged, differences, speedups, standing
from fedasync.report.measures import diverged
from fedasync.report.paired import Difference, Speedup
from fedasync.report.spec import Report
from fedasync.report.statistics import Interval, histogram_quantile, mean_interval, pooled_staleness
from fedasync.report.wording import difference_text, diverged_text, speedup_text
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
    speedup: Judged[Speedup] | None
    gain: Judged[Difference] | None
    updates: float
    versions: float
    staleness: tuple[float, int, int] | None
    useful: float
    wasted: float


def summary_table(runs: Runs, report: Report | None = None) -> pl.DataFrame:
    """A row per series × facet with numbers only, for programs.

    Columns: the axes; ``seeds``, and how many of them ``diverged``; ``metric``, ``final``, ``final_half_width`` (95 %
    t-interval over seeds, a diverged run with the value it ended with where that is finite), ``best``;
    ``target``, ``reached`` (seeds that did), ``time_to_target_s`` and ``time_to_target_half_width_s`` over those,
    ``missed_by`` (mean distance of the best value from the target over the others); ``gain``, the paired difference of
    the metric from the report's baseline at one virtual time, with ``gain_low``, ``gain_high``, ``gain_pairs``,
    ``gain_p_holm``, ``gain_verdict``; ``speedup`` over the baseline with ``speedup_bound`` (=, ≥ or ≤),
    ``speedup_low``, ``speedup_high`` (the wider of the two intervals that follow), ``speedup_t_low``,
    ``speedup_t_high``, ``speedup_bootstrap_low``, ``speedup_bootstrap_high``, ``speedup_pairs``, ``speedup_p_holm``,
    ``speedup_verdict``; ``updates``, ``versions``; ``staleness_mean``, ``staleness_p90``, ``staleness_max`` (versions,
    pooled over seeds); ``useful_share``, ``wasted_share``.
    Raises ValueError for names the runs do not have.
    """
    import polars as pl

    shown = arrange(runs, report)
    metric, target = shown.metric(), shown.target()
    rows = []
    for point in _points(shown):
        mean, p90, largest = point.staleness or (None, None, None)
        up, gain = point.speedup, point.gain
        t, drawn = (up.found.t if up else None) or (None, None), (up.found.bootstrap if up else None) or (None, None)
        rows.append(
            {
                **point.labels,
                "seeds": point.seeds,
                "diverged": point.diverged,
                "metric": metric,
                "final": point.final and point.final.mean,
                "final_half_width": point.final and point.final.half_width,
                "best": point.best,
                "target": str(target) if target else None,
                "reached": point.reached if target else None,
                "time_to_target_s": point.time_s and point.time_s.mean,
                "time_to_target_half_width_s": point.time_s and point.time_s.half_width,
                "missed_by": point.missed_by,
                "gain": gain and gain.found.mean,
                "gain_low": gain and gain.found.low,
                "gain_high": gain and gain.found.high,
                "gain_pairs": gain and gain.found.pairs,
                "gain_p_holm": gain and gain.p_holm,
                "gain_verdict": gain and gain.verdict,
                "speedup": up and up.found.ratio,
                "speedup_bound": up and up.found.bound,
                "speedup_low": up and up.found.low,
                "speedup_high": up and up.found.high,
                "speedup_t_low": t[0],
                "speedup_t_high": t[1],
                "speedup_bootstrap_low": drawn[0],
                "speedup_bootstrap_high": drawn[1],
                "speedup_pairs": up and up.found.pairs,
                "speedup_p_holm": up and up.p_holm,
                "speedup_verdict": up and up.verdict,
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


_LINE = 26
"""Characters of a line, in a terminal, of a cell that holds an interval."""
_INTERVAL = re.compile(r"(?:[≥≤] )?\S+ (?:± \S+|[\[(][^\s,]+, [^\s,]+[\])])")

_FLOATS = (
    *("final", "final_half_width", "best", "time_to_target_s", "time_to_target_half_width_s", "missed_by"),
    *("gain", "gain_low", "gain_high", "gain_p_holm"),
    *("speedup", "speedup_low", "speedup_high", "speedup_t_low", "speedup_t_high"),
    *("speedup_bootstrap_low", "speedup_bootstrap_high", "speedup_p_holm"),
    *("updates", "versions", "staleness_mean", "useful_share", "wasted_share"),
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
    gain = f"{metric} over {shown.report.baseline}"
    ratio = f"speed-up over {shown.report.baseline}"
    rows = []
    for point in _points(shown):
        row = dict(point.labels)
        row["seeds"] = str(point.seeds)
        row[metric] = plus_minus(point.final) + diverged_text(point.diverged, point.seeds)
        row[f"best {metric}"] = number(point.best)
        if target is not None:
            row[goal] = plus_minus(point.time_s)
            missed = "" if point.missed_by is None else f", missed by {number(point.missed_by)}"
            row["reached"] = f"{point.reached}/{point.seeds}{missed}"
        if shown.report.baseline is not None:
            row[gain] = "–" if point.gain is None else difference_text(point.gain)
            row[ratio] = "1×" if point.speedup is None else speedup_text(point.speedup)
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
            row.pop(gain, None)
    return pl.DataFrame(rows)


def _points(shown: Arrangement) -> Iterable[_Point]:
    target = shown.target()
    # A facet at a time: the strategies to compare stand under each other.
    base, metric = shown.report.baseline, shown.metric()
    for facet in shown.facets:
        ups = {} if base is None else speedups(shown, facet, base, target)
        gains = {} if base is None else differences(standing(shown, facet, metric), base)
        for series in shown.series:
            if shown.at(series, facet):
                yield _point(shown, series, facet, target, ups.get(series), gains.get(series))


def _point(
    shown: Arrangement,
    series: str,
    facet: Facet,
    target: Target | None,
    up: Judged[Speedup] | None,
    gain: Judged[Difference] | None,
) -> _Point:
    metric = shown.metric()
    runs = list(shown.at(series, facet).values())
    ends = [_value(run, "final", metric) for run in runs]
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
    histogram = pooled_staleness(run.summary["staleness"]["histogram"] for run in runs)
    total = sum(histogram.values())
    return _Point(
        labels={shown.report.series: series, **dict(zip(shown.facet_axes, facet, strict=True))},
        seeds=len(runs),
        final=mean_interval(finals) if finals else None,
        diverged=sum(diverged(run, metric) for run in runs),
        best=sum(bests) / len(bests) if bests else None,
        reached=len(times),
        time_s=mean_interval(times) if times else None,
        missed_by=sum(misses) / len(misses) if misses else None,
        speedup=up,
        gain=gain,
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


def number(value: float | None) -> str:
    """A number at four significant digits, whole from 1000 on; a dash for none."""
    if value is None or not math.isfinite(value):
        return "–"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def alike(value: float, values: Iterable[float]) -> str:
    """A number of a column: with as many decimals as show the largest of the column at four digits."""
    largest = max((abs(other) for other in values if math.isfinite(other)), default=0.0)
    decimals = 3 - math.floor(math.log10(largest)) if largest > 0 else 0
    return f"{value:.{min(max(0, decimals), 6)}f}" if largest >= 1e-3 else number(value)


def plus_minus(interval: Interval | None) -> str:
    """``0.931 ± 0.004``: both to the second digit of the half width; without one, the mean alone."""
    if interval is None:
        return "–"
    half = interval.half_width
    if half is None or half == 0 or not math.isfinite(half):
        return number(interval.mean)
    if half < 1e-6 * abs(interval.mean):  # nothing but rounding
        return f"{number(interval.mean)} ± {half:.0e}"
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
    rows = [_cells(row) for row in frame.iter_rows()]
    for i, (name, dtype) in enumerate(frame.schema.items()):
        table.add_column(
            Text(name),
            justify="right" if dtype.is_numeric() else "left",
            overflow="fold",
            min_width=min(14, max(len(name), *(len(row[i]) for row in rows), 1)) if rows else None,
            no_wrap=any(_INTERVAL.search(row[i]) for row in rows),
        )
    for row in rows:
        # Text, since labels such as "[K=10]" would be read as markup.
        table.add_row(*(Text(_laid_out(cell)) for cell in row))
    return table


def _laid_out(cell: str) -> str:
    """A cell with an interval, broken into lines: the interval stays whole, and its verdict stands below it."""
    if not _INTERVAL.search(cell):
        return cell
    whole = _INTERVAL.sub(lambda found: found[0].replace(" ", "\N{NO-BREAK SPACE}"), cell)
    lines = re.sub(r", (within noise|weak)", r"\n\1", whole).splitlines()
    return "\n".join(part for line in lines for part in textwrap.wrap(line, _LINE))


def brief_tables(runs: Runs, report: Report | None = None) -> list[Table]:
    """`readable_table` for a terminal: a table a facet, without the columns that are only for the record."""
    import polars as pl

    shown = arrange(runs, report)
    frame = readable_table(runs, report)
    axes = [spoken(axis) for axis in shown.facet_axes]
    metric = spoken(shown.metric())
    record = {"seeds", "updates", "versions", f"best {metric}", "useful", "wasted"} - {metric}
    columns = [pl.col(name) for name in frame.columns if name not in record and name not in axes]
    stale = "staleness mean / p90 / max"
    columns = [
        pl.col(stale).str.split(" / ").list.first().alias("staleness") if c.meta.output_name() == stale else c
        for c in columns
    ]
    columns.append(pl.concat_str("useful", "wasted", separator=", ").alias("useful, wasted"))
    base = shown.report.baseline
    if base is not None:  # in the title, where it may be long
        brief = {f"{metric} over {base}": "gain", f"speed-up over {base}": "speed-up"}
        columns = [c.alias(brief.get(c.meta.output_name(), c.meta.output_name())) for c in columns]
    tables = []
    for facet in shown.facets:
        here = [pl.col(axis) == label for axis, label in zip(axes, facet, strict=True)]
        title = shown.facet_title(facet)
        against = "" if base is None else f"{'; ' if title else ''}gain and speed-up over {base}"
        tables.append(rich_table(frame.filter(*here).select(columns), title + against))
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
