"""What a report reads of a log: the part that it draws, as if it had read the whole."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from matplotlib.figure import Figure

from fedasync.report import Report, timeline
from fedasync.report.measures import curve, first_leases, leases, leases_between
from fedasync.runs.run import Run

from .synthetic import asynchronous, cohort

COLUMNS = ("lease", "worker", "base_version", "start_s", "end_s", "outcome", "staleness", "reason")
RUNS = {
    "cohort": cohort(end_s=40.0, timing_only=True),
    "asynchronous": asynchronous(end_s=40.0, timing_only=True, most_stale=2, failing=0.1),
}
EVERY_RUN = pytest.mark.parametrize("run", RUNS.values(), ids=RUNS.keys())


def whole(run: Run) -> pl.DataFrame:
    return leases(run.events, float(run.summary["time_s"])).select(COLUMNS)


def few(monkeypatch: pytest.MonkeyPatch, leases: int) -> None:
    monkeypatch.setattr(sys.modules["fedasync.report.timeline"], "_MOST_LEASES", leases)


def bars(figure: Figure) -> list[list[tuple[float, float]]]:
    """Begin and end of every bar, by panel."""
    paths = [[path for found in ax.collections for path in found.get_paths()] for ax in figure.axes]
    return [sorted((p.vertices[:, 0].min(), p.vertices[:, 0].max()) for p in panel) for panel in paths]  # type: ignore[index]


@EVERY_RUN
@pytest.mark.parametrize("most", [1, 20, 100_000])
def test_the_first_leases_have_their_whole_lives(run: Run, most: int) -> None:
    table, known_s = first_leases(run, most)
    expected = whole(run)
    assert table.select(COLUMNS).equals(expected.head(most))
    assert known_s == (expected["start_s"][most] if most < expected.height else run.summary["time_s"])


@EVERY_RUN
@pytest.mark.parametrize("window", [(0.0, 3.0), (7.5, 9.25), (35.0, 40.0), (0.0, 1e9), (50.0, 60.0)])
def test_leases_between_two_times_are_those_in_flight_at_some_time_between(
    run: Run, window: tuple[float, float], tmp_path: Path
) -> None:
    run.save(tmp_path)
    expected = whole(run).filter((pl.col("start_s") < window[1]) & (pl.col("end_s") > window[0]))
    for source in (run, Run.load(tmp_path)):
        table, until_s = leases_between(source, *window, 100_000)
        overlapping = table.filter(pl.col("end_s") > window[0]).select(COLUMNS)
        assert overlapping.equals(expected)
        assert until_s == window[1]


@EVERY_RUN
def test_of_too_many_leases_between_two_times_those_that_started_first_are_taken(run: Run) -> None:
    table, until_s = leases_between(run, 10.0, 30.0, 40)
    known = whole(run).filter((pl.col("start_s") < 30.0) & (pl.col("end_s") > 10.0))
    assert table.select(COLUMNS).equals(known.head(40))
    assert until_s == known["start_s"][40]


@pytest.mark.parametrize("window", [(0.0, 6.0), (7.5, 9.25)])
def test_the_timeline_of_a_part_of_the_log_shows_the_bars_of_the_whole(
    window: tuple[float, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    report = Report(timeline_s=window, timeline_lanes=1000)
    expected = bars(timeline(RUNS, report))
    few(monkeypatch, 150)
    assert sum(map(len, expected)) > 40
    assert bars(timeline(RUNS, report)) == expected


def test_a_timeline_of_more_leases_than_can_be_told_apart_is_cut_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    few(monkeypatch, 60)
    figure = timeline(RUNS, Report(timeline_s=(2.0, 40.0)))
    low, high = figure.axes[0].get_xlim()
    assert low == 2.0
    assert 3.0 < high < 20.0
    assert f"Shown up to {high:g} s" in figure.get_supxlabel().replace("\n", " ")
    figure = timeline(RUNS)
    assert 0 < figure.axes[0].get_xlim()[1] < 20.0
    assert "Shown up to" not in figure.get_supxlabel()


@pytest.mark.parametrize(("metric", "kind"), [("updates", "consumed"), ("versions", "committed")])
def test_a_curve_counts_what_had_happened_by_each_time(metric: str, kind: str) -> None:
    run = RUNS["asynchronous"]
    found: Any = curve(run, metric)
    times = run.events.filter(pl.col("kind") == kind)["time_s"].to_numpy()
    assert found[1].tolist() == [np.count_nonzero(times <= time) for time in found[0]]
