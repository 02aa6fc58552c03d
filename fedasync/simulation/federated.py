"""The federated runtime under SimPy's clock: one event a lease in flight, none a registered client."""

from __future__ import annotations

from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from math import inf, nextafter

import simpy

from fedasync.core import (
    Accepted,
    Cancelled,
    Concurrency,
    Coordinator,
    Event,
    EventLog,
    Failed,
    Lease,
    Published,
    Rejected,
    StepReady,
    Strategy,
)
from fedasync.core.bounds import check_choice, check_integer
from fedasync.simulation.learning import Learner
from fedasync.simulation.population import Clients, Fate
from fedasync.simulation.selection import IdleClients, Selection

HOPELESS = 1000
"""Leases in a row, beyond those in flight, that may end without an accepted contribution before a run that no time
limit would end is given up."""


MOST_EVALUATIONS = 1_000_000

STANDSTILL = 100_000
"""Events, beyond ten for each lease that may be in flight, after which the clock must have moved."""

MOST_UNFIT = 100
"""Contributions not fit for use that are told one by one; all are counted."""


class StandstillError(RuntimeError):
    """Work takes so little time that the clock does not move, and only the clock would end the run."""


class NothingAcceptedError(RuntimeError):
    """Work goes on and on and nothing is accepted."""


@dataclass(frozen=True)
class Settings:
    """How a run goes: when it stops (whichever limit comes first), how often it is evaluated, who works next.

    ``updates`` counts contributions applied to the model, ``versions`` committed steps. A step occupies the server for
    ``server_step_s``. Evaluation happens on the grid 0, e, 2e, … of virtual time (``evaluate_every_s``); with
    ``stop_at_target`` the run ends there once every target is reached.
    """

    time_s: float | None = None
    updates: int | None = None
    versions: int | None = None
    evaluate_every_s: float | None = None
    server_step_s: float = 0.0
    selection: Selection = "random_idle"
    stop_at_target: bool = False

    def __post_init__(self) -> None:
        if self.time_s is None and self.updates is None and self.versions is None:
            raise ValueError("a run needs an end: give time_s, updates, or versions")
        for name in ("time_s", "evaluate_every_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < inf:
                raise ValueError(f"{name} must be > 0 and finite, got {value}")
        for name in ("updates", "versions"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 1)
        check_choice("selection", self.selection, Selection)
        if self.time_s is not None and self.evaluate_every_s is not None:
            points = self.time_s / self.evaluate_every_s
            if points > MOST_EVALUATIONS:
                raise ValueError(
                    f"evaluate_every_s = {self.evaluate_every_s:g} makes {points:.3g} evaluations in time_s = "
                    f"{self.time_s:g}; at most {MOST_EVALUATIONS:,} are made"
                )
        if not 0 <= self.server_step_s < inf:
            raise ValueError(f"server_step_s must be ≥ 0 and finite, got {self.server_step_s}")


@dataclass(frozen=True)
class Unfit:
    """A contribution that was not fit for use."""

    client: int
    lease: int
    time_s: float
    reason: str
    detail: str


@dataclass
class Evaluations:
    """Metrics by column: time_s, version, name, value."""

    time_s: array[float] = field(default_factory=lambda: array("d"))
    version: array[int] = field(default_factory=lambda: array("q"))
    name: list[str] = field(default_factory=list)
    value: array[float] = field(default_factory=lambda: array("d"))


class FederatedSimulation:
    """One run. ``learner`` is None for timing only.

    Order at one instant: what ends is looked at in the order of scheduling (dispatch order, for leases that nothing
    interrupts); then lease time-outs; with a barrier, or ``simultaneous = "together"``, leases are given out only then.
    """

    def __init__(
        self,
        strategy: Strategy,
        clients: Clients,
        settings: Settings,
        seed: int,
        learner: Learner | None = None,
        targets: Mapping[str, float] | None = None,
    ) -> None:
        self.log = EventLog()
        self.coordinator = Coordinator(strategy, self.log.append)
        self.evaluations = Evaluations()
        self.unfit: list[Unfit] = []
        self.unfit_total = 0
        self.server_busy_s = 0.0
        self.ended = "time"
        self._env = simpy.Environment()
        self._clients = clients
        self._settings = settings
        self._learner = learner
        self._idle = IdleClients(clients.count, settings.selection, clients.presence, seed)
        self._turn = array("l", bytes(array("l").itemsize * clients.count))
        self._working: dict[int, Fate] = {}
        self._timer_s = inf
        self._wake_s = inf
        self._dispatch_due = True
        self._fruitless = 0
        self._events = 0
        self._mark_s = 0.0
        self._next_evaluation = 0
        self._last_evaluation: tuple[int, dict[str, float]] = (-1, {})
        self._targets = dict(targets or {})
        self._to_reach = dict(self._targets) if settings.stop_at_target else {}
        self._reached_s = inf
        admission = strategy.admission
        self._most_versions = inf if settings.versions is None else settings.versions
        self._most_updates = inf if settings.updates is None else settings.updates
        self._gated = strategy.gated
        self._early = isinstance(admission, Concurrency) and admission.redispatch == "before_step"

    @property
    def now(self) -> float:
        return float(self._env.now)

    def run(self) -> float:
        """Simulate to the end; the virtual time at which it came. The last model is always evaluated.

        Raises WorkloadError when the workload does, and NothingAcceptedError when nothing is accepted any more.
        """
        end_s = self._run()
        self._evaluate_until(end_s, inclusive=True)
        if self._reached_s < inf:
            self.ended, end_s = "target", self._reached_s
        if not self.evaluations.time_s or self.evaluations.time_s[-1] < end_s:
            self._evaluate(end_s)
        return end_s

    def _run(self) -> float:
        limit_s = inf if self._settings.time_s is None else self._settings.time_s
        env = self._env
        self._dispatch()
        while not self._enough():
            next_s = env.peek()
            if next_s > env.now and self._dispatch_due:
                self._dispatch()
                continue
            if next_s == inf or next_s > limit_s:
                if next_s == inf:
                    self.ended = f"nothing can happen any more: {self.coordinator.explain()}"
                return limit_s if limit_s < inf else self.now
            self._evaluate_until(next_s)
            if self._reached_s < inf:
                return self.now
            self._watch_the_clock()
            env.step()
        return self.now

    def _watch_the_clock(self) -> None:
        """A run that only time ends must get on: refuse one that would need more than 10^9 times what it has done."""
        self._events += 1
        if self._events % (STANDSTILL + 10 * self.coordinator.strategy.admission.most_in_flight):
            return
        passed_s, self._mark_s = self.now - self._mark_s, self.now
        if passed_s < 1e-9 * (self._settings.time_s or 0.0) and self._most_updates == self._most_versions == inf:
            raise StandstillError(
                f"the clock stands still: {passed_s:g} s passed in {STANDSTILL} events and more, at {self.now:g} s of "
                f"{self._settings.time_s:g} s; longer durations, or updates or versions as the run's end, would do"
            )

    # -- the story of a lease ----------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        """Give out leases while admission allows and somebody is idle."""
        self._dispatch_due = False
        now = self._env.now
        while self.coordinator.admits:
            client = self._idle.take(now)
            if client is None:
                self._sleep_until_somebody_wakes()
                return
            lease = self.coordinator.request(client, now)
            if lease is None:
                raise AssertionError(f"admission changed its mind: {self.coordinator.explain()}")
            self._start(lease)

    def _start(self, lease: Lease) -> None:
        client = lease.worker
        turn = self._turn[client]
        self._turn[client] = turn + 1
        if self._learner is not None:
            self._learner.start(lease, turn)
        fate = self._working[lease.id] = self._clients.fate(client, turn, lease.id, lease.admitted_s)
        if fate.end_s < inf:
            self._at(fate.end_s, self._ends, (lease, fate))
        if lease.deadline_s is not None:
            self._set_timer()

    def _ends(self, event: simpy.Event) -> None:
        """The client is done with a lease, one way or another."""
        done: tuple[Lease, Fate] = event.value  # type: ignore[assignment]
        lease, fate = done
        if fate.silent and self.coordinator.is_in_flight(lease.id):
            return  # it stays in flight until its time-out, which sends the client back to the idle ones
        if self._working.pop(lease.id, None) is None:
            return  # cancelled meanwhile: the client has stopped
        now = self._env.now
        if fate.silent:
            events: list[Event] = []  # it crashes after the server gave it up
        elif fate.failure is not None:
            events = self.coordinator.fail(lease.id, fate.failure, now)
        else:
            defect = None
            if self._learner is not None and self.coordinator.is_in_flight(lease.id):
                found = self._learner.finish(lease)
                if found is not None:
                    self.unfit_total += 1
                    if len(self.unfit) < MOST_UNFIT:
                        self.unfit.append(Unfit(lease.worker, lease.id, now, found.reason, found.detail))
                    defect = found.reason
            events = self.coordinator.deliver(lease.id, now, defect)
        self._idle.free(lease.worker)
        if self._early:
            self._dispatch()
        self._handle(events)
        self._after_change()

    def _handle(self, events: Iterable[Event]) -> None:
        """Do what the coordinator says."""
        pending = deque(events)
        while pending:
            event = pending.popleft()
            if isinstance(event, Accepted):
                self._fruitless = 0
            elif isinstance(event, StepReady):
                if self._settings.server_step_s == 0:
                    pending.extend(self._commit())
                else:
                    self._at(self._env.now + self._settings.server_step_s, self._step_done)
            elif isinstance(event, Published):
                if self._learner is not None:
                    self._learner.server.publish()
            elif isinstance(event, Cancelled):
                del self._working[event.lease.id]
                self._forget(event.lease.id)
                self._idle.free(event.lease.worker)
            elif isinstance(event, Failed):
                self._forget(event.lease.id)
                self._count_fruitless(event.reason)
            elif isinstance(event, Rejected) and not event.ignored:
                self._forget(event.lease_id)
                self._count_fruitless(event.reason)

    def _step_done(self, _: simpy.Event) -> None:
        self._handle(self._commit())
        self._after_change()

    def _commit(self) -> list[Event]:
        step = self.coordinator.step
        if self._learner is not None and step is not None:
            self._learner.apply(step)
        self.server_busy_s += self._settings.server_step_s
        return self.coordinator.commit(self._env.now)

    def _time_is_over(self, _: simpy.Event) -> None:
        if self._env.peek() == self._env.now:  # what else happens at this instant comes first
            self._env.timeout(0).callbacks.append(self._time_is_over)
            return
        self._timer_s = inf
        events = self.coordinator.on_timer(self._env.now)
        for event in events:
            if isinstance(event, Failed) and self._is_lost(event.lease.id):
                del self._working[event.lease.id]
                self._idle.free(event.lease.worker)
        self._handle(events)
        self._set_timer()
        self._after_change()

    def _is_lost(self, lease_id: int) -> bool:
        """The client will not come back by itself; one that still works goes on after the server gave it up."""
        fate = self._working[lease_id]
        return fate.end_s == inf or (fate.silent and fate.end_s <= self._env.now)

    def _after_change(self) -> None:
        if self._gated:
            self._dispatch_due = True
        else:
            self._dispatch()

    def _forget(self, lease_id: int) -> None:
        if self._learner is not None:
            self._learner.forget(lease_id)

    def _count_fruitless(self, reason: str) -> None:
        self._fruitless += 1
        if (
            self._settings.time_s is None
            and self._fruitless > HOPELESS + self.coordinator.strategy.admission.most_in_flight
        ):
            raise NothingAcceptedError(
                f"the last {self._fruitless} leases brought nothing that was accepted (the last one: {reason}); "
                f"{self.coordinator.explain()}"
            )

    # -- time --------------------------------------------------------------------------------------------------

    def _at(self, time_s: float, call: Callable[[simpy.Event], None], value: object = None) -> None:
        """Call at the given time or, where the sum of two floats misses it, at the next number after it."""
        now = self._env.now
        delay = time_s - now
        while now + delay < time_s:
            delay = nextafter(delay, inf)
        self._env.timeout(delay, value).callbacks.append(call)

    def _set_timer(self) -> None:
        deadline_s = self.coordinator.next_timer()
        if deadline_s is not None and deadline_s < self._timer_s:
            self._timer_s = deadline_s
            self._at(deadline_s, self._time_is_over)

    def _sleep_until_somebody_wakes(self) -> None:
        awake_s = self._idle.next_awake_s
        if awake_s < inf and not self._env.now < self._wake_s <= awake_s:
            self._wake_s = awake_s
            self._at(awake_s, self._woken)

    def _woken(self, _: simpy.Event) -> None:
        self._after_change()

    def _enough(self) -> bool:
        if self.coordinator.version >= self._most_versions:
            self.ended = "versions"
        elif self.coordinator.ledger.consumed >= self._most_updates:
            self.ended = "updates"
        else:
            return False
        return True

    def _evaluate_until(self, time_s: float, inclusive: bool = False) -> None:
        """Evaluate at the grid points before ``time_s``: the model does not change between two events."""
        every_s = self._settings.evaluate_every_s
        if self._learner is None or every_s is None:
            return
        while (at_s := self._next_evaluation * every_s) < time_s or (inclusive and at_s == time_s):
            if at_s > self._reached_s:
                return
            self._next_evaluation += 1
            self._evaluate(at_s)

    def _evaluate(self, at_s: float) -> None:
        if self._learner is None:
            return
        version = self.coordinator.version
        if self._last_evaluation[0] != version:
            self._last_evaluation = (version, self._learner.evaluate(version))
        if not self.evaluations.time_s:
            self._check_targets(self._last_evaluation[1], version)
        if self._to_reach:
            found = self._last_evaluation[1]
            self._to_reach = {name: level for name, level in self._to_reach.items() if not found[name] >= level}
            self._reached_s = inf if self._to_reach else at_s
        for name, value in self._last_evaluation[1].items():
            self.evaluations.time_s.append(at_s)
            self.evaluations.version.append(version)
            self.evaluations.name.append(name)
            self.evaluations.value.append(value)

    def _check_targets(self, found: Mapping[str, float], version: int) -> None:
        """Targets are reached from below: one that version 0 meets says nothing, and a loss needs another measure."""
        for name, level in self._targets.items():
            if name not in found:
                raise ValueError(f"target {name!r}: the workload has no such metric; it has {sorted(found)}")
            if version == 0 and found[name] >= level:
                raise ValueError(
                    f"target {name} ≥ {level:g} is met by version 0 already ({found[name]:g}); a target is a value to "
                    "rise to, so for a metric that falls let the workload report one that rises (its negative, say)"
                )
