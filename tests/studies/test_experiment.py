"""Experiments: what is refused, the order of runs, and runs that fail."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from fedasync.flower.server_log import last_word
from fedasync.runs.run import Run
from fedasync.studies import experiment
from fedasync.studies.errors import StudyError
from fedasync.studies.experiment_file import Federation, load
from fedasync.studies.flower_run import FailedRunError, LostFederationError
from fedasync.studies.measurements import Measurement, measurements
from fedasync.studies.study import RunPlan

from .experiments import EXPERIMENT, measure, read
from .running import changed

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
