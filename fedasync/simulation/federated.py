"""The federated runtime: SimPy's agenda for what the server waits for, a calendar for the ends of leases."""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager
from heapq import heappop, heappush
from math import inf

import simpy

from fedasync.core import (
    Cohort,
    Compass,
    Coordinator,
    EventLog,
    Grouped,
    Lease,
    Periodic,
    Quota,
    Strategy,
    Tiers,
)
from fedasync.federated.driver import Driver
from fedasync.federated.evaluation import Evaluations
from fedasync.federated.selection import IdleClients
from fedasync.simulation.agenda import call_at
from fedasync.simulation.ends import Ends
from fedasync.simulation.learning import Learner
from fedasync.simulation.measuring import measuring
from fedasync.simulation.network import Moment, Transfers
from fedasync.simulation.population import Clients, Fate
from fedasync.simulation.settings import Settings

HOPELESS = 1000
"""Leases in a row, beyond those in flight, that may end without an accepted contribution before a run that no time
limit would end is given up."""

STANDSTILL = 100_000
"""Events, beyond ten for each lease that may be in flight, after which the clock must have moved."""

SAME_INSTANT = 1e-12
"""Relative: a sum of durations that should meet a step at a fixed time misses it by no more than rounding."""


class StandstillError(RuntimeError):
    """Work takes so little time that the clock does not move, and only the clock would end the run."""


class FederatedSimulation:
    """One run. ``learner`` is None for timing only.

    The ends of leases, maybe a hundred thousand, lie in a calendar of plain tuples, and so do the moments of transfers
    over a shared link (``network``); all else (a server step, a time-out, a client's waking) is an event of SimPy's.
    Order at one instant: such moments; ends of leases in the order of dispatch; then server steps and wakings as
    scheduled; then time-outs. With a barrier, or ``simultaneous = "together"``, leases are given out only after all of
    them.
    """

    def __init__(
        self,
        strategy: Strategy,
        clients: Clients,
        settings: Settings,
        seed: int,
        learner: Learner | None = None,
        targets: Mapping[str, float] | None = None,
        log: EventLog | None = None,
    ) -> None:
        self.log = EventLog() if log is None else log
        profile = None
        if isinstance(strategy.admission, Tiers):  # as a profiling phase would find it
            profile = [clients.mean_work_s(client) for client in range(clients.count)]
        coordinator = self.coordinator = Coordinator(strategy, self.log, profile)
        self.learner = learner
        arrays = None if learner is None else learner.arrays
        self.evaluations = Evaluations(arrays, settings.evaluate_every_s, targets or {}, settings.stop_at_target)
        self.now = 0.0
        self._limit_s = inf if settings.time_s is None else settings.time_s
        self._boundary_s = min(self._limit_s, self.evaluations.next_s)
        self._step_s = settings.server_step_s
        self._env = simpy.Environment()
        self._agenda_s = inf
        self._ends: Ends[tuple[float, int, int, Fate | Moment | None]] = Ends()
        """When (s) which lease ends, its client, and what comes of it if not a result."""
        self._clients = clients
        self._idle = IdleClients(clients.count, settings.selection, clients.presence, seed)
        admission = strategy.admission
        self._most_steps = admission.most_steps if isinstance(admission, Compass) else 1
        self._work_s = clients.work_s
        limited = isinstance(strategy.buffer, Quota) and strategy.buffer.limit_s is not None
        self._timed = isinstance(strategy.buffer, (Grouped, Periodic)) or limited
        """The coordinator has times of its own, beside those of leases."""
        simple = clients.is_plain and learner is None and strategy.lease_timeout_s is None and not self._timed
        self.start = self._start_simply if simple else self._start
        self._finish_cancelled = settings.cancelled_clients == "finish"
        self._stopped: set[int] = set()
        self._lost: set[int] = set()
        self._transfers = Transfers(clients, self._ends, self._lost) if clients.population.shares_link else None
        self._timer_s = inf
        self._timer: simpy.Event | None = None
        """The one that counts: an earlier one takes the place of a later one, which then rings for nobody."""
        self._wake_s = inf
        self._counts = settings.versions is not None or settings.updates is not None
        self._patience = STANDSTILL + 10 * admission.most_in_flight
        self.driver = Driver(
            coordinator,
            self._idle,
            clients.count,
            self,
            learner,
            measuring(strategy, settings.divergence, seed, arrays),
            versions=inf if settings.versions is None else settings.versions,
            updates=inf if settings.updates is None else settings.updates,
            hopeless=HOPELESS + admission.most_in_flight if self._limit_s == inf else inf,
        )

    @property
    def ended(self) -> str:
        """Why the run ended."""
        return self.driver.ended

    @property
    def server_busy_s(self) -> float:
        """Seconds that the server spent on steps."""
        return self._step_s * self.coordinator.version

    def run(self) -> float:
        """Simulate to the end, computing results as they are due; the virtual time at which the end came."""
        with fewer_collections():
            for _ in self.advance():
                if self.learner is not None:
                    self.learner.compute(self.useful)
        return self.now

    def advance(self) -> Generator[None, None, None]:
        """Simulate to the end, with a pause whenever a result is due that ``learner`` has not computed yet.

        At the end ``now`` is the run's end, and the last model is evaluated. Raises WorkloadError when the workload
        does, NothingAcceptedError and StandstillError when the run would not get on.
        """
        ends, near, learner, driver = self._ends, self._ends.near, self.learner, self.driver
        countdown, mark_s = self._patience, 0.0
        driver.dispatch(self.now)
        while not driver.over:
            if not near:
                ends.refill()
            end_s = near[0][0] if near else inf
            next_s = min(end_s, self._agenda_s)
            if next_s > self.now:
                if driver.dispatch_due:
                    driver.dispatch(self.now)
                    continue
                if (next_s > self._boundary_s or next_s == inf) and self._passes_the_end(next_s):
                    break
            countdown -= 1
            if not countdown:
                self._watch_the_clock(next_s - mark_s)
                countdown, mark_s = self._patience, next_s
            self.now = next_s
            if end_s > self._agenda_s:
                self._env.step()
                self._agenda_s = self._env.peek()
                continue
            _, lease_id, client, fate = heappop(near)
            if learner is not None and learner.lacks(lease_id):
                if self._transfers is not None:  # when a lease would end was no more than a guess
                    learner.comes_first(lease_id)
                yield
            self._ends_work(lease_id, client, fate)
        self._close()

    def _passes_the_end(self, next_s: float) -> bool:
        """The clock is about to pass a grid point of evaluation, or the end of the run: then True."""
        if next_s > self._limit_s or next_s == inf:
            if next_s == inf:
                self.driver.ended = f"nothing can happen any more: {self.coordinator.explain()}"
            if self._limit_s < inf:
                self.now = self._limit_s
            return True
        self.evaluations.before(next_s, self.coordinator.version)
        self._boundary_s = min(self._limit_s, self.evaluations.next_s)
        return self.evaluations.reached_s < inf

    def _close(self) -> None:
        self.evaluations.before(self.now, self.coordinator.version, inclusive=True)
        if self.evaluations.reached_s < inf:
            self.driver.ended, self.now = "target", self.evaluations.reached_s
        self.evaluations.at(self.now, self.coordinator.version)
        self.log.flush()

    def _watch_the_clock(self, passed_s: float) -> None:
        """A run that only time ends must get on: refuse one that would need 10^9 times what it has done."""
        if passed_s < 1e-9 * self._limit_s < inf and not self._counts:
            raise StandstillError(
                f"the clock stands still: {passed_s:g} s passed in {self._patience} events, at {self.now:g} s of "
                f"{self._limit_s:g} s; longer durations, or updates or versions as the run's end, would do"
            )

    @property
    def useful(self) -> float:
        """How many more results can be of use before the round, or the run, is over."""
        coordinator = self.coordinator
        cohort = coordinator.strategy.admission
        round_s = cohort.target if isinstance(cohort, Cohort) else inf
        return min(round_s, self.driver.most_updates - coordinator.ledger.consumed) - coordinator.waiting

    # -- the story of a lease ----------------------------------------------------------------------------------

    def _start_simply(self, lease: Lease, turn: int, now: float) -> None:
        """A lease of which nothing is to be known but when it ends."""
        ends, client = self._ends, lease.worker
        end_s = now + self._work_s(client, turn, lease.id)
        if end_s < ends.horizon_s:
            heappush(ends.near, (end_s, lease.id, client, None))
            if len(ends.near) > ends.most_near:
                ends.divide()
        else:
            ends.later((end_s, lease.id, client, None))

    def _start(self, lease: Lease, turn: int, now: float) -> None:
        """Follow a lease of which more is to be known than when it ends."""
        client, deadline_s = lease.worker, lease.deadline_s
        share = 1.0 if lease.steps is None else lease.steps / self._most_steps
        if self._transfers is not None:
            end_s, fate = self._transfers.start(lease.id, client, turn, now, share), None
        else:
            found = self._clients.fate(client, turn, lease.id, now, share)
            end_s, fate = found.end_s, None if found.failure is None else found
            if end_s < inf:
                self._ends.add((end_s, lease.id, client, fate))
                if len(self._ends.near) > self._ends.most_near:
                    self._ends.divide()
            else:
                self._lost.add(lease.id)
        if deadline_s is not None or self._timed:
            self._set_timer()
        if self.learner is not None and fate is None and end_s <= min(self._limit_s, deadline_s or inf):
            self.learner.start(lease, turn, end_s)

    def _ends_work(self, lease_id: int, client: int, fate: Fate | Moment | None) -> None:
        """The client is done with a lease, one way or another."""
        if self._stopped and lease_id in self._stopped:
            self._stopped.discard(lease_id)  # cancelled meanwhile, and the client is at other work
            return
        if fate is None:
            defect = None if self.learner is None else self._defect(self.learner, lease_id, client)
            self.driver.delivered(lease_id, client, self.now, defect)
        elif isinstance(fate, Moment):
            if self._transfers is not None:
                self._transfers.at(fate, self.now)
            return
        elif not fate.silent:
            self.driver.failed(lease_id, client, fate.failure or "", self.now)
        elif self.coordinator.is_in_flight(lease_id):
            self._lost.add(lease_id)  # it stays in flight until its time-out, which sends the client to the idle ones
            return
        else:
            self.driver.free(client, self.now)  # it crashes after the server gave it up
        if self._timed:
            self._set_timer()

    def _defect(self, learner: Learner, lease_id: int, client: int) -> str | None:
        """What is wrong with the result that is delivered now; it is the server's from here on."""
        if not self.coordinator.is_in_flight(lease_id):
            return None
        found = learner.finish(lease_id)
        if found is None:
            return None
        self.driver.tell_unfit(client, lease_id, self.now, found.reason, found.detail)
        return found.reason

    # -- what the driver asks for ------------------------------------------------------------------------------

    def nobody_idle(self, now: float) -> None:
        """Sleep until somebody wakes."""
        awake_s = self._idle.next_awake_s
        if awake_s < inf and not now < self._wake_s <= awake_s:
            self._wake_s = awake_s
            self._at(awake_s, self._woken)

    def cancelled(self, lease: Lease, now: float) -> bool:
        """The client stops, unless ``cancelled_clients`` says that it finishes what nobody waits for."""
        if lease.id in self._lost:
            self._lost.discard(lease.id)
        elif self._finish_cancelled:
            return False
        elif self._transfers is None or not self._transfers.drop(lease.id, now):
            self._stopped.add(lease.id)
        return True

    def given_up(self, lease: Lease, now: float) -> bool:
        """A client that crashed will not come back by itself, a transfer ends there; one that works goes on."""
        if lease.id in self._lost:
            self._lost.discard(lease.id)
            return True
        return self._transfers is not None and self._transfers.refuse(lease.id, now)

    def step_begins(self, now: float) -> bool:
        if self._step_s == 0:
            return False
        self._at(now + self._step_s, self._step_done)
        return True

    def _step_done(self, _: simpy.Event) -> None:
        self.driver.step_done(self.now)
        if self._timed:
            self._set_timer()

    def _time_is_over(self, timer: simpy.Event) -> None:
        if timer is not self._timer:
            return
        if self._env.peek() == self.now or (self._ends.near and self._ends.near[0][0] == self.now):
            self._timer = self._at(self.now, self._time_is_over)  # what else happens at this instant comes first
            return
        if self._timed and self._ends.near and self._ends.near[0][0] <= self.now * (1 + SAME_INSTANT):
            self._timer = self._at(self._ends.near[0][0], self._time_is_over)
            return
        self._timer_s = inf
        self.driver.ring(self.now)
        self._set_timer()

    def _woken(self, _: simpy.Event) -> None:
        self.driver.changed(self.now)
        if self._timed:
            self._set_timer()

    # -- time --------------------------------------------------------------------------------------------------

    def _at(self, time_s: float, call: Callable[[simpy.Event], None]) -> simpy.Event:
        event = call_at(self._env, time_s, call)
        self._agenda_s = self._env.peek()
        return event

    def _set_timer(self) -> None:
        deadline_s = self.coordinator.next_timer()
        if deadline_s is not None and deadline_s < self._timer_s:
            self._timer_s = deadline_s
            self._timer = self._at(deadline_s, self._time_is_over)


@contextmanager
def fewer_collections() -> Iterator[None]:
    """A run makes millions of objects and no cycles: looking for some every 700 objects costs a fifth of its time."""
    before = gc.get_threshold()
    gc.set_threshold(50_000, 20, 100)
    try:
        yield
    finally:
        gc.set_threshold(*before)
