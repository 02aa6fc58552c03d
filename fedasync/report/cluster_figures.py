"""Figures of a cluster's runs: what trainer and servers did, length bias, and the definitions of staleness."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from fedasync.report import style
from fedasync.report.arrangement import Arrangement, Cell, Facet, Runs, arrange, spoken
from fedasync.report.cluster import interval, length_ratio, need_rollouts, over_seeds, share_of_time, staleness
from fedasync.report.spec import Report
from fedasync.runs.staleness_kinds import KINDS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

PARTS = {
    "trainer": {
        "training": style.GOOD,
        "syncing": "#E69F00",
        "switching": "#CC79A7",
        "saving": "#56B4E9",
        "evaluating": "#009E73",
        "down": "#7A1F5C",
        "waiting": style.IDLE,
    },
    "servers": {
        "decoding": style.GOOD,
        "prefilling": "#9CC4DA",
        "paused": "#E69F00",
        "down": "#7A1F5C",
        "idle": style.IDLE,
    },
}
"""What trainer and servers spend time on, in the order of the bars, and its colour."""

IN_VERSIONS = tuple(kind for kind in KINDS if kind.unit in ("versions", "publications"))
"""Definitions of staleness that can share an axis."""


@style.styled
def shares(runs: Runs, report: Report | None = None, *, command: str = "") -> Figure:
    """What the trainer and the servers did with their time: two stacked bars a series, a row of panels a facet.

    Means over seeds; shares of the trainer's time, and of servers × time. Raises ValueError for runs without rollouts.
    """
    shown = arrange(runs, report)
    need_rollouts(shown, "shares")
    height = 0.34 * len(shown.series) + 0.75
    figure = style.new_figure(8.6, height * len(shown.facets) + 1.0)
    grid = figure.subplots(len(shown.facets), 2, sharex=True, sharey=True, squeeze=False)
    met: dict[str, None] = {}
    for i, facet in enumerate(shown.facets):
        for ax, (who, parts) in zip(grid[i], PARTS.items(), strict=True):
            for y, label in enumerate(shown.series):
                met |= dict.fromkeys(_stack(ax, y, shown.at(label, facet), who, parts))
            ax.set_xlim(0, 1)
            ax.set_ylim(len(shown.series) - 0.4, -0.6)
            ax.set_xticks([0, 0.5, 1], ["0", "50 %", "100 %"])
            ax.set_yticks(range(len(shown.series)), [style.wrap(label, 22) for label in shown.series])
            ax.tick_params(axis="y", length=0)
            ax.spines["left"].set_visible(False)
        grid[i][0].set_title(style.wrap(shown.facet_title(facet), 44), loc="left")
    grid[-1][0].set_xlabel("share of the trainer's time")
    grid[-1][1].set_xlabel("share of servers × time")
    from matplotlib.patches import Patch

    style.title(figure, "What trainer and servers did with their time")
    names = [what for parts in PARTS.values() for what in parts if what in met]
    colours = PARTS["trainer"] | PARTS["servers"]
    order = list(dict.fromkeys(names))
    style.legend(figure, [Patch(color=colours[what]) for what in order], order)
    style.small_print(
        figure,
        "Means over seeds, warm-up left out." if len(shown.seeds) > 1 else "Warm-up left out.",
        "Decoding: at least one sequence runs.",
        style.seeds_text(shown.seeds).replace(": no interval", ""),
        command=command,
    )
    return figure


def _stack(ax: Axes, y: int, cell: Cell, who: str, parts: dict[str, str]) -> list[str]:
    """Draw one bar; the parts that it has."""
    start, there = 0.0, []
    for what, colour in parts.items():
        found = interval(share_of_time(run, who, what) for run in cell.values())
        if found is None or found.mean <= 0:
            continue
        share = found.mean
        there.append(what)
        ax.barh(y, share, left=start, height=0.74, color=colour)
        if share >= 0.1:
            ink = "white" if colour in (style.GOOD, "#7A1F5C") else style.INK
            ax.text(start + share / 2, y, f"{100 * share:.0f} %", ha="center", va="center", c=ink, fontsize=7)
        start += share
    return there


@style.styled
def length_bias(runs: Runs, report: Report | None = None, *, command: str = "") -> Figure:
    """Share of the trained over share of the generated answers, by decile of generated length: a line a series.

    1 everywhere: what is trained is as long as what is generated. Beside the series' names stands the ratio of the mean
    lengths, where there is one panel. Means over seeds with 95 % t-intervals. Raises ValueError for runs without
    rollouts.
    """
    shown = arrange(runs, report)
    need_rollouts(shown, "length_bias")
    figure, axes = style.panels(len(shown.facets), (3.4, 2.6) if len(shown.facets) > 1 else (5.8, 3.6))
    handles: dict[str, Any] = {}
    tenths = np.arange(1, 11)
    aborted = False
    for ax, facet in zip(axes, shown.facets, strict=True):
        ax.axhline(1.0, lw=0.9, color=style.FAINT)
        for label in shown.series:
            cell = shown.at(label, facet)
            biases = [run.summary["rollouts"]["length_bias"] for run in cell.values()]
            aborted = aborted or any(bias["answers"]["aborted"] for bias in biases)
            found = [interval(bias["deciles"][i]["ratio"] for bias in biases if bias["deciles"]) for i in range(10)]
            known = [(x, one) for x, one in zip(tenths.tolist(), found, strict=True) if one is not None]
            if not known:
                continue
            look = style.line(shown.series, label)
            xs = [x for x, _ in known]
            handles[label] = ax.plot(xs, [one.mean for _, one in known], marker="o", ms=3.5, lw=1.6, **look)[0]
            banded = [(x, one.low, one.high) for x, one in known if one.low is not None and one.high is not None]
            if banded:
                at, lows, highs = (list(column) for column in zip(*banded, strict=True))
                ax.fill_between(at, lows, highs, color=look["color"], alpha=0.16, lw=0)
        ax.set_xticks(tenths, ["shortest", *(str(tenth) for tenth in tenths[1:-1]), "longest"], fontsize=7)
        ax.set_ylim(0, max(1.3, 1.08 * ax.get_ylim()[1]))
        ax.grid(color="#EEEEEE", lw=0.7)
        ax.set_title(style.wrap(shown.facet_title(facet), 44), loc="left")
    for ax in style.bottom(axes):
        ax.set_xlabel("tenth of the generated answers, by length")
    for ax in style.left(axes):
        ax.set_ylabel("share of trained / share of generated")
    style.title(figure, "Length bias: which answers are trained")
    labels = [label for label in shown.series if label in handles]
    names = [_with_ratio(shown, label) for label in labels]
    heading = spoken(shown.report.series) + (" (mean length ratio)" if len(shown.facets) == 1 else "")
    style.legend(figure, [handles[label] for label in labels], names, heading)
    style.small_print(
        figure,
        "Answers that ended in groups whose fate is decided; those in flight or buffered at the end are left out.",
        "Some were aborted before they ended: they are in no tenth, and ≤ says that with them the ratio is lower."
        if aborted
        else "",
        "Band: 95 % t-interval." if len(shown.seeds) > 1 else "",
        style.seeds_text(shown.seeds),
        command=command,
    )
    return figure


def _with_ratio(shown: Arrangement, label: str) -> str:
    """``FIFO (0.64)``; with aborted answers ``FIFO (≤ 0.61)``."""
    if len(shown.facets) != 1:
        return label
    cell = shown.at(label, shown.facets[0])
    biases = [run.summary["rollouts"]["length_bias"] for run in cell.values()]
    if any(bias["answers"]["aborted"] for bias in biases):
        found = interval(bias["ratio_at_most"] for bias in biases)
        return label if found is None else f"{label} (≤ {found.mean:.2f})"
    found = over_seeds(cell, length_ratio)
    return label if found is None else f"{label} ({found.mean:.2f})"


@style.styled
def staleness_kinds(runs: Runs, report: Report | None = None, *, command: str = "") -> Figure:
    """One log, all definitions of staleness: a row a definition, a dot at a series' mean and a ring at its p99.

    Definitions in versions and publications; those in other units stand in the table ``rollouts``. Means over seeds, of
    answers (``group_oldest``: of groups). A panel a facet. Raises ValueError for runs without rollouts.
    """
    shown = arrange(runs, report)
    need_rollouts(shown, "staleness_kinds")
    rows = len(IN_VERSIONS)
    height = rows * (0.13 * len(shown.series) + 0.2) + 0.4
    figure, axes = style.panels(len(shown.facets), (3.1 if len(shown.facets) > 1 else 5.4, height), extra=(1.6, 1.0))
    largest = 0.0
    for ax, facet in zip(axes, shown.facets, strict=True):
        largest = max(largest, _draw_kinds(ax, shown, facet))
        ax.set_ylim(rows - 0.5, -0.5)
        ax.set_yticks(range(rows), [spoken(kind.name) for kind in IN_VERSIONS])
        ax.tick_params(axis="y", length=0)
        ax.grid(axis="x", color="#EEEEEE", lw=0.7)
        ax.set_title(style.wrap(shown.facet_title(facet), 44), loc="left")
    for ax in axes:
        if largest > 40:
            ax.set_xscale("symlog", linthresh=1.0)
        ax.set_xlim(left=-0.02 * largest if largest <= 40 else -0.1)
    for ax in style.bottom(axes):
        ax.set_xlabel("versions")
    from matplotlib.lines import Line2D

    style.title(figure, "Staleness of trained answers, in whose words")
    marks = [Line2D([], [], ls="", marker="o", ms=5, color=style.colour(shown.series, label)) for label in shown.series]
    ring = Line2D([], [], ls="", marker="o", ms=5, mfc="white", mec=style.INK)
    style.legend(figure, [*marks, ring], [*shown.series, "99th percentile"], spoken(shown.report.series))
    style.small_print(
        figure,
        "Dots: mean; rings: 99th percentile; both means over seeds." if len(shown.seeds) > 1 else "Dots: mean.",
        "Publications are counted as such, the rest in versions. Users: "
        + "; ".join(f"{spoken(kind.name)}: {kind.systems}" for kind in IN_VERSIONS if kind.systems != "ours")
        + ".",
        style.seeds_text(shown.seeds).replace(": no interval", ""),
        command=command,
    )
    return figure


def _draw_kinds(ax: Axes, shown: Arrangement, facet: Facet) -> float:
    """Draw a facet's dots; the largest value."""
    largest = 0.0
    count = len(shown.series)
    for y, kind in enumerate(IN_VERSIONS):
        for i, label in enumerate(shown.series):
            found = [staleness(run, kind.name) for run in shown.at(label, facet).values()]
            mean, late = (interval(row[name] for row in found if row is not None) for name in ("mean", "p99"))
            if mean is None or late is None:
                continue
            colour = style.colour(shown.series, label)
            at = y + (i - (count - 1) / 2) * (0.7 / count)
            ax.plot([mean.mean, late.mean], [at, at], lw=0.9, color=colour, alpha=0.5)
            ax.plot(late.mean, at, "o", ms=4.5, mfc="white", mec=colour)
            ax.plot(mean.mean, at, "o", ms=4.5, color=colour)
            largest = max(largest, late.mean)
    return largest
