"""The coordinator: the state machine that every runtime drives.

It knows no clock, no thread, no socket and no array. Time comes in as an argument, what to do comes out as values:

    lease  = coordinator.request(worker, now)          # a Lease, or None: not now
    events = coordinator.deliver(lease.id, now)        # Accepted | Rejected, maybe StepReady and Cancelled
    events = coordinator.fail(lease.id, reason, now)   # the slot is given back
    events = coordinator.commit(now)                   # the step is done: Published, maybe the next StepReady
    events = coordinator.commit(now, measured)         # … where ``coordinator.asks`` names measures
    t      = coordinator.next_timer()
    events = coordinator.on_timer(now)

The arrays of a contribution stay with the runtime, under the lease's number.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from math import inf, isfinite
from typing import Any

from fedasync.core.admission import Cohort, Concurrency, Groups
from fedasync.core.compass import Compass
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
from fedasync.core.publication import NOTHING, EveryVersion, State
from fedasync.core.strategy import Strategy
from fedasync.core.tally import tally_of
from fedasync.core.tiers import Tiers
from fedasync.core.timeouts import AdaptiveTimeout
from fedasync.core.waiting import Waiting, arrival_of, plain

_ACCEPTED = Accepted()
_new = tuple.__new__
"""Makes a lease without the keyword handling of its class: one is made for every piece of work."""


class Coordinator:
    """One run of a strategy.

    ``log`` receives every change of every lease as a row. ``profile`` holds the seconds that each worker's work is
    expected to take, for an admission that sorts workers by speed. Calls must come with times that never go back;
    ValueError otherwise, for a lease number that was never given out, and where a profile is needed and missing.
    """

    def __init__(self, strategy: Strategy, log: EventLog | None = None, profile: Sequence[float] | None = None) -> None:
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
        self._publication = strategy.publication
        self._every_version = isinstance(strategy.publication, EveryVersion)
        self.publications = 0
        """Versions that were published, version 0 apart."""
        self.checks = 0
        """Measures that were taken for publication."""
        self._remembered: dict[str, float] = {}
        """Measures at the last publication, those that the rule compares with."""
        self._cohort = strategy.admission if isinstance(strategy.admission, Cohort) else None
        timeout = strategy.lease_timeout_s
        self._adaptive = timeout if isinstance(timeout, AdaptiveTimeout) else None
        self._timeout_s = None if isinstance(timeout, AdaptiveTimeout) else timeout
        self._recent_s: deque[float] = deque(maxlen=1 if self._adaptive is None else self._adaptive.memory)
        """How long the last leases took, for time-outs that follow."""
        self._in_round: set[int] = set()
        """Workers that have started in this round: once each."""
        grouping = isinstance(strategy.admission, (Tiers, Compass))
        self.groups: Groups | None = strategy.admission.groups(profile) if grouping else None  # type: ignore[union-attr]
        self._leases: dict[int, Lease] = {}
        self._tally = tally_of(strategy)
        self._waiting = Waiting(strategy, self._leases, None if self._tally is None else self._tally.bases)
        waits = isinstance(strategy.admission, Concurrency) and strategy.admission.redispatch == "next_version"
        self._chooses = waits or self._cohort is not None or self.groups is not None
        """Some workers may have to wait while others start."""
        self._most_stale = inf if strategy.max_staleness is None else strategy.max_staleness
        self._next_lease = 0
        self._deadlines: list[tuple[float, int]] = []

    @property
    def in_flight(self) -> int:
        return len(self._leases)

    @property
    def waiting(self) -> int:
        """Accepted contributions that no step has taken yet."""
        return len(self._waiting.arrivals)

    @property
    def samples_in_flight(self) -> int:
        """Samples of the leases in flight that have not ended, where admission counts them (0 elsewhere)."""
        return 0 if self._tally is None else self._tally.samples_in_flight

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

    def may_start(self, worker: int) -> bool:
        """Whether this worker gets a lease if it asks now."""
        return self.admits and not self.has_to_wait(worker)

    def has_to_wait(self, worker: int) -> bool:
        """The worker gets no lease before a step, though others may."""
        if worker in self._in_round:
            return True
        return worker in self._waiting.workers or (self.groups is not None and not self.groups.may_start(worker))

    def is_in_flight(self, lease_id: int) -> bool:
        """Somebody still waits for this lease's result."""
        return lease_id in self._leases

    @property
    def asks(self) -> frozenset[str]:
        """Measures that the publication wants before the next commit."""
        return NOTHING if self._every_version else self._publication.asks(self._after_commit)

    # -- what a runtime tells ----------------------------------------------------------------------------------

    def request(self, worker: int, now: float, samples: int | None = None) -> Lease | None:
        """A worker asks for work: a lease on the published version, or None when admission says "not now".

        ``samples`` is how many the lease has where admission counts them; None is as many as it says.
        """
        tally = self._tally
        if tally is not None:
            samples = tally.checked(samples)
        if not now >= self.now:
            self._at(now)
        self.now = now
        if self._admission.slots(self) <= 0 or (self._chooses and self.has_to_wait(worker)):
            return None
        if self._waiting.has_times:
            if not self._leases and not self._waiting.arrivals:
                self._waiting.sleeps_until(now)
            if not self.round_started:
                self._waiting.round_begins(now)
        base, lease_id, ledger = self.published, self._next_lease, self.ledger
        timeout_s = self._timeout_s if self._adaptive is None else self._adaptive.seconds(self._recent_s)
        deadline_s = None if timeout_s is None else now + timeout_s
        if self._cohort is not None:
            self._in_round.add(worker)
        group, steps = (0, None) if self.groups is None else self.groups.start(worker, now)
        lease: Lease = _new(Lease, (lease_id, worker, base, now, deadline_s, group, steps))
        self._next_lease = lease_id + 1
        self.round_started += 1
        self._leases[lease_id] = lease
        if tally is not None:
            tally.admitted(lease, samples or 0)
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
        if self._adaptive is not None and (lease.deadline_s is None or now <= lease.deadline_s):
            self._recent_s.append(now - lease.admitted_s)
        staleness = self.version - lease.base_version
        if defect is None and staleness > self._most_stale:
            defect = "stale"
        if lease.deadline_s is not None and now > lease.deadline_s:
            events = [self._failed(lease, "timeout", now)]  # late, whether or not a timer was looked at meanwhile
        elif defect is not None:
            self._reject(lease, defect, now)
            events = [Rejected(lease_id, defect)]
            if self.groups is not None:
                self.groups.ended(lease, now, accepted=False)
        else:
            self.ledger.buffered += 1
            self._waiting.add(_new(Arrival, (lease, now, self.version)))
            self._record((now, DELIVERED, lease_id, lease.worker, lease.base_version, self.version, staleness, NONE))
            events = [_ACCEPTED]
            if self.groups is not None:
                self.groups.ended(lease, now, accepted=True)
        waiting = self._waiting
        if self.step is None and len(waiting.arrivals) >= waiting.needed:
            self._advance(now, events)
        return events

    def sample_done(self, lease_id: int) -> None:
        """One of a lease's samples has ended, and its slot is free; the lease itself stays in flight until delivered.

        Counts where admission counts samples, and while the lease is in flight. Raises ValueError for a lease that was
        never given out, and when all of its samples have ended before.
        """
        if not 0 <= lease_id < self._next_lease:
            raise ValueError(f"lease {lease_id} was never given out (the next one is {self._next_lease})")
        if self._tally is not None and lease_id in self._leases:
            self._tally.sample_done(lease_id)

    def fail(self, lease_id: int, reason: str, now: float, *, again: bool = False) -> list[Event]:
        """The lease will bring no result: lost, crashed, withdrawn.

        ``again``: it was no fault of the worker's (a server that was restarted), and its round gives it out anew.
        """
        lease = self._end(lease_id, now)
        if lease is None:
            return [Rejected(lease_id, "the lease had ended", ignored=True)]
        if again and lease.worker in self._in_round:
            self.round_started -= 1
            self._in_round.discard(lease.worker)
        events: list[Event] = [self._failed(lease, reason, now)]
        if self.step is None:
            self._advance(now, events)
        return events

    def commit(self, now: float, measured: Mapping[str, float] | None = None) -> list[Event]:
        """The outstanding step has been applied to the model: version + 1.

        ``measured`` holds what ``asks`` names. Raises ValueError where something of that is missing or not finite; the
        step stays outstanding then.
        """
        step = self.step
        if step is None:
            raise ValueError(f"commit at version {self.version}: no step is outstanding")
        due = self._every_version or self._is_due({} if measured is None else measured)
        self._at(now)
        self.step = None
        self.version += 1
        self.round_started = 0
        self._in_round.clear()
        self._waiting.committed(step)
        record, base = self._record, step.version
        for lease, _, _ in step.entering + step.undrafted:
            tau = base - lease.base_version
            record((now, CONSUMED, lease.id, lease.worker, lease.base_version, base, tau, NONE))
        self.ledger.buffered -= len(step.entering) + len(step.undrafted)
        self.ledger.consumed += len(step.entering) + len(step.undrafted)
        record((now, COMMITTED, NONE, NONE, NONE, self.version, NONE, NONE))
        events: list[Event] = []
        if due:
            publication = self._publication
            self.published = self.version
            self.publications += 1
            record((now, PUBLISHED, NONE, NONE, NONE, self.version, NONE, NONE))
            events.append(Published(self.version, publication.in_flight))
            if publication.in_flight == "abort":
                self._cancel_all("aborted by a publication", now, events)
        if self._most_stale < inf:
            self._sweep(now, events)
            if self.strategy.stop_stale:
                doomed = [lease for lease in self._leases.values() if self._too_stale(lease)]
                events.extend(self._cancel(lease, "stale", now) for lease in doomed)
        enough = len(self._waiting.arrivals) >= self._waiting.needed
        if enough or self.groups is not None:  # groups may have run out of time meanwhile
            self._advance(now, events, starting=True)
        self._waiting.silence()
        return events

    def next_timer(self) -> float | None:
        """When ``on_timer`` wants to be called next, if no lease ends before."""
        if len(self._deadlines) > 2 * len(self._leases) + 64:  # one long lease would keep all that ended behind it
            self._deadlines = sorted(entry for entry in self._deadlines if entry[1] in self._leases)
        while self._deadlines and self._deadlines[0][1] not in self._leases:
            heappop(self._deadlines)
        first_s = self._deadlines[0][0] if self._deadlines else inf
        if self._waiting.has_times and (self._leases or self._waiting.arrivals):
            first_s = min(first_s, self._waiting.next_s)
        if self.groups is not None and self.step is None and (group_s := self.groups.next_timer()) is not None:
            first_s = min(first_s, group_s)
        return first_s if first_s < inf else None

    def on_timer(self, now: float) -> list[Event]:
        """Give up the leases whose time is over, and take the step that is due at this time.

        A result that arrives at that very instant comes first.
        """
        self._at(now)
        events: list[Event] = []
        while self._deadlines and self._deadlines[0][0] <= now:
            lease = self._leases.pop(heappop(self._deadlines)[1], None)
            if lease is not None:
                self.ledger.in_flight -= 1
                if self._tally is not None:
                    self._tally.ended(lease)
                events.append(self._failed(lease, "timeout", now))
        self._waiting.ring(now)
        if self.step is None:
            self._advance(now, events)
        return events

    # -- what it says of itself --------------------------------------------------------------------------------

    def explain(self) -> str:
        """Who waits for whom, in one line."""
        workers = sorted({lease.worker for lease in self._leases.values()})
        shown = ", ".join(map(str, workers[:8])) + (f" and {len(workers) - 8} more" if len(workers) > 8 else "")
        missing = self._waiting.missing(self._round_target)
        parts = [f"version {self.version}"]
        if self.step is not None:
            parts.append(f"the server applies {len(self.step.entering)} contributions and must commit")
        elif missing:
            parts.append(f"the next step lacks {missing} contribution{'s' * (missing > 1)}, {self.waiting} wait")
        elif (awaited := self._waiting.held_back(self.version)) is not None:
            parts.append(f"{self.waiting} contributions wait, and the next step waits for {awaited}")
        parts.append(f"{self.in_flight} in flight" + (f" at workers {shown}" if workers else ", nobody works"))
        if self.admits:
            parts.append("a free slot waits for a worker to ask")
        else:
            parts.append(f"no lease is given out: {self.strategy.admission.refusal(self)}")
        if (timer := self.next_timer()) is not None:
            parts.append(f"the next time limit is at {timer:g} s")
        return "; ".join(parts)

    def snapshot(self) -> dict[str, Any]:
        """The whole state as plain data (JSON keeps it), between any two calls."""
        return {
            "strategy": self.strategy.identity,
            "version": self.version,
            "published": self.published,
            "publications": self.publications,
            "checks": self.checks,
            "remembered": dict(self._remembered),
            "round_started": self.round_started,
            "now": self.now if isfinite(self.now) else None,
            "next_lease": self._next_lease,
            "leases": [list(lease) for lease in self._leases.values()],
            "samples": None if self._tally is None else self._tally.state(),
            "waiting": self._waiting.state(),
            "step": None
            if self.step is None
            else {
                "version": self.step.version,
                "entering": [plain(a) for a in self.step.entering],
                "window": list(self.step.window),
                "leaving": list(self.step.leaving),
                "undrafted": [plain(a) for a in self.step.undrafted],
                "time_s": self.step.time_s,
            },
            "groups": None if self.groups is None else self.groups.state(),
            "in_round": sorted(self._in_round),
            "recent_s": list(self._recent_s),
            "ledger": self.ledger.as_dict(),
        }

    @classmethod
    def restore(
        cls,
        strategy: Strategy,
        state: dict[str, Any],
        log: EventLog | None = None,
        profile: Sequence[float] | None = None,
    ) -> Coordinator:
        """A coordinator that goes on from ``snapshot``'s state as if nothing had happened.

        Raises ValueError when the snapshot was taken under another strategy.
        """
        if state["strategy"] != strategy.identity:
            raise ValueError(f"the snapshot is of strategy {state['strategy']}, not of {strategy.identity}")
        self = cls(strategy, log, profile)
        self.version = state["version"]
        self.published = state["published"]
        self.publications, self.checks = state["publications"], state["checks"]
        self._remembered = dict(state["remembered"])
        self.round_started = state["round_started"]
        self.now = -float("inf") if state["now"] is None else state["now"]
        self.ledger = Ledger.from_dict(state["ledger"])
        self._next_lease = state["next_lease"]
        self._leases.update((fields[0], Lease(*fields)) for fields in state["leases"])
        self._waiting.load(state["waiting"])
        if self._tally is not None:
            self._tally.load(self._leases.values(), state["samples"])
        if self.groups is not None:
            self.groups.load(state["groups"])
        self._in_round = set(state["in_round"])
        self._recent_s.extend(state["recent_s"])
        if (step := state["step"]) is not None:
            entering, undrafted = (tuple(map(arrival_of, step[name])) for name in ("entering", "undrafted"))
            window, leaving = tuple(step["window"]), tuple(step["leaving"])
            self.step = Step(step["version"], entering, window, leaving, undrafted, step["time_s"])
        for lease in self._leases.values():
            if lease.deadline_s is not None:
                heappush(self._deadlines, (lease.deadline_s, lease.id))
        return self

    # -- inside ------------------------------------------------------------------------------------------------

    def _at(self, now: float) -> None:
        if not now >= self.now:  # also refuses NaN
            raise ValueError(f"time goes forward: now = {now}, after {self.now}")
        self.now = now

    @property
    def _after_commit(self) -> State:
        return State(self.version + 1, self.published, self.publications, self._remembered)

    def _is_due(self, measured: Mapping[str, float]) -> bool:
        """Whether the version about to be made is published; what was measured for that is counted."""
        rule, state = self._publication, self._after_commit
        asked = rule.asks(state)
        for name in sorted(asked):
            if name not in measured or not isfinite(measured[name]):
                got = f"got {name} = {measured[name]}" if name in measured else f"got {', '.join(measured) or 'none'}"
                raise ValueError(
                    f"commit of version {state.version}: publication {rule.kind!r} wants {', '.join(sorted(asked))}, "
                    f"{got}; a finite number for each would do"
                )
        self.checks += len(asked)
        if not (due := rule.due(state, measured)):
            return False
        for name in rule.references:
            self._remembered[name] = float(measured[name])
        return due

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
            if self._tally is not None:
                self._tally.ended(lease)
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
        return min(cohort.target, self.waiting + to_come)

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
        if self._adaptive is not None and reason == "timeout" and lease.deadline_s is not None:
            self._recent_s.append(lease.deadline_s - lease.admitted_s)
        if self.groups is not None:
            self.groups.ended(lease, now, accepted=False)
        return Failed(lease, reason)

    def _cancel(self, lease: Lease, reason: str, now: float) -> Cancelled:
        del self._leases[lease.id]
        self.ledger.in_flight -= 1
        if self._tally is not None:
            self._tally.ended(lease)
        self.ledger.cancelled[reason] += 1
        self._ended(CANCELLED, lease, reason, now)
        if self.groups is not None:
            self.groups.ended(lease, now, accepted=False)
        return Cancelled(lease, reason)

    def _cancel_all(self, reason: str, now: float, events: list[Event]) -> None:
        events.extend(self._cancel(lease, reason, now) for lease in self.leases)

    def _advance(self, now: float, events: list[Event], starting: bool = False) -> None:
        """Hand out the next step if its contributions are there, and end a round that is over.

        ``starting``: there is a new version, from which workers are about to start.
        """
        cohort, round_over = self._cohort, False
        if cohort is not None:
            all_ended = self.round_started >= cohort.size and not self._leases
            round_over = self.waiting >= cohort.target or all_ended
            if all_ended and not self.waiting:
                self.round_started = 0  # nothing came back: the round starts anew
                self._in_round.clear()
        nobody_works = not self._leases and not starting
        self.step = self._waiting.step(
            self.version, now, round_over=round_over, nobody_works=nobody_works, groups=self.groups
        )
        if self.step is None:
            return
        if cohort is not None and self._leases:
            self._cancel_all("over-selected", now, events)
        events.append(StepReady(self.step))

    def _sweep(self, now: float, events: list[Event]) -> None:
        """Drop what grew too stale while it waited for a step."""
        for lease in self._waiting.drop(self._too_stale):
            self.ledger.buffered -= 1
            self._reject(lease, "stale", now)
            events.append(Rejected(lease.id, "stale"))
            if self.groups is not None:
                self.groups.dropped(lease)


def _forget(_: bytes) -> None:
    """The log of somebody who keeps none."""
