"""FedFix (Fraboni et al., JMLR 2023): a server step at fixed times, each client weighted by how rarely it arrives."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING

from fedasync.aggregation.model import Form
from fedasync.aggregation.update import Input, Inputs
from fedasync.core.bounds import check_real

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class IntervalWeighted:
    """w ← w + η·Σ d_i·Δ_i over what has arrived, d_i = ⌈t_i/Δt⌉·p_i, p_i = 1/N.

    A client whose work takes t_i is part of one step in ⌈t_i/Δt⌉, so that on average it counts p_i a step. t_i is the
    time that this contribution took. The paper allows any p_i; equal importance is ours.
    """

    interval_s: float
    server_learning_rate: float = 1.0
    wants: Form = "delta"

    def __post_init__(self) -> None:
        check_real("fedfix: interval_s", self.interval_s, 0, above=True)
        check_real("fedfix: server_learning_rate", self.server_learning_rate, 0, above=True)

    def init(self, values: Tensor) -> None:
        return None

    def apply(self, values: Tensor, state: None, inputs: Inputs) -> None:
        for x in inputs.entering:
            values.add_(x.values, alpha=self.server_learning_rate * self.intervals(x) / inputs.clients)

    def intervals(self, x: Input) -> int:
        """⌈t_i/Δt⌉, at least 1; what is later than a multiple by rounding alone is not late."""
        return max(1, ceil(x.duration_s / self.interval_s * (1 - 1e-12)))
