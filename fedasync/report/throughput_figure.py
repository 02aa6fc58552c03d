"""The figure of how many tokens a second are trained, along an axis of the study, beside published points."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fedasync.report import style
from fedasync.report.arrangement import Arrangement, Cell, Facet, Runs, arrange, spoken
from fedasync.report.by_axis import panels_along, places, title_without, x_ticks
from fedasync.report.cluster import need_rollouts, over_seeds, tokens_per_second
from fedasync.report.paired import paired_speedup
from fedasync.report.spec import Published, Report, listed

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D


PUBLISHED, FITTED = "published", "published, fitted to"
"""Names of the hollow marks."""


class Point(NamedTuple):
    """A value and the ends of its interval; None where there is none."""

    value: float
    low: float | None
    high: float | None


@style.styled
def throughput_by_axis(
    runs: Runs,
    report: Report | None = None,
    *,
    baseline: str | None = None,
    x_axis: str | None = None,
    command: str = "",
) -> Figure:
    """Tokens trained a second against the labels of ``x_axis``: a line a series with its 95 % band, a panel a facet.

    With ``report.throughput = "speedup"`` it is their ratio to the baseline's, paired by seed; where the baseline has
    one label of the x axis only, it stands for all. ``report.published`` are hollow marks, their sources below.
    Warm-up versions are left out. Raises ValueError for runs without rollouts, a missing x axis or baseline, and for
    names that do not exist.
    """
    shown = arrange(runs, report, baseline=baseline, x_axis=x_axis)
    need_rollouts(shown, "throughput_by_axis")
    axis = shown.report.x_axis
    if axis is None:
        raise ValueError(f"report.x_axis: none given; there are: {listed(shown.facet_axes)}")
    base = shown.baseline() if shown.report.throughput == "speedup" else None
    at, labels, panels = panels_along(shown, axis)
    place = places(labels)
    figure, axes = style.panels(len(panels), (3.4, 2.7) if len(panels) > 1 else (5.6, 3.7))
    handles: dict[str, Line2D] = {}
    for ax, panel in zip(axes, panels, strict=True):
        for label in shown.series:
            facets = {x: (*panel[:at], x, *panel[at:]) for x in labels}
            points = {x: found for x, facet in facets.items() if (found := _point(shown, label, facet, at, base))}
            if points:
                handles[label] = _draw(ax, points, place, shown, label)
        handles.update(_draw_published(ax, place, shown, panel, at))
        x_ticks(ax, labels, place)
        ax.grid(color="#EEEEEE", lw=0.7)
        ax.set_title(style.wrap(title_without(shown, panel, at), 44), loc="left")
    drawn = [line for ax in axes for line in ax.lines]
    tops = [float(y) for line in drawn for y in np.asarray(line.get_ydata(), np.float64)]
    axes[0].set_ylim(0, 1.15 * max(tops, default=1.0))  # panels share it
    for ax in style.bottom(axes):
        ax.set_xlabel(spoken(axis))
    for ax in style.left(axes):
        ax.set_ylabel("tokens trained a second" if base is None else style.wrap(f"speed-up over {base} (×)", 34))
    what = "Effective throughput" if base is None else f"Effective throughput over {base}"
    style.title(figure, f"{what}, by {spoken(axis)}")
    ordered = [label for label in (*shown.series, PUBLISHED, FITTED) if label in handles]
    style.legend(figure, [handles[label] for label in ordered], ordered, spoken(shown.report.series))
    style.small_print(
        figure,
        "Tokens trained a second, warm-up left out."
        if base is None
        else f"Ratio of tokens trained a second to {base}'s, warm-up left out, paired by seed.",
        "Band: 95 % interval." if len(shown.seeds) > 1 else "",
        style.seeds_text(shown.seeds),
        _sources(shown),
        command=command,
    )
    return figure


def _point(shown: Arrangement, label: str, facet: Facet, at: int, base: str | None) -> Point | None:
    cell = shown.at(label, facet)
    if base is None or not cell:
        mean = over_seeds(cell, tokens_per_second)
        return None if mean is None else Point(mean.mean, mean.low, mean.high)
    found = paired_speedup(_seconds(cell), _seconds(_baseline(shown, base, facet, at)))
    return None if found.ratio is None else Point(found.ratio, found.low, found.high)


def _baseline(shown: Arrangement, base: str, facet: Facet, at: int) -> Cell:
    """The baseline's runs at the same place, or at the one label that it has along the axis."""
    if cell := shown.at(base, facet):
        return cell
    there = [
        other
        for other in shown.facets
        if (*other[:at], *other[at + 1 :]) == (*facet[:at], *facet[at + 1 :]) and shown.at(base, other)
    ]
    return shown.at(base, there[0]) if len(there) == 1 else {}


def _seconds(cell: Cell) -> dict[int, float | None]:
    """Seconds a token, by seed."""
    rates = {seed: tokens_per_second(run) for seed, run in cell.items()}
    return {seed: 1 / rate if rate else None for seed, rate in rates.items()}


def _draw(ax: Axes, points: Mapping[str, Point], place: Mapping[str, float], shown: Arrangement, label: str) -> Line2D:
    look = style.line(shown.series, label)
    xs = [place[x] for x in points]
    if len(xs) == 1 and len(place) > 1 and label == shown.report.baseline:  # it does not depend on the axis
        (one,) = points.values()
        line = ax.axhline(one.value, lw=1.4, **look)
        if one.low is not None and one.high is not None:
            ax.axhspan(one.low, one.high, color=look["color"], alpha=0.12, lw=0)
        return line
    line = ax.plot(xs, [one.value for one in points.values()], marker="o", ms=4.5, lw=1.6, **look)[0]
    banded = [
        (place[x], one.low, one.high) for x, one in points.items() if one.low is not None and one.high is not None
    ]
    if banded:
        at, lows, highs = (list(column) for column in zip(*banded, strict=True))
        ax.fill_between(at, lows, highs, color=look["color"], alpha=0.16, lw=0)
    return line


def _draw_published(
    ax: Axes, place: Mapping[str, float], shown: Arrangement, panel: Facet, at: int
) -> dict[str, Line2D]:
    from matplotlib.lines import Line2D

    axis, series = shown.facet_axes[at], shown.report.series
    rest = [name for i, name in enumerate(shown.facet_axes) if i != at]
    others = dict(zip(rest, panel, strict=True))
    drawn: dict[str, Line2D] = {}
    for point in _published(shown):
        x, line = point.labels.get(axis), point.labels.get(series)
        if (
            x is not None
            and x in place
            and all(point.labels.get(name, label) == label for name, label in others.items())
        ):
            tint = style.INK if line is None else style.colour(shown.series, line)
            name, mark = (FITTED, "s") if point.fitted else (PUBLISHED, "D")
            ax.plot(place[x], point.value, mark, ms=7, mfc="none", mec=tint, mew=1.4, zorder=3)
            drawn[name] = Line2D([], [], ls="", marker=mark, ms=6, mfc="none", mec=style.INK, mew=1.2)
    return drawn


def _published(shown: Arrangement) -> list[Published]:
    """The points in the figure's unit."""
    base = shown.report.baseline if shown.report.throughput == "speedup" else None
    return [
        point
        for point in shown.report.published
        if point.metric == "tokens_per_second"
        and (point.over is None if base is None else (point.over or {}).get(shown.report.series) == base)
    ]


def _sources(shown: Arrangement) -> str:
    sources = dict.fromkeys(point.source for point in _published(shown))
    return f"Hollow: published ({'; '.join(sources)})." if sources else ""
