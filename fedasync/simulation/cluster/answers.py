"""The answers of a run: what each is to be, how far it is, and on which servers its tokens came.

An answer's number is lease · n + its place in the group. Arrays, some sixty bytes an answer.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from math import nan
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedasync.simulation.cluster.prompts import Group, Turn
from fedasync.simulation.cluster.server import RolloutServer, Running

NOWHERE = -1

Columns = dict[str, NDArray[Any]]


class Answers:
    """All answers that were asked for, in groups of ``size``."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.prompt = array("q")
        """A lease's prompt."""
        self.base_version = array("i")
        self.prompt_tokens = array("i")
        self.goal = array("i")
        """Tokens that an answer generates in all its turns."""
        self.generated = array("d")
        """Tokens of the stretches that ended."""
        self.observed = array("i")
        """Tokens that tools have added to its context."""
        self.turn = array("h")
        self.server = array("h")
        """Where an answer is now, running, waiting or at a tool (`NOWHERE`: on no server)."""
        self.ran_on = array("h")
        """The server that ran it last."""
        self.start_s = array("d")
        self.end_s = array("d")
        self.turns: dict[int, list[Turn]] = {}
        self.correct: Callable[[Columns], None] | None = None
        """Says of the table what somebody knows better."""
        self._tries: dict[int, int] = {}
        self._lost_before: dict[int, int] = {}
        """Answer → stretches in the books when it was begun again: its own among them are lost."""
        self._leg_answer = array("q")
        self._leg_server = array("h")
        self._leg_from = array("d")
        self._leg_to = array("d")

    def add(self, prompt: int, base_version: int, group: Group) -> range:
        """Another lease's answers; their numbers."""
        size = self.size
        first = len(self.goal)
        self.prompt.append(prompt)
        self.base_version.append(base_version)
        self.prompt_tokens.append(group.prompt_tokens)
        self.goal.extend(group.tokens)
        self.generated.extend([0.0] * size)
        self.observed.extend([0] * size)
        self.turn.extend([0] * size)
        self.server.extend([NOWHERE] * size)
        self.ran_on.extend([NOWHERE] * size)
        self.start_s.extend([nan] * size)
        self.end_s.extend([nan] * size)
        if group.turns is not None:
            self.turns.update(zip(range(first, first + size), group.turns, strict=True))
        return range(first, first + size)

    def context(self, answer: int) -> int:
        """Tokens that must be resident before the next one is generated."""
        return int(self.prompt_tokens[answer // self.size] + self.generated[answer] + self.observed[answer])

    def left(self, answer: int) -> float:
        """Tokens to the end of the present turn: more than 0, and no whole number where a full KV cache took it out."""
        goal = self.goal[answer]
        if self.turns and (turns := self.turns.get(answer)) is not None:
            goal = sum(turn.tokens for turn in turns[: self.turn[answer] + 1])
        return max(1e-6, goal - self.generated[answer])

    def stretch(self, running: Running, server: RolloutServer, tokens: float) -> None:
        """The answer has generated that many tokens on the server, and stops there for now."""
        if not tokens:
            return  # it stops where it began: of no version
        self._leg_answer.append(running.answer)
        self._leg_server.append(server.number)
        self._leg_from.append(running.start_clock)
        self._leg_to.append(running.start_clock + tokens)
        self.generated[running.answer] += tokens

    def restart(self, answer: int) -> None:
        """From the prompt again: what was generated is lost."""
        self._lost_before[answer] = len(self._leg_answer)
        self._tries[answer] = self.tries(answer) + 1
        self.generated[answer] = 0.0
        self.observed[answer] = 0
        self.turn[answer] = 0
        self.server[answer] = NOWHERE

    def close(self, lease: int) -> None:
        """The lease has ended: what its answers were still to do is forgotten."""
        if self.turns:
            for answer in range(lease * self.size, (lease + 1) * self.size):
                self.turns.pop(answer, None)

    def tries(self, answer: int) -> int:
        """How often it was begun again."""
        return self._tries.get(answer, 0)

    def columns(self, servers: list[RolloutServer]) -> Columns:
        """The rollouts table: a row an answer that was started. Versions of a stretch are those of its server then.

        One that has generated nothing has one segment, of its base version.
        """
        for server in servers:  # what still runs has come so far
            for running in server.ends:
                self.stretch(running, server, server.tokens_of(running))
        count = len(self.goal)
        first = np.full(count, np.iinfo(np.int64).max)
        last = np.full(count, -1)
        changes = np.zeros(count, np.int64)
        weighted, tokens = np.zeros(count), np.zeros(count)
        leg_answer = np.frombuffer(self._leg_answer, np.int64)
        leg_server = np.frombuffer(self._leg_server, np.int16)
        leg_from, leg_to = np.frombuffer(self._leg_from), np.frombuffer(self._leg_to)
        kept_from = np.zeros(count, np.int64)
        kept_from[list(self._lost_before)] = list(self._lost_before.values())
        kept = np.arange(len(leg_answer)) >= kept_from[leg_answer]
        lost = np.bincount(leg_answer[~kept], (leg_to - leg_from)[~kept], count)
        version_from, version_to = np.zeros(len(leg_answer), np.int64), np.zeros(len(leg_answer), np.int64)
        order = np.flatnonzero(kept)
        order = order[np.argsort(leg_server[order], kind="stable")]
        cuts = np.searchsorted(leg_server[order], np.arange(len(servers) + 1))
        for server in servers:
            legs = order[cuts[server.number] : cuts[server.number + 1]]
            answer, begin, end = leg_answer[legs], leg_from[legs], leg_to[legs]
            clocks, versions = (np.array(column) for column in zip(*server.boundaries, strict=True))
            at_begin = np.searchsorted(clocks, begin, side="right") - 1
            at_end = np.maximum(np.searchsorted(clocks, end, side="left") - 1, at_begin)
            # ∫ version d(clock) up to each boundary: over a stretch it grows by the sum of its tokens' versions.
            area = np.concatenate([[0.0], np.cumsum(versions[:-1] * np.diff(clocks))])

            version_from[legs], version_to[legs] = versions[at_begin], versions[at_end]
            np.minimum.at(first, answer, versions[at_begin])
            np.maximum.at(last, answer, versions[at_end])
            np.add.at(changes, answer, at_end - at_begin)
            np.add.at(tokens, answer, end - begin)
            by_end = area[at_end] + versions[at_end] * (end - clocks[at_end])
            by_begin = area[at_begin] + versions[at_begin] * (begin - clocks[at_begin])
            np.add.at(weighted, answer, by_end - by_begin)
        by_answer = np.flatnonzero(kept)
        by_answer = by_answer[np.argsort(leg_answer[by_answer], kind="stable")]  # each answer's, as they came
        before, after = by_answer[:-1], by_answer[1:]
        changed = (leg_answer[before] == leg_answer[after]) & (version_to[before] != version_from[after])
        np.add.at(changes, leg_answer[after[changed]], 1)
        nothing = last < 0
        first[nothing] = last[nothing] = np.repeat(np.array(self.base_version), self.size)[nothing]
        started = np.flatnonzero(~np.isnan(np.array(self.start_s)))
        lease = started // self.size
        with np.errstate(invalid="ignore", divide="ignore"):
            mean = np.where(tokens > 0, weighted / tokens, first)
        mean = np.clip(mean, first, last)  # rounding
        columns: Columns = {
            "lease": lease,
            "prompt": np.array(self.prompt)[lease],
            "answer": started % self.size,
            "prompt_tokens": np.array(self.prompt_tokens)[lease],
            "generated_tokens": np.rint(tokens[started]).astype(np.int64),
            "lost_tokens": np.rint(lost[started]).astype(np.int64),
            "turns": np.array(self.turn)[started] + 1,
            "start_s": np.array(self.start_s)[started],
            "end_s": np.array(self.end_s)[started],
            "server": np.array(self.ran_on)[started],
            "base_version": np.array(self.base_version)[lease],
            "first_version": first[started],
            "last_version": last[started],
            "mean_version": mean[started],
            "segments": changes[started] + 1,
        }
        if self.correct is not None:
            self.correct(columns)
        return columns
