"""Which of the waiting contributions a step takes, what it waits for, and that it never waits for ever."""

from __future__ import annotations

import json
import re
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedasync.core import (
    Barrier,
    Cohort,
    Concurrency,
    Coordinator,
    EventLog,
    EveryN,
    EveryVersion,
    Exponential,
    StalenessBudget,
    SyncBudget,
    Tumbling,
)
from fedasync.core.buffering import Order

from .driving import admit, ready, strategy, told


def taken(order: Order) -> list[list[int]]:
    """Leases of three steps of two, of which six wait when the first of them has been committed."""
    coordinator = Coordinator(strategy(StalenessBudget(9, 2), Tumbling(2, order)))
    for worker in range(4):
        admit(coordinator, worker, 0.0)
    steps = []
    for lease_id in (3, 2):
        steps.append(ready(coordinator.deliver(lease_id, 1.0)))
    if coordinator.step is None:  # in the order of dispatch: nothing yet
        for lease_id in (0, 1):
            steps.append(ready(coordinator.deliver(lease_id, 1.0)))
    later = [admit(coordinator, worker, 2.0).id for worker in range(2)]
    found = []
    for lease_id in (*later[::-1], 1, 0):
        if coordinator.is_in_flight(lease_id):
            coordinator.deliver(lease_id, 3.0)
    while coordinator.step is not None:
        found.append([arrival.lease.id for arrival in coordinator.step.entering])
        coordinator.commit(4.0)
    return found


@pytest.mark.parametrize(
    ("order", "steps"),
    [
        ("arrival", [[3, 2], [5, 4], [1, 0]]),
        ("oldest_first", [[2, 3], [0, 1], [4, 5]]),
        ("freshest_first", [[3, 2], [5, 4], [1, 0]]),
        ("dispatch", [[0, 1], [2, 3], [4, 5]]),
    ],
)
def test_each_order_takes_its_own(order: Order, steps: list[list[int]]) -> None:
    assert taken(order) == steps


@pytest.mark.parametrize(
    ("order", "used", "left"),
    [
        ("freshest_first", [[1, 0], [5, 4], [7, 6], [9, 8], [11, 10]], [2, 3, 12, 13]),
        ("oldest_first", [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9]], [10, 11, 12, 13]),
    ],
)
def test_the_freshest_first_leave_the_oldest_behind(order: Order, used: list[list[int]], left: list[int]) -> None:
    """Four wait whenever a step is chosen but the first: two of version 0 do so for ever, if newer ones keep coming."""
    coordinator = Coordinator(strategy(StalenessBudget(2, 2), Tumbling(2, order)))
    steps = []
    for turn in range(5):
        while (lease := coordinator.request(0, float(turn))) is not None:
            coordinator.deliver(lease.id, float(turn))
        step = coordinator.step
        assert step is not None
        steps.append([arrival.lease.id for arrival in step.entering])
        if turn < 4:
            coordinator.commit(float(turn))
    assert steps == used
    assert [fields[0][0] for fields in coordinator.snapshot()["waiting"]["arrivals"]] == left


@given(st.integers(0, 10_000), st.integers(1, 4), st.integers(0, 3))
def test_in_order_takes_exactly_what_was_dispatched_first_and_leaves_no_hole(seed: int, batch: int, eta: int) -> None:
    """Whatever the order of arrival, and whichever fail: the steps are the surviving leases in their order."""
    coordinator = Coordinator(strategy(StalenessBudget(eta, batch), Tumbling(batch, "dispatch")))
    chance = Random(seed)
    used: list[int] = []
    failed: set[int] = set()
    for turn in range(60):
        while coordinator.admits:
            admit(coordinator, turn, float(turn))
        if coordinator.step is not None and (not coordinator.in_flight or chance.random() < 0.3):
            used += [arrival.lease.id for arrival in coordinator.step.entering]
            coordinator.commit(float(turn))
            continue
        lease = chance.choice(coordinator.leases)
        if chance.random() < 0.2:
            failed.add(lease.id)
            coordinator.fail(lease.id, "lost", float(turn))
        else:
            coordinator.deliver(lease.id, float(turn))
    survivors = [i for i in range(coordinator.ledger.admitted) if i not in failed]
    assert used == survivors[: len(used)]
    assert len(used) == batch * coordinator.version


def test_a_step_in_order_says_for_whom_it_waits() -> None:
    coordinator = Coordinator(strategy(StalenessBudget(1, 2), Tumbling(2, "dispatch")))
    first, *others = [admit(coordinator, worker, 0.0) for worker in (7, 1, 2, 3)]
    for lease in others:
        assert ready(coordinator.deliver(lease.id, 1.0)) is None
    assert "the next step waits for lease 0 of worker 7" in coordinator.explain()
    step = ready(coordinator.fail(first.id, "lost", 2.0))
    assert step is not None
    assert [arrival.lease.id for arrival in step.entering] == [1, 2]


# -- waiting at the bound --------------------------------------------------------------------------------------------

WAITING = [
    *(
        (StalenessBudget(eta, batch, limit=limit, in_batches=in_batches), EveryN(n) if n > 1 else EveryVersion(), lag)
        for eta in (0, 1, 2, 4)
        for batch in (1, 2, 3)
        for limit in (None, 2)
        for in_batches in (False, True)
        for n, lag in ((1, 0), (3, 2))
        if lag <= eta
    ),
    *((SyncBudget(extra, 2, every), EveryN(every), None) for extra in (0.0, 0.5, 1.0, 2.5) for every in (1, 2, 3)),
    (StalenessBudget(2, 2, limit_samples=6, samples=2), EveryVersion(), 0),
]


@pytest.mark.parametrize("order", ["oldest_first", "dispatch"])
@settings(max_examples=150, deadline=None)
@given(
    case=st.sampled_from(WAITING),
    room=st.integers(0, 2),
    seed=st.integers(0, 10_000),
    slow=st.sampled_from([0, 0.7, 1]),
)
def test_with_waiting_the_bound_holds_nothing_is_dropped_and_the_run_goes_on(
    order: Order, case: Any, room: int, seed: int, slow: float
) -> None:
    """Whoever is slow, whatever fails: somebody works, the trainer steps, or a lease may start; and versions come."""
    admission, publication, lag = case
    least = admission.eta + lag if lag is not None else -(-admission.between // admission.batch) - 1
    bounds: dict[str, Any] = {"max_staleness": least + room, "at_bound": "wait"}
    made = strategy(admission, Tumbling(admission.batch, order), publication, **bounds)
    log = EventLog()
    coordinator = Coordinator(made, log)
    chance, turn = Random(seed), 0
    while coordinator.version < 8:
        turn += 1
        assert turn < 2000, coordinator.explain()
        while coordinator.admits:
            admit(coordinator, turn, float(turn))
        flying = coordinator.leases
        assert flying or coordinator.step is not None, coordinator.explain()
        if coordinator.step is not None and (not flying or chance.random() < 0.3):
            coordinator.commit(float(turn))
            continue
        lease = flying[-1] if chance.random() < slow else chance.choice(flying)  # the last to start: others straggle
        if chance.random() < 0.1:
            coordinator.fail(lease.id, "lost", float(turn))
        else:
            coordinator.deliver(lease.id, float(turn))
        if turn % 17 == 0:
            coordinator = Coordinator.restore(made, json.loads(json.dumps(coordinator.snapshot())), log)
    assert not coordinator.ledger.rejected
    ages = [row["staleness"] for row in told(log) if row["kind"] == "consumed"]
    assert max(ages) <= least + room
    assert coordinator.ledger.imbalance == 0


def test_the_trainer_waits_for_the_straggler_that_would_grow_too_old() -> None:
    """B = 2, η = 1, bound 1: the straggler of version 0 is in the step from version 1, whatever else is there."""
    strategies = strategy(StalenessBudget(1, 2), Tumbling(2, "oldest_first"), max_staleness=1, at_bound="wait")
    coordinator = Coordinator(strategies)
    slow, *others = [admit(coordinator, worker, 0.0) for worker in range(4)]
    for lease in others:
        coordinator.deliver(lease.id, 1.0)
    assert coordinator.step is not None, "it may be left to the next step"
    coordinator.commit(1.0)
    for worker in (4, 5):
        assert ready(coordinator.deliver(admit(coordinator, worker, 2.0).id, 2.0)) is None
    assert coordinator.waiting == 3
    assert (
        "3 contributions wait, and the next step waits for some of 1 in flight from version 0" in coordinator.explain()
    )
    assert "max_staleness = 1" in coordinator.explain()
    step = ready(coordinator.deliver(slow.id, 9.0))
    assert step is not None
    assert [arrival.lease.id for arrival in step.entering] == [0, 3]
    assert max(map(step.staleness, step.entering)) == 1


def test_the_trainer_waits_early_where_one_step_could_not_take_all_that_are_due() -> None:
    """B = 1, η = bound = 2: two stragglers of version 0 fit into steps from 1 and 2, so one of them is in that from 1.

    A trainer that looks only one step ahead would begin without either, and then have two for its last step.
    """
    made = strategy(StalenessBudget(2, 1), Tumbling(1, "oldest_first"), max_staleness=2, at_bound="wait")
    coordinator = Coordinator(made)
    leases = [admit(coordinator, worker, 0.0) for worker in range(3)]
    assert ready(coordinator.deliver(leases[2].id, 1.0)) is not None
    coordinator.commit(1.0)
    fresh = admit(coordinator, 3, 2.0)
    assert ready(coordinator.deliver(fresh.id, 2.0)) is None
    assert ready(coordinator.deliver(leases[1].id, 3.0)) is not None
    coordinator.commit(3.0)
    assert coordinator.step is None
    assert ready(coordinator.deliver(leases[0].id, 4.0)) is not None


def test_a_straggler_that_fails_is_waited_for_no_more() -> None:
    made = strategy(
        StalenessBudget(1, 1), Tumbling(1, "oldest_first"), max_staleness=1, at_bound="wait", lease_timeout_s=50.0
    )
    coordinator = Coordinator(made)
    admit(coordinator, 0, 0.0)
    coordinator.deliver(admit(coordinator, 1, 0.0).id, 1.0)
    coordinator.commit(1.0)
    coordinator.deliver(admit(coordinator, 2, 2.0).id, 3.0)
    assert coordinator.step is None
    assert coordinator.next_timer() == 50.0
    assert ready(coordinator.on_timer(50.0)) is not None


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (
            lambda: strategy(StalenessBudget(1, 2), Tumbling(2, "oldest_first"), at_bound="wait"),
            "needs a max_staleness to wait at",
        ),
        (
            lambda: strategy(
                StalenessBudget(1, 2), Tumbling(2, "oldest_first"), max_staleness=2, stop_stale=True, at_bound="wait"
            ),
            "no stop_stale",
        ),
        *(
            (
                lambda order=order: strategy(  # type: ignore[misc]
                    StalenessBudget(1, 2), Tumbling(2, order), max_staleness=2, at_bound="wait"
                ),
                "order = 'oldest_first' or 'dispatch' would do",
            )
            for order in ("arrival", "freshest_first")
        ),
        (lambda: strategy(Cohort(2), Barrier(), max_staleness=2, at_bound="wait"), "the oldest must be used first"),
        (
            lambda: strategy(Concurrency(2), Tumbling(2, "oldest_first"), max_staleness=2, at_bound="wait"),
            "a staleness budget with an eta",
        ),
        (
            lambda: strategy(
                StalenessBudget(None, 2, limit=4), Tumbling(2, "dispatch"), max_staleness=2, at_bound="wait"
            ),
            "a staleness budget with an eta",
        ),
        (
            lambda: strategy(StalenessBudget(3, 2), Tumbling(2, "dispatch"), max_staleness=2, at_bound="wait"),
            "max_staleness ≥ 3 would do",
        ),
        (
            lambda: strategy(
                StalenessBudget(3, 2), Tumbling(2, "dispatch"), EveryN(3), max_staleness=4, at_bound="wait"
            ),
            "max_staleness ≥ 5 would do",
        ),
        (
            lambda: strategy(
                SyncBudget(0.5, 2, 2), Tumbling(2, "dispatch"), EveryN(2), max_staleness=1, at_bound="wait"
            ),
            "max_staleness ≥ 2 would do",
        ),
        (
            lambda: strategy(Concurrency(2), Tumbling(2), at_bound="pause"),
            "at_bound must be 'drop' or 'wait'",
        ),
    ],
)
def test_waiting_that_could_last_for_ever_is_refused_in_one_line(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)) as refused:
        make()
    assert "\n" not in str(refused.value)


def test_a_publication_that_may_never_come_bounds_nothing_to_wait_at() -> None:
    with pytest.raises(ValueError, match="would do"):
        strategy(StalenessBudget(3, 2), Tumbling(2, "dispatch"), Exponential(), max_staleness=9, at_bound="wait")
