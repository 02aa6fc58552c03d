"""Rankings against the runs they come from: order, ties with the best, one virtual time, missed targets, divergence."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import numpy as np
import polars as pl
import pytest
import scipy.stats
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.figure import Figure

from fedasync.report import Report, ranking, ranking_table, ranking_tables, readable_ranking
from fedasync.report.arrangement import arrange
from fedasync.report.comparisons import differences, lower_is_better, speedups, standing
from fedasync.report.measures import times_s
from fedasync.report.paired import Missed
from fedasync.runs.run import Run

from .synthetic import cohort
from .test_figures import drawn, texts

REPORT = Report(baseline="FedAvg")


def diverging(run: Run, at_s: float) -> Run:
    """The run as it would stand had a server step at ``at_s`` made NaN: log, evaluations and clock end there."""
    kept = {name: table.filter(pl.col("time_s") <= at_s) for name, table in run.tables.items()}
    values = kept["metrics"]["value"]
    targets = [
        entry if (entry["reached_s"] or math.inf) <= at_s else {**entry, "reached_s": None, "reached_updates": None}
        for entry in run.summary["targets"]
    ]
    about = {
        "ended": "diverged: the step to version 3 made 1 of 10 parameters NaN",
        "time_s": at_s,
        "targets": targets,
        "final": {"accuracy": values[-1]},
        "best": {"accuracy": values.max()},
    }
    return Run({}, {**run.summary, **about}, kept)


def reaching(*times_s: float | None, diverged: float | None = None) -> list[Run]:
    """Runs of 60 s that reach the target when they are said to, None for never, the last of them diverging if so."""
    runs = []
    for seed, time_s in enumerate(times_s):
        made = cohort(seed=seed, end_s=60.0)
        targets = [{"metric": "accuracy", "value": 0.8, "reached_s": time_s, "reached_updates": time_s and 1}]
        runs.append(Run({}, {**made.summary, "targets": targets}, made.tables))
    return runs if diverged is None else [*runs[:-1], diverging(runs[-1], diverged)]


def test_ranks_follow_the_means_at_one_time(study: list[Run]) -> None:
    table = ranking_table(study, REPORT)
    assert table.height == 6
    for _, facet in table.group_by("tail"):
        assert facet["rank"].to_list() == [1, 2, 3]
        assert facet["value"].to_list() == sorted(facet["value"], reverse=True)
        by_time = facet.drop_nulls("rank_by_time").sort("rank_by_time")
        times = list(zip(by_time["missed"], by_time["time_s"], strict=True))
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


def test_the_one_virtual_time_is_that_of_the_runs_that_did_not_diverge() -> None:
    good, other = (cohort(seed=0, end_s=30.0, labels={"strategy": name}) for name in ("good", "other"))
    cut = diverging(other, 5.0)
    last = pl.DataFrame([(5.0, 1, "accuracy", float("nan"))], schema=cut.metrics.schema, orient="row")
    bad = Run({}, cut.summary, {**cut.tables, "metrics": pl.concat([cut.metrics, last])})
    at = standing(arrange([good, bad]), (), "accuracy")
    assert at.time_s == 30.0
    assert at.diverged == {"good": (), "other": (0,)}
    # Its last finite value stands for it.
    assert at.values["other"] == {0: other.metrics.filter(pl.col("time_s") <= 5.0)["value"][-1]}
    found = differences(at, "other")["good"].found
    assert found.mean is not None
    assert found.note() == "baseline: 1 of 1 diverged"
    assert standing(arrange([diverging(good, 12.0), bad]), (), "accuracy").time_s == 5.0


@settings(max_examples=20, deadline=None)
@given(at_s=st.floats(0.5, 29.5), better=st.sampled_from(["higher", "lower"]), seed=st.integers(0, 3))
def test_a_series_that_diverged_never_ranks_above_one_that_did_not(at_s: float, better: str, seed: int) -> None:
    """Lower being better, the value of an early time is the best there is."""
    runs = {name: [cohort(seed=seed, end_s=30.0, gain=gain)] for name, gain in (("good", 0.3), ("bad", 3.0))}
    runs["bad"] = [diverging(runs["bad"][0], at_s)]
    table = ranking_table(runs, Report(better=better))  # type: ignore[arg-type]
    assert table["strategy"].to_list() == ["good", "bad"]
    assert table["rank"].to_list() == [1, 2]
    assert table["diverged"].to_list() == [0, 1]
    assert table["at_s"].to_list() == [30.0, 30.0]
    told = readable_ranking(runs)
    assert told["accuracy"][1].endswith(" (1 of 1 diverged)")
    assert "diverged" not in told["accuracy"][0]


def test_fewer_missed_seeds_rank_before_shorter_times() -> None:
    runs = {"quick": reaching(10.0, 10.0, None), "sure": reaching(50.0, 51.0, 52.0)}
    table = ranking_table(runs)
    times = dict(zip(table["strategy"], table["time_s"], strict=True))
    assert times["quick"] == pytest.approx(6000 ** (1 / 3))
    assert times["quick"] < times["sure"]
    ranks = dict(zip(table["strategy"], table["rank_by_time"], strict=True))
    assert ranks == {"sure": 1, "quick": 2}


def test_a_run_that_diverged_never_reaches_the_target_and_has_no_stand_in() -> None:
    runs = {
        "wild": reaching(8.0, 9.0, None, diverged=1.0),
        "missed": reaching(20.0, 30.0, None),
        "sure": reaching(50.0, 51.0, 52.0),
    }
    table = {row["strategy"]: row for row in ranking_table(runs).iter_rows(named=True)}
    assert {name: row["rank_by_time"] for name, row in table.items()} == {"sure": 1, "missed": 2, "wild": 3}
    assert table["wild"]["time_s"] == pytest.approx(scipy.stats.gmean([8.0, 9.0]))
    assert (table["wild"]["missed"], table["wild"]["diverged"]) == (1, 1)
    # In the ratio it has missed the target for as long as the others ran.
    assert table["wild"]["over_fastest_bound"] == "≤"
    assert table["wild"]["over_fastest"] == pytest.approx(scipy.stats.gmean([50 / 8, 51 / 9, 52 / 60]))
    told = {row["strategy"]: row for row in readable_ranking(runs).iter_rows(named=True)}
    assert told["wild"]["time to accuracy 0.8 (s)"] == "≥ 8.485 (1 of 3 missed, 1 of these diverged)"
    assert told["missed"]["time to accuracy 0.8 (s)"] == "≥ 33.02 (1 of 3 missed)"


@settings(max_examples=20, deadline=None)
@given(sooner=st.floats(0.5, 60.0), later=st.floats(0.5, 60.0))
def test_diverging_sooner_makes_nobody_faster(sooner: float, later: float) -> None:
    found = []
    for at_s in (sooner, later):
        shown = arrange({"base": reaching(20.0, 30.0), "wild": reaching(8.0, None, diverged=at_s)})
        found.append(speedups(shown, (), "base", shown.target())["wild"].found)
        assert found[-1].note() == "1 of 2 seeds did not reach, 1 of these diverged"
        back = speedups(shown, (), "wild", shown.target())["base"].found
        assert (back.bound, back.baseline_diverged) == ("≥", 1)
    assert found[0] == found[1]
    assert found[0].ratio == pytest.approx((20 / 8 * 30 / 60) ** 0.5)


def test_a_target_reached_before_the_run_diverged_is_reached() -> None:
    shown = arrange({"wild": reaching(8.0, 9.0, diverged=20.0), "base": reaching(10.0, None)})
    assert times_s(shown, "wild", (), shown.target()) == {0: 8.0, 1: 9.0}
    assert times_s(shown, "base", (), shown.target()) == {0: 10.0, 1: Missed(60.0)}


def test_a_series_that_always_diverged_has_no_time() -> None:
    table = ranking_table({"wild": reaching(None, diverged=2.0), "sure": reaching(50.0)})
    wild = table.filter(pl.col("strategy") == "wild").row(0, named=True)
    assert (wild["rank_by_time"], wild["time_s"], wild["missed"]) == (None, None, 1)


def test_the_figure_names_who_diverged() -> None:
    runs = {"wild": reaching(8.0, 9.0, None, diverged=1.0), "sure": reaching(50.0, 51.0, 52.0)}
    by_value, by_time = (drawn(ranking(runs, by=by)) for by in ("value", "time"))  # type: ignore[arg-type]
    for figure in (by_value, by_time):
        small = " ".join(figure.get_supxlabel().split())
        assert "Diverged (" in small
        assert "wild (1 of 3)." in small
        assert "sure (" not in small
    assert any(text.endswith(", 1/3 diverged") for text in texts(by_value))
    assert "≥ 8.485 s, 1/3 missed, 1/3 diverged" in texts(by_time)
    assert "Diverged" not in drawn(ranking({"sure": runs["sure"], "other": runs["sure"]})).get_supxlabel()


def test_pairs_that_agree_are_neither_tied_nor_clear() -> None:
    runs = {"fast": reaching(10.0, 10.0, 10.0), "slow": reaching(20.0, 20.0, 20.0)}
    table = ranking_table(runs).sort("rank_by_time")
    assert table["rank_by_time"].to_list() == [1, 2]
    assert table["tied_by_time"].to_list() == [None, None]
    assert (table["over_fastest_low"][1], table["over_fastest_p_holm"][1]) == (None, None)
    told = readable_ranking(runs).filter(pl.col("strategy") == "slow")
    assert told["over the fastest"][0] == "0.500× (no interval: 3 pairs agree)"
    assert "A dot without a bar" in " ".join(drawn(ranking(runs, by="time")).get_supxlabel().split())


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
