"""Figures of how much sooner a series reaches the target than the baseline does."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedasync.report import style
from fedasync.report.arrangement import Arrangement, Runs, Target, arrange, spoken
from fedasync.report.by_axis import panels_along, places, title_without, x_ticks
from fedasync.report.comparisons import Judged, speedups
from fedasync.report.paired import Speedup
from fedasync.report.spec import Report, listed
from fedasync.report.wording import LEGEND, ratio_text, remark

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

CEILING = "E[max of n] / E[t]"
"""What not waiting gains over waiting for everybody, contribution for contribution, once a run is long."""

_ENDLESS = 1e6
"""Where a band without an end is cut, out of sight."""


@style.styled
def speedup(
    runs: Runs,
    report: Report | None = None,
    *,
    baseline: str | None = None,
    metric: str | None = None,
    target: float | None = None,
    command: str = "",
) -> Figure:
    """Speed-up in time to target over ``baseline``: a bar a series with its 95 % interval, a panel a facet.

    Seeds are paired; where a series or the baseline missed the target, the bar says so, and is a bound where the
    misses allow one. What is within noise is pale. Runs without targets (timing-only ones) are compared by virtual
    time per applied update. Keywords replace the report's fields.
    Raises ValueError without a baseline, and for names the runs do not have.
    """
    shown = arrange(runs, report, baseline=baseline, metric=metric, target=target)
    base, aim = shown.baseline(), shown.target()
    compared = [label for label in shown.series if label != base]
    if not compared:
        raise ValueError(f"report.baseline: {base!r} is the only series; a speed-up needs another one")
    found = {facet: speedups(shown, facet, base, aim) for facet in shown.facets}
    every = [one.found for facet in found.values() for one in facet.values()]
    lines = max([1, *(len(_beside(one)) for facet in found.values() for one in facet.values())])
    height = (0.24 + 0.12 * lines) * len(compared) + 0.55
    figure, axes = style.panels(
        len(shown.facets), (3.5, height) if len(shown.facets) > 1 else (6.6, height), extra=(0.4, 1.1)
    )
    most = max([1.15, *(min(one.high or one.ratio, 2 * one.ratio) * 1.05 for one in every if one.ratio)])
    for ax, facet in zip(axes, shown.facets, strict=True):
        for y, label in enumerate(compared):
            if label in found[facet]:
                _draw_bar(ax, y, found[facet][label], style.colour(shown.series, label), most)
            else:
                _write(ax, y, ["not run here"])
        ax.axvline(1.0, color=style.INK, lw=0.9)
        ax.set_xlim(0, most)
        ax.set_ylim(len(compared) - 0.45, -0.55)
        ax.set_yticks(range(len(compared)), [style.wrap(label, 22) for label in compared])
        ax.tick_params(axis="y", length=0)
        ax.set_title(style.wrap(shown.facet_title(facet), 44), loc="left")
    for ax in style.bottom(axes):
        ax.set_xlabel(style.wrap(f"speed-up over {base} (×)", 34))
    style.title(figure, _heading(aim, base))
    style.small_print(figure, *_reading(shown, aim, base, "bars"), command=command)
    return figure


def _draw_bar(ax: Axes, y: int, judged: Judged[Speedup], colour: str, most: float) -> None:
    found = judged.found
    if found.ratio is None:
        ax.barh(y, most, height=0.6, facecolor="none", edgecolor="#BBBBBB", hatch="////", lw=0.6)
    else:
        pale = remark(judged.verdict) == "within noise"
        ax.barh(y, found.ratio, height=0.6, color=colour, alpha=0.4 if pale else 1.0)
        if found.low is not None and found.high is not None:
            left, right = found.low, min(found.high, 10 * most)
            ax.errorbar(
                found.ratio, y, xerr=[[found.ratio - left], [right - found.ratio]], color=style.INK, lw=1, capsize=2.5
            )
        if found.bound != "=":
            ax.plot(found.ratio, y, marker=">" if found.bound == "≥" else "<", ms=5, color=style.INK)
    _write(ax, y, _beside(judged))


def _beside(judged: Judged[Speedup]) -> list[str]:
    """What stands beside a bar, line by line."""
    found = judged.found
    text, note = (ratio_text(found), found.note()) if found.ratio is not None else _without_ratio(found)
    return [text, *filter(None, [remark(judged.verdict)]), *textwrap.wrap(note, 30)]


def _write(ax: Axes, y: int, lines: Sequence[str]) -> None:
    """Beside the panel, where neither bar nor whisker can run into it."""
    ax.annotate(
        "\n".join(lines),
        (1.0, y),
        xycoords=("axes fraction", "data"),
        xytext=(5, 0),
        textcoords="offset points",
        va="center",
        fontsize=7,
        linespacing=1.1,
    )


def _without_ratio(found: Speedup) -> tuple[str, str]:
    """What stands in for a ratio, and what else there is to say."""
    if found.seeds and found.missed == found.seeds:
        return "not reached", "nor by the baseline" if found.baseline_missed == found.seeds else ""
    if found.seeds and found.baseline_missed == found.seeds:
        reached = found.seeds - found.missed
        return "baseline did not reach", f"reached in {reached} of {found.seeds} seeds"
    return "no pair of seeds", found.note()


@style.styled
def speedup_by_axis(
    runs: Runs,
    report: Report | None = None,
    *,
    baseline: str | None = None,
    x_axis: str | None = None,
    metric: str | None = None,
    target: float | None = None,
    ceilings: Mapping[str, float] | None = None,
    references: Sequence[tuple[float, str]] = (),
    command: str = "",
) -> Figure:
    """Speed-up over ``baseline`` against the labels of ``x_axis``: a line a series with its 95 % band.

    ``ceilings`` maps labels of the x axis to a bound, drawn as a dashed curve; ``references`` are horizontal lines
    (value, text). Labels that are all numbers are spaced as numbers, else evenly. Seeds are paired at the same x and
    facet. Raises ValueError for a missing baseline or x axis, and for names that do not exist.
    """
    shown = arrange(runs, report, baseline=baseline, x_axis=x_axis, metric=metric, target=target)
    axis = shown.report.x_axis
    if axis is None:
        raise ValueError(f"report.x_axis: none given; there are: {listed(shown.facet_axes)}")
    base, aim = shown.baseline(), shown.target()
    at, labels, panels = panels_along(shown, axis)
    unknown = [label for label in ceilings or {} if label not in labels]
    if unknown:
        raise ValueError(f"ceilings: no label {unknown[0]!r} on axis {axis!r}; there are: {listed(labels)}")
    place = places(labels)
    figure, axes = style.panels(len(panels), (3.4, 2.7) if len(panels) > 1 else (5.6, 3.7))
    handles = {}
    for ax, panel in zip(axes, panels, strict=True):
        facets = {x: (*panel[:at], x, *panel[at:]) for x in labels}
        found = {x: speedups(shown, facet, base, aim) for x, facet in facets.items() if facet in shown.facets}
        for label in shown.series:
            if label == base:
                continue
            points = {x: here[label].found for x, here in found.items() if label in here}
            handles[label] = _draw_line(ax, points, place, shown, label)
        handles[base] = ax.axhline(1.0, lw=1.1, color=style.colour(shown.series, base))
        if ceilings:
            xs = [label for label in labels if label in ceilings]
            handles[CEILING] = ax.plot(
                [place[x] for x in xs], [ceilings[x] for x in xs], ls="--", lw=1, color=style.FAINT
            )[0]
        for value, text in references:
            style.reference(ax, value, text)
        x_ticks(ax, labels, place)
        ax.set_ylim(*_y_limits(ax))
        ax.grid(color="#EEEEEE", lw=0.7)
        ax.set_title(style.wrap(title_without(shown, panel, at), 44), loc="left")
    for ax in style.bottom(axes):
        ax.set_xlabel(spoken(axis))
    for ax in style.left(axes):
        ax.set_ylabel(style.wrap(f"speed-up over {base} (×)", 34))
    style.title(figure, f"{_heading(aim, base)}, by {spoken(axis)}")
    ordered = [label for label in (*shown.series, CEILING) if label in handles]
    style.legend(figure, [handles[label] for label in ordered], ordered, spoken(shown.report.series))
    style.small_print(
        figure,
        *_reading(shown, aim, base, "points"),
        "Hollow: some seeds did not both reach it; triangles: at least (▲), at most (▼); cross at the foot: no pair."
        if aim
        else "",
        command=command,
    )
    return figure


def _draw_line(
    ax: Axes, points: Mapping[str, Speedup], place: Mapping[str, float], shown: Arrangement, label: str
) -> Line2D:
    look = style.line(shown.series, label)
    known = [(place[x], one.ratio, one) for x, one in points.items() if one.ratio is not None]
    drawn = ax.plot([x for x, _, _ in known], [ratio for _, ratio, _ in known], lw=1.6, **look)[0]
    for x, ratio, one in known:
        whole = one.pairs == one.seeds and one.bound == "="
        mark = {"=": "o", "≥": "^", "≤": "v"}[one.bound]
        ax.plot(x, ratio, mark, ms=4.5, mec=look["color"], mfc=look["color"] if whole else "white")
    banded = [(x, one.low, one.high) for x, _, one in known if one.low is not None and one.high is not None]
    if banded:
        xs, lows, highs = (list(column) for column in zip(*banded, strict=True))
        ax.fill_between(xs, lows, np.minimum(highs, _ENDLESS), color=look["color"], alpha=0.15, lw=0)
    for name, one in points.items():
        if one.ratio is None:
            # Series that miss at the same place stand side by side.
            shift = 7.0 * (shown.series.index(label) - (len(shown.series) - 1) / 2)
            ax.annotate(
                "×",
                (place[name], 0),
                xycoords=("data", "axes fraction"),
                xytext=(shift, 3),
                textcoords="offset points",
                ha="center",
                color=look["color"],
                fontsize=10,
                fontweight="bold",
            )
    return drawn


def _y_limits(ax: Axes) -> tuple[float, float]:
    """From 0 to above every point; a band of two seeds may run out of sight."""
    points = [float(y) for drawn in ax.lines for y in np.asarray(drawn.get_ydata(), np.float64)]
    return 0.0, 1.25 * max(points)


def _heading(target: Target | None, baseline: str) -> str:
    return f"Speed-up in {'time per applied update' if target is None else f'time to {target}'} over {baseline}"


def _reading(shown: Arrangement, target: Target | None, baseline: str, marks: str) -> tuple[str, str, str]:
    what = f"{shown.clock} per applied update" if target is None else f"{shown.clock} to {target}"
    if len(shown.seeds) == 1:
        return f"Ratio of {baseline}'s {what} to the series' own, in the same seed.", "", style.seeds_text(shown.seeds)
    bounds = " ≥, ≤: where one of the two missed the target, the run's end bounds its time." if target else ""
    return (
        f"Ratio of {baseline}'s {what} to the series' own, paired by seed; {marks}: geometric mean over seeds.{bounds}",
        LEGEND.replace("[ ]: ", "Intervals: ", 1) if marks == "points" else f"{LEGEND} Pale: within noise.",
        style.seeds_text(shown.seeds),
    )
