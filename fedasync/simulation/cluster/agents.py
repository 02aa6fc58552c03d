"""Answers of several turns: generate, call a tool, wait, read what it says, generate again."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from math import exp, sqrt
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedasync.core.bounds import check_integer, check_real
from fedasync.simulation.cluster.draws import Floats, Integers, check_tokens, quantiles, whole_tokens
from fedasync.simulation.groups import check_shares
from fedasync.simulation.laws import Constant, Law, Lognormal
from fedasync.streams import Draws

MOST_CALLS = 10_000


class Turn(NamedTuple):
    """Generate ``tokens``, wait ``tool_s`` for the tool, and read its answer; the last turn of an answer calls none."""

    tokens: int
    tool_s: float
    observation_tokens: int


def _from_median(median: float, sigma: float) -> Lognormal:
    return Lognormal(median * exp(sigma * sigma / 2), sigma)


@dataclass(frozen=True)
class Tool:
    """A tool: its ``share`` of the calls, how long one takes, and how much it brings to read.

    A call is given up after ``timeout_s`` (None: never), whether its latency is longer or it is ``stuck_probability``'s
    turn. A call fails with ``failure_probability`` once its latency is over, and is made again after each of
    ``retries_s`` in turn. One that is given up, or fails for the last time, brings nothing to read.
    """

    name: str
    latency_s: Law
    observation_tokens: Law = Constant(0.0)
    share: float = 1.0
    timeout_s: float | None = None
    stuck_probability: float = 0.0
    failure_probability: float = 0.0
    retries_s: tuple[float, ...] = (1.0, 2.0, 4.0)

    def __post_init__(self) -> None:
        what = f"tool {self.name!r}"
        check_real(f"{what}: share", self.share, 0, 1, above=True)
        for name in ("stuck_probability", "failure_probability"):
            check_real(f"{what}: {name}", getattr(self, name), 0, 1)
        if self.timeout_s is not None:
            check_real(f"{what}: timeout_s", self.timeout_s, 0)
        elif self.stuck_probability:
            raise ValueError(f"{what}: a call that is stuck would never end; timeout_s would do")
        for seconds in self.retries_s:
            check_real(f"{what}: each of retries_s", seconds, 0)


SEARCH = Tool(
    "search",
    latency_s=_from_median(0.64, 0.455),
    observation_tokens=Constant(500.0),
    failure_probability=0.015,
)
"""A web search: latency fitted by us to one published load test of a search service (p50 0.64 s, p95 1.35 s); failures
and tokens assumed."""

PAGE = Tool(
    "page",
    latency_s=_from_median(2.0, 0.8),
    observation_tokens=Constant(2500.0),
    timeout_s=30.0,
    stuck_probability=0.02,
)
"""Access to a page: assumed throughout."""


@dataclass(frozen=True)
class Turns:
    """How often an answer calls a tool, and how much it generates before each call and at its end.

    The number of calls is ``tool_calls``, rounded, 1 … ``most_tool_calls``; so many turns and a last one generate
    ``segment_tokens`` each. ``question_share`` of the variance of the normal score of the number of calls (for a
    lognormal law: of its logarithm) is the prompt's, the rest the answer's: hard questions are long for a whole group.
    """

    tool_calls: Law
    segment_tokens: Law
    tools: tuple[Tool, ...] = (SEARCH,)
    most_tool_calls: int | None = None
    question_share: float = 0.5

    def __post_init__(self) -> None:
        if self.most_tool_calls is not None:
            check_integer("turns: most_tool_calls", self.most_tool_calls, 1)
            if self.most_tool_calls > MOST_CALLS:
                raise ValueError(f"turns: most_tool_calls must be ≤ {MOST_CALLS:,}, got {self.most_tool_calls}")
        check_real("turns: question_share", self.question_share, 0, 1)
        if not self.tools:
            raise ValueError("turns: tools is empty; at least one would do")
        check_shares("turns: shares of the tools", [tool.share for tool in self.tools])


def _asearcher(log_mean: float, log_sd: float, segment_tokens: float) -> Turns:
    return Turns(
        tool_calls=_from_median(exp(log_mean), log_sd),
        segment_tokens=Lognormal(segment_tokens, 0.55),
        tools=(replace(SEARCH, share=0.92), replace(PAGE, share=0.08)),
    )


TURNS: dict[str, Turns] = {
    "v1_start": _asearcher(0.35, 0.50, 3300.0),
    "v1_end": _asearcher(1.40, 0.75, 3000.0),
    "v2_end": _asearcher(2.80, 0.65, 2800.0),
    "base_7b": Turns(
        tool_calls=Lognormal(5.0, 0.2), segment_tokens=Lognormal(150.0, 0.55), tools=(SEARCH,), most_tool_calls=6
    ),
}
"""Search agents at stages of training, fitted by us to the published plots of ASearcher: a reasoning model at the start
and at the end of the first version's training, at the end of the second's (some 20 calls on average), and a 7B base
model that writes little between searches."""


class TurnDraws:
    """The turns of answers as functions of (seed, prompt, epoch, attempt, answer)."""

    def __init__(self, turns: Turns, answers: int, most_tokens: int | None, seed: int) -> None:
        self._turns = turns
        self._numbers = np.arange(answers)
        self._most_tokens = most_tokens
        self._hard, self._own = Draws(seed, "question difficulty"), Draws(seed, "tool calls")
        self._segments, self._which = Draws(seed, "segment tokens"), Draws(seed, "tool")
        self._latency, self._observation = Draws(seed, "tool_s"), Draws(seed, "observation tokens")
        self._stuck, self._fails = Draws(seed, "stuck tool"), Draws(seed, "failed tool")
        self._calls_at, self._segment_at = quantiles(turns.tool_calls), quantiles(turns.segment_tokens)
        self._ends = np.cumsum([tool.share for tool in turns.tools])[:-1]

    def calls(self, prompts: Integers, epoch: int, attempt: int) -> Integers:
        """Tool calls of each answer, if nothing cuts it: shape (prompts, answers)."""
        from scipy.special import ndtr

        share = self._turns.question_share
        own = self._own.normal(prompts[:, None], epoch, attempt, self._numbers)
        score = sqrt(share) * self._hard.normal(prompts)[:, None] + sqrt(1 - share) * own
        u = np.clip(ndtr(score), 2.0**-53, 1 - 2.0**-53)
        return whole_tokens(self._calls_at(u), self._turns.most_tool_calls or MOST_CALLS)

    def __call__(self, prompts: Integers, epoch: int, attempt: int) -> list[list[list[Turn]]]:
        """For each prompt the turns of its answers, cut where an answer has generated ``most_tokens``."""
        calls = self.calls(prompts, epoch, attempt).ravel()
        sizes = calls + 1
        firsts = np.concatenate([[0], np.cumsum(sizes)])
        who = np.repeat(np.arange(len(sizes)), sizes)
        place = np.arange(firsts[-1]) - firsts[who]
        answers = len(self._numbers)
        key = (prompts[who // answers], epoch, attempt, who % answers, place)
        tokens = whole_tokens(self._segment_at(self._segments.uniform(*key)), self._most_tokens)
        tool_s, observed = self._tools(key)
        last = place == calls[who]
        if self._most_tokens is not None:
            before = np.cumsum(tokens) - tokens
            before -= before[firsts[who]]
            left = self._most_tokens - before
            keep = left > 0
            last = keep & (last | (tokens >= left))
            tokens = np.minimum(tokens, left)
            tokens, tool_s, observed, last, who = tokens[keep], tool_s[keep], observed[keep], last[keep], who[keep]
            firsts = np.searchsorted(who, np.arange(len(sizes) + 1))
        tool_s[last], observed[last] = 0.0, 0
        check_tokens(np.bincount(who, tokens + observed).max())
        made = list(map(Turn, tokens.tolist(), tool_s.tolist(), observed.tolist()))
        bounds = firsts.tolist()
        by_answer = [made[start:end] for start, end in pairwise(bounds)]
        return [by_answer[first : first + answers] for first in range(0, len(by_answer), answers)]

    def _tools(self, key: tuple[Integers | int, ...]) -> tuple[Floats, Integers]:
        """Seconds of each call, retries included, and the tokens that it brings."""
        tools = self._turns.tools
        which = np.searchsorted(self._ends, self._which.uniform(*key), side="right")
        tool_s, observed = np.zeros(len(which)), np.zeros(len(which), np.int64)
        for number, tool in enumerate(tools):
            mine = np.flatnonzero(which == number)
            own = tuple(part if isinstance(part, int) else part[mine] for part in key)
            seconds, answered = self._called(tool, own)
            brought = whole_tokens(quantiles(tool.observation_tokens)(self._observation.uniform(*own)), least=0)
            tool_s[mine], observed[mine] = seconds, np.where(answered, brought, 0)
        return tool_s, observed

    def _called(self, tool: Tool, key: tuple[Integers | int, ...]) -> tuple[Floats, NDArray[np.bool_]]:
        """Seconds until a call of one tool has brought something or is given up, and whether it did."""
        latency = quantiles(tool.latency_s)
        total = np.zeros(len(self._fails.bits(*key)))
        answered, trying = np.zeros(len(total), bool), np.ones(len(total), bool)
        for attempt, wait_s in enumerate((0.0, *tool.retries_s)):
            seconds = latency(self._latency.uniform(*key, attempt))
            if tool.timeout_s is not None:
                stuck = self._stuck.uniform(*key, attempt) < tool.stuck_probability
                given_up = stuck | (seconds > tool.timeout_s)
                seconds = np.where(given_up, tool.timeout_s, seconds)
            else:
                given_up = np.zeros(len(total), bool)
            total += np.where(trying, wait_s + seconds, 0.0)
            failed = self._fails.uniform(*key, attempt) < tool.failure_probability
            answered |= trying & ~given_up & ~failed
            trying &= ~given_up & failed
            if not trying.any():
                break
        return total, answered


def resolve(turns: Turns | str) -> Turns:
    """The turns of a preset. Raises ValueError for a name that is none."""
    if isinstance(turns, Turns):
        return turns
    if turns not in TURNS:
        raise ValueError(f"turns: no preset {turns!r}; one of {', '.join(TURNS)}, or a table, would do")
    return TURNS[turns]
