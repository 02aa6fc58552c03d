"""The figure of what a policy learnt: reward and exact answers, against time and against versions."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np

from fedasync.report import style
from fedasync.report.arrangement import Arrangement, Facet, Runs, arrange, spoken
from fedasync.report.cluster import need_rollouts
from fedasync.report.spec import Report, listed
from fedasync.report.statistics import Band, band

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    from fedasync.report.statistics import Curve
    from fedasync.runs.run import Run

Along = Literal["time_s", "version"]
LEARNT = {
    "reward_mean": "reward of trained answers",
    "exact": "exact answers, held-out prompts",
    "reward": "reward, held-out prompts",
}
"""Metrics of what was learnt, and their words; the last only where no exact answers were counted."""


@style.styled
def learning_curves(runs: Runs, report: Report | None = None, *, command: str = "") -> Figure:
    """A row of panels a metric (and a facet), left against time, right against versions: a line a series.

    Means over seeds with their 95 % bands, which end where 0 and 1 do. Metrics are the mean reward of the answers that
    a version was trained on, and of evaluations the share of exact answers, or else the reward. Raises ValueError for
    runs without rollouts, and where nothing was learnt.
    """
    from matplotlib.ticker import MaxNLocator

    shown = arrange(runs, report)
    need_rollouts(shown, "learning_curves")
    metrics = learnt_metrics(shown)
    rows = [(facet, metric) for facet in shown.facets for metric in metrics]
    figure = style.new_figure(8.8, 2.5 * len(rows) + 1.0)
    grid = figure.subplots(len(rows), 2, sharex="col", sharey="row", squeeze=False)
    handles: dict[str, Line2D] = {}
    stopped = False
    aim = shown.target()
    for axes, (facet, metric) in zip(grid, rows, strict=True):
        along: tuple[Along, ...] = ("time_s", "version")
        for ax, place in zip(axes, along, strict=True):
            stopped = _draw(ax, shown, facet, metric, place, handles) or stopped
            if aim is not None and aim.metric == metric:
                for level in aim.values:
                    ax.axhline(level, color=style.INK, lw=0.9, ls=(0, (1, 2)))
            ax.grid(color="#EEEEEE", lw=0.7)
            ax.margins(x=0.01)
        axes[0].set_ylabel(style.wrap(LEARNT[metric], 26))
        axes[0].set_title(style.wrap(shown.facet_title(facet), 44), loc="left")
    grid[-1][0].set_xlabel(f"{shown.clock} (s)")
    grid[-1][1].set_xlabel("version")
    grid[-1][1].xaxis.set_major_locator(MaxNLocator(integer=True))
    style.title(figure, "What was learnt, by time and by version")
    ordered = [label for label in shown.series if label in handles]
    style.legend(figure, [handles[label] for label in ordered], ordered, spoken(shown.report.series))
    style.small_print(
        figure,
        "Mean over seeds; band: 95 % t-interval of the mean." if len(shown.seeds) > 1 else "",
        f"Dotted: target {aim}." if aim is not None and aim.metric in metrics else "",
        style.seeds_text(shown.seeds),
        "Faint: some seeds had ended; their last value is carried on." if stopped else "",
        command=command,
    )
    return figure


def learnt_metrics(shown: Arrangement) -> list[str]:
    """The metrics that some run has. Raises ValueError where none has any."""
    there = {name for run in shown.runs for name in run.summary["final"]}
    found = [name for name in LEARNT if name in there]
    if not found:
        raise ValueError(
            f"report.figures: 'learning_curves' needs one of the metrics {listed(list(LEARNT))}; these runs learnt "
            "nothing"
        )
    return [name for name in found if name != "reward" or "exact" not in found]


def learnt_curve(run: Run, metric: str, along: Along) -> Curve | None:
    """A metric against time (s) or versions; None where the run never measured it."""
    import polars as pl

    rows = run.metrics.filter((pl.col("name") == metric) & pl.col("value").is_finite()).sort("version")
    if rows.is_empty():
        return None
    return rows[along].cast(pl.Float64).to_numpy(), rows["value"].to_numpy()


def _draw(ax: Axes, shown: Arrangement, facet: Facet, metric: str, along: Along, handles: dict[str, Line2D]) -> bool:
    """Draw a panel's lines; whether some seeds had ended before others."""
    stopped = False
    for label in shown.series:
        found = [curve for run in shown.at(label, facet).values() if (curve := learnt_curve(run, metric, along))]
        if not found:
            continue
        mean = band(found)
        look = style.line(shown.series, label)
        whole = mean.times_s <= mean.all_running_until_s
        handles[label] = ax.plot(mean.times_s[whole], mean.mean[whole], lw=1.6, **look)[0]
        if not whole.all():
            stopped = True
            rest = slice(max(int(whole.sum()) - 1, 0), None)
            ax.plot(mean.times_s[rest], mean.mean[rest], lw=1.6, alpha=0.35, **look)
        if (ends := _ends(mean, found)) is not None:
            ax.fill_between(mean.times_s, *ends, color=look["color"], alpha=0.16, lw=0)
    return stopped


def _ends(mean: Band, curves: list[Curve]) -> tuple[np.ndarray, np.ndarray] | None:
    """The band, cut at 0 and 1 where the metric is a share."""
    if mean.low is None or mean.high is None:
        return None
    is_share = all(values.min() >= 0 and values.max() <= 1 for _, values in curves)
    return (np.clip(mean.low, 0, 1), np.clip(mean.high, 0, 1)) if is_share else (mean.low, mean.high)
