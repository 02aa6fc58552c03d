"""The ranking of a study's series, by the metric at one virtual time and by the time to the target."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedasync.report.arrangement import Arrangement, Facet, Runs, Target, arrange, spoken
from fedasync.report.comparisons import Judged, Standing, differences, lower_is_better, speedups, standing
from fedasync.report.measures import times_s
from fedasync.report.paired import Difference, Missed, Speedup, agreeing
from fedasync.report.spec import Report
from fedasync.report.statistics import Interval, mean_interval
from fedasync.report.table import number, plus_minus, rich_table
from fedasync.report.wording import difference_text, diverged_text, ratio_text, speedup_text

if TYPE_CHECKING:
    import polars as pl
    from rich.table import Table


@dataclass(frozen=True)
class Place:
    """Where a series stands in one facet.

    rank: 1 is the best; None where there is nothing to rank by (no value, or the target never reached). By value, a
    series that diverged ranks behind those that did so in a smaller share of their seeds: the values it ended with are
    those of another time. By time, the share of seeds that missed the target comes before the mean of the times. The
    best is the one observed, so a comparison with it is with a series that was partly lucky.
    tied: whether the difference from the best is not clear, after Holm's adjustment; None where no interval can tell.
    """

    rank: int | None
    tied: bool | None

    def __str__(self) -> str:
        return "–" if self.rank is None else f"{self.rank}{'=' if self.tied and self.rank > 1 else ''}"


@dataclass(frozen=True)
class Ranked:
    """A series in one facet: its place by the metric and by the time to the target, beside best and baseline.

    diverged: in how many seeds it did, by its end or by the metric.
    time_s: geometric mean over seeds of the time to the target, a missed target standing in with its run's end;
    ``missed`` counts those, of ``timed`` seeds. ``never`` counts those of the missed that diverged: they never reach
    it, and are in no mean. over_fastest: the speed-up over the fastest series.
    """

    series: str
    seeds: int
    diverged: int
    by_value: Place
    value: Interval | None
    from_best: Judged[Difference] | None
    from_baseline: Judged[Difference] | None
    by_time: Place
    time_s: float | None
    missed: int
    never: int
    timed: int
    over_fastest: Judged[Speedup] | None
    over_baseline: Judged[Speedup] | None


@dataclass(frozen=True)
class FacetRanking:
    """The series of one facet, in the study's order, and the virtual time at which their values were compared."""

    facet: Facet
    at_s: float
    best: str | None
    fastest: str | None
    rows: tuple[Ranked, ...]

    def by_value(self) -> list[Ranked]:
        return sorted(self.rows, key=lambda row: row.by_value.rank or len(self.rows) + 1)

    def by_time(self) -> list[Ranked]:
        return sorted(self.rows, key=lambda row: row.by_time.rank or len(self.rows) + 1)


def rank(shown: Arrangement) -> list[FacetRanking]:
    """Rank the series in every facet."""
    target = shown.target()
    return [_rank_facet(shown, facet, target) for facet in shown.facets]


def _rank_facet(shown: Arrangement, facet: Facet, target: Target | None) -> FacetRanking:
    cells = {label: shown.at(label, facet) for label in shown.series if shown.at(label, facet)}
    metric, base = shown.metric(), shown.report.baseline
    at = standing(shown, facet, metric)
    values = {label: _value(at, label) for label in cells}
    sign = 1 if lower_is_better(shown, metric) else -1
    known = {label: sign * value.mean for label, value in values.items() if value is not None}
    lost = {label: len(at.diverged[label]) for label in cells}
    in_order = sorted(known, key=lambda label: (lost[label] / len(cells[label]), known[label]))
    best = in_order[0] if in_order else None
    from_best = {} if best is None else differences(at, best)
    from_base = {} if base not in cells else differences(at, str(base))

    # Without a target there is no time to rank by: time per update is what `updates` says already.
    times = {label: _times(shown, label, facet, target) for label in cells} if target else {}
    reached = {label: time.order() for label, time in times.items() if time.missed < time.timed}
    quickest = sorted(reached, key=lambda label: reached[label])
    fastest = quickest[0] if quickest else None
    over_fastest = {} if fastest is None else speedups(shown, facet, fastest, target)
    over_base = {} if base not in cells or not target else speedups(shown, facet, str(base), target)
    rows = []
    for label, cell in cells.items():
        time = times.get(label, _Times(None, 0, 0, 0))
        rows.append(
            Ranked(
                label,
                len(cell),
                lost[label],
                _place(in_order, label, from_best),
                values[label],
                from_best.get(label),
                from_base.get(label),
                _place(quickest, label, over_fastest),
                time.mean_s,
                time.missed,
                time.never,
                time.timed,
                over_fastest.get(label),
                over_base.get(label),
            )
        )
    return FacetRanking(facet, at.time_s, best, fastest, tuple(rows))


def _value(at: Standing, label: str) -> Interval | None:
    finite = [value for value in at.values[label].values() if value is not None and math.isfinite(value)]
    return mean_interval(finite) if finite else None


@dataclass(frozen=True)
class _Times:
    """Geometric mean of the times of seeds that did not diverge, None without one; see `Ranked` for the counts."""

    mean_s: float | None
    missed: int
    never: int
    timed: int

    def order(self) -> tuple[float, float, float]:
        """Less is better. Of the missed, those that will never be reached are the worse."""
        return self.missed / self.timed, self.never / self.timed, math.inf if self.mean_s is None else self.mean_s


def _times(shown: Arrangement, label: str, facet: Facet, target: Target) -> _Times:
    found = [time for time in times_s(shown, label, facet, target).values() if time is not None]
    missed = [time for time in found if isinstance(time, Missed)]
    never = sum(time.diverged for time in missed)
    known = [time for time in found if not isinstance(time, Missed)]
    known += [time.until_s for time in missed if not time.diverged]
    positive = [time for time in known if time > 0]
    mean_s = float(np.exp(np.mean(np.log(positive)))) if positive else 0.0 if known else None
    return _Times(mean_s, len(missed), never, len(found))


def _place(in_order: Sequence[str], label: str, compared: Mapping[str, Judged[Difference] | Judged[Speedup]]) -> Place:
    if label not in in_order:
        return Place(None, None)
    if label == in_order[0]:
        return Place(1, None)
    verdict = compared[label].verdict
    return Place(in_order.index(label) + 1, None if verdict == "no interval" else verdict != "clear")


def ranking_table(runs: Runs, report: Report | None = None) -> pl.DataFrame:
    """A row per facet and series, by rank, with numbers only.

    Columns: the facet's axes; ``rank``, the series, ``tied`` (with the best); ``seeds``, ``diverged`` (how many of
    them); ``metric``, ``at_s``, ``value`` (mean at that virtual time), ``value_half_width``; ``from_best`` and
    ``from_baseline`` (paired differences) with ``_low``, ``_high``, ``_pairs``, ``_p_holm``; where there is a target
    ``rank_by_time``, ``tied_by_time``, ``time_s`` (geometric mean, misses counted as the run's end, those that
    diverged left out), ``missed`` (these too), ``over_fastest`` and ``over_baseline`` (paired
    ratios) with ``_bound`` and the same endings. Raises ValueError for names the runs do not have.
    """
    import polars as pl

    shown = arrange(runs, report)
    metric, target = shown.metric(), shown.target()
    rows = []
    for facet in rank(shown):
        for one in facet.by_value():
            row: dict[str, object] = dict(zip(shown.facet_axes, facet.facet, strict=True))
            row |= {"rank": one.by_value.rank, shown.report.series: one.series, "tied": one.by_value.tied}
            row |= {"seeds": one.seeds, "diverged": one.diverged, "metric": metric, "at_s": facet.at_s}
            row |= {"value": one.value and one.value.mean, "value_half_width": one.value and one.value.half_width}
            row |= _columns("from_best", one.from_best) | _columns("from_baseline", one.from_baseline)
            if target is not None:
                row |= {"target": str(target), "rank_by_time": one.by_time.rank, "tied_by_time": one.by_time.tied}
                row |= {"time_s": one.time_s, "missed": one.missed}
                row |= _columns("over_fastest", one.over_fastest, bound=True)
                row |= _columns("over_baseline", one.over_baseline, bound=True)
            rows.append(row)
    floats = [name for row in rows for name, value in row.items() if isinstance(value, float)]
    return pl.DataFrame(rows, infer_schema_length=None, schema_overrides=dict.fromkeys(floats, pl.Float64))


def _columns(
    name: str, judged: Judged[Difference] | Judged[Speedup] | None, *, bound: bool = False
) -> dict[str, object]:
    found = None if judged is None else judged.found
    centre = found.ratio if isinstance(found, Speedup) else found.mean if found else None
    columns: dict[str, object] = {name: centre}
    if bound:
        columns[f"{name}_bound"] = found.bound if isinstance(found, Speedup) else None
    return columns | {
        f"{name}_low": found and found.low,
        f"{name}_high": found and found.high,
        f"{name}_pairs": found and found.pairs,
        f"{name}_p_holm": judged and judged.p_holm,
    }


def readable_ranking(runs: Runs, report: Report | None = None) -> pl.DataFrame:
    """`ranking_table` as text for people; ``3=`` is rank 3, tied with the best within noise."""
    import polars as pl

    shown = arrange(runs, report)
    rows = [
        dict(zip(map(spoken, shown.facet_axes), facet.facet, strict=True)) | row
        for facet in rank(shown)
        for row in _text(shown, facet, at="")
    ]
    return pl.DataFrame(rows)


def ranking_tables(runs: Runs, report: Report | None = None) -> list[Table]:
    """The ranking for a terminal: a table a facet, without what `readable_table` says of the baseline."""
    import polars as pl

    shown = arrange(runs, report)
    tables = []
    for facet in rank(shown):
        frame = pl.DataFrame(_text(shown, facet, at=f" at {facet.at_s:g} s"))
        title = shown.facet_title(facet.facet)
        tables.append(rich_table(frame, f"ranking{f', {title}' if title else ''}"))
    return tables


def _text(shown: Arrangement, facet: FacetRanking, at: str) -> list[dict[str, str]]:
    metric, target, base = spoken(shown.metric()), shown.target(), shown.report.baseline
    rows = []
    for one in facet.by_value():
        row = {"rank": str(one.by_value), spoken(shown.report.series): one.series}
        if not at:
            row["at (s)"] = number(facet.at_s)
        row[f"{metric}{at}"] = plus_minus(one.value) + diverged_text(one.diverged, one.seeds)
        row["from the best"] = "best" if one.series == facet.best else _difference(one.from_best)
        if base is not None and not at:
            row[f"over {base}"] = _difference(one.from_baseline)
        if target is not None:
            row["rank by time"] = str(one.by_time)
            row[f"time to {target} (s)"] = _time_text(one)
            row["over the fastest"] = "fastest" if one.series == facet.fastest else _ratio(one.over_fastest)
            if base is not None and not at:
                row[f"speed-up over {base}"] = _ratio(one.over_baseline)
        rows.append(row)
    return rows


def _difference(judged: Judged[Difference] | None) -> str:
    return "–" if judged is None else difference_text(judged)


def _ratio(judged: Judged[Speedup] | None) -> str:
    if judged is None:
        return "–"
    # How many missed stands in the column of times; a partner that is missing is said here.
    found = judged.found
    return speedup_text(judged) if found.unmatched or not found.pairs or agreeing(found) else _short(judged)


def _short(judged: Judged[Speedup]) -> str:
    reserved = judged.verdict in ("weak", "within noise")
    return ratio_text(judged.found) + (f", {judged.verdict}" if reserved else "")


def _time_text(one: Ranked) -> str:
    if one.timed == 0:
        return "–"
    if one.missed == one.timed:
        return "not reached"
    if not one.missed:
        return number(one.time_s)
    never = f", {one.never} of these diverged" if one.never else ""
    return f"≥ {number(one.time_s)} ({one.missed} of {one.timed} missed{never})"
