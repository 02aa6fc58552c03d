"""Which prompt goes out next: those that are asked again first, then the data set in its order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from fedasync.simulation.cluster.prompts import Group, PromptStream


class Asked(NamedTuple):
    """What a lease asks: a prompt, in which epoch, for which time."""

    prompt: int
    epoch: int
    attempt: int
    failures: int = 0
    """How many of its attempts before were the prompt's own failures."""


class PromptQueue:
    """The prompts of a run. One whose group failed ``most_attempts`` times is given up."""

    def __init__(self, stream: PromptStream, most_attempts: int) -> None:
        self._stream = stream
        self._most_attempts = most_attempts
        self._position = 0
        self._again: deque[Asked] = deque()
        self.exhausted = False
        """The data set has no further prompt."""

    def next(self, has_to_wait: Callable[[int], bool]) -> Asked | None:
        """The first prompt that need not wait for a later round; None when there is none, or all of the data set do."""
        passed_over: list[Asked] = []
        waiting: set[int] = set()
        while (asked := self._first()) is not None and has_to_wait(asked.prompt):
            passed_over.append(asked)
            waiting.add(asked.prompt)
            if len(waiting) == self._stream.count:  # another epoch would bring the same ones
                asked = None
                break
        self._again.extendleft(reversed(passed_over))
        return asked

    def put_back(self, asked: Asked) -> None:
        """It could not go out after all, and is the next one."""
        self._again.appendleft(asked)

    def ask_again(self, asked: Asked, *, failed: bool) -> str | None:
        """The prompt is to go out once more, unless it ``failed`` too often: then, in words, that it is given up."""
        failures = asked.failures + failed
        if failed and failures >= self._most_attempts:
            return f"prompt {asked.prompt} is given up after {failures} attempts"
        self._again.append(asked._replace(attempt=asked.attempt + 1, failures=failures))
        return None

    def group(self, asked: Asked) -> Group:
        """What comes of it."""
        return self._stream.group(asked.prompt, asked.epoch, asked.attempt)

    def _first(self) -> Asked | None:
        if self._again:
            return self._again.popleft()
        found = self._stream.prompt_at(self._position)
        if found is None:
            self.exhausted = True
            return None
        self._position += 1
        return Asked(*found, 0)
