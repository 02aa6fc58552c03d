"""Whatever happens, in whatever order: no lease is lost, none is invented, and a snapshot changes nothing.

The machine plays a runtime that does anything it may: it asks for work, delivers on time, late and twice, reports
failures, lets timers run, commits as late as it likes, and at any moment goes on with a coordinator restored from JSON.
Beside it stand a twin that is never restored, and a model that knows of each lease only what the events said.
"""

from __future__ import annotations

import json
from collections import Counter
from contextlib import suppress
from fractions import Fraction
from math import ceil, floor, inf
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
    Compass,
    Concurrency,
    Coordinator,
    Event,
    EventLog,
    Failed,
    Grouped,
    Lease,
    Periodic,
    Published,
    Quota,
    Rejected,
    Sliding,
    StalenessBudget,
    Step,
    StepReady,
    Strategy,
    SyncBudget,
    Tiers,
    Tumbling,
)

from .driving import ADMISSIONS, BUFFERS, PROFILE, PUBLICATIONS, combinations, strategy, told

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
        at_bound=st.sampled_from(["nothing", "stop", "wait"]),
    )
    def start(
        self, data: st.DataObject, max_staleness: int | None, lease_timeout_s: float | None, at_bound: str
    ) -> None:
        admission, buffer, publication = data.draw(st.sampled_from(self.choices), label="decisions")
        decisions = ADMISSIONS[admission], BUFFERS[buffer], PUBLICATIONS[publication]
        bounds: dict[str, Any] = {"max_staleness": max_staleness, "lease_timeout_s": lease_timeout_s}
        bounds["stop_stale"] = at_bound == "stop" and max_staleness is not None
        self.strategy: Strategy = strategy(*decisions, **bounds)
        if at_bound == "wait":
            with suppress(ValueError):
                self.strategy = strategy(*decisions, **bounds, at_bound="wait")
        self.log, self.twin_log = EventLog(), EventLog()
        self.subject = Coordinator(self.strategy, self.log, PROFILE)
        self.twin = Coordinator(self.strategy, self.twin_log, PROFILE)
        self.now = 0.0
        self.version = self.published = 0
        self.state: dict[int, str] = {}
        self.lease: dict[int, Lease] = {}
        self.waiting: list[Arrival] = []
        self.window: list[int] = []
        self.step: Step | None = None
        self.started_this_round = 0
        self.ignored = 0
        self.tick, self.tick_due = 1, False
        self.kept: list[tuple[Any, str]] = []
        self.samples: dict[int, int] = {}
        """Samples of each lease that have not ended."""
        self.drafted: set[int] = set()
        self.starting = False
        """A version was just made, and nothing has happened since."""
        self.started_of = [0] * 3
        self.in_round: dict[int, set[int]] = {group: set() for group in range(3)}
        """Workers that have started in an open round, by tier (a cohort: 0)."""

    # -- what a runtime may do -----------------------------------------------------------------------------------

    @rule(passes=TIMES, worker=st.integers(0, 9), samples=st.sampled_from([None, 1, 2]))
    def somebody_asks(self, passes: float, worker: int, samples: int | None) -> None:
        self.now += passes
        may_start = self.subject.may_start(worker)
        assert may_start is (self.subject.admits and not self.has_to_wait(worker))
        if may_start and isinstance(self.strategy.buffer, Periodic) and not self.waiting and not self.subject.leases:
            self.tick = max(self.tick, ceil(self.now / self.strategy.buffer.interval_s))
        lease = self.both("request", worker, self.now, samples)
        assert (lease is not None) is may_start
        if lease is None:
            return
        self.starting = False
        self.check_group_and_steps(lease)
        assert lease.id == len(self.state)
        assert (lease.worker, lease.base_version, lease.admitted_s) == (worker, self.published, self.now)
        timeout_s = self.strategy.lease_timeout_s
        assert lease.deadline_s == (None if timeout_s is None else self.now + timeout_s)
        self.state[lease.id], self.lease[lease.id] = "in_flight", lease
        self.samples[lease.id] = self.most_samples if samples is None else min(samples, self.most_samples)
        self.started_this_round += 1
        if isinstance(self.strategy.admission, (Cohort, Tiers)):
            assert worker not in self.in_round[lease.group], "once in a round"
            self.in_round[lease.group].add(worker)

    @precondition(lambda self: self.state)
    @rule(passes=TIMES, data=st.data(), defect=DEFECTS, late=st.booleans())
    def a_result_arrives(self, passes: float, data: st.DataObject, defect: str | None, late: bool) -> None:
        """Mostly of a lease in flight; if ``late`` of any lease ever given out."""
        self.now += passes
        lease_id = data.draw(self.some_lease(late), label="lease")
        self.follow(self.both("deliver", lease_id, self.now, defect), lease_id)

    @precondition(lambda self: self.state)
    @rule(data=st.data(), late=st.booleans())
    def a_sample_ends(self, data: st.DataObject, late: bool) -> None:
        """It frees its slot, and moves no lease."""
        lease_id = data.draw(self.some_lease(late), label="lease")
        if self.state[lease_id] == "in_flight" and self.most_samples and not self.samples[lease_id]:
            for coordinator in (self.subject, self.twin):
                with pytest.raises(ValueError, match="have ended before"):
                    coordinator.sample_done(lease_id)
            return
        self.both("sample_done", lease_id)
        if self.state[lease_id] == "in_flight" and self.most_samples:
            self.samples[lease_id] -= 1

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
        if isinstance(self.strategy.buffer, Periodic) and self.tick * self.strategy.buffer.interval_s <= self.now:
            self.tick, self.tick_due = floor(self.now / self.strategy.buffer.interval_s) + 1, True
        events = self.both("on_timer", self.now)
        assert sorted(e.lease.id for e in events if isinstance(e, Failed)) == due
        self.follow(events)
        if self.step is None:
            assert not (self.tick_due and self.waiting)
            self.tick_due = False

    @precondition(lambda self: self.step is not None)
    @rule(passes=TIMES)
    def the_server_is_done(self, passes: float) -> None:
        self.now += passes
        step = self.step
        assert step is not None
        self.step = None
        self.version += 1
        self.started_this_round = 0
        if isinstance(self.strategy.admission, Cohort):
            self.in_round[0].clear()
        self.window = list(step.window)
        for arrival in step.entering + step.undrafted:
            self.state[arrival.lease.id] = "consumed"
        self.starting = True
        self.follow(self.both("commit", self.now), committed=True)
        assert self.step is not None or not (self.tick_due and self.waiting)
        self.tick_due = False

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
            with pytest.raises(ValueError, match="never given out"):
                coordinator.sample_done(lease_id)

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
        self.subject = Coordinator.restore(self.strategy, state, self.log, PROFILE)

    @rule()
    def a_snapshot_is_a_copy(self) -> None:
        """What the coordinator does next changes none that was taken, and a restored one lives its own life."""
        before = self.subject.snapshot()
        kept = json.dumps(before)
        self.kept.append((before, kept))
        other = Coordinator.restore(self.strategy, before, profile=PROFILE)
        for worker in range(len(PROFILE)):
            other.request(worker, self.now)
        for lease in other.leases:
            other.deliver(lease.id, self.now)
        assert json.dumps(before) == kept
        assert self.subject.snapshot() == json.loads(kept)

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
        assert self.subject.samples_in_flight == self.flying_samples()
        assert not (self.strategy.at_bound == "wait" and ledger.rejected["stale"])
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
            assert waiting < buffer.size or self.waits_for_some_in_flight(buffer)
        elif isinstance(buffer, Sliding):
            filling = not self.window and buffer.warm_up == "wait_until_full"
            assert waiting < (buffer.size if filling else 1)
        elif isinstance(buffer, Quota):
            assert sum(a.lease.worker not in self.drafted for a in self.waiting) < buffer.size
            assert not waiting or self.subject.in_flight or self.starting
        elif isinstance(admission, Tiers):
            for tier, target in enumerate(self.tier_targets()):
                flying, there = self.of_group(tier)
                assert not there or flying or self.started_of[tier] < target
        elif isinstance(admission, Compass):
            for number, group in self.subject.snapshot()["groups"]["groups"]:
                flying, there = self.of_group(number)
                assert group["in_flight"] == flying
                assert group["arrived"] == [a.lease.worker for a in there]
                assert flying  # one that has arrived whole is merged, and one that lost all is forgotten
        elif isinstance(admission, Cohort):
            assert waiting < admission.target
            assert self.subject.in_flight or self.started_this_round < admission.size

    @invariant()
    def admission_follows_its_formula(self) -> None:
        admission, flying, stepping = self.strategy.admission, self.subject.in_flight, self.step is not None
        match admission:
            case Cohort(size=size):
                expected = self.started_this_round < size and not stepping
            case Concurrency(limit=limit, redispatch="next_version"):
                expected = flying + len(self.waiting) < limit and not stepping
            case Tiers():
                targets = self.tier_targets()
                expected = not stepping and any(map(int.__lt__, self.started_of, targets))
            case Compass(limit=limit):
                groups = self.open_groups()
                expected = not stepping and flying + sum(a.lease.group in groups for a in self.waiting) < limit
            case Concurrency(limit=limit, redispatch=redispatch):
                expected = flying < limit and (redispatch == "before_step" or not stepping)
            case SyncBudget(extra=extra, batch=batch, every=every):
                expected = self.held() < floor((self.published + (1 + Fraction(extra)) * every) * batch)
            case StalenessBudget(eta=eta, batch=batch, limit=limit):
                whole = (self.held() - flying) // batch
                batches = inf if eta is None else eta + self.version + 1
                if admission.in_batches:
                    batches = min(batches, whole + 1)
                expected = self.held() < batches * batch and (limit is None or flying < limit)
                if admission.limit_samples is not None:
                    expected &= self.flying_samples() + admission.samples <= admission.limit_samples
                    expected &= flying < admission.limit_samples
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
        if isinstance(self.strategy.buffer, Periodic) and (self.subject.leases or self.waiting):
            deadlines.append(self.tick * self.strategy.buffer.interval_s)
        if isinstance(self.strategy.admission, Compass) and self.step is None:
            groups = self.subject.snapshot()["groups"]["groups"]
            deadlines += [group["latest_s"] for _, group in groups if group["latest_s"] is not None]
        assert self.subject.next_timer() == (min(deadlines) if deadlines else None)
        assert self.subject.snapshot() == self.twin.snapshot()

    def teardown(self) -> None:
        if not hasattr(self, "log"):
            return
        assert all(json.dumps(state) == kept for state, kept in self.kept)
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

    @property
    def most_samples(self) -> int:
        """Samples of a lease, where they are counted (0: nowhere)."""
        admission = self.strategy.admission
        counts = isinstance(admission, StalenessBudget) and admission.limit_samples is not None
        return admission.samples if counts else 0

    def flying_samples(self) -> int:
        return sum(self.samples[i] for i, state in self.state.items() if state == "in_flight")

    def held(self) -> int:
        """Leases in flight, and accepted ones."""
        return sum(state in ("in_flight", "buffered", "consumed") for state in self.state.values())

    def waits_for_some_in_flight(self, buffer: Tumbling) -> bool:
        """Whether a step that has enough contributions must not begin yet."""
        flying = [i for i, state in self.state.items() if state == "in_flight"]
        waiting = sorted(a.lease.id for a in self.waiting)
        if buffer.order == "dispatch":
            return sorted(flying + waiting)[: buffer.size] != waiting[: buffer.size]
        if self.strategy.at_bound == "drop" or not flying:
            return False
        assert self.strategy.max_staleness is not None
        ages = [  # when the next steps use what is left, the oldest first
            self.version + 1 + place // buffer.size - self.lease[i].base_version
            for place, i in enumerate(sorted(flying + waiting[buffer.size :]))
        ]
        return max(ages) > self.strategy.max_staleness

    def both(self, call: str, *arguments: Any) -> Any:
        """Tell the subject and its twin; they must answer alike."""
        answer = getattr(self.subject, call)(*arguments)
        assert answer == getattr(self.twin, call)(*arguments)
        return answer

    def has_to_wait(self, worker: int) -> bool:
        """Whether a worker may not start though others may."""
        match self.strategy.admission:
            case Tiers():
                tier = self.tier_of(worker)
                return self.started_of[tier] >= self.tier_targets()[tier] or worker in self.in_round[tier]
            case Cohort():
                return worker in self.in_round[0]
            case Compass():
                groups = self.open_groups()
                return any(a.lease.worker == worker and a.lease.group in groups for a in self.waiting)
            case Concurrency(redispatch="next_version"):
                return any(a.lease.worker == worker for a in self.waiting)
        return False

    def tier_of(self, worker: int) -> int:
        tiers = self.strategy.admission.tiers if isinstance(self.strategy.admission, Tiers) else 1
        faster = sum((t, other) < (PROFILE[worker], worker) for other, t in enumerate(PROFILE))
        return faster * tiers // len(PROFILE)

    def tier_targets(self) -> list[int]:
        admission = self.strategy.admission
        assert isinstance(admission, Tiers)
        members = Counter(map(self.tier_of, range(len(PROFILE))))
        return [min(admission.cohort, members[tier]) for tier in range(admission.tiers)]

    def open_groups(self) -> set[int]:
        return {number for number, _ in self.subject.snapshot()["groups"]["groups"]}

    def of_group(self, group: int) -> tuple[int, list[Arrival]]:
        """Leases of a group in flight, and those of its contributions that wait."""
        flying = sum(state == "in_flight" and self.lease[i].group == group for i, state in self.state.items())
        return flying, [a for a in self.waiting if a.lease.group == group]

    def check_group_and_steps(self, lease: Lease) -> None:
        admission = self.strategy.admission
        if isinstance(admission, Compass):
            assert lease.steps is not None
            assert admission.least_steps <= lease.steps <= admission.most_steps
            return
        assert lease.steps is None
        if isinstance(admission, Tiers):
            assert lease.group == self.tier_of(lease.worker)
            self.started_of[lease.group] += 1
        else:
            assert lease.group == 0

    def follow(self, events: list[Event], told_of: int | None = None, *, committed: bool = False) -> None:
        """Move the model's leases as the events say, and check that each says what it may."""
        told_nothing = all(isinstance(event, Rejected) and event.ignored for event in events)
        self.starting = committed or (self.starting and told_nothing)
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
                self.in_round[0].clear()
        if isinstance(self.strategy.admission, Tiers):
            for tier, target in enumerate(self.tier_targets()):
                if self.started_of[tier] >= target and self.of_group(tier) == (0, []):
                    self.started_of[tier] = 0
                    self.in_round[tier].clear()

    def take(self, step: Step) -> None:
        """The step takes the right contributions, in the right order, and they leave the queue."""
        assert self.step is None
        assert step.version == self.version
        buffer, waiting = self.strategy.buffer, self.waiting
        if isinstance(buffer, Tumbling):
            assert not self.waits_for_some_in_flight(buffer)
            if buffer.order != "arrival":
                newest = buffer.order == "freshest_first"
                waiting = sorted(waiting, key=lambda a: (a.lease.base_version, a.lease.id), reverse=newest)
            expected = waiting[: buffer.size]
        elif isinstance(buffer, Barrier):
            expected = list(waiting)
            assert not any(state == "in_flight" for state in self.state.values())
        elif isinstance(buffer, Periodic):
            assert self.tick_due
            self.tick_due = False
            expected = list(waiting)
        elif isinstance(buffer, Quota):
            first = [a for a in waiting if a.lease.worker not in self.drafted]
            behind = [a for a in waiting if a.lease.worker in self.drafted]
            if len(first) < buffer.size:
                assert not self.starting
                assert not any(state == "in_flight" for state in self.state.values())
            expected = (first + behind)[: buffer.size]
            self.drafted = {a.lease.worker for a in expected}
        elif isinstance(buffer, Grouped):
            group = step.entering[0].lease.group if isinstance(self.strategy.admission, Tiers) else None
            open_groups = self.open_groups() if group is None else set()
            expected = (
                [a for a in waiting if a.lease.group == group]
                if group is not None
                else [a for a in waiting if a.lease.group not in open_groups]
            )
        else:
            filling = not self.window and buffer.warm_up == "wait_until_full"
            expected = waiting[: buffer.size if filling else 1]
            inside = [*self.window, *(a.lease.id for a in expected)]
            assert list(step.window) == inside[-buffer.size :]
            assert list(step.leaving) == inside[: -buffer.size]
        assert list(step.entering) == expected
        left = [a for a in waiting if a not in expected]
        assert list(step.undrafted) == (left if isinstance(buffer, Quota) else [])
        self.waiting = [] if isinstance(buffer, Quota) else left
        self.step = step


class LifeOfCohorts(Life):
    choices: ClassVar[list[tuple[str, str, str]]] = combinations("cohort")


class LifeOfConcurrency(Life):
    choices: ClassVar[list[tuple[str, str, str]]] = combinations("concurrency")


class LifeOfWaiting(Life):
    choices: ClassVar[list[tuple[str, str, str]]] = combinations("waiting")


class LifeOfTiers(Life):
    choices: ClassVar[list[tuple[str, str, str]]] = combinations("tiers")


class LifeOfCompass(Life):
    choices: ClassVar[list[tuple[str, str, str]]] = combinations("compass")


class LifeOfBudgets(Life):
    choices: ClassVar[list[tuple[str, str, str]]] = combinations("budget")


for life in (LifeOfCohorts, LifeOfConcurrency, LifeOfWaiting, LifeOfTiers, LifeOfCompass, LifeOfBudgets):
    life.TestCase.settings = settings(
        deadline=None,
        max_examples=min(max(50, len(life.choices)), 80),
        stateful_step_count=40,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
    )

TestCohorts = LifeOfCohorts.TestCase
TestConcurrency = LifeOfConcurrency.TestCase
TestWaiting = LifeOfWaiting.TestCase
TestTiers = LifeOfTiers.TestCase
TestCompass = LifeOfCompass.TestCase
TestBudgets = LifeOfBudgets.TestCase
