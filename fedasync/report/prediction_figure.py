"""Measured and predicted times and speed-ups, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedasync.report import style
from fedasync.report.prediction import SPEEDUP, STALENESS, UPDATES, Over, Predicted, error_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MEASURED, PREDICTED = style.GOOD, "#E69F00"


@style.styled
def prediction_figure(
    rows: Sequence[Predicted],
    base: str,
    tolerance: float,
    command: str = "",
    fitted: str = "Simulated clients were",
) -> Figure:
    """A panel for times and one for speed-ups over ``base``: what was measured, and below it what was predicted.

    Bars are means over seeds, whiskers go from the least to the greatest; the error stands beside.
    """
    series = list(dict.fromkeys(row.series for row in rows))
    of_time = [row for row in rows if row.quantity not in (SPEEDUP, UPDATES, STALENESS)]
    of_speed = [row for row in rows if row.quantity == SPEEDUP]
    figure = style.new_figure(8.6, 0.62 * len(series) + 1.7)
    left, right = figure.subplots(1, 2, sharey=True)
    for ax, found in ((left, of_time), (right, of_speed)):
        _bars(ax, series, found, tolerance)
    left.set_xlabel(f"{of_time[0].quantity} (s)" if of_time else "")
    right.set_xlabel(f"speed-up over {base} (×)")
    right.axvline(1.0, color=style.INK, lw=0.9)
    left.set_yticks(range(len(series)), [style.wrap(label, 22) for label in series])
    left.set_ylim(len(series) - 0.45, -0.55)
    from matplotlib.patches import Patch

    style.title(figure, "Predicted beside measured")
    style.legend(figure, [Patch(color=MEASURED), Patch(color=PREDICTED)], ["measured", "predicted"])
    seeds = max((row.measured.seeds for row in rows), default=0)
    style.small_print(
        figure,
        f"{fitted} fitted to the measured runs of {base} alone.",
        "Bars: means (of speed-ups geometric ones, paired by seed); whiskers: least … greatest over "
        f"{seeds} seeds; beside them predicted/measured − 1."
        if seeds > 1
        else "One seed: no spread. Beside the bars: predicted/measured − 1.",
        command=command,
    )
    return figure


def _bars(ax: Axes, series: Sequence[str], rows: Sequence[Predicted], tolerance: float) -> None:
    most = max([1.0, *(one.high for row in rows for one in (row.measured, row.predicted) if one.high is not None)])
    ax.set_xlim(0, most * 1.32)
    ax.tick_params(axis="y", length=0)
    ax.grid(axis="x", color="#EEEEEE", lw=0.7)
    for row in rows:
        y = series.index(row.series)
        for at, one, colour in ((y - 0.18, row.measured, MEASURED), (y + 0.18, row.predicted, PREDICTED)):
            _bar(ax, at, one, colour)
        if row.error is None:
            said, colour = row.note or "not measured", style.FAINT
        else:
            said = error_text(row.error) + (" (fitted)" if row.within is None else "")
            colour = style.OUTCOMES["failed"] if row.within is False else style.INK
        ends = [one.high for one in (row.measured, row.predicted) if one.high is not None]
        ax.text(max(ends, default=0) + most * 0.02, y, style.wrap(said, 18), va="center", fontsize=7.5, color=colour)


def _bar(ax: Axes, at: float, one: Over, colour: str) -> None:
    if one.mean is None or one.low is None or one.high is None:
        return
    ax.barh(at, one.mean, height=0.32, color=colour)
    if one.seeds > 1:
        whiskers = [[max(one.mean - one.low, 0)], [max(one.high - one.mean, 0)]]  # equal values, but for rounding
        ax.errorbar(one.mean, at, xerr=whiskers, color=style.INK, lw=1, capsize=2.5)
