"""The figure of a ranking: a dot a series with the interval of its distance from the best, a panel a facet."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from fedasync.report import style
from fedasync.report.arrangement import Arrangement, Runs, arrange, spoken
from fedasync.report.comparisons import lower_is_better
from fedasync.report.paired import Verdict
from fedasync.report.ranking import FacetRanking, Place, Ranked, rank
from fedasync.report.spec import Report
from fedasync.report.table import alike, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_FARTHEST = 0.6
"""How far an interval may reach beyond the outermost dots, in widths of their range; the rest runs out of sight."""

_TICKS = (
    (0.1, 0.2, 0.3, 0.5, 0.7, 1, 1.2, 1.5, 2, 2.5, 3, 4, 5, 7, 10, 15, 20, 30, 50, 70, 100, 200, 500, 1000),
    (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000),
    (0.1, 1, 10, 100, 1000),
)
"""Ticks of the axis of ratios, from fine to coarse: the first that are few enough are taken."""


@dataclass(frozen=True)
class _Dot:
    """One row of a panel. ``low`` and ``high`` are the interval's ends; None without one."""

    label: str
    place: Place
    x: float | None
    low: float | None
    high: float | None
    verdict: Verdict | None
    beside: str
    bound: Literal["=", "≥", "≤"] = "="


@style.styled
def ranking(
    runs: Runs, report: Report | None = None, *, by: Literal["value", "time"] = "value", command: str = ""
) -> Figure:
    """Series by rank: ``by`` the metric at one virtual time, or by the time to the target; a panel a facet.

    A dot is the mean and its bar the 95 % interval of the paired difference from the best, so a bar that crosses the
    best's line is within noise of it: those dots are hollow. Times are shown as multiples of the fastest's.
    Raises ValueError for names the runs do not have, and by time for runs without a target.
    """
    shown = arrange(runs, report)
    target = shown.target()
    if by == "time" and target is None:
        raise ValueError("ranking: by time needs a target, and these runs recorded none")
    dots_of: Callable[[Arrangement, FacetRanking], list[_Dot]] = _by_value if by == "value" else _by_time
    facets = rank(shown)
    dots = [dots_of(shown, facet) for facet in facets]
    longest = max(len(style.wrap(dot.label, 30).splitlines()[0]) for rows in dots for dot in rows)
    columns = style.columns_for(len(facets))
    most = max(len(rows) for rows in dots)
    panel = (2.2 if columns > 1 else 3.6) + 0.068 * min(longest, 30) + 1.0
    lines = -(-len(facets) // columns)
    figure = style.new_figure(columns * panel + 0.2, lines * (0.21 * most + 0.75) + 1.2)
    grid = figure.subplots(lines, columns, squeeze=False)
    axes = list(grid.flat)
    for spare in axes[len(facets) :]:
        spare.remove()
    for ax, facet, rows in zip(axes, facets, dots, strict=False):
        _draw(ax, rows, shown, log=by == "time")
        title = shown.facet_title(facet.facet)
        ax.set_title(style.wrap(title, 44), loc="left")
        if by == "value":
            ax.set_xlabel(f"{spoken(shown.metric())} at {number(facet.at_s)} s")
        else:
            ax.set_xlabel("times as long as the fastest")
    what = f"{spoken(shown.metric())} at one {shown.clock}" if by == "value" else f"time to {target}"
    style.title(figure, f"Ranking by {what}")
    better = "" if by == "time" else "Lower is better. " if lower_is_better(shown, shown.metric()) else ""
    distance = "difference from the best, drawn from its line" if by == "value" else "ratio to the fastest's time"
    style.small_print(
        figure,
        f"{better}Dot: mean over seeds; bar: 95 % interval of the paired {distance}, the wider of Student's t and the "
        "bootstrap.",
        "Hollow, and = beside the rank: tied with the best (within noise, or not clear among all comparisons of the "
        "panel after Holm). Square: the baseline.",
        "" if by == "value" else "First by seeds that missed, each counted as the run's end: ▸ at least so long.",
        "A dot without a bar has no interval: one pair, or pairs that agree." if _barless(dots) else "",
        _diverged(shown, facets, by),
        style.seeds_text(shown.seeds),
        command=command,
    )
    return figure


def _barless(dots: Sequence[Sequence[_Dot]]) -> bool:
    return any(dot.x is not None and dot.low is None and dot.place.rank != 1 for rows in dots for dot in rows)


def _diverged(shown: Arrangement, facets: Sequence[FacetRanking], by: Literal["value", "time"]) -> str:
    """Which series diverged, where and how often; empty for none."""
    named = []
    for facet in facets:
        lost = [f"{row.series} ({row.diverged} of {row.seeds})" for row in facet.rows if row.diverged]
        title = shown.facet_title(facet.facet)
        if lost:
            named.append(f"{title + ': ' if title else ''}{', '.join(lost)}")
    what = "last finite values, ranked behind those that did not" if by == "value" else "never reach a target"
    return f"Diverged ({what}): {'; '.join(named)}." if named else ""


def _by_value(shown: Arrangement, facet: FacetRanking) -> list[_Dot]:
    best = next((row.value.mean for row in facet.rows if row.series == facet.best and row.value), 0.0)
    means = [row.value.mean for row in facet.rows if row.value]
    dots = []
    for row in facet.by_value():
        found = row.from_best and row.from_best.found
        # The best's mean plus the paired difference: the series' own mean, wherever all seeds have partners.
        x = None if row.value is None else best + found.mean if found and found.mean is not None else row.value.mean
        low = best + found.low if found and found.low is not None else None
        high = best + found.high if found and found.high is not None else None
        text = "no value" if row.value is None else alike(row.value.mean, means)
        text += f", {row.diverged}/{row.seeds} diverged" if row.diverged else ""
        beside = ", ".join(filter(None, [text, found.note() if found else ""]))
        verdict = None if row.from_best is None else row.from_best.verdict
        dots.append(_Dot(row.series, row.by_value, x, low, high, verdict, beside))
    return dots


def _by_time(shown: Arrangement, facet: FacetRanking) -> list[_Dot]:
    dots = []
    for row in facet.by_time():
        found = row.over_fastest and row.over_fastest.found
        x = 1.0 if row.series == facet.fastest else 1 / found.ratio if found and found.ratio else None
        low = 1 / found.high if found and found.high else None
        high = (1 / found.low if found.low else math.inf) if found and found.low is not None else None
        # The other way round: at most so much faster is at least so many times as long.
        bound = {"=": "=", "≥": "≤", "≤": "≥"}[found.bound] if found else "="
        beside = _time_beside(row)
        verdict = row.over_fastest and row.over_fastest.verdict
        dots.append(_Dot(row.series, row.by_time, x, low, high, verdict, beside, bound))  # type: ignore[arg-type]
    return dots


def _time_beside(row: Ranked) -> str:
    if not row.timed:
        return "no time"
    never = f", {row.never}/{row.timed} diverged" if row.never else ""
    if row.missed == row.timed:
        return f"not reached{never}"
    seconds = f"{number(row.time_s)} s"
    missed = f"≥ {seconds}, {row.missed}/{row.timed} missed{never}" if row.missed else seconds
    alone = row.over_fastest.found.unmatched if row.over_fastest else ()
    return f"{missed}, {len(alone)} unmatched" if alone else missed


def _draw(ax: Axes, dots: Sequence[_Dot], shown: Arrangement, *, log: bool) -> None:
    xs = [dot.x for dot in dots if dot.x is not None and math.isfinite(dot.x)]
    low, high = _limits(xs, dots, log=log)
    if log:
        ax.set_xscale("log")
    for y, dot in enumerate(dots):
        colour = style.colour(shown.series, dot.label)
        if y % 2:
            ax.axhspan(y - 0.5, y + 0.5, color="#F6F6F6", lw=0, zorder=0)
        if dot.x is not None and math.isfinite(dot.x):
            if dot.low is not None and dot.high is not None:
                ends = [max(dot.low, low), min(dot.high, high)]
                ax.plot(ends, [y, y], color=colour, lw=1.4, solid_capstyle="butt")
            tied = dot.place.tied is True
            marker = "s" if dot.label == shown.report.baseline else "o"
            if dot.bound != "=":
                marker = ">" if dot.bound == "≥" else "<"
            ax.plot(dot.x, y, marker, ms=5, mec=colour, mew=1.2, mfc="white" if tied else colour)
        ax.annotate(
            dot.beside,
            (1.0, y),
            xycoords=("axes fraction", "data"),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=6.5,
        )
    best = next((dot.x for dot in dots if dot.place.rank == 1), None)
    if best is not None:
        ax.axvline(best, color=style.INK, lw=0.9, ls=(0, (1, 2)), zorder=0.5)
    ax.set_xlim(low, high)
    ax.set_ylim(len(dots) - 0.5, -0.5)
    ax.set_yticks(range(len(dots)), [f"{style.wrap(dot.label, 30)}   {dot.place!s:\u2007<2}" for dot in dots])
    ax.tick_params(axis="y", length=0, labelsize=7.5)
    _ticks(ax, low, high, log=log)


def _limits(xs: Sequence[float], dots: Sequence[_Dot], *, log: bool) -> tuple[float, float]:
    """All dots, and of the intervals what is near them: two seeds can give one of any width."""
    if not xs:
        return (0.5, 2.0) if log else (0.0, 1.0)
    scale: Callable[[float], float] = math.log if log else float
    back: Callable[[float], float] = math.exp if log else float
    first, last = scale(min(xs)), scale(max(xs))
    room = (last - first) or (0.3 if log else 0.05 * abs(first) or 1.0)
    lows = [scale(dot.low) for dot in dots if dot.low is not None and dot.low > (0 if log else -math.inf)]
    highs = [scale(dot.high) for dot in dots if dot.high is not None and math.isfinite(dot.high)]
    bottom = max(min([first, *lows]), first - _FARTHEST * room)
    top = min(max([last, *highs]), last + _FARTHEST * room)
    margin = 0.06 * (top - bottom or room)
    return back(bottom - margin), back(top + margin)


def _ticks(ax: Axes, low: float, high: float, *, log: bool) -> None:
    from matplotlib.ticker import FixedLocator, MaxNLocator, NullLocator

    if not log:
        ax.xaxis.set_major_locator(MaxNLocator(4))
        return
    finest = next((ticks for ticks in _TICKS if sum(low <= x <= high for x in ticks) <= 6), _TICKS[-1])
    inside = [x for x in finest if low <= x <= high]
    ax.xaxis.set_major_locator(FixedLocator(inside))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.set_xticks(inside, [f"{step:g}×" for step in inside])
