"""The arrays of a run beside its coordinator: versions of the model, what is received, measured and evaluated."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from math import isfinite
from typing import TYPE_CHECKING, Any

from fedasync.aggregation.distance import relative_distance
from fedasync.aggregation.norms import Norms
from fedasync.aggregation.server import OverwrittenError, Server
from fedasync.aggregation.step_sizes import UnknownStepSizesError
from fedasync.core import Lease, Step, Strategy
from fedasync.streams import Stream
from fedasync.workloads.protocol import Task

if TYPE_CHECKING:
    from fedasync.aggregation.check import Defect
    from fedasync.aggregation.model import Contribution
    from fedasync.workloads.protocol import Workload


class WorkloadError(RuntimeError):
    """A workload raised; the message names client, lease and version, the cause is the workload's own exception."""


class Arrays:
    """The server's arrays in a federated run of ``workload``, in whose name errors are raised.

    Everything random is a function of ``seed``. Raises WorkloadError when there is no initial model, and ValueError
    when the strategy's publication measures what the workload does not.
    """

    def __init__(self, strategy: Strategy, workload: Workload, seed: int) -> None:
        self.workload = workload
        try:
            model = workload.initial_model(seed)
        except Exception as error:
            raise WorkloadError(f"initial_model raised {type(error).__name__}: {error}") from error
        self.server = Server(
            strategy.update,
            model,
            clients=len(workload.client_samples()),
            seed=Stream(seed, "update").seed(0, 0),
            norms=Norms(strategy.clip_norm, strategy.max_norm),
        )
        self._check_measures(strategy)
        self._mu = strategy.proximal_mu
        self._seeds = Stream(seed, "training")

    def lease(self, lease: Lease) -> None:
        """A lease begins: hold the version that it starts from."""
        self.server.lease(lease.id, lease.worker)

    def task(self, lease: Lease, turn: int) -> Task:
        """The local work of a lease that was begun, its client's ``turn``-th (from 0)."""
        seed, server = self._seeds.seed(lease.worker, turn), self.server
        return Task(lease.worker, server.base(lease.id), seed, self._mu, server.control(lease.id), lease.steps)

    def receive(self, lease_id: int, contribution: Contribution) -> Defect | None:
        """Check a contribution and keep it; None when it is fit for use. Raises WorkloadError as ``apply`` does."""
        return self._served(self.server.receive, lease_id, contribution)

    def apply(self, step: Step) -> None:
        """Make the next version. Raises WorkloadError when the workload wrote where it must not any more."""
        self._served(self.server.apply, step)

    def publish(self) -> None:
        """Leases start from the current version from now on."""
        self.server.publish()

    def forget(self, lease_id: int) -> None:
        """The lease ended without use."""
        self.server.forget(lease_id)

    def measure(self, names: Collection[str], version: int) -> dict[str, float]:
        """What a publication asks for, of the current model against the published one. Raises WorkloadError."""
        current, published = self.server.model, self.server.published
        found = {name: value for name, value in self._compared(names, version).items() if name in names}
        if "distance" in names:
            found["distance"] = relative_distance(current.values, published.values)
        return found

    def _compared(self, names: Collection[str], version: int) -> Mapping[str, float]:
        """What the workload's own comparison says, where more than the distance is wanted."""
        if not any(name != "distance" for name in names):
            return {}
        try:
            compared = self.workload.compare(self.server.published, self.server.model)  # type: ignore[attr-defined]
            found = {name: float(value) for name, value in compared.items()}
        except Exception as error:
            raise WorkloadError(f"version {version}: compare raised {type(error).__name__}: {error}") from error
        for name in sorted(names):
            if not isfinite(found.get(name, 0.0)):
                raise WorkloadError(
                    f"version {version}: compare returned {name} = {found[name]}; a finite number would do"
                )
        return found

    def _check_measures(self, strategy: Strategy) -> None:
        """Refuse a publication that measures what the workload does not: ValueError."""
        wanted, rule = strategy.publication.measures - {"distance"}, strategy.publication.kind
        if not wanted:
            return
        where = f"strategy {strategy.name!r}: publication {rule!r} measures {', '.join(sorted(wanted))}"
        kind = type(self.workload).__name__
        if not callable(getattr(self.workload, "compare", None)):
            raise ValueError(f"{where}, and workload {kind} has no compare(published, current); distance needs none")
        known = self._compared(wanted, 0)
        if missing := sorted(wanted - set(known)):
            raise ValueError(
                f"{where}, and compare of workload {kind} gives {', '.join(sorted(known)) or 'nothing'}, "
                f"not {', '.join(missing)}"
            )

    def _served(self, call: Callable[..., Defect | None], *arguments: Any) -> Defect | None:
        try:
            return call(*arguments)
        except (OverwrittenError, UnknownStepSizesError) as error:
            raise WorkloadError(str(error)) from error

    def evaluate(self, version: int) -> dict[str, float]:
        """Metrics of the current model. Raises WorkloadError."""
        try:
            metrics = self.workload.evaluate(self.server.model)
            return {name: float(value) for name, value in metrics.items()}
        except Exception as error:
            raise WorkloadError(f"version {version}: evaluate raised {type(error).__name__}: {error}") from error
