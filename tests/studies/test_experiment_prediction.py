"""What a prediction says of an experiment's runs: simulated ones, where Flower's would be."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest
from rich.console import Console

from fedasync.report.prediction import SPEEDUP, Predicted, prediction_table, predictions
from fedasync.runs.run import Run
from fedasync.studies.experiment_file import load
from fedasync.studies.experiment_prediction import predict

from .experiments import EXPERIMENT, REPORT, measure, read
from .running import changed, runs


def row(rows: list[Predicted], series: str, quantity: str) -> Predicted:
    (found,) = [one for one in rows if one.series == series and one.quantity == quantity]
    return found


def test_what_is_simulated_as_it_was_measured_has_no_error(tmp_path: Path) -> None:
    made = [measure(one) for one in read(tmp_path)]
    rows = predictions(made, made, REPORT, "FedAvg", 0.2)
    assert all(one.error in (None, 0.0) for one in rows)
    assert {one.total_variation for one in rows} == {None, 0.0}
    assert {one.within for one in rows if one.series == "FedAvg"} == {None}
    assert row(rows, "FedBuff", SPEEDUP).within is True
    assert row(rows, "FedBuff", SPEEDUP).measured.seeds == 2


def test_errors_are_relative_to_what_was_measured(tmp_path: Path) -> None:
    fast, slow = ([measure(one, s) for one in read(tmp_path / n)] for s, n in ((2.0, "a"), (3.0, "b")))
    rows = predictions(fast, slow, REPORT, "FedAvg", 0.2)
    time = row(rows, "FedBuff", "time to w 0.9")
    assert time.error == pytest.approx(0.5)
    assert time.within is False
    assert row(rows, "FedBuff", SPEEDUP).error == pytest.approx(0.0)  # all clients are slower alike
    assert row(rows, "FedBuff", "updates a second").error == pytest.approx(1 / 1.5 - 1)


def test_a_missed_target_is_said_and_never_averaged_away(tmp_path: Path) -> None:
    short = changed(EXPERIMENT, ("time_s = 200.0", "time_s = 7.0"))
    measured, predicted = (
        [measure(one) for one in read(tmp_path / n, t)] for n, t in (("a", EXPERIMENT), ("b", short))
    )
    time = row(predictions(measured, predicted, REPORT, "FedAvg", 0.2), "FedAvg", "time to w 0.9")
    assert time.measured.mean is not None
    assert (time.predicted.mean, time.error, time.within) == (None, None, None)
    assert "predicted: 2 of 2 seeds did not reach it" in time.note


def test_the_table_has_a_row_a_series_and_quantity(tmp_path: Path) -> None:
    made = [measure(one) for one in read(tmp_path)]
    table = prediction_table(predictions(made, made, REPORT, "FedAvg", 0.2))
    assert table.height == 7  # the baseline has no speed-up
    assert table.schema["within"] == pl.Boolean
    assert table.filter(pl.col("quantity") == SPEEDUP)["series"].to_list() == ["FedBuff"]


def test_clients_are_fitted_to_one_series_and_predict_the_others(tmp_path: Path) -> None:
    made = read(tmp_path)
    for one in made:
        measure(one)
    out = tmp_path / "out"
    rows = predict(load(tmp_path / "e.toml"), made, out, out / "predicted", "fedasync run e.toml", Console(quiet=True))
    assert row(rows, "FedBuff", SPEEDUP).error == pytest.approx(0, abs=1e-6)
    calibrated = (out / "predicted" / "predicted.toml").read_text()
    assert "fedavg" in calibrated.lower()
    assert "fedbuff" not in calibrated.lower()
    assert len(runs(out / "predicted")) == 4
    assert all(Run.load(run).config["run"]["cancelled_clients"] == "finish" for run in runs(out / "predicted").values())
    assert (out / "figures" / "prediction.png").is_file()
    assert pl.read_csv(out / "prediction.csv").height == len(rows)
