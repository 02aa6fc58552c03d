"""Engines on the chain's server, and what every answer of theirs must satisfy."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from fedasync.rl.engine import Finished, Request
from fedasync.rl.environment import Reply
from fedasync.rl.openai_engine import OpenAIEngine
from fedasync.rl.openai_settings import OpenAIServer
from fedasync.rl.sampling import Sampling
from fedasync.rl.trajectory import Trajectory

from .openai_server import END, MODEL, ChainServer, Characters, log_softmax, table

QUICK: dict[str, Any] = {
    "connect_timeout_s": 60.0,
    "silence_timeout_s": 60.0,
    "request_timeout_s": 60.0,
    "retries": 2,
    "retry_wait_s": 0.01,
}


@dataclass
class Told:
    """An episode that notes what it is told: ``turns`` turns, each worth the number of its characters."""

    prompt: str
    turns: int
    observation: str
    heard: list[str]

    def step(self, text: str) -> Reply:
        self.heard.append(text)
        return Reply(float(len(text)), len(self.heard) == self.turns, self.observation)


@dataclass
class Talk:
    """Prompts "aa", "ab", "ac" …"""

    turns: int = 1
    observation: str = "hg"
    prompt: str | None = None
    prompts = None
    held_out = 0

    def start(self, prompt: int, *, held_out: bool = False) -> Told:
        return Told(self.prompt or "a" + "abcdefgh"[prompt % 8], self.turns, self.observation, [])


def engine(
    server: ChainServer,
    environment: Any = None,
    *,
    most: int = 12,
    temperature: float = 1.0,
    sampling: Sampling | None = None,
    context_tokens: int = 64,
    version: int = 0,
    max_running: int = 64,
    **options: Any,
) -> AbstractContextManager[OpenAIEngine]:
    settings = OpenAIServer(server.url, MODEL, **(QUICK | options))
    return closing(
        OpenAIEngine(
            environment or Talk(),
            Characters(context_tokens),
            sampling or Sampling(most, temperature),
            settings,
            seed=3,
            version=version,
            max_running=max_running,
            vocabulary=len(table(0)),
        )
    )


def requests(count: int) -> list[Request]:
    return [Request(answer, answer // 2, 0, answer % 2) for answer in range(count)]


def until(engine: OpenAIEngine, done: Callable[[], bool], limit_s: float = 90.0) -> list[Finished]:
    """Step until something is so. A test that hangs fails."""
    found, end_s = [], time.monotonic() + limit_s
    while not done():
        assert time.monotonic() < end_s, engine.waits()
        found += engine.step()
    return found


def finished(engine: OpenAIEngine, limit_s: float = 90.0) -> list[Finished]:
    """What comes of all that is there, by number."""
    found = until(engine, lambda: not engine.running and not engine.waiting, limit_s)
    return sorted(found + engine.step(), key=lambda each: each.answer)


def generate(server: ChainServer, count: int = 1, environment: Any = None, **options: Any) -> list[Finished]:
    with engine(server, environment, **options) as made:
        made.submit(requests(count))
        return finished(made)


def trajectory(found: Finished) -> Trajectory:
    assert found.failure is None
    assert found.trajectory is not None
    return found.trajectory


def check_chain(found: Trajectory, end: float = 0.0, temperature: float = 1.0) -> None:
    """Each generated token has the log-probability that the version which it names gives it."""
    for at in np.flatnonzero(found.generated):
        row = table(int(found.versions[at]), end)[found.tokens[at - 1]]
        assert abs(found.log_probs[at] - log_softmax(row, temperature)[found.tokens[at]]) < 1e-4


def received(engine: OpenAIEngine) -> Sequence[int]:
    """How many tokens of each request under way have come."""
    works = [answer.work for answer in engine._answers.values()]
    return [len(work.tokens) + len(work.collected.tokens if work.collected else ()) for work in works if work]


def ends(found: Trajectory) -> bool:
    return bool(found.tokens[-1] == END)
