"""Plays many episodes of a control task side by side: one forward pass a step for all of them, one action each."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray

from fedasync.core.bounds import check_choice, check_integer, check_real
from fedasync.rl.drawing import Noise, draw
from fedasync.rl.engine import Finished, Iteration, KvCache, Request
from fedasync.rl.environment import ControlEnvironment, ControlEpisode
from fedasync.rl.episodes import EpisodeError, Guard, Start, all_new
from fedasync.rl.generation import MOST_ITERATIONS
from fedasync.rl.policy import load_weights
from fedasync.rl.sampling import Sampling
from fedasync.rl.trajectory import Finish, Trajectory

if TYPE_CHECKING:
    from torch import Tensor

    from fedasync.rl.control_policy import ControlPolicy


@dataclass(slots=True, eq=False)
class _Row:
    """An episode that is being played."""

    request: Request
    episode: ControlEpisode
    start_s: float
    seen: list[NDArray[np.float32]]
    actions: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)

    def trajectory(self, finish: Finish) -> Trajectory:
        return Trajectory(
            np.array(self.actions, np.int64),
            np.ones(len(self.actions), np.bool_),
            np.array(self.log_probs, np.float32),
            np.array(self.versions, np.int32),
            np.array(self.rewards, np.float32),
            finish,
            observations=np.stack(self.seen),
        )


@dataclass(eq=False)
class ControlEngine:
    """``Engine`` of a control policy: an answer is an episode, its tokens are the actions.

    An episode ends when it is over ("done"), cut by the environment or ``sampling.max_new_tokens`` long ("length").
    """

    policy: ControlPolicy
    environment: ControlEnvironment
    sampling: Sampling
    seed: int = 0
    version: int = 0
    max_running: int = 64
    reward_timeout_s: float | None = None
    greedy: bool = False
    held_out: bool = False
    _waiting: deque[Start] = field(default_factory=deque, init=False)
    _rows: list[_Row] = field(default_factory=list, init=False)
    _closed: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        check_integer("engine: max_running", self.max_running, 1)
        if self.reward_timeout_s is not None:
            check_real("engine: reward_timeout_s", self.reward_timeout_s, 0, above=True)
        self._noise = Noise(self.seed)
        self._guard = Guard(self.reward_timeout_s)
        self._iterations: deque[Iteration] = deque(maxlen=MOST_ITERATIONS)
        parameter = next(self.policy.module.parameters())
        self._dtype, self._device = parameter.dtype, parameter.device
        self.policy.module.eval()

    @property
    def running(self) -> int:
        return len(self._rows)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def submit(self, requests: Sequence[Request]) -> None:
        """Raises ValueError for an answer that is here already."""
        self.resume([Start(request) for request in requests])

    def resume(self, starts: Sequence[Start]) -> None:
        """As ``submit``, for episodes whose first actions are known: they are played again."""
        self._waiting += all_new(starts, self._answers())

    def _answers(self) -> list[int]:
        return [each.request.answer for each in self._waiting] + [row.request.answer for row in self._rows]

    def withdraw(self, answers: Collection[int]) -> None:
        gone = set(answers)
        self._waiting = deque(each for each in self._waiting if each.request.answer not in gone)
        self._rows = [row for row in self._rows if row.request.answer not in gone]

    def hold(self, closed: bool) -> None:
        self._closed = closed

    def load(self, weights: Mapping[str, Tensor], version: int, kv: KvCache = "recompute") -> None:
        """``kv`` means nothing here. Raises ValueError, and changes nothing, for weights of another module."""
        check_choice("engine: kv", kv, KvCache)
        load_weights(self.policy.module, weights)
        self.version = version

    def take_iterations(self) -> list[Iteration]:
        taken = list(self._iterations)
        self._iterations.clear()
        return taken

    def step(self) -> list[Finished]:
        """Raises ValueError where the weights have diverged (NaN)."""
        finished = self._admit()
        if not self._rows:
            return finished
        started = time.perf_counter()
        actions, log_probs = self._chosen()
        seconds = time.perf_counter() - started
        self._iterations.append(Iteration(time.monotonic(), len(self._rows), 0, seconds, 0, 0.0))
        left = []
        for row, action, log_prob in zip(self._rows, actions, log_probs, strict=True):
            ended = self._act(row, action, log_prob, self.version)
            if ended is None:
                left.append(row)
            else:
                finished.append(ended)
        self._rows = left
        return finished

    def _chosen(self) -> tuple[list[int], list[float]]:
        rows = self._rows
        with torch.inference_mode():
            seen = torch.as_tensor(np.stack([row.seen[-1] for row in rows]), dtype=self._dtype, device=self._device)
            logits = self.policy.module(seen)[0]
            numbers = (
                None
                if self.greedy
                else self._noise.numbers([row.request for row in rows], [len(row.actions) for row in rows])
            )
            try:
                return draw(logits, self.sampling, numbers)
            except ValueError as error:
                raise ValueError(f"engine: version {self.version}: {error}") from None

    def _act(
        self, row: _Row, action: int, log_prob: float, version: int, reward: float | None = None
    ) -> Finished | None:
        """Play an action; what has ended by it. ``reward``: what it gave when it was played first."""
        try:
            seen, given, over, cut = self._guard.act(row.episode, action, self.environment.observation_size)
        except EpisodeError as error:
            return Finished(row.request.answer, None, str(error), True, row.start_s, time.monotonic())
        row.seen.append(seen)
        row.actions.append(action)
        row.log_probs.append(log_prob)
        row.versions.append(version)
        row.rewards.append(given if reward is None else reward)
        if not (over or cut or len(row.actions) >= self.sampling.max_new_tokens):
            return None
        trajectory = row.trajectory("done" if over else "length")
        return Finished(row.request.answer, trajectory, None, True, row.start_s, time.monotonic())

    def _admit(self) -> list[Finished]:
        finished = []
        while self._waiting and not self._closed and len(self._rows) < self.max_running:
            begun = self._begun(self._waiting.popleft())
            if isinstance(begun, Finished):
                finished.append(begun)
            else:
                self._rows.append(begun)
        return finished

    def _begun(self, start: Start) -> _Row | Finished:
        request, now_s = start.request, time.monotonic()
        try:
            episode, first = self._guard.reset(self.environment, request.prompt, self.held_out)
        except EpisodeError as error:
            return Finished(request.answer, None, str(error), True, now_s, time.monotonic())
        row = _Row(request, episode, now_s, [first])
        if start.prefix is not None:
            kept = start.prefix
            columns = (kept.tokens, kept.log_probs, kept.versions, kept.rewards)
            for action, log_prob, version, reward in zip(*(each.tolist() for each in columns), strict=True):
                ended = self._act(row, action, log_prob, version, reward)
                if ended is not None:
                    return ended
        return row
