"""Which client gets the next lease."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Collection, Iterator
from heapq import heappop, heappush
from math import inf
from typing import Literal, Protocol

from fedasync.streams import Stream

Selection = Literal["random_idle", "same_client"]
"""A uniformly random idle client that is online; or the client that became free longest ago, before any that has not
worked yet (so that a population larger than the concurrency keeps its first clients: always-on workers)."""


class Presence(Protocol):
    """Who is online: realised availability of a simulated population, or who is connected to a real one."""

    def __call__(self, client: int, now: float) -> tuple[bool, float]:
        """Online at ``now``?, and the time (> now) at which that changes, infinite if it never does."""
        ...


class IdleClients:
    """The clients without a lease: one in, one out, at a cost independent of their number.

    A client found offline sleeps aside until it is online again, so that no client is looked at twice in a period.
    """

    def __init__(self, count: int, selection: Selection, presence: Presence | None, seed: int) -> None:
        self._random = selection == "random_idle"
        self._idle = array("i", range(count if self._random else 0))
        self._freed: deque[int] = deque()
        self._fresh: Iterator[int] = iter(range(0 if self._random else count))
        self._presence = presence
        self._asleep: list[tuple[float, int]] = []
        self._stream = Stream(seed, "selection")
        self._draws = 0
        self._ahead: list[int] = []

    @property
    def draws(self) -> int:
        """Random numbers used so far."""
        return self._draws - len(self._ahead)

    def go_on(self, draws: int, busy: Collection[int]) -> None:
        """Go on where another run of this seed stopped after so many draws; ``busy`` clients are to be freed later."""
        self._draws, self._ahead = draws, []
        if self._random:
            self._idle = array("i", (client for client in self._idle if client not in busy))
        else:
            self._fresh = iter([client for client in self._fresh if client not in busy])

    def free(self, client: int) -> None:
        """The client has no lease any more."""
        if self._random:
            self._idle.append(client)
        else:
            self._freed.append(client)

    def take(self, now: float) -> int | None:
        """An idle client that is online now, or None."""
        if self._presence is None:
            return self._next()
        while self._asleep and self._asleep[0][0] <= now:
            self.free(heappop(self._asleep)[1])
        while (client := self._next()) is not None:
            online, until = self._presence(client, now)
            if online:
                return client
            heappush(self._asleep, (until, client))
        return None

    @property
    def next_awake_s(self) -> float:
        """When the next of the clients found offline is back (infinite: none ever)."""
        return self._asleep[0][0] if self._asleep else inf

    def _next(self) -> int | None:
        if not self._random:
            return self._freed.popleft() if self._freed else next(self._fresh, None)
        idle = self._idle
        if not idle:
            return None
        if not self._ahead:
            self._ahead = self._stream.block(self._draws, 1024)[::-1]
            self._draws += 1024
        place = self._ahead.pop() % len(idle)
        last = idle.pop()
        if place == len(idle):
            return last
        chosen, idle[place] = idle[place], last
        return chosen
