"""FedAsync (Xie et al. 2019): w ← (1 − α_t)·w + α_t·x with α_t = α·s(τ), once an arrival."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedasync.aggregation.model import Form
from fedasync.aggregation.update import Inputs, blocks
from fedasync.core.staleness import Constant, Hinge, Polynomial

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Mixing:
    """Mix each model into the current one, less if it is stale; α_t comes from the base α each time."""

    alpha: float = 0.6
    staleness: Callable[[int], float] = Constant()
    wants: Form = "parameters"

    def __post_init__(self) -> None:
        if not 0 < self.alpha <= 1:
            raise ValueError(f"fedasync: alpha must lie in (0, 1], got {self.alpha}")

    @property
    def stays_between(self) -> bool:
        """Weights in [0, 1] mix; a framework's own function may leave them."""
        return isinstance(self.staleness, Constant | Polynomial | Hinge)

    def init(self, values: Tensor) -> None:
        return None

    def apply(self, values: Tensor, state: None, inputs: Inputs, out: Tensor | None = None) -> None:
        import torch

        weights = [self.alpha * self.staleness(x.staleness) for x in inputs.entering]
        target = values if out is None else out
        for mixed, w, first, *others in blocks(target, values, *(x.values for x in inputs.entering)):
            torch.lerp(w, first, weights[0], out=mixed)
            for x, weight in zip(others, weights[1:], strict=True):
                mixed.lerp_(x, weight)
