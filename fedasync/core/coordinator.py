"""The coordinator: the state machine that every runtime drives.

It knows no clock, no thread, no socket and no array. Time comes in as an argument, what to do comes out as values:

    lease  = coordinator.request(worker, now)          # a Lease, or None: not now
    events = coordinator.deliver(lease.id, now)        # Accepted | Rejected, maybe StepReady and Cancelled
    events = coordinator.fail(lease.id, reason, now)   # the slot is given back
    events = coordinator.commit(now)                   # the step is done: Published, maybe the next StepReady
    t      = coordinator.next_timer()
    events = coordinator.on_timer(now)

The arrays of a contribution stay with the runtime, under the lease's number.
"""

from __future__ import annotations

from collections import deque
from heapq import heappop, heappush
from math import inf, isfinite
from typing import Any

from fedasync.core.admission import Cohort
from fedasync.core.buffering import Barrier, Sliding, Tumbling
from fedasync.core.events import (
    Accepted,
    Arrival,
    Cancelled,
    Event,
    Failed,
    Lease,
    Published,
    Rejected,
    Step,
    StepReady,
)
from fedasync.core.ledger import Ledger
from fedasync.core.log import (
    ADMITTED,
    CANCELLED,
    COMMITTED,
    CONSUMED,
    DELIVERED,
    FAILED,
    IGNORED,
    NONE,
    PUBLISHED,
    REJECTED,
    EventLog,
)
from fedasync.core.strategy import Strategy

_ACCEPTED = Accepted()
_new = tuple.__new__
"""Makes a lease without the keyword handling of its class: one is made for every piece of work."""


class Coordinator:
    """One run of a strategy.

    ``log`` receives every change of every lease as a row. Calls must come with times that never go back; ValueError
    otherwise, and for a lease number that was never given out.
    """

    def __init__(self, strategy: Strategy, log: EventLog | None = None) -> None:
        self.strategy = strategy
        self.version = 0
        self.published = 0
        self.round_started = 0
        self.now = -float("inf")
        self.ledger = Ledger()
        self.step: Step | None = None
        """The outstanding step, which a runtime that was restored must apply again."""
        self.log = EventLog(_forget) if log is None else log
        self._record = self.log.append
        self._admission = strategy.admission
        self._buffer = strategy.buffer
        self._publication = strategy.publication
        self._sliding = isinstance(strategy.buffer, Sliding)
        self._cohort = strategy.admission if isinstance(strategy.admission, Cohort) else None
        self._timeout_s = strategy.lease_timeout_s
        self._needed = strategy.buffer.missing(0, 0, 0)
        """Accepted contributions without which no step can begin (0 for a round, which failures may shorten)."""
        self._most_stale = inf if strategy.max_staleness is None else strategy.max_staleness
        self._next_lease = 0
        self._leases: dict[int, Lease] = {}
        self._waiting: deque[Arrival] = deque()
        self._window: deque[int] = deque()
        self._deadlines: list[tuple[float, int]] = []

    @property
    def in_flight(self) -> int:
        return len(self._leases)

    @property
    def waiting(self) -> int:
        """Accepted contributions that no step has taken yet."""
        return len(self._waiting)

    @property
    def slots(self) -> int:
        """How many workers that ask now get a lease (≤ 0: none)."""
        return self._admission.slots(self)

    @property
    def admits(self) -> bool:
        """A worker that asks now gets a lease."""
        return self.slots > 0

    @property
    def leases(self) -> tuple[Lease, ...]:
        """The leases in flight, in the order of their admission."""
        return tuple(self._leases.values())

    def is_in_flight(self, lease_id: int) -> bool:
        """Somebody still waits for this lease's result."""
        return lease_id in self._leases

    # -- what a runtime tells ----------------------------------------------------------------------------------

    def request(self, worker: int, now: float) -> Lease | None:
        """A worker asks for work: a lease on the published version, or None when admission says "not now"."""
        if not now >= self.now:
            self._at(now)
        self.now = now
        if self._admission.slots(self) <= 0:
            return None
        base, lease_id, ledger = self.published, self._next_lease, self.ledger
        deadline_s = None if self._timeout_s is None else now + self._timeout_s
        lease: Lease = _new(Lease, (lease_id, worker, base, now, deadline_s))
        self._next_lease = lease_id + 1
        self.round_started += 1
        self._leases[lease_id] = lease
        if deadline_s is not None:
            heappush(self._deadlines, (deadline_s, lease_id))
        ledger.admitted += 1
        ledger.in_flight += 1
        self._record((now, ADMITTED, lease_id, worker, base, base, NONE, NONE))
        if not lease_id & 1023:
            self.log.pack()
        return lease

    def deliver(self, lease_id: int, now: float, defect: str | None = None) -> list[Event]:
        """The result of a lease has arrived; ``defect`` names what the runtime's check found wrong with it."""
        lease = self._end(lease_id, now)
        if lease is None:
            return [Rejected(lease_id, "the lease had ended", ignored=True)]
        events: list[Event]
        staleness = self.version - lease.base_version
        if defect is None and staleness > self._most_stale:
            defect = "stale"
        if lease.deadline_s is not None and now > lease.deadline_s:
            events = [self._failed(lease, "timeout", now)]  # late, whether or not a timer was looked at meanwhile
        elif defect is not None:
            self._reject(lease, defect, now)
            events = [Rejected(lease_id, defect)]
        else:
            self.ledger.buffered += 1
            self._waiting.append(_new(Arrival, (lease, now, self.version)))
            self._record((now, DELIVERED, lease_id, lease.worker, lease.base_version, self.version, staleness, NONE))
            events = [_ACCEPTED]
        if self.step is None and len(self._waiting) >= self._needed:
            self._advance(now, events)
        return events

    def fail(self, lease_id: int, reason: str, now: float) -> list[Event]:
        """The lease will bring no result: lost, crashed, withdrawn."""
        lease = self._end(lease_id, now)
        if lease is None:
            return [Rejected(lease_id, "the lease had ended", ignored=True)]
        events: list[Event] = [self._failed(lease, reason, now)]
        if self.step is None:
            self._advance(now, events)
        return events

    def commit(self, now: float) -> list[Event]:
        """The outstanding step has been applied to the model: version + 1."""
        step = self.step
        if step is None:
            raise ValueError(f"commit at version {self.version}: no step is outstanding")
        self._at(now)
        self.step = None
        self.version += 1
        self.round_started = 0
        if self._sliding:
            self._window = deque(step.window)
            self._needed = self._buffer.missing(0, len(step.window), 0)
        record, base = self._record, step.version
        for lease, _, _ in step.entering:
            tau = base - lease.base_version
            record((now, CONSUMED, lease.id, lease.worker, lease.base_version, base, tau, NONE))
        self.ledger.buffered -= len(step.entering)
        self.ledger.consumed += len(step.entering)
        record((now, COMMITTED, NONE, NONE, NONE, self.version, NONE, NONE))
        events: list[Event] = []
        publication = self._publication
        if publication.due(self.version, self.published):
            self.published = self.version
            record((now, PUBLISHED, NONE, NONE, NONE, self.version, NONE, NONE))
            events.append(Published(self.version, publication.in_flight))
            if publication.in_flight == "abort":
                self._cancel_all("aborted by a publication", now, events)
        if self._most_stale < inf:
            self._sweep(now, events)
        if len(self._waiting) >= self._needed:
            self._advance(now, events)
        return events

    def next_timer(self) -> float | None:
        """When ``on_timer`` wants to be called next, if no lease ends before."""
        if len(self._deadlines) > 2 * len(self._leases) + 64:  # one long lease would keep all that ended behind it
            self._deadlines = sorted(entry for entry in self._deadlines if entry[1] in self._leases)
        while self._deadlines and self._deadlines[0][1] not in self._leases:
            heappop(self._deadlines)
        return self._deadlines[0][0] if self._deadlines else None

    def on_timer(self, now: float) -> list[Event]:
        """Give up the leases whose time is over. A result that arrives at that very instant comes first."""
        self._at(now)
        events: list[Event] = []
        while (deadline_s := self.next_timer()) is not None and deadline_s <= now:
            lease = self._leases.pop(heappop(self._deadlines)[1])
            self.ledger.in_flight -= 1
            events.append(self._failed(lease, "timeout", now))
        if events and self.step is None:
            self._advance(now, events)
        return events

    # -- what it says of itself --------------------------------------------------------------------------------

    def explain(self) -> str:
        """Who waits for whom, in one line."""
        workers = sorted({lease.worker for lease in self._leases.values()})
        shown = ", ".join(map(str, workers[:8])) + (f" and {len(workers) - 8} more" if len(workers) > 8 else "")
        missing = self.strategy.buffer.missing(len(self._waiting), len(self._window), self._round_target)
        parts = [f"version {self.version}"]
        if self.step is not None:
            parts.append(f"the server applies {len(self.step.entering)} contributions and must commit")
        elif missing:
            parts.append(f"the next step lacks {missing} contribution{'s' * (missing > 1)}, {len(self._waiting)} wait")
        parts.append(f"{self.in_flight} in flight" + (f" at workers {shown}" if workers else ", nobody works"))
        if self.admits:
            parts.append("a free slot waits for a worker to ask")
        else:
            parts.append(f"no lease is given out: {self.strategy.admission.refusal(self)}")
        if (timer := self.next_timer()) is not None:
            parts.append(f"the next lease times out at {timer:g} s")
        return "; ".join(parts)

    def snapshot(self) -> dict[str, Any]:
        """The whole state as plain data (JSON keeps it), between any two calls."""
        return {
            "strategy": self.strategy.identity,
            "version": self.version,
            "published": self.published,
            "round_started": self.round_started,
            "now": self.now if isfinite(self.now) else None,
            "next_lease": self._next_lease,
            "leases": [list(lease) for lease in self._leases.values()],
            "waiting": [_plain(a) for a in self._waiting],
            "window": list(self._window),
            "step": None
            if self.step is None
            else {
                "version": self.step.version,
                "entering": [_plain(a) for a in self.step.entering],
                "window": list(self.step.window),
                "leaving": list(self.step.leaving),
            },
            "ledger": self.ledger.as_dict(),
        }

    @classmethod
    def restore(cls, strategy: Strategy, state: dict[str, Any], log: EventLog | None = None) -> Coordinator:
        """A coordinator that goes on from ``snapshot``'s state as if nothing had happened.

        Raises ValueError when the snapshot was taken under another strategy.
        """
        if state["strategy"] != strategy.identity:
            raise ValueError(f"the snapshot is of strategy {state['strategy']}, not of {strategy.identity}")
        self = cls(strategy, log)
        self.version = state["version"]
        self.published = state["published"]
        self.round_started = state["round_started"]
        self.now = -float("inf") if state["now"] is None else state["now"]
        self.ledger = Ledger.from_dict(state["ledger"])
        self._next_lease = state["next_lease"]
        self._leases = {fields[0]: Lease(*fields) for fields in state["leases"]}
        self._waiting = deque(map(_arrival, state["waiting"]))
        self._window = deque(state["window"])
        self._needed = self._buffer.missing(0, len(self._window), 0)
        if (step := state["step"]) is not None:
            entering = tuple(map(_arrival, step["entering"]))
            self.step = Step(step["version"], entering, tuple(step["window"]), tuple(step["leaving"]))
        for lease in self._leases.values():
            if lease.deadline_s is not None:
                heappush(self._deadlines, (lease.deadline_s, lease.id))
        return self

    # -- inside ------------------------------------------------------------------------------------------------

    def _at(self, now: float) -> None:
        if not now >= self.now:  # also refuses NaN
            raise ValueError(f"time goes forward: now = {now}, after {self.now}")
        self.now = now

    def _end(self, lease_id: int, now: float) -> Lease | None:
        """Take a lease out of flight; None, with a row in the log, when it had ended before."""
        if not 0 <= lease_id < self._next_lease:
            raise ValueError(f"lease {lease_id} was never given out (the next one is {self._next_lease})")
        if not now >= self.now:
            self._at(now)
        self.now = now
        lease = self._leases.pop(lease_id, None)
        if lease is not None:
            self.ledger.in_flight -= 1
            return lease
        self.ledger.ignored += 1
        code = self.log.code("the lease had ended")
        self._record((now, IGNORED, lease_id, NONE, NONE, self.version, NONE, code))
        return None

    @property
    def _round_target(self) -> int:
        """Results that the round still hopes for: those asked for, less the failures that nobody replaces."""
        cohort = self._cohort
        if cohort is None:
            return 0
        to_come = cohort.size - self.round_started + len(self._leases)
        return min(cohort.target, len(self._waiting) + to_come)

    def _too_stale(self, lease: Lease) -> bool:
        return self.version - lease.base_version > self._most_stale

    def _ended(self, kind: int, lease: Lease, reason: str, now: float) -> None:
        tau = self.version - lease.base_version
        code = self.log.code(reason)
        self._record((now, kind, lease.id, lease.worker, lease.base_version, self.version, tau, code))

    def _reject(self, lease: Lease, reason: str, now: float) -> None:
        self.ledger.rejected[reason] += 1
        self._ended(REJECTED, lease, reason, now)

    def _failed(self, lease: Lease, reason: str, now: float) -> Failed:
        self.ledger.failed[reason] += 1
        self._ended(FAILED, lease, reason, now)
        return Failed(lease, reason)

    def _cancel_all(self, reason: str, now: float, events: list[Event]) -> None:
        for lease in self._leases.values():
            self.ledger.in_flight -= 1
            self.ledger.cancelled[reason] += 1
            self._ended(CANCELLED, lease, reason, now)
            events.append(Cancelled(lease, reason))
        self._leases.clear()

    def _advance(self, now: float, events: list[Event]) -> None:
        """Hand out the next step if its contributions are there, and end a round that is over."""
        waiting, buffer, cohort = self._waiting, self._buffer, self._cohort
        round_over = False
        if cohort is not None:
            all_ended = self.round_started >= cohort.size and not self._leases
            round_over = len(waiting) >= cohort.target or all_ended
            if all_ended and not waiting:
                self.round_started = 0  # nothing came back: the round starts anew
        taken = buffer.take(len(waiting), len(self._window), round_over)
        if not taken:
            return
        if isinstance(buffer, Tumbling) and buffer.order == "oldest_first":
            self._waiting = waiting = deque(sorted(waiting, key=_age))
        if taken == len(waiting):
            entering = tuple(waiting)
            waiting.clear()
        else:
            entering = tuple(waiting.popleft() for _ in range(taken))
        window: tuple[int, ...] = ()
        leaving: tuple[int, ...] = ()
        if isinstance(buffer, Sliding):
            inside = (*self._window, *(a.lease.id for a in entering))
            cut = max(0, len(inside) - buffer.size)
            leaving, window = inside[:cut], inside[cut:]
        self.step = Step(self.version, entering, window, leaving)
        if isinstance(buffer, Barrier) and self._leases:
            self._cancel_all("over-selected", now, events)
        events.append(StepReady(self.step))

    def _sweep(self, now: float, events: list[Event]) -> None:
        """Drop what grew too stale while it waited for a step."""
        if not any(self._too_stale(a.lease) for a in self._waiting):
            return
        for arrival in self._waiting:
            if self._too_stale(arrival.lease):
                self.ledger.buffered -= 1
                self._reject(arrival.lease, "stale", now)
                events.append(Rejected(arrival.lease.id, "stale"))
        self._waiting = deque(a for a in self._waiting if not self._too_stale(a.lease))


def _age(arrival: Arrival) -> tuple[int, int]:
    return arrival.lease.base_version, arrival.lease.id


def _plain(arrival: Arrival) -> list[Any]:
    return [list(arrival.lease), arrival.delivered_s, arrival.delivered_version]


def _arrival(fields: list[Any]) -> Arrival:
    return Arrival(Lease(*fields[0]), fields[1], fields[2])


def _forget(_: bytes) -> None:
    """The log of somebody who keeps none."""
