"""A sliding window of deltas: FedFa's window, in the form in which clients send differences.

FedFa's paper names such a variant without a formula that we could read; this is one candidate, and makes no claim to be
the paper's. (Another one, w ← w + Δ/K at every arrival, is FedBuff with K = 1 and η = 1/K.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedasync.aggregation.model import Form
from fedasync.aggregation.update import Inputs
from fedasync.core.bounds import check_real

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class WindowStep:
    """w ← w + (η/K)·Σ of the window's deltas, at every arrival: each delta is applied K times, like a momentum."""

    server_learning_rate: float = 1.0
    wants: Form = "delta"

    def __post_init__(self) -> None:
        check_real("sliding_delta: server_learning_rate", self.server_learning_rate, 0, above=True)

    def init(self, values: Tensor) -> None:
        return None

    def apply(self, values: Tensor, state: None, inputs: Inputs) -> None:
        for x in inputs.window:
            values.add_(x.values, alpha=self.server_learning_rate / len(inputs.window))
