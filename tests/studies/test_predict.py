"""Prediction on simulated ground: what is fitted to a synchronous run says how runs with staleness go."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from fedasync.report.prediction import SPEEDUP
from fedasync.report.rollout_numbers import RATE, SERVERS, STEP, TRAINER, numbers
from fedasync.report.rollout_prediction import rollout_predictions
from fedasync.runs.busy_servers import servers_s
from fedasync.runs.lease_arrays import lease_arrays
from fedasync.runs.run import Run
from fedasync.runs.time_shares import SERVERS as SHARES_OF_SERVERS
from fedasync.runs.time_shares import measured_s, time_shares
from fedasync.strategies import ROLLOUTS, STRATEGIES
from fedasync.studies.calibrate_command import calibrate
from fedasync.studies.errors import StudyError, keys_of
from fedasync.studies.predict_command import PREDICTED, predict
from fedasync.studies.predict_command import simulated as predicted_runs
from fedasync.studies.predicted_changes import check_changes

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


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        (
            ["strategy.eta=4"],
            "--set strategy.eta=4: 'synchronous_rl' has no key 'eta'; --set strategy.name=areal (or verl_bounded) "
            "beside it would do",
        ),
        (
            ["strategy.staleness_threshold=0.5", "run.versions=3"],
            "--set strategy.staleness_threshold=0.5: 'synchronous_rl' has no key 'staleness_threshold'; --set "
            "strategy.name=verl beside it would do",
        ),
        (
            ["strategy.batc=4"],
            "--set strategy.batc=4: 'synchronous_rl' has no key 'batc'; did you mean 'batch'? (known: batch, ",
        ),
        (
            ["strategy.name=areal", "strategy.eta=x"],
            '--set strategy.name=areal --set strategy.eta=x: strategy.eta: got "x"; an integer would do',
        ),
        (
            ["strategy.name=verl"],
            "--set strategy.name=verl: 'verl' has no key 'batch', which the recorded run's 'synchronous_rl' has; the "
            "whole table would do, as in --set 'strategy={ name = \"verl\" }' (keys: mini_batch, ",
        ),
        (
            ['strategy={ name = "areal", batch = 8, mini_batch = 2 }'],
            "--set strategy={ name = \"areal\", batch = 8, mini_batch = 2 }: 'areal' has no key 'mini_batch'; did you",
        ),
        (["strategy=3"], "--set strategy=3: strategy: got 3; a table would do"),
        (["strategy.name=fedavg"], "--set strategy.name=fedavg: strategy.name: 'fedavg' says how models of federated"),
        (["processes.workers=2"], "--set processes.workers=2: a prediction has [cluster] in place of [processes]; "),
        (["strategy.eta"], "--set strategy.eta: write it as dotted.key=value"),
    ],
)
def test_a_change_of_the_strategy_that_is_none_is_told_before_anything_is_fitted(
    room: Path, tmp_path: Path, changes: list[str], said: str
) -> None:
    with pytest.raises(StudyError) as refused:
        predict([room / "run"], changes, tmp_path / "out")
    assert str(refused.value).startswith(said)
    assert not (tmp_path / "out").exists()


def test_every_key_of_a_row_is_accepted_beside_its_name() -> None:
    """What the hint says would do does, for each key that some row has and the synchronous one has not."""
    recorded = {"name": "synchronous_rl", "batch": 8}
    own, tried = keys_of(STRATEGIES["synchronous_rl"]), 0
    for row in ROLLOUTS:
        for key in set(keys_of(row)) - set(own):
            with pytest.raises(StudyError, match="beside it would do") as refused:
                check_changes(recorded, [f"strategy.{key}=1"])
            named = str(refused.value).split("strategy.name=")[1].split(" ")[0]
            assert key in keys_of(STRATEGIES[named])
            tried += 1
    assert tried > 10


def test_other_changes_are_told_by_the_command_line_and_not_by_a_file(room: Path, tmp_path: Path) -> None:
    with pytest.raises(StudyError) as refused:
        predict([room / "run"], ["cluster.generation_gpus=0"], tmp_path / "out")
    assert str(refused.value) == (
        "--set cluster.generation_gpus=0: cluster: generation_gpus must be an integer ≥ 1, got 0"
    )


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


@pytest.mark.parametrize(
    ("changes", "exact"),
    [
        ((), True),
        ((("cluster.generation_gpus", 2),), True),
        ((("cluster.trainer.evaluate_s", 0.5), ("run.evaluate_every", 4)), True),
        ((("strategy", areal(1)),), False),
        ((("strategy", areal(4)),), False),
    ],
)
def test_the_tables_of_a_run_give_the_shares_that_the_simulation_counted(
    tmp_path: Path, changes: tuple[tuple[str, Any], ...], exact: bool
) -> None:
    """The simulator counts by what its servers are at, of a real run the tables tell; one timeline, the same shares.

    Where weights interrupt answers the iterations of this test know nothing of it: there only the idle time is told.
    """
    of = config(("run", {"versions": 30, "warm_up_versions": 3}), *changes)
    run = recorded(tmp_path, of)
    assert run.rollouts is not None
    assert run.iterations is not None
    span = measured_s(run.metrics, 3)
    assert span is not None
    spent = servers_s(lease_arrays(run.events), run.metrics, run.rollouts, run.iterations, *span)
    found = time_shares(run.metrics, spent, of["cluster"]["generation_gpus"], 3)
    counted = run.summary["shares"]
    assert found["trainer"] == counted["trainer"]
    assert (counted["trainer"]["evaluating"] > 0) == ("evaluate_every" in of["run"])
    for what in SHARES_OF_SERVERS if exact else ("idle",):
        assert found["servers"][what] == pytest.approx(counted["servers"][what], abs=1e-9 if exact else 2e-3), what
    assert (numbers(run)[TRAINER], numbers(run)[SERVERS]) == (counted["trainer"]["waiting"], counted["servers"]["idle"])


def test_a_foreign_folder_is_not_written_into(room: Path, tmp_path: Path) -> None:
    (tmp_path / "foreign").mkdir()
    (tmp_path / "foreign" / "notes.txt").write_text("mine")
    (tmp_path / "afile").write_text("")
    for out, said in (("foreign", "has 'notes.txt' in it"), ("afile", "is a file")):
        with pytest.raises(StudyError, match=said):
            predict([room / "run"], [], tmp_path / out)
        with pytest.raises(StudyError, match=said):
            calibrate([room / "run"], tmp_path / out)
    assert [each.name for each in (tmp_path / "foreign").iterdir()] == ["notes.txt"]
