"""Scalar models, contributions and a server driven by hand."""

from __future__ import annotations

import torch

from fedasync.aggregation.model import Contribution, Form, Model
from fedasync.aggregation.server import Server
from fedasync.aggregation.update import Input, Inputs, Update
from fedasync.core import Concurrency, Coordinator, Rejected, Sliding, StepReady, Strategy, Tumbling


def model(*values: float, dtype: torch.dtype = torch.float64) -> Model:
    return Model.from_tensors({"w": torch.tensor(values, dtype=dtype)})


def brings(
    *values: float, form: Form = "parameters", samples: int = 1, dtype: torch.dtype = torch.float64
) -> Contribution:
    return Contribution(torch.tensor(values, dtype=dtype), form, samples)


def inputs(*entering: tuple[float, int], samples: tuple[int, ...] = ()) -> Inputs:
    """Scalar (value, staleness) pairs."""
    counts = samples or (1,) * len(entering)
    return Inputs(
        [
            Input(torch.tensor([value], dtype=torch.float64), n, tau, worker)
            for worker, ((value, tau), n) in enumerate(zip(entering, counts, strict=True))
        ]
    )


def applied(rule: Update, start: float, *entering: tuple[float, int]) -> float:
    """A rule's next version of a scalar model."""
    values = torch.tensor([start], dtype=torch.float64)
    rule.apply(values, rule.init(values), inputs(*entering))
    return float(values)


class Runtime:
    """A coordinator and a server side by side: the smallest runtime there is."""

    def __init__(self, update: Update, buffer: Tumbling | Sliding, start: Model, concurrency: int = 10) -> None:
        self.coordinator = Coordinator(Strategy("by hand", Concurrency(concurrency), buffer, update))
        self.server = Server(update, start)
        self.now = 0.0

    def start(self, worker: int = 0) -> int:
        lease = self.coordinator.request(worker, self.now)
        assert lease is not None
        self.server.lease(lease.id, worker)
        return lease.id

    def bring(self, lease_id: int, contribution: Contribution) -> float:
        """Deliver a contribution, commit what it makes ready; the first coordinate of the model afterwards."""
        self.now += 1.0
        defect = self.server.receive(lease_id, contribution)
        del contribution  # handed over
        events = self.coordinator.deliver(lease_id, self.now, None if defect is None else defect.reason)
        for event in events:
            if isinstance(event, Rejected):
                self.server.forget(event.lease_id)
            elif isinstance(event, StepReady):
                self.server.apply(event.step)
                self.coordinator.commit(self.now)
                self.server.publish()
        return float(self.server.model.values[0])
