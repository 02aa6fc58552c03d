"""A worker's loop: between decoding steps it does what it is told, and it ends when it is told or left alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fedasync.rl.engine import Request
from fedasync.trainer.channels import FilesChannel
from fedasync.trainer.link import EOF, Link, Listener, connect
from fedasync.trainer.messages import (
    Message,
    finished_of,
    hello,
    iterations_of,
    load,
    stop,
    submit,
    withdraw,
)
from fedasync.trainer.worker import serve

from .fakes import FakeEngine

PATIENCE_S = 60.0


class Controller:
    """The controller's end of a worker that runs in a thread."""

    def __init__(self, folder: Path) -> None:
        self.channel = FilesChannel(folder)
        self.listener = Listener()
        self.seen: list[Message] = []
        self.error: BaseException | None = None
        self._thread: threading.Thread | None = None
        self._link: Link | None = None

    def start(self, engine: FakeEngine, **options: Any) -> None:
        far = connect(self.listener.address, self.listener.authkey)

        def work() -> None:
            try:
                far.send(hello(0, "worker"))
                serve(engine, far, self.channel, **options)
            except Exception as error:  # noqa: BLE001 -- looked at by the test
                self.error = error
            finally:
                far.close()

        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()
        self.wait_for("ready")

    def send(self, *messages: Message) -> None:
        assert self._link is not None
        for message in messages:
            self._link.send(message)

    def wait_for(self, kind: str, count: int = 1) -> list[Message]:
        """All messages of a kind, when there are so many."""
        until_s = time.monotonic() + PATIENCE_S
        while len(found := self.of(kind)) < count:
            came = self.listener.poll(PATIENCE_S)
            assert len(self.seen) < 10_000, self.seen[-3:]
            assert time.monotonic() < until_s, self.seen[-3:]
            for link, received in came:
                assert received is not EOF, (kind, self.error, self.seen)
                self._link = link
                self.seen.append(received)
        return found

    def of(self, kind: str) -> list[Message]:
        return [each for each in self.seen if each.kind == kind]

    def answers(self, count: int) -> dict[int, Any]:
        """So many answers, by number."""
        while True:
            found = {each.answer: each for message in self.of("finished") for each in finished_of(message)}
            if len(found) >= count:
                return found
            self.wait_for("finished", len(self.of("finished")) + 1)

    def join(self) -> None:
        assert self._thread is not None
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    def close(self) -> None:
        self.listener.close()
        if self._thread is not None:
            self.join()


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Controller]:
    made = Controller(tmp_path)
    yield made
    made.close()


def requests(*prompts: int) -> list[Request]:
    return [Request(10 * prompt, prompt, 0, 0) for prompt in prompts]


def weight(value: float) -> dict[str, torch.Tensor]:
    return {"weight": torch.tensor(value)}


def test_every_answer_comes_once_and_those_of_a_step_together(controller: Controller) -> None:
    controller.start(FakeEngine(tokens=4, max_running=3))
    controller.send(submit(requests(*range(7))))
    found = controller.answers(7)
    assert {each.trajectory.tokens.tolist()[0] for each in found.values()} == set(range(7))
    assert all(each.end_s >= each.start_s for each in found.values())
    assert [len(finished_of(each)) for each in controller.of("finished")] == [3, 3, 1]


def test_failures_are_told_beside_trajectories(controller: Controller) -> None:
    controller.start(FakeEngine(max_running=3))
    controller.send(submit(requests(1, -2, 3)))
    found = controller.answers(3)
    assert found[-20].failure == "environment raised TypeError: no"
    assert found[-20].trajectory is None
    assert found[30].trajectory.tokens.tolist() == [3, 3, 3, 3]


def test_what_is_withdrawn_never_comes(controller: Controller) -> None:
    controller.start(FakeEngine(tokens=50, step_s=0.002))
    controller.send(submit(requests(1, 2, 3, 4)), withdraw([10, 30, 999]))
    assert controller.answers(2).keys() == {20, 40}
    controller.send(submit(requests(5)))
    assert controller.answers(3).keys() == {20, 40, 50}


@pytest.mark.parametrize("kv", ["recompute", "keep"])
def test_weights_are_loaded_while_answers_run(controller: Controller, kv: Any) -> None:
    engine = FakeEngine(tokens=40, step_s=0.005)
    controller.start(engine, iterations_s=0.01)
    controller.channel.put(weight(100), 7)
    controller.send(submit(requests(1)))
    controller.wait_for("iterations")
    controller.send(load(7, kv))
    (loaded,) = controller.wait_for("loaded")
    assert (loaded.header["version"], loaded.header["asked"]) == (7, 7)
    assert loaded.header["seconds"] >= 0
    assert engine.loads == [(7, kv, 1)]
    tokens = controller.answers(1)[10].trajectory.tokens.tolist()
    assert set(tokens) == {1, 101}
    assert tokens == sorted(tokens)


def test_a_draining_load_lets_what_runs_end_and_holds_back_what_waits(controller: Controller) -> None:
    engine = FakeEngine(tokens=30, max_running=2, step_s=0.005)
    controller.start(engine, iterations_s=0.01)
    controller.channel.put(weight(100), 7)
    controller.send(submit(requests(1, 2, 3, 4)))
    controller.wait_for("iterations")
    controller.send(load(7, drain=True))
    found = controller.answers(4)
    assert engine.loads == [(7, "recompute", 0)]
    assert [found[10 * n].trajectory.tokens.tolist()[-1] for n in (1, 2, 3, 4)] == [1, 2, 103, 104]
    assert found[30].trajectory.versions.tolist() == [-1] + [7] * 30


def test_of_loads_while_one_drains_the_newest_counts(controller: Controller) -> None:
    engine = FakeEngine(tokens=60, max_running=1, step_s=0.005)
    controller.start(engine, iterations_s=0.01)
    controller.channel.keep = 9
    for version in (1, 2, 3):
        controller.channel.put(weight(version), version)
    controller.send(submit(requests(100, 200)))
    controller.wait_for("iterations")
    controller.send(load(1, drain=True), load(2, drain=True), load(3, drain=True))
    found = controller.answers(2)
    assert engine.loads == [(3, "recompute", 0)]
    assert found[2000].trajectory.tokens.tolist()[-1] == 203
    assert [each.header["asked"] for each in controller.wait_for("loaded")] == [3]


def test_a_load_at_once_overtakes_one_that_drains(controller: Controller) -> None:
    engine = FakeEngine(tokens=60, max_running=1, step_s=0.005)
    controller.start(engine, iterations_s=0.01)
    for version in (1, 2):
        controller.channel.put(weight(version), version)
    controller.send(submit(requests(100, 200)))
    controller.wait_for("iterations")
    controller.send(load(1, drain=True), load(2))
    controller.wait_for("loaded")
    assert engine.loads == [(2, "recompute", 1)]
    assert controller.answers(2)[2000].trajectory.tokens.tolist()[-1] == 202  # nothing is held back any more


def test_a_draining_load_of_an_idle_worker_is_done_at_once(controller: Controller) -> None:
    engine = FakeEngine()
    controller.start(engine)
    controller.channel.put(weight(1), 1)
    controller.send(load(1, drain=True))
    controller.wait_for("loaded")
    controller.send(submit(requests(5)))
    assert controller.answers(1)[50].trajectory.tokens.tolist() == [5, 6, 6, 6]


def test_the_version_that_was_really_loaded_is_told(controller: Controller) -> None:
    controller.start(FakeEngine())
    for version in range(5):
        controller.channel.put(weight(version), version)
    controller.send(load(1))
    (loaded,) = controller.wait_for("loaded")
    assert (loaded.header["version"], loaded.header["asked"]) == (4, 1)


def test_weights_that_cannot_be_had_are_told_and_the_old_ones_stay(controller: Controller) -> None:
    engine = FakeEngine()
    controller.start(engine, load_timeout_s=0.02)
    controller.send(load(3, drain=True), submit(requests(1)))
    (failed,) = controller.wait_for("failed")
    assert (failed.header["fatal"], failed.header["version"]) == (False, 3)
    assert "waited 0.02 s for version 3" in failed.header["what"]
    assert controller.answers(1)[10].trajectory.versions.tolist() == [-1, 0, 0, 0]
    assert engine.loads == []


@pytest.mark.parametrize(
    ("engine", "message", "said"),
    [
        (FakeEngine(raise_at=2), submit(requests(1)), "no memory left"),
        (FakeEngine(), load(5), "another policy's weights"),
        (FakeEngine(), Message("dance", {}), "knows no message 'dance'"),
    ],
)
def test_what_the_engine_raises_is_raised(
    controller: Controller, engine: FakeEngine, message: Message, said: str
) -> None:
    controller.start(engine)
    controller.channel.put(weight(-1), 5)
    controller.send(message)
    controller.join()
    assert said in str(controller.error)


def test_pulses_tell_what_runs_and_waits(controller: Controller) -> None:
    controller.start(FakeEngine(tokens=100, max_running=2, step_s=0.002), pulse_s=0.02)
    first = controller.wait_for("pulse")[0].header
    assert (first["running"], first["waiting"], first["version"]) == (0, 0, 0)
    controller.send(submit(requests(1, 2, 3, 4, 5)))
    seen = set()
    while (2, 3) not in seen:
        seen = {
            (each.header["running"], each.header["waiting"])
            for each in controller.wait_for("pulse", len(controller.of("pulse")) + 1)
        }
    clocks = [each.header["clock_s"] for each in controller.of("pulse")]
    assert clocks == sorted(clocks)


@pytest.mark.parametrize("options", [{"iterations_s": 0.02}, {"iterations_s": 1e6, "iterations_rows": 10}])
def test_every_iteration_is_told_once(controller: Controller, options: dict[str, Any]) -> None:
    controller.start(FakeEngine(tokens=30, max_running=4, step_s=0.001), **options)
    controller.send(submit(requests(1, 2)))
    rows: list[Any] = []
    while len(rows) < 30:
        controller.wait_for("iterations", len(controller.of("iterations")) + 1)
        rows = [row for message in controller.of("iterations") for row in iterations_of(message)]
    assert [row.running for row in rows] == [2] * 30
    assert [row.at_s for row in rows] == sorted(row.at_s for row in rows)
    if "iterations_rows" in options:
        assert [len(iterations_of(message)) for message in controller.of("iterations")] == [10] * 3


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("leave", [lambda controller: controller.send(stop()), lambda controller: controller.close()])
def test_it_ends_when_told_and_when_left_alone(
    controller: Controller, busy: bool, leave: Callable[[Controller], None]
) -> None:
    controller.start(FakeEngine(tokens=10**9, step_s=0.001))
    if busy:
        controller.send(submit(requests(1)))
        controller.wait_for("iterations")
    leave(controller)
    controller.join()
    assert controller.error is None
