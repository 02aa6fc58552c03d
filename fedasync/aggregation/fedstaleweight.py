"""FedStaleWeight (Ma et al. 2024): within a buffer, who is mostly late counts for more."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedasync.aggregation.model import Form
from fedasync.aggregation.update import Inputs
from fedasync.core.bounds import check_integer, check_real

if TYPE_CHECKING:
    from torch import Tensor

Recent = dict[int, deque[int]]
"""Client → its last values of τ."""


@dataclass(frozen=True, slots=True)
class StalenessProportional:
    """w ← w + η·Σ (τ̄_i/Σ_j τ̄_j)·Δ_i over the buffer, τ̄_i the mean of the client's last ``memory`` values of τ.

    The present one included; where all are 0 the weights are equal (ours). The weights are normalised within a buffer,
    so a buffer of one client's updates weighs as much as any other: the bias towards fast clients gets less, not zero.
    """

    server_learning_rate: float = 1.0
    memory: int = 5
    wants: Form = "delta"

    def __post_init__(self) -> None:
        check_real("fedstaleweight: server_learning_rate", self.server_learning_rate, 0, above=True)
        check_integer("fedstaleweight: memory", self.memory, 1)
        if self.memory > 1_000_000:
            raise ValueError(f"fedstaleweight: memory must be ≤ 1,000,000, got {self.memory}")

    def init(self, values: Tensor) -> Recent:
        return {}

    def apply(self, values: Tensor, state: Recent, inputs: Inputs) -> Recent:
        for weight, x in zip(self.weights(state, inputs), inputs.entering, strict=True):
            values.add_(x.values, alpha=self.server_learning_rate * weight)
        return state

    def weights(self, recent: Recent, inputs: Inputs) -> list[float]:
        """Of each contribution, after its τ was noted; they sum to 1."""
        means = []
        for x in inputs.entering:
            last = recent.setdefault(x.worker, deque(maxlen=self.memory))
            last.append(x.staleness)
            means.append(sum(last) / len(last))
        total = sum(means)
        return [mean / total if total else 1 / len(means) for mean in means]
