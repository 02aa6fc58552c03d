"""Measured durations of clients beside the laws that were fitted to them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from fedasync.report import style
from fedasync.report.world_figures import TIMES_S

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from numpy.typing import NDArray

MOST_CLIENTS = 30
"""Shown one by one; of more, these are taken at even ranks of their means."""


@dataclass(frozen=True)
class ClientDurations:
    """One client: measured durations of its leases ``[leases]`` (s), and the fitted quantile function (s) and mean."""

    client: int
    measured_s: NDArray[np.float64]
    quantile_s: Callable[[float], float]
    mean_s: float


@style.styled
def durations_figure(clients: Sequence[ClientDurations], title: str, command: str = "") -> Figure:
    """A row a client, by its measured mean: leases as points, the fitted law as a bar (5–95 %) with its mean."""
    ordered = sorted(clients, key=lambda one: float(one.measured_s.mean()))
    places = np.unique(np.linspace(0, len(ordered) - 1, min(len(ordered), MOST_CLIENTS)).round().astype(int))
    shown = [ordered[place] for place in places]
    figure, (ax,) = style.panels(1, (6.2, 0.9 + 0.24 * len(shown)), extra=(1.9, 1.0))
    points = means = bar = None
    for row, one in enumerate(shown):
        low, high = one.quantile_s(0.05), one.quantile_s(0.95)
        (bar,) = ax.plot([low, high], [row, row], lw=7, color="#9CC4DA", solid_capstyle="butt", zorder=1)
        (fitted,) = ax.plot([one.mean_s] * 2, [row - 0.36, row + 0.36], lw=2.2, color=style.GOOD, zorder=3)
        jitter = (np.arange(len(one.measured_s)) * 0.618 % 1 - 0.5) * 0.42
        points = ax.scatter(one.measured_s, row + jitter, s=7, lw=0, color=style.INK, alpha=0.45, zorder=2)
        means = ax.scatter(
            [float(one.measured_s.mean())], [row], s=26, marker="D", lw=0.8, ec="white", color="#D55E00", zorder=4
        )
    ax.set_yticks(range(len(shown)), [f"{one.client} ({len(one.measured_s)})" for one in shown])
    ax.set_ylim(-0.7, len(shown) - 0.3)
    ax.set_ylabel("client (leases measured)")
    values = np.concatenate([one.measured_s for one in shown])
    if values.min() > 0 and values.max() / values.min() > 20:
        ax.set_xscale("log")
        _time_ticks(ax)
    else:
        ax.set_xlim(left=0)
    ax.set_xlabel("from sending a task to reading its reply" + (" (s)" if ax.get_xscale() == "linear" else ""))
    ax.grid(axis="x", color="#EEEEEE", lw=0.7)
    style.title(figure, title)
    if points is not None and means is not None and bar is not None:
        style.legend(
            figure,
            [points, means, bar, fitted],
            ["measured, a point a lease", "measured mean", "fitted law, 5–95 %", "fitted mean"],
        )
    more = f"{len(shown)} of {len(ordered)} clients, at even ranks of their means." if len(shown) < len(ordered) else ""
    style.small_print(figure, more, "Points lie apart only to be seen.", command=command)
    return figure


def _time_ticks(ax: Axes) -> None:
    """Times that people think in, ten at most."""
    from matplotlib.ticker import FixedLocator, NullLocator

    low, high = ax.get_xlim()
    inside = {text: s for text, s in TIMES_S.items() if low <= s <= high}
    while len(inside) > 10:
        inside = dict(list(inside.items())[::2])
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_locator(FixedLocator(list(inside.values())))
    ax.xaxis.set_ticklabels(list(inside))
