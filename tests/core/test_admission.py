"""Admission: the gate's table, and where eta = 0 is a synchronous system."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedasync.core import Cohort, Concurrency, Coordinator, Sliding, StalenessBudget, Tumbling

from .driving import admit, ready, strategy


def affairs(version: int, accepted: int, running: int) -> SimpleNamespace:
    ledger = SimpleNamespace(accepted=accepted, in_flight=running)
    return SimpleNamespace(version=version, ledger=ledger, round_started=running, step=None)


@pytest.mark.parametrize(
    ("limit", "batch", "eta", "version", "accepted", "running", "capacity"),
    [
        (10, 4, 2, 0, 0, 0, 10),
        (100, 4, 2, 0, 0, 0, 12),
        (100, 4, 2, 0, 5, 0, 7),
        (10, 4, 2, 0, 0, 3, 7),
        (1000, 4, 2, 5, 0, 0, 32),
        (20, 8, 3, 0, 15, 0, 17),
        (100, 8, 3, 0, 30, 0, 2),
        (32, 16, 2, 1, 14, 0, 32),
        (3, 2, 1, 0, 0, 10, -7),
        (100, 8, 0, 5, 40, 8, 0),
        (100, 8, 0, 5, 40, 7, 1),
        (1_000_000, 512, 4, 0, 0, 0, 2560),
        (1_000_000, 512, 4, 10, 5120, 2000, 560),
        *((1000, 16, 2, v, 16 * v, r, 48 - r) for v in (0, 3, 11) for r in (0, 5, 48)),
    ],
)
def test_the_staleness_budget_gives_areals_number_of_slots(
    limit: int, batch: int, eta: int, version: int, accepted: int, running: int, capacity: int
) -> None:
    budget = StalenessBudget(eta, batch, limit)
    now = affairs(version, accepted, running)
    assert budget.slots(now) == capacity
    assert (budget.slots(now) > 0) is (capacity > 0)


@given(
    batch=st.integers(1, 50),
    eta=st.integers(0, 9),
    version=st.integers(0, 100),
    accepted=st.integers(0, 5000),
    running=st.integers(0, 500),
)
def test_the_budget_is_the_rule_of_the_paper(batch: int, eta: int, version: int, accepted: int, running: int) -> None:
    """⌊(N − 1)/B⌋ ≤ v + η, where N counts the candidate too."""
    candidate = accepted + running + 1
    allowed = (candidate - 1) // batch <= version + eta
    assert (StalenessBudget(eta, batch).slots(affairs(version, accepted, running)) > 0) is allowed


def test_the_fourth_of_a_synchronous_batch_of_4_is_admitted_and_the_fifth_is_not() -> None:
    budget = StalenessBudget(0, 4)
    assert [budget.slots(affairs(0, 0, running)) > 0 for running in range(6)] == [True] * 4 + [False] * 2


def test_what_was_rejected_gives_its_budget_back() -> None:
    """Ten submitted and all rejected: the capacity is ten again."""
    budget = StalenessBudget(2, 4, limit=10)
    coordinator = Coordinator(strategy(budget, Tumbling(4)))
    leases = [admit(coordinator, worker, 0.0) for worker in range(10)]
    assert budget.slots(coordinator) == 0
    for lease in leases:
        coordinator.deliver(lease.id, 1.0, "not finite")
    assert budget.slots(coordinator) == 10


def test_what_grew_too_stale_in_the_buffer_gives_its_budget_back() -> None:
    budget = StalenessBudget(3, 2)
    coordinator = Coordinator(strategy(budget, Tumbling(2), max_staleness=0))
    leases = [admit(coordinator, worker, 0.0) for worker in range(8)]
    for lease in leases[:3]:
        coordinator.deliver(lease.id, 1.0)
    coordinator.commit(1.0)  # two consumed; the third, of version 0, may not enter version 1 → 2
    assert coordinator.ledger.rejected == {"stale": 1}
    assert budget.slots(coordinator) == (3 + 1 + 1) * 2 - (2 + 5)
    assert coordinator.ledger.imbalance == 0


def test_a_straggler_that_was_overtaken_is_consumed_later_than_eta() -> None:
    """B = 2, η = 1: the gate bounds what starts, not the age at which a straggler is used; max_staleness does."""
    for bound, fate in ((None, "consumed"), (1, "rejected")):
        coordinator = Coordinator(strategy(StalenessBudget(1, 2), Tumbling(2), max_staleness=bound))
        slow, *others = [admit(coordinator, worker, 0.0) for worker in range(4)]
        while coordinator.version < 4 and len(others) >= 2:
            for lease in (others.pop(0), others.pop(0)):
                events = coordinator.deliver(lease.id, 1.0)
            assert ready(events)
            coordinator.commit(1.0)
            while coordinator.admits:
                others.append(admit(coordinator, 9, 1.0))
        coordinator.deliver(slow.id, 2.0)
        if fate == "rejected":
            assert coordinator.ledger.rejected["stale"] == 1
            continue
        while coordinator.step is None:
            coordinator.deliver(others.pop(0).id, 2.0)
        step = coordinator.step
        assert step is not None
        assert max(step.staleness(arrival) for arrival in step.entering) > 1


@given(
    eta=st.integers(0, 3),
    batch=st.integers(1, 5),
    outcomes=st.lists(st.sampled_from(["deliver", "fail", "reject"]), min_size=50, max_size=50),
)
def test_a_budget_never_deadlocks_whatever_fails(eta: int, batch: int, outcomes: list[str]) -> None:
    """At every moment somebody works, the server steps, or a slot is free."""
    coordinator = Coordinator(strategy(StalenessBudget(eta, batch), Tumbling(batch)))
    for turn, outcome in enumerate(outcomes):
        while coordinator.admits and coordinator.in_flight < 20:
            admit(coordinator, 0, float(turn))
        assert coordinator.in_flight, coordinator.explain()
        lease = coordinator.leases[turn % coordinator.in_flight]
        if outcome == "fail":
            events = coordinator.fail(lease.id, "lost", float(turn))
        else:
            events = coordinator.deliver(lease.id, float(turn), None if outcome == "deliver" else "not finite")
        while ready(events):
            events = coordinator.commit(float(turn))
    assert coordinator.ledger.imbalance == 0


def test_eta_0_asks_for_exactly_one_batch_a_version() -> None:
    coordinator = Coordinator(strategy(StalenessBudget(0, 3), Tumbling(3)))
    for version in range(5):
        leases = [admit(coordinator, worker, float(version)) for worker in range(3)]
        assert coordinator.request(3, float(version)) is None
        assert {lease.base_version for lease in leases} == {version}
        for lease in leases:
            assert coordinator.request(3, float(version)) is None
            events = coordinator.deliver(lease.id, float(version))
        step = ready(events)
        assert step is not None
        assert [step.staleness(arrival) for arrival in step.entering] == [0, 0, 0]
        assert coordinator.request(3, float(version)) is None, "not while the step is under way"
        coordinator.commit(float(version))


@pytest.mark.parametrize(
    ("admission", "most"),
    [
        (Cohort(5), 5),
        (Cohort(5, keep=3), 5),
        (Concurrency(7), 7),
        (StalenessBudget(2, 4), 12),
        (StalenessBudget(2, 4, limit=5), 5),
        (StalenessBudget(0, 4, limit=50), 4),
    ],
)
def test_each_rule_says_how_much_may_be_in_flight(admission: Cohort | Concurrency | StalenessBudget, most: int) -> None:
    assert admission.most_in_flight == most


@pytest.mark.parametrize("buffer", [Tumbling(1), Tumbling(2), Tumbling(3), Sliding(2)], ids=str)
def test_no_budget_lets_more_be_in_flight_than_it_says(buffer: Tumbling | Sliding) -> None:
    """A step of fewer than B contributions frees B more leases each time; such a pair may also be refused."""
    try:
        made = strategy(StalenessBudget(0, 3), buffer)
    except ValueError:
        return
    coordinator = Coordinator(made)
    for turn in range(30):
        while coordinator.admits:
            admit(coordinator, 0, float(turn))
        assert coordinator.in_flight <= made.admission.most_in_flight
        if ready(coordinator.deliver(coordinator.leases[0].id, float(turn))):
            coordinator.commit(float(turn))


def test_a_cohort_keeps_all_of_its_results_unless_told_otherwise() -> None:
    assert (Cohort(5).target, Cohort(5, keep=3).target) == (5, 3)
