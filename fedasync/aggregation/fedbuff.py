"""FedBuff (Nguyen et al. 2022): w ← w + η_g·(1/K)·Σ s(τ)·Δ over a full buffer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Literal

from fedasync.aggregation.model import Form
from fedasync.aggregation.update import Inputs, blocks
from fedasync.core.bounds import check_choice
from fedasync.core.staleness import Polynomial

if TYPE_CHECKING:
    from torch import Tensor


Divisor = Literal["count", "weights", "clients", "nothing"]


@dataclass(frozen=True, slots=True)
class DeltaMean:
    """Step along the mean of the staleness-weighted deltas, each taken from the version its client started from.

    The mean divides by K, the ``count``, as in the paper. Some frameworks divide by the sum of the ``weights`` s(τ), by
    the number of ``clients`` N, or by ``nothing``.
    """

    server_learning_rate: float = 1.0
    staleness: Callable[[int], float] = Polynomial(0.5)
    divide_by: Divisor = "count"
    wants: Form = "delta"

    def __post_init__(self) -> None:
        if not 0 < self.server_learning_rate < inf:
            raise ValueError(f"fedbuff: server_learning_rate must be > 0 and finite, got {self.server_learning_rate}")
        check_choice("fedbuff: divide_by", self.divide_by, Divisor)

    def init(self, values: Tensor) -> None:
        return None

    def apply(self, values: Tensor, state: None, inputs: Inputs, out: Tensor | None = None) -> None:
        import torch

        weights = [self.staleness(x.staleness) for x in inputs.entering]
        divisors = {"count": len(weights), "weights": sum(weights), "clients": inputs.clients, "nothing": 1}
        weights = [self.server_learning_rate * weight / divisors[self.divide_by] for weight in weights]
        target = values if out is None else out
        for moved, w, first, *others in blocks(target, values, *(x.values for x in inputs.entering)):
            torch.add(w, first, alpha=weights[0], out=moved)
            for delta, weight in zip(others, weights[1:], strict=True):
                moved.add_(delta, alpha=weight)
