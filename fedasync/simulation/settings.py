"""How a run goes: when it ends, how often it is evaluated, who works next, how results are computed."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal

from fedasync.core.bounds import check_choice, check_integer
from fedasync.federated.limits import Limits
from fedasync.publication.modelled import ModelledDivergence

Training = Literal["batched", "one_by_one"]
"""All results not yet computed in one call when one is due (where the workload can), or each by itself."""

CancelledClients = Literal["stop", "finish"]
"""A client whose lease is cancelled stops at once, or finishes what nobody waits for (as a client of Flower does)."""


@dataclass(frozen=True)
class Settings(Limits):
    """How a simulated run goes: its ``Limits``, and what only the virtual clock has.

    A step occupies the server for ``server_step_s``. ``training`` says whether results are computed in batches;
    ``batch_memory_bytes`` bounds what a batch takes in work, and, apart from that, the results that were computed ahead
    of their time. ``cancelled_clients`` says whether a client whose lease is cancelled is free at once.
    ``divergence`` models what publication rules measure, where there is no workload to measure it on.
    """

    server_step_s: float = 0.0
    training: Training = "batched"
    batch_memory_bytes: int = 1 << 30
    divergence: ModelledDivergence | None = None
    cancelled_clients: CancelledClients = "stop"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("cancelled_clients", self.cancelled_clients, CancelledClients)
        check_choice("training", self.training, Training)
        check_integer("batch_memory_bytes", self.batch_memory_bytes, 1)
        if not 0 <= self.server_step_s < inf:
            raise ValueError(f"server_step_s must be ≥ 0 and finite, got {self.server_step_s}")
