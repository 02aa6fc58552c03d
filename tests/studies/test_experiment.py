"""Experiments: what is refused, the order of runs, what a prediction says of them; and some on real processes.

``measured`` runs that need no process are simulated ones, in the places where Flower's would be.
"""

from __future__ import annotations

import re
import signal
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import polars as pl
import psutil  # type: ignore[import-untyped]
import pytest
from rich.console import Console

from fedasync.flower.server_log import last_word
from fedasync.report.prediction import SPEEDUP, Predicted, prediction_table, predictions
from fedasync.report.spec import Report
from fedasync.runs.exchanges import exchanges_of_log
from fedasync.runs.run import Run
from fedasync.simulation import simulate
from fedasync.studies import experiment
from fedasync.studies.build import build_federated
from fedasync.studies.deploy_local import deploy_local
from fedasync.studies.errors import StudyError
from fedasync.studies.experiment_file import Federation, load
from fedasync.studies.experiment_prediction import predict
from fedasync.studies.flower_run import FailedRunError, LostFederationError
from fedasync.studies.measurements import Measurement, measurements
from fedasync.studies.study import RunPlan

from .running import PROGRAM, apart, changed, moments, runs, summary

EXPERIMENT = """
[study]
title = "small"
seeds = 2

[federation]
clients = 4

[deployment]
work_s_by_client = [1.0, 1.0, 2.0, 6.0]

[run]
time_s = 200.0
evaluate_every_s = 1.0
stop_at_target = true

[workload]
kind = "quadratic"
clients = 4
centres = [1.0, 1.0, 1.0, 1.0]

[targets]
w = 0.9

[[axis]]
name = "strategy"
points = [
  { label = "FedAvg", strategy = { name = "fedavg", cohort = 4 } },
  { label = "FedBuff", strategy = { name = "fedbuff", concurrency = 4, buffer_size = 2 } },
]

[prediction]
calibrate_on = "FedAvg"

[report]
figures = []
baseline = "FedAvg"
"""
REPORT = Report(figures=(), baseline="FedAvg")


def read(tmp_path: Path, text: str = EXPERIMENT, *options: str) -> list[Measurement]:
    """The runs of an experiment, checked."""
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "e.toml").write_text(text)
    return measurements(load(tmp_path / "e.toml", options), tmp_path / "out")


# Refusals


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "clients = 4\n\n[dep",
            "cliens = 4\n\n[dep",
            "e.toml: federation.cliens: unknown key; did you mean 'clients'?",
        ),
        ("[federation]\nclients = 4", "", "e.toml: the table [federation] is missing"),
        ("[federation]", "[population]\n[federation]", "[population] beside [federation]: an experiment's clients are"),
        ("[federation]", "[[published]]\n[federation]", "[[published]] beside [federation]"),
        (
            "[federation]\nclients = 4",
            "[population]\nclients = 4",
            "without one it is a study, which is for `fedasync s",
        ),
        ("[federation]\nclients = 4", "[federation]\nclients = 3", "deployment.work_s_by_client: got 4 numbers for 3"),
        ('"quadratic"\nclients = 4', '"quadratic"\nclients = 5', "centres"),
        (
            "clients = 4\ncentres = [1.0, 1.0, 1.0, 1.0]",
            "clients = 5",
            "federation.clients = 4, and the workload has 5",
        ),
        ("[federation]", "[federation]\ntls = 1", "federation.tls: got 1; a boolean would do"),
        ("[federation]", "[federation]\nauthenticate = true", "federation: authenticate needs tls = true"),
        ("[federation]", '[federation]\nisolation = "none"', "federation.isolation: got \"none\"; 'subprocess' or"),
        ("work_s_by_client", "work_s", "deployment.work_s: unknown key (known: "),
        ("[deployment]", "[deployment]\nleast_clients = 5", "deployment.least_clients = 5, and there are 4"),
        ("time_s", "server_step_s = 1.0\ntime_s", "run.server_step_s: unknown key"),
        ("[run]", "[rum]", "e.toml: rum: unknown table; did you mean 'run'?"),
        ("seeds = 2", "seeds = 0", "seeds must be an integer ≥ 1"),
        ("[targets]\nw = 0.9", "", "stop_at_target needs a target"),
        ("cohort = 4", "cohort = 5", "a cohort of 5 can never be filled by 4 clients"),
        (
            'strategy = { name = "fedbuff"',
            'population.clients = 3, strategy = { name = "fedbuff"',
            "population.clients: u",
        ),
        (
            'on = "FedAvg"',
            'on = "FedAvgg"',
            "prediction.calibrate_on: no label 'FedAvgg' on axis 'strategy'; there are",
        ),
        ('on = "FedAvg"', 'on = "FedAvg"\ntolerance = 0', "prediction: tolerance must be"),
        ("calibrate_on", "calibrate", "prediction.calibrate: unknown key; did you mean 'calibrate_on'?"),
        ('name = "strategy"', 'name = "how"', "prediction: the axes are 'how'; one axis, 'strategy', would do"),
        ("figures = []", 'figures = ["closed_forms"]', "report.figures: 'closed_forms' needs a simulated population"),
    ],
)
def test_what_cannot_run_is_refused_in_one_line(tmp_path: Path, old: str, new: str, said: str) -> None:
    with pytest.raises(StudyError) as refusal:
        read(tmp_path, changed(EXPERIMENT, (old, new)))
    assert said in str(refusal.value)
    assert "\n" not in str(refusal.value)
    assert refusal.value.status == 2


def test_a_rule_when_to_stop_needs_virtual_time(tmp_path: Path) -> None:
    rule = 'seeds = { at_least = 3, at_most = 5, until = { quantity = "final", half_width = 0.1 } }'
    with pytest.raises(StudyError, match=r"study\.seeds"):
        read(tmp_path, changed(EXPERIMENT, ("seeds = 2", rule)))


# Plans


def test_strategies_take_turns_within_a_seed(tmp_path: Path) -> None:
    made = read(tmp_path, changed(EXPERIMENT, ("seeds = 2", "seeds = [3, 1]")))
    assert [one.labels for one in made] == ["FedAvg, seed 3", "FedBuff, seed 3", "FedAvg, seed 1", "FedBuff, seed 1"]
    assert [one.folder.parent for one in made] == [tmp_path / "out" / "runs"] * 4


def test_a_run_keeps_its_name_unless_something_is_changed(tmp_path: Path) -> None:
    names = [one.folder.name for one in read(tmp_path)]
    assert [one.folder.name for one in read(tmp_path)] == names
    for change in ("federation.poll_s=0.2", "deployment.say_every_s=5.0", "run.time_s=100.0", "workload.drift=0.1"):
        other = [one.folder.name for one in read(tmp_path, EXPERIMENT, change)]
        assert not set(names) & set(other), change


@pytest.mark.parametrize("change", ["population.clients=2", "federations.clients=2", "federation=2"])
def test_a_change_of_nothing_that_is_there_is_refused(tmp_path: Path, change: str) -> None:
    with pytest.raises(StudyError, match=f"^--set {change}: unknown table"):
        read(tmp_path, EXPERIMENT, change)


ROOT = Path(__file__).parents[2]


def test_the_shipped_experiment_and_the_one_of_the_page_can_be_run(tmp_path: Path) -> None:
    shipped = measurements(load(ROOT / "experiments" / "flower_digits.toml"), tmp_path)
    assert [one.labels for one in shipped[:4]] == [
        "FedAvg, seed 0",
        "FedBuff, seed 0",
        "FedFa, seed 0",
        "FedAvg, seed 1",
    ]
    assert len(shipped) == 9
    (text,) = re.findall(r"```toml\n(.*?)```", (ROOT / "docs" / "experiments.md").read_text(), re.DOTALL)
    assert len(read(tmp_path, text)) == 6


# Runs that fail


class NoProcesses:
    """Stands for a federation on which some runs fail."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, failing: Mapping[str, Exception]) -> None:
        self.started, self.made = 0, list[str]()
        self._failing = failing
        monkeypatch.setattr(experiment, "local_federation", self.start)
        monkeypatch.setattr(experiment, "make_run", self.make_run)

    @contextmanager
    def start(self, folder: Path, federation: Federation) -> Iterator[NoProcesses]:
        self.started += 1
        yield self

    def make_run(self, _: object, config: dict[str, Any], folder: Path, what: str, console: Console) -> Run:
        name = what.partition(": ")[2]
        if name in self._failing:
            raise self._failing[name]
        assert config["experiment"]["name"] == folder.name
        self.made.append(name)
        return measure(Measurement(RunPlan(config["experiment"]["labels"], config["seed"], config), "e", folder))

    def deaths(self) -> list[str]:
        return []


def test_others_are_made_when_a_run_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("e.toml").write_text(changed(EXPERIMENT, ("seeds = 2", "seeds = 3")))
    failing = {
        "FedBuff, seed 0": FailedRunError("finished:failed: no client joined", "INFO\nERROR no client joined\n"),
        "FedAvg, seed 1": LostFederationError("run 7: superlink gone"),
        "FedBuff, seed 2": KeyboardInterrupt(),
    }
    first = NoProcesses(monkeypatch, failing)
    with pytest.raises(StudyError, match="interrupted; 3 of 6 runs are finished, and the same command") as end:
        experiment.run_experiment("e.toml")
    assert end.value.status == 130
    assert first.made == ["FedAvg, seed 0", "FedBuff, seed 1", "FedAvg, seed 2"]
    assert first.started == 2  # the process that was gone is there again
    lines = capsys.readouterr().err.splitlines()
    (log,) = Path("results/e/runs").glob("*.error.log")
    assert lines[0].endswith(f": finished:failed: no client joined (log: {log})")
    assert lines[1].endswith(": run 7: superlink gone")
    assert log.read_text() == "INFO\nERROR no client joined\n"

    del failing["FedAvg, seed 1"], failing["FedBuff, seed 2"]
    second = NoProcesses(monkeypatch, failing)
    assert experiment.run_experiment("e.toml") == 1
    assert second.made == ["FedAvg, seed 1", "FedBuff, seed 2"]
    assert "nothing is predicted: 1 of 6 runs are missing" in capsys.readouterr().err

    third = NoProcesses(monkeypatch, {})
    assert experiment.run_experiment("e.toml") == 0
    assert third.made == ["FedBuff, seed 0"]
    out = capsys.readouterr().out
    assert "FedBuff, speed-up: predicted" in out
    assert "within 20 %" in out
    fourth = NoProcesses(monkeypatch, {})
    assert experiment.run_experiment("e.toml") == 0
    assert (fourth.started, fourth.made) == (0, [])


@pytest.mark.parametrize(
    ("log", "said"),
    [
        ("a\n2026 ERROR the run ends: no client joined in 9 s\nTraceback\n  x\n", "no client joined in 9 s"),
        ("a\n\nb\n", "a | b"),
        ("", "its server wrote nothing"),
    ],
)
def test_the_last_word_of_a_server_is_one_line(log: str, said: str) -> None:
    assert last_word(log) == said


# Prediction


def measure(made: Measurement, slow: float = 1.0) -> Run:
    """A run of clients that take 1, 1, 2 and 6 s a task, ``slow`` times as long, as if Flower had made it."""
    config = {name: made.plan.config[name] for name in ("strategy", "workload", "run", "seed")}
    population = {
        "clients": 4,
        "duration_s": {"kind": "constant", "value": slow},
        "slowness": {"kind": "values", "values": [1.0, 1.0, 2.0, 6.0]},
    }
    parts = build_federated({**config, "population": population}, "test")
    assert parts.workload is not None
    run = simulate(
        parts.strategy,
        parts.population,
        parts.workload(),
        parts.settings,
        seed=made.plan.seed,
        target=made.plan.config["targets"],
        name=made.folder.name,
        labels=made.plan.labels,
        config=made.plan.config,
    )
    run.tables = {**run.tables, "exchanges": exchanges_of_log(run.events, 8)}
    run.save(made.folder)
    return Run.load(made.folder)


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


# One run on a local federation


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((0, "quadratic"), "--clients 0"),
        ((2, "quadratics"), "deploy local: workload.kind: unknown name 'quadratics'"),
        ((2, "quadratic", "fedbuf"), "deploy local: strategy.name: unknown name 'fedbuf'"),
        ((2, "quadratic", "fedbuff", ["strategy.concurrency=3"]), "a concurrency of 3 can never be reached by 2"),
        ((2, "quadratic", "fedbuff", ["workload.clients=3"]), "--clients 2, and the workload has 3 clients"),
        ((2, "quadratic", "fedbuff", ["deployment.work_s_by_client=[1.0]"]), "got 1 numbers for 2 clients"),
        ((2, "quadratic", "fedbuff", [], Path("e")), "e is there already"),
    ],
)
def test_a_deployment_that_cannot_run_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[object, ...], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "e").write_text("")
    with pytest.raises(StudyError) as refusal:
        deploy_local(*arguments)  # type: ignore[arg-type]
    assert said in str(refusal.value)
    assert [path.name for path in tmp_path.iterdir()] == ["e"]


# Real processes

REAL = """
[study]
title = "real"
seeds = 1

[federation]
clients = 2

[run]
updates = 3

[workload]
kind = "quadratic"
clients = 2

[strategy]
name = "fedasync"
concurrency = 2

[report]
figures = []
"""


def left_running(folder: Path) -> list[str]:
    """Processes that were started by a federation below a folder."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get("FLWR_HOME", "").startswith(str(folder)):
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found


def test_an_experiment_runs_on_real_processes_and_not_twice(tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text(REAL)
    first = apart("run", "e.toml", cwd=tmp_path, timeout_s=240)
    assert (first.status, first.err) == (0, ""), first
    assert "run 1 of 1: seed 0: updates at " in first.out
    ((name, run),) = runs(tmp_path / "results/e").items()
    told = summary(run)
    assert (told["run_id"], told["study"], told["runtime"], told["consumed"]) == (name, "e", "flower", 3)
    assert {"trace.json", "exchanges.parquet", "events.parquet", "events.bin"} <= {path.name for path in run.iterdir()}
    assert left_running(tmp_path) == []
    assert [path.name for path in (tmp_path / "results/e/runs").iterdir()] == [name]
    before = moments(tmp_path / "results/e")
    again = apart("run", "e.toml", cwd=tmp_path)
    assert again.status == 0
    assert "starting" not in again.out
    assert moments(tmp_path / "results/e") == before


@pytest.mark.slow
@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_an_interrupt_leaves_nothing_and_the_same_command_goes_on(
    tmp_path: Path, until: Callable[..., None], number: int, status: int
) -> None:
    (tmp_path / "e.toml").write_text(changed(REAL, ("seeds = 1", "seeds = 2")))
    folder = tmp_path / "results/e/runs"
    with subprocess.Popen(
        [PROGRAM, "run", "e.toml"], cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        until(lambda: len(list(folder.glob(".*.partial/events.bin"))) == len(list(folder.glob("[!.]*"))) == 1, process)
        process.send_signal(number)
        _, err = process.communicate(timeout=120)
    assert process.returncode == status
    (line,) = err.splitlines()
    assert line.startswith("fedasync: ")
    assert "1 of 2 runs are finished, and the same command goes on from there" in line
    assert left_running(tmp_path) == []
    assert len(list(folder.iterdir())) == 1
    before = moments(tmp_path / "results/e")
    assert apart("run", "e.toml", cwd=tmp_path, timeout_s=300).status == 0
    after = moments(tmp_path / "results/e")
    assert before.items() <= after.items()
    assert len(runs(tmp_path / "results/e")) == 2
    assert left_running(tmp_path) == []


@pytest.fixture
def until() -> Callable[..., None]:
    """Wait until something happened while a process goes on."""
    import time

    def wait(happened: Callable[[], object], process: subprocess.Popen[str]) -> None:
        end_s = time.monotonic() + 300
        while not happened():
            assert process.poll() is None, process.stderr and process.stderr.read()
            assert time.monotonic() < end_s
            time.sleep(0.1)

    return wait
