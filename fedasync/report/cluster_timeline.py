"""The figure of one run of a cluster in time: the trainer, the servers, the versions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedasync.report import style
from fedasync.report.arrangement import Runs, arrange
from fedasync.report.cluster import need_rollouts
from fedasync.report.cluster_figures import PARTS
from fedasync.report.measures import times_between
from fedasync.report.spec import Report
from fedasync.report.timeline import facet_of

if TYPE_CHECKING:
    import polars as pl
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from fedasync.runs.run import Run

_BINS = 600
"""Moments at which running sequences are counted."""
_VERSIONS = 8
"""Versions shown where no stretch of time is asked for."""
_MOST_VERSION_LINES = 48
_SHADES = "Blues"
_VERSION = "#D55E00"
"""Seen on the darkest and on the lightest blue."""


class Step(NamedTuple):
    """What the trainer did for one version, in order, up to its commit (s).

    A colocated cluster switches twice: back to generating, and after training. ``lost_s`` is training that a crash
    destroyed.
    """

    committed_s: float
    syncing_s: float
    switching_back_s: float
    saving_s: float
    evaluating_s: float
    waiting_s: float
    lost_s: float
    down_s: float
    training_s: float
    switching_s: float

    @property
    def parts(self) -> list[tuple[str, float]]:
        """What it did, as in the shares of its time, and for how long; in order, what took no time left out."""
        before = ("syncing", "switching", "saving", "evaluating", "waiting")
        names = (*before, "training", "down", "training", "switching")
        return [(name, seconds) for name, seconds in zip(names, self[1:], strict=True) if seconds > 0]


@style.styled
def cluster_timeline(
    runs: Runs,
    report: Report | None = None,
    *,
    facet: Sequence[str] | None = None,
    window_s: tuple[float, float] | None = None,
    command: str = "",
) -> Figure:
    """Trainer, servers and versions over time, in the first seed of one facet: two lanes a series.

    Above: what the trainer did. Below: a row a server, the darker the more sequences it ran; lines are versions.
    ``window_s`` = (from, to) in virtual seconds; without it the first versions are shown. Rows are those of
    `Report.timeline_lanes` servers at most, the first ones. An answer counts as running from its start to its end on
    the last server that it ran on, while a tool works for it too.
    Raises ValueError for a facet that does not exist, and for runs without rollouts.
    """
    shown = arrange(runs, report, timeline_facet=None if facet is None else tuple(facet), timeline_s=window_s)
    need_rollouts(shown, "cluster_timeline")
    place = facet_of(shown)
    cells = {label: shown.at(label, place) for label in shown.series if shown.at(label, place)}
    seed = min(min(cell) for cell in cells.values())
    drawn = {label: cell.get(seed) or next(iter(cell.values())) for label, cell in cells.items()}
    window = shown.report.timeline_s or (0.0, max(_first_versions_s(run) for run in drawn.values()))
    lanes = {label: running_sequences(run, window, _BINS) for label, run in drawn.items()}
    most = shown.report.timeline_lanes
    rows = max(len(lane) for lane in lanes.values())
    peak = max(1.0, *(float(lane.max(initial=0)) for lane in lanes.values()))

    low = 0.1 * min(rows, most) + 0.35
    figure = style.new_figure(9.6, (low + 0.62) * len(lanes) + 1.1)
    grid = figure.subplots(
        2 * len(lanes), 1, sharex=True, squeeze=False, height_ratios=[1, max(2, round(low / 0.22))] * len(lanes)
    )[:, 0]
    for i, (label, lane) in enumerate(lanes.items()):
        trainer, servers = grid[2 * i], grid[2 * i + 1]
        _draw_trainer(trainer, steps(drawn[label]), window)
        trainer.set_title(label, loc="left", fontweight="bold")
        servers.imshow(
            lane[:most],
            aspect="auto",
            interpolation="nearest",
            cmap=_SHADES,
            vmin=0,
            vmax=peak,
            extent=(*window, min(len(lane), most) - 0.5, -0.5),
        )
        commits = times_between(drawn[label], "committed", window)
        every = next(n for n in (1, 2, 5, 10, 20, 50, 10**9) if len(commits) / n <= _MOST_VERSION_LINES)
        for time_s in commits[every - 1 :: every]:
            servers.axvline(time_s, color=_VERSION, lw=0.9)
        thinned = f" (a line every {every})" if every > 1 else ""
        trainer.set_title(f"{len(commits)} versions{thinned}", loc="right", fontsize=7, color=style.FAINT)
        servers.set_ylabel("servers" if len(lane) <= most else f"{most} of {len(lane)}\nservers")
        servers.set_yticks([])
        servers.set_xlim(*window)
    grid[-1].set_xlabel(f"{shown.clock} (s)")

    from matplotlib import colormaps
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    words = shown.facet_title(place)
    style.title(figure, f"Trainer and servers over time ({words})" if words else "Trainer and servers over time")
    drawn_parts = {part for run in drawn.values() for step in steps(run) for part, _ in step.parts}
    parts = [part for part in PARTS["trainer"] if part in drawn_parts | {"training", "syncing", "waiting"}]
    version = Line2D([], [], color=_VERSION, lw=1.2)
    colours = [Patch(color=PARTS["trainer"][part]) for part in parts]
    counts = sorted({0, round(peak / 2), round(peak)})
    shades = [Patch(facecolor=colormaps[_SHADES](count / peak), edgecolor=style.IDLE) for count in counts]
    running = [f"{count} sequences" if count != 1 else "1 sequence" for count in counts]
    style.legend(figure, [*colours, version, *shades], [*parts, "new version", *running], "trainer, servers")
    style.small_print(
        figure,
        f"Seed {seed}.",
        "Of a step are known the times of its parts, drawn in the order in which they usually come, up to its commit.",
        "A server's row: answers between their start and their end on it.",
        command=command,
    )
    style.settle(figure)
    return figure


def steps(run: Run) -> list[Step]:
    """What the trainer did for each version, by the run's metrics; a metric that is not there counts 0."""
    import polars as pl

    names = ("sync_s", "switch_s", "save_s", "evaluate_s", "wait_s", "lost_s", "down_s", "train_s", "measure_s")
    table = run.metrics.filter(pl.col("name").is_in(names))
    found: dict[int, tuple[float, dict[str, float]]] = {}
    for time_s, version, name, value in table.select("time_s", "version", "name", "value").iter_rows():
        found.setdefault(version, (time_s, {}))[1][name] = value
    done = []
    first_s = None
    for committed_s, known in found.values():
        sync_s, switch_s, save_s, evaluate_s, wait_s, lost_s, down_s, train_s, measure_s = (
            known.get(name, 0.0) for name in names
        )
        first_s = switch_s if first_s is None else first_s  # before the first step nothing had to switch back
        last_s = min(first_s, switch_s)
        between = (save_s, evaluate_s + measure_s, wait_s, lost_s, down_s)
        done.append(Step(committed_s, sync_s, switch_s - last_s, *between, train_s, last_s))
    return done


def running_sequences(run: Run, window_s: tuple[float, float], bins: int) -> NDArray[np.int64]:
    """How many answers each server ran ``[servers, bins]``, at the middle of even parts of a stretch of time.

    Raises ValueError for a run without the table of rollouts.
    """
    import polars as pl

    table = run.scan_rollouts()
    if table is None:
        raise ValueError(
            f"report.figures: 'cluster_timeline' needs the rollouts of {run.summary['run_id']!r}: not kept"
        )
    begin, end = window_s
    servers = int(table.select(pl.col("server").max()).collect().item() or 0) + 1
    inside = (pl.col("start_s") < end) & (pl.col("end_s").is_null() | (pl.col("end_s") > begin))
    lost = pl.col("end_s").is_null()
    there = table.filter(inside).select("lease", "server", "start_s", "end_s", lost=lost).collect()
    there = there.join(_given_up(run), on="lease", how="left").with_columns(
        pl.col("end_s").fill_null(pl.col("stopped_s")).fill_null(float(run.summary["time_s"]))
    )
    width = (end - begin) / bins
    # The first middle at or after a start counts it, the first at or after an end no longer.
    first, last = (
        np.clip(np.ceil((there[name].to_numpy() - begin) / width - 0.5), 0, bins).astype(np.int64)
        for name in ("start_s", "end_s")
    )
    server = there["server"].to_numpy().astype(np.int64)
    change = np.zeros((servers, bins + 1), np.int64)
    np.add.at(change, (server, first), 1)
    np.add.at(change, (server, last), -1)
    return np.cumsum(change, axis=1)[:, :bins]


def _given_up(run: Run) -> pl.DataFrame:
    """When each group stopped to be worked at: ``lease``, ``stopped_s``."""
    import polars as pl

    ended = pl.col("kind").is_in(["delivered", "rejected", "failed", "cancelled"])
    found = run.read_events(lambda log: log.filter(ended).select("lease", stopped_s="time_s"))
    return found.unique("lease", keep="first", maintain_order=True).with_columns(pl.col("lease").cast(pl.Int32))


def _draw_trainer(ax: Axes, done: list[Step], window: tuple[float, float]) -> None:
    for step in done:
        if step.committed_s < window[0]:
            continue
        at = step.committed_s
        for part, seconds in reversed(step.parts):
            ax.barh(0, seconds, left=at - seconds, height=0.9, color=PARTS["trainer"][part])
            at -= seconds
        if at > window[1]:
            break
    ax.set_ylim(-0.55, 0.55)
    ax.set_xlim(*window)
    ax.set_yticks([])
    ax.set_ylabel("trainer", rotation=0, ha="right", va="center")
    ax.spines["left"].set_visible(False)


def _first_versions_s(run: Run) -> float:
    """When the first versions were committed; the run's end where there are fewer."""
    end_s = float(run.summary["time_s"])
    times = times_between(run, "committed", (0.0, end_s))
    return times[_VERSIONS - 1] if len(times) >= _VERSIONS else max(end_s, 1e-9)
