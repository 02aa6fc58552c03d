"""Two quantities of many candidates against each other, and the front that none of them beats."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import TYPE_CHECKING, Any, Literal

from fedasync.report.statistics import Interval
from fedasync.report.style import FAINT, GOOD, INK, legend, new_figure, small_print, styled, title

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Better = Literal["higher", "lower"]
_WIDE = 50
"""Times the smallest value from which on an axis is logarithmic."""
_CHOSEN = ("#D55E00", "#E69F00", "#56B4E9", "#CC79A7")


@dataclass(frozen=True)
class Axis:
    """A quantity: its words, which values are the better ones, and a bound on it (None: none)."""

    text: str
    better: Better
    bound: float | None = None


@dataclass(frozen=True)
class Confirmed:
    """A candidate that was run over many seeds: its two quantities, and how it is called."""

    name: str
    x: Interval
    y: Interval


def front(points: Sequence[tuple[float, float]], x_better: Better, y_better: Better) -> list[int]:
    """Places of the points that no other one beats in one quantity without losing in the other, by x.

    Of points alike the first stands for all.
    """
    x_sign, y_sign = (1 if better == "lower" else -1 for better in (x_better, y_better))
    order = sorted(range(len(points)), key=lambda i: (x_sign * points[i][0], y_sign * points[i][1], i))
    found: list[int] = []
    best = float("inf")
    for i in order:
        if y_sign * points[i][1] < best:
            best = y_sign * points[i][1]
            found.append(i)
    return found


@styled
def pareto(
    points: Sequence[tuple[float, float]],
    inside: Sequence[bool],
    confirmed: Sequence[Confirmed],
    x: Axis,
    y: Axis,
    heading: str,
    note: str = "",
    command: str = "",
) -> Figure:
    """Candidates by two quantities, those outside the limits hollow, the front of those ``inside`` as a line.

    Those that were ``confirmed`` are diamonds with 95 % t-intervals; bounds are dotted.
    """
    figure = new_figure(7.2, 4.6)
    axes = figure.subplots()
    kept = [point for point, is_in in zip(points, inside, strict=True) if is_in]
    lost = [point for point, is_in in zip(points, inside, strict=True) if not is_in]
    shown: dict[str, Any] = {}
    if lost:
        x_lost, y_lost = zip(*lost, strict=True)
        shown["outside the limits"] = axes.scatter(x_lost, y_lost, 22, facecolors="none", edgecolors=FAINT, lw=0.8)
    if kept:
        shown["candidate"] = axes.scatter(*zip(*kept, strict=True), color=GOOD, zorder=3)
        edge = [kept[i] for i in front(kept, x.better, y.better)]
        (shown["front"],) = axes.plot(*zip(*edge, strict=True), drawstyle="steps-post", color=INK, lw=1.2)
    for colour, one in zip(cycle(_CHOSEN), confirmed):
        errors: dict[str, Any] = {"xerr": one.x.half_width, "yerr": one.y.half_width}
        shown[one.name] = axes.errorbar(
            one.x.mean, one.y.mean, **errors, fmt="D", ms=6, color=colour, capsize=3, zorder=4
        )
    values = [point[0] for point in points]
    if min(values) > 0 and max(values) > _WIDE * min(values):
        axes.set_xscale("log")
    for bound, draw in ((x.bound, axes.axvline), (y.bound, axes.axhline)):
        if bound is not None:
            draw(bound, ls=":", lw=1.0, color=INK)
    axes.set_xlabel(f"{x.text} ({x.better} is better)")
    axes.set_ylabel(f"{y.text} ({y.better} is better)")
    title(figure, heading)
    legend(figure, list(shown.values()), list(shown))
    small_print(figure, note, command=command)
    return figure
