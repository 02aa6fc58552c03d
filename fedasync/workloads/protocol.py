"""What a workload is: the four functions that a runtime calls, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from fedasync.aggregation.model import Contribution, Model


@dataclass(frozen=True, slots=True)
class Task:
    """The local work of one lease."""

    client: int
    model: Model
    """The base version: shared with other leases, so read it and never write it."""
    seed: int
    """Fixes everything random in the work (order of batches, dropout); 0 ≤ seed < 2^63."""
    proximal_mu: float = 0.0
    """Weight of FedProx's and FedAsync's term (mu/2)·‖x − w_base‖², added by the client (0: no term)."""


class Workload(Protocol):
    """Model, data, objective and metric of a federated problem.

    The result of ``train`` may depend on its task alone: a runtime calls it when the result is due, in any order,
    in any process.
    """

    def client_samples(self) -> Sequence[int]:
        """Training samples n_k ≥ 1 of each client; the length is the number of clients."""
        ...

    def initial_model(self, seed: int) -> Model:
        """Version 0."""
        ...

    def train(self, task: Task) -> Contribution:
        """Train from ``task.model`` on the data of ``task.client``."""
        ...

    def evaluate(self, model: Model) -> dict[str, float]:
        """Metrics of a version, by name, on data that no client trains on."""
        ...
