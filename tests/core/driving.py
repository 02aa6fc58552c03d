"""Driving a coordinator by hand, and every valid choice of admission, buffer and publication."""

from __future__ import annotations

from typing import Any

from fedasync.core import (
    KINDS,
    Barrier,
    Cohort,
    Compass,
    Concurrency,
    Coordinator,
    Event,
    EventLog,
    EveryN,
    EveryVersion,
    Grouped,
    Lease,
    Periodic,
    Quota,
    Sliding,
    StalenessBudget,
    Step,
    StepReady,
    Strategy,
    SyncBudget,
    Tiers,
    Tumbling,
)
from fedasync.core.log import COLUMNS

ADMISSIONS = {
    "cohort": Cohort(3),
    "cohort_keeping_some": Cohort(4, keep=2),
    "cohort_of_one": Cohort(1),
    "concurrency": Concurrency(3),
    "concurrency_before_step": Concurrency(4, redispatch="before_step"),
    "concurrency_together": Concurrency(3, simultaneous="together"),
    "concurrency_of_one": Concurrency(1),
    "waiting": Concurrency(4, redispatch="next_version"),
    "waiting_together": Concurrency(3, redispatch="next_version", simultaneous="together"),
    "tiers": Tiers(3, 2),
    "tiers_of_one": Tiers(2, 1),
    "compass": Compass(5, 2, 6),
    "compass_of_one": Compass(1, 1, 4, patience=1.0, speed_momentum=1.0),
    "budget_synchronous": StalenessBudget(0, 3),
    "budget": StalenessBudget(2, 3, limit=4),
    "budget_of_samples": StalenessBudget(2, 3, limit_samples=7, samples=3),
    "budget_in_batches": StalenessBudget(1, 3, in_batches=True),
    "budget_without_gate": StalenessBudget(None, 3, limit=4),
    "budget_until_a_sync": SyncBudget(0.5, 3, 3),
}
BUFFERS = {
    "barrier": Barrier(),
    "each": Tumbling(1),
    "tumbling": Tumbling(3),
    "oldest_first": Tumbling(3, order="oldest_first"),
    "freshest_first": Tumbling(3, order="freshest_first"),
    "dispatch": Tumbling(3, order="dispatch"),
    "periodic": Periodic(2.0),
    "quota": Quota(2),
    "quota_of_one": Quota(1),
    "grouped": Grouped(),
    "sliding": Sliding(3),
    "sliding_from_the_first": Sliding(3, warm_up="average_what_is_there"),
}
PUBLICATIONS = {
    "every_version": EveryVersion(),
    "every_version_aborting": EveryVersion("abort"),
    "every_version_interrupting": EveryVersion("interrupt"),
    "every_second": EveryN(2),
    "every_third_aborting": EveryN(3, "abort"),
}


PROFILE = (3.0, 1.0, 4.0, 1.0, 5.0, 9.0, 2.0, 6.0, 5.0, 3.5)
"""Seconds that each of ten workers is expected to take."""


def combinations(kind: str) -> list[tuple[str, str, str]]:
    """Every choice of the three, with one kind of admission, that a strategy accepts."""
    return [
        (admission, buffer, publication)
        for admission in ADMISSIONS
        for buffer in BUFFERS
        for publication in PUBLICATIONS
        if admission.startswith(kind) and accepted(admission, buffer, publication)
    ]


def accepted(admission: str, buffer: str, publication: str) -> bool:
    try:
        strategy(ADMISSIONS[admission], BUFFERS[buffer], PUBLICATIONS[publication])
    except ValueError:
        return False
    return True


def strategy(admission: Any, buffer: Any, publication: Any = EveryVersion(), **bounds: Any) -> Strategy:
    """A strategy whose update nobody ever applies."""
    return Strategy("by hand", admission, buffer, None, publication, **bounds)


def ready(events: list[Event]) -> Step | None:
    """The step among some events."""
    steps = [event.step for event in events if isinstance(event, StepReady)]
    assert len(steps) <= 1
    return steps[0] if steps else None


def admit(coordinator: Coordinator, worker: int, now: float) -> Lease:
    """A lease for a worker that must get one."""
    lease = coordinator.request(worker, now)
    assert lease is not None, coordinator.explain()
    return lease


def told(log: EventLog) -> list[dict[str, Any]]:
    """A log's rows, kinds and reasons in words."""
    found: list[dict[str, Any]] = [dict(zip(COLUMNS, row, strict=True)) for row in log.rows()]
    for row in found:
        row["kind"] = KINDS[row["kind"]]
        row["reason"] = None if row["reason"] < 0 else log.reasons[row["reason"]]
    return found
