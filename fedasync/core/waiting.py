"""Contributions that were accepted and wait, and the steps that they make."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Callable, Mapping
from math import floor, inf
from typing import Any

from fedasync.core.admission import Concurrency, Groups
from fedasync.core.buffering import Grouped, Periodic, Quota, Sliding, Tumbling
from fedasync.core.events import Arrival, Lease, Step
from fedasync.core.strategy import Strategy


class Waiting:
    """The state of a strategy's buffer: what waits, what a sliding window holds, when a step is due by the clock."""

    def __init__(self, strategy: Strategy, leases: Mapping[int, Lease], bases: Mapping[int, int] | None) -> None:
        """``leases`` are those in flight, the earliest first; ``bases`` counts them by base version, where asked."""
        buffer = strategy.buffer
        self._leases, self._bases = leases, bases
        self._by_lease = isinstance(buffer, Tumbling) and buffer.order != "arrival"
        """Who is taken depends on the lease's number: earlier leases have older bases, or the same."""
        self.arrivals: deque[Arrival] | list[Arrival] = [] if self._by_lease else deque()
        """In order of delivery, or of the leases' numbers where those decide."""
        self._bound = strategy.max_staleness if strategy.at_bound == "wait" else None
        self.needed = 1 if isinstance(buffer, Quota) else buffer.missing(0, 0, 0)
        """Contributions without which no step can begin (0 for a round, which failures may shorten)."""
        self.workers: set[int] = set()
        """Workers that wait for the next version, where delivering means waiting for it."""
        admission = strategy.admission
        self._holds_workers = isinstance(admission, Concurrency) and admission.redispatch == "next_version"
        self._buffer = buffer
        self._window: tuple[int, ...] = ()
        self._interval_s = buffer.interval_s if isinstance(buffer, Periodic) else 0.0
        self._ticks = 1
        """The next step at a fixed time is that many intervals from time 0."""
        self._tick_due = False
        self._drafted: set[int] = set()
        """Workers that were drafted for the last step."""
        self._limit_s = inf if not isinstance(buffer, Quota) or buffer.limit_s is None else buffer.limit_s
        self._round_ends_s = inf
        self.has_times = bool(self._interval_s) or self._limit_s < inf
        """Steps may be due by the clock."""

    def add(self, arrival: Arrival) -> None:
        if self._by_lease:
            insort(self.arrivals, arrival)  # a lease number comes first in the tuple
        else:
            self.arrivals.append(arrival)
        if self._holds_workers:
            self.workers.add(arrival.lease.worker)

    def missing(self, target: int) -> int:
        """Contributions that the next step lacks; ``target`` is what a round hopes for."""
        return self._buffer.missing(len(self.arrivals), len(self._window), target)

    def step(
        self, version: int, now: float, *, round_over: bool, nobody_works: bool, groups: Groups | None
    ) -> Step | None:
        """The step that starts from ``version``, if what it needs is there: its contributions wait no more."""
        buffer = self._buffer
        if isinstance(buffer, Quota):
            return self._drafted_step(buffer, version, now, nobody_works or self._tick_due)
        if isinstance(buffer, Grouped):
            return self._group_step(version, now, groups)
        due, self._tick_due = round_over or self._tick_due, False
        taken = buffer.take(len(self.arrivals), len(self._window), due)
        if not taken or (self._by_lease and self.held_back(version) is not None):
            return None
        if taken == len(self.arrivals) and not self._by_lease:
            entering = tuple(self.arrivals)
            self.arrivals.clear()
        else:
            entering = self._taken(taken)
        self._note_workers()
        if not isinstance(buffer, Sliding):
            return Step(version, entering, time_s=now)
        inside = (*self._window, *(arrival.lease.id for arrival in entering))
        cut = max(0, len(inside) - buffer.size)
        return Step(version, entering, inside[cut:], inside[:cut], time_s=now)

    def _taken(self, count: int) -> tuple[Arrival, ...]:
        """Take so many contributions out, in the order in which the update sees them."""
        waiting, buffer = self.arrivals, self._buffer
        if isinstance(waiting, deque):
            return tuple(waiting.popleft() for _ in range(count))
        newest = isinstance(buffer, Tumbling) and buffer.order == "freshest_first"
        chosen = slice(-count, None) if newest else slice(count)
        entering = waiting[chosen]
        del waiting[chosen]
        return tuple(reversed(entering) if newest else entering)

    def held_back(self, version: int) -> str | None:
        """In words, what a step from ``version`` waits for though enough contributions are there; None for nothing."""
        buffer, waiting = self._buffer, self.arrivals
        if not isinstance(buffer, Tumbling) or not isinstance(waiting, list) or len(waiting) < buffer.size:
            return None
        if buffer.order == "dispatch":
            first = next(iter(self._leases.values()), None)
            if first is None or waiting[buffer.size - 1].lease.id < first.id:
                return None
            return f"lease {first.id} of worker {first.worker}, which was given out before some that wait"
        if self._bound is None or self._bases is None:
            return None
        # What is in flight must fit into the steps that come while it is young enough, the oldest first. (What waits
        # fits: the oldest of it are taken, and admission lets no more start than all those steps take.)
        held = 0
        for base in sorted(self._bases):
            held += self._bases[base]
            if held > buffer.size * (base + self._bound - version):
                return (
                    f"some of {held} in flight from version {base} or before, which would grow older than "
                    f"max_staleness = {self._bound} before they could be used"
                )
        return None

    def committed(self, step: Step) -> None:
        """The step has become a version."""
        if isinstance(self._buffer, Sliding):
            self._window = step.window
            self.needed = self._buffer.missing(0, len(step.window), 0)

    def drop(self, too_stale: Callable[[Lease], bool]) -> list[Lease]:
        """Leases whose contributions wait and grew too stale: they wait no more."""
        dropped = [arrival.lease for arrival in self.arrivals if too_stale(arrival.lease)]
        if dropped:
            self.arrivals = type(self.arrivals)(arrival for arrival in self.arrivals if not too_stale(arrival.lease))
            self._note_workers()
        return dropped

    # -- steps by the clock ------------------------------------------------------------------------------------

    @property
    def next_s(self) -> float:
        """When the next step is due by the clock (infinite: never)."""
        return self._ticks * self._interval_s if self._interval_s else self._round_ends_s

    def round_begins(self, now: float) -> None:
        """The first lease since a step starts."""
        self._round_ends_s = now + self._limit_s

    def sleeps_until(self, now: float) -> None:
        """Nobody was there for the steps that were due before now."""
        if self._interval_s:
            self._ticks = max(self._ticks, self._first_tick(now))

    def ring(self, now: float) -> None:
        """It is ``now``: a step may be due."""
        if self.next_s > now:
            return
        self._tick_due = True
        if self._interval_s:
            self._ticks = self._first_tick(now)
            self._ticks += self.next_s <= now
        else:
            self._round_ends_s = inf

    def silence(self) -> None:
        """A step that was due, and for which nobody was there, is not made up for."""
        self._tick_due = False

    def _first_tick(self, now: float) -> int:
        """The smallest k with k·interval ≥ now: found beside the quotient, which is rounded."""
        tick = max(1, floor(now / self._interval_s) - 1)
        while tick * self._interval_s < now:
            tick += 1
        return tick

    # -- state -------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Plain data, for a snapshot."""
        return {
            "arrivals": [plain(arrival) for arrival in self.arrivals],
            "window": list(self._window),
            "ticks": self._ticks,
            "tick_due": self._tick_due,
            "drafted": sorted(self._drafted),
            "round_ends_s": None if self._round_ends_s == inf else self._round_ends_s,
        }

    def load(self, state: dict[str, Any]) -> None:
        self.arrivals = type(self.arrivals)(map(arrival_of, state["arrivals"]))
        self._window = tuple(state["window"])
        if isinstance(self._buffer, Sliding):
            self.needed = self._buffer.missing(0, len(self._window), 0)
        self._ticks, self._tick_due = state["ticks"], state["tick_due"]
        self._drafted = set(state["drafted"])
        self._round_ends_s = inf if state["round_ends_s"] is None else state["round_ends_s"]
        self._note_workers()

    # -- inside ------------------------------------------------------------------------------------------------

    def _note_workers(self) -> None:
        if self._holds_workers:
            self.workers = {arrival.lease.worker for arrival in self.arrivals}

    def _drafted_step(self, quota: Quota, version: int, now: float, over: bool) -> Step | None:
        """The step of a quota that is full: it takes all that wait."""
        waiting = tuple(self.arrivals)
        places = quota.draft(waiting, self._drafted, over)
        if places is None:
            return None
        entering = tuple(waiting[i] for i in places)
        self._drafted = {arrival.lease.worker for arrival in entering}
        self.arrivals.clear()
        self._note_workers()
        self._tick_due = False
        chosen = set(places)
        undrafted = tuple(arrival for i, arrival in enumerate(waiting) if i not in chosen)
        return Step(version, entering, undrafted=undrafted, time_s=now)

    def _group_step(self, version: int, now: float, groups: Groups | None) -> Step | None:
        """The step of a group that is ready."""
        if groups is None or (ready := groups.ready(now)) is None:
            return None
        entering = tuple(arrival for arrival in self.arrivals if groups.is_part(arrival.lease, ready))
        self.arrivals = deque(arrival for arrival in self.arrivals if not groups.is_part(arrival.lease, ready))
        groups.taken(ready)
        return Step(version, entering, time_s=now)


def plain(arrival: Arrival) -> list[Any]:
    """An arrival as JSON keeps it."""
    return [list(arrival.lease), arrival.delivered_s, arrival.delivered_version]


def arrival_of(fields: list[Any]) -> Arrival:
    """The arrival that ``plain`` wrote."""
    return Arrival(Lease(*fields[0]), fields[1], fields[2])
