"""Real processes: they start, work, die one by one, come again, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import pytest

from fedasync.rl.engine import Request
from fedasync.trainer.channels import ChannelSpec
from fedasync.trainer.child_settings import ChildSettings
from fedasync.trainer.link import EOF, Link, Listener
from fedasync.trainer.messages import Message, evaluate, finished_of, load, publish, restore, save, stop, submit, train
from fedasync.trainer.processes import Ended, LocalProcesses

from .fakes import group

HERE = Path(__file__).parent
PATIENCE_S = 120.0
"""For a busy machine; no test waits so long where all is well."""
FAKES = {"worker_module": "fake_worker", "rank_module": "fake_rank", "environment": {"PYTHONPATH": str(HERE)}}


class Run:
    """A listener and the processes that connect to it; links by the name of the process."""

    def __init__(self, folder: Path, problem: dict[str, Any] | None = None, channel: str = "files") -> None:
        self.listener = Listener()
        spec = ChannelSpec(channel, str(folder / "weights"))  # type: ignore[arg-type]
        settings = ChildSettings(problem or {}, "a test", 0, spec, pulse_s=0.1, iterations_s=0.05)
        self.processes = LocalProcesses(
            folder,
            self.listener.address,
            self.listener.authkey,
            settings,
            **FAKES,  # type: ignore[arg-type]
        )
        self.links: dict[str, Link] = {}
        self.seen: list[tuple[str, str, dict[str, Any]]] = []
        """Name, kind, header; an end is ``eof``."""
        self.answers: set[int] = set()

    def hear(self, timeout_s: float = 0.2) -> None:
        for link, received in self.listener.poll(timeout_s):
            if received is EOF:
                self.seen.append((link.name, "eof", {}))
                continue
            if received.kind == "hello":
                header = received.header
                link.name = f"worker-{header['number']}" if header["kind"] == "worker" else "rank-0"
                self.links[link.name] = link
            if received.kind == "finished":
                self.answers |= {each.answer for each in finished_of(received)}
            self.seen.append((link.name, received.kind, received.header))

    def wait_for(self, name: str, kind: str, count: int = 1) -> dict[str, Any]:
        """The header of the ``count``-th message of a kind from a process."""
        return self.until(lambda: [h for n, k, h in self.seen if (n, k) == (name, kind)][count - 1 : count])[0]

    def until(self, found: Callable[[], Any]) -> Any:
        until_s = time.monotonic() + PATIENCE_S
        while not (value := found()):
            said = [self.processes.log_tail(name) for name in self.processes.names()]
            assert time.monotonic() < until_s, (self.seen[-5:], said)
            self.hear()
        return value

    def ask(self, message: Message, answer: str, count: int = 1) -> dict[str, Any]:
        self.links["rank-0"].send(message)
        return self.wait_for("rank-0", answer, count)


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Callable[..., Run]]:
    """A run, which must leave no process behind."""
    made: list[Run] = []

    def begun(problem: dict[str, Any] | None = None, channel: str = "files") -> Run:
        made.append(Run(tmp_path / "run", problem, channel))
        return made[-1]

    yield begun
    for run in made:
        sessions = [run.processes.pid(name) for name in run.processes.names()]
        run.processes.end()
        run.listener.close()
        assert members_of(sessions) == []


def members_of(sessions: Collection[int]) -> list[int]:
    """Processes of these sessions that are no zombies."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, session = path.read_text().rpartition(")")[2].split()[:4]
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(session) in sessions and state != "Z":
            found.append(int(path.parent.name))
    return found


def requests(count: int) -> Message:
    return submit([Request(n, n, 0, 0) for n in range(count)])


def test_a_run_of_a_trainer_and_workers_of_whom_one_is_killed(begin: Callable[..., Run]) -> None:
    run = begin({"engine": {"step_s": 0.01, "tokens": 5}}, channel="shared_memory")
    assert [run.processes.start_worker(0), run.processes.start_worker(1)] == ["worker-0", "worker-1"]
    assert run.processes.start_ranks() == ["rank-0"]
    with pytest.raises(ValueError, match="worker-1 runs already, as process"):
        run.processes.start_worker(1)
    for name in ("worker-0", "worker-1", "rank-0"):
        run.wait_for(name, "ready")
    assert run.wait_for("worker-1", "hello")["pid"] == run.processes.pid("worker-1")
    run.ask(train(1, [group(1, [2.0])]), "trained")
    run.ask(publish(1), "published")
    for name in ("worker-0", "worker-1"):
        run.links[name].send(load(1))
        assert run.wait_for(name, "loaded")["version"] == 1
        run.links[name].send(requests(1000))
    run.wait_for("worker-1", "finished")
    run.wait_for("worker-0", "pulse")

    run.processes.kill("worker-1")
    run.wait_for("worker-1", "eof")
    (ended,) = run.processes.ended()
    assert ended[:2] == ("worker-1", -9)
    assert ended.words.startswith("worker-1 ended by signal 9 (SIGKILL); ")
    assert run.processes.ended() == []
    finished = len([1 for name, kind, _ in run.seen if (name, kind) == ("worker-0", "finished")])
    run.wait_for("worker-0", "finished", finished + 1)  # the other goes on

    run.processes.restart("worker-1")
    run.wait_for("worker-1", "ready", 2)
    run.links["worker-1"].send(load(1))
    assert run.wait_for("worker-1", "loaded", 2)["version"] == 1
    for link in run.links.values():
        link.send(stop())
    assert run.processes.wait(PATIENCE_S)
    assert run.processes.ended() == []
    assert not any(map(run.processes.runs, run.processes.names()))


def test_a_worker_that_raises_says_so_and_ends_with_a_status(begin: Callable[..., Run]) -> None:
    run = begin({"engine": {"raise_at": 3}})
    run.processes.start_worker(4)
    run.wait_for("worker-4", "ready")
    run.links["worker-4"].send(requests(2))
    failed = run.wait_for("worker-4", "failed")
    assert failed["what"] == "RuntimeError: no memory left for this step"
    assert failed["fatal"]
    assert "fakes.py" in failed["traceback"]
    run.wait_for("worker-4", "eof")
    ended: list[Ended] = run.until(run.processes.ended)
    assert [each[:2] for each in ended] == [("worker-4", 1)]
    assert "worker-4 ended with status 1; last line of" in ended[0].words
    assert "for this step" in ended[0].words


def test_a_problem_that_cannot_be_is_told_before_it_ends(begin: Callable[..., Run]) -> None:
    run = begin({"engine": {"colour": "red"}})
    run.processes.start_worker(0)
    assert "colour" in run.wait_for("worker-0", "failed")["what"]
    assert run.until(run.processes.ended)[0].status == 1


def test_several_ranks_learn_as_one_and_die_and_come_again_together(begin: Callable[..., Run], tmp_path: Path) -> None:
    run = begin({"learner": {"raise_at": 3}})
    assert run.processes.start_ranks(2) == ["rank-0", "rank-1"]
    run.wait_for("rank-0", "ready")
    folder = str(tmp_path / "checkpoint")
    trained = run.ask(train(1, [group(1, [1.0, 2.0]), group(2, [4.0])], ["kl"]), "trained")
    assert (trained["metrics"]["weight"], trained["measured"]) == (7.0, {"kl": 7.0})
    run.ask(publish(1), "published")
    run.ask(save(folder), "saved")
    assert run.ask(train(2, [group(1, [1.0])], ["kl"]), "trained", 2)["measured"] == {"kl": 1.0}
    assert run.ask(restore(folder), "restored")["version"] == 1
    assert run.ask(evaluate(), "evaluated")["metrics"] == {"reward": 7.0}
    run.ask(train(2, [group(1, [1.0])]), "trained", 3)
    assert run.ask(train(3, [group(1, [1.0])]), "failed")["what"] == "ArithmeticError: the loss is not finite"
    ended: list[Ended] = run.until(run.processes.ended)
    assert [each.name for each in ended] == ["rank-0", "rank-1"], "told once, together"
    assert all(each.status > 0 for each in ended)

    run.processes.restart("rank-1")  # all come again
    run.wait_for("rank-0", "ready", 2)
    assert run.ask(train(1, [group(1, [1.0])]), "trained", 4)["metrics"]["weight"] == 1.0
    run.processes.kill("rank-1")
    ended = run.until(run.processes.ended)
    assert [each[:2] for each in ended] == [("rank-1", -9)]
    run.links["rank-0"].send(train(2, [group(1, [1.0])]))
    run.wait_for("rank-0", "eof", 2)
    run.until(lambda: not run.processes.runs("rank-0"))
    assert run.processes.ended() == [], "the other followed it, which is no other death"


def stubborn(folder: Path, code: str) -> LocalProcesses:
    """Processes that run this."""
    (folder / "stubborn.py").write_text(code)
    settings = ChildSettings({}, "a test", 0, ChannelSpec("files", str(folder)))
    modules = {"worker_module": "stubborn", "rank_module": "stubborn", "environment": {"PYTHONPATH": str(folder)}}
    return LocalProcesses(folder, "unix:@nobody", b"key", settings, grace_s=0.1, **modules)  # type: ignore[arg-type]


SLEEPER = "import time; time.sleep(600)"


def test_ranks_that_die_together_are_one_death_and_are_started_again_once(tmp_path: Path) -> None:
    with stubborn(tmp_path, SLEEPER) as processes:
        ranks = processes.start_ranks(3)
        assert processes.ended() == []
        os.kill(processes.pid("rank-2"), signal.SIGKILL)
        while processes.runs("rank-2"):
            time.sleep(0.01)
        assert processes.ended() == [], "perhaps the others follow"
        for name in ("rank-0", "rank-1"):
            processes.kill(name)
        ended = processes.ended()
        assert [each.name for each in ended] == ranks
        processes.restart(ended[0].name)
        assert processes.ended() == []
        processes.start_worker(0)
        processes.kill("worker-0")
        assert [each.name for each in processes.ended()] == ["worker-0"]
        processes.kill("rank-1")
        found: list[Ended] = []
        while not found:
            found = processes.ended()
        assert [each.name for each in found] == ["rank-1"]
        processes.kill("rank-0")
        assert processes.ended() == []


def test_to_kill_a_child_is_to_kill_its_group(tmp_path: Path) -> None:
    code = (
        f"import subprocess, sys\nsubprocess.Popen([sys.executable, '-c', {SLEEPER!r}])\nprint('begun', flush=True)\n"
    )
    with stubborn(tmp_path, code + SLEEPER) as processes:
        name = processes.start_worker(0)
        until_s = time.monotonic() + PATIENCE_S
        while "begun" not in processes.log_tail(name):
            assert time.monotonic() < until_s
            time.sleep(0.02)
        session = processes.pid(name)
        assert len(members_of([session])) == 2
        processes.kill(name)
        while members_of([session]):
            assert time.monotonic() < until_s
            time.sleep(0.02)
        assert [each[:2] for each in processes.ended()] == [(name, -9)]


OWNER = """
import sys
from pathlib import Path
from tests.trainer.test_processes import Run, requests
run = Run(Path(sys.argv[1]), {"engine": {"step_s": 0.01}})
run.processes.start_worker(0)
run.processes.start_worker(1)
run.processes.start_ranks()
for name in ("worker-0", "worker-1", "rank-0"):
    run.wait_for(name, "ready")
run.links["worker-1"].send(requests(10**4))
run.wait_for("worker-1", "finished")
print(*map(run.processes.pid, run.processes.names()), flush=True)
input()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_the_controller(tmp_path: Path, number: signal.Signals) -> None:
    """Also where it has no time to end anything."""
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path / "run")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=HERE.parents[1],
    )
    assert owner.stdout is not None
    pids = [int(each) for each in owner.stdout.readline().split()]
    assert len(members_of(pids)) == 3
    os.kill(owner.pid, number)
    owner.communicate(timeout=PATIENCE_S)
    until_s = time.monotonic() + PATIENCE_S
    while members_of(pids):
        assert time.monotonic() < until_s
        time.sleep(0.05)


STUBBORN = """
import os, signal, subprocess, sys, time
from fedasync.trainer.lifeline import end_with_parent
signal.signal(signal.SIGTERM, signal.SIG_IGN)
end_with_parent(0.1)
code = "import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", code])
print("begun", flush=True)
while True:
    time.sleep(1)
"""


@pytest.mark.parametrize("how", ["end", "parent"])
def test_whoever_does_not_listen_is_killed_with_its_children(tmp_path: Path, how: str) -> None:
    with stubborn(tmp_path, STUBBORN) as processes:
        name = processes.start_worker(0)
        session = processes.pid(name)
        until_s = time.monotonic() + PATIENCE_S
        while "begun" not in processes.log_tail(name):
            assert time.monotonic() < until_s
            time.sleep(0.02)
        assert len(members_of([session])) == 2
        if how == "parent":
            stdin = processes._children[name].popen.stdin
            assert stdin is not None
            stdin.close()  # as the system does when this process ends
            while processes.runs(name):
                time.sleep(0.02)
            assert processes.ended()[0].status == -9
    until_s = time.monotonic() + PATIENCE_S
    while members_of([session]):
        assert time.monotonic() < until_s
        time.sleep(0.02)


def test_children_are_told_the_key_in_secret_and_have_one_thread(begin: Callable[..., Run]) -> None:
    run = begin()
    run.processes.start_worker(0)
    run.wait_for("worker-0", "ready")
    folder = Path(f"/proc/{run.processes.pid('worker-0')}")
    assert run.listener.authkey.hex() not in (folder / "cmdline").read_text()
    variables = (folder / "environ").read_text().split("\0")
    assert {"OMP_NUM_THREADS=1", "HF_HUB_OFFLINE=1"} <= set(variables)
    assert f"FEDASYNC_AUTHKEY={run.listener.authkey.hex()}" in variables
    assert run.listener.authkey.hex() not in (run.processes.folder / "child-settings.json").read_text()


def test_names_that_are_unknown_are_told(begin: Callable[..., Run]) -> None:
    processes = begin().processes
    for ask in (processes.kill, processes.restart, processes.pid, lambda name: processes.end([name])):
        with pytest.raises(ValueError, match="worker-9 was not started; there are: none"):
            ask("worker-9")
    assert not processes.runs("worker-9")


def test_settings_come_back(tmp_path: Path) -> None:
    settings = ChildSettings({"task": {"kind": "reverse"}}, "x.toml", 3, ChannelSpec("files", "w"), 8, 2.5, 100)
    settings.write(tmp_path / "here" / "settings.json")
    assert ChildSettings.read(tmp_path / "here" / "settings.json") == settings


@pytest.mark.parametrize("content", ["", "{}", "[]", '{"seed": 1}', '{"channel": {"kind": "files", "place": "x"}}'])
def test_other_settings_are_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "settings.json").write_text(content)
    with pytest.raises(ValueError, match="holds no settings of child processes"):
        ChildSettings.read(tmp_path / "settings.json")
