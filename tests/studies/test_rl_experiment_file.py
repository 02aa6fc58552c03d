"""Experiments of rollout workers and a trainer: what is refused, the order of runs, runs that fail or are stopped."""

from __future__ import annotations

import fcntl
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from fedasync.core import Coordinator
from fedasync.rl.partial_groups import AllowShort
from fedasync.runs.run import Run
from fedasync.simulation.cluster import simulate_cluster
from fedasync.strategies import areal
from fedasync.studies.build import build_cluster
from fedasync.studies.errors import StudyError
from fedasync.studies.trainer_experiment import brief, planned
from fedasync.studies.trainer_file import is_trainer, load
from fedasync.studies.trainer_parts import build_trainer
from fedasync.studies.trainer_progress import TrainerProgress
from fedasync.trainer.attendance import LostProcessError
from fedasync.trainer.run import TrainerRequest

from .experiments import EXPERIMENT
from .rl_studies import REAL
from .running import PROGRAM, Command, apart, changed, runs, summary

E = Path("results/e")
Told = Callable[[int, Mapping[str, float]], object]

MISTAKES = {
    ("[processes]\nworkers = 1", ""): "the table [processes] is missing, and so is [cluster]; either would do with",
    ("[processes]\nworkers = 1", "[processes]\nworker = 1"): "processes.worker: unknown key; did you mean 'workers'?",
    (
        "[processes]\nworkers = 1",
        "[processes]\nworkers = 0",
    ): "e.toml (strategy = synchronous): processes: workers m",
    ("[processes]\nworkers = 1", '[processes]\nworkers = "1"'): 'processes.workers: got "1"; an integer would do',
    (
        "[processes]\nworkers = 1",
        '[processes]\nchannel = "pipe"',
    ): "processes.channel: got \"pipe\"; 'files', 'shared_m",
    (
        "[processes]",
        "[cluster]\n[processes]",
    ): "[cluster] beside [processes]: workers and trainer of such an exp",
    ("[processes]", "[federation]\nclients = 2\n[processes]"): "[federation] beside [processes]",
    ("[processes]", "[[published]]\n[processes]"): "[[published]] beside [processes]",
    ("[processes]", "[proceses]"): "e.toml: proceses: unknown table; did you mean 'processes'?",
    ("[policy]", "[polcy]"): "e.toml: polcy: unknown table; did you mean 'policy'?",
    ("[sampling]\nmax_new_tokens = 4", ""): "e.toml: the table [sampling] is missing",
    ('kind = "reverse"', 'kind = "revers"'): "task.kind: unknown name 'revers'; did you mean 'reverse'?",
    (
        '[policy]\nkind = "gpt2"\nhidden = 8\nlayers = 1\nheads = 2\ncontext_tokens = 12',
        '[policy]\nkind = "folder"\npath = "/nowhere"',
    ): "policy: /nowhere is no model: there is no such f",
    (
        "[processes]\nworkers = 1",
        '[processes]\ndata_parallel = "fsdp"',
    ): "processes: data_parallel = 'fsdp' says nothing with ran",
    ("answers = 2", "answers = 1"): "prompts: answers = 1 with advantages = 'grpo', which compares the answers of",
    ("answers = 2", 'answers = "2"'): 'prompts.answers: got "2"; an integer would do',
    ("answers = 2", "answers = 2\nanswer_tokens = 3"): "prompts.answer_tokens: unknown key; did you mean 'answers'?",
    ("answers = 2", "answers = 2\nepochs = 3"): "prompts: epochs = 3 of a task without end; prompts in [task] would do",
    ("[processes]\nworkers = 1", '[processes]\npartial_groups = { kind = "allow_short", least = 3 }'): (
        "processes: allow_short with least = 3 of groups of 2 answers (prompts.answers) never delivers a short one"
    ),
    ("evaluate_every = 2", ""): "targets.exact is measured by evaluations; run.evaluate_every = 5 would do",
    ("versions = 4", "version = 4"): "run.version: unknown key; did you mean 'versions'?",
    ("versions = 4", "updates_ = 4"): "run.updates_: unknown key; did you mean 'updates'?",
    ('{ name = "synchronous_rl", batch = 2 }', '{ name = "areal", batch = 2, x = 1 }'): "strategy.x: unknown key",
    ('{ name = "synchronous_rl", batch = 2 }', '{ name = "fedbuff", concurrency = 2, buffer_size = 2 }'): (
        "strategy.name: 'fedbuff' says how models of federated clients become one, and here one policy is trained on "
        "answers to prompts; synchronous_rl, one_step_overlap, areal"
    ),
    ('{ name = "synchronous_rl", batch = 2 }', '{ name = "fedat", batch = 2 }'): "strategy.name: 'fedat' says how mode",
    (
        "[processes]\nworkers = 1",
        '[processes]\ntracker = "wndb"',
    ): "processes: tracker = 'wndb'; 'tensorboard', 'wandb', 'trackio', ",
    ('label = "synchronous", strategy', 'label = "synchronous", cluster.x = 1, strategy'): "cluster.x: unknown table",
    ("seeds = 2", "seeds = 0"): "seeds must be an integer ≥ 1",
    ('figures = ["learning_curves"]', 'figures = ["learning_curve"]'): 'report.figures.0: got "learning_curve"',
    ('figures = ["learning_curves"]', 'figures = ["closed_forms"]'): "'closed_forms' needs a simulated population",
    ('figures = ["learning_curves"]', 'figures = ["final_by_axis"]'): "report.x_axis: figure 'final_by_axis' needs one",
    ("[report]", '[prediction]\ncalibrate_on = "sync"\n[report]'): "prediction.calibrate_on: no label 'sync' on axis",
}


@pytest.mark.parametrize(("change", "said"), MISTAKES.items(), ids=[said[:60] for said in MISTAKES.values()])
def test_what_cannot_run_is_refused_in_one_line(
    folder: Path, fedasync: Command, change: tuple[str, str], said: str
) -> None:
    (folder / "e.toml").write_text(changed(REAL, change))
    end = fedasync("run", "e.toml")
    assert end.status == 2
    assert said in end.complaint
    assert not list(folder.rglob("progress"))


def test_frozen_weights_that_other_machines_may_have_otherwise_are_refused(folder: Path, fedasync: Command) -> None:
    remote = '[processes]\nremote_workers = 1\nlisten = "127.0.0.1:7777"\nchannel = "distributed"'
    frozen = ("learning_rate = 1e-3", "learning_rate = 1e-3\ntrainable = 1")
    (folder / "e.toml").write_text(changed(REAL, ("[processes]\nworkers = 1", remote), frozen))
    end = fedasync("run", "e.toml")
    assert end.status == 2
    assert "remote_workers with optimiser.trainable = 1: frozen weights do not travel" in end.complaint


@pytest.mark.parametrize(("tracker", "package"), [("wandb", "wandb"), ("comet_ml", "comet-ml")])
def test_a_tracker_that_is_not_installed_is_told_before_anything_starts(
    experiment: Path, fedasync: Command, monkeypatch: pytest.MonkeyPatch, tracker: str, package: str
) -> None:
    monkeypatch.setattr("fedasync.rl.trackers.find_spec", lambda name: None)
    end = fedasync("run", "e.toml", "--set", f"processes.tracker={tracker}")
    assert end.status == 2
    needs = f"processes: tracker = '{tracker}' needs the package {tracker}: pip install {package}"
    assert end.complaint == f"fedasync: e.toml (strategy = synchronous): {needs}"
    assert not Path("results").exists()


def test_too_few_prompts_are_refused_in_the_words_of_a_simulation(tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text(REAL)
    few = load(tmp_path / "e.toml", ["task.prompts=1", "prompts.epochs=1"])
    with pytest.raises(StudyError, match=r"needs 2 groups, and the data set gives 1 prompts × 1 epochs = 1"):
        planned(few, tmp_path)


def test_tables_tell_the_kinds_apart(tmp_path: Path) -> None:
    (tmp_path / "real.toml").write_text(REAL)
    (tmp_path / "flower.toml").write_text(EXPERIMENT)
    assert is_trainer(tmp_path / "real.toml")
    assert not is_trainer(tmp_path / "flower.toml")


def test_an_experiment_is_no_study(folder: Path, fedasync: Command) -> None:
    (folder / "e.toml").write_text(REAL)
    assert (
        "[processes] makes it an experiment, which is for `fedasync run e.toml`" in fedasync("sim", "e.toml").complaint
    )


def test_what_is_built_is_what_the_file_says(tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text(REAL)
    changes = [
        "processes.workers=2",
        'processes.partial_groups={ kind = "allow_short", least = 1 }',
        "task.prompts=9",
        "prompts.epochs=3",
        'objective.loss="tis"',
        "run.checkpoint_every=2",
    ]
    (first, *rest) = load(tmp_path / "e.toml", changes).study.plans()
    assert len(rest) == 3
    parts = build_trainer(first.config, "here")
    assert parts.processes.workers == 2
    assert parts.processes.partial_groups == AllowShort(1)
    assert parts.problem.environment.prompts == 9
    assert parts.prompts.epochs == 3
    assert parts.problem.objective.loss == "tis"
    assert parts.settings.checkpoint_every == 2
    assert parts.strategy.name == "synchronous_rl"
    assert set(parts.tables) == {"task", "policy", "sampling", "objective", "optimiser"}


def test_an_axis_may_vary_the_processes(tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text(
        REAL + '\n[[axis]]\nname = "workers"\nkey = "processes.workers"\nvalues = [1, 2]\n'
    )
    plans = planned(load(tmp_path / "e.toml"), tmp_path / "out")
    assert [each.parts.processes.workers for each in plans] == [1, 2] * 4


def test_all_points_of_a_seed_come_before_any_of_the_next(tmp_path: Path) -> None:
    (tmp_path / "e.toml").write_text(REAL)
    plans = planned(load(tmp_path / "e.toml"), tmp_path / "out")
    order = [(each.one.plan.labels["strategy"], each.one.plan.seed) for each in plans]
    assert order == [("synchronous", 0), ("eta 1", 0), ("synchronous", 1), ("eta 1", 1)]
    assert plans[0].progress == tmp_path / "out" / "progress" / plans[0].one.folder.name


def pretend(request: TrainerRequest, folder: Path, told: Told) -> Run:
    """A run as if processes had made it: simulated, learning nothing."""
    (folder / "policy").mkdir(parents=True)
    (folder / "policy" / "state.json").write_text("{}")
    (folder / "failures.log").write_text("")
    config: dict[str, Any] = {
        "strategy": (request.config or {})["strategy"],
        "run": {"versions": request.settings.versions},
        "cluster": {
            "generation_gpus": 1,
            "training_gpus": 1,
            "decoding": {"kind": "fixed_speed", "tokens_per_second": 10.0},
            "trainer": {"step_s": 1.0},
            "weights": {"transfer": False},
        },
        "prompts": {"answers": 2, "answer_tokens": {"kind": "constant", "value": 4.0}},
    }
    parts = build_cluster(config, "test")
    told(1, {"reward_mean": 0.5, "tokens": 20.0})
    run = simulate_cluster(
        parts.strategy,
        parts.cluster,
        parts.prompts,
        parts.settings,
        seed=request.seed,
        target=request.target,
        name=request.name,
        study=request.study,
        labels=request.labels,
        config=request.config,
    )
    run.summary["runtime"] = "processes"
    return run


@pytest.fixture
def experiment(folder: Path) -> Path:
    path = folder / "e.toml"
    path.write_text(changed(REAL, ('figures = ["learning_curves"]', 'figures = ["staleness", "cluster_timeline"]')))
    return path


def test_runs_are_made_once_and_published(experiment: Path, fedasync: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[TrainerRequest] = []

    def make(self: TrainerRequest, folder: Path, told: Told) -> Run:
        asked.append(self)
        return pretend(self, folder, told)

    monkeypatch.setattr(TrainerRequest, "make", make)
    experiment.write_text(changed(experiment.read_text(), ("[prompts]", '[objective]\nloss = "tis"\n\n[prompts]')))
    end = fedasync("run", "e.toml")
    assert end.status == 0
    assert "its clip cannot act" in end.complaint  # the problem's warning, once, before the first run
    assert [request.seed for request in asked] == [0, 0, 1, 1]
    assert asked[0].problem["objective"] == {"loss": "tis"}
    assert asked[0].problem["task"] == {"kind": "reverse", "length": 2, "symbols": 4, "held_out": 8}
    made = runs(E)
    assert len(made) == 4
    for folder in made.values():
        assert (folder / "policy" / "state.json").is_file()
        assert summary(folder)["labels"]["strategy"] in ("synchronous", "eta 1")
        assert fedasync("show", str(folder)).status == 0
    assert not list((E / "progress").iterdir())
    assert (E / "figures" / "cluster_timeline.png").is_file()
    asked.clear()
    assert "4 runs, 4 finished before" in fedasync("run", "e.toml").out
    assert not asked


def test_a_run_that_fails_is_told_and_the_others_go_on(
    experiment: Path, fedasync: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(self: TrainerRequest, folder: Path, told: Told) -> Run:
        if self.seed == 0 and self.labels["strategy"] == "eta 1":
            (folder / "checkpoints").mkdir()
            raise LostProcessError("rank-0 ended by signal 9 (SIGKILL);\n it was all too much")
        return pretend(self, folder, told)

    monkeypatch.setattr(TrainerRequest, "make", make)
    end = fedasync("run", "e.toml")
    assert end.status == 1
    (failed,) = [line for line in end.err.splitlines() if "rank-0" in line]
    assert "rank-0 ended by signal 9 (SIGKILL); it was all too much (logs: " in failed
    assert ".error.log)" in failed
    assert len(runs(E)) == 3
    (kept,) = (E / "progress").iterdir()
    assert kept.name.startswith("eta-1_seed0")
    assert list((E / "runs").glob("*.error.log"))
    monkeypatch.setattr(TrainerRequest, "make", pretend)
    end = fedasync("run", "e.toml")
    assert end.status == 0
    assert "goes on from its last checkpoint" in end.out
    assert len(runs(E)) == 4
    assert not list((E / "runs").glob("*.error.log"))


@pytest.mark.parametrize("ended", ["stalled: no new version for 9 s", "nothing accepted in 9 s", "diverged: nan"])
def test_a_run_of_no_good_end_has_failed_and_goes_on_from_its_checkpoint(
    experiment: Path, fedasync: Command, monkeypatch: pytest.MonkeyPatch, ended: str
) -> None:
    def make(self: TrainerRequest, folder: Path, told: Told) -> Run:
        run = pretend(self, folder, told)
        if self.seed == 0 and self.labels["strategy"] == "eta 1":
            (folder / "checkpoints" / "v1").mkdir(parents=True)
            (folder / "checkpoints" / "v1" / "state.json").write_text("{}")
            run.summary["ended"] = ended
        return run

    monkeypatch.setattr(TrainerRequest, "make", make)
    end = fedasync("run", "e.toml")
    assert end.status == 1
    (failed,) = [line for line in end.err.splitlines() if ended in line]
    (kept,) = (E / "progress").iterdir()
    told = f"(more: {kept / 'failures.log'}, logs beside it)"
    assert f"{ended}; the same command goes on from its newest checkpoint {told}" in failed
    assert (kept / "failures.log").read_text().splitlines()[-1].endswith(f"s: ended: {ended}")
    assert len(runs(E)) == 3
    assert kept.name.startswith("eta-1_seed0")

    def resumed(self: TrainerRequest, folder: Path, told: Told) -> Run:
        assert (folder / "checkpoints" / "v1" / "state.json").is_file()
        shutil.rmtree(folder / "policy")
        return pretend(self, folder, told)

    monkeypatch.setattr(TrainerRequest, "make", resumed)
    end = fedasync("run", "e.toml")
    assert (end.status, len(runs(E))) == (0, 4)
    assert "goes on from its last checkpoint" in end.out
    assert not list((E / "progress").iterdir())


OF_LEASES = (
    "4 in flight at workers 0, 1, 2, 3; no lease is given out: the staleness budget is spent: 0 accepted and 4 in "
    "flight at version 0 (eta = 1, batch = 2, limit = None); the next time limit is at 3 s"
)


@pytest.mark.parametrize(
    ("ended", "short"),
    [
        (
            f"stalled: no new version for 8 s: version 0; the next step lacks 2 contributions, 0 wait; {OF_LEASES}; "
            "8 answers are with workers, 0 wait for one",
            "stalled: no new version for 8 s; the next step lacks 2 contributions, 0 wait; 8 answers are with workers, "
            "0 wait for one",
        ),
        (
            f"nothing accepted: the last 9 groups brought nothing (the last one: raised); version 12; {OF_LEASES}; the "
            "trainer is not there",
            "nothing accepted: the last 9 groups brought nothing (the last one: raised); the trainer is not there",
        ),
        ("the trainer: ValueError: no; version 2.13 would do", "the trainer: ValueError: no; version 2.13 would do"),
        ("diverged: nan", "diverged: nan"),
    ],
)
def test_what_leases_wait_for_is_not_told_twice(ended: str, short: str) -> None:
    """What the coordinator says of leases tells nobody whose answers are missing, and is told in failures.log."""
    assert brief(ended) == short


def test_the_coordinators_clauses_are_those_that_are_left_out() -> None:
    """All of what it says but what the step lacks, in whatever state it is."""
    said = set()
    coordinator = Coordinator(areal(batch=2, eta=1, lease_timeout_s=5.0))
    said.add(coordinator.explain())
    leases = [coordinator.request(prompt, 0.0) for prompt in range(4)]
    said.add(coordinator.explain())
    for lease in leases:
        assert lease is not None
        coordinator.deliver(lease.id, 1.0)
        said.add(coordinator.explain())
    for explained in said:
        left = brief(f"stalled: {explained}").removeprefix("stalled").lstrip("; ")
        assert all(part.startswith("the next step lacks") for part in left.split("; ") if part), left


def test_a_trackers_files_are_kept_with_the_run(
    experiment: Path, fedasync: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(self: TrainerRequest, folder: Path, told: Told) -> Run:
        (folder / "tracker" / "fedasync").mkdir(parents=True)
        (folder / "tracker" / "fedasync" / "events.out").write_text("metrics")
        return pretend(self, folder, told)

    monkeypatch.setattr(TrainerRequest, "make", make)
    assert fedasync("run", "e.toml", "--seeds", "1").status == 0
    for folder in runs(E).values():
        assert (folder / "tracker" / "fedasync" / "events.out").read_text() == "metrics"


@pytest.mark.parametrize(("stop", "status"), [(KeyboardInterrupt(), 130), (SystemExit(143), 143)])
def test_an_interrupt_is_one_line_and_keeps_the_progress(
    experiment: Path, fedasync: Command, monkeypatch: pytest.MonkeyPatch, stop: BaseException, status: int
) -> None:
    def make(self: TrainerRequest, folder: Path, told: Told) -> Run:
        (folder / "events.rows").write_text("")
        raise stop

    monkeypatch.setattr(TrainerRequest, "make", make)
    end = fedasync("run", "e.toml")
    assert end.status == status
    assert end.err.splitlines()[-1].endswith("0 of 4 runs are finished, and the same command goes on from there")
    (kept,) = (E / "progress").iterdir()
    assert (kept / "events.rows").is_file()


def test_nobody_makes_a_run_that_another_makes(
    experiment: Path, fedasync: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TrainerRequest, "make", pretend)
    first, *_ = planned(load(Path("e.toml")), E)
    first.progress.mkdir(parents=True)
    with (first.progress / "lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        end = fedasync("run", "e.toml")
    assert "another command makes this run" in end.err
    assert end.status == 1
    assert len(runs(E)) == 3


def test_a_stopped_clock_in_the_progress() -> None:
    now = [10.0]
    progress = TrainerProgress(20, clock=lambda: now[0])
    assert str(progress) == "waiting for the first version"
    progress.told(1, {"tokens": 500.0, "reward_mean": 0.25})
    assert str(progress) == "version 1 of 20, reward 0.250"
    now[0] = 12.0
    progress.told(2, {"tokens": 3000.0, "reward_mean": 0.5})
    progress.told(2, {"exact": 0.125, "reward": 0.75})
    assert progress.tokens_per_second == 1500.0
    assert str(progress) == "version 2 of 20, reward 0.500, held-out reward 0.750, exact 0.125, 1,500 tokens/s"


@pytest.mark.slow
def test_processes_of_this_machine_make_an_experiment(folder: Path, fedasync: Command) -> None:
    (folder / "e.toml").write_text(changed(REAL, ("seeds = 2", "seeds = 1")))
    end = fedasync("run", "e.toml")
    assert end.status == 0, end.err
    made = runs(E)
    assert len(made) == 2
    for each in made.values():
        told = summary(each)
        assert told["versions"] == 4
        assert all(verdict["holds"] for verdict in told["verdicts"])
        assert {"reward_mean", "exact"} <= told["final"].keys()
        assert fedasync("show", str(each)).status == 0
    assert (E / "figures" / "learning_curves.png").is_file()


@pytest.mark.slow
def test_after_sigterm_the_same_command_goes_on_from_the_newest_checkpoint(folder: Path) -> None:
    longer = ("versions = 4", "versions = 60\ncheckpoint_every = 5")
    (folder / "e.toml").write_text(changed(REAL, ("seeds = 2", "seeds = 1"), longer))
    words = [PROGRAM, "run", "e.toml"]
    begun = subprocess.Popen(words, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until_s = time.monotonic() + 120
    while not list((folder / E / "progress").glob("*/checkpoints/v*/state.json")) and time.monotonic() < until_s:
        time.sleep(0.2)
    begun.send_signal(signal.SIGTERM)
    _, err = begun.communicate(timeout=60)
    assert begun.returncode == 143
    assert err.splitlines()[-1].endswith("runs are finished, and the same command goes on from there")
    end = apart("run", "e.toml", cwd=folder, timeout_s=300)
    assert end.status == 0, end.err
    assert "goes on from its last checkpoint" in end.out
    made = runs(folder / E)
    assert [summary(each)["versions"] for each in made.values()] == [60, 60]


def test_a_study_error_is_what_is_raised(tmp_path: Path) -> None:
    with pytest.raises(StudyError, match="cannot be read"):
        load(tmp_path / "none.toml")
