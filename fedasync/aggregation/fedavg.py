"""FedAvg (McMahan et al. 2017): w ← Σ (n_k / n)·x_k over the round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fedasync.aggregation.model import Form
from fedasync.aggregation.update import Inputs, blocks

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class SampleWeightedMean:
    """Mean of the round's models, weighted by their sample counts."""

    wants: Form = "parameters"

    def init(self, values: Tensor) -> None:
        return None

    def apply(self, values: Tensor, state: None, inputs: Inputs) -> None:
        total = sum(x.samples for x in inputs.entering)
        for block in blocks(values.numel()):
            mean = values[block].zero_()
            for x in inputs.entering:
                mean.add_(x.values[block], alpha=x.samples / total)
