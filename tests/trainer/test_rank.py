"""A trainer's loop: each command is done once, in order, and answered; what the learner raises is raised."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from math import isnan
from pathlib import Path
from typing import Any

import pytest

from fedasync.trainer.channels import FilesChannel
from fedasync.trainer.link import EOF, Link, Listener, connect
from fedasync.trainer.messages import Message, evaluate, publish, restore, save, stop, train
from fedasync.trainer.rank import serve

from .fakes import FakeLearner, group

PATIENCE_S = 60.0


class Controller:
    """The controller's end of rank 0, which runs in a thread."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.listener = Listener()
        self.error: BaseException | None = None
        self.thread = threading.Thread()
        self.link: Link | None = None

    def start(self, learner: FakeLearner) -> None:
        far = connect(self.listener.address, self.listener.authkey)

        def work() -> None:
            try:
                serve(learner, far, FilesChannel(self.folder), lambda: {"reward": learner.weight})
            except Exception as error:  # noqa: BLE001 -- looked at by the test
                self.error = error
            finally:
                far.close()

        self.thread = threading.Thread(target=work, daemon=True)
        self.thread.start()
        assert self.hear() == ("ready", {"version": learner.version})

    def ask(self, message: Message) -> tuple[str, dict[str, Any]]:
        """The answer to a message, without how long it took."""
        assert self.link is not None
        self.link.send(message)
        return self.hear()

    def hear(self) -> tuple[str, dict[str, Any]]:
        ((self.link, received),) = self.listener.poll(PATIENCE_S)
        if received is EOF:
            return "EOF", {}
        for name in ("seconds", "train_s"):
            assert received.header.pop(name, 0.0) >= 0
        return received.kind, received.header

    def close(self) -> None:
        self.listener.close()
        self.thread.join(PATIENCE_S)
        assert not self.thread.is_alive()


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[Controller]:
    made = Controller(tmp_path / "weights")
    yield made
    made.close()


def test_a_step_is_trained_measured_and_told(controller: Controller) -> None:
    controller.start(FakeLearner())
    kind, header = controller.ask(train(1, [group(1, [0.5, 1.0]), group(2, [2.0])], ["kl"]))
    assert kind == "trained"
    assert isnan(header["metrics"].pop("loss"))
    assert header.pop("measure_s") >= 0
    assert header == {"version": 1, "metrics": {"weight": 3.5}, "measured": {"kl": 3.5}}


def test_divergence_is_measured_from_what_was_published_last(controller: Controller) -> None:
    controller.start(FakeLearner())
    for version, reward in enumerate([1.0, 2.0, 4.0, 8.0], 1):
        _, header = controller.ask(train(version, [group(1, [reward])], ["distance"]))
        assert header["measured"] == {"distance": {1: 1.0, 2: 3.0, 3: 4.0, 4: 12.0}[version]}
        if version == 2:
            assert controller.ask(publish(2))[1]["version"] == 2
    assert controller.ask(train(5, [group(1, [1.0])]))[1]["measured"] == {}


def test_what_is_published_can_be_read(controller: Controller) -> None:
    controller.start(FakeLearner())
    controller.ask(train(1, [group(1, [2.5])]))
    kind, header = controller.ask(publish(1))
    assert (kind, header["version"]) == ("published", 1)
    assert header["bytes"] > 0
    weights, version = FilesChannel(controller.folder).get(1)
    assert (float(weights["weight"]), version) == (2.5, 1)


def test_it_is_saved_restored_and_evaluated(controller: Controller, tmp_path: Path) -> None:
    controller.start(FakeLearner())
    folder = str(tmp_path / "checkpoint")
    controller.ask(train(1, [group(1, [2.0])]))
    assert controller.ask(save(folder)) == ("saved", {"folder": folder})
    controller.ask(train(2, [group(1, [3.0])]))
    assert controller.ask(evaluate()) == ("evaluated", {"metrics": {"reward": 5.0}})
    assert controller.ask(restore(folder)) == ("restored", {"version": 1})
    assert controller.ask(evaluate()) == ("evaluated", {"metrics": {"reward": 2.0}})


@pytest.mark.parametrize(
    ("message", "said"),
    [
        (train(1, [group(1, [1.0])]), "the loss is not finite"),
        (train(3, []), "train: version 3 was asked for, and the learner is at 1"),
        (publish(3), "publish: version 3 was asked for, and the learner is at 0"),
        (Message("dance", {}), "knows no message 'dance'"),
        (Message("train", {"version": 1, "asks": []}, b"no groups"), "hold no trajectories"),
    ],
)
def test_what_the_learner_raises_is_raised(controller: Controller, message: Message, said: str) -> None:
    controller.start(FakeLearner(raise_at=1 if "finite" in said else None))
    assert controller.ask(message) == ("EOF", {})
    controller.thread.join(PATIENCE_S)
    assert said in str(controller.error)


def test_it_ends_when_told_after_what_was_asked_before(controller: Controller) -> None:
    controller.start(FakeLearner())
    assert controller.link is not None
    controller.link.send(evaluate())
    controller.link.send(stop())
    kinds = []
    while "EOF" not in kinds:
        kinds += [each if each is EOF else each.kind for _, each in controller.listener.poll(PATIENCE_S)]
        kinds = ["EOF" if each is EOF else each for each in kinds]
    assert kinds == ["evaluated", "EOF"]
    controller.thread.join(PATIENCE_S)
    assert controller.error is None


def test_it_ends_when_left_alone(controller: Controller) -> None:
    controller.start(FakeLearner())
    controller.close()
    assert controller.error is None
