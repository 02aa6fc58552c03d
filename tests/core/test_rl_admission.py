"""Admission of prompt groups: AReaL's gate in a run, samples, batches in turn, and verl's budget between syncs."""

from __future__ import annotations

import json
import re
from fractions import Fraction
from math import floor
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedasync.core import (
    Barrier,
    Cohort,
    Coordinator,
    EventLog,
    EveryN,
    EveryVersion,
    StalenessBudget,
    SyncBudget,
    Tumbling,
)

from .driving import admit, ready, strategy, told


def affairs(version: int, accepted: int, running: int, *, published: int = 0, samples: int = 0) -> Any:
    ledger = SimpleNamespace(accepted=accepted, in_flight=running)
    return SimpleNamespace(version=version, published=published, ledger=ledger, samples_in_flight=samples, step=None)


def brought_to(budget: StalenessBudget, accepted: int, rejected: int, running: int) -> Coordinator:
    """A coordinator at version accepted // batch, with some leases accepted, some rejected and some running."""
    coordinator = Coordinator(strategy(budget, Tumbling(budget.batch)))
    for turn in range(accepted + rejected):
        lease = admit(coordinator, turn, 0.0)
        if ready(coordinator.deliver(lease.id, 0.0, "filtered" if turn < rejected else None)):
            coordinator.commit(0.0)
    for turn in range(running):
        admit(coordinator, turn, 0.0)
    return coordinator


@pytest.mark.parametrize(
    ("limit", "batch", "eta", "accepted", "rejected", "running"),
    [
        (10, 4, 2, 0, 0, 0),
        (100, 4, 2, 5, 0, 0),
        (10, 4, 2, 0, 0, 3),
        (20, 8, 3, 15, 5, 0),
        (100, 8, 3, 30, 0, 2),
        (32, 16, 2, 14, 2, 0),
        (100, 8, 0, 40, 0, 8),
        (100, 8, 0, 40, 0, 7),
        (10, 4, 2, 0, 10, 0),
    ],
)
def test_the_gates_cases_come_about_in_a_run(
    limit: int, batch: int, eta: int, accepted: int, rejected: int, running: int
) -> None:
    """The states that a run can reach have the table's capacities; the others are in `test_admission`.

    AReaL turns a batch and a concurrency of 0 into 1 each, so that 0 and 0 leave a capacity of 1. Both are refused
    """
    coordinator = brought_to(StalenessBudget(eta, batch, limit), accepted, rejected, running)
    version = accepted // batch
    capacity = min(limit - running, (eta + version + 1) * batch - accepted - running)
    assert (coordinator.version, coordinator.slots) == (version, capacity)
    started = 0
    while coordinator.request(started, 0.0) is not None:
        started += 1
    assert started == capacity


def test_where_areal_makes_one_of_nothing_nothing_is_refused() -> None:
    for wrong in ({"batch": 0}, {"batch": 1, "limit": 0}):
        with pytest.raises(ValueError, match="≥ 1"):
            StalenessBudget(0, **wrong)


@pytest.mark.parametrize("running", [0, 5, 48])
@pytest.mark.parametrize("version", [0, 3, 11])
def test_after_a_recovery_the_capacity_is_what_it_was(version: int, running: int) -> None:
    """Not version·batch more, as where the accepted of before the checkpoint are forgotten (AReaL #1388)."""
    budget = StalenessBudget(2, 16, limit=1000)
    coordinator = brought_to(budget, 16 * version, 0, running)
    state = json.loads(json.dumps(coordinator.snapshot()))
    assert Coordinator.restore(coordinator.strategy, state).slots == coordinator.slots == 48 - running


@given(st.integers(1, 9), st.integers(0, 4), st.integers(0, 40))
def test_the_number_admitted_by_a_version_is_the_papers(batch: int, eta: int, version: int) -> None:
    """⌊(N − 1)/B⌋ ≤ v + η holds for the last N that starts, and fails for the next."""
    budget, n = StalenessBudget(eta, batch), 0
    while budget.slots(affairs(version, version * batch, n - version * batch)) > 0:
        n += 1
    assert (n - 1) // batch <= version + eta < n // batch


# -- samples ---------------------------------------------------------------------------------------------------------


def test_a_sample_that_has_ended_frees_its_slot_and_its_lease_stays() -> None:
    """Groups of 4 answers, 10 at a time: two groups, and a third when two answers of them have ended."""
    coordinator = Coordinator(strategy(StalenessBudget(3, 2, limit_samples=10, samples=4), Tumbling(2)))
    first, second = admit(coordinator, 0, 0.0), admit(coordinator, 1, 0.0)
    assert (coordinator.samples_in_flight, coordinator.slots) == (8, 0)
    assert "8 of 10 samples" in coordinator.explain()
    coordinator.sample_done(first.id)
    assert coordinator.slots == 0
    coordinator.sample_done(second.id)
    assert (coordinator.slots, coordinator.in_flight) == (1, 2)
    admit(coordinator, 2, 1.0)
    assert (coordinator.samples_in_flight, coordinator.in_flight, coordinator.slots) == (10, 3, 0)
    coordinator.deliver(first.id, 2.0)  # with all that it had left
    assert coordinator.samples_in_flight == 7
    coordinator.fail(second.id, "lost", 2.0)
    assert coordinator.samples_in_flight == 4
    assert coordinator.ledger.imbalance == 0


@pytest.mark.parametrize("ending", ["deliver", "reject", "fail", "time out", "cancel", "stop"])
def test_no_slot_leaks_however_a_lease_ends(ending: str) -> None:
    """SkyRL #1733: cancelled work kept its slots."""
    budget = StalenessBudget(1, 1, limit_samples=6, samples=3)
    bounds: dict[str, Any] = {"lease_timeout_s": 5.0, "max_staleness": 0, "stop_stale": True}
    publication = EveryVersion("abort" if ending == "cancel" else "continue")
    coordinator = Coordinator(strategy(budget, Tumbling(1), publication, **bounds))
    lease, other = admit(coordinator, 0, 0.0), admit(coordinator, 1, 0.0)
    coordinator.sample_done(lease.id)
    match ending:
        case "deliver" | "reject":
            coordinator.deliver(lease.id, 1.0, "filtered" if ending == "reject" else None)
        case "fail":
            coordinator.fail(lease.id, "crash", 1.0)
        case "time out":
            coordinator.sample_done(other.id)
            coordinator.on_timer(5.0)
            assert coordinator.samples_in_flight == 0
            return
        case _:
            coordinator.deliver(other.id, 1.0)
            coordinator.commit(1.0)
            assert (coordinator.in_flight, coordinator.samples_in_flight) == (0, 0)
            return
    assert coordinator.samples_in_flight == 3
    coordinator.sample_done(lease.id)  # it comes late, and is nobody's any more
    assert coordinator.samples_in_flight == 3


def test_samples_survive_a_snapshot() -> None:
    made = strategy(StalenessBudget(3, 2, limit_samples=10, samples=4), Tumbling(2))
    coordinator = Coordinator(made)
    lease, _ = admit(coordinator, 0, 0.0), admit(coordinator, 1, 0.0)
    for _ in range(3):
        coordinator.sample_done(lease.id)
    again = Coordinator.restore(made, json.loads(json.dumps(coordinator.snapshot())))
    assert again.samples_in_flight == coordinator.samples_in_flight == 5
    again.sample_done(lease.id)
    with pytest.raises(ValueError, match="have ended before"):
        again.sample_done(lease.id)


def test_a_lease_may_have_fewer_samples_and_none_has_more() -> None:
    coordinator = Coordinator(strategy(StalenessBudget(3, 2, limit_samples=10, samples=4), Tumbling(2)))
    assert coordinator.request(0, 0.0, samples=1) is not None
    assert coordinator.samples_in_flight == 1
    for wrong in (0, 5):
        with pytest.raises(ValueError, match="1 to that many would do"):
            coordinator.request(1, 0.0, samples=wrong)
    assert coordinator.in_flight == 1


def test_where_samples_are_not_counted_they_change_nothing() -> None:
    coordinator = Coordinator(strategy(StalenessBudget(3, 2), Tumbling(2)))
    lease = coordinator.request(0, 0.0, samples=16)
    assert lease is not None
    for _ in range(20):
        coordinator.sample_done(lease.id)
    assert (coordinator.samples_in_flight, coordinator.in_flight) == (0, 1)


# -- batches in turn -------------------------------------------------------------------------------------------------


@given(st.integers(1, 9), st.integers(0, 3), st.integers(0, 30), st.integers(0, 9))
def test_a_batch_starts_when_the_one_before_has_arrived(batch: int, eta: int, accepted: int, running: int) -> None:
    version = accepted // batch
    for behind in range(eta + 2):
        if behind > version:
            break
        slots = StalenessBudget(eta, batch, in_batches=True).slots(affairs(version - behind, accepted, running))
        of_this_batch = batch - accepted % batch - running
        assert slots == (of_this_batch if behind <= eta else -(accepted % batch) - running)


def test_one_step_overlap_generates_one_batch_while_one_trains_and_no_more() -> None:
    coordinator = Coordinator(strategy(StalenessBudget(1, 3, in_batches=True), Tumbling(3)))
    bases = []
    for version in range(5):
        assert coordinator.slots == 3
        leases = [admit(coordinator, worker, float(version)) for worker in range(3)]
        assert coordinator.slots == 0
        bases.append({lease.base_version for lease in leases})
        for lease in leases[:2]:
            coordinator.deliver(lease.id, float(version))
        if coordinator.step is not None:
            coordinator.commit(float(version))  # the batch before has been trained
        assert coordinator.slots == 0, "its batch has not arrived"
        coordinator.deliver(leases[2].id, float(version))
        assert coordinator.step is not None
    assert bases == [{0}, {0}, {1}, {2}, {3}]


def test_eta_0_in_batches_is_the_plain_gate_and_a_cohort_event_for_event() -> None:
    logs = []
    for admission, buffer in (
        (StalenessBudget(0, 3), Tumbling(3)),
        (StalenessBudget(0, 3, in_batches=True), Tumbling(3)),
        (StalenessBudget(0, 3, limit_samples=6, samples=2), Tumbling(3)),
        (SyncBudget(0.0, 3, 1), Tumbling(3)),
        (Cohort(3), Barrier()),
    ):
        log = EventLog()
        coordinator = Coordinator(strategy(admission, buffer), log)
        for turn in range(40):
            worker = 0
            while coordinator.admits:
                admit(coordinator, worker, float(turn))
                worker += 1
            flying = coordinator.leases
            events = coordinator.deliver(flying[turn * 7 % len(flying)].id, float(turn))
            if ready(events):
                coordinator.commit(turn + 0.5)
        logs.append(told(log))
    assert all(log == logs[0] for log in logs)
    assert {row["staleness"] for row in logs[0] if row["kind"] == "consumed"} == {0}


# -- between publications --------------------------------------------------------------------------------------------


@given(
    extra=st.sampled_from(["0", "0.1", "0.15", "0.25", "0.5", "0.7", "1", "1.5"]),
    batch=st.integers(1, 64),
    every=st.integers(1, 8),
    publications=st.integers(0, 10),
    left=st.integers(0, 100),
    split=st.floats(0, 1),
)
def test_what_may_start_after_a_publication_is_verls_rollout_num(
    extra: str, batch: int, every: int, publications: int, left: int, split: float
) -> None:
    """(1 + s)·k·B less n_stale, whatever of that waits and whatever is in flight; s as it is written."""
    published = publications * every
    rollouts = floor((1 + Fraction(extra)) * every * batch) - left
    waiting = round(split * left)
    budget = SyncBudget(float(extra), batch, every)
    now = affairs(published, published * batch + waiting, left - waiting, published=published)
    assert budget.slots(now) == rollouts
    assert budget.most_in_flight == floor((1 + Fraction(extra)) * every * batch)


def test_a_step_between_publications_lets_nothing_new_start() -> None:
    """s = 0, k = 2: four leases for two versions, all from the version that was published before them."""
    coordinator = Coordinator(strategy(SyncBudget(0.0, 2, 2), Tumbling(2), EveryN(2)))
    for turn in range(3):
        leases = [admit(coordinator, worker, float(turn)) for worker in range(4)]
        assert {lease.base_version for lease in leases} == {2 * turn}
        for first, second in ((0, 1), (2, 3)):
            assert coordinator.request(9, float(turn)) is None
            assert "until the next publication is spent" in coordinator.explain()
            coordinator.deliver(leases[first].id, float(turn))
            coordinator.deliver(leases[second].id, float(turn))
            coordinator.commit(float(turn))
        assert coordinator.published == coordinator.version == 2 * turn + 2


# -- what can never progress -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: StalenessBudget(1, 4, limit_samples=15, samples=16), "limit_samples ≥ 16 would do"),
        (lambda: StalenessBudget(1, 4, limit_samples=0), "limit_samples must be an integer ≥ 1"),
        (lambda: StalenessBudget(1, 4, samples=0), "samples must be an integer ≥ 1"),
        (lambda: StalenessBudget(None, 4), "a limit or a limit_samples would do"),
        (lambda: StalenessBudget(None, 4, limit=4, in_batches=True), "an eta ≥ 0 would do"),
        (lambda: SyncBudget(-0.1, 4, 1), "extra must be a finite number ≥ 0"),
        (lambda: SyncBudget(0.1, 4, 0), "every must be an integer ≥ 1"),
        (lambda: SyncBudget(0.1, 4, 1, limit=0), "limit must be an integer ≥ 1"),
        (lambda: strategy(SyncBudget(0.1, 4, 2), Tumbling(3), EveryN(2)), "a tumbling buffer of K = 4 would do"),
        (lambda: strategy(SyncBudget(0.1, 4, 2), Tumbling(4), EveryN(3)), "EveryN(n = 2) would do"),
        (lambda: strategy(StalenessBudget(None, 4, limit=4), Tumbling(5)), "a tumbling buffer of K = 4 would do"),
    ],
)
def test_what_could_never_progress_is_refused_in_one_line(make: Any, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)) as refused:
        make()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("admission", "most"),
    [
        (StalenessBudget(2, 4, in_batches=True), 4),
        (StalenessBudget(2, 4, limit_samples=8, samples=4), 8),
        (StalenessBudget(2, 4, limit_samples=100, samples=4), 12),
        (StalenessBudget(None, 4, limit=7), 7),
        (StalenessBudget(None, 4, limit_samples=9, samples=3), 9),
        (SyncBudget(0.5, 4, 3), 18),
        (SyncBudget(0.5, 4, 3, limit=5), 5),
    ],
)
def test_each_rule_says_how_much_may_be_in_flight(admission: Any, most: int) -> None:
    """With a limit of samples up to that many leases: each has one sample left, and gave the others' slots away."""
    assert admission.most_in_flight == most
    n = getattr(admission, "every", 1)
    coordinator = Coordinator(strategy(admission, Tumbling(4), EveryN(n)))
    reached = 0
    for turn in range(40):
        while (lease := coordinator.request(0, float(turn))) is not None:
            for _ in range(getattr(admission, "samples", 1)):
                coordinator.sample_done(lease.id)
        reached = max(reached, coordinator.in_flight)
        if ready(coordinator.deliver(coordinator.leases[-1].id, float(turn))):
            coordinator.commit(float(turn))
    assert reached == most
    assert coordinator.version == 10
