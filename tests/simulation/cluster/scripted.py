"""A learner of whom a table says how long its answers are, and what a simulation asked of it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from fedasync.core import EventLog, Strategy
from fedasync.rl.engine import Finished
from fedasync.rl.episodes import Start
from fedasync.rl.trajectory import Group, Trajectory
from fedasync.simulation.cluster import Cluster, ClusterSettings, Faults
from fedasync.simulation.cluster.prompts import Prompts
from fedasync.simulation.cluster.runtime import ClusterSimulation

Length = Callable[[int, int, int], int]
"""Tokens by version, prompt and place in the group."""


class Scripted:
    """An answer ends when it has ``length(version, prompt, index)`` tokens, or one more than it has already.

    Token t of an answer is 1000 · version + t, so that it can be told where each comes from.
    """

    def __init__(self, length: Length, answers: int = 2, prompt: int = 0, failing: Collection[int] = ()) -> None:
        self.length, self.answers, self.failing = length, answers, failing
        self.kept = {0}
        self.version = 0
        self.calls: list[tuple[int, int]] = []
        """(version, answers) of each call."""
        self.most_kept = 1
        self.batches: list[list[Group]] = []
        self._prompt = prompt

    def prompt_tokens(self, prompt: int) -> int:
        return self._prompt

    def generate(self, version: int, starts: Sequence[Start]) -> list[Finished]:
        assert version in self.kept
        assert len({start.request.answer for start in starts}) == len(starts)
        self.calls.append((version, len(starts)))
        return [self._answer(version, start) for start in starts]

    def _answer(self, version: int, start: Start) -> Finished:
        answer, prompt, _, index = start.request
        if prompt in self.failing:
            return Finished(answer, None, "environment raised TypeError", True)
        if start.prefix is not None:
            assert (start.prefix.versions[self._prompt :] < version).all()
        before = 0 if start.prefix is None else start.prefix.generated_tokens
        end = max(self.length(version, prompt, index), before + 1)
        versions = np.full(self._prompt + end, version, np.int32)
        versions[: self._prompt] = -1
        if start.prefix is not None:
            versions[: self._prompt + before] = start.prefix.versions
        tokens = np.where(versions >= 0, 1000 * versions + np.arange(len(versions)), 0).astype(np.int64)
        if start.prefix is not None:
            assert (tokens[: self._prompt + before] == start.prefix.tokens).all()
        nothing = np.zeros(len(tokens), np.float32)
        return Finished(answer, Trajectory(tokens, versions >= 0, nothing, versions, nothing, "stop"))

    def train(self, groups: Sequence[Group]) -> dict[str, float]:
        self.version += 1
        self.batches.append(list(groups))
        return {"loss": 1.0 / self.version}

    def publish(self, version: int) -> None:
        assert version == self.version
        self.kept.add(version)
        self.most_kept = max(self.most_kept, len(self.kept))

    def forget(self, but: Collection[int]) -> None:
        self.kept &= {*but, max(self.kept)}

    def measure(self, names: Collection[str], published: int) -> dict[str, float]:
        assert published in self.kept
        return dict.fromkeys(names, float(self.version - published))

    def evaluate(self) -> dict[str, float]:
        return {"reward": 0.5, "exact": 0.25}


def by_number(least: int = 5, most: int = 60) -> Length:
    """Lengths that look random, a function of all three."""
    return lambda version, prompt, index: least + (37 * version + 101 * prompt + 59 * index) % (most - least + 1)


def learn(
    strategy: Strategy,
    of: Cluster,
    learning: Any,
    *,
    faults: Faults | None = None,
    prompts: Prompts | None = None,
    **limits: Any,
) -> ClusterSimulation:
    """A run, and all that can be asked of it afterwards."""
    simulation = ClusterSimulation(
        strategy,
        of,
        prompts or Prompts(answers=learning.answers),
        ClusterSettings(**{"versions": 20, **limits}),
        faults or Faults(),
        0,
        EventLog(),
        learning,
    )
    simulation.run()
    return simulation
