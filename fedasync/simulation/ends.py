"""When the leases in flight end: a heap of what is near, and unsorted piles of what is far.

In one heap of 100,000 entries each removal looks at some thirty that lie anywhere in memory. Here the heap holds about
a thousand, and an entry that is far goes onto the pile of its stretch of time, which becomes the heap when its turn
comes: a calendar queue (Brown 1988, Communications of the ACM 31, 10).
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from math import inf, nextafter
from typing import Generic, TypeVar

T = TypeVar("T", bound=tuple)  # type: ignore[type-arg]

NEAR = 1024
"""Entries that a stretch of time should hold."""


class Ends(Generic[T]):
    """Tuples ordered by their first two members: a time (finite, s) and a number that no other has.

    ``near`` is a heap of all that end before ``horizon_s``. To add one: push it there, or, from the horizon on, call
    ``later``. Before looking for the next: ``refill`` when ``near`` is empty.
    """

    def __init__(self) -> None:
        self.near: list[T] = []
        self.horizon_s = inf
        self.most_near = 8 * NEAR
        """Entries beyond which the heap is worth a ``divide``."""
        self._per_s = 0.0
        self._passed = 0
        self._far = 0
        self._piles: dict[int, list[T]] = {}
        self._stretches: list[int] = []

    def __len__(self) -> int:
        return len(self.near) + self._far

    def add(self, entry: T) -> None:
        """Add an entry wherever it belongs."""
        if entry[0] < self.horizon_s:
            heappush(self.near, entry)
        else:
            self.later(entry)

    def later(self, entry: T) -> None:
        """Add an entry at or beyond the horizon."""
        stretch = int(entry[0] * self._per_s)
        pile = self._piles.get(stretch)
        if pile is None:
            pile = self._piles[stretch] = []
            heappush(self._stretches, stretch)
        pile.append(entry)
        self._far += 1

    def refill(self) -> None:
        """Make the next stretch that holds anything the near one; nothing happens when none does."""
        if self._stretches:
            stretch = heappop(self._stretches)
            self.near[:] = self._piles.pop(stretch)
            heapify(self.near)
            self._set_horizon(stretch)
            self._far -= len(self.near)
            self._passed += len(self.near)
            if not NEAR // 16 <= len(self.near) <= NEAR * 16 and self._passed >= len(self):
                self.divide()  # only after as many have passed as are laid out: the cost stays in proportion

    def divide(self) -> None:
        """Lay all out anew, in stretches that would hold ``NEAR`` at the pace of the next ones.

        To be called when ``near`` has grown beyond ``most_near``; comes by itself when stretches turn out too long or
        too short.
        """
        self._passed = 0
        entries = sorted([*self.near, *(entry for pile in self._piles.values() for entry in pile)])
        self._piles.clear()
        self._stretches.clear()
        self._far = 0
        place = min(4 * NEAR, len(entries) - 1)
        span_s = entries[place][0] - entries[0][0]
        if len(entries) <= 2 * NEAR or span_s <= 0 or not place / span_s / NEAR * entries[-1][0] < 2.0**53:
            self.near[:] = entries  # sorted is a heap
            self.horizon_s = inf
            self.most_near = max(8 * NEAR, 2 * len(entries))
            return
        self._per_s = place / span_s / NEAR
        self._set_horizon(int(entries[0][0] * self._per_s))
        self.near[:] = [entry for entry in entries if entry[0] < self.horizon_s]
        for entry in entries[len(self.near) :]:
            self.later(entry)

    def _set_horizon(self, stretch: int) -> None:
        """The first number that ``later`` would put beyond the stretch, found to the last digit."""
        horizon_s = (stretch + 1) / self._per_s
        while int(horizon_s * self._per_s) <= stretch:
            horizon_s = nextafter(horizon_s, inf)
        while int((before := nextafter(horizon_s, 0.0)) * self._per_s) > stretch:
            horizon_s = before
        self.horizon_s = horizon_s
