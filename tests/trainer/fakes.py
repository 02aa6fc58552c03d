"""An engine and a learner that only count. Their processes (fake_worker.py, fake_rank.py) start fast: no torch."""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedasync.rl.engine import Finished, Iteration, KvCache, Request
from fedasync.rl.trajectory import Group, Trajectory

if TYPE_CHECKING:
    from torch import Tensor


def trajectory(tokens: Sequence[int], version: int = 0, reward: float = 0.0) -> Trajectory:
    """A prompt of one token, and the rest generated."""
    count = len(tokens)
    generated = np.arange(count) > 0
    rewards = np.zeros(count, np.float32)
    rewards[-1] = reward
    return Trajectory(
        np.array(tokens, np.int64),
        generated,
        np.where(generated, -0.5, 0).astype(np.float32),
        np.where(generated, version, -1).astype(np.int32),
        rewards,
        "stop",
    )


def group(lease: int, rewards: Sequence[float]) -> Group:
    answers = tuple(trajectory([lease, 1, 2], reward=reward) for reward in rewards)
    return Group(lease, lease, 0, answers, len(answers))


class FakeEngine:
    """An answer to prompt p is p, then p + weight for ``tokens`` steps; prompts below 0 fail. One step is one token."""

    def __init__(self, tokens: int = 3, max_running: int = 2, step_s: float = 0.0, raise_at: int | None = None) -> None:
        self.version, self.weight = 0, 0
        self.tokens, self.max_running, self.step_s, self.raise_at = tokens, max_running, step_s, raise_at
        self.closed = False
        self.loads: list[tuple[int, KvCache, int]] = []
        """Version, what became of the cache, how many ran."""
        self._waiting: list[Request] = []
        self._running: dict[int, tuple[Request, list[int], float]] = {}
        self._iterations: list[Iteration] = []
        self._steps = 0

    @property
    def running(self) -> int:
        return len(self._running)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def submit(self, requests: Sequence[Request]) -> None:
        self._waiting += requests

    def withdraw(self, answers: Collection[int]) -> None:
        self._waiting = [each for each in self._waiting if each.answer not in answers]
        for answer in answers:
            self._running.pop(answer, None)

    def step(self) -> list[Finished]:
        self._steps += 1
        if self._steps == self.raise_at:
            raise RuntimeError("no memory left\nfor this step")
        while self._waiting and len(self._running) < self.max_running and not self.closed:
            request = self._waiting.pop(0)
            self._running[request.answer] = (request, [request.prompt], time.monotonic())
        if not self._running:
            return []
        time.sleep(self.step_s)
        now_s = time.monotonic()
        self._iterations.append(Iteration(now_s, self.running, self.running, self.step_s, 0, 0.0))
        ended = []
        for answer, (request, tokens, start_s) in list(self._running.items()):
            tokens.append(request.prompt + self.weight)
            if len(tokens) > self.tokens:
                del self._running[answer]
                found = None if request.prompt < 0 else trajectory(tokens, self.version)
                why = "environment raised TypeError: no" if found is None else None
                ended.append(Finished(answer, found, why, True, start_s, now_s, 1))
        return ended

    def load(self, weights: Mapping[str, Tensor], version: int, kv: KvCache = "recompute") -> None:
        self.weight = int(weights["weight"])
        if self.weight < 0:
            raise ValueError("these are another policy's weights")
        self.loads.append((version, kv, self.running))
        self.version = version

    def hold(self, closed: bool) -> None:
        self.closed = closed

    def take_iterations(self) -> list[Iteration]:
        taken, self._iterations = self._iterations, []
        return taken


class FakeLearner:
    """Its weight is the sum of all rewards it was trained on; with several ranks each adds a share."""

    def __init__(self, raise_at: int | None = None) -> None:
        self.version, self.weight, self.raise_at = 0, 0.0, raise_at

    def train(self, groups: Sequence[Group]) -> dict[str, float]:
        if self.version + 1 == self.raise_at:
            raise ArithmeticError("the loss is not finite")
        rewards = [each.reward for group in groups for each in group.trajectories]
        rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
        total = sum(rewards[rank::ranks])
        if ranks > 1:
            import torch

            both = torch.tensor(total, dtype=torch.float64)
            torch.distributed.all_reduce(both)
            total = float(both)
        self.weight += total
        self.version += 1
        return {"weight": self.weight, "loss": float("nan")}

    def weights(self) -> dict[str, Tensor]:
        import torch

        return {"weight": torch.tensor(self.weight)}

    def measure(self, names: Sequence[str], published: Mapping[str, Tensor], /) -> dict[str, float]:
        return {name: self.weight - float(published["weight"]) for name in names}

    def save(self, folder: Path) -> None:
        if os.environ.get("RANK", "0") == "0":
            folder.mkdir(parents=True)
            (folder / "state").write_text(f"{self.version} {self.weight}")

    def restore(self, folder: Path) -> None:
        version, weight = (folder / "state").read_text().split()
        self.version, self.weight = int(version), float(weight)


def engine_of(problem: Mapping[str, Any]) -> FakeEngine:
    return FakeEngine(**problem.get("engine", {}))
