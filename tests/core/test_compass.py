"""FedCompass's groups: steps chosen so that clients of different speed arrive together."""

from __future__ import annotations

import json
from heapq import heappop, heappush

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedasync.core import Compass, Coordinator, EventLog, Grouped, Step

from .driving import admit, ready, strategy, told


def coordinator(rule: Compass, log: EventLog | None = None, **bounds: object) -> Coordinator:
    return Coordinator(strategy(rule, Grouped(), **bounds), log)


def drive(rule: Compass, speeds: list[float], versions: int, *, restore: bool = False) -> list[Step]:
    """Always-on clients of constant seconds a step, under a clock of their own; every step made."""
    c = coordinator(rule)
    ends: list[tuple[float, int, int]] = []
    steps, now = [], 0.0

    def start() -> None:
        for worker in range(len(speeds)):
            busy = any(lease.worker == worker for lease in c.leases)
            if not busy and c.may_start(worker):
                lease = admit(c, worker, now)
                assert lease.steps is not None
                assert rule.least_steps <= lease.steps <= rule.most_steps
                heappush(ends, (now + lease.steps * speeds[worker], lease.id, worker))

    start()
    while len(steps) < versions:
        timer = c.next_timer()
        if timer is not None and (not ends or timer < ends[0][0]):
            now = max(now, timer)
            events = c.on_timer(now)
        else:
            now, lease_id, _ = heappop(ends)
            events = c.deliver(lease_id, now)
        while (step := ready(events)) is not None:
            steps.append(step)
            events = c.commit(now)
        if restore:
            c = Coordinator.restore(c.strategy, json.loads(json.dumps(c.snapshot())))
        start()
    return steps


@settings(deadline=None, max_examples=40)
@given(st.lists(st.floats(1.0, 4.0), min_size=2, max_size=6))
def test_clients_of_constant_speed_arrive_together_up_to_one_step_of_the_slowest(speeds: list[float]) -> None:
    """Ratio of speeds below that of the bounds of steps: after the first leases nobody is early by more."""
    steps = drive(Compass(len(speeds), 20, 100), speeds, 12 * len(speeds))
    together = 0
    for step in steps[len(speeds) :]:
        times = [arrival.delivered_s for arrival in step.entering]
        assert max(times) - min(times) <= max(speeds) * (1 + 1e-9)
        together = max(together, len(times))
    assert together >= 2


def test_equal_clients_all_arrive_at_once() -> None:
    steps = drive(Compass(4, 5, 10), [1.0] * 4, 10)
    assert [len(step.entering) for step in steps[:4]] == [1] * 4  # each one's speed is measured first
    assert all(len(step.entering) == 4 for step in steps[5:])


def test_the_first_lease_measures_and_is_merged_alone() -> None:
    c = coordinator(Compass(2, 3, 10))
    lease = admit(c, 7, 0.0)
    assert lease.steps == 3
    step = ready(c.deliver(lease.id, 6.0))
    assert step is not None
    c.commit(6.0)
    known = admit(c, 7, 6.0)
    assert known.steps == 10, "nobody is under way: as many as allowed"
    assert c.next_timer() == pytest.approx(6.0 + 1.2 * 10 * 2.0)


def measured(c: Coordinator, *speeds: float) -> None:
    """Each worker's speed is measured, one after the other."""
    for worker, speed in enumerate(speeds):
        lease = admit(c, worker, c.now if c.now > 0 else 0.0)
        assert lease.steps is not None
        ready(c.deliver(lease.id, lease.admitted_s + lease.steps * speed))
        c.commit(c.now)


def test_who_joins_gets_the_steps_that_end_with_the_group() -> None:
    c = coordinator(Compass(3, 2, 10))
    measured(c, 4.0, 1.5, 9.0)
    now = c.now
    founder = admit(c, 0, now)
    assert founder.steps == 10
    joined = admit(c, 1, now + 28.0)  # 12 s are left: 8 steps of 1.5 s
    assert (joined.group, joined.steps) == (founder.group, 8)
    slow = admit(c, 2, now + 30.0)  # 10 s are left: 1 step of 9 s, fewer than allowed
    assert slow.group != founder.group
    # Its own group: the fastest of the group under way, done by 48 s and off again for 10 steps of 1.5 s, is back at
    # 63 s, which leaves 33 s.
    assert slow.steps == 3


def test_a_client_too_slow_even_for_one_step_gets_the_fewest_not_the_most() -> None:
    c = coordinator(Compass(2, 2, 10))
    measured(c, 1.0, 500.0)
    now = c.now
    admit(c, 0, now)
    slow = admit(c, 1, now)
    assert slow.steps == 2


def test_who_is_late_is_merged_with_the_next_group() -> None:
    log = EventLog()
    c = coordinator(Compass(2, 2, 10), log)
    measured(c, 1.0, 1.0)
    now = c.now
    first, second = admit(c, 0, now), admit(c, 1, now)
    assert (second.group, second.steps) == (first.group, 10)
    assert ready(c.deliver(first.id, now + 10.0)) is None
    assert c.request(0, now + 10.0) is None, "it waits for its group"
    assert c.next_timer() == now + 12.0
    assert ready(c.on_timer(now + 11.0)) is None
    step = ready(c.on_timer(now + 12.0))
    assert step is not None
    assert [a.lease.worker for a in step.entering] == [0]
    c.commit(now + 12.0)
    again = admit(c, 0, now + 12.0)
    assert ready(c.deliver(second.id, now + 13.0)) is None, "too late for its group: it waits for another"
    late = admit(c, 1, now + 13.0)  # and goes on at once
    assert late.base_version == c.version
    step = ready(c.deliver(again.id, now + 13.5))
    if step is None:  # the late one joined that group: its time has to pass
        step = ready(c.deliver(late.id, now + 14.0))
    assert step is not None
    assert {a.lease.id for a in step.entering} >= {second.id, again.id}
    assert step.staleness(step.entering[0]) == 1
    c.commit(now + 14.0)
    assert c.ledger.imbalance == 0
    assert all(row["worker"] in (0, 1, -1) for row in told(log))


def test_speeds_are_a_moving_average_in_which_the_newest_counts_most() -> None:
    c = coordinator(Compass(1, 10, 10, speed_momentum=0.75))
    measured(c, 2.0)
    for speed, mean in ((6.0, 5.0), (1.0, 2.0)):
        lease = admit(c, 0, c.now)
        c.deliver(lease.id, c.now + 10 * speed)
        if c.step is None:  # it was late, and waits for the next group
            assert ready(c.on_timer(c.now)) is None
        else:
            c.commit(c.now)
        assert dict(c.snapshot()["groups"]["speeds"]) == {0: pytest.approx(mean)}


def test_a_group_whose_time_passes_during_a_step_asks_for_no_time_in_the_past() -> None:
    c = coordinator(Compass(2, 2, 10))
    measured(c, 1.0)
    now = c.now
    lost, unknown = admit(c, 0, now), admit(c, 9, now)
    assert ready(c.deliver(unknown.id, now + 1.0)) is not None
    assert ready(c.commit(now + 500.0)) is None
    assert c.next_timer() is None
    assert ready(c.deliver(lost.id, now + 501.0)) is None, "late: it waits for the next group"
    again = admit(c, 9, now + 501.0)
    step = ready(c.deliver(again.id, now + 502.0))
    assert step is not None
    assert {a.lease.id for a in step.entering} == {lost.id, again.id}


def test_what_grew_too_stale_while_it_waited_makes_no_empty_step() -> None:
    """Two wait for a third; a measuring lease makes a version meanwhile, which drops them."""
    c = coordinator(Compass(4, 10, 10), max_staleness=0)
    measured(c, 1.0, 1.0, 1.0)
    now = c.now
    a, b = admit(c, 0, now), admit(c, 1, now)
    unknown = admit(c, 9, now)
    assert a.group == b.group
    c.deliver(a.id, now + 10.0)
    assert ready(c.deliver(unknown.id, now + 10.5)) is not None
    c.commit(now + 10.5)
    assert c.ledger.rejected == {"stale": 1}
    assert c.may_start(0), "it waits for nobody any more"
    assert ready(c.deliver(b.id, now + 11.0)) is None
    assert c.step is None
    assert c.waiting == 0
    assert c.next_timer() is None
    assert c.ledger.imbalance == 0


@pytest.mark.parametrize("speeds", [[1.0, 2.0, 3.0], [1.0, 1.0, 30.0]])
def test_a_snapshot_after_every_event_changes_nothing(speeds: list[float]) -> None:
    rule = Compass(3, 4, 12)
    assert drive(rule, speeds, 20, restore=True) == drive(rule, speeds, 20)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Compass(0), "concurrency must be an integer ≥ 1, got 0"),
        (lambda: Compass(2, 0), "least_steps must be an integer ≥ 1, got 0"),
        (lambda: Compass(2, 5, 4), "most_steps must be an integer ≥ 5, got 4"),
        (lambda: Compass(2, patience=0.9), "patience must be a finite number ≥ 1, got 0.9"),
        (lambda: Compass(2, speed_momentum=0.0), "speed_momentum must be a finite number > 0 and ≤ 1, got 0.0"),
    ],
)
def test_a_compass_refuses_what_is_out_of_range(make: object, words: str) -> None:
    with pytest.raises(ValueError, match=words):
        make()  # type: ignore[operator]
