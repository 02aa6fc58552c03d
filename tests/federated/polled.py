"""A runtime under a clock that is looked at now and then, which keeps a journal: what a deployment is, in small."""

from __future__ import annotations

from heapq import heappop, heappush
from pathlib import Path
from typing import Any

from fedasync.core import Cancelled, Coordinator, Failed, Published, Rejected, Strategy
from fedasync.federated import checkpoint
from fedasync.federated.arrays import Arrays
from fedasync.federated.journal import Journal
from fedasync.federated.replay import Replayed, replay

from .recording import CLIENTS, Recording

SECONDS = (1.0, 0.35, 2.2, 0.6, 1.5, 4.1, 0.9, 1.1)
TURN_S = 0.4


class Polled:
    """Results of one turn arrive at one instant; timers ring late; some clients fail, some bring NaN."""

    def __init__(self, strategy: Strategy, folder: Path) -> None:
        self.strategy = strategy
        self.journal = Journal(folder)
        self.workload = Recording(unfit=0.1)
        self.arrays = Arrays(strategy, self.workload, seed=1)
        self.now = 0.0
        self.coordinator, self.replayed = self._begin(folder)
        self.ends: list[tuple[float, int, int]] = []
        self.idle = list(range(CLIENTS))
        self.turns = 0
        if self.coordinator.step is not None:
            self.make_version()
        for lease in self.coordinator.leases:
            self.follow(self.coordinator.fail(lease.id, "server restarted", self.now, again=True))
        self.journal.sync()

    def _begin(self, folder: Path) -> tuple[Coordinator, Replayed]:
        """Where the checkpoint stands, and the rows after it."""
        journal = self.journal
        found = checkpoint.load(folder, self.strategy, profile=SECONDS, rows=journal.recorded.size)
        if found is not None:
            self.arrays.server = found.server
        replayed = again(self.strategy, folder, self.arrays, found)
        coordinator = replayed.continued(journal.log)
        self.now = max(coordinator.now, 0.0)
        return coordinator, replayed

    def turn(self, *, sync: bool = True) -> None:
        self.now += TURN_S
        self.turns += 1
        here = []
        while self.ends and self.ends[0][0] <= self.now:
            _, lease_id, client = heappop(self.ends)
            here.append((lease_id, client))
        for lease_id, client in sorted(here):
            self.idle.append(client)
            self.take(lease_id)
        timer_s = self.coordinator.next_timer()
        if timer_s is not None and timer_s <= self.now:
            self.journal.rung(self.now)
            self.follow(self.coordinator.on_timer(self.now))
        self.dispatch()
        if sync:
            self.journal.sync()

    def take(self, lease_id: int) -> None:
        """A lease's client has answered."""
        if lease_id % 9 == 4:
            self.follow(self.coordinator.fail(lease_id, "client error", self.now))
            return
        defect = None
        if self.coordinator.is_in_flight(lease_id):
            found = self.workload.train(self.tasks[lease_id])
            self.journal.keep_contribution(lease_id, found)
            defect = self.arrays.receive(lease_id, found)
        self.follow(self.coordinator.deliver(lease_id, self.now, defect and defect.reason))

    def dispatch(self) -> None:
        for client in self.idle[:]:
            if not self.coordinator.may_start(client):
                continue
            lease = self.coordinator.request(client, self.now)
            assert lease is not None
            self.idle.remove(client)
            self.arrays.lease(lease)
            self.tasks = {**getattr(self, "tasks", {}), lease.id: self.arrays.task(lease, lease.id)}
            share = 1 if lease.steps is None else lease.steps / 4
            heappush(self.ends, (self.now + SECONDS[client] * share, lease.id, client))

    def follow(self, events: list[Any]) -> None:
        for event in events:
            if isinstance(event, (Cancelled, Failed)):
                self.arrays.forget(event.lease.id)
            elif isinstance(event, Rejected) and not event.ignored:
                self.arrays.forget(event.lease_id)
            elif isinstance(event, Published):
                self.arrays.publish()
        if self.coordinator.step is not None:
            self.make_version()

    def make_version(self) -> None:
        step = self.coordinator.step
        assert step is not None
        self.arrays.apply(step)
        self.journal.version(step.version + 1, self.arrays.server.model)
        asked = self.coordinator.asks
        measured = self.arrays.measure(asked, step.version + 1) if asked else {}
        self.follow(self.coordinator.commit(self.now, measured))

    def save(self, folder: Path) -> None:
        checkpoint.save(folder, self.coordinator, self.arrays.server, rings=self.journal.rings)

    def state(self) -> Any:
        return state_of(self.coordinator, self.arrays)


def again(
    strategy: Strategy, folder: Path, arrays: Arrays, found: checkpoint.Loaded | None = None, **arguments: Any
) -> Replayed:
    """The rows on the disk, from the start or from a checkpoint."""
    from fedasync.federated.recorded import Recorded

    recorded = Recorded(folder)
    first, rings = (0, 0) if found is None else (found.rows, found.rings)
    return replay(
        recorded.rows(first),
        recorded.reasons,
        strategy,
        arrays,
        recorded.contribution,
        profile=SECONDS,
        coordinator=None if found is None else found.coordinator,
        first=first,
        rings=recorded.rings(rings),
        **arguments,
    )


def state_of(coordinator: Coordinator, arrays: Arrays) -> Any:
    """Everything that a run knows, to the bit."""
    state, tensors = arrays.server.snapshot()
    return coordinator.snapshot(), state, {name: t.numpy().tobytes() for name, t in tensors.items()}
