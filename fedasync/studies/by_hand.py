"""The smallest runtime there is: coordinator and server side by side, and somebody who says who delivers what next."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedasync.core import Coordinator, Rejected, StepReady, Strategy

if TYPE_CHECKING:
    from fedasync.aggregation.model import Contribution, Model


class ByHand:
    """A run without a clock. A result that completes a step has it applied and committed at once."""

    def __init__(self, strategy: Strategy, start: Model, clients: int = 2) -> None:
        from fedasync.aggregation.server import Server

        self.coordinator = Coordinator(strategy)
        self.server = Server(strategy.update, start, clients=clients)

    @property
    def w(self) -> float:
        """The model's first coordinate."""
        return float(self.server.model.values[0])

    def start(self, client: int) -> int:
        """The number of a lease that begins now, from the current version."""
        lease = self.coordinator.request(client, 0.0)
        if lease is None:
            raise AssertionError(f"no lease: {self.coordinator.explain()}")
        self.server.lease(lease.id, client)
        return lease.id

    def bring(self, lease_id: int, contribution: Contribution | float) -> str | None:
        """Deliver a lease's result, a scalar being the client's model; the reason if it is rejected."""
        brought = model_of(contribution) if isinstance(contribution, float) else contribution
        defect = self.server.receive(lease_id, brought)
        reason = None
        for event in self.coordinator.deliver(lease_id, 0.0, None if defect is None else defect.reason):
            if isinstance(event, Rejected):
                reason = event.reason
                self.server.forget(lease_id)
            elif isinstance(event, StepReady):
                self.server.apply(event.step)
                self.coordinator.commit(0.0)
                self.server.publish()
        return reason


def scalar(w: float) -> Model:
    import torch

    from fedasync.aggregation.model import Model

    return Model.from_tensors({"w": torch.tensor([w], dtype=torch.float64)})


def model_of(*values: float, samples: int = 1, integers: Sequence[int] | None = None) -> Contribution:
    import torch

    from fedasync.aggregation.model import Contribution

    counters = None if integers is None else torch.tensor(integers, dtype=torch.int64)
    return Contribution(torch.tensor(values, dtype=torch.float64), "parameters", samples, counters)
