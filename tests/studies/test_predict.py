"""Prediction on simulated ground: what is fitted to a synchronous run says how runs with staleness go."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedasync.report.prediction import SPEEDUP
from fedasync.report.rollout_numbers import RATE, SERVERS, STEP, TRAINER, numbers
from fedasync.report.rollout_prediction import rollout_predictions
from fedasync.runs.busy_servers import idle_share
from fedasync.runs.run import Run
from fedasync.studies.calibrate_command import calibrate
from fedasync.studies.errors import StudyError
from fedasync.studies.predict_command import PREDICTED, predict
from fedasync.studies.predict_command import simulated as predicted_runs

from .deployed import recorded as deployed
from .rollout_runs import config, recorded, simulated

OF = config(("cluster.decoding.max_running", 48), ("run", {"versions": 40, "warm_up_versions": 4}))


def areal(eta: int) -> dict[str, object]:
    return {"name": "areal", "batch": 8, "eta": eta}


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    room = tmp_path_factory.mktemp("room")
    recorded(room / "run", OF)
    calibrate([room / "run"], room / "fitted")
    return room


@pytest.mark.parametrize("eta", [0, 1, 4])
def test_other_bounds_are_predicted_from_the_synchronous_run(room: Path, eta: int) -> None:
    change = f'strategy={{ name = "areal", batch = 8, eta = {eta} }}'
    (found,) = predicted_runs(room / "fitted" / PREDICTED, [change], room / str(eta), "test")
    real, sim = numbers(simulated({**OF, "strategy": areal(eta)})), numbers(found)
    for name in (STEP, RATE):
        assert sim[name] == pytest.approx(real[name], rel=0.02), name
    for name in (TRAINER, SERVERS):
        assert sim[name] == pytest.approx(real[name], abs=0.01), name


def test_the_command_predicts_and_says_so(room: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    change = 'strategy={ name = "areal", batch = 8, eta = 1 }'
    assert predict([room / "run"], [change], tmp_path / "out") == 0
    said = capsys.readouterr().out
    for word in (STEP, RATE, TRAINER, SERVERS, "staleness, predicted: 0: ", "contention is not modelled"):
        assert word in said
    assert len(list((tmp_path / "out" / "runs").glob("*/summary.json"))) == 1
    before = (tmp_path / "out" / "predicted.toml").read_bytes()
    assert predict([room / "run"], [change], tmp_path / "out") == 0  # nothing is made again
    assert (tmp_path / "out" / "predicted.toml").read_bytes() == before


def test_clients_are_predicted_elsewhere(tmp_path: Path) -> None:
    deployed(tmp_path / "run")
    with pytest.raises(StudyError, match="a run of federated clients"):
        predict([tmp_path / "run"], [], tmp_path / "out")


def labelled(run: Run, label: str) -> Run:
    run.summary["labels"] = {"strategy": label}
    return run


def test_rows_tell_errors_where_there_is_something_to_tell() -> None:
    small = config(("run", {"versions": 8}))
    slower = config(("run", {"versions": 8}), ("cluster.trainer.fixed_s", 0.24))
    real = [
        labelled(simulated({**of, "strategy": strategy}, seed), label)
        for seed in (0, 1)
        for of, label, strategy in ((small, "sync", small["strategy"]), (small, "η = 1", areal(1)))
    ]
    sim = [
        labelled(simulated({**of, "strategy": strategy}, seed), label)
        for seed in (0, 1)
        for of, label, strategy in ((small, "sync", small["strategy"]), (slower, "η = 1", areal(1)))
    ]
    rows = {(row.series, row.quantity): row for row in rollout_predictions(real, sim, "strategy", "sync", 0.001)}
    assert rows["sync", STEP].error == pytest.approx(0, abs=1e-12)
    assert rows["sync", STEP].within is None
    assert rows["sync", STEP].note == "fitted"
    speed, step = rows["η = 1", SPEEDUP], rows["η = 1", STEP]
    assert (speed.within, step.within) == (False, False)
    assert step.error is not None
    assert step.error > 0.001
    base = [numbers(run)[STEP] for run in real if run.labels["strategy"] == "sync"]
    own = [numbers(run)[STEP] for run in real if run.labels["strategy"] == "η = 1"]
    product = (base[0] / own[0]) * (base[1] / own[1])  # type: ignore[operator]
    assert speed.measured.mean == pytest.approx(product**0.5)
    assert rows["η = 1", TRAINER].error is None
    assert "points" in rows["η = 1", TRAINER].note
    assert all(row.total_variation is None or 0 <= row.total_variation <= 1 for row in rows.values())
    with pytest.raises(ValueError, match="no run has the label 'x'"):
        rollout_predictions(real, sim, "strategy", "x", 0.1)


def test_idle_servers_by_hand() -> None:
    """One server busy from 1 to 3 and from 2 to 4, and from 6 on; the other never: of 2 × 8 s, 11 are idle."""
    import polars as pl

    rollouts = pl.DataFrame({"server": [0, 0, 0], "start_s": [1.0, 2.0, 6.0], "end_s": [3.0, 4.0, None]})
    run = Run({}, {"seed": 0}, {"rollouts": rollouts})
    assert idle_share(run, 2, 0.0, 8.0) == pytest.approx(11 / 16)
    assert idle_share(run, 1, 2.0, 5.0) == pytest.approx(1 / 3)
    assert idle_share(run, 1, 5.0, 5.0) is None
