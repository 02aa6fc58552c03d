"""How well a policy did in the end, along an axis of the study such as a bound on staleness: a figure and a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fedasync.report import style
from fedasync.report.arrangement import Arrangement, Cell, Runs, arrange, spoken
from fedasync.report.by_axis import panels_along, title_without
from fedasync.report.cluster import need_rollouts
from fedasync.report.learning_curves import LEARNT, learnt_metrics
from fedasync.report.spec import Report, listed
from fedasync.report.statistics import mean_interval

if TYPE_CHECKING:
    import polars as pl
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D

    from fedasync.runs.run import Run

LAST = 10
"""Versions at the end of a run whose values are averaged."""
FINAL_LEGEND = f"""
Of each run the mean over its last {LAST} versions (of evaluations: those among them, or the last one); then the mean
over seeds, its 95 % t-interval, and the least and the greatest seed. `ended early`: runs that made fewer versions than
others of the study. `staleness`: of the trained tokens, in versions, over the whole run.
"""


class Spread(NamedTuple):
    """What the seeds of a point came to."""

    mean: float
    values: tuple[float, ...]
    """By seed."""

    @property
    def least(self) -> float:
        return min(self.values)

    @property
    def greatest(self) -> float:
        return max(self.values)


@style.styled
def final_by_axis(runs: Runs, report: Report | None = None, *, x_axis: str | None = None, command: str = "") -> Figure:
    """The mean of a run's last versions against the labels of ``x_axis``: a line a series, a column a facet.

    Rows are the metrics of what was learnt. Lines are means over seeds, bars reach from the least to the greatest
    seed; labels stand evenly. Raises ValueError for runs without rollouts, where nothing was learnt, and without an x
    axis.
    """
    shown = arrange(runs, report, x_axis=x_axis)
    need_rollouts(shown, "final_by_axis")
    axis = _axis(shown)
    metrics = learnt_metrics(shown)
    at, labels, panels = panels_along(shown, axis)
    figure = style.new_figure(3.7 * len(panels) + 1.9, 2.6 * len(metrics) + 1.0)
    grid = figure.subplots(len(metrics), len(panels), sharex=True, sharey="row", squeeze=False)
    handles: dict[str, Line2D] = {}
    for row, metric in zip(grid, metrics, strict=True):
        for ax, panel in zip(row, panels, strict=True):
            for i, label in enumerate(shown.series):
                cells = {x: shown.at(label, (*panel[:at], x, *panel[at:])) for x in labels}
                points = {x: found for x, cell in cells.items() if (found := spread(cell, metric))}
                if points:
                    aside = 0.07 * (i - (len(shown.series) - 1) / 2)
                    handles[label] = _line(ax, points, labels, aside, style.line(shown.series, label))
            ax.grid(axis="y", color="#EEEEEE", lw=0.7)
            ax.set_xticks(range(len(labels)), labels)
            ax.set_xlim(-0.5, len(labels) - 0.5)
        row[0].set_ylabel(style.wrap(LEARNT[metric], 26))
    for ax, panel in zip(grid[0], panels, strict=True):
        ax.set_title(style.wrap(title_without(shown, panel, at), 40), loc="left")
    for ax in grid[-1]:
        ax.set_xlabel(spoken(axis))
    style.title(figure, f"What was learnt in the end, by {spoken(axis)}")
    ordered = [label for label in shown.series if label in handles]
    style.legend(figure, [handles[label] for label in ordered], ordered, spoken(shown.report.series))
    style.small_print(
        figure,
        f"Mean over the last {LAST} versions of a run, and over seeds.",
        "Bars: from the least to the greatest seed." if len(shown.seeds) > 1 else "",
        style.seeds_text(shown.seeds),
        command=command,
    )
    return figure


def _line(ax: Axes, points: dict[str, Spread], labels: list[str], aside: float, look: dict[str, object]) -> Line2D:
    xs = np.array([labels.index(x) for x in points]) + aside
    means = np.array([each.mean for each in points.values()])
    ends = np.array([[each.mean - each.least, each.greatest - each.mean] for each in points.values()]).T
    if any(len(each.values) > 1 for each in points.values()):
        ax.errorbar(xs, means, np.maximum(ends, 0), ls="", elinewidth=1.0, capsize=1.5, color=str(look["color"]))
    drawn: Line2D = ax.plot(xs, means, marker="o", ms=3.5, lw=1.5, **look)[0]  # type: ignore[arg-type]
    return drawn


def spread(cell: Cell, metric: str) -> Spread | None:
    """Of the runs of a point that measured the metric; None where none did."""
    found = [final(run, metric) for run in cell.values()]
    values = tuple(value for value in found if value is not None)
    return Spread(float(np.mean(values)), values) if values else None


def final(run: Run, metric: str) -> float | None:
    """The mean of a metric over a run's last versions, or its last value where it was not measured so late.

    None where it never was.
    """
    import polars as pl

    rows = run.metrics.filter((pl.col("name") == metric) & pl.col("value").is_not_nan()).sort("version")
    if rows.is_empty():
        return None
    late = rows.filter(pl.col("version") > int(run.summary["versions"]) - LAST)["value"]
    return float(np.mean(late.to_numpy())) if len(late) else float(rows["value"][-1])


def final_table(runs: Runs, report: Report | None = None) -> pl.DataFrame:
    """A row a point of the axes and metric: mean, half width of its 95 % interval, least, greatest, each seed."""
    import polars as pl

    shown = arrange(runs, report)
    most = max(int(run.summary["versions"]) for run in shown.runs)
    rows = []
    for metric in learnt_metrics(shown):
        for facet in shown.facets:
            for label in shown.series:
                cell = shown.at(label, facet)
                if (found := spread(cell, metric)) is None:
                    continue
                own = [age for run in cell.values() if (age := _token_staleness(run)) is not None]
                rows.append(
                    {
                        "metric": metric,
                        **dict(zip(shown.facet_axes, facet, strict=True)),
                        shown.report.series: label,
                        "mean": round(found.mean, 6),
                        "half_width": _rounded(mean_interval(found.values).half_width),
                        "least": round(found.least, 6),
                        "greatest": round(found.greatest, 6),
                        "seeds": len(found.values),
                        "ended_early": sum(int(run.summary["versions"]) < most for run in cell.values()),
                        "staleness": _rounded(float(np.mean(own)) if own else None),
                    }
                )
    return pl.DataFrame(rows, infer_schema_length=None)


def readable_final(runs: Runs, report: Report | None = None) -> pl.DataFrame:
    """The table with words for its columns and numbers of three places."""
    import polars as pl

    table = final_table(runs, report)
    three = ("mean", "half_width", "least", "greatest")
    columns = [pl.col(name).map_elements(lambda value: f"{value:.3f}", pl.String) for name in three]
    spelt = table.with_columns(*columns, staleness=pl.col("staleness").round(2).cast(pl.String))
    names = {"half_width": "± (95 %)", "ended_early": "ended early"}
    return spelt.with_columns(pl.col("metric").replace(LEARNT)).rename(names).fill_null("–")


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 6)


def _token_staleness(run: Run) -> float | None:
    """Mean over versions of the mean age of their tokens."""
    import polars as pl

    ages = run.metrics.filter(pl.col("name") == "token_staleness_mean")["value"]
    return float(ages.mean()) if len(ages) else None  # type: ignore[arg-type]


def _axis(shown: Arrangement) -> str:
    if shown.report.x_axis is None:
        raise ValueError(f"report.x_axis: none given; there are: {listed(shown.facet_axes)}")
    return shown.report.x_axis
