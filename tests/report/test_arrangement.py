"""Where runs stand in a report, and what one is told when a name does not exist."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from pydantic import TypeAdapter, ValidationError

from fedasync.report import Report, metric_over_time, speedup, speedup_by_axis, timeline
from fedasync.report.arrangement import arrange
from fedasync.runs.run import Run

from .synthetic import asynchronous, cohort


def test_series_and_facets_keep_the_study_s_order(study: list[Run]) -> None:
    found = arrange(study)
    assert found.series == ("FedAvg", "FedBuff", "FedAsync")
    assert found.facet_axes == ("tail",)
    assert found.facets == (("0.3",), ("1.2",))
    assert list(found.at("FedBuff", ("1.2",))) == [0, 1, 2]
    assert found.at("FedBuff", ("7",)) == {}
    assert found.facet_title(("1.2",)) == "tail = 1.2"


def test_another_axis_can_be_the_series(study: list[Run]) -> None:
    found = arrange(study, Report(series="tail"))
    assert found.series == ("0.3", "1.2")
    assert found.facet_axes == ("strategy",)


def test_named_facets_come_first() -> None:
    runs = [
        cohort(end_s=5, labels={"strategy": "FedAvg", "a": a, "b": b}, timing_only=True)
        for a in ("1", "2")
        for b in ("x", "y")
    ]
    assert arrange(runs).facets == (("1", "x"), ("1", "y"), ("2", "x"), ("2", "y"))
    assert arrange(runs, Report(facets=("b",))).facets == (("x", "1"), ("x", "2"), ("y", "1"), ("y", "2"))


def test_a_study_without_a_strategy_axis_uses_the_runs_own() -> None:
    runs = [cohort(end_s=5, timing_only=True), asynchronous(end_s=5, timing_only=True)]
    found = arrange(runs)
    assert found.series == ("fedavg", "fedbuff")
    assert found.facets == ((),)


def test_labels_of_one_s_own(study: list[Run]) -> None:
    at = {
        tail: [run for run in study if run.labels == {"strategy": "FedBuff", "tail": tail}] for tail in ("0.3", "1.2")
    }
    told_apart = arrange({"mild": at["0.3"], "wild": at["1.2"][0]})
    assert told_apart.series == ("mild", "wild")
    assert told_apart.facets == ((),)
    varying = arrange({"both": [*at["0.3"], *at["1.2"]]})
    assert varying.facet_axes == ("tail",)


def test_metric_and_target_defaults(study: list[Run], timing_study: list[Run]) -> None:
    assert arrange(study).metric() == "accuracy"
    assert str(arrange(study).target()) == "accuracy 0.8"
    assert arrange(timing_study).metric() == "updates"
    assert arrange(timing_study).target() is None


def test_one_of_several_targets_can_be_chosen() -> None:
    run = cohort(end_s=60.0, targets=(0.3, 0.5))
    first, second = arrange([run]).target(), arrange([run], target=0.5).target()
    assert first is not None
    assert second is not None
    assert first.entry(run) == run.summary["targets"][0]
    assert second.entry(run) == run.summary["targets"][1]


@pytest.mark.parametrize(
    ("draw", "wrong", "named"),
    [
        (metric_over_time, {"series": "stratgy"}, ["report.series", "'stratgy'", "'strategy', 'tail'"]),
        (metric_over_time, {"facets": ("K",)}, ["report.facets", "'K'", "'tail'"]),
        (metric_over_time, {"metric": "acuracy"}, ["report.metric", "'acuracy'", "'accuracy'", "'versions'"]),
        (metric_over_time, {"target": 0.99}, ["report.target", "0.99", "0.8"]),
        (speedup, {"baseline": "FedSGD"}, ["report.baseline", "'FedSGD'", "'FedAvg', 'FedBuff', 'FedAsync'"]),
        (speedup, {}, ["report.baseline", "'FedAvg', 'FedBuff', 'FedAsync'"]),
        (speedup_by_axis, {"baseline": "FedAvg"}, ["report.x_axis", "'tail'"]),
        (speedup_by_axis, {"baseline": "FedAvg", "x_axis": "K"}, ["report.x_axis", "'K'", "'tail'"]),
        (timeline, {"timeline_facet": ("9",)}, ["report.timeline_facet", "(9)", "0.3; 1.2"]),
    ],
)
def test_unknown_names_are_refused_in_one_line(
    study: list[Run], draw: Callable[..., Any], wrong: dict[str, Any], named: list[str]
) -> None:
    with pytest.raises(ValueError, match=r"^report\.") as caught:
        draw(study, Report(**wrong))
    message = str(caught.value)
    assert "\n" not in message
    for name in named:
        assert name in message


def test_runs_in_one_place_and_no_runs_are_refused(study: list[Run]) -> None:
    with pytest.raises(ValueError, match="two runs of seed 0 at"):
        arrange([study[0], study[0]])
    with pytest.raises(ValueError, match="no runs"):
        arrange([])


def test_the_toml_table_is_validated() -> None:
    table = {"figures": ["speedup", "closed_forms"], "baseline": "FedAvg", "facets": ["tail"], "timeline_s": [0, 10]}
    report = TypeAdapter(Report).validate_python(table)
    assert report.figures == ("speedup", "closed_forms")
    assert report.timeline_s == (0.0, 10.0)
    for wrong, words in (
        ({"figures": ["speed"]}, "speedup"),
        ({"figures": ["speedup"]}, "report.baseline"),
        ({"figures": ["speedup_by_axis"], "baseline": "a"}, "report.x_axis"),
        ({"baselin": "FedAvg"}, "baselin"),
        ({"timeline_s": [5, 5]}, "report.timeline_s"),
        ({"timeline_lanes": 0}, "report.timeline_lanes"),
        ({"x_axis": "strategy"}, "report.series"),
    ):
        with pytest.raises(ValidationError, match=words):
            TypeAdapter(Report).validate_python(wrong)


def test_names_can_be_checked_before_any_run() -> None:
    report = Report(figures=("speedup",), baseline="FedAvg")
    report.check({"strategy": ["FedAvg", "FedFa"]})
    with pytest.raises(ValueError, match=r"report\.baseline.*'FedFa'"):
        report.check({"strategy": ["FedFa"]})
