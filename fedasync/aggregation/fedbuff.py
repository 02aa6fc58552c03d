"""FedBuff (Nguyen et al. 2022): w ← w + η_g·(1/K)·Σ s(τ)·Δ over a full buffer."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING

from fedasync.aggregation.model import Form
from fedasync.aggregation.update import Inputs, blocks
from fedasync.core.staleness import Polynomial, Staleness

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class DeltaMean:
    """Step along the mean of the staleness-weighted deltas, each taken from the version its client started from.

    The mean divides by K as in the paper: not by Σ s(τ), and not at all in some frameworks.
    """

    server_learning_rate: float = 1.0
    staleness: Staleness = Polynomial(0.5)
    wants: Form = "delta"

    def __post_init__(self) -> None:
        if not 0 < self.server_learning_rate < inf:
            raise ValueError(f"fedbuff: server_learning_rate must be > 0 and finite, got {self.server_learning_rate}")

    def init(self, values: Tensor) -> None:
        return None

    def apply(self, values: Tensor, state: None, inputs: Inputs, out: Tensor | None = None) -> None:
        import torch

        step = self.server_learning_rate / len(inputs.entering)
        weights = [step * self.staleness(x.staleness) for x in inputs.entering]
        target = values if out is None else out
        for moved, w, first, *others in blocks(target, values, *(x.values for x in inputs.entering)):
            torch.add(w, first, alpha=weights[0], out=moved)
            for delta, weight in zip(others, weights[1:], strict=True):
                moved.add_(delta, alpha=weight)
