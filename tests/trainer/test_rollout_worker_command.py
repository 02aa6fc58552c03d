"""``fedasync rollout-worker``, in processes of its own: its errors, its end, and whole runs that it serves."""

from __future__ import annotations

import importlib
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from fedasync.strategies.rollouts import areal
from fedasync.studies import build
from fedasync.studies.signals import SignalExit
from fedasync.studies.trainer_experiment import planned
from fedasync.studies.trainer_file import load
from fedasync.studies.worker_engine import engine
from fedasync.trainer.addresses import free_port
from fedasync.trainer.channels import ChannelSpec
from fedasync.trainer.child_settings import ChildSettings
from fedasync.trainer.keys import KEY_FILE, KEY_VARIABLE
from fedasync.trainer.link import EOF, Listener
from fedasync.trainer.messages import welcome
from fedasync.trainer.run import TrainerRequest
from fedasync.trainer.settings import ProcessSettings, PromptSettings, RunSettings

ROOT = Path(__file__).parents[2]
PROGRAM = str(Path(sys.executable).with_name("fedasync"))
PATIENCE_S = 240.0
KEY = b"a key of sixteen"
PROBLEM: dict[str, Any] = {
    "task": {"kind": "reverse", "length": [2, 4], "symbols": 4, "held_out": 0, "prompts": 1000},
    "policy": {"kind": "gpt2", "hidden": 32, "layers": 1, "heads": 2, "context_tokens": 16},
    "sampling": {"max_new_tokens": 6},
    "objective": {"loss": "coupled"},
    "optimiser": {"kind": "adamw", "learning_rate": 3e-3},
}


class Command:
    """The command in a folder of its own, its output in a file there."""

    def __init__(self, folder: Path, *words: object, key: bytes | None = None) -> None:
        folder.mkdir(exist_ok=True)
        self.log = folder / "said"
        environment = {name: value for name, value in os.environ.items() if name != KEY_VARIABLE}
        if key is not None:
            environment[KEY_VARIABLE] = key.hex()
        with self.log.open("w") as log:
            self.popen = subprocess.Popen(
                [PROGRAM, "rollout-worker", *map(str, words)],
                cwd=folder,
                env={**environment, "OMP_NUM_THREADS": "1", "COLUMNS": "300"},
                stdout=log,
                stderr=subprocess.STDOUT,
            )

    @property
    def said(self) -> str:
        return self.log.read_text()

    def until(self, words: str) -> None:
        until_s = time.monotonic() + PATIENCE_S
        while words not in self.said:
            assert self.popen.poll() is None, self.said
            assert time.monotonic() < until_s, self.said
            time.sleep(0.05)

    def end(self) -> tuple[int, list[str]]:
        """Status and lines."""
        status = self.popen.wait(PATIENCE_S)
        return status, self.said.splitlines()


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Callable[..., Command]]:
    """Commands that do not outlive the test."""
    made: list[Command] = []

    def start(name: str, *words: object, key: bytes | None = None) -> Command:
        made.append(Command(tmp_path / name, *words, key=key))
        return made[-1]

    yield start
    for each in made:
        each.popen.kill()
        each.popen.wait()


def test_what_cannot_be_is_one_line(command: Callable[..., Command], tmp_path: Path) -> None:
    (tmp_path / "key").write_text("none")
    nobody = f"127.0.0.1:{free_port()}"
    mistakes = [
        (command("a", "10.0.0.1", key=KEY), 2, "rollout-worker: got '10.0.0.1'; HOST:PORT, as the run says it, would"),
        (command("e", "h:0", key=KEY), 2, "rollout-worker: got 'h:0'; HOST:PORT, as the run says it, would do"),
        (command("f", nobody, "--patience-s", "nan", key=KEY), 2, "rollout-worker: --patience-s is nan; a number ≥ 0"),
        (
            command("b", nobody),
            2,
            f"rollout-worker needs the run's key: --key-file FILE, or the variable {KEY_VARIABLE}",
        ),
        (command("c", nobody, "--key-file", "../key"), 2, "../key holds no key; at least 16 bytes in hexadecimal"),
        (command("d", nobody, "--patience-s", "0.1", key=KEY), 1, f"no run within 0.1 s: nobody listens at {nobody}"),
    ]
    for started, expected, line in mistakes:
        status, lines = started.end()
        assert status == expected
        assert len(lines) == 1
        assert lines[0].startswith(f"fedasync: {line}")


def test_another_key_is_one_line(command: Callable[..., Command]) -> None:
    with Listener("127.0.0.1:0", KEY) as listener:
        started = command("here", listener.address, key=b"another key of sixteen")
        status, (line,) = started.end()
    assert (status, line) == (1, f"fedasync: {listener.address}: the two ends have different keys")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_cleanly(command: Callable[..., Command], number: signal.Signals) -> None:
    started = command("here", f"127.0.0.1:{free_port()}", key=KEY)
    started.until("waits for a run")
    started.popen.send_signal(number)
    assert started.end() == (0, [*started.said.splitlines()[:1], "ended"])


@pytest.mark.parametrize(
    ("kind", "what"),
    [
        (
            "absent_module.Task",
            "e.toml: task.kind: 'absent_module.Task': importing it raised ModuleNotFoundError: "
            "No module named 'absent_module'",
        ),
        ("ending_module.Task", "e.toml: the user's code raised SystemExit: DATA is not set"),
    ],
)
def test_a_task_that_is_not_there_is_one_line_on_both_sides(
    command: Callable[..., Command], tmp_path: Path, kind: str, what: str
) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "here" / "ending_module.py").write_text("import sys\nsys.exit('DATA is not set')\n")
    problem = {**PROBLEM, "task": {"kind": kind}}
    settings = ChildSettings(problem, "e.toml", 0, ChannelSpec("distributed", "127.0.0.1:1"))
    with Listener("127.0.0.1:0", KEY) as listener:
        started = command("here", listener.address, key=KEY)
        failed: list[str] = []
        while not failed:
            for link, received in listener.poll(PATIENCE_S):
                assert received is not EOF or failed
                if received is EOF:
                    break
                if received.kind == "hello":
                    link.send(welcome(2, settings.for_others()))
                elif received.kind == "failed":
                    failed.append(received.header["what"])
        status, lines = started.end()
    assert failed == [f"StudyError: {what}"]
    assert status == 1
    assert lines[-1] == f"fedasync: worker 2 of the run at {listener.address} cannot be made: {what}"


@pytest.mark.parametrize("error", [SignalExit(143), KeyboardInterrupt()])
def test_a_signal_while_an_engine_is_made_is_no_error_of_it(
    error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    def signalled(problem: object, where: str) -> None:
        raise error

    monkeypatch.setattr(build, "build_problem", signalled)
    with pytest.raises(type(error)):
        engine(ChildSettings(PROBLEM, "e.toml", 0, ChannelSpec("files", "nowhere")))


def asking(listen: str, said: list[str]) -> TrainerRequest:
    """One worker from elsewhere, who connects there."""
    processes = ProcessSettings(remote_workers=1, listen=listen, channel="distributed")
    strategy, settings = areal(batch=4, eta=2), RunSettings(versions=1)
    return TrainerRequest(strategy, PROBLEM, 10, PromptSettings(4), processes, settings, say=said.append)


def test_where_nobody_can_listen_it_is_said_what_would_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY_VARIABLE, KEY.hex())
    with Listener("127.0.0.1:0") as taken, pytest.raises(ValueError, match=r"in use.*; a free port would do$"):
        asking(taken.address, []).make(tmp_path)
    with pytest.raises(ValueError, match=r"cannot listen at 203\.0\.113\.1:7777: .*; an address of its own would do$"):
        asking("203.0.113.1:7777", []).make(tmp_path)


def test_the_command_that_is_said_can_be_pasted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    folder, said = tmp_path / "a folder; of mine", list[str]()
    folder.mkdir()
    with asking("127.0.0.1:0", said)._listener(folder) as listener:
        words = shlex.split(said[0].removeprefix("waits for 1 worker: "))
    assert words == ["fedasync", "rollout-worker", listener.address, "--key-file", str(folder / KEY_FILE)]


@pytest.mark.slow
def test_a_worker_from_elsewhere_generates_is_killed_and_another_takes_its_place(
    command: Callable[..., Command], tmp_path: Path
) -> None:
    commands: list[Command] = []
    said: list[str] = []

    def say(line: str) -> None:
        said.append(line)
        if line.startswith("waits for 1 worker: "):
            _, _, address, _, key_file = line.removeprefix("waits for 1 worker: ").split()
            assert (Path(key_file).stat().st_mode & 0o777, Path(key_file).name) == (0o600, KEY_FILE)
            for name in ("first", "spare"):
                commands.append(command(name, address, "--key-file", key_file, "--runs", 1))

    def told(version: int, metrics: Mapping[str, float]) -> None:
        if version == 5:
            place = [each for each in commands if "worker 1 is ready" in each.said]
            assert len(place) == 1
            os.kill(place[0].popen.pid, signal.SIGKILL)
            commands.sort(key=lambda each: each is not place[0])
        if version >= 5 and "worker 1 is ready" not in commands[1].said:
            time.sleep(0.5)  # so that it is in time, however long torch takes to be imported

    request = TrainerRequest(
        areal(batch=4, eta=2),
        PROBLEM,
        1000,
        PromptSettings(4, epochs=1),
        ProcessSettings(
            workers=1, remote_workers=1, listen="127.0.0.1:0", channel="distributed", max_running=4, restarts=0
        ),
        RunSettings(versions=150, checkpoint_every=None),
        say=say,
    )
    run = request.make(tmp_path / "run", told)
    assert commands[1].end()[0] == 0
    assert "the run at 127.0.0.1:" in commands[1].said
    assert run.summary["versions"] == 150
    assert run.summary["restarts"] == 0
    (incident,) = run.summary["incidents"]
    assert incident["what"].startswith("worker 1 (remote) has gone")
    assert [line.split(", from")[0] for line in said].count("worker 1 (remote) has come") == 2
    events = run.read_events(lambda log: log)
    trained = Counter(events.filter(events["kind"] == "consumed")["worker"])
    assert len(trained) == 600
    assert set(trained.values()) == {1}, "every prompt once"
    assert run.rollouts is not None
    done = run.rollouts.filter(run.rollouts["end_s"].is_not_null())
    for server in (0, 1):
        assert len(done.filter((done["server"] == server) & (done["end_s"] < incident["time_s"])))
        assert len(done.filter((done["server"] == server) & (done["start_s"] > incident["time_s"])))


OWN = """
from dataclasses import dataclass
from fedasync.rl.environment import Reply

@dataclass(frozen=True)
class Next:
    place: int

    @property
    def prompt(self):
        return "abcd"[self.place] + ">"

    def step(self, text):
        return Reply(reward=float(text[:1] == "abcd>"[self.place + 1]))

@dataclass(frozen=True)
class Letters:
    alphabet: str = "abcd>"
    held_out: int = 3
    prompts: int | None = None

    def start(self, prompt, *, held_out=False):
        return Next(prompt % 3)
"""
EXPERIMENT = """
[study]
title = "two seeds"
seeds = 2
[processes]
workers = 0
remote_workers = 1
listen = "127.0.0.1:PORT"
channel = "distributed"
[task]
kind = "own_letters.Letters"
[policy]
kind = "gpt2"
hidden = 16
layers = 1
heads = 2
context_tokens = 8
[sampling]
max_new_tokens = 2
[optimiser]
learning_rate = 3e-3
[prompts]
answers = 2
[run]
versions = 5
[strategy]
name = "areal"
batch = 2
eta = 1
[report]
figures = []
"""


@pytest.mark.slow
def test_one_command_serves_all_runs_of_an_experiment(command: Callable[..., Command], tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    for name in ("controller", "worker"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "own_letters.py").write_text(OWN)
    started = command("worker", address, "--runs", 2, key=KEY)
    (tmp_path / "controller" / "e.toml").write_text(EXPERIMENT.replace("127.0.0.1:PORT", address))
    done = subprocess.run(
        [PROGRAM, "run", "e.toml"],
        cwd=tmp_path / "controller",
        env={**os.environ, KEY_VARIABLE: KEY.hex(), "COLUMNS": "200", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(list((tmp_path / "controller/results/e/runs").glob("*/summary.json"))) == 2
    for number in (1, 2):
        told = f"run {number} of 2: seed {number - 1}: "
        assert (
            f"{told}waits for 1 worker: fedasync rollout-worker {address}, with {KEY_VARIABLE} as here" in done.stdout
        )
    status, lines = started.end()
    assert status == 0
    assert lines.count(f"the run at {address} has ended") == 2
    assert not list((tmp_path / "controller").rglob(KEY_FILE))


def test_several_runs_need_a_port_of_their_own(tmp_path: Path) -> None:
    done = subprocess.run(
        [PROGRAM, "run", "e.toml"], cwd=_written(tmp_path), capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    (line,) = done.stderr.splitlines()
    assert line == (
        "fedasync: e.toml: processes.listen: port 0 is another one in each of 2 runs, and workers know one; a port of "
        "your own would do"
    )


def _written(folder: Path) -> Path:
    (folder / "own_letters.py").write_text(OWN)
    (folder / "e.toml").write_text(EXPERIMENT.replace("PORT", "0"))
    return folder


def test_a_run_is_the_same_one_at_another_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(_written(tmp_path))
    importlib.invalidate_caches()

    def folders(*changes: str) -> list[Path]:
        return [each.one.folder for each in planned(load(tmp_path / "e.toml", changes), tmp_path)]

    here = folders("processes.listen=127.0.0.1:7777")
    assert folders("processes.listen=10.0.0.1:8888", "processes.weights_port=8889") == here
    assert folders("processes.listen=127.0.0.1:7777", "processes.remote_workers=2") != here


def test_the_commands_of_the_page_are_those_of_the_program(tmp_path: Path) -> None:
    """docs/rl.md, "Workers on other machines"."""
    page = (ROOT / "docs" / "rl.md").read_text().split("## Workers on other machines")[1].split("\n## ")[0]
    run, worker = re.findall(r"```sh\n(.*?)\n```", page, re.DOTALL)
    words = shlex.split(run)
    assert words[:3] == ["fedasync", "run", "reverse"]
    changes = [word for word in words[3:] if word != "--set"]
    plans = planned(load(ROOT / "experiments" / "reverse.toml", changes), tmp_path)
    asked = {each.parts.processes for each in plans}
    (settings,) = asked
    assert (settings.workers, settings.remote_workers, settings.listen) == (1, 1, "127.0.0.1:7777")
    told = shlex.split(worker)
    assert told[:3] == ["fedasync", "rollout-worker", settings.listen]
    assert told[3] == "--key-file"
    assert (tmp_path / Path(told[4]).relative_to("results/reverse")) == plans[0].progress.parent / KEY_FILE
