"""Rankings against the runs they come from: order, ties with the best, one virtual time, missed targets."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import numpy as np
import polars as pl
import pytest
from matplotlib.figure import Figure

from fedasync.report import Report, ranking, ranking_table, ranking_tables, readable_ranking
from fedasync.report.arrangement import arrange
from fedasync.report.comparisons import lower_is_better, standing
from fedasync.runs.run import Run

from .synthetic import cohort
from .test_figures import drawn, texts

REPORT = Report(baseline="FedAvg")


def test_ranks_follow_the_means_at_one_time(study: list[Run]) -> None:
    table = ranking_table(study, REPORT)
    assert table.height == 6
    for _, facet in table.group_by("tail"):
        assert facet["rank"].to_list() == [1, 2, 3]
        assert facet["value"].to_list() == sorted(facet["value"], reverse=True)
        times = facet.drop_nulls("rank_by_time").sort("rank_by_time")["time_s"].to_list()
        assert times == sorted(times)
        assert facet.filter(pl.col("rank") == 1)["from_best"].null_count() == 1
    never = table.filter(pl.col("strategy") == "FedAsync")
    assert never["rank_by_time"].null_count() == 2
    assert set(never["missed"]) == {3}
    assert set(never["over_fastest_bound"]) == {"≤"}


def test_distances_from_the_best_are_paired(study: list[Run]) -> None:
    row = ranking_table(study, REPORT).filter(pl.col("tail") == "1.2").row(2, named=True)
    best = ranking_table(study, REPORT).filter(pl.col("tail") == "1.2").row(0, named=True)["strategy"]
    finals = {
        name: {r.seed: r.summary["final"]["accuracy"] for r in study if r.labels == {"strategy": name, "tail": "1.2"}}
        for name in (row["strategy"], best)
    }
    expected = np.mean([finals[row["strategy"]][seed] - finals[best][seed] for seed in range(3)])
    assert row["from_best"] == pytest.approx(expected)
    assert row["from_best_low"] < row["from_best"] < row["from_best_high"] < 0


def test_copies_of_one_series_are_tied_and_keep_the_study_s_order() -> None:
    runs = {name: [cohort(seed=seed, end_s=30.0) for seed in range(4)] for name in ("b", "a", "c")}
    table = ranking_table(runs)
    assert table["strategy"].to_list() == ["b", "a", "c"]
    assert table["tied"].to_list() == [None, True, True]
    assert readable_ranking(runs)["rank"].to_list() == ["1", "2=", "3="]
    assert "0.000 [0.000, 0.000], within noise" in readable_ranking(runs)["from the best"][1].replace("+", "")


def test_one_seed_ranks_but_ties_nothing() -> None:
    table = ranking_table({name: cohort(seed=0, end_s=30.0, gain=gain) for name, gain in (("a", 1.0), ("b", 2.0))})
    assert table["strategy"].to_list() == ["b", "a"]
    assert table["tied"].null_count() == 2


def test_values_are_compared_where_the_first_run_ended() -> None:
    long, short = (
        cohort(seed=0, end_s=60.0, labels={"strategy": "long"}),
        cohort(seed=0, end_s=30.0, labels={"strategy": "short"}),
    )
    at = standing(arrange([long, short]), (), "accuracy")
    assert at.time_s == 30.0
    then = long.metrics.filter(pl.col("time_s") <= 30.0)["value"][-1]
    assert at.values["long"] == {0: then}
    updates = standing(arrange([long, short]), (), "updates").values["long"][0]
    assert updates == long.events.filter((pl.col("kind") == "consumed") & (pl.col("time_s") <= 30.0)).height


def test_lower_can_be_better(study: list[Run]) -> None:
    up = ranking_table(study, REPORT)
    down = ranking_table(study, replace(REPORT, better="lower"))
    for tail in ("0.3", "1.2"):
        here = pl.col("tail") == tail
        assert down.filter(here)["strategy"].to_list() == up.filter(here)["strategy"].to_list()[::-1]
    shown = arrange(study)
    names = ("test_loss", "distance", "accuracy", "updates", "lossless")
    assert [lower_is_better(shown, name) for name in names] == [True, True, False, False, False]
    assert not lower_is_better(arrange(study, better="higher"), "loss")


def test_a_diverged_series_comes_last_without_a_rank() -> None:
    made = cohort(seed=0, end_s=30.0)
    tables = {"events": made.events, "metrics": made.metrics.with_columns(value=pl.lit(float("nan")))}
    bad = Run({}, made.summary, tables)
    table = ranking_table({"bad": bad, "good": cohort(seed=0, end_s=30.0)})
    assert table["strategy"].to_list() == ["good", "bad"]
    assert table["rank"].to_list() == [1, None]


def test_the_figure_has_a_panel_a_facet_a_row_a_series_and_the_ranks(study: list[Run]) -> None:
    for by in ("value", "time"):
        figure = drawn(ranking(study, REPORT, by=by, command="make sim EXP=x"))  # type: ignore[arg-type]
        assert [ax.get_title("left") for ax in figure.axes] == ["tail = 0.3", "tail = 1.2"]
        for ax in figure.axes:
            labels = [label.get_text() for label in ax.get_yticklabels()]
            assert {label.split()[0] for label in labels} == {"FedAvg", "FedBuff", "FedAsync"}
            assert labels[0].split()[1] == "1"
        assert "make sim EXP=x" in figure.get_supxlabel()
    assert texts(figure).count("not reached") == 2


def test_many_series_and_facets_can_be_drawn_without_overlap() -> None:
    runs = [
        cohort(seed=seed, end_s=4.0, gain=1 + i / 9, labels={"strategy": f"a long name of strategy {i}", "tail": tail})
        for i in range(20)
        for tail in "abcdef"
        for seed in range(2)
    ]
    figure = drawn(ranking(runs, Report(baseline="a long name of strategy 3")))
    assert len(figure.axes) == 6
    assert_no_labels_overlap(figure)


def assert_no_labels_overlap(figure: Figure) -> None:
    for ax in figure.axes:
        boxes = [label.get_window_extent() for label in ax.get_yticklabels()]
        for above, below in pairwise(boxes):
            assert below.y1 <= above.y0 + 1.0
        assert min(box.x0 for box in boxes) >= 0
        for other in figure.axes:
            right = max(text.get_window_extent().x1 for text in other.texts)
            same_row = abs(other.get_position().y0 - ax.get_position().y0) < 1e-6
            if other is not ax and same_row and other.get_position().x0 < ax.get_position().x0:
                assert right <= min(box.x0 for box in boxes) + 1.0


def test_timing_only_runs_rank_by_updates_and_have_no_times(timing_study: list[Run]) -> None:
    table = ranking_table(timing_study, REPORT)
    assert "rank_by_time" not in table.columns
    drawn(ranking(timing_study, REPORT))
    with pytest.raises(ValueError, match="by time needs a target"):
        ranking(timing_study, REPORT, by="time")
    assert len(ranking_tables(timing_study, REPORT)) == 1


def test_a_series_that_a_facet_lacks_is_not_ranked_there(study: list[Run]) -> None:
    some = [run for run in study if run.labels != {"strategy": "FedBuff", "tail": "1.2"}]
    table = ranking_table(some, REPORT)
    assert table.filter(pl.col("tail") == "1.2")["strategy"].to_list().count("FedBuff") == 0
    drawn(ranking(some, REPORT))
    drawn(ranking([run for run in study if run.labels != {"strategy": "FedAvg", "tail": "1.2"}], REPORT, by="time"))
