"""Learning on virtual time: results are computed when one is due, all that are not yet computed together.

A result depends on base version, client, seed and the client's count of leases alone, so nothing forces it to be
computed when its lease is given out. Waiting until the first of them is due makes the batches as large as they can be:
leases of many base versions, of several runs if these advance side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

from fedasync.aggregation.check import Defect
from fedasync.aggregation.model import Contribution
from fedasync.core import Lease, Step, Strategy
from fedasync.federated.arrays import Arrays, WorkloadError
from fedasync.simulation.settings import Settings
from fedasync.workloads.protocol import Task, Workload

if TYPE_CHECKING:
    from fedasync.workloads.protocol import BatchedWorkload


class _Due(NamedTuple):
    due_s: float
    lease: Lease
    turn: int
    written: int
    """Count of writes to the base's values (torch's version counter) when the lease began."""


class Learner:
    """The arrays of a run: the server's model, and local training for the leases whose results are due.

    ``start`` is told of every lease that may bring a result of use; ``compute`` makes those that are wanted next;
    ``finish`` hands one to the server.
    """

    def __init__(self, strategy: Strategy, workload: Workload, seed: int, settings: Settings) -> None:
        self.arrays = Arrays(strategy, workload, seed)
        self.workload, self.server = workload, self.arrays.server
        batched = settings.training == "batched"
        self.batched: BatchedWorkload | None = _batched(workload) if batched else None
        self.batch_key: object = id(self) if self.batched is None else self.batched.batch_key
        self.not_batched: str | None = None
        """Why results are computed one by one, where that was not asked for."""
        if batched and self.batched is None:
            self.not_batched = getattr(workload, "not_batched", None) or "the workload has no train_batch"
        self.memory_bytes = settings.batch_memory_bytes
        self._due: dict[int, _Due] = {}
        self._found: dict[int, Contribution | WorkloadError] = {}

    def start(self, lease: Lease, turn: int, due_s: float) -> None:
        """A lease begins whose result will be due: keep its base version."""
        self.arrays.lease(lease)
        self._due[lease.id] = _Due(due_s, lease, turn, self.server.base(lease.id).values._version)

    def lacks(self, lease_id: int) -> bool:
        """The result is wanted, and not computed yet."""
        return lease_id in self._due

    def comes_first(self, lease_id: int) -> None:
        """The lease ends now, whatever was expected of it and of the others."""
        self._due[lease_id] = self._due[lease_id]._replace(due_s=-inf)

    def wanted(self, useful: float = inf) -> list[int]:
        """Leases to compute now, by the time at which they are due: the ``useful`` first, as many as memory allows.

        What was computed ahead counts. One that trains unbatched computes only what is due.
        """
        most = 1.0
        if self.batched is not None:
            room = self.memory_bytes // max(1, self.server.model.values.nbytes) - len(self._found)
            most = max(1.0, min(useful, room))
        ordered = sorted(self._due.values())
        return [due.lease.id for due in (ordered if most >= len(ordered) else ordered[: int(most)])]

    def task(self, lease_id: int) -> Task:
        due = self._due[lease_id]
        return self.arrays.task(due.lease, due.turn)

    def written(self, lease_id: int) -> int:
        """Writes to the lease's base version before the lease began."""
        return self._due[lease_id].written

    def compute(self, useful: float = inf) -> None:
        """Compute what is wanted, for this run alone."""
        compute_together([(self, useful)])

    def keep(self, lease_id: int, found: Contribution | BaseException) -> None:
        """A result was computed, or an error came instead, which is raised when the result is due."""
        lease = self._due.pop(lease_id).lease
        if isinstance(found, BaseException) and not isinstance(found, WorkloadError):
            error = WorkloadError(
                f"client {lease.worker}, lease {lease.id}, version {lease.base_version}: "
                f"train raised {type(found).__name__}: {found}"
            )
            error.__cause__ = found
            found = error
        self._found[lease_id] = found

    def finish(self, lease_id: int) -> Defect | None:
        """A lease's result is due: hand it to the server. Raises WorkloadError when computing it raised."""
        found = self._found.pop(lease_id)
        if isinstance(found, WorkloadError):
            raise found
        return self.arrays.receive(lease_id, found)

    def forget(self, lease_id: int) -> None:
        """The lease ended without use."""
        self._due.pop(lease_id, None)
        self._found.pop(lease_id, None)
        self.arrays.forget(lease_id)

    def apply(self, step: Step) -> None:
        """Make the next version. Raises WorkloadError."""
        self.arrays.apply(step)

    def publish(self) -> None:
        """Leases start from the current version from now on."""
        self.arrays.publish()


def compute_together(runs: Iterable[tuple[Learner, float]]) -> None:
    """Compute what each run wants next, in one call for all whose workloads can share it.

    The second of each pair is the number of results that may be of use to the run.
    """
    groups: dict[object, list[tuple[Learner, int, Task]]] = {}
    for learner, useful in runs:
        work = groups.setdefault(learner.batch_key, [])
        work.extend((learner, lease_id, learner.task(lease_id)) for lease_id in learner.wanted(useful))
    for work in groups.values():
        for (learner, lease_id, task), result in zip(work, _results(work), strict=True):
            if task.model.values._version == learner.written(lease_id):
                learner.keep(lease_id, result)
                continue
            what = "train wrote into task.model, which other leases share; train on a copy of it"
            learner.keep(lease_id, WorkloadError(f"client {task.client}, lease {lease_id}: {what}"))


def _results(work: Sequence[tuple[Learner, int, Task]]) -> Sequence[Contribution | BaseException]:
    """A contribution a task, or what the workload raised. After an error in a batch each task runs by itself."""
    first = work[0][0]
    if first.batched is None:
        return [_raised_or(learner.workload.train, task) for learner, _, task in work]
    train_batch, memory_bytes = first.batched.train_batch, first.memory_bytes

    def train(pairs: Sequence[tuple[Workload, Task]]) -> Sequence[Contribution]:
        found = train_batch(pairs, memory_bytes)
        if len(found) != len(pairs):
            raise ValueError(f"train_batch returned {len(found)} contributions for {len(pairs)} tasks")
        return found

    pairs = [(learner.workload, task) for learner, _, task in work]
    try:
        return train(pairs)
    except (Exception, SystemExit) as error:  # noqa: BLE001  whose task it was shows when each runs by itself
        if len(pairs) == 1:
            return [error]
        why = f"a batch raised {type(error).__name__}: {error}"
    alone = [_raised_or(lambda one: train([one])[0], pair) for pair in pairs]
    if not any(isinstance(each, BaseException) for each in alone):
        for learner, _, _ in work:  # nobody's task: the batch itself is at fault
            learner.not_batched = why
    return alone


def _raised_or(call: Callable[[Any], Contribution], argument: object) -> Contribution | BaseException:
    try:
        return call(argument)
    except (Exception, SystemExit) as error:  # noqa: BLE001  raised in the run whose task it was
        return error


def _batched(workload: Workload) -> BatchedWorkload | None:
    """The workload, if it can train many leases in one call. Raises WorkloadError for one that only says so."""
    try:
        key = getattr(workload, "batch_key", None)
        hash(key)
    except Exception as error:
        raise WorkloadError(f"batch_key raised {type(error).__name__}: {error}") from error
    if key is None:
        return None
    if not callable(getattr(workload, "train_batch", None)):
        raise WorkloadError("the workload has a batch_key and no train_batch")
    return workload  # type: ignore[return-value]
