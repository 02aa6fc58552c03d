"""SAFA's quota: first come, first merged; who was drafted last waits behind; a lag that stops work."""

from __future__ import annotations

import json

from fedasync.core import Cancelled, Concurrency, Coordinator, Quota, Step

from .driving import admit, ready, strategy

ALL = Concurrency(5, redispatch="next_version")


def of(size: int, admission: Concurrency = ALL, **bounds: object) -> Coordinator:
    return Coordinator(strategy(admission, Quota(size), **bounds))


def workers(step: Step | None) -> tuple[list[int], list[int]] | None:
    """Drafted, and left over."""
    if step is None:
        return None
    return [a.lease.worker for a in step.entering], [a.lease.worker for a in step.undrafted]


def test_the_list_of_events_by_hand() -> None:
    """Five clients, quota 2. Times of work: 1, 2, 3, 4 and 50."""
    c = of(2)
    leases = {worker: admit(c, worker, 0.0) for worker in range(5)}
    assert workers(ready(c.deliver(leases[0].id, 1.0))) is None
    assert workers(ready(c.deliver(leases[1].id, 2.0))) == ([0, 1], [])
    c.commit(2.0)
    leases |= {worker: admit(c, worker, 2.0) for worker in (0, 1)}
    # 0 and 1 were drafted last: 2 and 3, which come between them, go first, and they are left over.
    assert workers(ready(c.deliver(leases[2].id, 3.0))) is None
    assert workers(ready(c.deliver(leases[0].id, 3.0))) is None
    assert workers(ready(c.deliver(leases[1].id, 4.0))) is None, "two have come, but only one that goes first"
    step = ready(c.deliver(leases[3].id, 4.0))
    assert workers(step) == ([2, 3], [0, 1])
    assert step is not None
    assert [step.staleness(a) for a in step.entering + step.undrafted] == [1, 1, 0, 0]
    c.commit(4.0)
    assert c.waiting == 0
    # Now 0 and 1 go first again.
    leases |= {worker: admit(c, worker, 4.0) for worker in range(4)}
    assert workers(ready(c.deliver(leases[2].id, 4.5))) is None
    assert workers(ready(c.deliver(leases[0].id, 5.0))) is None
    assert workers(ready(c.deliver(leases[1].id, 6.0))) == ([0, 1], [2])
    assert c.ledger.imbalance == 0


def test_when_nobody_works_any_more_those_behind_fill_the_quota() -> None:
    c = of(2, Concurrency(2, redispatch="next_version"))
    for _ in range(2):
        pair = [admit(c, worker, c.now if c.version else 0.0) for worker in (0, 1)]
        assert workers(ready(c.deliver(pair[0].id, c.now + 1))) is None
        assert workers(ready(c.deliver(pair[1].id, c.now + 1))) == ([0, 1], [])
        c.commit(c.now)


def test_a_round_that_lost_the_others_takes_what_came() -> None:
    c = of(3, Concurrency(3, redispatch="next_version"))
    leases = [admit(c, worker, 0.0) for worker in range(3)]
    c.deliver(leases[0].id, 1.0)
    c.fail(leases[1].id, "lost", 2.0)
    assert workers(ready(c.fail(leases[2].id, "lost", 3.0))) == ([0], [])


def test_what_came_during_a_step_waits_for_those_who_start_after_it() -> None:
    """Everybody has delivered when the step ends, but the two that it used are about to start again."""
    c = of(2, Concurrency(3, redispatch="next_version"))
    leases = [admit(c, worker, 0.0) for worker in range(3)]
    c.deliver(leases[0].id, 1.0)
    assert ready(c.deliver(leases[1].id, 1.0)) is not None
    c.deliver(leases[2].id, 1.5)
    assert ready(c.commit(2.0)) is None
    again = [admit(c, worker, 2.0) for worker in (0, 1)]
    assert workers(ready(c.deliver(again[1].id, 3.0))) is None
    assert workers(ready(c.deliver(again[0].id, 4.0))) == ([2, 1], [0])


def test_who_lags_too_far_is_stopped_and_starts_from_the_present_version() -> None:
    """Lag 1: at version 2 work from version 0 can only be dropped."""
    c = of(1, max_staleness=1, stop_stale=True)
    slow, now = admit(c, 4, 0.0), 0.0
    for version in range(2):
        now += 1.0
        ready(c.deliver(admit(c, version % 2, now).id, now))
        stopped = [e.lease for e in c.commit(now) if isinstance(e, Cancelled)]
        assert stopped == ([slow] if version == 1 else [])
    assert admit(c, 4, now).base_version == 2
    assert c.ledger.cancelled == {"stale": 1}


def test_a_snapshot_remembers_who_was_drafted_and_who_waits() -> None:
    c = of(2)
    leases = [admit(c, worker, 0.0) for worker in range(5)]
    c.deliver(leases[0].id, 1.0)
    c.deliver(leases[1].id, 1.0)
    c.commit(1.0)
    c.deliver(admit(c, 0, 1.0).id, 2.0)
    restored = Coordinator.restore(c.strategy, json.loads(json.dumps(c.snapshot())))
    for each in (c, restored):
        assert not each.may_start(0)
        assert workers(ready(each.deliver(leases[2].id, 3.0))) is None
        assert workers(ready(each.deliver(leases[3].id, 3.0))) == ([2, 3], [0])


def test_a_round_that_lasts_too_long_takes_those_that_wait_behind() -> None:
    """Quota 2 of three at work: who was drafted last need not wait for the third, which takes for ever."""
    c = Coordinator(strategy(Concurrency(3, redispatch="next_version"), Quota(2, limit_s=5.0)))
    leases = {worker: admit(c, worker, 0.0) for worker in range(3)}
    assert c.next_timer() == 5.0
    c.deliver(leases[0].id, 1.0)
    assert workers(ready(c.deliver(leases[1].id, 2.0))) == ([0, 1], [])
    c.commit(2.0)
    leases |= {worker: admit(c, worker, 2.0) for worker in (0, 1)}
    assert c.next_timer() == 7.0
    for worker in (0, 1):
        assert ready(c.deliver(leases[worker].id, 3.0)) is None
    restored = Coordinator.restore(c.strategy, json.loads(json.dumps(c.snapshot())))
    for each in (c, restored):
        assert workers(ready(each.on_timer(7.0))) == ([0, 1], [])


def test_a_limit_that_passes_while_nobody_has_delivered_ends_the_round_with_the_first() -> None:
    c = Coordinator(strategy(Concurrency(3, redispatch="next_version"), Quota(2, limit_s=5.0)))
    leases = [admit(c, worker, 0.0) for worker in range(3)]
    assert c.on_timer(5.0) == []
    assert workers(ready(c.deliver(leases[2].id, 6.0))) == ([2], [])
