"""What the trainer is told to do, and what of it is under way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from fedasync.core import Published, Step
from fedasync.rl.trajectory import Group
from fedasync.trainer.link import Link
from fedasync.trainer.messages import Message, evaluate, publish, restore, save, train


class Orders:
    """Of one trainer, from its beginning to its death. ``link`` says where it is; None: what it is told is lost.

    Between ``hold`` and ``let_go`` steps and publications wait, until all that follows from a commit is known.
    """

    def __init__(self, link: Callable[[], Link | None]) -> None:
        self._link = link
        self.step: Step | None = None
        """The step that it makes."""
        self.publishing: Published | None = None
        self.evaluating: deque[int] = deque()
        """Versions, the one that it is at first."""
        self.saving: deque[tuple[int, Mapping[str, Any]]] = deque()
        """Versions and the picture of the run at each."""
        self._held: list[Message] | None = None

    def restore(self, folder: Path) -> None:
        self._send(restore(str(folder)))

    def publish(self, event: Published) -> None:
        self.publishing = event
        self._send_or_hold(publish(event.version))

    def train(self, step: Step, groups: Iterable[Group], asks: Iterable[str]) -> None:
        self.step = step
        self._send_or_hold(train(step.version + 1, groups, sorted(asks)))

    def evaluate(self, version: int) -> None:
        self.evaluating.append(version)
        self._send(evaluate())

    def save(self, version: int, picture: Mapping[str, Any], folder: Path) -> None:
        self.saving.append((version, picture))
        self._send(save(str(folder)))

    def hold(self) -> None:
        """What is to be trained and published is not told yet."""
        self._held = []

    def let_go(self, kind: str | None = None) -> None:
        """Tell what was held back, or only messages of this kind; None ends it."""
        held = self._held or []
        self._held = None if kind is None else [each for each in held if each.kind != kind]
        for message in held:
            if kind in (None, message.kind):
                self._send(message)

    def explain(self) -> list[str]:
        """What it is at, in words."""
        if self.step is not None:
            return [f"the trainer makes version {self.step.version + 1}"]
        if self.publishing is not None:
            return [f"the trainer publishes version {self.publishing.version}"]
        return []

    def _send_or_hold(self, message: Message) -> None:
        if self._held is None:
            self._send(message)
        else:
            self._held.append(message)

    def _send(self, message: Message) -> None:
        if (link := self._link()) is not None:
            link.send(message)
