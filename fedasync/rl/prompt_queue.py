"""Which prompt goes out next: those that are asked again first, then the data set in its order."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from itertools import islice
from typing import Any, NamedTuple, Protocol


class Asked(NamedTuple):
    """What a lease asks: a prompt, in which epoch, for which time."""

    prompt: int
    epoch: int
    attempt: int
    failures: int = 0
    """How many of its attempts before failed by a fault of its own."""


class Order(Protocol):
    """A data set's order (`PromptOrder`)."""

    @property
    def count(self) -> int | None:
        """Prompts of the data set; None: without end."""
        ...

    def prompt_at(self, position: int) -> tuple[int, int] | None:
        """The prompt at a place ≥ 0, and its epoch; None when the data are exhausted."""
        ...


class PromptQueue:
    """The prompts of a run. One whose group failed ``most_attempts`` times by its own fault is given up."""

    def __init__(self, order: Order, most_attempts: int) -> None:
        self._order = order
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
            if len(waiting) == self._order.count:  # another epoch would bring the same ones
                asked = None
                break
        self._again.extendleft(reversed(passed_over))
        return asked

    def put_back(self, asked: Asked) -> None:
        """It could not go out after all, and is the next one."""
        self._again.appendleft(asked)

    def ask_again(self, asked: Asked, *, failed: bool) -> str | None:
        """The prompt is to go out once more, unless it ``failed`` too often: then, in words, that it is given up.

        An attempt that somebody else brought to nothing has not ``failed``.
        """
        failures, attempts = asked.failures + failed, asked.attempt + 1
        if failed and failures >= self._most_attempts:
            own = "" if failures == attempts else f", {failures} of which failed by its own fault"
            return f"prompt {asked.prompt} is given up after {attempts} attempts{own}"
        self._again.append(asked._replace(attempt=asked.attempt + 1, failures=failures))
        return None

    def upcoming(self, count: int) -> list[tuple[int, int]]:
        """The next prompts and their epochs, as far as can be seen now, without taking them."""
        found = [(asked.prompt, asked.epoch) for asked in islice(self._again, count)]
        position = self._position
        while len(found) < count and (place := self._order.prompt_at(position)) is not None:
            found.append(place)
            position += 1
        return found

    def state(self) -> dict[str, Any]:
        """Plain data, for a snapshot."""
        return {"position": self._position, "again": [list(asked) for asked in self._again], "over": self.exhausted}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self._position, self.exhausted = state["position"], state["over"]
        self._again = deque(Asked(*fields) for fields in state["again"])

    def _first(self) -> Asked | None:
        if self._again:
            return self._again.popleft()
        found = self._order.prompt_at(self._position)
        if found is None:
            self.exhausted = True
            return None
        self._position += 1
        return Asked(*found, 0)
