"""A run again from its log: the core is driven by what was recorded, and must do what was recorded.

A row that the core has already produced by itself is compared. Any other row is an input, and drives it:

    admitted             request
    delivered            receive the contribution, deliver
    rejected             deliver, with the defect that was found ("stale" is the core's own finding)
    failed               fail; a time-out that is due: on_timer
    ignored              deliver again
    consumed, committed  apply and commit the step; where none is outstanding, the clock makes one: on_timer

Timers leave rows only where they find something to do. Without ``rings`` each is taken to have rung at its own time,
before anything later and behind all else of that instant, as the simulation has it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from fedasync.aggregation.server import DivergedError
from fedasync.core import Cancelled, Coordinator, Event, EventLog, Failed, Lease, Published, Rejected, Strategy
from fedasync.core.log import (
    ADMITTED,
    COMMITTED,
    CONSUMED,
    DELIVERED,
    FAILED,
    IGNORED,
    NONE,
    REJECTED,
    Row,
)
from fedasync.federated.arrays import Arrays
from fedasync.federated.driver import RESTARTED
from fedasync.federated.recorded import reason_of, told, unpacked

if TYPE_CHECKING:
    from fedasync.aggregation.model import Contribution, Model

SAME_INSTANT = 1e-12
"""Relative: a runtime may let a timer wait for what comes this little later (sums of durations are rounded)."""

Contributions = Callable[[int], "Contribution | None"]
"""Lease number → what it brought, in memory of its own; None where there is nothing. ValueError for what is damaged."""


class ReplayError(ValueError):
    """A log and the core differ: the message says the row, what was recorded, and what the core did, on one line."""


@dataclass(frozen=True)
class Replayed:
    """What the replay of a log came to.

    ``coordinator`` stands where the last row left it. ``beyond`` are rows that it has produced and the log lacks, since
    the log ends in the middle of a call; reasons are indices into ``reasons``.
    """

    coordinator: Coordinator
    rows: int
    contributions: int
    beyond: tuple[Row, ...]
    reasons: Sequence[str]
    profile: Sequence[float] | None

    @property
    def versions(self) -> int:
        return self.coordinator.version

    def continued(self, log: EventLog) -> Coordinator:
        """The coordinator, for a runtime that goes on: its rows go to ``log``, those beyond the recorded ones first."""
        for *fields, reason in self.beyond:
            log.append((*fields, NONE if reason == NONE else log.code(self.reasons[reason])))  # type: ignore[arg-type]
        return Coordinator.restore(self.coordinator.strategy, self.coordinator.snapshot(), log, self.profile)


def replay(
    rows: Iterable[Row],
    reasons: Sequence[str],
    strategy: Strategy,
    arrays: Arrays | None,
    contributions: Contributions,
    *,
    profile: Sequence[float] | None = None,
    coordinator: Coordinator | None = None,
    first: int = 0,
    rings: Iterable[tuple[int, float]] | None = None,
    on_version: Callable[[int, Model], None] | None = None,
) -> Replayed:
    """Drive a core by a log's rows, and compare what it does with them.

    ``arrays`` make the versions, or None for the rows alone. From a checkpoint ``coordinator`` (which is not changed)
    and ``arrays`` are the restored ones, ``rows`` those after it, and ``first`` is how many it covers. ``rings`` are
    the calls of on_timer, each with the number of rows that stood in the log before it; None for a runtime that keeps
    to the rule above. ``on_version`` is told of every version that is made: its number and model, only to be read.

    Raises ReplayError at the first difference, and WorkloadError where the workload measures and raises.
    """
    walk = _Walk(reasons, strategy, arrays, contributions, profile, coordinator, rings, on_version)
    count = 0
    for count, row in enumerate(rows, 1):
        walk.row(first + count - 1, row)
    walk.end(first + count)
    beyond = tuple(walk.produced)
    return Replayed(walk.coordinator, count, walk.received, beyond, walk.log.reasons, profile)


class _Walk:
    def __init__(
        self,
        reasons: Sequence[str],
        strategy: Strategy,
        arrays: Arrays | None,
        contributions: Contributions,
        profile: Sequence[float] | None,
        coordinator: Coordinator | None,
        rings: Iterable[tuple[int, float]] | None,
        on_version: Callable[[int, Model], None] | None,
    ) -> None:
        self.produced: deque[Row] = deque()
        """Rows of the core that no recorded row was compared with yet."""
        self.log = EventLog(lambda packed: self.produced.extend(unpacked(packed)))
        if coordinator is None:
            self.coordinator = Coordinator(strategy, self.log, profile)
        else:
            self.coordinator = Coordinator.restore(strategy, coordinator.snapshot(), self.log, profile)
        self.received = 0
        self._leases: dict[int, Lease] = {lease.id: lease for lease in self.coordinator.leases}
        self._reasons, self._arrays, self._contributions = reasons, arrays, contributions
        self._rings = None if rings is None else deque(rings)
        self._on_version = on_version

    def row(self, number: int, row: Row) -> None:
        """Let the core do what a row says, if it has not done so already."""
        try:
            if not self.produced:
                self._ring(number, row[0])
            if not self.produced:
                self._drive(row)
        except (ValueError, DivergedError) as error:  # the core's, the server's, the contributions', and our own
            raise ReplayError(f"row {number}: recorded {told(row, self._reasons)}; {error}") from error
        found = self.produced.popleft() if self.produced else None
        equal = found is not None and row[:7] == found[:7]
        if found is None or not equal or reason_of(row, self._reasons) != reason_of(found, self.log.reasons):
            did = "did nothing" if found is None else f"did {told(found, self.log.reasons)}"
            raise ReplayError(f"row {number}: recorded {told(row, self._reasons)}; the core {did}")

    def end(self, rows: int) -> None:
        """Ring what rang after the last row, as far as that was noted."""
        if self._rings is not None:
            self._ring(rows, inf)

    # -- what a row makes the core do --------------------------------------------------------------------------

    def _drive(self, row: Row) -> None:
        drives = {
            ADMITTED: self._admitted,
            DELIVERED: self._delivered,
            REJECTED: self._rejected,
            FAILED: self._failed,
            IGNORED: self._ignored,
            CONSUMED: self._committed,
            COMMITTED: self._committed,
        }
        if row[1] not in drives:
            raise ReplayError(f"nothing recorded before makes the core do so: {self.coordinator.explain()}")
        drives[row[1]](row)

    def _ring(self, number: int, time_s: float) -> None:
        """Ring the timers that rang before this row; those that find something to do produce it."""
        while not self.produced:
            if self._rings is not None:
                if not self._rings or self._rings[0][0] > number:
                    return
                at_s = self._rings.popleft()[1]
            else:
                due_s = self.coordinator.next_timer()
                if due_s is None or not due_s + SAME_INSTANT * abs(due_s) < time_s:
                    return
                at_s = max(due_s, self.coordinator.now)
            self._follow(self.coordinator.on_timer(at_s))

    def _admitted(self, row: Row) -> None:
        lease = self.coordinator.request(row[3], row[0])
        if lease is None:
            raise ReplayError(f"the core gives worker {row[3]} no lease: {self.coordinator.explain()}")
        self._leases[lease.id] = lease
        if self._arrays is not None:
            self._arrays.lease(lease)
        self._follow([])

    def _delivered(self, row: Row) -> None:
        lease_id = row[2]
        if self.coordinator.is_in_flight(lease_id):
            defect = self._receive(lease_id)
            if defect is not None:
                raise ReplayError(f"its contribution is not fit for use: {defect}")
        self._deliver(row, None)

    def _rejected(self, row: Row) -> None:
        lease_id, reason = row[2], self._reason(row)
        own = reason == "stale"  # the core's own finding, whatever was brought
        if not own and self.coordinator.is_in_flight(lease_id) and self._arrays is not None:
            found = self._contributions(lease_id)
            defect = None if found is None else self._arrays.receive(lease_id, found)
            if found is not None and (defect is None or defect.reason != reason):
                why = "fit for use" if defect is None else f"unfit for another reason: {defect.reason}"
                raise ReplayError(f"its contribution is {why}")
        self._deliver(row, None if own else reason)

    def _failed(self, row: Row) -> None:
        time_s, lease_id, reason = row[0], row[2], self._reason(row)
        lease = self._leases.get(lease_id)
        due = reason == "timeout" and lease is not None and lease.deadline_s is not None and lease.deadline_s <= time_s
        if due and self._rings is None:
            self._follow(self.coordinator.on_timer(time_s))
        elif due:
            self._deliver(row, None)  # a result came too late, before any timer rang
        else:
            self._follow(self.coordinator.fail(lease_id, reason, time_s, again=reason == RESTARTED))

    def _ignored(self, row: Row) -> None:
        if self.coordinator.is_in_flight(row[2]):
            raise ReplayError("the lease has not ended in the core")
        self._deliver(row, None)

    def _committed(self, row: Row) -> None:
        time_s, coordinator = row[0], self.coordinator
        if coordinator.step is None and self._rings is None:
            self._follow(coordinator.on_timer(time_s))
        step, arrays = coordinator.step, self._arrays
        if self.produced:
            return
        if step is None:
            raise ReplayError(f"the core has no step to commit: {coordinator.explain()}")
        measured: dict[str, float] = {}
        if arrays is not None:
            arrays.apply(step)
            if asked := coordinator.asks:
                measured = arrays.measure(asked, coordinator.version + 1)
        self._follow(coordinator.commit(time_s, measured))
        for arrival in (*step.entering, *step.undrafted):
            self._leases.pop(arrival.lease.id, None)
        if arrays is not None and self._on_version is not None:
            self._on_version(coordinator.version, arrays.server.model)

    # -- parts -------------------------------------------------------------------------------------------------

    def _receive(self, lease_id: int) -> str | None:
        """Hand what was recorded of a lease to the server; what is wrong with it."""
        if self._arrays is None:
            return None
        found = self._contributions(lease_id)
        if found is None:
            raise ReplayError(f"the contribution of lease {lease_id} is missing")
        self.received += 1
        defect = self._arrays.receive(lease_id, found)
        return None if defect is None else f"{defect.reason} ({defect.detail})"

    def _deliver(self, row: Row, defect: str | None) -> None:
        self._follow(self.coordinator.deliver(row[2], row[0], defect))

    def _follow(self, events: list[Event]) -> None:
        """Do what the core says, and take in its rows."""
        for event in events:
            if isinstance(event, (Cancelled, Failed)):
                self._forget(event.lease.id)
            elif isinstance(event, Rejected) and not event.ignored:
                self._forget(event.lease_id)
            elif isinstance(event, Published) and self._arrays is not None:
                self._arrays.publish()
        self.log.flush()

    def _forget(self, lease_id: int) -> None:
        self._leases.pop(lease_id, None)
        if self._arrays is not None:
            self._arrays.forget(lease_id)

    def _reason(self, row: Row) -> str:
        if not 0 <= row[7] < len(self._reasons):
            raise ReplayError(f"there is no reason {row[7]}: {len(self._reasons)} are known")
        return self._reasons[row[7]]
