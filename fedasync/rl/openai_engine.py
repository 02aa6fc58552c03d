"""An engine whose tokens come from a server: vLLM, SGLang or another that speaks OpenAI's completions protocol.

Prompts and answers are tokens on the way there and back; the environment is talked with here. docs/rl-engines.md.
"""

from __future__ import annotations

import time
import warnings
from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from fedasync.core.bounds import check_integer
from fedasync.rl.engine import Finished, Iteration, KvCache, Request
from fedasync.rl.environment import Environment, Episode
from fedasync.rl.episodes import EpisodeError, Guard
from fedasync.rl.openai_protocol import Reader
from fedasync.rl.openai_requests import Requests, Work
from fedasync.rl.openai_settings import OpenAIServer
from fedasync.rl.openai_weights import Updater, WeightUpdateError
from fedasync.rl.sampling import Sampling
from fedasync.rl.trajectory import Finish, Trajectory
from fedasync.rl.value_head import is_of_value_head
from fedasync.streams import Stream

if TYPE_CHECKING:
    from torch import Tensor

T = TypeVar("T")

POLL_S = 0.005
"""The longest that ``step`` waits for an answer to end."""

DOUBT_S = 1.0
"""How long ``step`` waits before it fails requests that a server of unknown weights cannot answer."""


@dataclass(eq=False)
class _Answer:
    """An answer under way."""

    request: Request
    episode: Episode
    tokens: list[int]
    prompt_tokens: int
    generated: list[bool]
    log_probs: list[float]
    versions: list[int]
    rewards: list[float]
    start_s: float
    turns: int = 0
    kept: int = 0
    """Tokens of this turn, at the end of ``tokens``, from before an interruption."""
    work: Work | None = None

    @property
    def chosen(self) -> int:
        return sum(self.generated)

    def extend(self, tokens: Sequence[int], log_probs: Sequence[float], versions: Sequence[int]) -> None:
        """Generated tokens."""
        self.tokens += tokens
        self.log_probs += log_probs
        self.versions += versions
        self.generated += [True] * len(tokens)
        self.rewards += [0.0] * len(tokens)

    def observe(self, tokens: Sequence[int]) -> None:
        """Tokens that the environment said."""
        self.extend(tokens, [0.0] * len(tokens), [-1] * len(tokens))
        self.generated[len(self.generated) - len(tokens) :] = [False] * len(tokens)
        self.turns, self.kept = self.turns + 1, 0

    def trajectory(self, finish: Finish) -> Trajectory:
        return Trajectory(
            np.array(self.tokens, np.int64),
            np.array(self.generated, np.bool_),
            np.array(self.log_probs, np.float32),
            np.array(self.versions, np.int32),
            np.array(self.rewards, np.float32),
            finish,
            self.turns,
        )


@dataclass(eq=False)
class OpenAIEngine:
    """See ``Engine``. ``close`` ends its thread and connections.

    What is drawn is the server's business: the same seed goes with the same (prompt, epoch, index, position), and
    whether that gives the same tokens again depends on the server. Its decoding steps cannot be seen from here, so
    ``take_iterations`` gives none. Raises ValueError where the bearer token's variable is not set.
    """

    environment: Environment
    reader: Reader
    sampling: Sampling
    server: OpenAIServer
    seed: int
    version: int = 0
    max_running: int = 64
    reward_timeout_s: float | None = None
    held_out: bool = False
    vocabulary: int | None = None
    """Tokens that the policy knows; a greater one means that the server has another model."""
    frozen: Mapping[str, Tensor] = field(default_factory=dict, repr=False)
    """Weights that ``load`` does not bring since they are not trained, for a server that reads all of them."""
    counts: Counter[str] = field(default_factory=Counter)
    """``missing_log_probs`` and ``interrupted_requests``, ``restarted_tokens`` (thrown away), ``further_attempts``,
    ``failed_answers``, ``failed_updates``."""

    def __post_init__(self) -> None:
        check_integer("engine: max_running", self.max_running, 1)
        check_integer("engine: version", self.version, 0)
        if self.sampling.warning:
            warnings.warn(self.sampling.warning, stacklevel=2)
        self._waiting: deque[Request] = deque()
        self._answers: dict[int, _Answer] = {}
        self._closed = False
        self._doubt: str | None = None
        self._guard = Guard(self.reward_timeout_s)
        self._seeds = Stream(self.seed, "openai requests")
        self.requests = Requests(self.server, self.sampling, self.reader)
        self._updater = Updater(self.server.update, self.requests)

    @property
    def running(self) -> int:
        return len(self._answers)

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def submit(self, requests: Sequence[Request]) -> None:
        self._waiting.extend(requests)

    def withdraw(self, answers: Collection[int]) -> None:
        gone = set(answers)
        self._waiting = deque(each for each in self._waiting if each.answer not in gone)
        forgotten = [self._answers.pop(answer) for answer in gone & self._answers.keys()]
        self.requests.cancel([each.work for each in forgotten if each.work])

    def hold(self, closed: bool) -> None:
        self._closed = closed

    def take_iterations(self) -> list[Iteration]:
        return []

    def step(self) -> list[Finished]:
        """What has ended since the last call, waiting ``POLL_S`` for the first at most."""
        finished = self._refuse_in_doubt() or self._admit()
        if not self._answers:
            return finished
        for work in self.requests.ended(0.0 if finished else POLL_S):
            finished += self._end(work)
        return finished

    def load(self, weights: Mapping[str, Tensor], version: int, kv: KvCache = "recompute") -> None:
        """Bring the weights to the server, as its ``WeightUpdate`` says; bounded by the time limits there.

        "keep": requests go on through it, and tokens of a stream carry the version at which they came. "recompute":
        requests are interrupted as ``OpenAIServer.interrupted`` says; "finish" waits here for those under way. Raises
        WeightUpdateError where the server did not take them: what runs then goes on under the version that it has.
        """
        interrupted = self._interrupt() if kv == "recompute" else []
        try:
            every = {**self.frozen, **weights}
            served = {name: each for name, each in every.items() if not is_of_value_head(name)}
            self._updater(served, version, self.version, kv)
            self.version, self._doubt = version, None
            if self.server.update.mode == "http":
                self.requests.named.add(version)
        except WeightUpdateError as error:
            self.counts["failed_updates"] += 1
            self._doubt = None if error.serves is not None else str(error)
            self.version = self.version if error.serves is None else error.serves
            raise
        finally:
            for answer in self._answers.values():
                if answer.work and self.server.stream and kv == "keep":
                    answer.work.stamp(self.version)
            for answer in interrupted:
                self._ask(answer)

    def waits(self) -> list[str]:
        """For whom each answer waits, and since when, in words."""
        now = time.monotonic()
        held = [f"{self.waiting} requests wait: held"] if self._closed and self._waiting else []
        return held + [
            f"answer {number} waits for {self.server.url}: asked {now - work.started_s:.1f} s ago, attempt "
            f"{work.attempts}, heard of {now - work.heard_s:.1f} s ago"
            for number, answer in self._answers.items()
            if (work := answer.work)
        ]

    def close(self) -> None:
        self._answers.clear()
        self._waiting.clear()
        self.requests.close()

    def _admit(self) -> list[Finished]:
        """Let in who waits where there is room; those that cannot even begin."""
        finished = []
        while self._waiting and len(self._answers) < self.max_running and not self._closed:
            request, start_s = self._waiting.popleft(), time.monotonic()
            try:
                episode, prompt = self._guard.start(self.environment, request.prompt, self.held_out)
                told = self._encoded("prompt", self.reader.encode_prompt, prompt)
                if not told:
                    raise EpisodeError("prompt is empty: it has no tokens")
                if len(told) >= (context := self.reader.context_tokens):
                    words = (
                        f"prompt too long: {len(told)} tokens, and a context of {context} leaves no room for an answer"
                    )
                    raise EpisodeError(words)
            except EpisodeError as error:
                finished.append(self._failed(request, str(error), True, start_s))
                continue
            answer = _Answer(request, episode, [], len(told), [], [], [], [], start_s)
            answer.observe(told)
            self._answers[request.answer] = answer
            self._ask(answer)
        return finished

    def _refuse_in_doubt(self) -> list[Finished]:
        """Nothing can be stamped while nobody knows the server's weights: ask it again, else all that is here fails."""
        if self._doubt is None or not (self._answers or self._waiting):
            return []
        serves = self._updater.serves(None)
        if serves is not None:
            self.version, self._doubt = serves, None
            return []
        time.sleep(DOUBT_S)
        gone = [(each.request, each.start_s) for each in self._answers.values()]
        gone += [(each, time.monotonic()) for each in self._waiting]
        self.withdraw([request.answer for request, _ in gone])
        return [self._failed(each, f"server: weights unknown: {self._doubt}", False, start_s) for each, start_s in gone]

    def _ask(self, answer: _Answer) -> None:
        """Ask for the rest of the turn. In doubt nothing is asked: the next step fails it."""
        if self._doubt is not None:
            answer.work = None
            return
        request = answer.request
        stream = Stream(self._seeds.seed(request.prompt, request.epoch), "answer")
        begun = answer.chosen
        answer.work = Work(
            request.answer,
            tuple(answer.tokens),
            min(self.sampling.max_new_tokens - begun, self.reader.context_tokens - len(answer.tokens)),
            self.version,
            lambda at: stream.bits(request.index, begun + at) >> 33,
        )
        self.requests.start(answer.work)

    def _interrupt(self) -> list[_Answer]:
        """Before new weights: what is under way ends or is given up; those that are to be asked again."""
        how = self.server.interruption
        under_way = [each for each in self._answers.values() if each.work and each.work.finish is None]
        if how == "finish":
            if self.server.update.mode == "none":
                return []
            limit_s = time.monotonic() + self.server.request_timeout_s
            while time.monotonic() < limit_s and any(self.requests.runs(each.work) for each in under_way if each.work):
                time.sleep(POLL_S)
        works = [each.work for each in under_way if each.work and self.requests.runs(each.work)]
        self.requests.cancel(works)
        again = []
        for answer in under_way:
            work = answer.work
            if work not in works or work.finish or work.failure:
                continue
            self.counts["interrupted_requests"] += 1
            self._count(work)
            if how == "continue":
                answer.extend(work.tokens, work.log_probs, work.versions)
                answer.kept += len(work.tokens)
            else:
                self.counts["restarted_tokens"] += len(work.tokens)
            again.append(answer)
        return again

    def _count(self, work: Work) -> None:
        self.counts["missing_log_probs"] += work.missing
        self.counts["further_attempts"] += max(0, work.attempts - 1)

    def _end(self, work: Work) -> list[Finished]:
        """What comes of a request that has ended: an answer, its next turn, or nothing where it is not wanted."""
        answer = self._answers.get(work.answer)
        if answer is None or answer.work is not work:
            return []
        self._count(work)
        if work.failure is not None:
            return [self._leave(answer, work.failure, work.own_fault)]
        if self.vocabulary is not None and (strange := max(work.tokens)) >= self.vocabulary:
            words = f"server: token {strange} is not one of the policy's {self.vocabulary}: another model is served?"
            return [self._leave(answer, words, False)]
        answer.extend(work.tokens, work.log_probs, work.versions)
        turn = answer.tokens[len(answer.tokens) - answer.kept - len(work.tokens) :]
        stopped = turn[-1] in self.reader.end_tokens
        try:
            reply = self._guard.reply(answer.episode, self.reader.decode(turn[:-1] if stopped else turn))
            seen = [] if reply.done else self._encoded("observation", self.reader.encode, reply.observation)
        except EpisodeError as error:
            return [self._leave(answer, str(error), True)]
        answer.rewards[-1] = float(reply.reward)
        if stopped and not reply.done:
            room = self.reader.context_tokens - len(answer.tokens) - len(seen)
            if room > 0 and answer.chosen < self.sampling.max_new_tokens:
                answer.observe(seen)
                self._ask(answer)
                return []
            stopped = False
        finish: Finish = "stop" if stopped and answer.turns == 1 else "done" if stopped else "length"
        if not stopped and answer.chosen < self.sampling.max_new_tokens:
            finish = "context"
        del self._answers[work.answer]
        trajectory = answer.trajectory(finish)
        now = time.monotonic()
        return [Finished(work.answer, trajectory, None, True, answer.start_s, now, answer.prompt_tokens)]

    def _encoded(self, what: str, encode: Callable[[T], list[int]], text: T) -> list[int]:
        try:
            return encode(text)
        except (TypeError, ValueError, KeyError) as error:
            raise EpisodeError(f"{what} cannot be encoded: {type(error).__name__}: {error}") from error

    def _leave(self, answer: _Answer, failure: str, own_fault: bool) -> Finished:
        del self._answers[answer.request.answer]
        return self._failed(answer.request, failure, own_fault, answer.start_s)

    def _failed(self, request: Request, failure: str, own_fault: bool, start_s: float) -> Finished:
        self.counts["failed_answers"] += 1
        return Finished(request.answer, None, failure, own_fault, start_s, time.monotonic())
