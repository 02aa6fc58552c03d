"""Steps at fixed times: over what has arrived by then, at no other time, and never an empty one."""

from __future__ import annotations

import json
from math import floor

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedasync.core import Concurrency, Coordinator, Periodic

from .driving import admit, ready, strategy

WAITING = Concurrency(3, redispatch="next_version")


def every(interval_s: float, admission: Concurrency = WAITING, **bounds: object) -> Coordinator:
    return Coordinator(strategy(admission, Periodic(interval_s), **bounds))


def test_a_step_takes_what_has_arrived_by_its_time() -> None:
    c = every(1.0)
    a, b, late = (admit(c, worker, 0.0) for worker in range(3))
    assert c.next_timer() == 1.0
    assert ready(c.deliver(a.id, 0.3)) is None
    assert ready(c.deliver(b.id, 1.0)) is None, "at the very instant: before the timer"
    step = ready(c.on_timer(1.0))
    assert step is not None
    assert [x.lease.worker for x in step.entering] == [0, 1]
    c.commit(1.0)
    assert c.next_timer() == 2.0
    assert ready(c.on_timer(2.0)) is None, "nothing has arrived: no step"
    assert c.version == 1
    c.deliver(late.id, 2.5)
    step = ready(c.on_timer(3.0))
    assert step is not None
    assert [step.staleness(x) for x in step.entering] == [1]


def test_who_delivered_waits_for_the_step() -> None:
    c = every(1.0)
    lease = admit(c, 0, 0.0)
    c.deliver(lease.id, 0.5)
    assert c.request(0, 0.5) is None
    assert c.slots == 2
    ready(c.on_timer(1.0))
    assert c.slots == 0
    c.commit(1.0)
    assert admit(c, 0, 1.0).base_version == 1


def test_who_delivered_does_not_take_the_place_of_one_that_failed() -> None:
    c = every(1.0)
    leases = [admit(c, worker, 0.0) for worker in range(3)]
    c.deliver(leases[0].id, 0.5)
    c.fail(leases[1].id, "lost", 0.6)
    assert c.slots == 1
    assert not c.may_start(0)
    assert c.request(0, 0.6) is None
    assert admit(c, 1, 0.6).base_version == 0


def test_nobody_at_work_and_nothing_waiting_needs_no_timer() -> None:
    c = every(1.0)
    assert c.next_timer() is None
    c.fail(admit(c, 0, 0.2).id, "lost", 0.4)
    assert c.next_timer() is None


def test_times_that_passed_while_nobody_was_there_are_not_made_up_for() -> None:
    """All clients were offline for a while: the next step is at the next time, not at one in the past."""
    c = every(1.0)
    c.fail(admit(c, 0, 0.2).id, "lost", 0.4)
    lease = admit(c, 1, 7.3)
    assert c.next_timer() == 8.0
    assert ready(c.deliver(lease.id, 7.4)) is None
    assert ready(c.on_timer(8.0)) is not None


def test_a_time_that_comes_during_a_step_is_kept_for_its_end() -> None:
    c = every(1.0)
    a, b = admit(c, 0, 0.0), admit(c, 1, 0.0)
    c.deliver(a.id, 0.5)
    assert ready(c.on_timer(1.0)) is not None
    c.deliver(b.id, 1.5)
    assert c.on_timer(2.0) == []
    restored = Coordinator.restore(c.strategy, json.loads(json.dumps(c.snapshot())))
    for each in (c, restored):
        step = ready(each.commit(2.25))
        assert step is not None
        assert [x.lease.worker for x in step.entering] == [1]


@given(
    interval_s=st.floats(1e-3, 1e3),
    ks=st.lists(st.integers(1, 10**6), min_size=1, max_size=20, unique=True).map(sorted),
)
def test_every_time_is_k_times_the_interval_exactly(interval_s: float, ks: list[int]) -> None:
    """Whenever somebody starts, the next time asked for is the first multiple that is not before it."""
    c = every(interval_s, Concurrency(1))
    for k in ks:
        start = (k - 0.5) * interval_s
        lease = admit(c, 0, start)
        assert c.next_timer() == k * interval_s
        c.deliver(lease.id, start)
        assert ready(c.on_timer(k * interval_s)) is not None
        c.commit(k * interval_s)
    assert c.version == len(ks)


@given(interval_s=st.floats(1e-2, 1e2), now=st.floats(0.0, 1e4))
def test_a_timer_looked_at_late_asks_for_the_first_time_after_it(interval_s: float, now: float) -> None:
    c = every(interval_s, Concurrency(2))
    admit(c, 0, 0.0)
    c.on_timer(now)
    timer = c.next_timer()
    assert timer is not None
    assert timer > now
    k = max(1, floor(now / interval_s) - 1)
    while k * interval_s <= now:
        k += 1
    assert timer == k * interval_s


@pytest.mark.parametrize("interval_s", [0.0, -1.0, float("nan"), float("inf")])
def test_an_interval_is_positive_and_finite(interval_s: float) -> None:
    with pytest.raises(ValueError, match="periodic buffer: interval_s must be a finite number > 0"):
        Periodic(interval_s)
