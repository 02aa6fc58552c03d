"""Figures and the table of a cluster's runs: what they hold, and what they refuse."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from matplotlib.figure import Figure

from fedasync.report import (
    Report,
    cluster_timeline,
    length_bias,
    readable_rollouts,
    rollouts_table,
    shares,
    staleness,
    staleness_kinds,
    throughput_by_axis,
    timeline,
    utilisation,
    write_report,
)
from fedasync.report.cluster_timeline import running_sequences, steps
from fedasync.report.spec import Published
from fedasync.runs.run import Run
from fedasync.runs.staleness_kinds import KINDS

from ..runs.cluster_logs import Cluster
from .synthetic import cohort

AT = {"policy": "FIFO", "eta": "2"}
PUBLISHED = (Published(AT, "tokens_per_second", 900.0, "a table of somebody's"),)
REPORT = Report(series="policy", x_axis="eta", published=PUBLISHED)
FIGURES = [shares, length_bias, staleness_kinds, cluster_timeline]


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    """Two policies × two budgets × two seeds, and a baseline that has one label of the axis."""
    made = []
    for seed in range(2):
        world: dict[str, Any] = {"seed": seed, "versions": 14, "servers": 3}
        for eta in (1, 2):
            for name, policy in (("FIFO", {}), ("abort", {"most_stale": 1, "abort": True})):
                labels = {"policy": name, "eta": str(eta)}
                made.append(Cluster(eta=eta, **policy, **world).run(labels=labels, warm_up_versions=2))  # type: ignore[arg-type]
        made.append(Cluster(eta=0, **world).run("sync", {"policy": "sync", "eta": "0"}, warm_up_versions=2))
    return made


def drawn(figure: Figure) -> Figure:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure.draw_without_rendering()
    return figure


def legend(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_throughput_has_lines_bands_and_hollow_marks(runs: list[Run]) -> None:
    figure = drawn(throughput_by_axis(runs, REPORT))
    assert legend(figure) == ["FIFO", "abort", "sync", "published"]
    (ax,) = figure.axes
    assert sorted(ax.get_xticks()) == [0.0, 1.0, 2.0]
    line = ax.lines[0]
    assert list(line.get_xdata()) == [1.0, 2.0]
    rates = [
        np.mean([r.summary["rollouts"]["throughput"]["tokens_per_second"] for r in runs if r.labels == labels])
        for labels in ({"policy": "FIFO", "eta": "1"}, {"policy": "FIFO", "eta": "2"})
    ]
    np.testing.assert_allclose(np.asarray(line.get_ydata(), float), rates)
    (mark,) = [line for line in ax.lines if line.get_marker() == "D"]
    assert (list(mark.get_xdata()), list(mark.get_ydata()), mark.get_markerfacecolor()) == ([2.0], [900.0], "none")
    assert "a table of somebody's" in figure.get_supxlabel().replace("\n", " ")
    assert len(ax.collections) == 3  # bands, of the lone point of `sync` too


def test_throughput_over_a_baseline_without_the_axis(runs: list[Run]) -> None:
    points = (*PUBLISHED, Published(AT, "tokens_per_second", 2.5, "somebody", over={"policy": "sync", "eta": "0"}))
    report = Report(series="policy", x_axis="eta", baseline="sync", throughput="speedup", published=points)
    (ax,) = drawn(throughput_by_axis(runs, report)).axes
    ratios = []
    for seed in range(2):
        rate = {
            run.labels["policy"]: run.summary["rollouts"]["throughput"]["tokens_per_second"]
            for run in runs
            if run.seed == seed and run.labels["eta"] in "01"
        }
        ratios.append(rate["FIFO"] / rate["sync"])
    first = np.asarray(ax.lines[0].get_ydata(), float)
    assert first[0] == pytest.approx(np.exp(np.mean(np.log(ratios))))
    assert set(np.asarray(ax.lines[2].get_ydata(), float)) == {1.0}
    (mark,) = [line for line in ax.lines if line.get_marker() == "D"]  # of the figure's unit
    assert list(mark.get_ydata()) == [2.5]


def test_shares_of_a_bar_are_those_of_the_summary(runs: list[Run]) -> None:
    one = [run for run in runs if run.labels == {"policy": "FIFO", "eta": "1"} and run.seed == 0]
    figure = drawn(shares(one))
    trainer, servers = figure.axes
    widths = [bar.get_width() for bar in trainer.patches]
    told = one[0].summary["shares"]
    assert widths == pytest.approx([told["trainer"]["training"], told["trainer"]["waiting"]])
    assert sum(bar.get_width() for bar in servers.patches) == pytest.approx(sum(told["servers"].values()))
    assert legend(figure) == ["training", "waiting", "decoding", "prefilling", "idle"]


def test_length_bias_is_flat_where_nothing_is_lost_and_a_bound_where_answers_are_aborted(runs: list[Run]) -> None:
    at = [run for run in runs if run.labels["eta"] == "2"]
    figure = drawn(length_bias(at, Report(series="policy")))
    assert legend(figure)[0] == "FIFO (1.00)"
    assert legend(figure)[1].startswith("abort (≤ ")
    assert set(np.asarray(figure.axes[0].lines[1].get_ydata(), float)) == {1.0}
    assert "aborted" in figure.get_supxlabel()


def test_a_dot_and_a_ring_a_definition(runs: list[Run]) -> None:
    one = [run for run in runs if run.labels == {"policy": "FIFO", "eta": "2"} and run.seed == 0]
    figure = drawn(staleness_kinds(one))
    (ax,) = figure.axes
    names = [label.get_text() for label in ax.get_yticklabels()]
    dots = [line for line in ax.lines if line.get_marker() == "o"]
    assert len(dots) == 2 * len(names)
    row = next(row for row in one[0].summary["rollouts"]["staleness"] if row["kind"] == "oldest")
    place = names.index("oldest")
    assert [float(dot.get_xdata()[0]) for dot in dots[2 * place : 2 * place + 2]] == [row["p99"], row["mean"]]
    assert "prime-rl" in figure.get_supxlabel()


def test_running_sequences_are_counted_at_moments() -> None:
    cluster = Cluster(versions=10, eta=2, most_stale=1, abort=True)
    run = cluster.run()
    found = running_sequences(run, (3.0, 20.0), 50)
    moments = 3.0 + (np.arange(50) + 0.5) * 17.0 / 50
    started = [answer for group in cluster.groups for answer in group.answers if answer.start_s is not None]
    for server in range(cluster.servers):
        for moment, count in zip(moments, found[server], strict=True):
            there = [
                answer
                for answer in started
                if answer.server == server
                and answer.start_s
                <= moment
                < min(x for x in (answer.end_s, answer.stop_s, cluster.now) if x is not None)
            ]
            assert count == len(there)
    assert found.max() == cluster.running


def test_the_trainers_steps_fill_its_time() -> None:
    run = Cluster(versions=8, eta=1).run()
    done = steps(run)
    assert len(done) == 8
    before = 0.0
    for step in done:
        assert step.syncing_s + step.waiting_s + step.training_s == pytest.approx(step.committed_s - before)
        before = step.committed_s


def test_the_timeline_has_two_lanes_a_series(runs: list[Run]) -> None:
    figure = drawn(cluster_timeline(runs, Report(series="policy", timeline_facet=("2",), timeline_lanes=2)))
    lanes = [ax for ax in figure.axes if ax.get_ylabel() in ("trainer", "2 of 3\nservers")]
    assert [ax.get_ylabel() for ax in lanes] == ["trainer", "2 of 3\nservers"] * 2
    assert len(lanes[1].lines) == 8  # versions
    narrow = drawn(cluster_timeline(runs, Report(series="policy"), window_s=(5.0, 9.0)))
    assert all(ax.get_xlim() == (5.0, 9.0) for ax in narrow.axes[:2])


def test_the_table_has_every_definition_and_the_readable_one_its_bound(runs: list[Run]) -> None:
    table = rollouts_table(runs, REPORT)
    assert table.height == 5
    assert {f"{kind.name}_mean" for kind in KINDS} <= set(table.columns)
    row = table.row(by_predicate=(pl.col("policy") == "FIFO") & (pl.col("eta") == "2"), named=True)
    cell = [run.summary["rollouts"] for run in runs if run.labels == {"policy": "FIFO", "eta": "2"}]
    assert row["step_s"] == pytest.approx(np.mean([one["throughput"]["step_s"]["mean"] for one in cell]))
    dispatch = [row for one in cell for row in one["staleness"] if row["kind"] == "dispatch"]
    assert row["dispatch_max"] == max(one["max"] for one in dispatch)
    assert row["length_ratio"] == 1.0
    assert row["starved_longest_s"] is None
    words = readable_rollouts(runs, REPORT).filter(policy="abort")["trained / generated length"]
    assert all("with aborted" in text for text in words)


def test_a_report_of_a_cluster_is_written_the_same_each_time(runs: list[Run], tmp_path: Path) -> None:
    names = ("metric_over_time", "staleness", "utilisation", "timeline", "throughput_by_axis", "length_bias")
    report = Report(figures=(*names, "staleness_kinds", "cluster_timeline"), series="policy", x_axis="eta")
    files = []
    for name in ("a", "b"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            written = write_report(runs, report, tmp_path / name, "fedasync sim it", "It")
        files.append({path.name: path.read_bytes() for path in written})
    assert files[0] == files[1]
    assert {"rollouts.csv", "rollouts.md", "shares.png", "cluster_timeline.svg"} <= set(files[0])
    assert "utilisation.png" not in files[0]  # `shares` in its place
    assert b"tokens per second" in files[0]["table.md"]


def test_older_figures_draw_such_runs_or_refuse_in_a_line(runs: list[Run]) -> None:
    drawn(staleness(runs, Report(series="policy")))
    drawn(timeline(runs, Report(series="policy")))
    with pytest.raises(
        ValueError, match=r"^report.figures: 'utilisation' is of clients' slots; of a cluster's servers"
    ):
        utilisation(runs)


@pytest.mark.parametrize("draw", [*FIGURES, throughput_by_axis, rollouts_table])
def test_runs_without_rollouts_are_refused_in_a_line(draw: Any) -> None:
    with pytest.raises(
        ValueError, match=r"^report.figures: '\w+' needs runs of a cluster; 'fedavg-0' has no rollouts;"
    ):
        draw(
            [cohort(end_s=20.0, labels={"law": "none"})],
            Report(x_axis="strategy", series="law") if draw is throughput_by_axis else None,
        )


def test_a_run_whose_rollouts_were_not_kept_has_no_timeline_but_all_else(runs: list[Run]) -> None:
    kept = runs[0]
    without = Run(kept.config, kept.summary, {name: kept.tables[name] for name in ("events", "metrics")})
    for draw in (shares, length_bias, staleness_kinds):
        drawn(draw([without]))
    with pytest.raises(ValueError, match=r"^report.figures: 'cluster_timeline' needs the rollouts of 'areal-seed0'"):
        cluster_timeline([without])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"figures": ("throughput_by_axis",)}, "report.x_axis: figure 'throughput_by_axis' needs one"),
        ({"throughput": "speedup"}, "report.throughput: a speed-up needs report.baseline"),
    ],
)
def test_a_report_that_lacks_what_it_needs_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Report(**change)


def test_published_points_are_checked_against_the_axes() -> None:
    axes = {"policy": ["FIFO"], "eta": ["1", "2"]}
    REPORT.check(axes)
    for labels, message in (
        ({"policy": "LIFO"}, "published: no label 'LIFO' on axis 'policy'; there are: 'FIFO'"),
        ({"eta": "3"}, "published: no label '3' on axis 'eta'; there are: '1', '2'"),
    ):
        point = Published({**AT, **labels}, "tokens_per_second", 1.0, "x")
        with pytest.raises(ValueError, match=f"^{message}$"):
            Report(series="policy", x_axis="eta", published=(point,)).check(axes)
