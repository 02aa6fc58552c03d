"""How a run goes: when it ends, how often it is evaluated, who works next, how results are computed."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Literal

from fedasync.core.bounds import check_choice, check_integer
from fedasync.federated.selection import Selection
from fedasync.publication.modelled import ModelledDivergence

MOST_EVALUATIONS = 1_000_000

Training = Literal["batched", "one_by_one"]
"""All results not yet computed in one call when one is due (where the workload can), or each by itself."""

CancelledClients = Literal["stop", "finish"]
"""A client whose lease is cancelled stops at once, or finishes what nobody waits for (as a client of Flower does)."""


@dataclass(frozen=True)
class Settings:
    """How a run goes: when it stops (whichever limit comes first), how often it is evaluated, who works next.

    ``updates`` counts contributions applied to the model, ``versions`` committed steps. A step occupies the server for
    ``server_step_s``. Evaluation happens on the grid 0, e, 2e, … of virtual time (``evaluate_every_s``); with
    ``stop_at_target`` the run ends there once every target is reached.

    ``training`` says whether results are computed in batches; ``batch_memory_bytes`` bounds what a batch takes in work,
    and, apart from that, the results that were computed ahead of their time.

    ``cancelled_clients`` says whether a client whose lease is cancelled is free at once.

    ``divergence`` models what publication rules measure, where there is no workload to measure it on.
    """

    time_s: float | None = None
    updates: int | None = None
    versions: int | None = None
    evaluate_every_s: float | None = None
    server_step_s: float = 0.0
    selection: Selection = "random_idle"
    stop_at_target: bool = False
    training: Training = "batched"
    batch_memory_bytes: int = 1 << 30
    divergence: ModelledDivergence | None = None
    cancelled_clients: CancelledClients = "stop"

    def __post_init__(self) -> None:
        if self.time_s is None and self.updates is None and self.versions is None:
            raise ValueError("a run needs an end: give time_s, updates, or versions")
        for name in ("time_s", "evaluate_every_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < inf:
                raise ValueError(f"{name} must be > 0 and finite, got {value}")
        for name in ("updates", "versions"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 1)
        check_choice("selection", self.selection, Selection)
        check_choice("cancelled_clients", self.cancelled_clients, CancelledClients)
        check_choice("training", self.training, Training)
        check_integer("batch_memory_bytes", self.batch_memory_bytes, 1)
        if self.time_s is not None and self.evaluate_every_s is not None:
            points = self.time_s / self.evaluate_every_s
            if points > MOST_EVALUATIONS:
                raise ValueError(
                    f"evaluate_every_s = {self.evaluate_every_s:g} makes {points:.3g} evaluations in time_s = "
                    f"{self.time_s:g}; at most {MOST_EVALUATIONS:,} are made"
                )
        if not 0 <= self.server_step_s < inf:
            raise ValueError(f"server_step_s must be ≥ 0 and finite, got {self.server_step_s}")
