"""Whatever happens, in whatever order: no lease is lost, none is invented, and a snapshot changes nothing.

The machine plays a runtime that does anything it may: it asks for work, delivers on time, late and twice, reports
failures, lets timers run, commits as late as it likes, and at any moment goes on with a coordinator restored from JSON.
Beside it stand a twin that is never restored, and a model that knows of each lease only what the events said.
"""

from __future__ import annotations

import json
from collections import Counter
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from fedasync.core import (
    Accepted,
    Arrival,
    Barrier,
    Cancelled,
    Cohort,
    Concurrency,
    Coordinator,
    Event,
    EventLog,
    Failed,
    Lease,
    Published,
    Rejected,
    Sliding,
    StalenessBudget,
    Step,
    StepReady,
    Strategy,
    Tumbling,
)

from .driving import ADMISSIONS, BUFFERS, PUBLICATIONS, combinations, strategy, told

REASONS = st.sampled_from(["lost", "crash", "dropout"])
DEFECTS = st.sampled_from([None, None, None, "not finite", "wrong shape"])
TIMES = st.sampled_from([0.0, 0.0, 0.25, 1.0, 7.0])


class Life(RuleBasedStateMachine):
    """One coordinator's life under one combination of decisions."""

    choices: ClassVar[list[tuple[str, str, str]]]

    @initialize(
        data=st.data(),
        max_staleness=st.sampled_from([None, None, 2, 3]),
        lease_timeout_s=st.sampled_from([None, 2.0]),
    )
    def start(self, data: st.DataObject, max_staleness: int | None, lease_timeout_s: float | None) -> None:
        admission, buffer, publication = data.draw(st.sampled_from(self.choices), label="decisions")
        self.strategy: Strategy = strategy(
            ADMISSIONS[admission],
            BUFFERS[buffer],
            PUBLICATIONS[publication],
            max_staleness=max_staleness,
            lease_timeout_s=lease_timeout_s,
        )
        self.log, self.twin_log = EventLog(), EventLog()
        self.subject = Coordinator(self.strategy, self.log)
        self.twin = Coordinator(self.strategy, self.twin_log)
        self.now = 0.0
        self.version = self.published = 0
        self.state: dict[int, str] = {}
        self.lease: dict[int, Lease] = {}
        self.waiting: list[Arrival] = []
        self.window: list[int] = []
        self.step: Step | None = None
        self.started_this_round = 0
        self.ignored = 0

    # -- what a runtime may do -----------------------------------------------------------------------------------

    @rule(passes=TIMES, worker=st.integers(0, 9))
    def somebody_asks(self, passes: float, worker: int) -> None:
        self.now += passes
        admits = self.subject.admits
        lease = self.both("request", worker, self.now)
        assert (lease is not None) is admits
        if lease is None:
            return
        assert lease.id == len(self.state)
        assert (lease.worker, lease.base_version, lease.admitted_s) == (worker, self.published, self.now)
        timeout_s = self.strategy.lease_timeout_s
        assert lease.deadline_s == (None if timeout_s is None else self.now + timeout_s)
        self.state[lease.id], self.lease[lease.id] = "in_flight", lease
        self.started_this_round += 1

    @precondition(lambda self: self.state)
    @rule(passes=TIMES, data=st.data(), defect=DEFECTS, late=st.booleans())
    def a_result_arrives(self, passes: float, data: st.DataObject, defect: str | None, late: bool) -> None:
        """Mostly of a lease in flight; if ``late`` of any lease ever given out."""
        self.now += passes
        lease_id = data.draw(self.some_lease(late), label="lease")
        self.follow(self.both("deliver", lease_id, self.now, defect), lease_id)

    @precondition(lambda self: self.state)
    @rule(passes=TIMES, data=st.data(), reason=REASONS, late=st.booleans())
    def a_worker_fails(self, passes: float, data: st.DataObject, reason: str, late: bool) -> None:
        self.now += passes
        lease_id = data.draw(self.some_lease(late), label="lease")
        self.follow(self.both("fail", lease_id, reason, self.now), lease_id)

    @rule(passes=TIMES)
    def a_timer_rings(self, passes: float) -> None:
        self.now += passes
        due = [
            lease.id
            for lease in self.lease.values()
            if self.state[lease.id] == "in_flight" and lease.deadline_s is not None and lease.deadline_s <= self.now
        ]
        events = self.both("on_timer", self.now)
        assert sorted(e.lease.id for e in events if isinstance(e, Failed)) == due
        self.follow(events)

    @precondition(lambda self: self.step is not None)
    @rule(passes=TIMES)
    def the_server_is_done(self, passes: float) -> None:
        self.now += passes
        step = self.step
        assert step is not None
        self.step = None
        self.version += 1
        self.started_this_round = 0
        self.window = list(step.window)
        for arrival in step.entering:
            self.state[arrival.lease.id] = "consumed"
        self.follow(self.both("commit", self.now))

    @precondition(lambda self: self.step is None)
    @rule()
    def nothing_is_committed_that_was_not_handed_out(self) -> None:
        for coordinator in (self.subject, self.twin):
            with pytest.raises(ValueError, match="no step is outstanding"):
                coordinator.commit(self.now)

    @rule(lease_id=st.sampled_from([-1, 10_000]))
    def a_lease_that_was_never_given_out_is_refused(self, lease_id: int) -> None:
        for coordinator in (self.subject, self.twin):
            with pytest.raises(ValueError, match="never given out"):
                coordinator.deliver(lease_id, self.now)

    @precondition(lambda self: self.subject.now == self.now)
    @rule(back=st.sampled_from([0.125, float("nan")]))
    def time_never_goes_back(self, back: float) -> None:
        before = self.subject.snapshot()
        with pytest.raises(ValueError, match="time goes forward"):
            self.subject.request(0, self.now - back)
        assert self.subject.snapshot() == before

    @rule()
    def the_coordinator_is_replaced_by_its_snapshot(self) -> None:
        state = json.loads(json.dumps(self.subject.snapshot()))
        self.subject = Coordinator.restore(self.strategy, state, self.log)

    # -- what must hold afterwards -------------------------------------------------------------------------------

    @invariant()
    def the_ledger_balances_and_agrees_with_the_events(self) -> None:
        ledger = self.subject.ledger
        assert ledger.imbalance == 0
        count = Counter(self.state.values())
        assert ledger.admitted == len(self.state)
        assert ledger.in_flight == count["in_flight"] == self.subject.in_flight
        assert ledger.buffered == count["buffered"]
        assert ledger.consumed == count["consumed"]
        for ending in ("rejected", "failed", "cancelled"):
            assert getattr(ledger, ending).total() == count[ending]
        assert ledger.ignored == self.ignored
        assert [lease.id for lease in self.subject.leases] == [i for i, s in self.state.items() if s == "in_flight"]
        assert self.subject.in_flight <= self.strategy.admission.most_in_flight
        assert (self.subject.version, self.subject.published) == (self.version, self.published)
        assert self.subject.round_started == self.started_this_round

    @invariant()
    def no_step_is_held_back(self) -> None:
        assert self.subject.step == self.step
        waiting = len(self.waiting)
        if self.step is not None:
            return
        buffer, admission = self.strategy.buffer, self.strategy.admission
        if isinstance(buffer, Tumbling):
            assert waiting < buffer.size
        elif isinstance(buffer, Sliding):
            filling = not self.window and buffer.warm_up == "wait_until_full"
            assert waiting < (buffer.size if filling else 1)
        elif isinstance(admission, Cohort):
            assert waiting < admission.target
            assert self.subject.in_flight or self.started_this_round < admission.size

    @invariant()
    def admission_follows_its_formula(self) -> None:
        admission, flying, stepping = self.strategy.admission, self.subject.in_flight, self.step is not None
        match admission:
            case Cohort(size=size):
                expected = self.started_this_round < size and not stepping
            case Concurrency(limit=limit, redispatch=redispatch):
                expected = flying < limit and (redispatch == "before_step" or not stepping)
            case StalenessBudget(eta=eta, batch=batch, limit=limit):
                held = sum(state in ("in_flight", "buffered", "consumed") for state in self.state.values())
                expected = held < (eta + self.version + 1) * batch and (limit is None or flying < limit)
        assert self.subject.admits is expected

    @invariant()
    def the_explanation_names_who_is_waited_for(self) -> None:
        text = self.subject.explain()
        assert "\n" not in text
        assert f"version {self.version}" in text
        workers = sorted({lease.worker for lease in self.subject.leases})
        for worker in workers[:8]:
            assert str(worker) in text.split("in flight")[1]
        if not workers:
            assert "nobody works" in text

    @invariant()
    def timers_and_twin_agree(self) -> None:
        deadlines = [x.deadline_s for x in self.subject.leases if x.deadline_s is not None]
        assert self.subject.next_timer() == (min(deadlines) if deadlines else None)
        assert self.subject.snapshot() == self.twin.snapshot()

    def teardown(self) -> None:
        if not hasattr(self, "log"):
            return
        rows = told(self.log)
        assert rows == told(self.twin_log)
        kinds = Counter(row["kind"] for row in rows)
        ledger = self.subject.ledger
        assert kinds["admitted"] == ledger.admitted
        assert kinds["consumed"] == ledger.consumed
        assert kinds["ignored"] == ledger.ignored
        assert kinds["committed"] == self.version
        for ending in ("rejected", "failed", "cancelled"):
            assert Counter(row["reason"] for row in rows if row["kind"] == ending) == getattr(ledger, ending)
        dropped = kinds["delivered"] - kinds["consumed"] - ledger.buffered
        assert dropped == sum(row["kind"] == "rejected" and self.was_buffered(row, rows) for row in rows)
        assert [row["time_s"] for row in rows] == sorted(row["time_s"] for row in rows)
        bound = self.strategy.max_staleness
        for row in rows:
            if row["kind"] == "consumed":
                assert 0 <= row["staleness"] == row["version"] - row["base_version"]
                assert bound is None or row["staleness"] <= bound

    @staticmethod
    def was_buffered(rejected: dict[str, Any], rows: list[dict[str, Any]]) -> bool:
        return any(row["kind"] == "delivered" and row["lease"] == rejected["lease"] for row in rows)

    # -- inside --------------------------------------------------------------------------------------------------

    def some_lease(self, any_at_all: bool) -> st.SearchStrategy[int]:
        flying = [i for i, state in self.state.items() if state == "in_flight"]
        return st.sampled_from(flying if flying and not any_at_all else list(self.state))

    def both(self, call: str, *arguments: Any) -> Any:
        """Tell the subject and its twin; they must answer alike."""
        answer = getattr(self.subject, call)(*arguments)
        assert answer == getattr(self.twin, call)(*arguments)
        return answer

    def follow(self, events: list[Event], told_of: int | None = None) -> None:
        """Move the model's leases as the events say, and check that each says what it may."""
        for event in events:
            match event:
                case Accepted():
                    assert told_of is not None
                    lease = self.lease[told_of]
                    assert self.state[lease.id] == "in_flight"
                    self.state[lease.id] = "buffered"
                    self.waiting.append(Arrival(lease, self.now, self.version))
                case Rejected(lease_id, _, ignored=True):
                    assert lease_id == told_of
                    assert self.state[lease_id] != "in_flight"
                    assert len(events) == 1
                    self.ignored += 1
                case Rejected(lease_id, reason):
                    assert self.state[lease_id] == "in_flight" or reason == "stale"
                    self.waiting = [a for a in self.waiting if a.lease.id != lease_id]
                    self.state[lease_id] = "rejected"
                case Failed(lease, _) | Cancelled(lease, _):
                    assert self.state[lease.id] == "in_flight"
                    self.state[lease.id] = "failed" if isinstance(event, Failed) else "cancelled"
                case Published(version, in_flight):
                    assert version == self.version
                    assert in_flight == self.strategy.publication.in_flight
                    self.published = version
                case StepReady(step):
                    self.take(step)
        if isinstance(self.strategy.admission, Cohort) and self.step is None and not self.waiting:
            flying = any(state == "in_flight" for state in self.state.values())
            if self.started_this_round >= self.strategy.admission.size and not flying:
                self.started_this_round = 0

    def take(self, step: Step) -> None:
        """The step takes the right contributions, in the right order, and they leave the queue."""
        assert self.step is None
        assert step.version == self.version
        buffer, waiting = self.strategy.buffer, self.waiting
        if isinstance(buffer, Tumbling):
            if buffer.order == "oldest_first":
                waiting = sorted(waiting, key=lambda a: (a.lease.base_version, a.lease.id))
            expected = waiting[: buffer.size]
        elif isinstance(buffer, Barrier):
            expected = list(waiting)
            assert not any(state == "in_flight" for state in self.state.values())
        else:
            filling = not self.window and buffer.warm_up == "wait_until_full"
            expected = waiting[: buffer.size if filling else 1]
            inside = [*self.window, *(a.lease.id for a in expected)]
            assert list(step.window) == inside[-buffer.size :]
            assert list(step.leaving) == inside[: -buffer.size]
        assert list(step.entering) == expected
        self.waiting = [a for a in waiting if a not in expected]
        self.step = step


class LifeOfCohorts(Life):
    choices: ClassVar[list[tuple[str, str, str]]] = combinations("cohort")


class LifeOfConcurrency(Life):
    choices: ClassVar[list[tuple[str, str, str]]] = combinations("concurrency")


class LifeOfBudgets(Life):
    choices: ClassVar[list[tuple[str, str, str]]] = combinations("budget")


for life in (LifeOfCohorts, LifeOfConcurrency, LifeOfBudgets):
    life.TestCase.settings = settings(
        deadline=None,
        max_examples=max(60, len(life.choices)),
        stateful_step_count=40,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )

TestCohorts = LifeOfCohorts.TestCase
TestConcurrency = LifeOfConcurrency.TestCase
TestBudgets = LifeOfBudgets.TestCase
