"""FedAT's tiers: rounds inside, no waiting across; a round that lost all starts anew."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedasync.core import Cancelled, Coordinator, EventLog, Grouped, Rejected, Tiers

from .driving import admit, ready, strategy, told

FAST, SLOW = (0, 2, 4), (1, 3, 5)
PROFILE = (1.0, 9.0, 2.0, 8.0, 3.0, 7.0)


def two_tiers(**bounds: object) -> Coordinator:
    return Coordinator(strategy(Tiers(2, 2), Grouped(), **bounds), profile=PROFILE)


@given(st.lists(st.floats(0, 100), min_size=1, max_size=40), st.data())
def test_tiers_sort_clients_by_speed_into_equal_parts(profile: list[float], data: st.DataObject) -> None:
    tiers = data.draw(st.integers(1, len(profile)))
    of = Tiers(tiers, 1).groups(profile).tier_of
    sizes = [of.count(tier) for tier in range(tiers)]
    assert max(sizes) - min(sizes) <= 1
    for tier in range(tiers - 1):
        slowest = max(t for t, at in zip(profile, of, strict=True) if at == tier)
        assert slowest <= min(t for t, at in zip(profile, of, strict=True) if at == tier + 1)


def test_a_tiers_round_waits_for_its_last_and_for_no_other_tier() -> None:
    c = two_tiers()
    fast, slow = [admit(c, worker, 0.0) for worker in FAST[:2]], [admit(c, worker, 0.0) for worker in SLOW[:2]]
    assert [lease.group for lease in fast + slow] == [0, 0, 1, 1]
    assert c.request(FAST[2], 0.0) is None
    assert c.slots == 0
    assert ready(c.deliver(fast[0].id, 1.0)) is None
    assert c.request(FAST[2], 1.0) is None, "the round has started all of its cohort"
    step = ready(c.deliver(fast[1].id, 2.0))
    assert step is not None
    assert [a.lease.worker for a in step.entering] == [0, 2]
    assert c.slots == 0, "nobody starts from the version that is about to go"
    c.commit(2.0)
    assert c.may_start(FAST[2])
    assert not c.may_start(SLOW[2])
    again = [admit(c, worker, 2.0) for worker in (4, 0)]
    assert [lease.base_version for lease in again] == [1, 1]
    c.deliver(slow[0].id, 9.0)
    step = ready(c.deliver(slow[1].id, 9.0))
    assert step is not None
    assert [step.staleness(a) for a in step.entering] == [1, 1]


def test_two_tiers_that_end_while_a_step_is_under_way_step_one_after_the_other() -> None:
    c = two_tiers()
    leases = [admit(c, worker, 0.0) for worker in (0, 2, 1, 3)]
    for lease in leases[:2]:
        c.deliver(lease.id, 1.0)
    for lease in leases[2:]:
        c.deliver(lease.id, 1.5)
    step = ready(c.commit(2.0))
    assert step is not None
    assert [a.lease.worker for a in step.entering] == [1, 3]
    assert ready(c.commit(2.0)) is None


def test_a_round_takes_what_came_and_one_that_lost_all_starts_anew() -> None:
    c = two_tiers()
    first, second = admit(c, 0, 0.0), admit(c, 2, 0.0)
    c.deliver(first.id, 1.0)
    step = ready(c.fail(second.id, "lost", 2.0))
    assert step is not None
    assert len(step.entering) == 1
    c.commit(2.0)
    for worker in (0, 2):
        assert ready(c.fail(admit(c, worker, 3.0).id, "lost", 3.0)) is None
    assert c.may_start(0)
    assert c.slots == 4


def test_a_tier_smaller_than_the_cohort_has_rounds_of_all_its_clients() -> None:
    c = Coordinator(strategy(Tiers(2, 5), Grouped()), profile=PROFILE)
    for worker in range(6):
        admit(c, worker, 0.0)
    assert c.slots == 0


def test_what_grew_too_stale_while_it_waited_makes_no_empty_step() -> None:
    """Tier 0 steps three times; what tier 1's first client brought is dropped, and its round goes on without it."""
    log = EventLog()
    c = Coordinator(strategy(Tiers(2, 2), Grouped(), max_staleness=1), log, PROFILE)
    early, late = admit(c, 1, 0.0), admit(c, 3, 0.0)
    c.deliver(early.id, 1.0)
    dropped = []
    for _ in range(3):
        for lease in [admit(c, worker, 1.0) for worker in (0, 2)]:
            events = c.deliver(lease.id, 1.0)
        assert ready(events)
        dropped += [e for e in c.commit(1.0) if isinstance(e, Rejected)]
    assert dropped == [Rejected(early.id, "stale")]
    events = c.deliver(late.id, 2.0)
    assert events == [Rejected(late.id, "stale")]
    assert c.step is None
    assert c.may_start(1), "nothing is left of the round: it starts anew"
    assert c.ledger.imbalance == 0
    assert [row["reason"] for row in told(log) if row["kind"] == "rejected"] == ["stale", "stale"]


def test_work_that_can_only_be_dropped_is_stopped_and_its_round_starts_anew() -> None:
    c = two_tiers(max_staleness=0, stop_stale=True)
    slow = [admit(c, worker, 0.0) for worker in SLOW[:2]]
    for lease in [admit(c, worker, 0.0) for worker in FAST[:2]]:
        c.deliver(lease.id, 1.0)
    events = c.commit(1.0)
    assert [e.lease for e in events if isinstance(e, Cancelled)] == slow
    assert all(c.may_start(worker) for worker in SLOW)


def test_tiers_need_a_profile_and_as_many_clients() -> None:
    with pytest.raises(ValueError, match="tiers need a profile"):
        Coordinator(strategy(Tiers(2, 2), Grouped()))
    with pytest.raises(ValueError, match="3 tiers for 2 clients; tiers ≤ 2 would do"):
        Coordinator(strategy(Tiers(3, 2), Grouped()), profile=(1.0, 2.0))
    assert "3 tiers for 2 clients" in str(strategy(Tiers(3, 2), Grouped()).refusal(2))


def test_a_snapshot_does_not_change_with_what_the_coordinator_does_next() -> None:
    c = two_tiers()
    first = admit(c, 0, 0.0)
    state = c.snapshot()
    before = json.dumps(state)
    restored = Coordinator.restore(c.strategy, state, profile=PROFILE)
    admit(c, 2, 0.0)
    c.deliver(first.id, 1.0)
    assert json.dumps(state) == before
    assert restored.may_start(2)
    assert not restored.deliver(first.id, 1.0)[1:]
    assert json.dumps(state) == before
