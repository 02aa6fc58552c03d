"""What has come of each lease: answers one by one, then a group that waits for the trainer; and the rows that tell."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from math import nan

from fedasync.core import Lease, Step
from fedasync.rl.engine import Finished
from fedasync.rl.trajectory import Group
from fedasync.trainer.answer_rows import answer_row

Came = tuple[Finished | None, float, float, int]
"""An answer, when it began and ended in the run's time, and the worker that it was on."""


class Groups:
    """Leases of ``answers`` answers each; ``write`` takes packed rows, an answer each, when a lease ends."""

    def __init__(self, answers: int, write: Callable[[bytes], object], waiting: Iterable[Group] = ()) -> None:
        self._answers, self._write = answers, write
        self.leases: dict[int, Lease] = {}
        """In flight."""
        self.waiting = {group.lease: group for group in waiting}
        """Delivered, and not trained yet."""
        self._came: dict[int, dict[int, Came]] = {}

    def asked(self, lease: Lease) -> None:
        """A lease is in flight."""
        self.leases[lease.id] = lease

    def came(self, lease: int, index: int, answer: Came) -> None:
        """One of its answers is there."""
        self._came.setdefault(lease, {})[index] = answer

    def whole(self, lease: int) -> None:
        """The group is whole, or as whole as it will be: it waits for the trainer."""
        told, came = self.leases[lease], self._came.get(lease, {})
        finished = [came[index][0] for index in sorted(came)]
        found = tuple(each.trajectory for each in finished if each is not None and each.trajectory is not None)
        self.waiting[lease] = Group(lease, told.worker, told.base_version, found, self._answers)
        self.ended(lease)

    def ended(self, lease: int) -> None:
        """The lease is in flight no more; its rows are written."""
        told, came = self.leases.pop(lease), self._came.pop(lease, {})
        for index in range(self._answers):
            finished, start_s, end_s, worker = came.get(index, (None, told.admitted_s, nan, -1))
            self._write(answer_row(told, index, worker, finished, start_s, end_s))

    def dropped(self, lease: int) -> None:
        """A group that waits will not be trained."""
        self.waiting.pop(lease, None)

    def of(self, step: Step) -> list[Group]:
        """A step's groups, in the order in which they were asked for, not in that of their arrival: sums then have the
        same bits."""
        return [self.waiting[lease] for lease in sorted(arrival.lease.id for arrival in step.entering)]

    def trained(self, step: Step) -> None:
        """They wait no more."""
        for arrival in step.entering:
            del self.waiting[arrival.lease.id]
