"""Figures of a metric over time, of staleness, and of what workers did with their time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from fedasync.report import style
from fedasync.report.arrangement import Arrangement, Facet, Runs, Target, arrange, spoken
from fedasync.report.cluster import is_cluster
from fedasync.report.comparisons import differences, standing
from fedasync.report.measures import curves
from fedasync.report.spec import Report
from fedasync.report.statistics import Band, band, histogram_quantile, pooled_staleness

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

MOST_NAMED = 8
"""Series compared with the baseline that the small print names; of more it gives the number."""
_LONG_TAIL = 48
"""Largest staleness that is still drawn a bar a value."""


@style.styled
def metric_over_time(
    runs: Runs,
    report: Report | None = None,
    *,
    metric: str | None = None,
    target: float | None = None,
    command: str = "",
) -> Figure:
    """A metric against time: a line a series, the mean over seeds with its 95 % band, a panel a facet.

    ``metric`` and ``target`` replace the report's. Timing-only runs have ``updates`` and ``versions``.
    Raises ValueError for names the runs do not have.
    """
    shown = arrange(runs, report, metric=metric, target=target)
    name = shown.metric()
    figure, axes = style.panels(len(shown.facets), (3.4, 2.5) if len(shown.facets) > 1 else (5.6, 3.6))
    handles = {}
    bands = []
    stopped = False
    aim = shown.target()
    target_line = None
    references: list[Line2D] = []
    for ax, facet in zip(axes, shown.facets, strict=True):
        for label in shown.series:
            found = curves(shown.at(label, facet), name)
            if not found:
                continue
            mean = band(found)
            bands.append(mean)
            look = style.line(shown.series, label)
            whole = mean.times_s <= mean.all_running_until_s
            handles[label] = ax.plot(mean.times_s[whole], mean.mean[whole], lw=1.6, **look)[0]
            if not whole.all():
                stopped = True
                rest = slice(max(int(whole.sum()) - 1, 0), None)
                ax.plot(mean.times_s[rest], mean.mean[rest], lw=1.6, alpha=0.35, **look)
            if mean.low is not None and mean.high is not None:
                ax.fill_between(mean.times_s, mean.low, mean.high, color=look["color"], alpha=0.16, lw=0)
        ax.set_title(style.wrap(shown.facet_title(facet), 44), loc="left")
        ax.grid(color="#EEEEEE", lw=0.7)
        ax.margins(x=0.01)
        for level in _levels(shown, name, facet):
            target_line = ax.axhline(level, color=style.INK, lw=0.9, ls=(0, (1, 2)))
        references = [ax.axhline(each.value, ls=":", lw=1.1, color=style.FAINT) for each in shown.report.references]
    if bands:
        axes[0].set_ylim(*_y_limits(bands, aim if aim and aim.metric == name else None))
    _label(axes, f"{shown.clock} (s)", _metric_label(name))
    style.title(figure, f"{_sentence(spoken(name))} over {shown.clock}")
    ordered = [label for label in shown.series if label in handles]
    lines = [handles[label] for label in ordered]
    if target_line is not None:
        # In the legend, where no curve can run through its words.
        lines.append(target_line)
        ordered.append(f"target {' / '.join(f'{value:g}' for value in aim.values)}" if aim else "target")
    lines.extend(references)
    ordered.extend(f"{each.text}, {each.value:.4g}" for each in shown.report.references)
    style.legend(figure, lines, ordered, spoken(shown.report.series))
    style.small_print(
        figure,
        "Mean over seeds; band: 95 % t-interval of the mean." if len(shown.seeds) > 1 else "",
        style.seeds_text(shown.seeds),
        "Faint: some seeds had ended; their last value is carried on." if stopped else "",
        _no_different(shown, name),
        command=command,
    )
    return figure


def _no_different(shown: Arrangement, metric: str) -> str:
    """Which series end within noise of the baseline, a sentence for all panels: bands of unpaired means cannot tell."""
    base = shown.report.baseline
    if base is None or base not in shown.series or len(shown.seeds) < 2:
        return ""
    found = []
    for facet in shown.facets:
        compared = differences(standing(shown, facet, metric), base)
        alike = [label for label, one in compared.items() if one.verdict in ("within noise", "weak")]
        if alike:
            title = shown.facet_title(facet)
            few = len(compared) <= MOST_NAMED
            told = ", ".join(alike) if few else f"{len(alike)} of {len(compared)} series"
            found.append(f"{title + ': ' if title else ''}{told}")
    return (
        f"No clear difference from {base} at the end, paired by seed: " + ("; ".join(found) if found else "none") + "."
    )


def _levels(shown: Arrangement, metric: str, facet: Facet) -> list[float]:
    """The target's levels in a facet; none where the target is of another metric."""
    target = shown.target()
    if target is None or target.metric != metric:
        return []
    cells = [shown.at(label, facet) for label in shown.series]
    entries = [target.entry(run) for cell in cells for run in cell.values()]
    return sorted({float(entry["value"]) for entry in entries if entry is not None})


def _y_limits(bands: Sequence[Band], target: Target | None) -> tuple[float, float]:
    """All means and targets, and of the bands what is near them: two seeds can give a band of any width."""
    means = np.concatenate([one.mean[np.isfinite(one.mean)] for one in bands])
    means = np.concatenate([means, target.values if target else ()])
    if means.size == 0:
        return 0.0, 1.0
    low, high = float(means.min()), float(means.max())
    room = 0.25 * (high - low) or 0.05 * abs(high) or 1.0
    edges = [edge for one in bands for edge in (one.low, one.high) if edge is not None]
    ends = np.concatenate([np.array([low, high]), *(edge[np.isfinite(edge)] for edge in edges)])
    bottom = max(low - room, float(ends.min()) - 0.15 * room)
    # What has no negative mean (a share, a loss, a count) has no negative value.
    return max(bottom, 0.0) if low >= 0 else bottom, min(high + room, float(ends.max()) + 0.2 * room)


def _sentence(name: str) -> str:
    """With a capital, unless the name is a symbol."""
    return name if len(name) < 3 else name[:1].upper() + name[1:]


def _metric_label(metric: str) -> str:
    return {"updates": "updates applied", "versions": "versions committed"}.get(metric, spoken(metric))


def _label(axes: list[Axes], x: str, y: str) -> None:
    for ax in style.bottom(axes):
        ax.set_xlabel(x)
    for ax in style.left(axes):
        ax.set_ylabel(y)


@style.styled
def staleness(runs: Runs, report: Report | None = None, *, command: str = "") -> Figure:
    """How stale the consumed contributions were: their share by staleness τ, a row a series, a column a facet.

    Counts are pooled over seeds. A long tail is binned by doublings: 0, 1, 2–3, 4–7, ... The mean is marked.
    """
    shown = arrange(runs, report)
    histograms = {
        place: pooled_staleness(run.summary["staleness"]["histogram"] for run in cell.values())
        for place, cell in shown.cells.items()
    }
    largest = max((max(histogram) for histogram in histograms.values() if histogram), default=0)
    edges, names = _doublings(largest) if largest > _LONG_TAIL else _each(max(largest, 4))

    columns = style.columns_for(len(shown.facets))
    blocks = -(-len(shown.facets) // columns)
    rows = blocks * len(shown.series)
    width = 4.6 if columns == 1 else 2.9
    figure = style.new_figure(columns * width + 1.3, rows * (0.82 if rows > 1 else 1.9) + 0.35 * blocks + 1.1)
    grid = figure.subplots(rows, columns, sharex=True, sharey=False, squeeze=False)
    for ax in grid.flat[:]:
        ax.set_visible(False)
    for i, facet in enumerate(shown.facets):
        block, column = divmod(i, columns)
        for j, label in enumerate(shown.series):
            ax = grid[block * len(shown.series) + j, column]
            ax.set_visible(True)
            _draw_shares(ax, histograms.get((label, facet), {}), edges, style.colour(shown.series, label))
            ax.set_xticks(*_some(names, width - 0.4))
            last = j == len(shown.series) - 1
            below = i + columns >= len(shown.facets)
            ax.tick_params(labelbottom=last and below)
            if last and below:
                ax.set_xlabel("staleness τ (versions)")
            if column == 0:
                ax.set_ylabel(style.wrap(label, 18), rotation=0, ha="right", va="center")
            if j == 0 and shown.facet_title(facet):
                ax.annotate(
                    style.wrap(shown.facet_title(facet), 40),
                    (0, 1),
                    xycoords="axes fraction",
                    xytext=(0, 15),
                    textcoords="offset points",
                    fontweight="bold",
                )
    style.title(figure, "Staleness of consumed contributions")
    style.small_print(
        figure,
        "Share of consumed contributions by staleness, pooled over seeds; each panel has its own scale.",
        "Line: mean." + (" Bins double in width." if largest > _LONG_TAIL else ""),
        style.seeds_text(shown.seeds).replace(": no interval", ""),
        command=command,
    )
    return figure


def _draw_shares(ax: Axes, histogram: dict[int, int], edges: np.ndarray, colour: str) -> None:
    ax.spines["left"].set_visible(False)
    ax.set_xlim(-0.6, len(edges) - 1.4)
    if not histogram:
        ax.set_yticks([])
        ax.text(0.5, 0.5, "nothing consumed", transform=ax.transAxes, ha="center", va="center", color=style.FAINT)
        return
    values, counts = np.array(list(histogram)), np.array(list(histogram.values()), np.float64)
    shares = np.histogram(values, edges, weights=counts)[0] / counts.sum()
    ax.bar(np.arange(len(shares)), shares, width=0.86, color=colour, alpha=0.8)
    mean = float(values @ counts / counts.sum())
    ax.axvline(np.interp(mean, edges, np.arange(len(edges)) - 0.5), color=style.INK, lw=1.1)
    p90 = histogram_quantile(histogram, 0.9)
    ax.set_title(f"mean {mean:.3g}   p90 {p90}   max {values.max()}", loc="right", fontsize=7, pad=2)
    top = float(shares.max())
    ax.set_ylim(0, top * 1.05)
    ax.set_yticks([top], [f"{100 * top:.2g} %" if top < 0.995 else "100 %"], fontsize=7)
    ax.tick_params(axis="y", length=2)


def _each(largest: int) -> tuple[np.ndarray, list[str]]:
    return np.arange(largest + 2) - 0.5, [str(value) for value in range(largest + 1)]


def _doublings(largest: int) -> tuple[np.ndarray, list[str]]:
    starts = [0, 1]
    while 2 * starts[-1] <= largest:
        starts.append(2 * starts[-1])
    ends = [*(start - 1 for start in starts[1:]), 2 * starts[-1] - 1]
    names = [f"{a}" if a == b else f"{a}–{b}" for a, b in zip(starts, ends, strict=True)]
    return np.array([*starts, ends[-1] + 1]) - 0.5, names


def _some(names: list[str], width: float) -> tuple[list[int], list[str]]:
    """Ticks that fit beside each other on ``width`` inches: every one, or every n-th."""
    needed = len(names) * (max(map(len, names)) + 1.5)
    step = next(n for n in (1, 2, 3, 4, 5, 10) if needed / n <= 12 * width or n == 10)
    return list(range(0, len(names), step)), names[::step]


@style.styled
def utilisation(runs: Runs, report: Report | None = None, *, command: str = "") -> Figure:
    """Shares of slots × time that were useful, wasted and waiting, a bar a series; beside it how busy the server was.

    Means over seeds, a panel a facet. Wasted is work that was rejected, failed or cancelled. Raises ValueError for runs
    of a cluster, whose slots are servers' (`shares`).
    """
    shown = arrange(runs, report)
    if any(map(is_cluster, shown.runs)):
        raise ValueError("report.figures: 'utilisation' is of clients' slots; of a cluster's servers 'shares' would do")
    columns = style.columns_for(len(shown.facets))
    rows = -(-len(shown.facets) // columns)
    width = 6.6 if columns == 1 else 3.6
    figure = style.new_figure(columns * width + 1.2, rows * (0.32 * len(shown.series) + 0.7) + 1.1)
    grid = figure.add_gridspec(rows, 2 * columns, width_ratios=[4, 1] * columns)
    parts = (("useful", style.GOOD), ("wasted", style.OUTCOMES["rejected"]), ("waiting", style.IDLE))
    for i, facet in enumerate(shown.facets):
        row, column = divmod(i, columns)
        ax = figure.add_subplot(grid[row, 2 * column])
        server = figure.add_subplot(grid[row, 2 * column + 1], sharey=ax)
        for y, label in enumerate(shown.series):
            summaries = [run.summary["utilisation"] for run in shown.at(label, facet).values()]
            if not summaries:
                continue
            start = 0.0
            for part, colour in parts:
                share = float(np.mean([summary[part] for summary in summaries]))
                ax.barh(y, share, left=start, height=0.74, color=colour)
                if share >= (0.08 if columns == 1 else 0.13):
                    ink = style.INK if part == "waiting" else "white"
                    ax.text(start + share / 2, y, f"{100 * share:.0f} %", ha="center", va="center", c=ink, fontsize=7)
                start += share
            busy = float(np.mean([summary["server"] for summary in summaries]))
            server.barh(y, busy, height=0.74, color="#555555")
            inside = busy > 0.5
            server.text(
                0.08 if inside else busy + 0.06,
                y,
                f"{100 * busy:.2g} %" if busy < 0.995 else "100 %",
                va="center",
                fontsize=7,
                color="white" if inside else style.INK,
            )
        ax.set_ylim(len(shown.series) - 0.4, -0.6)
        _axis_of_shares(ax, shown.series if column == 0 else None, [0, 0.5, 1])
        _axis_of_shares(server, None, [0, 1])
        ax.set_title(style.wrap(shown.facet_title(facet), 40), loc="left")
        if i + columns >= len(shown.facets):
            ax.set_xlabel("share of slots × time")
            server.set_xlabel("server busy")
    from matplotlib.patches import Patch

    style.title(figure, "What client slots and the server did with their time")
    style.legend(figure, [Patch(color=colour) for _, colour in parts], [part for part, _ in parts], "client slots")
    style.small_print(
        figure,
        "Means over seeds." if len(shown.seeds) > 1 else "",
        "Useful: applied, or still on its way at the end; wasted: rejected, failed or cancelled.",
        style.seeds_text(shown.seeds).replace(": no interval", ""),
        command=command,
    )
    return figure


def _axis_of_shares(ax: Axes, series: tuple[str, ...] | None, ticks: list[float]) -> None:
    ax.set_xlim(0, 1)
    ax.set_xticks(ticks, [f"{100 * tick:.0f} %" if tick else "0" for tick in ticks])
    ax.tick_params(axis="y", length=0, labelleft=series is not None)
    ax.spines["left"].set_visible(False)
    if series is not None:
        ax.set_yticks(range(len(series)), [style.wrap(label, 22) for label in series])
