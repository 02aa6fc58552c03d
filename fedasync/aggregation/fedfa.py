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

    def __post_init__(self) -> None:
        if self.recompute_every < 1:
            raise ValueError(f"fedfa: recompute_every must be an integer ≥ 1, got {self.recompute_every}")

    def init(self, values: Tensor) -> int:
        """Versions made since the mean was computed afresh."""
        return 0

    def apply(self, values: Tensor, state: int, inputs: Inputs) -> int:
        size = len(inputs.window)
        slides = len(inputs.entering) == len(inputs.leaving)
        if slides and size > 1 and state + 1 < self.recompute_every:
            for block in blocks(values.numel()):
                w = values[block]
                for new, old in zip(inputs.entering, inputs.leaving, strict=True):
                    w.add_(new.values[block] - old.values[block], alpha=1 / size)
            return state + 1
        for block in blocks(values.numel()):
            mean = values[block].zero_()
            for x in inputs.window:
                mean.add_(x.values[block], alpha=1 / size)
        return 0
