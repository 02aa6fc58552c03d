"""FedFix (Fraboni et al., JMLR 2023): a server step at fixed times, each client weighted by how rarely it arrives."""

from __future__ import annotations

from dataclasses import dataclass
from math import floor
from typing import TYPE_CHECKING

from fedasync.aggregation.model import Form
from fedasync.aggregation.update import Input, Inputs
from fedasync.core.bounds import check_real

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class IntervalWeighted:
    """w ← w + η·Σ d_i·Δ_i over what has arrived, d_i = ⌈t_i/Δt⌉·p_i, p_i = 1/N.

    A client whose work takes t_i is part of one step in ⌈t_i/Δt⌉, so that on average it counts p_i a step. Here the
    number of steps is counted: those since the lease was given out, this one included, which is ⌈t_i/Δt⌉ for work that
    starts at a step. The paper allows any p_i; equal importance is ours. Where only n of N clients work at a time, a
    step moves the model by some n/N of what they ask for: η = N/n makes up for it.
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
            steps = self.steps_since(x, inputs.time_s)
            values.add_(x.values, alpha=self.server_learning_rate * steps / inputs.clients)

    def steps_since(self, x: Input, now: float) -> int:
        """Multiples of Δt after the lease was given out and up to now, at least 1; rounding decides nothing."""
        passed = [floor(time_s / self.interval_s * (1 + 1e-9) + 1e-9) for time_s in (x.admitted_s, now)]
        return max(1, passed[1] - passed[0])
