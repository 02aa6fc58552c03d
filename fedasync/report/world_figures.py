"""Figures of a world before any run."""

from __future__ import annotations

from collections.abc import Sequence
from math import log10
from typing import TYPE_CHECKING, Any, get_args

import numpy as np

from fedasync.report import style
from fedasync.report.world import EVERYBODY, MOMENTS, MOST_CLIENTS, MOST_POINTS, Floats, World, some, times
from fedasync.simulation.population import Direction

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure


def figures(world: World, command: str = "") -> dict[str, Figure]:
    """The figures that have something to show, by name."""
    found = {"durations": durations(world, command)}
    samples, seconds, _ = world.pace
    if samples.min() < samples.max() and seconds.min() < seconds.max():
        found["speed_and_data"] = speed_and_data(world, command)
    if not world.is_always_online:
        found["online"] = online(world, command)
    if any(tier.downlink is not None or tier.uplink is not None for tier in world.tiers):
        found["bandwidth"] = bandwidth(world, command)
    return found


@style.styled
def durations(world: World, command: str = "") -> Figure:
    """How long single leases take: the share that is done by a time, for each tier."""
    figure, ax = _panel()
    names = [tier.name for tier in world.tiers]
    lines = [_cumulative(ax, tier.durations_s, **style.line(names, tier.name)) for tier in world.tiers]
    labels = [
        f"{tier.name} ({100 * tier.share:.3g} % of clients)" if len(names) > 1 else tier.name for tier in world.tiers
    ]
    values = np.concatenate([tier.durations_s for tier in world.tiers])
    _seconds_axis(ax, values)
    ax.set_xlabel("duration of a lease")
    _share_axis(ax, "share of leases done by then")
    style.title(figure, f"How long a lease takes: {world.title}")
    _tier_legend(figure, lines, labels)
    ceilings = ", ".join(f"{times(value)} at n = {n}" for n, value in world.ceilings.items())
    shared = "Transfers as with the server's link to themselves. " if world.links else ""
    style.small_print(
        figure,
        _drawn(world),
        f"{shared}E[max of n]/E[t], the most that not waiting for the slowest can gain: {ceilings}.",
        command=command,
    )
    return figure


@style.styled
def speed_and_data(world: World, command: str = "") -> Figure:
    """Each client's speed against its number of samples."""
    from scipy.stats import spearmanr

    figure, ax = _panel()
    samples, seconds, tier_of = world.pace
    names = [tier.name for tier in world.tiers]
    shown = some(np.arange(len(samples)), MOST_POINTS)
    handles = []
    for place, name in enumerate(names):
        own = shown[tier_of[shown] == place]
        points = ax.scatter(samples[own], seconds[own], s=9, lw=0, color=style.colour(names, name), alpha=0.55)
        handles.append(points)
    if samples.min() > 0 and samples.max() / samples.min() > 20:
        ax.set_xscale("log")
        _plain_ticks(ax.xaxis)
    ax.set_xlabel("samples that the client holds")
    if seconds.min() > 0 and seconds.max() / seconds.min() > 5:
        ax.set_yscale("log")
        _time_ticks(ax.yaxis, *_around(seconds))
    ax.set_ylabel(f"time for {np.mean(samples):.3g} samples" + ("" if ax.get_yscale() == "log" else " (s)"))
    ax.grid(color="#EEEEEE", lw=0.7)
    style.title(figure, f"Speed and data: {world.title}")
    _tier_legend(figure, handles, names)
    correlation = float(spearmanr(samples, seconds).statistic)
    style.small_print(
        figure,
        f"A point a client of seed {world.seeds[0]}"
        + (f" ({len(shown)} of {len(samples)})." if len(shown) < len(samples) else "."),
        f"Time without transfers, for the mean number of samples. Rank correlation of both: {correlation:+.2f}.",
        command=command,
    )
    return figure


@style.styled
def online(world: World, command: str = "") -> Figure:
    """The share of clients that are online as time goes on: tiers, and regions beside the whole."""
    from matplotlib.ticker import MultipleLocator

    figure, ax = _panel()
    unit_s, unit = _unit(world.moments_s[-1])
    x = world.moments_s / unit_s
    handles, labels = [], []
    if len(world.regions):
        labels = [f"region {region}" for region in range(len(world.regions))]
        for label, share in zip(labels, world.regions, strict=True):
            handles += ax.plot(x, share, lw=1.1, **style.line(labels, label))
    elif len(world.tiers) > 1:
        labels = [tier.name for tier in world.tiers]
        for tier in world.tiers:
            handles += ax.plot(x, tier.online, lw=1.1, **style.line(labels, tier.name))
    whole = sum(tier.online * tier.share for tier in world.tiers)
    handles += ax.plot(x, whole, lw=2.2 if handles else 1.6, color=style.INK, alpha=0.9)
    ax.set_xlim(0, x[-1])
    if unit == "hours":
        ax.xaxis.set_major_locator(MultipleLocator(6 if x[-1] <= 48 else 12))
    ax.set_xlabel(f"time ({unit})")
    _share_axis(ax, "share of clients online")
    style.title(figure, f"Who is online: {world.title}")
    if labels:
        style.legend(figure, handles, [*labels, EVERYBODY], "")
    looked_at = min(MOST_CLIENTS, *(tier.clients for tier in world.tiers))
    style.small_print(
        figure,
        f"Seed {world.seeds[0]}, at {MOMENTS} moments, over {looked_at} clients or more of each tier."
        if len(world.tiers) > 1
        else f"Seed {world.seeds[0]}, at {MOMENTS} moments, over {looked_at} clients.",
        f"Mean over time: {float(np.mean(whole)):.1%}.",
        command=command,
    )
    return figure


@style.styled
def bandwidth(world: World, command: str = "") -> Figure:
    """How fast the clients' own links are, down and up, and the server's."""
    figure, axes = style.panels(2, (3.4, 2.7))
    names = [tier.name for tier in world.tiers]
    known = [rates for tier in world.tiers for rates in (tier.downlink, tier.uplink) if rates is not None]
    values = np.concatenate([*known, *([rate] for rate in world.links.values())])
    handles: dict[str, Artist] = {}
    for ax, direction in zip(axes, get_args(Direction), strict=True):
        for tier in world.tiers:
            rates = getattr(tier, direction)
            if rates is not None:
                handles[tier.name] = _cumulative(ax, rates[np.isfinite(rates)], **style.line(names, tier.name))
        if all(getattr(tier, direction) is None for tier in world.tiers):
            ax.text(0.5, 0.5, "no limit of the clients' own", transform=ax.transAxes, ha="center", color=style.FAINT)
        if direction in world.links:
            handles["the server's link, shared"] = ax.axvline(world.links[direction], color=style.FAINT, ls=":", lw=1.6)
        ax.set_title(direction, loc="left")
        ax.set_xlabel("bytes a second")
        _share_axis(ax, "share of clients at most as fast" if ax is axes[0] else "")
        ax.set_xscale("log")
        low, high = _around(values)
        ax.set_xlim(low, high)
        _plain_ticks(ax.xaxis, "B/s")
    style.title(figure, f"Bandwidth: {world.title}")
    if len(handles) > 1:
        style.legend(figure, list(handles.values()), list(handles), "tier" if len(names) > 1 else "")
    style.small_print(figure, _drawn(world), command=command)
    return figure


def _drawn(world: World) -> str:
    named = ", ".join(map(str, world.seeds))
    return f"Drawn before any run, for seed{'s' * (len(world.seeds) > 1)} {named}."


def _panel() -> tuple[Figure, Axes]:
    figure, (ax,) = style.panels(1, (6.0, 3.4), extra=(0.6, 0.9))
    return figure, ax


def _tier_legend(figure: Figure, handles: Sequence[Artist], labels: Sequence[str]) -> None:
    """Of one tier there is nothing to tell apart."""
    if len(labels) > 1:
        style.legend(figure, handles, labels, "tier")


def _cumulative(ax: Axes, values: Floats, **look_: Any) -> Artist:
    """The empirical distribution function of ordered values, as a line."""
    if len(values) > 2000:
        values = values[np.linspace(0, len(values) - 1, 2000).astype(np.int64)]
    share = np.arange(1, len(values) + 1) / len(values)
    x = np.concatenate([values[:1], values])
    return ax.plot(x, np.concatenate([[0.0], share]), lw=1.7, drawstyle="steps-post", **look_)[0]


def _share_axis(ax: Axes, label: str) -> None:
    from matplotlib.ticker import PercentFormatter

    ax.set_ylim(-0.02, 1.02)
    ax.yaxis.set_major_formatter(PercentFormatter(1.0, 0))
    ax.set_ylabel(label)
    ax.grid(color="#EEEEEE", lw=0.7)


SHORTEST_S = 1e-100


def _around(values: Floats) -> tuple[float, float]:
    """Limits of a logarithmic axis that shows all positive values."""
    positive = values[(values > SHORTEST_S) & np.isfinite(values)]
    if not len(positive):
        return 0.1, 10.0
    low, high = float(positive.min()), float(positive.max())
    room = max((high / low) ** 0.04, 2.1 if high / low < 1.2 else 1.3 if high / low < 2 else 1.0)
    return low / room, high * room


TIMES_S = {
    **{
        f"{n * 10**k:g} {unit}": n * 10**k * s
        for unit, s in (("µs", 1e-6), ("ms", 1e-3))
        for k in range(3)
        for n in (1, 2, 5)
    },
    **{f"{n} s": n for n in (1, 2, 5, 10, 30)},
    **{f"{n} min": 60 * n for n in (1, 2, 5, 10, 30)},
    **{f"{n} h": 3600 * n for n in (1, 2, 4, 8)},
    **{f"{n} d": 86400 * n for n in (1, 2, 5, 10, 20, 50, 100, 200, 500)},
}
"""Times that people think in, for the ticks of a logarithmic axis."""


def _seconds_axis(ax: Axes, values: Floats) -> None:
    if not (values > SHORTEST_S).any():
        return  # nothing that a logarithmic axis could show
    ax.set_xscale("log")
    # What one lease in a thousand undercuts would stretch the axis for nothing.
    low, high = _around(values[values >= np.quantile(values, 0.001)])
    ax.set_xlim(low, high)
    _time_ticks(ax.xaxis, low, high)


def _time_ticks(axis: Axis, low: float, high: float) -> None:
    from matplotlib.ticker import FixedLocator, NullLocator

    inside = {text: s for text, s in TIMES_S.items() if low <= s <= high}
    while len(inside) > 10:
        inside = dict(list(inside.items())[::2])
    axis.set_minor_locator(NullLocator())
    if len(inside) >= 2:
        axis.set_major_locator(FixedLocator(list(inside.values())))
        axis.set_ticklabels(list(inside))
    else:
        _few_ticks(axis, low, high, " s")


def _plain_ticks(axis: Axis, unit: str = "") -> None:
    """1, 10, 100, 1 k, 10 k … with the unit's prefix."""
    from matplotlib.ticker import EngFormatter, LogLocator, NullLocator

    low, high = axis.get_view_interval()
    if high / low < 12:
        _few_ticks(axis, low, high, f" {unit}".rstrip())
        return
    decades = log10(high / low)
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 1.4 else (1,), numticks=9))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(EngFormatter(unit=unit, sep=" " if unit else ""))


def _few_ticks(axis: Axis, low: float, high: float, unit: str) -> None:
    """Four values at even ratios where no round ones fit."""
    from matplotlib.ticker import EngFormatter, FixedLocator, NullLocator

    axis.set_major_locator(FixedLocator(list(np.geomspace(low * 1.02, high / 1.02, 4))))
    axis.set_minor_locator(NullLocator())
    axis.set_major_formatter(EngFormatter(unit=unit.strip(), places=2, sep=" "))


def _unit(horizon_s: float) -> tuple[float, str]:
    for seconds, name in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")):
        if horizon_s >= 4 * seconds:
            return seconds, name
    return 1.0, "s"
