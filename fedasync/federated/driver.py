"""The choreography of a federated run: who starts, what is done with what comes back, and in which order. No clock.

A runtime says what happened, and when; the driver asks the coordinator, gives out leases, makes versions:

    driver.dispatch(now)                           # leases for whoever may start; each comes as runtime.start(…)
    driver.delivered(lease_id, client, now)        # a result is here (``defect``: what is wrong with it)
    driver.failed(lease_id, client, reason, now)   # it will never be
    driver.ring(now)                               # the coordinator's time limits (next_timer)
    driver.step_done(now)                          # a step that took its time is over

Results of one instant are handed over in the order of dispatch. Where all of an instant are looked at before any slot
is given out again (``dispatch_due`` is then True), the runtime calls ``dispatch`` after the last of them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Protocol

from fedasync.aggregation.server import DivergedError
from fedasync.core import (
    Accepted,
    Cancelled,
    Cohort,
    Concurrency,
    Coordinator,
    Event,
    Failed,
    Grouped,
    Lease,
    Published,
    Rejected,
    Step,
    StepReady,
)
from fedasync.federated.selection import IdleClients

RESTARTED = "server restarted"
"""Why leases fail that were in flight when a server ended: its successor gives them out anew."""

MOST_UNFIT = 100
"""Contributions not fit for use that are told one by one; all are counted."""


class NothingAcceptedError(RuntimeError):
    """Work goes on and on and nothing is accepted."""


@dataclass(frozen=True)
class Unfit:
    """A contribution that was not fit for use."""

    client: int
    lease: int
    time_s: float
    reason: str
    detail: str


class Runtime(Protocol):
    """What the driver wants of whoever has the clock and the clients."""

    def start(self, lease: Lease, turn: int, now: float) -> None:
        """A lease begins, its client's ``turn``-th (from 0)."""
        ...

    def nobody_idle(self, now: float) -> None:
        """A slot is free, and nobody who is idle and online may take it."""
        ...

    def cancelled(self, lease: Lease, now: float) -> bool:
        """Nobody waits for this lease's result any more; True: its client is free at once."""
        ...

    def given_up(self, lease: Lease, now: float) -> bool:
        """The lease's time is over; True: its client is free at once."""
        ...

    def step_begins(self, now: float) -> bool:
        """A step is ready; True: it takes time, and ``step_done`` will be called."""
        ...


class ModelState(Protocol):
    """The arrays of a run, as far as the driver has to do with them."""

    def apply(self, step: Step) -> None: ...
    def publish(self) -> None: ...
    def forget(self, lease_id: int) -> None: ...


class Driver:
    """One run's choreography. ``arrays`` is None for timing only; ``measured`` takes what a publication asks for.

    The run is ``over`` with the step that makes version ``versions`` or uses ``updates`` contributions, or whose model
    is not finite; ``ended`` then says which. Raises NothingAcceptedError when ``hopeless`` leases in a row brought
    nothing.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        idle: IdleClients,
        clients: int,
        runtime: Runtime,
        arrays: ModelState | None = None,
        measured: Callable[[Coordinator, float], dict[str, float]] | None = None,
        *,
        versions: float = inf,
        updates: float = inf,
        hopeless: float = inf,
    ) -> None:
        self.coordinator = coordinator
        self.idle = idle
        self.turns = array("i", bytes(array("i").itemsize * clients))
        """How many leases each client was given."""
        self.unfit: list[Unfit] = []
        self.unfit_total = 0
        self.over = False
        self.ended = "time"
        self.dispatch_due = False
        self.most_updates = updates
        self._most_versions = versions
        self._hopeless = hopeless
        self._fruitless = 0
        self._runtime, self._start = runtime, runtime.start
        self._arrays, self._measured = arrays, measured
        strategy = coordinator.strategy
        admission = strategy.admission
        concurrent = isinstance(admission, Concurrency)
        waits = concurrent and admission.redispatch == "next_version"  # type: ignore[union-attr]
        chooses = waits or isinstance(strategy.buffer, Grouped) or isinstance(admission, Cohort)
        self._take = self._take_one_who_may if chooses else idle.take
        self._gated = strategy.gated
        self._early = concurrent and admission.redispatch == "before_step"  # type: ignore[union-attr]

    def dispatch(self, now: float) -> None:
        """Give out leases while admission allows and somebody is idle."""
        self.dispatch_due = False
        coordinator, turns = self.coordinator, self.turns
        for _ in range(coordinator.slots):
            client = self._take(now)
            if client is None:
                self._runtime.nobody_idle(now)
                return
            lease = coordinator.request(client, now)
            if lease is None:
                raise AssertionError(f"admission changed its mind: {coordinator.explain()}")
            turn = turns[client]
            turns[client] = turn + 1
            self._start(lease, turn, now)

    def _take_one_who_may(self, now: float) -> int | None:
        """An idle client that is online and need not wait (its group lacks somebody, it has not delivered), or None."""
        aside = []
        while (client := self.idle.take(now)) is not None and self.coordinator.has_to_wait(client):
            aside.append(client)
        for other in aside:
            self.idle.free(other)
        return client

    def delivered(self, lease_id: int, client: int, now: float, defect: str | None = None) -> Event:
        """A lease's result is here, and its client is free; what the coordinator made of the result."""
        events = self.coordinator.deliver(lease_id, now, defect)
        first = events[0]
        self._came_back(client, events, now)
        return first

    def failed(self, lease_id: int, client: int, reason: str, now: float, *, again: bool = False) -> None:
        """A lease brings no result, and its client is free; ``again``: its round gives it out anew."""
        self._came_back(client, self.coordinator.fail(lease_id, reason, now, again=again), now)

    def free(self, client: int, now: float) -> None:
        """A client is free whose lease was given up before."""
        self._came_back(client, [], now)

    def _came_back(self, client: int, events: list[Event], now: float) -> None:
        self.idle.free(client)
        if self._early:
            self.dispatch(now)
        if len(events) == 1 and isinstance(events[0], Accepted):
            self._fruitless = 0
        else:
            self._handle(events, now)
        self.changed(now)

    def changed(self, now: float) -> None:
        """Something happened after which others may start."""
        if self._gated:
            self.dispatch_due = True
        else:
            self.dispatch(now)

    def ring(self, now: float) -> None:
        """The coordinator wanted to be called at this time."""
        events = self.coordinator.on_timer(now)
        for event in events:
            if isinstance(event, Failed) and self._runtime.given_up(event.lease, now):
                self.idle.free(event.lease.worker)
        self._handle(events, now)
        self.changed(now)

    def step_done(self, now: float) -> None:
        """The step that took its time is over."""
        self._handle(self._commit(now), now)
        self.changed(now)

    def tell_unfit(self, client: int, lease_id: int, now: float, reason: str, detail: str) -> None:
        """Keep what was wrong with a contribution."""
        self.unfit_total += 1
        if len(self.unfit) < MOST_UNFIT:
            self.unfit.append(Unfit(client, lease_id, now, reason, detail))

    def _handle(self, events: list[Event], now: float) -> None:
        """Do what the coordinator says; what follows from that is appended while we walk."""
        for event in events:
            if isinstance(event, Accepted):
                self._fruitless = 0
            elif isinstance(event, StepReady):
                if not self._runtime.step_begins(now):
                    events.extend(self._commit(now))
            elif isinstance(event, Published):
                if self._arrays is not None:
                    self._arrays.publish()
            elif isinstance(event, Cancelled):
                free = self._runtime.cancelled(event.lease, now)
                self._forget(event.lease.id)
                if free:
                    self.idle.free(event.lease.worker)
            elif isinstance(event, Failed):
                self._forget(event.lease.id)
                self._count_fruitless(event.reason)
            elif isinstance(event, Rejected) and not event.ignored:
                self._forget(event.lease_id)
                self._count_fruitless(event.reason)

    def _commit(self, now: float) -> list[Event]:
        coordinator, step = self.coordinator, self.coordinator.step
        if self._arrays is not None and step is not None:
            try:
                self._arrays.apply(step)
            except DivergedError as error:
                self.over, self.ended = True, f"diverged: {error}"
                return []
        events = coordinator.commit(now, None if self._measured is None else self._measured(coordinator, now))
        self.look_at_the_counts()
        return events

    def look_at_the_counts(self) -> None:
        """The run is over when it has made or used as much as it was to."""
        coordinator = self.coordinator
        if coordinator.version >= self._most_versions:
            self.over, self.ended = True, "versions"
        elif coordinator.ledger.consumed >= self.most_updates:
            self.over, self.ended = True, "updates"

    def _forget(self, lease_id: int) -> None:
        if self._arrays is not None:
            self._arrays.forget(lease_id)

    def _count_fruitless(self, reason: str) -> None:
        self._fruitless += 1
        if self._fruitless > self._hopeless:
            raise NothingAcceptedError(
                f"the last {self._fruitless} leases brought nothing that was accepted (the last one: {reason}); "
                f"{self.coordinator.explain()}"
            )
