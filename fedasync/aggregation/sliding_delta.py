"""A sliding window of deltas: FedFa's window, in the form in which clients send differences.

FedFa's paper names such a variant without a formula that we could read; this is one candidate, and makes no claim to be
the paper's. (Another one, w ← w + Δ/K at every arrival, is FedBuff with K = 1 and η = 1/K.)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedasync.aggregation.aggregators import Aggregator, Mean
from fedasync.aggregation.model import Form
from fedasync.aggregation.privacy import Privacy
from fedasync.aggregation.server_step import check_privacy, shares
from fedasync.aggregation.update import Inputs
from fedasync.core.bounds import check_real

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class WindowStep:
    """w ← w + (η/K)·Σ of the window's deltas, at every arrival: each delta is applied K times, like a momentum.

    Another ``aggregator`` than the mean, and noise, as in ``WindowAggregate``.
    """

    server_learning_rate: float = 1.0
    aggregator: Aggregator = Mean()
    privacy: Privacy | None = None
    clip_norm: float | None = None
    wants: Form = "delta"

    def __post_init__(self) -> None:
        check_real("sliding_delta: server_learning_rate", self.server_learning_rate, 0, above=True)
        check_privacy(self.privacy, self.clip_norm, self.aggregator)

    @property
    def steps_statistics(self) -> bool:
        """As ``ServerStep`` has it."""
        return self.privacy is not None or not isinstance(self.aggregator, Mean)

    def init(self, values: Tensor) -> None:
        return None

    def apply(self, values: Tensor, state: None, inputs: Inputs) -> None:
        import torch

        window = inputs.window
        step = torch.empty_like(values)
        self.aggregator.aggregate([x.values for x in window], shares(window, True), [1.0] * len(window), step)
        if self.privacy is not None and self.clip_norm is not None:
            self.privacy.add(step, len(window), self.clip_norm, inputs)
        values.add_(step, alpha=self.server_learning_rate)
