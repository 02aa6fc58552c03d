"""Calibration is a round trip: from known laws to a run, and from the run back to the laws."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from fedasync.runs.run import Run
from fedasync.simulation.laws import Constant, Lognormal, ShiftedExponential
from fedasync.simulation.refusals import realise
from fedasync.studies.build import build_federated
from fedasync.studies.calibrate_clients import calibrate
from fedasync.studies.client_laws import fit, slope
from fedasync.studies.errors import StudyError
from fedasync.studies.study import load

from .deployed import CONFIG, recorded, simulated, with_overhead

LAWS = [Constant(3.0), Lognormal(5.0, 0.4), Lognormal(5.0, 1.0), ShiftedExponential(2.0, 4.0)]


def account(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "calibration.json").read_text())
    return found


def predicted(folder: Path) -> dict[str, Any]:
    (plan,) = load(folder / "predicted.toml").plans([0])
    return plan.config


def own_means_s(config: dict[str, Any], seed: int) -> list[float]:
    clients = realise(build_federated({**config, "seed": seed}, "test").population, None, seed)
    return [clients.mean_work_s(client) for client in range(clients.count)]


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.kind)
def test_a_law_is_found_again_within_its_sampling_error(law: Any) -> None:
    n = 4000
    observed = [law.quantile(u) for u in np.random.default_rng(3).uniform(size=n)]
    found = fit(observed)
    assert found.law.kind == law.kind
    error = found.standard_error or 0.0
    assert error == pytest.approx(float(np.std(observed, ddof=1)) / np.sqrt(n))
    assert abs(found.mean - law.mean) <= 4 * error
    if isinstance(found.law, Lognormal):
        assert abs(found.law.sigma - law.sigma) < 4 * law.sigma / np.sqrt(2 * n)
    if isinstance(found.law, ShiftedExponential):
        assert abs(found.law.shift - law.shift) < 6 * law.scale / n
        assert abs(found.law.scale - law.scale) < 4 * law.scale / np.sqrt(n)


@pytest.mark.parametrize("values", [[2.0], [1.0, 3.0], [0.0] * 9, [5.0, 5.01, 4.99, 5.0, 5.02, 5.0]])
def test_the_law_has_the_mean_measured_and_of_little_nothing_but_that(values: list[float]) -> None:
    assert fit(values).law == Constant(float(np.mean(values)))


def test_a_slope_within_clients_is_blind_to_what_clients_are() -> None:
    client, x = np.repeat([0, 1, 2], 20), np.tile(np.arange(20.0), 3)
    noise = np.random.default_rng(1).normal(size=60)
    found = slope(x, 100.0 * client + 0.5 * x + 0.1 * noise, client)
    assert found is not None
    assert abs(found.value - 0.5) < 4 * found.standard_error
    assert found.is_told
    assert slope(np.ones(60), noise, client) is None


@pytest.fixture(scope="module")
def round_trip(tmp_path_factory: pytest.TempPathFactory) -> tuple[Run, Path]:
    folder = tmp_path_factory.mktemp("round")
    population = {**CONFIG["population"], "dropout_probability": 0.05}
    run = recorded(folder / "real", {**CONFIG, "run": {"updates": 2000}, "population": population})
    assert calibrate([folder / "real"], folder / "out") == 0
    return run, folder / "out"


def test_each_client_gets_its_own_law_and_under_its_own_number(round_trip: tuple[Run, Path]) -> None:
    run, out = round_trip
    true_s = own_means_s(run.config, 0)
    clients = account(out)["clients"]
    for client in clients:
        error = client["work"]["standard_error_s"]
        assert abs(client["work"]["mean_s"] - true_s[client["client"]]) <= 4 * error + 1e-9
    kinds = [client["work"]["kind"] for client in clients]
    assert sorted(kinds) == ["constant"] * 3 + ["lognormal"] * 3 + ["shifted_exponential"] * 4
    fitted_s = own_means_s(predicted(out), 0)
    np.testing.assert_allclose(fitted_s, [client["work"]["mean_s"] for client in clients], rtol=1e-6)


def test_failures_are_counted_with_their_error(round_trip: tuple[Run, Path]) -> None:
    _, out = round_trip
    dropout = account(out)["failures"]["dropout"]
    assert abs(dropout["value"] - 0.05) < 4 * dropout["standard_error"]
    assert predicted(out)["population"]["dropout_probability"] == pytest.approx(dropout["value"])


def test_the_study_predicts_lease_times_and_throughput_of_other_seeds(round_trip: tuple[Run, Path]) -> None:
    run, out = round_trip
    assert tomllib.loads((out / "predicted.toml").read_text())["strategy"] == run.config["strategy"]
    rates: dict[str, list[float]] = {"real": [], "predicted": []}
    for name, config in (("real", run.config), ("predicted", predicted(out))):
        for seed in range(1, 5):
            summary = simulated({k: v for k, v in config.items() if k != "targets"}, seed).summary
            rates[name].append(summary["consumed"] / summary["time_s"])
    assert np.mean(rates["predicted"]) == pytest.approx(np.mean(rates["real"]), rel=0.04)


def test_the_figure_is_there(round_trip: tuple[Run, Path]) -> None:
    assert {path.name for path in (round_trip[1] / "figures").iterdir()} == {"durations.png", "durations.svg"}


def test_several_seeds_share_one_law_and_clients_keep_their_numbers(tmp_path: Path) -> None:
    slowness = [1.0, 2.0, 4.0, 0.5]
    population = {
        "duration_s": {"kind": "lognormal", "mean": 3.0, "sigma": 0.3},
        "slowness": {"kind": "values", "values": slowness},
        "clients": 4,
    }
    config = {
        "strategy": {"name": "fedasync", "concurrency": 3},
        "run": {"updates": 300, "selection": "random_idle"},
        "population": population,
    }
    for seed in (0, 1):
        recorded(tmp_path / str(seed), config, seed)
    calibrate([tmp_path / "0", tmp_path / "1"], tmp_path / "out")
    written = tomllib.loads((tmp_path / "out" / "predicted.toml").read_text())
    assert written["study"]["seeds"] == [0, 1]
    law = written["population"]["duration_s"]
    assert (law["kind"], law["mean"]) == ("lognormal", pytest.approx(1.0))
    assert law["sigma"] == pytest.approx(0.3, abs=4 * 0.3 / np.sqrt(2 * 600))
    errors = {client["client"]: client["work"]["standard_error_s"] for client in account(tmp_path / "out")["clients"]}
    for client, mean_s in enumerate(written["population"]["slowness"]["values"]):
        assert abs(mean_s - 3.0 * slowness[client]) < 4 * errors[client]


def test_a_constant_overhead_stands_apart_and_is_of_each_client(tmp_path: Path) -> None:
    overhead = 0.5 + 0.25 * pl.col("worker")
    population = {"duration_s": {"kind": "lognormal", "mean": 3.0, "sigma": 0.8}, "clients": 4}
    config = {"strategy": {"name": "fedasync", "concurrency": 3}, "run": {"updates": 600}, "population": population}

    def slower(table: pl.DataFrame) -> pl.DataFrame:
        return table.with_columns(returned_s=pl.col("returned_s") + overhead)

    recorded(tmp_path / "real", config, change=slower)
    calibrate([tmp_path / "real"], tmp_path / "out")
    clients = account(tmp_path / "out")["clients"]
    assert [c["overhead"]["mean_s"] for c in clients] == pytest.approx([0.5, 0.75, 1.0, 1.25])
    assert [c["lease"]["constant_s"] for c in clients] == pytest.approx([0.5, 0.75, 1.0, 1.25])
    means_s = [c["work"]["mean_s"] + c["overhead"]["mean_s"] for c in clients]
    assert own_means_s(predicted(tmp_path / "out"), 0) == pytest.approx(means_s, rel=1e-6)


def test_contention_is_reported_and_not_modelled(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Groups of one to three tasks in flight; each other one costs 0.5 s."""

    def crowded(table: pl.DataFrame) -> pl.DataFrame:
        group = pl.int_range(pl.len()) // 6
        place = pl.int_range(pl.len()) % 6
        more = pl.when(place < 3).then(place).otherwise(0)
        start = 200.0 * group + pl.when(place < 3).then(0.01 * place).otherwise(20.0 * place)
        wobble = 0.02 * (pl.int_range(pl.len()) % 5)
        return table.with_columns(
            sent_s=start, work_s=pl.lit(4.0), returned_s=start + 5.0 + 0.5 * more + wobble
        ).with_columns(outcome=pl.lit("delivered"))

    recorded(tmp_path / "real", change=crowded)
    calibrate([tmp_path / "real"], tmp_path / "out")
    found = account(tmp_path / "out")["slopes"]["overhead_s_per_message_in_flight"]
    assert found["value"] == pytest.approx(0.5, abs=0.02)
    assert "one more in flight, the overhead of a message: +0.5" in (said := capsys.readouterr().out)
    assert "this is not modelled" in said


def test_bytes_cost_time_where_sizes_differ(tmp_path: Path) -> None:
    def sized(table: pl.DataFrame) -> pl.DataFrame:
        sizes = table.with_columns(sent_bytes=pl.lit(1000) * (1 + pl.int_range(pl.len()) % 3))
        return sizes.with_columns(
            returned_bytes="sent_bytes", returned_s=pl.col("returned_s") + 0.001 * 2 * pl.col("sent_bytes")
        )

    recorded(tmp_path / "real", change=sized)
    calibrate([tmp_path / "real"], tmp_path / "out")
    assert account(tmp_path / "out")["slopes"]["overhead_s_per_byte"]["value"] == pytest.approx(0.001)
    population = predicted(tmp_path / "out")["population"]
    assert population["model_bytes"] == pytest.approx(2000, rel=0.02)
    rates = population["downlink_bytes_per_second"]["values"]
    assert [population["model_bytes"] / rate for rate in rates] == pytest.approx([4.0] * len(rates), rel=0.02)


def test_silent_clients_give_a_crash_probability_and_a_time_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {
        "strategy": {"name": "fedasync", "concurrency": 3, "lease_timeout_s": 60.0},
        "run": {"updates": 400},
        "population": {
            "clients": 5,
            "duration_s": {"kind": "uniform", "low": 2.0, "high": 4.0},
            "crash_probability": 0.1,
        },
    }
    run = recorded(tmp_path / "real", config)
    without = {**run.config, "strategy": {"name": "fedasync", "concurrency": 3}, "deployment": {"task_timeout_s": 60.0}}
    (tmp_path / "real" / "config.json").write_text(json.dumps(without))
    calibrate([tmp_path / "real"], tmp_path / "out")
    crash = account(tmp_path / "out")["failures"]["crash"]
    assert abs(crash["value"] - 0.1) < 4 * crash["standard_error"]
    assert predicted(tmp_path / "out")["strategy"]["lease_timeout_s"] == 60.0
    assert "for 60 s on average" in capsys.readouterr().out


def test_what_too_little_is_known_of_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {
        "strategy": {"name": "fedasync", "concurrency": 2},
        "run": {"updates": 8},
        "population": {"clients": 6, "duration_s": {"kind": "exponential", "mean": 2.0}},
    }
    recorded(tmp_path / "real", config, change=lambda table: table.filter(pl.col("worker") < 5))
    calibrate([tmp_path / "real"], tmp_path / "out")
    said = capsys.readouterr().out
    assert "no duration is known of client" in said
    assert "too few to tell a law" in said
    assert "the log does not say when clients were connected" in said
    build_federated({k: v for k, v in predicted(tmp_path / "out").items() if k != "targets"}, "here")


def test_late_replies_count_as_leases_and_not_as_failures(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def late(table: pl.DataFrame) -> pl.DataFrame:
        slow = pl.col("returned_s") - pl.col("sent_s") > 10
        return table.with_columns(
            work_s=pl.when(~slow).then("work_s"), outcome=pl.when(slow).then(pl.lit("timeout")).otherwise("outcome")
        )

    run = recorded(tmp_path / "real", change=late)
    assert run.exchanges is not None
    count = run.exchanges.filter(pl.col("outcome") == "timeout").height
    calibrate([tmp_path / "real"], tmp_path / "out")
    assert f"of {count} replies the client's own clock is not known" in capsys.readouterr().out
    assert account(tmp_path / "out")["failures"]["crash"]["hits"] == 0
    assert sum(client["timed"] for client in account(tmp_path / "out")["clients"]) == run.exchanges.height


def test_clients_that_never_came_stay_away(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = {**CONFIG, "population": {"clients": 12, "duration_s": {"kind": "uniform", "low": 2.0, "high": 4.0}}}
    recorded(tmp_path / "real", config, change=lambda table: table.filter(pl.col("worker") != 7))
    calibrate([tmp_path / "real"], tmp_path / "out")
    assert "taken for absent: client 7" in capsys.readouterr().out
    assert predicted(tmp_path / "out")["population"]["availability"]["intervals"][7] == []


def test_what_cannot_be_calibrated_is_refused_in_one_line(tmp_path: Path) -> None:
    def refused(*folders: Path) -> str:
        with pytest.raises(StudyError) as error:
            calibrate(folders, tmp_path / "out")
        assert "\n" not in str(error.value)
        return str(error.value)

    recorded(tmp_path / "real", {**CONFIG, "run": {"updates": 30}})
    assert "no finished run here" in refused(tmp_path)
    assert "a run's folder, or a study's, would do" in refused()
    (tmp_path / "plain").mkdir()
    plain = simulated({**CONFIG, "run": {"updates": 30}})
    plain.save(tmp_path / "plain")
    assert "no exchanges here" in refused(tmp_path / "plain")
    recorded(tmp_path / "empty", {**CONFIG, "run": {"updates": 30}}, change=lambda table: table.head(0))
    assert "its exchanges are empty" in refused(tmp_path / "empty")
    lost = {**CONFIG, "run": {"updates": 30}}
    recorded(tmp_path / "lost", lost, change=lambda table: table.with_columns(returned_s=pl.lit(None, pl.Float64)))
    assert "no task came back with a duration" in refused(tmp_path / "lost")
    other = {**CONFIG, "strategy": {"name": "fedasync", "concurrency": 6}, "run": {"updates": 30}}
    recorded(tmp_path / "other", other)
    assert "runs of one strategy would do" in refused(tmp_path / "real", tmp_path / "other")
    larger = {**CONFIG, "strategy": {**CONFIG["strategy"], "buffer_size": 5}, "run": {"updates": 30}}
    recorded(tmp_path / "larger", larger)
    assert "its [strategy] is not that of" in refused(tmp_path / "real", tmp_path / "larger")
    none = {**CONFIG, "run": {"time_s": 1.0}}
    recorded(tmp_path / "none", none)
    assert "an empty run" in refused(tmp_path / "none")


def test_an_overhead_that_varies_is_part_of_the_law(tmp_path: Path) -> None:
    spread = 0.5 + 2.5 * ((pl.int_range(pl.len()) * 0.618) % 1)
    recorded(tmp_path / "real", change=with_overhead(spread))
    calibrate([tmp_path / "real"], tmp_path / "out")
    assert all(client["lease"]["constant_s"] == 0 for client in account(tmp_path / "out")["clients"])
