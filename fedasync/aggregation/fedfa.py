"""FedFa (Xu et al., IJCAI 2024): w = mean of the last K client models, renewed at every arrival.

Weights are uniform: no sample counts, no staleness decay, no server learning rate.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedasync.aggregation.model import Form
from fedasync.aggregation.update import Inputs, blocks

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class WindowMean:
    """Mean of the window, by w ← w + (x_new − x_old)/K, which costs one pass whatever K is.

    The increments' rounding errors add up, so the mean is computed afresh every ``recompute_every`` versions
    (ours; the paper states only the mean).
    """

    recompute_every: int = 256
    wants: Form = "parameters"
    stays_between: bool = True

    def __post_init__(self) -> None:
        if self.recompute_every < 1:
            raise ValueError(f"fedfa: recompute_every must be an integer ≥ 1, got {self.recompute_every}")

    def init(self, values: Tensor) -> int:
        """Versions made since the mean was computed afresh."""
        return 0

    def apply(self, values: Tensor, state: int, inputs: Inputs, out: Tensor | None = None) -> int:
        import torch

        share = 1 / len(inputs.window)
        target = values if out is None else out
        slides = len(inputs.entering) == len(inputs.leaving) == 1
        if slides and share < 1 and state + 1 < self.recompute_every:
            entering, leaving = inputs.entering[0].values, inputs.leaving[0].values
            for mean, w, new, old in blocks(target, values, entering, leaving):
                # Where the result will lie: a temporary would push other blocks out of the cache.
                change = new - old if out is None else torch.sub(new, old, out=mean)
                torch.add(w, change, alpha=share, out=mean)
            return state + 1
        for mean, first, *others in blocks(target, *(x.values for x in inputs.window)):
            torch.mul(first, share, out=mean)
            for x in others:
                mean.add_(x, alpha=share)
        return 0
