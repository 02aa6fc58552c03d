"""Measured iterations and training steps beside the lines that were fitted to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedasync.report import style

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

MOST_POINTS = 3_000


@dataclass(frozen=True)
class Panel:
    """Measured points (x, seconds), and fitted seconds at some x."""

    x_label: str
    y_label: str
    x: Floats
    seconds: Floats
    fitted: Callable[[Floats], Floats]


@style.styled
def calibration_figure(panels: list[Panel], title: str, command: str = "") -> Figure:
    """A panel a kind of measurement: a point a measurement, means by tenths of x, and the fit."""
    figure, axes = style.panels(len(panels), (4.6, 3.2))
    points = means = fit = None
    for ax, panel in zip(axes, panels, strict=False):
        if len(panel.x):
            points, means, fit = _draw(ax, panel)
        ax.set_xlabel(panel.x_label)
        ax.set_ylabel(panel.y_label)
    style.title(figure, title)
    if points is not None and means is not None and fit is not None:
        style.legend(figure, [points, means, fit], ["measured", "measured, means", "fitted"])
    style.small_print(figure, f"At most {MOST_POINTS:,} points; the highest 1 % lie beyond the frame.", command=command)
    return figure


def _draw(ax: Axes, panel: Panel) -> tuple[Artist, Artist, Artist]:
    order = np.argsort(panel.x, kind="stable")
    x, y = panel.x[order], panel.seconds[order] * 1e3
    shown = np.unique(np.linspace(0, len(x) - 1, min(len(x), MOST_POINTS)).astype(int))
    points = ax.scatter(x[shown], y[shown], s=6, lw=0, color=style.INK, alpha=0.25, zorder=1)
    parts = np.array_split(np.arange(len(x)), min(10, len(x)))
    centre = np.array([x[part].mean() for part in parts])
    means = ax.scatter(
        centre, [y[part].mean() for part in parts], s=26, marker="D", lw=0.8, ec="white", color="#D55E00", zorder=3
    )
    at = np.linspace(x[0], x[-1], 50)
    (fit,) = ax.plot(at, panel.fitted(at) * 1e3, lw=2, color=style.GOOD, zorder=2)
    ax.set_ylim(0, 1.15 * max(float(np.quantile(y, 0.99)), float(panel.fitted(at).max()) * 1e3))
    ax.grid(color="#EEEEEE", lw=0.7)
    return points, means, fit
