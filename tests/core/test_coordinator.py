"""Scenes played by hand: who starts when, what a step takes, and what is said of it."""

from __future__ import annotations

import json
from statistics import pstdev

import pytest

from fedasync.core import (
    Accepted,
    Barrier,
    Cancelled,
    Cohort,
    Concurrency,
    Coordinator,
    EventLog,
    EveryN,
    EveryVersion,
    Failed,
    Published,
    Rejected,
    Sliding,
    StalenessBudget,
    StepReady,
    Strategy,
    Tumbling,
)

from .driving import admit, ready, strategy, told

EACH = strategy(Concurrency(10), Tumbling(1))


def play(starts_s: list[float], durations_s: list[float]) -> tuple[EventLog, list[int], list[int]]:
    """One step an arrival; the log, staleness in the order of arrival, and the number in flight before each end."""
    log = EventLog()
    coordinator = Coordinator(EACH, log)
    begins = [(t, 1, worker) for worker, t in enumerate(starts_s)]
    ends = [(t + d, 0, worker) for worker, (t, d) in enumerate(zip(starts_s, durations_s, strict=True))]
    leases, staleness, flying = {}, [], []
    for time_s, begin, worker in sorted(begins + ends):
        if begin:
            leases[worker] = admit(coordinator, worker, time_s)
            continue
        flying.append(coordinator.in_flight)
        step = ready(coordinator.deliver(leases[worker].id, time_s))
        assert step is not None
        staleness += [step.staleness(arrival) for arrival in step.entering]
        coordinator.commit(time_s)
    return log, staleness, flying


def test_starts_at_1_3_5_with_durations_3_5_1_come_back_with_staleness_0_0_2() -> None:
    log, staleness, flying = play([1.0, 3.0, 5.0], [3.0, 5.0, 1.0])
    story = [(r["time_s"], r["kind"], r["worker"]) for r in told(log) if r["kind"] in ("admitted", "delivered")]
    assert story == [
        (1.0, "admitted", 0),
        (3.0, "admitted", 1),
        (4.0, "delivered", 0),
        (5.0, "admitted", 2),
        (6.0, "delivered", 2),
        (8.0, "delivered", 1),
    ]
    assert staleness == [0, 0, 2]
    assert sum(staleness) / 3 == pytest.approx(2 / 3)
    assert pstdev(staleness) == pytest.approx(0.942809, abs=5e-7)
    assert flying == [2, 2, 1]


def test_a_constant_gap_of_1_and_a_duration_of_4_make_four_clients_0_to_3_versions_late() -> None:
    _, staleness, flying = play([0.0, 1.0, 2.0, 3.0], [4.0] * 4)
    assert staleness == [0, 1, 2, 3]
    assert pstdev(staleness) == pytest.approx(1.118, abs=5e-4)
    assert flying == [4, 3, 2, 1]


def test_a_buffer_takes_exactly_k_and_the_rest_waits_for_the_next_step() -> None:
    """Eight ready replies and K = 7: seven are used, one waits (flower #7503)."""
    coordinator = Coordinator(strategy(Concurrency(8), Tumbling(7)))
    leases = [admit(coordinator, worker, 0.0) for worker in range(8)]
    steps = [ready(coordinator.deliver(lease.id, 1.0)) for lease in leases]
    assert [step is not None for step in steps] == [False] * 6 + [True, False]
    assert [a.lease.worker for a in steps[6].entering] == list(range(7))  # type: ignore[union-attr]
    coordinator.commit(2.0)
    assert (coordinator.ledger.consumed, coordinator.ledger.buffered) == (7, 1)


def test_what_waited_for_a_long_step_makes_the_next_one_at_once() -> None:
    coordinator = Coordinator(strategy(Concurrency(6), Tumbling(2)))
    leases = [admit(coordinator, worker, 0.0) for worker in range(6)]
    for lease in leases:
        coordinator.deliver(lease.id, 1.0)
    chain = []
    while coordinator.step is not None:
        chain.append([a.lease.id for a in coordinator.step.entering])  # type: ignore[union-attr]
        coordinator.commit(2.0)
    assert chain == [[0, 1], [2, 3], [4, 5]]


def test_oldest_first_prefers_the_oldest_base_version_to_the_first_arrival() -> None:
    coordinator = Coordinator(strategy(Concurrency(4), Tumbling(2, order="oldest_first")))
    old = [admit(coordinator, worker, 0.0) for worker in range(4)]
    coordinator.deliver(old[0].id, 1.0)
    coordinator.deliver(old[1].id, 1.0)
    coordinator.commit(2.0)
    new = admit(coordinator, 8, 2.0)
    assert new.base_version == 1
    coordinator.deliver(new.id, 3.0)
    step = ready(coordinator.deliver(old[3].id, 4.0))
    assert step is not None
    assert [a.lease.id for a in step.entering] == [old[3].id, new.id]


def test_a_window_slides_by_one_and_names_what_leaves_it() -> None:
    coordinator = Coordinator(strategy(Concurrency(1), Sliding(3)))
    seen = []
    for turn in range(6):
        lease = admit(coordinator, 0, float(turn))
        step = ready(coordinator.deliver(lease.id, float(turn)))
        if step is not None:
            seen.append(([a.lease.id for a in step.entering], step.window, step.leaving))
            coordinator.commit(float(turn))
    assert seen == [
        ([0, 1, 2], (0, 1, 2), ()),
        ([3], (1, 2, 3), (0,)),
        ([4], (2, 3, 4), (1,)),
        ([5], (3, 4, 5), (2,)),
    ]


def test_a_round_ends_with_the_first_that_it_keeps_and_cancels_the_others() -> None:
    coordinator = Coordinator(strategy(Cohort(4, keep=2), Barrier()))
    leases = [admit(coordinator, worker, 0.0) for worker in range(4)]
    assert coordinator.request(9, 0.0) is None
    assert coordinator.deliver(leases[2].id, 1.0) == [Accepted()]
    events = coordinator.deliver(leases[0].id, 2.0)
    assert events[:3] == [
        Accepted(),
        Cancelled(leases[1], "over-selected"),
        Cancelled(leases[3], "over-selected"),
    ]
    assert isinstance(events[3], StepReady)
    assert coordinator.deliver(leases[1].id, 3.0) == [Rejected(1, "the lease had ended", ignored=True)]
    assert coordinator.ledger.ignored == 1


def test_a_round_may_end_before_all_of_it_has_started_and_the_next_is_as_large() -> None:
    coordinator = Coordinator(strategy(Cohort(4, keep=1), Barrier()))
    coordinator.deliver(admit(coordinator, 0, 0.0).id, 1.0)
    coordinator.commit(1.0)
    assert [admit(coordinator, worker, 1.0).base_version for worker in range(4)] == [1] * 4
    assert coordinator.request(4, 1.0) is None


def test_a_round_in_which_some_fail_takes_what_it_has() -> None:
    coordinator = Coordinator(strategy(Cohort(3), Barrier()))
    leases = [admit(coordinator, worker, 0.0) for worker in range(3)]
    coordinator.fail(leases[0].id, "crash", 1.0)
    coordinator.deliver(leases[1].id, 1.0, "not finite")
    assert coordinator.request(5, 1.0) is None, "a failed client is not replaced"
    step = ready(coordinator.deliver(leases[2].id, 2.0))
    assert step is not None
    assert [a.lease.worker for a in step.entering] == [2]


def test_a_round_in_which_all_fail_starts_anew() -> None:
    coordinator = Coordinator(strategy(Cohort(2), Barrier()))
    leases = [admit(coordinator, worker, 0.0) for worker in range(2)]
    for lease in leases:
        assert ready(coordinator.fail(lease.id, "crash", 1.0)) is None
    assert coordinator.version == 0
    again = [admit(coordinator, worker, 1.0) for worker in range(2)]
    coordinator.deliver(again[0].id, 2.0)
    assert ready(coordinator.deliver(again[1].id, 2.0)) is not None


def test_timers_give_up_what_is_over_and_leave_what_arrives_at_that_instant() -> None:
    coordinator = Coordinator(strategy(Concurrency(3), Tumbling(2), lease_timeout_s=5.0))
    first, second = admit(coordinator, 0, 0.0), admit(coordinator, 1, 0.0)
    third = admit(coordinator, 2, 2.0)
    assert coordinator.next_timer() == 5.0
    assert coordinator.on_timer(4.0) == []
    assert coordinator.deliver(first.id, 5.0) == [Accepted()]
    assert coordinator.on_timer(5.0) == [Failed(second, "timeout")]
    assert coordinator.next_timer() == 7.0
    assert ready(coordinator.deliver(third.id, 6.0)) is not None
    assert coordinator.next_timer() is None
    assert coordinator.deliver(second.id, 6.0) == [Rejected(second.id, "the lease had ended", ignored=True)]


def test_stale_contributions_are_dropped_on_arrival_and_while_they_wait() -> None:
    coordinator = Coordinator(strategy(Concurrency(4), Tumbling(2), max_staleness=0))
    leases = [admit(coordinator, worker, 0.0) for worker in range(4)]
    for lease in leases[:3]:
        coordinator.deliver(lease.id, 1.0)
    assert coordinator.commit(2.0) == [Published(1, "continue"), Rejected(leases[2].id, "stale")]
    assert coordinator.deliver(leases[3].id, 3.0) == [Rejected(leases[3].id, "stale")]
    assert coordinator.ledger.rejected == {"stale": 2}


def test_every_second_version_is_published_and_leases_start_from_the_published_one() -> None:
    coordinator = Coordinator(strategy(Concurrency(1), Tumbling(1), EveryN(2)))
    bases = []
    for turn in range(6):
        lease = admit(coordinator, 0, float(turn))
        bases.append((coordinator.version, lease.base_version))
        coordinator.deliver(lease.id, float(turn))
        coordinator.commit(float(turn))
    assert bases == [(0, 0), (1, 0), (2, 2), (3, 2), (4, 4), (5, 4)]


def test_a_publication_that_aborts_cancels_everything_in_flight() -> None:
    coordinator = Coordinator(strategy(Concurrency(3), Tumbling(1), EveryVersion("abort")))
    leases = [admit(coordinator, worker, 0.0) for worker in range(3)]
    coordinator.deliver(leases[1].id, 1.0)
    assert coordinator.commit(1.0) == [
        Published(1, "abort"),
        Cancelled(leases[0], "aborted by a publication"),
        Cancelled(leases[2], "aborted by a publication"),
    ]
    assert coordinator.in_flight == 0


def test_no_slot_is_given_out_while_a_step_is_under_way_unless_before_step() -> None:
    for redispatch, gets in (("after_step", False), ("before_step", True)):
        coordinator = Coordinator(strategy(Concurrency(2, redispatch=redispatch), Tumbling(1)))  # type: ignore[arg-type]
        lease = admit(coordinator, 0, 0.0)
        coordinator.deliver(lease.id, 1.0)
        assert (coordinator.request(1, 1.0) is not None) is gets


def test_explanations_say_who_waits_for_whom() -> None:
    coordinator = Coordinator(strategy(Cohort(3), Barrier(), lease_timeout_s=9.0))
    assert coordinator.explain() == (
        "version 0; the next step lacks 3 contributions, 0 wait; 0 in flight, nobody works; "
        "a free slot waits for a worker to ask"
    )
    leases = [admit(coordinator, worker, 0.0) for worker in (7, 4, 11)]
    coordinator.deliver(leases[0].id, 1.0)
    assert coordinator.explain() == (
        "version 0; the next step lacks 2 contributions, 1 wait; 2 in flight at workers 4, 11; "
        "no lease is given out: round 1 has started all 3 of its cohort; the next time limit is at 9 s"
    )
    coordinator.deliver(leases[1].id, 1.0)
    coordinator.deliver(leases[2].id, 1.0)
    assert "the server applies 3 contributions and must commit" in coordinator.explain()
    assert "the server step to version 1 is under way" in coordinator.explain()


def test_an_explanation_of_many_workers_stays_one_line() -> None:
    coordinator = Coordinator(strategy(Concurrency(100), Tumbling(1)))
    for worker in range(100):
        admit(coordinator, worker, 0.0)
    assert "100 in flight at workers 0, 1, 2, 3, 4, 5, 6, 7 and 92 more" in coordinator.explain()
    assert "100 of 100 leases are in flight" in coordinator.explain()


def test_a_spent_budget_is_explained_with_its_numbers() -> None:
    coordinator = Coordinator(strategy(StalenessBudget(0, 2), Tumbling(2)))
    admit(coordinator, 0, 0.0)
    admit(coordinator, 1, 0.0)
    assert "the staleness budget is spent: 0 accepted and 2 in flight at version 0 (eta = 0, batch = 2" in (
        coordinator.explain()
    )


def test_an_explanation_of_a_round_with_failures_lacks_only_what_can_still_come() -> None:
    """Three started, one failed: the round waits for two, and never for a third."""
    coordinator = Coordinator(strategy(Cohort(3), Barrier()))
    leases = [admit(coordinator, worker, 0.0) for worker in range(3)]
    coordinator.fail(leases[0].id, "crash", 1.0)
    assert "lacks 2 contributions" in coordinator.explain()


def test_a_snapshot_restores_under_its_own_strategy_only() -> None:
    state = json.loads(json.dumps(Coordinator(EACH).snapshot()))
    assert Coordinator.restore(EACH, state).snapshot() == state
    other = Strategy("another", Concurrency(10), Tumbling(1), None)
    with pytest.raises(ValueError, match=r"the snapshot is of .*'by hand'.*, not of .*'another'") as refused:
        Coordinator.restore(other, state)
    assert "\n" not in str(refused.value)


def test_a_snapshot_does_not_depend_on_where_its_update_lies_in_memory() -> None:
    """The update is opaque to the core: another process restores with an instance of its own."""

    class Mine:
        pass

    ours, theirs = (Strategy("mine", Concurrency(2), Tumbling(1), Mine()) for _ in range(2))
    state = Coordinator(ours).snapshot()
    assert Coordinator.restore(theirs, state).snapshot() == state


def test_a_snapshot_of_the_same_rule_with_other_knobs_is_refused() -> None:
    """A buffer of 2 is another strategy than a buffer of 5, though both are called alike."""
    state = Coordinator(strategy(Concurrency(4), Tumbling(2))).snapshot()
    with pytest.raises(ValueError, match="snapshot"):
        Coordinator.restore(strategy(Concurrency(4), Tumbling(5)), state)


def test_a_snapshot_shares_nothing_with_the_coordinator_that_goes_on() -> None:
    coordinator = Coordinator(strategy(Concurrency(3), Sliding(2), lease_timeout_s=4.0))
    lease = admit(coordinator, 0, 0.0)
    state = coordinator.snapshot()
    frozen = json.dumps(state)
    coordinator.deliver(lease.id, 1.0)
    admit(coordinator, 1, 2.0)
    assert json.dumps(state) == frozen


def test_the_log_says_in_words_what_ended_a_lease() -> None:
    log = EventLog()
    coordinator = Coordinator(strategy(Concurrency(3), Tumbling(1)), log)
    leases = [admit(coordinator, worker, 0.0) for worker in range(3)]
    coordinator.fail(leases[0].id, "battery", 1.0)
    coordinator.deliver(leases[1].id, 2.0, "not finite")
    coordinator.deliver(leases[1].id, 3.0)
    reasons = [(row["kind"], row["lease"], row["reason"]) for row in told(log)[3:]]
    assert reasons == [
        ("failed", 0, "battery"),
        ("rejected", 1, "not finite"),
        ("ignored", 1, "the lease had ended"),
    ]


def test_a_log_longer_than_its_chunks_keeps_every_row_in_order() -> None:
    log = EventLog()
    for row in range(10_000):
        code = log.code(f"reason {row % 7}") if row % 2 else -1
        log.append((row / 3, row % 9, row, -1, -1, row, -1, code))
        if row in (5, 4096, 5000):
            assert len(log) == row + 1
            assert len(list(log.rows())) == row + 1
    rows = list(log.rows())
    assert rows == [
        (i / 3, i % 9, i, -1, -1, i, -1, log.code(f"reason {i % 7}") if i % 2 else -1) for i in range(10_000)
    ]
    assert sorted(log.reasons) == [f"reason {n}" for n in range(7)]


def test_a_sink_gets_the_packed_rows_and_the_log_keeps_none() -> None:
    kept, taken = EventLog(), []
    handed = EventLog(taken.append)
    for log in (kept, handed):
        for row in range(9_000):
            log.append((float(row), 0, row, 1, 2, 3, -1, -1))
        log.flush()
    assert b"".join(taken) == b"".join(kept.packed)
    assert len(b"".join(taken)) == 9_000 * 41
    assert len(handed) == 9_000
    assert list(handed.rows()) == []


def test_a_log_takes_as_many_reasons_as_it_has_rows() -> None:
    """A deployment may well put an address or an exception's text into each."""
    log = EventLog()
    for row in range(40_000):
        log.append((float(row), 3, row, 0, 0, 0, 0, log.code(f"client 10.0.{row} went away")))
    assert log.reasons[list(log.rows())[-1][-1]] == "client 10.0.39999 went away"


def test_a_coordinator_without_a_log_behaves_the_same() -> None:
    coordinator = Coordinator(EACH)
    lease = admit(coordinator, 0, 0.0)
    assert isinstance(coordinator.deliver(lease.id, 1.0)[0], Accepted)
    assert coordinator.is_in_flight(lease.id) is False
