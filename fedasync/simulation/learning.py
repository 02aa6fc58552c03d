"""Learning on virtual time: what a lease brings is computed when it is due, from the version it started from."""

from __future__ import annotations

from fedasync.aggregation.check import Defect
from fedasync.aggregation.server import Server
from fedasync.core import Lease, Step, Strategy
from fedasync.simulation.streams import Stream
from fedasync.workloads.protocol import Task, Workload


class WorkloadError(RuntimeError):
    """A workload raised; the message names client, lease and version, the cause is the workload's own exception."""


class Learner:
    """The arrays of a run: the server's model, and local training for the leases whose results are due.

    A result depends on base version, client, seed and the client's count of leases alone, so one that nobody waits
    for (cancelled, lost) is never computed.
    """

    def __init__(self, strategy: Strategy, workload: Workload, seed: int) -> None:
        self.workload = workload
        try:
            model = workload.initial_model(seed)
        except Exception as error:
            raise WorkloadError(f"initial_model raised {type(error).__name__}: {error}") from error
        self.server = Server(strategy.update, model)
        self._mu = strategy.proximal_mu
        self._seeds = Stream(seed, "training")
        self._turns: dict[int, int] = {}

    def start(self, lease: Lease, turn: int) -> None:
        """A lease begins: keep its base version."""
        self.server.lease(lease.id)
        self._turns[lease.id] = turn

    def finish(self, lease: Lease) -> Defect | None:
        """A lease's result is due: train, and hand the contribution to the server. Raises WorkloadError."""
        turn = self._turns.pop(lease.id)
        base = self.server.base(lease.id)
        written = base.values._version
        task = Task(lease.worker, base, self._seeds.seed(lease.worker, turn), self._mu)
        try:
            contribution = self.workload.train(task)
        except Exception as error:
            raise WorkloadError(
                f"client {lease.worker}, lease {lease.id}, version {lease.base_version}: "
                f"train raised {type(error).__name__}: {error}"
            ) from error
        if base.values._version != written:
            raise WorkloadError(
                f"client {lease.worker}, lease {lease.id}: train wrote into task.model, which other leases share; "
                "train on a copy of it"
            )
        return self.server.receive(lease.id, contribution)

    def forget(self, lease_id: int) -> None:
        """The lease ended without use."""
        self._turns.pop(lease_id, None)
        self.server.forget(lease_id)

    def apply(self, step: Step) -> None:
        self.server.apply(step)

    def evaluate(self, version: int) -> dict[str, float]:
        """Metrics of the current model. Raises WorkloadError."""
        try:
            metrics = self.workload.evaluate(self.server.model)
            return {name: float(value) for name, value in metrics.items()}
        except Exception as error:
            raise WorkloadError(f"version {version}: evaluate raised {type(error).__name__}: {error}") from error
