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
from collections.abc import Callable
from heapq import heappop, heappush
from math import isfinite
from typing import Any

from fedasync.core import log
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
from fedasync.core.strategy import Strategy

Record = Callable[[float, int, int, int, int, int, int, str | None], None]


def _no_record(*_: object) -> None:
    """The log of somebody who keeps none."""


class Coordinator:
    """One run of a strategy.

    ``record`` receives every change of every lease as a row (``EventLog.append``). Calls must come with times that
    never go back; ValueError otherwise, and for a lease number that was never given out.
    """

    def __init__(self, strategy: Strategy, record: Record = _no_record) -> None:
        self.strategy = strategy
        self.version = 0
        self.published = 0
        self.round_started = 0
        self.now = -float("inf")
        self.ledger = Ledger()
        self._record = record
        self._next_lease = 0
        self._leases: dict[int, Lease] = {}
        self._waiting: deque[Arrival] = deque()
        self._window: deque[int] = deque()
        self._step: Step | None = None
        self._deadlines: list[tuple[float, int]] = []

    @property
    def in_flight(self) -> int:
        return len(self._leases)

    @property
    def accepted(self) -> int:
        """Contributions accepted since the start, less those dropped from the buffer later."""
        return self.ledger.buffered + self.ledger.consumed

    @property
    def stepping(self) -> bool:
        """A step was handed out and is not committed yet."""
        return self._step is not None

    @property
    def admits(self) -> bool:
        """A worker that asks now gets a lease."""
        return self.strategy.admission.admits(self)

    @property
    def step(self) -> Step | None:
        """The outstanding step, which a runtime that was restored must apply again."""
        return self._step

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
        self._at(now)
        if not self.strategy.admission.admits(self):
            return None
        timeout_s = self.strategy.lease_timeout_s
        deadline_s = None if timeout_s is None else now + timeout_s
        lease = Lease(self._next_lease, worker, self.published, now, deadline_s)
        self._next_lease += 1
        self.round_started += 1
        self._leases[lease.id] = lease
        if deadline_s is not None:
            heappush(self._deadlines, (deadline_s, lease.id))
        self.ledger.admitted += 1
        self.ledger.in_flight += 1
        self._record(now, log.ADMITTED, lease.id, worker, self.published, self.published, log.NONE, None)
        return lease

    def deliver(self, lease_id: int, now: float, defect: str | None = None) -> list[Event]:
        """The result of a lease has arrived; ``defect`` names what the runtime's check found wrong with it."""
        lease = self._end(lease_id, now)
        if lease is None:
            return [Rejected(lease_id, "the lease had ended", ignored=True)]
        events: list[Event]
        if defect is None and self._too_stale(lease):
            defect = "stale"
        if lease.deadline_s is not None and now > lease.deadline_s:
            events = [self._failed(lease, "timeout", now)]  # late, whether or not a timer was looked at meanwhile
        elif defect is not None:
            self._reject(lease, defect, now)
            events = [Rejected(lease_id, defect)]
        else:
            self.ledger.buffered += 1
            self._waiting.append(Arrival(lease, now, self.version))
            staleness = self.version - lease.base_version
            self._record(now, log.DELIVERED, lease_id, lease.worker, lease.base_version, self.version, staleness, None)
            events = [Accepted(lease)]
        self._advance(now, events)
        return events

    def fail(self, lease_id: int, reason: str, now: float) -> list[Event]:
        """The lease will bring no result: lost, crashed, withdrawn."""
        lease = self._end(lease_id, now)
        if lease is None:
            return [Rejected(lease_id, "the lease had ended", ignored=True)]
        events: list[Event] = [self._failed(lease, reason, now)]
        self._advance(now, events)
        return events

    def commit(self, now: float) -> list[Event]:
        """The outstanding step has been applied to the model: version + 1."""
        step = self._step
        if step is None:
            raise ValueError(f"commit at version {self.version}: no step is outstanding")
        self._at(now)
        self._step = None
        self.version += 1
        self.round_started = 0
        self._window = deque(step.window)
        for arrival in step.entering:
            lease = arrival.lease
            self.ledger.buffered -= 1
            self.ledger.consumed += 1
            tau = step.staleness(arrival)
            self._record(now, log.CONSUMED, lease.id, lease.worker, lease.base_version, step.version, tau, None)
        self._record(now, log.COMMITTED, log.NONE, log.NONE, log.NONE, self.version, log.NONE, None)
        events: list[Event] = []
        publication = self.strategy.publication
        if publication.due(self.version, self.published):
            self.published = self.version
            self._record(now, log.PUBLISHED, log.NONE, log.NONE, log.NONE, self.version, log.NONE, None)
            events.append(Published(self.version, publication.in_flight))
            if publication.in_flight == "abort":
                self._cancel_all("aborted by a publication", now, events)
        if self.strategy.max_staleness is not None:
            self._sweep(now, events)
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
        if events:
            self._advance(now, events)
        return events

    # -- what it says of itself --------------------------------------------------------------------------------

    def explain(self) -> str:
        """Who waits for whom, in one line."""
        workers = sorted({lease.worker for lease in self._leases.values()})
        shown = ", ".join(map(str, workers[:8])) + (f" and {len(workers) - 8} more" if len(workers) > 8 else "")
        missing = self.strategy.buffer.missing(len(self._waiting), len(self._window), self._round_target)
        parts = [f"version {self.version}"]
        if self._step is not None:
            parts.append(f"the server applies {len(self._step.entering)} contributions and must commit")
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
            if self._step is None
            else {
                "version": self._step.version,
                "entering": [_plain(a) for a in self._step.entering],
                "window": list(self._step.window),
                "leaving": list(self._step.leaving),
            },
            "ledger": self.ledger.as_dict(),
        }

    @classmethod
    def restore(cls, strategy: Strategy, state: dict[str, Any], record: Record = _no_record) -> Coordinator:
        """A coordinator that goes on from ``snapshot``'s state as if nothing had happened.

        Raises ValueError when the snapshot was taken under another strategy.
        """
        if state["strategy"] != strategy.identity:
            raise ValueError(f"the snapshot is of strategy {state['strategy']}, not of {strategy.identity}")
        self = cls(strategy, record)
        self.version = state["version"]
        self.published = state["published"]
        self.round_started = state["round_started"]
        self.now = -float("inf") if state["now"] is None else state["now"]
        self.ledger = Ledger.from_dict(state["ledger"])
        self._next_lease = state["next_lease"]
        self._leases = {fields[0]: Lease(*fields) for fields in state["leases"]}
        self._waiting = deque(map(_arrival, state["waiting"]))
        self._window = deque(state["window"])
        if (step := state["step"]) is not None:
            entering = tuple(map(_arrival, step["entering"]))
            self._step = Step(step["version"], entering, tuple(step["window"]), tuple(step["leaving"]))
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
        self._at(now)
        lease = self._leases.pop(lease_id, None)
        if lease is not None:
            self.ledger.in_flight -= 1
            return lease
        self.ledger.ignored += 1
        self._record(now, log.IGNORED, lease_id, log.NONE, log.NONE, self.version, log.NONE, "the lease had ended")
        return None

    @property
    def _round_target(self) -> int:
        """Results that the round still hopes for: those asked for, less the failures that nobody replaces."""
        cohort = self.strategy.admission
        if not isinstance(cohort, Cohort):
            return 0
        to_come = cohort.size - self.round_started + len(self._leases)
        return min(cohort.target, len(self._waiting) + to_come)

    def _too_stale(self, lease: Lease) -> bool:
        bound = self.strategy.max_staleness
        return bound is not None and self.version - lease.base_version > bound

    def _reject(self, lease: Lease, reason: str, now: float) -> None:
        self.ledger.rejected[reason] += 1
        tau = self.version - lease.base_version
        self._record(now, log.REJECTED, lease.id, lease.worker, lease.base_version, self.version, tau, reason)

    def _failed(self, lease: Lease, reason: str, now: float) -> Failed:
        self.ledger.failed[reason] += 1
        tau = self.version - lease.base_version
        self._record(now, log.FAILED, lease.id, lease.worker, lease.base_version, self.version, tau, reason)
        return Failed(lease, reason)

    def _cancel_all(self, reason: str, now: float, events: list[Event]) -> None:
        for lease in self._leases.values():
            self.ledger.in_flight -= 1
            self.ledger.cancelled[reason] += 1
            tau = self.version - lease.base_version
            self._record(now, log.CANCELLED, lease.id, lease.worker, lease.base_version, self.version, tau, reason)
            events.append(Cancelled(lease, reason))
        self._leases.clear()

    def _advance(self, now: float, events: list[Event]) -> None:
        """Hand out the next step if its contributions are there, and end a round that is over."""
        if self._step is not None:
            return
        strategy, waiting = self.strategy, self._waiting
        round_over = False
        if isinstance(strategy.admission, Cohort):
            all_ended = self.round_started >= strategy.admission.size and not self._leases
            round_over = len(waiting) >= strategy.admission.target or all_ended
            if all_ended and not waiting:
                self.round_started = 0  # nothing came back: the round starts anew
        taken = strategy.buffer.take(len(waiting), len(self._window), round_over)
        if not taken:
            return
        if isinstance(strategy.buffer, Tumbling) and strategy.buffer.order == "oldest_first":
            self._waiting = waiting = deque(sorted(waiting, key=_age))
        entering = tuple(waiting.popleft() for _ in range(taken))
        window: tuple[int, ...] = ()
        leaving: tuple[int, ...] = ()
        if isinstance(strategy.buffer, Sliding):
            inside = (*self._window, *(a.lease.id for a in entering))
            cut = max(0, len(inside) - strategy.buffer.size)
            leaving, window = inside[:cut], inside[cut:]
        self._step = Step(self.version, entering, window, leaving)
        if isinstance(strategy.buffer, Barrier) and self._leases:
            self._cancel_all("over-selected", now, events)
        events.append(StepReady(self._step))

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
