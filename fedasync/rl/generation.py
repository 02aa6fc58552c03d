"""Generates answers of a language policy: many at a time, each entering and leaving at any step (continuous batching).

``transformers`` has continuous batching too (``ContinuousBatchingManager``): weights may change in its pauses, and it
gives log-probabilities. It is not used here, since it draws from torch's global generator in a background thread, so
that what is generated depends on company and timing; and it has no versions of tokens, no way to compute the cache of
interrupted sequences anew, and no turns.

Whatever the order of requests, interruptions and withdrawals, a token's recorded log-probability is the one that the
version recorded with it gives it after all tokens before it (with kv="recompute"; with "keep" the keys and values of
earlier tokens stay those of the versions that made them). The same calls give the same bits.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch

from fedasync.core.bounds import check_choice, check_integer, check_real
from fedasync.rl.drawing import Noise, draw
from fedasync.rl.engine import Finished, Iteration, KvCache, Request
from fedasync.rl.environment import Environment, Episode
from fedasync.rl.episodes import EpisodeError, Guard, Start, all_new
from fedasync.rl.key_values import CachedModel
from fedasync.rl.policy import load_weights
from fedasync.rl.sampling import Sampling
from fedasync.rl.trajectory import Finish, Trajectory

if TYPE_CHECKING:
    from torch import Tensor

    from fedasync.rl.environment import Message
    from fedasync.rl.language_policy import LanguagePolicy

MOST_ITERATIONS = 65_536
"""Records that are kept where nobody takes them."""


@dataclass(slots=True, eq=False)
class _Row:
    """A sequence that is being decoded; row i has slot i of the cache."""

    request: Request
    episode: Episode
    start_s: float
    tokens: list[int]
    log_probs: list[float]
    versions: list[int]
    rewards: list[float]
    prompt_tokens: int
    generated: int = 0
    turn_from: int = 0
    """The first token of the turn that is being generated."""
    turns: int = 1
    cached: int = 0
    """Tokens whose keys and values the cache has; all but the last before a decoding step."""
    stale: int = 0
    """Of those, what an older version made."""

    def append(self, tokens: Sequence[int], log_probs: Sequence[float], versions: Sequence[int]) -> None:
        self.tokens += tokens
        self.log_probs += log_probs
        self.versions += versions
        self.rewards += [0.0] * len(tokens)

    def trajectory(self, finish: Finish) -> Trajectory:
        versions = np.array(self.versions, np.int32)
        return Trajectory(
            np.array(self.tokens, np.int64),
            versions >= 0,
            np.array(self.log_probs, np.float32),
            versions,
            np.array(self.rewards, np.float32),
            finish,
            self.turns,
        )


@dataclass(eq=False)
class LanguageEngine:
    """``Engine`` of a language policy. It writes new weights into the policy's module, in place.

    ``seed``: of all that is drawn. ``greedy``: the most likely tokens instead. ``reward_timeout_s``: see ``Guard``.
    An answer fails whose prompt leaves no room in the context, or whose environment does wrong; others go on.
    """

    policy: LanguagePolicy
    environment: Environment
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
        self._model = CachedModel(self.policy.module, self.policy.context_tokens)
        self._ends = frozenset(self.policy.end_tokens)
        self._noise = Noise(self.seed)
        self._guard = Guard(self.reward_timeout_s)
        self._iterations: deque[Iteration] = deque(maxlen=MOST_ITERATIONS)
        self._encoded: tuple[str | Sequence[Message], list[int]] | None = None
        self.policy.module.eval()

    # -- the protocol --------------------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        return len(self._rows)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def stale_tokens(self) -> int:
        """Tokens of running sequences whose keys and values an older version made: what kv="keep" leaves behind."""
        return sum(row.stale for row in self._rows)

    def submit(self, requests: Sequence[Request]) -> None:
        """Raises ValueError for an answer that is here already."""
        self.resume([Start(request) for request in requests])

    def resume(self, starts: Sequence[Start]) -> None:
        """As ``submit``, for answers of which something exists already. Raises ValueError for one that is here."""
        self._waiting += all_new(starts, self._answers())

    def _answers(self) -> list[int]:
        return [each.request.answer for each in self._waiting] + [row.request.answer for row in self._rows]

    def withdraw(self, answers: Collection[int]) -> None:
        gone = set(answers)
        self._waiting = deque(each for each in self._waiting if each.request.answer not in gone)
        with torch.inference_mode():
            self._drop([i for i, row in enumerate(self._rows) if row.request.answer in gone])

    def hold(self, closed: bool) -> None:
        self._closed = closed

    def load(self, weights: Mapping[str, Tensor], version: int, kv: KvCache = "recompute") -> None:
        """Raises ValueError, and changes nothing, for weights of another module."""
        check_choice("engine: kv", kv, KvCache)
        load_weights(self.policy.module, weights)
        self.version = version
        if kv == "recompute":
            with torch.inference_mode():
                self._model.cache.clear()
        for row in self._rows:
            row.cached = row.cached if kv == "keep" else 0
            row.stale = row.cached

    def take_iterations(self) -> list[Iteration]:
        taken = list(self._iterations)
        self._iterations.clear()
        return taken

    def step(self) -> list[Finished]:
        """Raises ValueError where the weights have diverged (NaN); nothing has been drawn then, and ``load`` helps."""
        finished = self._admit()
        if not self._rows:
            return finished
        if self.policy.module.training:
            self.policy.module.eval()
        with torch.inference_mode():
            self._decode()
            ended = self._ended()
            self._drop([i for i, _ in ended])
        return finished + [each for _, each in ended]

    # -- one step ------------------------------------------------------------------------------------------------

    def _decode(self) -> None:
        """One token for each row."""
        rows = self._rows
        started = time.perf_counter()
        behind = [i for i, row in enumerate(rows) if row.cached < len(row.tokens) - 1]
        prefilled, prefill_s = 0, 0.0
        if behind:
            missing = [rows[i].tokens[rows[i].cached : -1] for i in behind]
            prefilled = self._model.prefill(behind, missing, [rows[i].cached for i in behind])
            for i in behind:
                rows[i].cached = len(rows[i].tokens) - 1
            prefill_s = time.perf_counter() - started
            started += prefill_s
        lengths = [len(row.tokens) for row in rows]
        logits = self._model.decode([row.tokens[-1] for row in rows], [length - 1 for length in lengths])
        numbers = None if self.greedy else self._noise.numbers([row.request for row in rows], lengths)
        try:
            tokens, log_probs = draw(logits, self.sampling, numbers)
        except ValueError as error:
            raise ValueError(f"engine: version {self.version}: {error}") from None
        version = self.version
        for row, token, log_prob in zip(rows, tokens, log_probs, strict=True):
            row.cached += 1
            row.generated += 1
            row.tokens.append(token)
            row.log_probs.append(log_prob)
            row.versions.append(version)
            row.rewards.append(0.0)
        seconds = time.perf_counter() - started
        self._iterations.append(Iteration(time.monotonic(), len(rows), sum(lengths), seconds, prefilled, prefill_s))

    def _ended(self) -> list[tuple[int, Finished]]:
        """Rows that their last token ended, with their places."""
        ends, most, context = self._ends, self.sampling.max_new_tokens, self.policy.context_tokens
        found = []
        for i, row in enumerate(self._rows):
            if row.tokens[-1] in ends or row.generated >= most or len(row.tokens) >= context:
                finished = self._turn(row)
                if finished is not None:
                    found.append((i, finished))
        return found

    def _drop(self, gone: Sequence[int]) -> None:
        """Rows by place; the last ones move into their slots."""
        left = len(self._rows) - len(gone)
        holes = [i for i in gone if i < left]
        movers = sorted(set(range(left, len(self._rows))).difference(gone))
        for hole, mover in zip(holes, movers, strict=True):
            self._rows[hole] = self._rows[mover]
        self._model.cache.move(movers, holes)
        del self._rows[left:]

    # -- beginnings and ends -------------------------------------------------------------------------------------

    def _admit(self) -> list[Finished]:
        """Let in who waits, in turn, while there is room; those that ended by that."""
        finished = []
        while self._waiting and not self._closed and len(self._rows) < self.max_running:
            start = self._waiting.popleft()
            now_s = time.monotonic()
            try:
                row = self._begun(start, now_s)
            except EpisodeError as error:
                finished.append(Finished(start.request.answer, None, str(error), True, now_s, time.monotonic()))
                continue
            over = self._turn(row) if start.prefix is not None and self._complete(row) else None
            if over is None:
                self._rows.append(row)
            else:
                finished.append(over)
        return finished

    def _begun(self, start: Start, now_s: float) -> _Row:
        request = start.request
        episode, prompt = self._guard.start(self.environment, request.prompt, self.held_out)
        tokens = self._prompt_tokens(prompt)
        row = _Row(request, episode, now_s, [], [], [], [], len(tokens))
        if start.prefix is None:
            row.append(tokens, [0.0] * len(tokens), [-1] * len(tokens))
            row.turn_from = len(tokens)
        else:
            self._kept(row, start.prefix, tokens)
        return row

    def _prompt_tokens(self, prompt: str | Sequence[Message]) -> list[int]:
        if self._encoded is None or self._encoded[0] != prompt:
            try:
                self._encoded = (prompt, self.policy.encode_prompt(prompt))
            except (TypeError, ValueError, KeyError) as error:
                raise EpisodeError(f"prompt cannot be encoded: {type(error).__name__}: {error}") from error
        tokens, context = self._encoded[1], self.policy.context_tokens
        if not tokens:
            raise EpisodeError("prompt is empty: it has no tokens")
        if len(tokens) >= context:
            raise EpisodeError(
                f"prompt too long: {len(tokens)} tokens, and a context of {context} leaves no room for an answer"
            )
        return tokens

    def _kept(self, row: _Row, prefix: Trajectory, prompt: list[int]) -> None:
        """Put what exists of an answer into its row; its environment hears the turns that are over again."""
        tokens, versions = prefix.tokens.tolist(), prefix.versions.tolist()
        if tokens[: len(prompt)] != prompt or len(tokens) > self.policy.context_tokens:
            raise ValueError(f"engine: what is kept of answer {row.request.answer} does not begin with its prompt")
        row.append(tokens, prefix.log_probs.tolist(), versions)
        row.rewards = prefix.rewards.tolist()
        row.generated = prefix.generated_tokens
        row.turn_from = len(prompt)
        for i in range(len(prompt), len(tokens) - 1):
            if versions[i] >= 0 and tokens[i] in self._ends:
                self._guard.reply(row.episode, self._text(tokens[row.turn_from : i + 1]))
                row.turns += 1
                row.turn_from = next((j for j in range(i + 1, len(tokens)) if versions[j] >= 0), len(tokens))

    def _complete(self, row: _Row) -> bool:
        """Nothing follows the last token, but what the environment says."""
        if row.versions[-1] >= 0 and row.tokens[-1] in self._ends:
            return True
        return row.generated >= self.sampling.max_new_tokens or len(row.tokens) >= self.policy.context_tokens

    def _text(self, turn: Sequence[int]) -> str:
        return self.policy.decode(turn[:-1] if turn and turn[-1] in self._ends else turn)

    def _turn(self, row: _Row) -> Finished | None:
        """A turn is over: let the environment answer. None where another turn follows."""
        ended, finish = row.tokens[-1] in self._ends, self._finish(row)
        try:
            reply = self._guard.reply(row.episode, self._text(row.tokens[row.turn_from :]))
        except EpisodeError as error:
            return self._finished(row, None, str(error))
        row.rewards[-1] = reply.reward
        if ended and reply.done:
            return self._finished(row, "stop" if row.turns == 1 else "done")
        if not ended or row.generated >= self.sampling.max_new_tokens:
            return self._finished(row, finish)
        observed = self.policy.encode(reply.observation)
        if len(row.tokens) + len(observed) >= self.policy.context_tokens:
            return self._finished(row, "context")
        row.append(observed, [0.0] * len(observed), [-1] * len(observed))
        row.turn_from = len(row.tokens)
        row.turns += 1
        return None

    def _finish(self, row: _Row) -> Finish:
        return "length" if row.generated >= self.sampling.max_new_tokens else "context"

    def _finished(self, row: _Row, finish: Finish | None, failure: str | None = None) -> Finished:
        trajectory = None if finish is None else row.trajectory(finish)
        return Finished(row.request.answer, trajectory, failure, True, row.start_s, time.monotonic(), row.prompt_tokens)
