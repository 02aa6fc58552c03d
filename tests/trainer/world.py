"""Workers and a trainer that say what real ones say, on a clock of their own: what a controller has around it."""

from __future__ import annotations

import heapq
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from fedasync.core import Strategy
from fedasync.rl.engine import Finished, Iteration, Request
from fedasync.rl.trajectory import Trajectory
from fedasync.trainer.controller import Controller
from fedasync.trainer.link import EOF
from fedasync.trainer.messages import Message, finished, groups_of, iterations, requests_of
from fedasync.trainer.run_state import RunState
from fedasync.trainer.settings import ProcessSettings, PromptSettings, RunSettings
from fedasync.trainer.source import fedasync_version


class KilledError(BaseException):
    """The whole run ends here, as by kill -9."""


def trajectory(prompt: int, epoch: int, index: int, attempt: int, version: int, tokens: int) -> Trajectory:
    """Prompt and epoch as the prompt's tokens, then index and attempt: whoever trains knows what it trains."""
    total = 2 + tokens
    chosen = np.arange(total) >= 2
    return Trajectory(
        np.array([prompt, epoch, index, *([attempt] * (tokens - 1))], np.int64),
        chosen,
        np.where(chosen, -1.0, 0.0).astype(np.float32),
        np.where(chosen, version, -1).astype(np.int32),
        np.where(np.arange(total) == total - 1, 1.0, 0.0).astype(np.float32),
        "stop",
    )


@dataclass
class FakeLink:
    """One end of a connection to the controller."""

    world: World
    receive: Callable[[FakeLink, Message], None]
    local: bool = True
    open: bool = True
    name: str = "here"

    def send(self, message: Message) -> None:
        self.world.step()
        if self.open:
            self.receive(self, message)

    def say(self, message: Message, after_s: float = 0.0) -> None:
        """Reaches the controller then."""
        if self.open:
            self.world.later(after_s, self, message)

    def die(self) -> None:
        if self.open:
            self.open = False
            self.world.later(0.0, self, EOF)


@dataclass
class Ended:
    name: str
    words: str
    status: int = -9


@dataclass
class World:
    """A listener and processes, with ``workers`` whose answers take ``answer_s`` and a trainer whose steps ``train_s``.

    ``kill_at``: the n-th thing that the controller does is its last. ``accident(name, n)`` is asked at everything that
    a child does whether it dies there.
    """

    workers: int = 1
    answer_s: Callable[[Request, int], float] = lambda request, version: 1.0
    train_s: float = 1.0
    publish_s: float = 0.01
    kill_at: int | None = None
    accident: Callable[[str, int], bool] = lambda name, n: False
    fails: Callable[[Request, int], str | None] = lambda request, attempt: None
    now: float = 1000.0
    steps: int = 0
    trained: list[list[int]] = field(default_factory=list)
    """What the trainer's weights are made of: (prompt, epoch) of each group, in order."""
    events: list[tuple[float, int, Any, Any]] = field(default_factory=list)
    dead: list[Ended] = field(default_factory=list)
    restarted: list[str] = field(default_factory=list)
    batches: list[list[int]] = field(default_factory=list)
    asked: list[tuple[int, Request]] = field(default_factory=list)
    """Everything that workers were asked for, with the number of its attempt."""
    answers: list[list[int]] = field(default_factory=list)
    """Tokens of every answer that was trained: prompt, epoch, index, attempt, attempt."""
    stopped: set[str] = field(default_factory=set)
    told: dict[str, list[Message]] = field(default_factory=dict)
    """What remote workers were told about their place."""
    told_to_stop: set[str] = field(default_factory=set)
    """Remote workers that were, whatever they made of it."""
    silent: set[str] = field(default_factory=set)
    """Children that receive, and do nothing."""

    def __post_init__(self) -> None:
        self._order = count()
        self._attempts: dict[tuple[int, int, int], int] = {}
        self._deeds: dict[str, int] = {}
        for number in range(self.workers):
            self.start(f"worker-{number}")
        self.start("rank-0")

    # -- listener ----------------------------------------------------------------------------------------------

    def clock(self) -> float:
        return self.now

    def poll(self, timeout_s: float) -> list[tuple[Any, Any]]:
        self.step()
        if self.events and self.events[0][0] <= self.now + timeout_s:
            at_s, _, link, message = heapq.heappop(self.events)
            self.now = max(self.now, at_s)
            return [(link, message)] if message is EOF or link.open else []
        self.now += timeout_s
        return []

    def later(self, after_s: float, link: FakeLink, message: Any) -> None:
        heapq.heappush(self.events, (self.now + after_s, next(self._order), link, message))

    def drop(self, link: FakeLink) -> None:
        """The controller closes a link: it hears no more of it, and the other end that it has ended."""
        self.events = [each for each in self.events if each[2] is not link]
        heapq.heapify(self.events)
        link.open = False

    def step(self) -> None:
        self.steps += 1
        if self.kill_at is not None and self.steps >= self.kill_at:
            raise KilledError

    # -- processes ---------------------------------------------------------------------------------------------

    def start(self, name: str) -> None:
        kind, _, number = name.partition("-")
        if kind == "worker":
            link = FakeLink(self, Work(self, name))
            link.say(Message("hello", {"kind": "worker", "number": int(number), "clock_s": self.now}))
            link.say(Message("ready", {"version": 0}), 0.5)
            return
        self.trained = []
        link = FakeLink(self, Train(self, name))
        link.say(Message("hello", {"kind": "trainer", "number": 0, "clock_s": self.now}))
        link.say(Message("ready", {"version": 0}), 0.5)

    def join(self, name: str, at_s: float = 0.0, version: str | None = None, late_s: float = 0.0) -> FakeLink:
        """A worker of another machine comes then, whose clock is 500 s behind; its hello was under way ``late_s``."""
        link = FakeLink(self, Remote(self, name, behind_s=500.0), local=False, name=name)
        told = {"kind": "remote", "number": None, "clock_s": self.now + at_s - late_s - 500.0}
        link.say(Message("hello", {**told, "version": version or fedasync_version()}), at_s)
        return link

    def restart(self, name: str) -> None:
        self.restarted.append(name)
        self.start(name)

    def kill(self, name: str) -> None:
        self.silent.discard(name)
        self.dead.append(Ended(name, f"{name} ended by signal 9"))

    def runs(self, name: str) -> bool:
        return True

    def ended(self) -> Sequence[Ended]:
        found, self.dead = self.dead, []
        return found

    def dies(self, name: str, link: FakeLink) -> bool:
        """Whether this child does nothing more."""
        self._deeds[name] = self._deeds.get(name, 0) + 1
        if not self.accident(name, self._deeds[name]):
            return False
        link.die()
        if not isinstance(link.receive, Remote):
            self.dead.append(Ended(name, f"{name} ended by signal 9"))
        return True

    def attempt(self, request: Request) -> int:
        key = (request.prompt, request.epoch, request.index)
        self._attempts[key] = self._attempts.get(key, 0) + 1
        return self._attempts[key]


@dataclass
class Work:
    """A rollout worker: every answer on its own."""

    world: World
    name: str
    version: int = 0
    gone: set[int] = field(default_factory=set)
    behind_s: float = 0.0
    """Its clock is so far behind the controller's."""

    def __call__(self, link: FakeLink, message: Message) -> None:
        world = self.world
        if self.name in world.silent or world.dies(self.name, link):
            return
        if message.kind == "submit":
            if self.behind_s:
                link.say(iterations([Iteration(world.now - self.behind_s, 1, 5, 0.1, 0, 0.0)]))
            for request in requests_of(message):
                start_s, seconds = world.now - self.behind_s, world.answer_s(request, self.version)
                attempt = world.attempt(request)
                why = world.fails(request, attempt)
                world.asked.append((attempt, request))
                told = Finished(
                    request.answer,
                    None if why else trajectory(*request[1:], attempt, self.version, 3),
                    why,
                    why is not None and why.startswith("environment"),
                    start_s,
                    start_s + seconds,
                )
                link.say(finished([told]), seconds)
        elif message.kind == "load":
            self.version = message.header["version"]
            link.say(Message("loaded", {"version": self.version, "asked": self.version, "seconds": 0.0}))
        elif message.kind == "stop":
            world.stopped.add(self.name)


@dataclass
class Remote(Work):
    """A rollout worker of another machine, once it is welcome."""

    def __call__(self, link: FakeLink, message: Message) -> None:
        if message.kind in ("welcome", "wait", "refused"):
            self.world.told.setdefault(self.name, []).append(message)
            if message.kind == "welcome" and self.name not in self.world.silent:
                link.say(Message("pulse", {"clock_s": self.world.now + 0.5 - self.behind_s}), 0.5)
                link.say(Message("ready", {"version": 0}), 0.5)
        else:
            if message.kind == "stop":
                self.world.told_to_stop.add(self.name)
            super().__call__(link, message)


@dataclass
class Train:
    """A trainer whose weights are the list of what it was trained on."""

    world: World
    name: str
    version: int = 0
    busy_until_s: float = 0.0

    def __call__(self, link: FakeLink, message: Message) -> None:
        world, header = self.world, message.header
        if self.name in world.silent or world.dies(self.name, link):
            return
        self.busy_until_s = max(self.busy_until_s, world.now)

        def done(kind: str, seconds: float, **more: Any) -> None:
            self.busy_until_s += seconds
            link.say(Message(kind, {"seconds": seconds, **more}), self.busy_until_s - world.now)

        match message.kind:
            case "train":
                groups = groups_of(message)
                self.version += 1
                assert header["version"] == self.version
                world.batches.append([group.prompt for group in groups])
                for group in groups:
                    world.answers += [each.tokens.tolist() for each in group.trajectories]
                    told = {tuple(each.tokens[:2].tolist()) for each in group.trajectories}
                    assert len(told) == 1
                    world.trained.append(list(told.pop()))
                metrics = {"reward_mean": 1.0, "tokens": 5.0 * len(groups)}
                measured = dict.fromkeys(header["asks"], 0.5)
                done(
                    "trained", world.train_s, version=self.version, metrics=metrics, measured=measured,
                    train_s=world.train_s, measure_s=0.0,
                )  # fmt: skip
            case "publish":
                assert header["version"] == self.version, "published what it does not have"
                done("published", world.publish_s, version=self.version, bytes=1)
            case "evaluate":
                done("evaluated", 0.05, metrics={"exact": self.version / 100})
            case "save":
                folder = Path(header["folder"])
                folder.mkdir(parents=True, exist_ok=True)
                (folder / "learner.json").write_text(json.dumps([self.version, world.trained]))
                done("saved", 0.02, folder=header["folder"])
            case "restore":
                self.version, world.trained = json.loads((Path(header["folder"]) / "learner.json").read_text())
                done("restored", 0.02, version=self.version)
            case "stop":
                world.stopped.add(self.name)


def controller(
    world: World,
    state: RunState,
    strategy: Strategy,
    *,
    answers: int = 2,
    prompts: int | None = None,
    epochs: int | None = None,
    processes: ProcessSettings | None = None,
    say: Callable[[str], object] = lambda line: None,
    **settings: Any,
) -> Controller:
    """A controller in this world."""
    return Controller(
        strategy,
        prompts,
        PromptSettings(answers, epochs),
        processes or ProcessSettings(workers=world.workers),
        RunSettings(**{"checkpoint_every": 1, **settings}),
        0,
        state,
        world,  # type: ignore[arg-type]
        world,
        told_remote={"what": "to do"},
        say=say,
        clock=world.clock,
    )
