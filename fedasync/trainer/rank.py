"""A trainer rank's loop: rank 0 does what the controller wants, and the other ranks what rank 0 does."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from fedasync.rl.trajectory import Group
from fedasync.trainer.channels import WeightChannel
from fedasync.trainer.fellows import Fellows
from fedasync.trainer.link import EOF, Link, poll
from fedasync.trainer.messages import Message, groups_of, stop

if TYPE_CHECKING:
    from torch import Tensor


class Learner(Protocol):
    """What learns. Every method is called on all ranks alike."""

    @property
    def version(self) -> int: ...

    def train(self, groups: Sequence[Group], /) -> Mapping[str, float]: ...

    def weights(self) -> Mapping[str, Tensor]: ...

    def measure(self, names: Sequence[str], published: Mapping[str, Tensor], /) -> Mapping[str, float]: ...

    def save(self, folder: Path, /) -> None: ...

    def restore(self, folder: Path, /) -> None: ...


Evaluate = Callable[[], Mapping[str, float]]
"""Measures of the learner's policy as it is now, on prompts that are not trained."""


def serve(
    learner: Learner, link: Link, channel: WeightChannel, evaluate: Evaluate, fellows: Fellows | None = None
) -> None:
    """Rank 0: learn until ``stop``, or until the controller has gone. What the learner raises is raised.

    ``fellows``: there are other ranks.
    """
    student = _Student(learner, evaluate, channel)
    link.send(Message("ready", {"version": learner.version}))
    while True:
        for _, received in poll([link], None):
            if received is EOF or received.kind == "stop":
                if fellows:
                    fellows.tell(stop())
                return
            if fellows:
                fellows.tell(received)
            link.send(student.obey(received))


def follow(learner: Learner, evaluate: Evaluate, fellows: Fellows) -> None:
    """Another rank: do what rank 0 does, until it stops. Raises RuntimeError where rank 0 has died."""
    student = _Student(learner, evaluate, None)
    while (message := fellows.hear()).kind != "stop":
        student.obey(message)


class _Student:
    """A learner that obeys messages; only rank 0 has the ``channel``."""

    def __init__(self, learner: Learner, evaluate: Evaluate, channel: WeightChannel | None) -> None:
        self.learner, self.evaluate, self.channel = learner, evaluate, channel
        self._published: Mapping[str, Tensor] | None = None

    def obey(self, message: Message) -> Message:
        """Do it; what the controller is told then. Raises ValueError for a message that it does not know."""
        header, start_s = message.header, time.monotonic()

        def done(kind: str, **more: object) -> Message:
            return Message(kind, {**more, "seconds": time.monotonic() - start_s})

        match message.kind:
            case "train":
                return self._train(message)
            case "publish":
                self._demand_version(header["version"], "publish")
                return done("published", version=header["version"], bytes=self._publish(header["version"]))
            case "evaluate":
                return done("evaluated", metrics=_numbers(self.evaluate()))
            case "save":
                self.learner.save(Path(header["folder"]))
                return done("saved", folder=header["folder"])
            case "restore":
                self.learner.restore(Path(header["folder"]))
                self._published = None
                return done("restored", version=self.learner.version)
            case kind:
                raise ValueError(f"a trainer knows no message {kind!r}")

    def _train(self, message: Message) -> Message:
        version, asks = message.header["version"], message.header["asks"]
        if asks and self._published is None:
            self._published = self.learner.weights()  # what the workers began with
        start_s = time.monotonic()
        metrics = _numbers(self.learner.train(groups_of(message)))
        train_s = time.monotonic() - start_s
        self._demand_version(version, "train")
        start_s = time.monotonic()
        measured = _numbers(self.learner.measure(asks, self._published)) if asks and self._published else {}
        told = {"version": version, "metrics": metrics, "measured": measured, "train_s": train_s}
        return Message("trained", {**told, "measure_s": time.monotonic() - start_s})

    def _publish(self, version: int) -> int:
        self._published = self.learner.weights()
        return self.channel.put(self._published, version) if self.channel else 0

    def _demand_version(self, version: int, what: str) -> None:
        if self.learner.version != version:
            raise ValueError(f"{what}: version {version} was asked for, and the learner is at {self.learner.version}")


def _numbers(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name: float(value) for name, value in metrics.items()}
