"""CA2FL (Wang et al., ICLR 2024): a buffer's step calibrated by every client's last update."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from fedasync.aggregation.model import Form
from fedasync.aggregation.update import Inputs
from fedasync.core.bounds import check_real

if TYPE_CHECKING:
    from torch import Tensor


class Calibration(NamedTuple):
    """h_i [P], the last Δ of every client that has delivered one, and h̄ [P], their mean over all N (the rest 0)."""

    cache: dict[int, Tensor]
    mean: Tensor


@dataclass(frozen=True, slots=True)
class CachedCalibration:
    """w ← w + η·(h̄ + (1/K)·Σ (Δ_i − h_i)), h̄ the mean of before the buffer; then h_i ← Δ_i.

    A client that delivers twice within one buffer replaces its own h_i in between, as arrivals do.
    """

    server_learning_rate: float = 1.0
    wants: Form = "delta"

    def __post_init__(self) -> None:
        check_real("ca2fl: server_learning_rate", self.server_learning_rate, 0, above=True)

    def init(self, values: Tensor) -> Calibration:
        import torch

        return Calibration({}, torch.zeros_like(values))

    def apply(self, values: Tensor, state: Calibration, inputs: Inputs) -> Calibration:
        import torch

        cache, before, eta = state.cache, state.mean, self.server_learning_rate
        change = torch.zeros_like(values)
        for x in inputs.entering:
            change.add_(x.values)
            if x.worker in cache:
                change.sub_(cache[x.worker])
            cache[x.worker] = x.values.clone()
        values.add_(before, alpha=eta).add_(change, alpha=eta / len(inputs.entering))
        before.add_(change, alpha=1 / inputs.clients)
        return state
